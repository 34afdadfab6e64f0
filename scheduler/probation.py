"""Which requests may be the reason that workers, or a whole engine, crashed; they are tried one at a time.

Used by `scheduler.scheduler` (a worker died) and `engine_actors.replay` (EngineCore died). A crash says little: the
machine may be to blame. A request that was part of two crashes without getting a token in between is tried alone, and
if the engine crashes with it again and again, it was the request.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

CRASHES_BEFORE_TRIAL = 2
CRASHES_ALONE = 2
"""Alone in the engine a request must have crashed it this often, ..."""
CRASHES = 3
"""... and this often in all, so that its replay has crashed the engine twice."""


@dataclass(slots=True)
class _Record:
    crashes: int = 0
    alone: int = 0

    @property
    def is_proof(self) -> bool:
        return self.alone >= CRASHES_ALONE and self.crashes >= CRASHES


class Probation:
    """Crashes by request id, since the request's last progress. Empty, and false, in an engine that is well."""

    def __init__(self) -> None:
        self._records: dict[str, _Record] = {}

    def __bool__(self) -> bool:
        return bool(self._records)

    @property
    def trial(self) -> str | None:
        """The request that must run alone now; None when all may run."""
        suspects = (name for name, record in self._records.items() if record.crashes >= CRASHES_BEFORE_TRIAL)
        return next(suspects, None)

    def crash(self, involved: Collection[str]) -> str | None:
        """Count a crash.

        Args:
            involved: The requests that were being computed.

        Returns:
            The request that is to blame, if that is proved; it is forgotten.
        """
        for request_id in involved:
            record = self._records.setdefault(request_id, _Record())
            record.crashes += 1
            record.alone += len(involved) == 1
            if record.is_proof:
                del self._records[request_id]
                return request_id
        return None

    def clear(self, request_id: str) -> None:
        """It got a token, or ended."""
        self._records.pop(request_id, None)
