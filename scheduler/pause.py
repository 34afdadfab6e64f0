"""The gate that `Scheduler.pause` closes: who arrived since, and whether those before go on. Owned by Scheduler."""

from __future__ import annotations

import enum

from scheduler.request import Request


class PauseMode(enum.Enum):
    """What becomes of requests in flight when the scheduler pauses. Those that arrive meanwhile wait, in every mode."""

    ABORT = "abort"
    """They end now, with what they have."""
    WAIT = "wait"
    """They run on to their ends."""
    KEEP = "keep"
    """They stay where they are, KV included, and go on after the pause."""

    @classmethod
    def parse(cls, value: object) -> PauseMode:
        """
        Raises:
            ValueError: It is none of them.
        """
        modes = [mode.value for mode in cls]
        if isinstance(value, cls):
            return value
        if value not in modes:
            raise ValueError(f"mode must be one of {', '.join(map(repr, modes))}, got {value!r}")
        return cls(value)


class PauseGate:
    """Open at first.

    Attributes:
        is_closed: The scheduler is paused: arrivals are held.
        is_frozen: Nothing at all is scheduled.
        held: Requests that arrived since, in order, by id. They are in no queue.
    """

    def __init__(self) -> None:
        self.is_closed = False
        self.is_frozen = False
        self.held: dict[str, Request] = {}

    def close(self, *, frozen: bool) -> None:
        self.is_closed, self.is_frozen = True, frozen

    def open(self) -> list[Request]:
        """Returns those that were held."""
        self.is_closed = self.is_frozen = False
        held, self.held = list(self.held.values()), {}
        return held
