"""Work in a thread beside an event loop: calls that block in Ray (for the Ray clients), and checks of requests that
compute for long (for `AsyncLLM`)."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")

SHORT_TURN_S = 0.0005
"""Of a thread that computes in Python. With the usual 5 ms the event loop waits so long each time that it comes back
from a system call, several times for each token it delivers."""


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


async def compute_beside_loop(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    """Await a function that computes in Python for up to a second, in a thread that leaves the loop its turns."""
    return await asyncio.to_thread(_in_short_turns, function, *args, **kwargs)


def _in_short_turns(function: Callable[..., T], /, *args: Any, **kwargs: Any) -> T:
    with _SHORT_TURNS.taken():
        return function(*args, **kwargs)


class _ShortTurns:
    """Shortens the interpreter's switch interval, which belongs to the process, while anybody needs it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_users = 0
        self._usual_s = 0.0

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        with self._lock:
            if self._num_users == 0:
                self._usual_s = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_s, SHORT_TURN_S))
            self._num_users += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_users -= 1
                if self._num_users == 0:
                    sys.setswitchinterval(self._usual_s)


_SHORT_TURNS = _ShortTurns()
