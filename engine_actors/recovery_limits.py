"""How often and how long recovery tries. Used by `core_recovery` (workers) and `ray_recovery` (EngineCore)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TypeVar

from engine_actors.config import EngineConfig
from executors.base import ExecutorFailedError

logger = logging.getLogger(__name__)

FRUITLESS_PER_ATTEMPT = 4
"""Recoveries in a row without progress that end the engine, as a multiple of max_recovery_attempts: enough for a few
requests that crash the engine to be found one after another."""

T = TypeVar("T")


class RecoveryFailedError(ExecutorFailedError):
    """Something failed and could not be replaced. The text has both causes."""


class RecoveryLimits:
    """`recovery_timeout_s` and `max_recovery_attempts` of one engine, and how often it recovered for nothing."""

    def __init__(self, config: EngineConfig) -> None:
        self._timeout_s = config.recovery_timeout_s
        self._attempts = config.max_recovery_attempts
        self._num_fruitless = 0

    def note_progress(self) -> None:
        """The engine did something since the last recovery."""
        self._num_fruitless = 0

    def check(self, error: Exception) -> None:
        """Before each recovery from `error`.

        Raises:
            RecoveryFailedError: There were too many without progress in between.
        """
        self._num_fruitless += 1
        limit = FRUITLESS_PER_ATTEMPT * self._attempts
        if self._num_fruitless > limit:
            raise RecoveryFailedError(f"{error}; this was failure {limit + 1} without progress in between")

    def try_start(self, error: Exception, what: str, start: Callable[[float], T]) -> T:
        """`start(seconds left)`, tried again when it raises. Blocks.

        Args:
            error: Why it must be started.
            what: Is started, for texts.

        Raises:
            RecoveryFailedError: The attempts or the time are used up.
        """
        began_s = time.monotonic()
        deadline_s = began_s + self._timeout_s
        attempt = 1
        while True:
            try:
                return start(max(1.0, deadline_s - time.monotonic()))
            except Exception as failure:
                if attempt == self._attempts or time.monotonic() >= deadline_s:
                    raise RecoveryFailedError(
                        f"{error}; {what} could not be started in its place, {attempt} times in "
                        f"{time.monotonic() - began_s:.0f} s (max_recovery_attempts {self._attempts}, "
                        f"recovery_timeout_s {self._timeout_s:g}): {failure}"
                    ) from failure
                logger.warning("Start %d of %d of %s failed: %s", attempt, self._attempts, what, failure)
                attempt += 1
