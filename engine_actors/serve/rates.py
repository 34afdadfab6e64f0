"""Tokens per second for the status page, from the metrics' counters."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable

from engine_actors.engine_metrics import EngineMetrics

WINDOW_S = 5.0
"""Rates are means over about so long."""
MIN_GAP_S = 0.2


class Rates:
    """Samples the counters whenever it is asked, and divides by the time since the oldest sample in the window."""

    def __init__(self, engines: Iterable[EngineMetrics]) -> None:
        now = time.monotonic()
        self._samples = {
            id(engine): deque([(now, engine.num_prompt_tokens, engine.num_generated_tokens)]) for engine in engines
        }

    def of(self, engine: EngineMetrics) -> tuple[float, float]:
        """(prompt, generated) tokens per second."""
        samples = self._samples[id(engine)]
        now = time.monotonic()
        while len(samples) > 1 and now - samples[0][0] > WINDOW_S:
            samples.popleft()
        then, num_prompt, num_generated = samples[0]
        elapsed_s = max(now - then, MIN_GAP_S)
        if now - samples[-1][0] >= MIN_GAP_S:
            samples.append((now, engine.num_prompt_tokens, engine.num_generated_tokens))
        return (
            (engine.num_prompt_tokens - num_prompt) / elapsed_s,
            (engine.num_generated_tokens - num_generated) / elapsed_s,
        )
