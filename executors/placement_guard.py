"""A small process that outlives an actor killed with -9, to give back the placement group the actor had made.

Ray removes a driver's groups when it exits, but an actor's only when the whole job ends; and with an Engine actor's
process everybody dies who could have removed the group of its workers. `Placement` starts a guard for each group that
an actor makes; it sleeps on a pipe and wakes when the actor's process is gone, or done with the group.

Run as a program: `python placement_guard.py CLUSTER_ADDRESS GROUP_ID`, the pipe's reading end on standard input.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time

CLUSTER_GONE_S = 2.0
"""After so long without a connection to the cluster's address there is nothing left to give back."""
GIVE_UP_S = 90
"""A guard that woke ends after so long in any case: Ray waits for a cluster that ends meanwhile without limit."""
RELEASED = b"r"
"""Written by the actor: it has removed the group itself."""


class PlacementGuard:
    """The actor's end.

    Args:
        address: Of the cluster, "host:port".
        group_id: Hexadecimal.

    Attributes:
        pid: The guard's.
    """

    def __init__(self, address: str, group_id: str) -> None:
        # A session of its own, and no child of the actor's (see `_leave_parent`): signals to the actor's process group,
        # and Ray's clean-up of an actor's children, are not meant for it. Nothing but the pipe's writing end, which
        # only the actor's process holds, keeps it waiting.
        self._starter = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, address, group_id, *filter(None, sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._starter.wait()
        assert self._starter.stdin is not None
        assert self._starter.stdout is not None
        self._to_guard, self._from_guard = self._starter.stdin, self._starter.stdout
        self.pid = int(self._from_guard.readline())

    def release(self) -> None:
        """The group is gone; the guard ends, and has closed its pipes when this returns. Idempotent."""
        if self._to_guard.closed:
            return
        with contextlib.suppress(BrokenPipeError):
            self._to_guard.write(RELEASED)
            self._to_guard.flush()
        with contextlib.suppress(BrokenPipeError):
            self._to_guard.close()
        self._from_guard.read()
        self._from_guard.close()


def _leave_parent() -> None:
    """Go on in a process that is nobody's child: a worker that Ray ends in order kills its children first."""
    if os.fork():
        os._exit(0)
    os.write(sys.stdout.fileno(), b"%d\n" % os.getpid())


def main(address: str, group_id: str, path: list[str]) -> None:
    _leave_parent()
    if os.read(sys.stdin.fileno(), 1) == RELEASED:
        return
    signal.alarm(GIVE_UP_S)
    if not _answers(address):
        return
    # Only now is there something to do that needs Ray, and the memory it takes.
    sys.path[:] = path
    import ray
    from ray.util.placement_group import PlacementGroup

    ray.init(address=address, log_to_driver=False, logging_level="ERROR", namespace="engine-actors-guard")
    with contextlib.suppress(ray.exceptions.RayError, ValueError):
        ray.util.remove_placement_group(PlacementGroup(ray.PlacementGroupID.from_hex(group_id)))
    ray.shutdown()


def _answers(address: str) -> bool:
    """Whether something listens there, for a cluster that ends together with its driver leaves nobody to tell."""
    host, _, port = address.rpartition(":")
    deadline_s = time.monotonic() + CLUSTER_GONE_S
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=CLUSTER_GONE_S).close()
            return True
        except OSError:
            if time.monotonic() > deadline_s:
                return False
            time.sleep(0.2)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
