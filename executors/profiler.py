"""Traces of what one worker computes, by torch's profiler. Owned by Worker; the front ends' `start_profile` asks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch

from scheduler.values import check_int


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
        self._num_steps_before = 0
        self._num_steps_left = 0
        self._path: str | None = None
        self.counts_steps = False
        """`before_step` must be called."""

    def start(self, prefix: str | None = None, delay_iterations: int = 0, max_iterations: int = 0) -> None:
        """
        Args:
            prefix: Begins the trace's file name.
            delay_iterations: Steps to let pass first.
            max_iterations: Steps to record; then the trace is written, and waits for `stop`. 0 is no limit.

        Raises:
            RuntimeError: No directory is configured, or a recording is under way.
            ValueError: `prefix` is no part of a file name, or a number is negative.
        """
        if self._directory is None:
            raise RuntimeError(
                "no torch_profiler_dir is configured: start the engine with torch_profiler_dir=DIRECTORY"
            )
        if self._name:
            raise RuntimeError(f"rank {self._rank} is recording {self._name} already; stop_profile() ends it")
        if prefix is not None and (not isinstance(prefix, str) or "/" in prefix):
            raise ValueError(f"prefix must begin a file name, got {prefix!r}")
        check_int("delay_iterations", delay_iterations, 0, None)
        check_int("max_iterations", max_iterations, 0, None)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._name = (
            f"{prefix or 'engine'}-rank{self._rank}-{os.getpid()}-{time.time_ns() // 1_000_000}.pt.trace.json.gz"
        )
        self._num_steps_before, self._num_steps_left = delay_iterations, max_iterations
        self.counts_steps = bool(delay_iterations or max_iterations)
        if not delay_iterations:
            self._record()

    def before_step(self) -> None:
        """A step is about to run, and `counts_steps`."""
        if self._num_steps_before:
            self._num_steps_before -= 1
            return
        if self._recording is None:
            self._record()
            if not self._num_steps_left:
                self.counts_steps = False
                return
        if self._num_steps_left:
            self._num_steps_left -= 1
            return
        self._write()
        self.counts_steps = False

    def stop(self) -> str:
        """The trace's path.

        Raises:
            RuntimeError: Nothing is being recorded, or its first step has not come.
        """
        if not self._name:
            raise RuntimeError(f"rank {self._rank} is recording nothing: start_profile() comes first")
        if self._path is None and self._recording is None:
            num_left, self._name, self.counts_steps = self._num_steps_before, "", False
            raise RuntimeError(f"rank {self._rank} has recorded nothing: {num_left} more steps were to pass before")
        if self._path is None:
            self._write()
        path, self._path, self._name, self.counts_steps = self._path, None, "", False
        return str(path)

    def _record(self) -> None:
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        recording = torch.profiler.profile(activities=activities)
        recording.start()
        self._recording = recording

    def _write(self) -> None:
        recording, self._recording = self._recording, None
        recording.stop()
        assert self._directory is not None  # `start` saw to it.
        self._path = str(self._directory / self._name)
        recording.export_chrome_trace(self._path)
