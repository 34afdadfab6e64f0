"""`engine-actors serve` as a process of its own, for tests."""

from __future__ import annotations

import atexit
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

START_S = 280
STOP_S = 60


@dataclass
class CliServer:
    """A server that runs.

    Attributes:
        url: Without a path.
        text: What it has printed.
        curl: The line it gives to newcomers.
    """

    process: subprocess.Popen[str]
    url: str
    text: str
    curl: str


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "engine_actors.cli.main", *arguments]


def environment(**more: str) -> dict[str, str]:
    """Of a process that imports this tree and joins no cluster: not the tests' own, nor the machine's last."""
    root = str(Path(__file__).parents[3])
    kept = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS" and "RAY_SERVE" not in name}
    own = {"PYTHONPATH": root, "RAY_TMPDIR": _ray_folder(), "HF_HUB_OFFLINE": "1", "RAY_USAGE_STATS_ENABLED": "0"}
    return {**kept, **own, **more}


@cache
def _ray_folder() -> str:
    """Where Ray finds the last cluster's address, and makes its sockets, whose paths must be short."""
    folder = tempfile.mkdtemp(prefix="ea-", dir="/tmp")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@contextmanager
def cli_server(*arguments: str) -> Iterator[CliServer]:
    """Start `engine-actors serve` with these arguments; Ctrl-C at the end, which must end it in order."""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command("serve", *arguments), stdout=log, stderr=subprocess.STDOUT, text=True, env=environment(),
            start_new_session=True,
        )  # fmt: skip

        def printed() -> str:
            log.seek(0)
            return log.read()

        try:
            deadline = time.monotonic() + START_S
            while not (found := re.search(r"^curl (http://[^/]+)/.*$", printed(), re.MULTILINE)):
                assert process.poll() is None, printed()
                assert time.monotonic() < deadline, printed()
                time.sleep(0.1)
            yield CliServer(process, found[1], printed(), found[0])
            assert process.poll() is None, printed()
            process.send_signal(signal.SIGINT)
            assert process.wait(STOP_S) == 0, printed()
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
