"""Where a part of the engine runs: node, process, device; and which cluster a process that starts one joins."""

from __future__ import annotations

import os
import socket
from typing import Any

import ray

_ANSWER_S = 2.0


def cluster_to_join() -> str | None:
    """For `ray.init`: RAY_ADDRESS; else None, by which Ray joins the last `ray start`'s cluster or starts another.

    "local", which always starts one, if that cluster was killed: it left its address behind, and Ray would wait for it.
    """
    if address := os.environ.get("RAY_ADDRESS"):
        return address
    last = ray._private.utils.read_ray_address()
    return None if last is None or _answers(last) else "local"


def _answers(address: str) -> bool:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except (OSError, ValueError):
        return False
    return True


def place_of_this_process() -> str:
    """E.g. "node 10.0.0.7, pid 4711"."""
    return f"node {ray.util.get_node_ip_address()}, pid {os.getpid()}"


def place_of_worker(worker: Any) -> str:
    """Runs in each worker, through `collective_rpc`."""
    device, compute = getattr(worker, "device", None), getattr(worker, "compute_name", "")
    parts = [place_of_this_process(), f"device {device}" if device is not None else "", compute]
    return ", ".join(filter(None, parts))
