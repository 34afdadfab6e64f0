"""What `pause`, `sleep` and `update_config` have made of an EngineCore, so that the next can be made the same.

Kept by `ray_recovery.CoreRecovery`, which hears of every utility that has succeeded.
"""

from __future__ import annotations

from typing import Any

from engine_actors.core_utilities import UtilityCall


class LastingUtilities:
    """The engine's state as its client has set it. Follows `core_utilities.CoreUtilities`."""

    def __init__(self) -> None:
        self._options: dict[str, Any] = {}
        self._is_paused = False
        self._sleep_level: int | None = None
        self._woken: set[str] = set()

    def note(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A utility has been run without an error."""
        first: Any = args[0] if args else next(iter(kwargs.values()), None)
        match name:
            case "update_config":
                self._options.update(first)
            case "pause":
                self._is_paused = True
            case "resume":
                self._is_paused = False
            case "sleep":
                level = args[0] if args else kwargs.get("level", 1)
                if level != self._sleep_level:
                    self._sleep_level, self._woken = level, set()
            case "wake_up":
                self._wake(first)

    def _wake(self, tags: Any) -> None:
        if tags is None:
            self._sleep_level = None
        elif self._sleep_level is not None:
            self._woken.update([tags] if isinstance(tags, str) else tags)
            needed = {"weights", "kv_cache"} if self._sleep_level > 0 else {"scheduling"}
            if needed <= self._woken:
                self._sleep_level = None

    def calls(self) -> list[UtilityCall]:
        """For the start of a new EngineCore (`CoreUtilities.restore`)."""
        calls: list[UtilityCall] = []
        if self._options:
            calls.append(("update_config", (dict(self._options),)))
        if self._is_paused:
            calls.append(("pause", ("keep",)))
        if self._sleep_level is not None:
            calls.append(("sleep", (self._sleep_level, "keep")))
            if self._woken:
                calls.append(("wake_up", (sorted(self._woken),)))
        return calls
