"""Prometheus metrics of served engines, from their `EngineMetrics`, of HTTP and of this process.

One `ServerMetrics` per process renders /metrics. Figures are exposed under our own name (`engine_actors_…`) and, for
dashboards that exist, under vLLM's (`vllm:…`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from engine_actors.engine_metrics import COUNTERS, GAUGES, HISTOGRAMS, LATENCY_BUCKETS, EngineMetrics, Histogram

OWN_PREFIX = "engine_actors_"
VLLM_PREFIX = "vllm:"


class HttpMetrics:
    """Requests and their durations by route, whatever the model."""

    def __init__(self) -> None:
        self.requests: dict[tuple[str, str, str], int] = {}
        self.durations: dict[tuple[str, str], Histogram] = {}

    def observe(self, method: str, handler: str, status: int, duration_s: float) -> None:
        key = (method, handler, f"{status // 100}xx")
        self.requests[key] = self.requests.get(key, 0) + 1
        histogram = self.durations.get((method, handler))
        if histogram is None:
            histogram = self.durations[method, handler] = Histogram(LATENCY_BUCKETS)
        histogram.observe(duration_s)


class ServerMetrics(Collector):
    """What /metrics shows: the engines, HTTP, and this process.

    Args:
        vllm_names: Also expose the engines' figures under vLLM's names.
    """

    content_type = CONTENT_TYPE_LATEST

    def __init__(self, engines: Iterable[EngineMetrics], vllm_names: bool = True) -> None:
        self.engines = list(engines)
        self.http = HttpMetrics()
        self._prefixes = (OWN_PREFIX, VLLM_PREFIX) if vllm_names else (OWN_PREFIX,)
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    def render(self) -> bytes:
        """Prometheus text."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        for prefix in self._prefixes:
            yield from _engine_families(self.engines, prefix)
        yield from _http_families(self.http)


def _engine_families(engines: Sequence[EngineMetrics], prefix: str) -> Iterator[Metric]:
    labels = ("model_name", "engine")
    for name, text, value in GAUGES:
        gauge = GaugeMetricFamily(prefix + name, text, labels=labels)
        for engine in engines:
            gauge.add_metric(list(engine.labels.values()), value(engine))
        yield gauge
    for name, text, value in COUNTERS:
        counter = CounterMetricFamily(prefix + name, text, labels=labels)
        for engine in engines:
            counter.add_metric(list(engine.labels.values()), value(engine))
        yield counter
    for name, text, histogram_of in HISTOGRAMS:
        histogram = HistogramMetricFamily(prefix + name, text, labels=labels)
        for engine in engines:
            kept = histogram_of(engine)
            histogram.add_metric(list(engine.labels.values()), kept.cumulative(), kept.total)
        yield histogram
    success = CounterMetricFamily(prefix + "request_success", "Ended completions.", labels=(*labels, "finished_reason"))
    rejected = CounterMetricFamily(prefix + "admission_rejections", "Refused for load.", labels=(*labels, "reason"))
    for engine in engines:
        for reason, count in engine.finished.items():
            success.add_metric([*engine.labels.values(), reason], count)
        for reason, count in engine.rejected.items():
            rejected.add_metric([*engine.labels.values(), reason], count)
    yield success
    yield rejected
    facts = list(dict.fromkeys(name for engine in engines for name in engine.cache_config))
    if facts:
        info = GaugeMetricFamily(
            prefix + "cache_config_info", "Static facts of the KV cache.", labels=(*labels, *facts)
        )
        for engine in engines:
            info.add_metric([*engine.labels.values(), *(engine.cache_config.get(name, "") for name in facts)], 1)
        yield info


def _http_families(http: HttpMetrics) -> Iterator[Metric]:
    requests = CounterMetricFamily("http_requests", "HTTP requests.", labels=("method", "handler", "status"))
    for key, count in http.requests.items():
        requests.add_metric(list(key), count)
    yield requests
    durations = HistogramMetricFamily(
        "http_request_duration_seconds", "Whole duration of HTTP requests.", labels=("method", "handler")
    )
    for pair, histogram in http.durations.items():
        durations.add_metric(list(pair), histogram.cumulative(), histogram.total)
    yield durations
