"""Settings of the executor tests, and the small random Llama that the tests of executors run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.executors.step_driver import save_tiny_llama


@pytest.fixture(scope="package", autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _one_torch_thread(_threads_restored: None) -> None:
    """Tiny tensors gain nothing from threads, and lose a tenfold where other processes want the same cores.

    Set only where a test changed it: changing the number costs more than most of these tests.
    """
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny_llama"))
