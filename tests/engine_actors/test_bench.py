"""The load generator: when requests are due, and figures from what came."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine_actors.bench.client import BenchResult
from engine_actors.bench.datasets import random_prompts, read_prompts
from engine_actors.bench.figures import figures_table, load_figures
from engine_actors.bench.load import LoadPlan, LoadReport


def result(started_s: float, ttft_s: float, itl_s: list[float], error: str = "") -> BenchResult:
    latency_s = ttft_s + sum(itl_s)
    return BenchResult(started_s, ttft_s, itl_s, latency_s, 10, len(itl_s) + 1, "text", error)


def test_figures_are_those_of_the_requests() -> None:
    good, slow = result(0.0, 0.1, [0.02, 0.04]), result(0.5, 0.3, [0.06] * 4)
    report = LoadReport([good, slow, result(0.0, 0.0, [], error="HTTP 503: busy")], duration_s=2.0)
    figures = load_figures(
        report, metrics=("ttft", "tpot", "itl", "e2el"), percentiles=(50, 99), goodput_ms={"ttft": 200}
    )
    assert (figures["completed"], figures["failed"]) == (2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (20, 8)
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 4.0
    assert figures["request_goodput"] == 0.5
    assert figures["mean_ttft_ms"] == pytest.approx(200)
    assert figures["mean_tpot_ms"] == pytest.approx((30 + 60) / 2)
    assert figures["median_itl_ms"] == figures["p50_itl_ms"] == pytest.approx(60)
    assert figures["mean_e2el_ms"] == pytest.approx((160 + 540) / 2)
    assert figures["errors"][2] == "HTTP 503: busy"
    assert figures["max_concurrent_requests"] == 1
    assert "P99 TTFT (ms):" in figures_table(figures)


def test_figures_without_any_success_are_zero() -> None:
    figures = load_figures(LoadReport([result(0.0, 0.0, [], error="no")], 1.0))
    assert (figures["completed"], figures["failed"], figures["median_ttft_ms"]) == (0, 1, 0.0)


def test_arrivals_keep_the_rate_and_are_reproducible() -> None:
    plan = LoadPlan(request_rate=50.0, burstiness=0.5, seed=3)
    times = plan.start_times_s(500)
    assert times == LoadPlan(request_rate=50.0, burstiness=0.5, seed=3).start_times_s(500)
    assert times == sorted(times)
    assert times[-1] == pytest.approx(10.0)
    assert LoadPlan().start_times_s(3) == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"request_rate": 0}, "request_rate must be more than 0"),
        ({"burstiness": -1}, "burstiness must be more than 0"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1"),
    ],
)
def test_impossible_plans_are_refused(options: dict[str, float], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        LoadPlan(**options)  # type: ignore[arg-type]


def test_random_prompts_have_the_lengths_asked_for(random_llama_dir: Path) -> None:
    prompts = random_prompts(str(random_llama_dir), 20, 40, 10, 0.25, 8, 1, as_text=False)
    assert len(prompts) == 20
    assert {tuple(each.prompt[:8]) for each in prompts} == {tuple(prompts[0].prompt[:8])}
    lengths = [each.num_prompt_tokens - 8 for each in prompts]
    assert 30 <= min(lengths) < max(lengths) <= 50
    assert all(7 <= each.max_tokens <= 13 for each in prompts)
    with pytest.raises(ValueError, match="num_prompts must be at least 1"):
        random_prompts(str(random_llama_dir), 0, 1, 1, 0.0, 0, 0, as_text=False)


def test_prompts_of_a_file(random_llama_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": "abc"}) + "\n\n" + json.dumps({"prompt": "de", "output_tokens": 5}))
    first, second = read_prompts(file, str(random_llama_dir), 10, 3)
    assert (first.prompt, first.max_tokens, second.max_tokens) == ("abc", 3, 5)
    file.write_text('{"text": "x"}')
    with pytest.raises(ValueError, match="line 1 must be an object with a prompt"):
        read_prompts(file, str(random_llama_dir), 10, 3)
