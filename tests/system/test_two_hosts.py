"""An engine across two hosts with token authentication: right tokens, and bounded waiting when a host is lost."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.system.two_hosts import HEAD_IP, PORT, WORKER_IP, TwoHosts, two_hosts

pytestmark = pytest.mark.soak
LONGEST_WAIT_S = 60.0
"""Ray gives a silent node up after 4 s here, a step's deadline is 30 s; the rest is for a machine under load."""


@pytest.fixture(scope="module")
def hosts() -> Iterator[TwoHosts]:
    with two_hosts() as made:
        made.start_head()
        yield made


@pytest.fixture(scope="module")
def expected(random_llama_dir: Path) -> list[int]:
    from engine_actors import LLM, SamplingParams
    from tests.system.two_hosts_driver import PROMPT

    options: dict[str, Any] = {"engine_core": "inproc", "distributed_executor_backend": "uni"}
    with LLM(str(random_llama_dir), dtype="float32", max_model_len=256, num_gpu_blocks_override=64, **options) as llm:
        (output,) = llm.generate(
            [PROMPT], SamplingParams(temperature=0, max_tokens=12, ignore_eos=True), use_tqdm=False
        )
        return list(output.outputs[0].token_ids)


def next_json(driver: subprocess.Popen[str]) -> dict[str, Any]:
    """The driver's next object; what Ray prints in between is skipped."""
    assert driver.stdout is not None
    for line in driver.stdout:
        if line.startswith("{"):
            return dict(json.loads(line))
    raise AssertionError(driver.communicate()[1][-3000:])


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)], ids=["tp2", "pp2"])
@pytest.mark.parametrize("loss", ["cut", "kill"])
def test_tokens_across_hosts_and_bounded_waiting_when_one_is_lost(
    hosts: TwoHosts, random_llama_dir: Path, expected: list[int], sizes: tuple[int, int], loss: str
) -> None:
    lose: Callable[[], None] = hosts.cut_link if loss == "cut" else hosts.kill_worker
    hosts.start_worker()
    driver = hosts.popen("-m", "tests.system.two_hosts_driver", str(random_llama_dir), *map(str, sizes))
    try:
        assert driver.stdin is not None
        answer = next_json(driver)
        assert answer["tokens"] == expected
        assert answer["nodes"] == [f"node {HEAD_IP}", f"node {WORKER_IP}"]
        lose()
        driver.stdin.write("lost\n")
        driver.stdin.flush()
        ended = next_json(driver)
        print(f"tp={sizes[0]} pp={sizes[1]} {loss}: {ended['waited_s']:.1f} s, {ended['error'][:300]}")
        assert ended["waited_s"] < LONGEST_WAIT_S
    finally:
        driver.send_signal(signal.SIGKILL)
        driver.communicate()
        if loss == "cut":
            hosts.kill_worker()
            hosts.mend_link()


def test_nobody_joins_without_the_token(hosts: TwoHosts) -> None:
    stranger = hosts.popen(
        "-m", "ray.scripts.scripts", "start", f"--address={HEAD_IP}:{PORT}", f"--node-ip-address={WORKER_IP}",
        namespace=hosts.worker, token="0" * 64,
    )  # fmt: skip
    try:
        output, errors = stranger.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        stranger.kill()
        output, errors = stranger.communicate()
    assert stranger.returncode != 0
    assert "auth" in (output + errors).lower()
