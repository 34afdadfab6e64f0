"""An engine's figures through ray.util.metrics, for Ray's Prometheus endpoint and dashboards. Used by deployment.py.

Ray allows no ":" in names and puts "ray_" before them: `vllm:num_requests_running` becomes
`ray_vllm_num_requests_running`, as ray.serve.llm's dashboards expect. Figures are sent every second. Ray takes
histograms value by value, here and once more in its agent: those that every token adds to are sampled for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from ray.util.metrics import Counter, Gauge, Histogram

from engine_actors.engine_metrics import COUNTERS, GAUGES, HISTOGRAMS, EngineMetrics

EXPORT_PERIOD_S = 1.0
SAMPLED = {"inter_token_latency_seconds": 8}
"""Histograms of which one in so many observations is sent: shares and quantiles are true, counts are not."""
TAGS = ("model_name", "engine")
PREFIXES = ("engine_actors_", "vllm_")


class RayMetricsExporter:
    """Sends one EngineMetrics. `start` on the event loop that feeds it, `stop` at the end.

    Args:
        metrics: Read once a second.
        vllm_names: Also send everything under vLLM's names.
    """

    def __init__(self, metrics: EngineMetrics, vllm_names: bool = True) -> None:
        self._metrics = metrics
        self._task: asyncio.Task[None] | None = None
        self._prefixes = PREFIXES if vllm_names else PREFIXES[:1]
        self._gauges = [(self._make(Gauge, name, text), value) for name, text, value in GAUGES]
        self._counters = [_Deltas(self._make(Counter, f"{name}_total", text), value) for name, text, value in COUNTERS]
        self._histograms = []
        for name, text, histogram_of in HISTOGRAMS:
            kept = histogram_of(metrics)
            kept.unsent = []
            made = self._make(Histogram, name, text, boundaries=list(kept.bounds))
            self._histograms.append((made, kept, _Sampler(SAMPLED.get(name, 1))))
        tags = (*TAGS, "finished_reason")
        self._finished = self._make(Counter, "request_success_total", "Ended completions.", tag_keys=tags)
        self._finished_sent: dict[str, int] = {}

    def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(), name="engine-actors-ray-metrics")

    def stop(self) -> None:
        """Send the last figures, and no more."""
        if self._task is not None:
            self._task.cancel()
            self.send()

    def send(self) -> None:
        """Bring Ray's figures up to date."""
        for gauges, value in self._gauges:
            for gauge in gauges:
                gauge.set(value(self._metrics))
        for deltas in self._counters:
            deltas.send(self._metrics)
        for histograms, kept, sampler in self._histograms:
            unsent, kept.unsent = kept.unsent or [], []
            for observed, count in unsent:
                for _ in range(sampler.take(count)):
                    for histogram in histograms:
                        histogram.observe(observed)
        for reason, count in self._metrics.finished.items():
            new = count - self._finished_sent.get(reason, 0)
            if new:
                self._finished_sent[reason] = count
                for counter in self._finished:
                    counter.inc(new, tags={"finished_reason": reason})

    async def _run(self) -> None:
        while True:
            self.send()
            await asyncio.sleep(EXPORT_PERIOD_S)

    def _make(self, kind: type[Any], name: str, text: str, **options: Any) -> list[Any]:
        """One metric under each prefix."""
        options.setdefault("tag_keys", TAGS)
        made = [kind(prefix + name, text, **options) for prefix in self._prefixes]
        for metric in made:
            metric.set_default_tags(_tags(self._metrics.labels))
        return made


class _Sampler:
    """Every `interval`-th of what passes, evenly."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._num_left = 0

    def take(self, count: int) -> int:
        """How many of the next `count` are in the sample."""
        taken, self._num_left = divmod(self._num_left + count, self._interval)
        return taken


class _Deltas:
    """Counters that follow a running total."""

    def __init__(self, counters: list[Any], value: Callable[[EngineMetrics], float]) -> None:
        self._counters = counters
        self._value = value
        self._sent = 0.0

    def send(self, metrics: EngineMetrics) -> None:
        new = self._value(metrics) - self._sent
        if new > 0:
            self._sent += new
            for counter in self._counters:
                counter.inc(new)


def _tags(labels: Mapping[str, str]) -> dict[str, str]:
    return {name: labels[name] for name in TAGS}
