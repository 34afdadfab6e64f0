"""Fixtures shared by all tests: one Ray instance per session, the demo model, and small random models."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# The same examples in every run, so that a change is judged by what it changed.
settings.register_profile("tests", derandomize=True)
settings.load_profile("tests")

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Idle workers kept ready by Ray cost memory and start-up time that small tests do not earn back.
os.environ.setdefault("RAY_enable_worker_prestart", "0")

RAY_CPUS = 8
"""Logical CPUs of the test cluster: more than the machine's, so that four workers fit on two cores."""


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """The one Ray instance of the session."""
    import ray

    ray.init("local", num_cpus=RAY_CPUS, include_dashboard=False, log_to_driver=False, namespace="tests")
    yield
    ray.shutdown()


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_interrupts() -> Iterator[None]:
    """Shells start background jobs with SIGINT ignored; tests that send it need Python's own handler."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face directory, fetched on first use."""
    from engine_actors.fetch_model import fetch_model

    return fetch_model("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def random_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small float32 Llama with random weights and a byte-level tokenizer of 512 tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.fakes import CONFIG, byte_level_tokenizer

    folder = tmp_path_factory.mktemp("models") / "random-llama"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**CONFIG)).save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder
