"""Which requests may be the reason that workers, or a whole engine, crashed; they are tried one at a time.

Used by `scheduler.scheduler` (a worker died) and `engine_actors.replay` (EngineCore died). One crash says nothing: the
machine may be to blame. A request that was part of two crashes without getting a token in between is tried alone, and
if the engine crashes then, it was the request.
"""

from __future__ import annotations

from collections.abc import Collection

CRASHES_BEFORE_TRIAL = 2


class Probation:
    """Crashes by request id, since the request's last progress. Empty, and false, in an engine that is well."""

    def __init__(self) -> None:
        self._crashes: dict[str, int] = {}

    def __bool__(self) -> bool:
        return bool(self._crashes)

    @property
    def trial(self) -> str | None:
        """The request that must run alone now; None when all may run."""
        return next((name for name, count in self._crashes.items() if count >= CRASHES_BEFORE_TRIAL), None)

    def crash(self, involved: Collection[str]) -> str | None:
        """Count a crash.

        Args:
            involved: The requests that were being computed.

        Returns:
            The request that is to blame, if it was on trial; it is forgotten.
        """
        trial = self.trial
        if trial is not None and trial in involved:
            del self._crashes[trial]
            return trial
        for request_id in involved:
            self._crashes[request_id] = self._crashes.get(request_id, 0) + 1
        return None

    def clear(self, request_id: str) -> None:
        """It got a token, or ended."""
        self._crashes.pop(request_id, None)
