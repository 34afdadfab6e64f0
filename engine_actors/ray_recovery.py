"""A new EngineCore actor in place of one that died. Used by both Ray clients with `recovery="replay"`."""

from __future__ import annotations

import logging
import time
from dataclasses import replace

from engine_actors.config import EngineConfig
from engine_actors.core import CoreInfo
from engine_actors.errors import EngineDeadError
from engine_actors.lasting_utilities import LastingUtilities
from engine_actors.messages import RecoveryNotice
from engine_actors.ray_core_link import CoreLink
from engine_actors.recovery_limits import RecoveryFailedError, RecoveryLimits
from engine_actors.replay import RecoveryStats, ReplayLog
from executors.config import ModelConfig
from scheduler.output import EngineCoreOutputs
from scheduler.request import EngineCoreRequest

logger = logging.getLogger(__name__)


class CoreRecovery:
    """What a client keeps for the death of its EngineCore.

    Attributes:
        log: Every unfinished request.
        lasting: What utilities have made of the engine, for the next EngineCore.
        stats: What recoveries cost so far; those of workers, which EngineCore tells of, included.
    """

    def __init__(self, config: EngineConfig, info: CoreInfo, stats: RecoveryStats) -> None:
        # What was settled stays: requests were checked against it.
        self._config = replace(
            config.with_max_model_len(info.max_model_len),
            model_config=_with_settled_length(config.model_config, info.max_model_len),
            parallel_config=replace(config.parallel_config, wait_for_nodes=True),
        )
        self.log = ReplayLog()
        self.lasting = LastingUtilities()
        self.stats = stats
        self._limits = RecoveryLimits(config)

    def note_outputs(self, outputs: EngineCoreOutputs) -> list[EngineCoreRequest]:
        """Take in what EngineCore sent. Returns requests to be sent now that were held back."""
        self._limits.note_progress()
        return self.log.note(outputs)

    def start_core(self, dead: CoreLink) -> CoreLink:
        """A new EngineCore in place of a dead one. Blocks; touches nothing that the event loop uses.

        Raises:
            EngineDeadError: It cannot be had; the text has both causes.
        """
        error = dead.dead_error or EngineDeadError("EngineCore is dead")
        self.stats.begin()
        try:
            self._limits.check(error)
            logger.warning("EngineCore failed; another is started and requests replayed. The cause: %s", error)
            return self._limits.try_start(error, "another EngineCore", self._start_core)
        except RecoveryFailedError as failure:
            self.stats.since_s = None
            raise EngineDeadError(str(failure)) from failure

    def _start_core(self, timeout_s: float) -> CoreLink:
        parallel_config = replace(self._config.parallel_config, startup_timeout_s=timeout_s)
        return CoreLink(replace(self._config, parallel_config=parallel_config), calls=self.lasting.calls())

    def replay(self, dead: CoreLink) -> tuple[list[EngineCoreRequest], EngineCoreOutputs | None]:
        """The new EngineCore is there. Returns what to send to it, and the ends it will not report, if any."""
        cause = str(dead.dead_error)
        requests, ends = self.log.replay(cause)
        lost_s = time.monotonic() - (self.stats.since_s or time.monotonic())
        self.stats.end(cause, lost_s)
        logger.warning("Recovered in %.1f s; %d requests go on", lost_s, len(self.log))
        return requests, EngineCoreOutputs(finished=ends) if ends else None


def note_worker_recoveries(stats: RecoveryStats, notices: list[RecoveryNotice]) -> None:
    """EngineCore has replaced its workers."""
    for notice in notices:
        stats.end(notice.cause, notice.lost_s)
        logger.warning(
            "The engine lost its workers and recovered in %.1f s; %d requests go on. The cause: %s",
            notice.lost_s,
            notice.num_replayed,
            notice.cause,
        )


def _with_settled_length(config: ModelConfig, max_model_len: int) -> ModelConfig:
    """The same, but -1 (as long as memory allows) shall not be settled again."""
    return replace(config, max_model_len=max_model_len) if config.max_model_len == -1 else config
