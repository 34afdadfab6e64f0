"""Figures of a load: throughput, percentiles of TTFT, TPOT, ITL and latency, under the keys of `vllm bench serve`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from engine_actors.bench.client import BenchResult
from engine_actors.bench.load import LoadReport

METRICS = ("ttft", "tpot", "itl", "e2el")
METRIC_TEXTS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token (excl. 1st token)",
    "itl": "Inter-token latency",
    "e2el": "End-to-end latency",
}


def load_figures(
    report: LoadReport,
    *,
    metrics: Sequence[str] = METRICS[:3],
    percentiles: Sequence[float] = (99.0,),
    goodput_ms: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The figures, ready for JSON. Times end in `_ms`; lists are in the order of the requests, in seconds.

    Args:
        metrics: Of METRICS, those whose mean, median, std and percentiles are given.
        goodput_ms: Limits by metric; requests within all of them count as good.
    """
    done = [result for result in report.results if result.success]
    duration_s = report.duration_s
    num_in = sum(result.num_prompt_tokens for result in done)
    num_out = sum(result.num_output_tokens for result in done)
    series = _series(done)
    good = None
    if goodput_ms:
        good = sum(_is_good(result, goodput_ms) for result in done) / duration_s
    per_second, most_at_once = _peaks(done)
    figures: dict[str, Any] = {
        "duration": duration_s,
        "completed": len(done),
        "failed": len(report.results) - len(done),
        "total_input_tokens": num_in,
        "total_output_tokens": num_out,
        "request_throughput": len(done) / duration_s,
        "request_goodput": good,
        "output_throughput": num_out / duration_s,
        "total_token_throughput": (num_in + num_out) / duration_s,
        "input_lens": [result.num_prompt_tokens for result in report.results],
        "output_lens": [result.num_output_tokens for result in report.results],
        "ttfts": [result.ttft_s for result in report.results],
        "itls": [result.itl_s for result in report.results],
        "latencies": [result.latency_s for result in report.results],
        "start_times": [result.started_s for result in report.results],
        "generated_texts": [result.text for result in report.results],
        "errors": [result.error for result in report.results],
        "max_output_tokens_per_s": per_second,
        "max_concurrent_requests": most_at_once,
    }
    for name in metrics:
        values = np.array(series[name]) * 1000 if series[name] else np.zeros(1)
        figures[f"mean_{name}_ms"] = float(values.mean())
        figures[f"median_{name}_ms"] = float(np.median(values))
        figures[f"std_{name}_ms"] = float(values.std())
        for percentile in percentiles:
            figures[f"p{percentile:g}_{name}_ms"] = float(np.percentile(values, percentile))
    return figures


def figures_table(figures: Mapping[str, Any]) -> str:
    """The figures for people."""
    rows: list[tuple[str, str]] = [
        ("Successful requests", f"{figures['completed']}"),
        ("Failed requests", f"{figures['failed']}"),
        ("Benchmark duration (s)", f"{figures['duration']:.2f}"),
        ("Total input tokens", f"{figures['total_input_tokens']}"),
        ("Total generated tokens", f"{figures['total_output_tokens']}"),
        ("Request throughput (req/s)", f"{figures['request_throughput']:.2f}"),
    ]
    if figures["request_goodput"] is not None:
        rows.append(("Request goodput (req/s)", f"{figures['request_goodput']:.2f}"))
    rows += [
        ("Output token throughput (tok/s)", f"{figures['output_throughput']:.2f}"),
        ("Total token throughput (tok/s)", f"{figures['total_token_throughput']:.2f}"),
        ("Most requests at once", f"{figures['max_concurrent_requests']}"),
    ]
    lines = ["Serving benchmark result".center(60, "="), *(f"{text + ':':<42}{value:>18}" for text, value in rows)]
    for name, text in METRIC_TEXTS.items():
        if f"mean_{name}_ms" not in figures:
            continue
        lines.append(text.center(60, "-"))
        for key, value in figures.items():
            if key.endswith(f"_{name}_ms"):
                statistic = key.removesuffix(f"_{name}_ms")
                lines.append(f"{f'{statistic.capitalize()} {name.upper()} (ms):':<42}{value:>18.2f}")
    return "\n".join([*lines, "=" * 60])


def _series(done: Sequence[BenchResult]) -> dict[str, list[float]]:
    return {
        "ttft": [result.ttft_s for result in done],
        "tpot": [_tpot_s(result) for result in done if result.num_output_tokens > 1],
        "itl": [gap for result in done for gap in result.itl_s],
        "e2el": [result.latency_s for result in done],
    }


def _tpot_s(result: BenchResult) -> float:
    return (result.latency_s - result.ttft_s) / max(1, result.num_output_tokens - 1)


def _is_good(result: BenchResult, limits_ms: Mapping[str, float]) -> bool:
    own_s = {"ttft": result.ttft_s, "tpot": _tpot_s(result), "e2el": result.latency_s}
    return all(own_s[name] * 1000 <= limit for name, limit in limits_ms.items())


def _peaks(done: Sequence[BenchResult]) -> tuple[float, int]:
    """Most output tokens in a second, and most requests at once."""
    if not done:
        return 0.0, 0
    first_s = min(result.started_s for result in done)
    seconds: dict[int, int] = {}
    events: list[tuple[float, int]] = []
    for result in done:
        at_s = result.started_s + result.ttft_s
        for gap_s in (0.0, *result.itl_s):
            at_s += gap_s
            second = int(at_s - first_s)
            seconds[second] = seconds.get(second, 0) + 1
        events += [(result.started_s, 1), (result.started_s + result.latency_s, -1)]
    running = most = 0
    for _, change in sorted(events):
        running += change
        most = max(most, running)
    return float(max(seconds.values())), most
