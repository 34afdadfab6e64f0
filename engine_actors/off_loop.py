"""Calls that block in Ray, made in a thread beside an event loop. Used by the Ray clients."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from concurrent.futures import Future
from typing import Any


def off_loop(function: Any, *args: Any) -> Any:
    """Call a function that blocks in Ray; in a thread if this one runs an event loop, about which Ray would warn."""
    if asyncio._get_running_loop() is None:
        return function(*args)
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(function(*args))
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=run, name="engine-actors-wait", daemon=True).start()
    return done.result()


async def off_loop_async(function: Any, *args: Any) -> Any:
    """Await a function that blocks in Ray. Its thread, unlike those of `asyncio.to_thread`, holds up no exit."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)

    def run() -> None:
        result, failure = None, None
        try:
            result = function(*args)
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=run, name="engine-actors-recovery", daemon=True).start()
    return await done
