"""Where a part of the engine runs: node, process, device. For `Engine.where` and the demo."""

from __future__ import annotations

import os
from typing import Any

import ray


def place_of_this_process() -> str:
    """E.g. "node 10.0.0.7, pid 4711"."""
    return f"node {ray.util.get_node_ip_address()}, pid {os.getpid()}"


def place_of_worker(worker: Any) -> str:
    """Runs in each worker, through `collective_rpc`."""
    device, compute = getattr(worker, "device", None), getattr(worker, "compute_name", "")
    parts = [place_of_this_process(), f"device {device}" if device is not None else "", compute]
    return ", ".join(filter(None, parts))
