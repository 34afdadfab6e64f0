"""Figures of one served engine, fed with RequestOutputs and SchedulerStats: `EngineMetrics`, and what it offers.

Shown by `metrics` (Prometheus), `serve.ray_metrics` (Ray) and `metric_snapshots` (`LLM.get_metrics`). Plain Python
without locks, for one thread: a token costs well under a microsecond.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from engine_actors.outputs import RequestOutput
from engine_actors.replay import RecoveryStats
from scheduler.output import SchedulerStats

FINISH_REASONS = ("stop", "length", "abort", "error")

TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0,
                80.0, 160.0, 640.0, 2560.0)  # fmt: skip
TOKEN_TIME_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
                      40.0, 80.0)  # fmt: skip
FINE_TOKEN_TIME_BUCKETS = (0.001, 0.0025, 0.005, *TOKEN_TIME_BUCKETS)
"""vLLM's begin at 10 ms, which small models beat; more buckets do not disturb a dashboard."""
LATENCY_BUCKETS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
                   480.0, 960.0, 1920.0, 7680.0)  # fmt: skip
ITERATION_BUCKETS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def token_count_buckets(max_model_len: int) -> tuple[int, ...]:
    """1, 2, 5, 10, … up to the context length."""
    buckets: list[int] = []
    scale = 1
    while True:
        for digit in (1, 2, 5):
            if digit * scale > max_model_len:
                return tuple(buckets)
            buckets.append(digit * scale)
        scale *= 10


