"""SIGTERM to an asyncio actor's process. Used by EngineCoreActor and the Engine actor.

Ray's own handler lets the calls under way end and then leaves, however long they take, and tells the actor last of
all. An engine aborts or drains what is under way, so it must hear at once; Ray then finds nothing to wait for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import ray._private.worker

logger = logging.getLogger(__name__)

RAISE_EXIT = "raise_sys_exit_with_custom_error_message"


def on_sigterm(callback: Callable[[], object]) -> None:
    """Have the running event loop call `callback` when this actor's process gets SIGTERM.

    Signal handlers can be set in the main thread alone, which is Ray's, and Ray has no way to add one. So what its
    handler calls to end the process is wrapped: `RAISE_EXIT`, which this module's users call for no other purpose.
    """
    loop = asyncio.get_running_loop()
    raise_exit = getattr(ray._private.worker, RAISE_EXIT, None)
    if raise_exit is None:
        logger.warning("Ray %s: SIGTERM waits for the requests in flight, whatever shutdown_timeout_s", ray.__version__)
        return

    def told(*args: Any, **kwargs: Any) -> Any:
        with contextlib.suppress(RuntimeError):  # the loop has closed
            loop.call_soon_threadsafe(callback)
        return raise_exit(*args, **kwargs)

    setattr(ray._private.worker, RAISE_EXIT, told)
