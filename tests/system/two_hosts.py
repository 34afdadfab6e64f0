"""Two hosts on one machine: network namespaces with a cable between, a Ray node in each. Used by test_two_hosts.py."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parents[2])
HEAD_IP, WORKER_IP = "10.77.0.1", "10.77.0.2"
PORT = 6379
STOP_S = 20
HEALTH = {
    # Ray's own defaults need 15 s to give a silent node up.
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


class TwoHosts:
    """The namespaces and what runs in them."""

    def __init__(self) -> None:
        self.token = secrets.token_hex(32)
        self._mark = f"ea{os.getpid() % 10000}"
        self.head, self.worker = f"{self._mark}h", f"{self._mark}w"
        self._cables = (f"{self._mark}v0", f"{self._mark}v1")
        self._temp = tempfile.mkdtemp(prefix="ea2-", dir="/tmp")  # Ray's socket paths must be short
        self._nodes: dict[str, subprocess.Popen[bytes]] = {}

    def set_up(self) -> None:
        """Make the namespaces; skips the test where that is not permitted."""
        if shutil.which("ip") is None:
            pytest.skip("the ip command is missing")
        made = subprocess.run(["ip", "netns", "add", self.head], capture_output=True, text=True)
        if made.returncode:
            pytest.skip(f"network namespaces are not permitted here: {made.stderr.strip()}")
        _run("ip", "netns", "add", self.worker)
        _run("ip", "link", "add", self._cables[0], "type", "veth", "peer", "name", self._cables[1])
        for namespace, cable, address in ((self.head, self._cables[0], HEAD_IP),
                                          (self.worker, self._cables[1], WORKER_IP)):  # fmt: skip
            _run("ip", "link", "set", cable, "netns", namespace)
            _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", cable)
            _run("ip", "-n", namespace, "link", "set", cable, "up")
            _run("ip", "-n", namespace, "link", "set", "lo", "up")

    def start_head(self) -> None:
        self._start(self.head, "--head", f"--port={PORT}", f"--node-ip-address={HEAD_IP}", f"--temp-dir={self._temp}",
                    "--include-dashboard=false")  # fmt: skip

    def start_worker(self) -> None:
        self._start(self.worker, f"--address={HEAD_IP}:{PORT}", f"--node-ip-address={WORKER_IP}")

    def kill_worker(self) -> None:
        """The machine is gone: nothing of it runs any more."""
        _end(self._nodes.pop(self.worker), signal.SIGKILL)

    def cut_link(self) -> None:
        """Packets vanish; nobody is told."""
        _run("ip", "-n", self.worker, "link", "set", self._cables[1], "down")

    def mend_link(self) -> None:
        _run("ip", "-n", self.worker, "link", "set", self._cables[1], "up")

    def popen(self, *arguments: str, namespace: str | None = None, token: str | None = None) -> subprocess.Popen[str]:
        """A Python process on a host, the head's unless told otherwise."""
        return subprocess.Popen(
            ["ip", "netns", "exec", namespace or self.head, sys.executable, "-u", *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env=self.environment(token), start_new_session=True,
        )  # fmt: skip

    def environment(self, token: str | None = None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        return {**kept, **HEALTH, "PYTHONPATH": ROOT, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
                "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token or self.token, "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_enable_worker_prestart": "0"}  # fmt: skip

    def tear_down(self) -> None:
        for node in self._nodes.values():
            _end(node, signal.SIGTERM)
        for namespace in (self.head, self.worker):
            for pid in subprocess.run(
                ["ip", "netns", "pids", namespace], capture_output=True, text=True
            ).stdout.split():
                os.kill(int(pid), signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True)
        shutil.rmtree(self._temp, ignore_errors=True)

    def _start(self, namespace: str, *arguments: str) -> None:
        ray = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--num-cpus=1", *arguments]
        log = open(Path(self._temp) / f"{namespace}.log", "wb")  # noqa: SIM115  the node's, for its lifetime
        self._nodes[namespace] = subprocess.Popen(
            ["ip", "netns", "exec", namespace, *ray], stdout=log, stderr=log, env=self.environment(),
            start_new_session=True,
        )  # fmt: skip


@contextmanager
def two_hosts() -> Iterator[TwoHosts]:
    hosts = TwoHosts()
    try:
        hosts.set_up()
        yield hosts
    finally:
        hosts.tear_down()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def _end(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(STOP_S)
