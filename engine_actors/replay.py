"""What a client of an EngineCore actor keeps so that a new EngineCore can go on where a dead one stopped.

Used by the Ray clients with `recovery="replay"`. Sampling is a pure function of seed and position, so a request that is
sent again with the tokens it had continues with the tokens it would have had.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from scheduler.output import EngineCoreOutputs, FinishedRequest, FinishReason, pack_int32
from scheduler.probation import Probation
from scheduler.request import EngineCoreRequest


@dataclass(slots=True)
class RecoveryStats:
    """What recoveries cost so far, as a client sees it.

    Attributes:
        recoveries: Failures that were repaired, of workers and of EngineCore.
        lost_s: Seconds from the failures until requests ran again.
        last_cause: Of the latest.
        since_s: `time.monotonic()` when a new EngineCore began to be started; None at other times. Recoveries of
            workers are told when they are done; `HealthReport.state` shows them under way.
    """

    recoveries: int = 0
    lost_s: float = 0.0
    last_cause: str | None = None
    since_s: float | None = None

    def begin(self) -> None:
        if self.since_s is None:
            self.since_s = time.monotonic()

    def end(self, cause: str, lost_s: float) -> None:
        self.recoveries += 1
        self.lost_s += lost_s
        self.last_cause = cause
        self.since_s = None


@dataclass(slots=True)
class _Unfinished:
    request: EngineCoreRequest
    token_ids: array[int] = field(default_factory=lambda: array("i"))
    is_aborted: bool = False


class ReplayLog:
    """Every unfinished request of a client, with the tokens it has got. Not thread-safe."""

    def __init__(self) -> None:
        self._unfinished: dict[str, _Unfinished] = {}
        self._held: dict[str, None] = {}
        self._probation = Probation()

    def __len__(self) -> int:
        return len(self._unfinished)

    def add(self, requests: Sequence[EngineCoreRequest]) -> list[EngineCoreRequest]:
        """Note requests. Returns those to be sent now: none while one is on trial."""
        for request in requests:
            self._unfinished[request.request_id] = _Unfinished(request)
        if self._probation.trial is None:
            return list(requests)
        self._held.update(dict.fromkeys(request.request_id for request in requests))
        return []

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Note that nobody wants these any more. Returns those whose end EngineCore must be asked for."""
        sent = []
        for request_id in request_ids:
            if request_id in self._unfinished:
                self._unfinished[request_id].is_aborted = True
            if request_id not in self._held:
                sent.append(request_id)
        return sent

    def note(self, outputs: EngineCoreOutputs) -> list[EngineCoreRequest]:
        """Take in what EngineCore sent. Returns held requests that may be sent now."""
        position = 0
        for index, request_id in enumerate(outputs.request_ids):
            end = position + (outputs.num_tokens[index] if outputs.num_tokens else 1)
            entry = self._unfinished.get(request_id)
            if entry is not None:
                entry.token_ids.extend(outputs.token_ids[position:end])
            position = end
        for ended in outputs.finished:
            self._unfinished.pop(ended.request_id, None)
        if not self._probation:
            return []
        for request_id in [*outputs.request_ids, *(ended.request_id for ended in outputs.finished)]:
            self._probation.clear(request_id)
        return self._release()

    def take_aborted_held(self) -> list[FinishedRequest]:
        """The ends of aborted requests that EngineCore never heard of."""
        ends = []
        for request_id in list(self._held):
            if self._unfinished[request_id].is_aborted:
                ends.append(FinishedRequest(request_id, FinishReason.ABORT))
                self._forget(request_id)
        return ends

    def replay(self, cause: str) -> tuple[list[EngineCoreRequest], list[FinishedRequest]]:
        """EngineCore died. Returns what to send to the next one, and the ends that it will not report.

        A request that was found to crash EngineCore (see `scheduler.probation`) ends with an error.
        """
        was_sent = [request_id for request_id in self._unfinished if request_id not in self._held]
        culprit = self._probation.crash(was_sent)
        ends = []
        for request_id, entry in list(self._unfinished.items()):
            if entry.is_aborted:
                ends.append(FinishedRequest(request_id, FinishReason.ABORT))
            elif request_id == culprit:
                error = f"EngineCore dies whenever it has this request: {cause}"
                ends.append(FinishedRequest(request_id, FinishReason.ERROR, error=error))
            else:
                continue
            self._forget(request_id)
        self._held = dict.fromkeys(self._unfinished)
        return self._release(), ends

    def _release(self) -> list[EngineCoreRequest]:
        """Of the held requests the one on trial, or all."""
        trial = self._probation.trial
        ready = list(self._held) if trial is None else [trial] if trial in self._held else []
        for request_id in ready:
            del self._held[request_id]
        return [self._continued(self._unfinished[request_id]) for request_id in ready]

    def _forget(self, request_id: str) -> None:
        del self._unfinished[request_id]
        self._held.pop(request_id, None)
        self._probation.clear(request_id)

    @staticmethod
    def _continued(entry: _Unfinished) -> EngineCoreRequest:
        return msgspec.structs.replace(entry.request, output_token_ids=pack_int32(entry.token_ids))
