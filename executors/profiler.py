"""Traces of what one worker computes, by torch's profiler. Owned by Worker; the front ends' `start_profile` asks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch


class WorkerProfiler:
    """One recording at a time. Must be used on the thread that runs the steps.

    Args:
        directory: Where traces go; made when the first one is written. None: no profile can be started.
    """

    def __init__(self, directory: str | None, rank: int, device: torch.device) -> None:
        self._directory = None if directory is None else Path(directory).expanduser()
        self._rank = rank
        self._device = device
        self._recording: Any = None
        self._name = ""

    def start(self, prefix: str | None = None) -> None:
        """
        Raises:
            RuntimeError: No directory is configured, or a recording is under way.
            ValueError: `prefix` is no part of a file name.
        """
        if self._directory is None:
            raise RuntimeError(
                "no torch_profiler_dir is configured: start the engine with torch_profiler_dir=DIRECTORY"
            )
        if self._recording is not None:
            raise RuntimeError(f"rank {self._rank} is recording {self._name} already; stop_profile() ends it")
        if prefix is not None and (not isinstance(prefix, str) or "/" in prefix):
            raise ValueError(f"prefix must begin a file name, got {prefix!r}")
        self._directory.mkdir(parents=True, exist_ok=True)
        self._name = (
            f"{prefix or 'engine'}-rank{self._rank}-{os.getpid()}-{time.time_ns() // 1_000_000}.pt.trace.json.gz"
        )
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        recording = torch.profiler.profile(activities=activities)
        recording.start()
        self._recording = recording

    def stop(self) -> str:
        """The trace's path.

        Raises:
            RuntimeError: Nothing is being recorded.
        """
        if self._recording is None or self._directory is None:
            raise RuntimeError(f"rank {self._rank} is recording nothing: start_profile() comes first")
        recording, self._recording = self._recording, None
        recording.stop()
        path = self._directory / self._name
        recording.export_chrome_trace(str(path))
        return str(path)
