"""What goes wrong with one request ends it alone, with an error that says what, and changes nobody else's tokens."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_actors import LLM, RequestFailedError, SamplingParams
from tests.fakes import CONFIG

BAD_TOKEN = 77
PROMPTS = [[5, 6, 7], [9] * 20, [100, 101], [44, 45, 46, 47]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PARAMS = [
    GREEDY,
    SamplingParams(temperature=1.0, seed=1, max_tokens=16, ignore_eos=True),
    SamplingParams(temperature=1.0, top_k=20, seed=2, max_tokens=16, ignore_eos=True, logprobs=2),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, max_tokens=16, ignore_eos=True),
]
ALLOWED = [token for token in range(2, 500) if token != BAD_TOKEN]
OPTIONS: dict[str, Any] = {
    "num_gpu_blocks_override": 200,
    "torch_num_threads": 1,
    "num_cpus_per_worker": 1,
    "skip_tokenizer_init": True,
    "logits_processors": ["tests.system.custom_processors.Faulty"],
}
INPROC: dict[str, Any] = {"engine_core": "inproc", "distributed_executor_backend": "uni"}


@pytest.fixture(scope="module")
def poisoned_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose activations overflow on one token."""
    folder = tmp_path_factory.mktemp("models") / "poisoned"
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**{**CONFIG, "tie_word_embeddings": False}))
    model.model.embed_tokens.weight.data[BAD_TOKEN] = float("nan")
    model.save_pretrained(folder)
    return folder


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({**INPROC, "dtype": "float32"}, id="float32"),
        pytest.param({**INPROC, "dtype": "bfloat16"}, id="bfloat16"),
        pytest.param({"dtype": "float32", "tensor_parallel_size": 2}, id="tp2-async", marks=pytest.mark.ray),
        pytest.param({"dtype": "float32", "pipeline_parallel_size": 2}, id="pp2", marks=pytest.mark.ray),
    ],
)
def llm(request: pytest.FixtureRequest, poisoned_dir: Path) -> Iterator[LLM]:
    if "tensor_parallel_size" in request.param or "pipeline_parallel_size" in request.param:
        request.getfixturevalue("ray_cluster")
    with LLM(str(poisoned_dir), **OPTIONS, **request.param) as engine:
        yield engine


def generate(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    return llm.generate(prompts, [p.clone(allowed_token_ids=ALLOWED) for p in params], use_tqdm=False)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    assert all(output.error is None for output in outputs), outputs
    return [output.outputs[0].token_ids for output in outputs]


def test_request_whose_logits_are_no_numbers_ends_alone(llm: LLM) -> None:
    expected = tokens_of(generate(llm, PROMPTS, PARAMS))
    bad = [[5, BAD_TOKEN], [BAD_TOKEN] * 3, [6, BAD_TOKEN, 8], [3, BAD_TOKEN]]
    mixed = [prompt for pair in zip(PROMPTS, bad, strict=True) for prompt in pair]
    params = [p for p in PARAMS for _ in range(2)]
    outputs = generate(llm, mixed, params)
    assert tokens_of(outputs[::2]) == expected
    for output in outputs[1::2]:
        assert isinstance(output.error, RequestFailedError)
        assert "its logits are not numbers" in str(output.error)
        assert output.outputs[0].finish_reason == "error"
    # The plain greedy path, which computes no logits, too.
    good, failed = llm.generate([[5, 6, 7], [5, BAD_TOKEN]], GREEDY.clone(max_tokens=1), use_tqdm=False)
    assert good.error is None
    assert "its logits are not numbers" in str(failed.error)
    assert llm.reset_prefix_cache()
    assert tokens_of(generate(llm, PROMPTS, PARAMS)) == expected


@pytest.mark.parametrize(
    ("faulty", "text"), [("set_row", "KeyError: 'no such thing'"), (5, "ZeroDivisionError: in the")]
)
def test_logits_processor_that_raises_ends_those_that_use_it(llm: LLM, faulty: Any, text: str) -> None:
    expected = tokens_of(generate(llm, PROMPTS, PARAMS))
    params = [p.clone(extra_args={"faulty": faulty}) if i in (1, 3) else p for i, p in enumerate(PARAMS)]
    outputs = generate(llm, PROMPTS, params)
    assert tokens_of(outputs[::2]) == expected[::2]
    for output, before in zip(outputs[1::2], expected[1::2], strict=True):
        assert isinstance(output.error, RequestFailedError)
        assert f"the logits processor tests.system.custom_processors.Faulty failed: {text}" in str(output.error)
        assert output.outputs[0].token_ids == before[: 0 if faulty == "set_row" else 5]
    assert tokens_of(generate(llm, PROMPTS, PARAMS)) == expected
