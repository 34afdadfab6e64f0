"""What a new EngineCore is told of the old one's state."""

from __future__ import annotations

from typing import Any

import pytest

from engine_actors.lasting_utilities import LastingUtilities, UtilityCall

PAUSED = ("pause", ("keep",))


@pytest.mark.parametrize(
    ("done", "expected"),
    [
        ([], []),
        ([("collective_rpc", ("load_model",)), ("is_paused", ())], []),
        ([("pause", ("abort", True))], [PAUSED]),
        ([("pause", ()), ("resume", ())], []),
        ([("sleep", ())], [("sleep", (1, "keep"))]),
        ([("sleep", (0, "wait"))], [("sleep", (0, "keep"))]),
        ([("sleep", (2, "abort")), ("wake_up", (None,))], []),
        ([("sleep", (2, "abort")), ("wake_up", ())], []),
        ([("sleep", (2,)), ("wake_up", (["weights"],))], [("sleep", (2, "keep")), ("wake_up", (["weights"],))]),
        ([("sleep", (2,)), ("wake_up", (["weights"],)), ("wake_up", ("kv_cache",))], []),
        (
            [("sleep", (1,)), ("wake_up", (["weights"],)), ("wake_up", (None,)), ("sleep", (1,))],
            [("sleep", (1, "keep"))],
        ),
        ([("sleep", (0,)), ("wake_up", ("weights",))], [("sleep", (0, "keep")), ("wake_up", (["weights"],))]),
        ([("sleep", (0,)), ("wake_up", ("scheduling",))], []),
        ([("sleep", (1,)), ("pause", ())], [PAUSED, ("sleep", (1, "keep"))]),
        (
            [("update_config", ({"step_timeout_s": 9.0, "a": 1},)), ("update_config", ({"a": 2},))],
            [("update_config", ({"step_timeout_s": 9.0, "a": 2},))],
        ),
    ],
)
def test_calls_that_restore_what_was_done(done: list[UtilityCall], expected: list[UtilityCall]) -> None:
    lasting = LastingUtilities()
    for name, args in done:
        lasting.note(name, args, {})
    assert lasting.calls() == expected


@pytest.mark.parametrize(
    ("name", "kwargs", "expected"),
    [
        ("sleep", {"level": 2, "mode": "wait"}, [("sleep", (2, "keep"))]),
        ("update_config", {"overrides": {"a": 1}}, [("update_config", ({"a": 1},))]),
    ],
)
def test_keyword_arguments_count_too(name: str, kwargs: dict[str, Any], expected: list[UtilityCall]) -> None:
    lasting = LastingUtilities()
    lasting.note(name, (), kwargs)
    assert lasting.calls() == expected
