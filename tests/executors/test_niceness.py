"""Processes that a step waits for do not stay at the low priority Ray starts them with."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from executors.niceness import RAY_SETTING

SCRIPT = """
import os, threading
release = threading.Event()
threading.Thread(target=release.wait, daemon=True).start()
from executors.niceness import undo_ray_niceness
undo_ray_niceness()
print(sorted({os.getpriority(os.PRIO_PROCESS, int(thread)) for thread in os.listdir("/proc/self/task")}))
"""


def niceness_after(**environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if name != RAY_SETTING}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**env, **environment}, capture_output=True, text=True, check=True,
        preexec_fn=lambda: os.setpriority(os.PRIO_PROCESS, 0, 15),
    )  # fmt: skip
    return done.stdout.strip()


@pytest.mark.skipif(os.geteuid() != 0 or os.getpriority(os.PRIO_PROCESS, 0) > 0, reason="raising a priority needs root")
def test_all_threads_get_the_default_priority_unless_the_node_has_one_set() -> None:
    assert niceness_after() == "[0]"
    assert niceness_after(**{RAY_SETTING: "15"}) == "[15]"
