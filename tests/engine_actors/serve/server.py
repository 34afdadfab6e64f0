"""The app under a real uvicorn on 127.0.0.1, in a thread of its own. Used by this folder's conftest."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn

from engine_actors.serve import ServedModel, ServerSettings, create_app
from tests.engine_actors.serve.fake_llm import FakeLLM

MAX_MODEL_LEN = 512
MODEL = "smollm2"
ALIAS = "smollm2-alias"
STARTUP_TIMEOUT_S = 60


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.ready.set()


class RunningServer:
    """A server and the engine behind it.

    Attributes:
        url: Without a path.
        llm: The fake engine: steer it from the test's thread; use `call` for what belongs to the server's event loop.
    """

    def __init__(self, url: str, model: ServedModel, app: Any, server: _Server) -> None:
        self.url = url
        self.model = model
        self.app = app
        self._server = server

    @property
    def llm(self) -> FakeLLM:
        assert isinstance(self.model.llm, FakeLLM)
        return self.model.llm

    def call(self, function: Callable[[], Any]) -> Any:
        """Run `function` on the server's event loop."""

        async def run() -> Any:
            return function()

        assert self._server.loop is not None
        return asyncio.run_coroutine_threadsafe(run(), self._server.loop).result(STARTUP_TIMEOUT_S)

    def hold(self) -> None:
        """From now on each token waits for `release`."""

        def close() -> None:
            self.llm.gate = asyncio.Semaphore(0)

        self.call(close)

    def release(self, num_tokens: int) -> None:
        """Let so many tokens through."""

        def open_gate() -> None:
            assert self.llm.gate is not None
            for _ in range(num_tokens):
                self.llm.gate.release()

        self.call(open_gate)


@contextmanager
def running(tokenizer: Any, settings: ServerSettings | None = None, **options: Any) -> Iterator[RunningServer]:
    """A server over a fake engine; gone after the block."""
    llm = FakeLLM(tokenizer, MAX_MODEL_LEN)
    names = options.pop("names", [MODEL, ALIAS])
    options = {"max_model_len": MAX_MODEL_LEN, "root": "models/smollm2", "cache_config": {"block_size": 16}, **options}
    model = ServedModel.build(names, llm, tokenizer, settings=settings, **options)
    with serving(model, settings) as server:
        yield server


@contextmanager
def serving(model: ServedModel, settings: ServerSettings | None = None) -> Iterator[RunningServer]:
    """A server over any engine."""
    app = create_app([model], settings)
    listener = socket.create_server(("127.0.0.1", 0))
    server = _Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=2))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        assert server.ready.wait(STARTUP_TIMEOUT_S)
        yield RunningServer(f"http://127.0.0.1:{listener.getsockname()[1]}", model, app, server)
    finally:
        server.should_exit = True
        thread.join(STARTUP_TIMEOUT_S)
        listener.close()
