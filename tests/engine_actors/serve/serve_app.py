"""An application on Ray Serve for tests, and what tests ask of it over HTTP."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

WAIT_S = 120


def llm_config(model: Path, model_id: str = "tiny", **fields: Any) -> dict[str, Any]:
    """A small model's entry of llm_configs."""
    engine = {"max_model_len": 256, "num_gpu_blocks_override": 128, **fields.pop("engine_kwargs", {})}
    deployment = {"health_check_period_s": 0.5, **fields.pop("deployment_config", {})}
    loading = {"model_id": model_id, "model_source": str(model), **fields.pop("model_loading_config", {})}
    return {
        "model_loading_config": loading,
        "engine_kwargs": engine,
        "deployment_config": deployment,
        **fields,
    }


@contextmanager
def running_app(name: str, configs: list[dict[str, Any]], port: int) -> Iterator[Any]:
    """The application's handle, while it runs at "/{name}"."""
    from ray import serve

    from engine_actors.serve import build_openai_app

    try:
        yield serve.run(build_openai_app({"llm_configs": configs}), name=name, route_prefix=f"/{name}")
    finally:
        serve.delete(name)


def gauge(http: httpx.Client, name: str) -> float:
    lines = http.get("metrics").text.splitlines()
    return float(next(line.rsplit(" ", 1)[1] for line in lines if line.startswith(f"vllm:{name}{{")))


def wait_for(condition: Callable[[], bool], what: str) -> None:
    """Poll until it holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)
