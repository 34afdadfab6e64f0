"""Engines over the fake executor, in this process and through actors."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine_actors.config import EngineConfig
from engine_actors.llm import LLM
from tests.fakes import FakeExecutor, write_model_dir


@pytest.fixture(scope="session")
def fake_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_dir(tmp_path_factory.mktemp("models") / "fake")


MakeConfig = Callable[..., EngineConfig]


@pytest.fixture(scope="session")
def fake_config(fake_model_dir: Path) -> MakeConfig:
    """EngineConfig over the fake executor: `fake_config(executor={"step_s": 0.1}, max_num_seqs=4)`."""

    def make(executor: dict[str, Any] | None = None, **options: Any) -> EngineConfig:
        executor_class = partial(FakeExecutor, **executor) if executor else FakeExecutor
        return EngineConfig.from_kwargs(str(fake_model_dir), executor_class=executor_class, **options)

    return make


@pytest.fixture
def llm(fake_model_dir: Path) -> Iterator[LLM]:
    """An LLM over the fake executor, all in this process."""
    with LLM(str(fake_model_dir), engine_core="inproc", executor_class=FakeExecutor) as engine:
        yield engine


async def until(condition: Callable[[], Any]) -> None:
    """Let the event loop turn until the condition holds; pytest's timeout is the limit."""
    while not condition():  # noqa: ASYNC110  what is waited for happens in another process
        await asyncio.sleep(0.001)
