"""The simulator serves every request it is given, and its figures are those of the trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.simulate import Arrival, Device, read_trace, simulate, workload
from scheduler.config import SchedulerConfig

CONFIG = SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=64, max_model_len=32_768)


@pytest.mark.parametrize("name", ["chat", "rag", "agents", "burst"])
def test_workloads_are_repeatable_and_ordered(name: str) -> None:
    arrivals = workload(name, 40, 10.0, seed=3)
    assert arrivals == workload(name, 40, 10.0, seed=3)
    assert [arrival.arrival_s for arrival in arrivals] == sorted(arrival.arrival_s for arrival in arrivals)


def test_times_follow_the_model() -> None:
    # One request alone: a prompt of 64 tokens in one step, then 4 steps of a token, each 10 ms and the host's 1 ms.
    device = Device(weights_s=0.01, token_s=0.0, kv_token_s=0.0, host_gap_s=0.001)
    row = simulate([Arrival(5.0, 64, 5)], CONFIG, num_blocks=100, device=device)
    assert row["steps"] == 5
    assert row["TTFT p50 s"] == pytest.approx(0.011)
    assert row["ITL p50 ms"] == pytest.approx(11.0)


def test_a_shared_prefix_is_computed_once() -> None:
    arrivals = [Arrival(float(index), 64, 2, prefix_id=0, prefix_tokens=48) for index in range(4)]
    row = simulate(arrivals, CONFIG, num_blocks=100, device=Device())
    assert row["hit rate"] == 3 * 48 / (4 * 64)


@pytest.mark.parametrize("options", [{}, {"pipeline": 3}, {"caching": False}, {"headroom_blocks": 0}])
def test_every_request_is_served_under_pressure(options: dict[str, object]) -> None:
    arrivals = [Arrival(0.01 * index, 20 + index, 30) for index in range(30)]
    row = simulate(arrivals, CONFIG, num_blocks=24, device=Device(), **options)  # type: ignore[arg-type]
    assert row["tok/s"] > 0
    assert row["steps"] >= 30


def test_traces_are_read_and_bad_lines_named(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps({"arrival_s": 1.0, "prompt_tokens": 3, "output_tokens": 2}) + "\n")
    assert read_trace(path) == [Arrival(1.0, 3, 2)]
    path.write_text('{"arrival_s": 1.0}\n')
    with pytest.raises(ValueError, match=r"trace\.jsonl:1: .*prompt_tokens"):
        read_trace(path)