class Histogram:
    """Counts per bucket, and the sum. Not thread-safe.

    Attributes:
        unsent: When a list, (value, count) of each observation, for somebody who passes them on and empties it.
    """

    __slots__ = ("bounds", "counts", "total", "unsent")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(float(bound) for bound in bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.total = 0.0
        self.unsent: list[tuple[float, int]] | None = None

    def observe(self, value: float, count: int = 1) -> None:
        """Take in `value`, `count` times."""
        self.counts[bisect_left(self.bounds, value)] += count
        self.total += value * count
        if self.unsent is not None:
            self.unsent.append((value, count))

    def cumulative(self) -> list[tuple[str, float]]:
        """(upper bound, observations up to it), as Prometheus wants them."""
        buckets, seen = [], 0
        for bound, count in zip((*self.bounds, float("inf")), self.counts, strict=True):
            seen += count
            buckets.append(("+Inf" if bound == float("inf") else repr(bound), float(seen)))
        return buckets


class EngineMetrics:
    """Everything known about one served model's engine.

    Args:
        model_name: The label `model_name`.
        max_model_len: Bounds the length histograms.
        engine: The label `engine`: the data-parallel rank.
        cache_config: Static facts for `cache_config_info`, e.g. block_size and num_gpu_blocks.

    Attributes:
        stats: The latest gauges of the scheduler.
        recovery: Recoveries of the engine; its client writes them.
    """

    def __init__(
        self, model_name: str, max_model_len: int, engine: str = "0", cache_config: Mapping[str, Any] | None = None
    ) -> None:
        self.labels = {"model_name": model_name, "engine": engine}
        self.cache_config = {key: str(value) for key, value in (cache_config or {}).items()}
        self.stats = SchedulerStats()
        self.recovery = RecoveryStats()
        self.num_prompt_tokens = 0
        self.num_prompt_tokens_cached = 0
        self.num_generated_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.num_preemptions = 0
        self.finished = dict.fromkeys(FINISH_REASONS, 0)
        self.rejected: dict[str, int] = {}
        lengths = token_count_buckets(max_model_len)
        self.ttft_s = Histogram(TTFT_BUCKETS)
        self.inter_token_s = Histogram(FINE_TOKEN_TIME_BUCKETS)
        self.time_per_output_token_s = Histogram(FINE_TOKEN_TIME_BUCKETS)
        self.e2e_s = Histogram(LATENCY_BUCKETS)
        self.queue_s = Histogram(LATENCY_BUCKETS)
        self.prefill_s = Histogram(LATENCY_BUCKETS)
        self.decode_s = Histogram(LATENCY_BUCKETS)
        self.inference_s = Histogram(LATENCY_BUCKETS)
        self.prompt_length = Histogram(lengths)
        self.generation_length = Histogram(lengths)
        self.iteration_tokens = Histogram(ITERATION_BUCKETS)

    def observe_stats(self, stats: SchedulerStats) -> None:
        """Take in a step's report. Called for each EngineCoreOutputs that has one."""
        self.stats = stats
        self.prefix_cache_queries += stats.prefix_cache_queries
        self.prefix_cache_hits += stats.prefix_cache_hits
        self.num_preemptions += stats.num_preemptions
        if stats.num_scheduled_tokens:
            self.iteration_tokens.observe(stats.num_scheduled_tokens)

    def observe_rejection(self, reason: str) -> None:
        """A request was turned away: "queue_full" or "engine_dead"."""
        self.rejected[reason] = self.rejected.get(reason, 0) + 1

    def request_meter(self) -> RequestMeter:
        """For one HTTP request."""
        return RequestMeter(self)


class _Completion:
    """One completion being metered: tokens so far, and when the last of them came (EngineCore's clock)."""

    __slots__ = ("last_token_ts", "num_generated")

    def __init__(self) -> None:
        self.num_generated = 0
        self.last_token_ts = 0.0


class RequestMeter:
    """Feeds one HTTP request's outputs into `EngineMetrics`."""

    __slots__ = ("_completions", "_metrics", "_num_open")

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics
        self._completions: dict[tuple[int, int], _Completion] = {}
        self._num_open = 0

    def observe(self, prompt_index: int, output: RequestOutput) -> None:
        """Take in the next output of prompt `prompt_index`, delta or final."""
        metrics, times = self._metrics, output.metrics
        for completion in output.outputs:
            key = (prompt_index, completion.index)
            metered = self._completions.get(key)
            if metered is None:
                metered = self._completions[key] = _Completion()
                self._num_open += 1
                if completion.index == 0:
                    self._observe_prompt(output)
            num_new, before = len(completion.token_ids), metered.num_generated
            generated = metered.num_generated = before + num_new
            metrics.num_generated_tokens += num_new
            if not before and generated:
                metrics.ttft_s.observe(times.first_token_latency)
                metered.last_token_ts = times.first_token_ts
                before = 1
            if generated > before:
                # Tokens that came together share the time since the one before them.
                num_gaps = generated - before
                gap_s = max(0.0, times.last_token_ts - metered.last_token_ts) / num_gaps
                metrics.inter_token_s.observe(gap_s, num_gaps)
                metered.last_token_ts = times.last_token_ts
            if completion.finish_reason is not None:
                self._observe_end(completion.finish_reason, generated, output)

    def end(self, reason: str) -> None:
        """The HTTP request ended early, by "abort" or "error": so did its completions that have not ended."""
        never_began = reason == "abort" and not self._completions
        self._metrics.finished[reason] += 1 if never_began else self._num_open
        self._num_open = 0

    def _observe_prompt(self, output: RequestOutput) -> None:
        metrics = self._metrics
        metrics.num_prompt_tokens += len(output.prompt_token_ids)
        metrics.num_prompt_tokens_cached += output.num_cached_tokens or 0
        metrics.prompt_length.observe(len(output.prompt_token_ids))

    def _observe_end(self, finish_reason: str, num_generated: int, output: RequestOutput) -> None:
        metrics, times = self._metrics, output.metrics
        self._num_open -= 1
        metrics.finished[finish_reason] = metrics.finished.get(finish_reason, 0) + 1
        metrics.generation_length.observe(num_generated)
        metrics.e2e_s.observe(max(0.0, time.time() - times.arrival_time))
        if not times.first_token_ts or not times.scheduled_ts:
            return
        decode_s = max(0.0, times.last_token_ts - times.first_token_ts)
        metrics.queue_s.observe(max(0.0, times.scheduled_ts - times.queued_ts))
        metrics.prefill_s.observe(max(0.0, times.first_token_ts - times.scheduled_ts))
        metrics.decode_s.observe(decode_s)
        metrics.inference_s.observe(max(0.0, times.last_token_ts - times.scheduled_ts))
        if num_generated > 1:
            metrics.time_per_output_token_s.observe(decode_s / (num_generated - 1))


# What is offered: (name, text, value of an EngineMetrics).

GAUGES: tuple[tuple[str, str, Callable[[EngineMetrics], float]], ...] = (
    ("num_requests_running", "Sequences in the batch.", lambda m: m.stats.num_running),
    ("num_requests_waiting", "Sequences that wait to be scheduled.", lambda m: m.stats.num_waiting),
    ("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", lambda m: m.stats.kv_cache_usage),
    ("recovering", "1 while a dead EngineCore is replaced.", lambda m: float(m.recovery.since_s is not None)),
)
COUNTERS: tuple[tuple[str, str, Callable[[EngineMetrics], float]], ...] = (
    ("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.", lambda m: m.prefix_cache_queries),
    ("prefix_cache_hits", "Prompt tokens found in the prefix cache.", lambda m: m.prefix_cache_hits),
    ("num_preemptions", "Sequences that lost their KV blocks and were recomputed.", lambda m: m.num_preemptions),
    ("prompt_tokens", "Prompt tokens processed, cached ones included.", lambda m: m.num_prompt_tokens),
    ("prompt_tokens_cached", "Prompt tokens served from the prefix cache.", lambda m: m.num_prompt_tokens_cached),
    ("generation_tokens", "Tokens generated.", lambda m: m.num_generated_tokens),
    ("recoveries", "Failures that were repaired.", lambda m: m.recovery.recoveries),
    ("recovery_seconds", "Time lost to recoveries.", lambda m: m.recovery.lost_s),
)
HISTOGRAMS: tuple[tuple[str, str, Callable[[EngineMetrics], Histogram]], ...] = (
    ("time_to_first_token_seconds", "From arrival to the first token.", lambda m: m.ttft_s),
    ("inter_token_latency_seconds", "Between consecutive tokens.", lambda m: m.inter_token_s),
    ("request_time_per_output_token_seconds", "Mean time per token after the first, of each request.",
     lambda m: m.time_per_output_token_s),
    ("e2e_request_latency_seconds", "From arrival to the end.", lambda m: m.e2e_s),
    ("request_queue_time_seconds", "Waiting to be scheduled.", lambda m: m.queue_s),
    ("request_prefill_time_seconds", "From scheduling to the first token.", lambda m: m.prefill_s),
    ("request_decode_time_seconds", "From the first token to the last.", lambda m: m.decode_s),
    ("request_inference_time_seconds", "From scheduling to the last token.", lambda m: m.inference_s),
    ("request_prompt_tokens", "Prompt lengths.", lambda m: m.prompt_length),
    ("request_generation_tokens", "Tokens generated per completion.", lambda m: m.generation_length),
    ("iteration_tokens_total", "Tokens per engine step.", lambda m: m.iteration_tokens),
)  # fmt: skip
