"""Python code in threads beside an event loop: the loop gets its turns, and what was set is set back."""

from __future__ import annotations

import asyncio
import sys
import threading

import pytest

from engine_actors.off_loop import SHORT_TURN_S, compute_beside_loop


async def test_turns_are_short_while_anything_computes_and_usual_afterwards() -> None:
    usual = sys.getswitchinterval()
    begun, release = threading.Event(), threading.Event()

    def compute() -> bool:
        begun.set()
        return release.wait(60.0)

    first = asyncio.create_task(compute_beside_loop(compute))
    await asyncio.to_thread(begun.wait, 60.0)
    assert await compute_beside_loop(sys.getswitchinterval) == pytest.approx(SHORT_TURN_S)
    assert sys.getswitchinterval() == pytest.approx(SHORT_TURN_S)
    release.set()
    assert await first
    assert sys.getswitchinterval() == pytest.approx(usual)


async def test_what_the_function_raises_is_raised_and_the_turns_are_as_usual() -> None:
    usual = sys.getswitchinterval()
    with pytest.raises(ValueError, match="invalid literal"):
        await compute_beside_loop(int, "no number")
    assert sys.getswitchinterval() == pytest.approx(usual)
