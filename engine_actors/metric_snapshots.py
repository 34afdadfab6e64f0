"""What `LLM.get_metrics` returns: the engine's figures at one moment, under vLLM's names and in its shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from engine_actors.engine_metrics import COUNTERS, GAUGES, HISTOGRAMS, EngineMetrics

PREFIX = "vllm:"


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure.

    Attributes:
        name: As on vLLM's dashboards, without "_total".
        labels: model_name and engine, and what tells figures of one name apart.
    """

    name: str
    labels: dict[str, str]


@dataclass(frozen=True, slots=True)
class Counter(Metric):
    """It only grows."""

    value: float


@dataclass(frozen=True, slots=True)
class Gauge(Metric):
    """It goes up and down."""

    value: float


@dataclass(frozen=True, slots=True)
class Histogram(Metric):
    """Observations so far.

    Attributes:
        count, sum: Of all observations.
        buckets: Upper bound → how many observations were at most that.
    """

    count: int
    sum: float
    buckets: dict[str, int]


def snapshots(metrics: EngineMetrics) -> list[Metric]:
    """All figures as they are now."""
    return list(_snapshots(metrics))


def _snapshots(metrics: EngineMetrics) -> Iterator[Metric]:
    labels = metrics.labels
    for name, _, value in GAUGES:
        yield Gauge(PREFIX + name, dict(labels), value(metrics))
    for name, _, value in COUNTERS:
        yield Counter(PREFIX + name, dict(labels), value(metrics))
    for reason, count in metrics.finished.items():
        yield Counter(PREFIX + "request_success", {**labels, "finished_reason": reason}, count)
    for name, _, histogram_of in HISTOGRAMS:
        kept = histogram_of(metrics)
        buckets = {bound: int(count) for bound, count in kept.cumulative()}
        yield Histogram(PREFIX + name, dict(labels), buckets["+Inf"], kept.total, buckets)
