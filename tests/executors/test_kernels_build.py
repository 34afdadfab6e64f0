"""Building, caching and loading the kernels, and what happens where that cannot be done."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path

import pytest
import torch

from executors.kernels import build, library, ops
from executors.kernels.library import NativeKernels
from executors.kernels.packed import PackedWeight
from tests.executors.kernel_cases import kernels, random_bf16

__all__ = ["kernels"]


def test_library_is_compiled_once_and_found_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_ACTORS_CACHE", str(tmp_path))
    compiled: list[list[str]] = []
    run = build._run

    def fake_run(command: list[str]) -> str:
        if "--version" in command:
            return run(command)
        compiled.append(command)
        Path(command[command.index("-o") + 1]).write_bytes(b"library")
        return ""

    monkeypatch.setattr(build, "_run", fake_run)
    first = build.build_library()
    commands = len(compiled)
    assert first.parent == tmp_path / "kernels"
    assert first.read_bytes() == b"library"
    assert build.build_library() == first
    assert len(compiled) == commands
    monkeypatch.setattr(build, "_cpu_flags", lambda: "another processor")
    assert build.build_library() != first


def test_a_failed_compilation_says_why_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_ACTORS_CACHE", str(tmp_path))
    monkeypatch.setattr(build, "COMMON_FLAGS", ("-std=c++17", "--no-such-flag"))
    with pytest.raises(build.KernelBuildError, match="no-such-flag"):
        build.build_library()
    assert [path.name for path in (tmp_path / "kernels").iterdir()] == ["build.lock"]


def test_without_a_compiler_torch_is_announced_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nonexistent")
    library.native_kernels.cache_clear()
    library._load.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            assert library.native_kernels() is None
            assert library.native_kernels() is None
        assert [record.message.count("no C++ compiler") for record in caplog.records] == [1]
    finally:
        library.native_kernels.cache_clear()
        library._load.cache_clear()


def test_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(build.KernelBuildError, match="isa must be one of"):
        NativeKernels("avx10")


def test_thread_count_must_be_positive(kernels: NativeKernels) -> None:
    with pytest.raises(ValueError, match="num_threads must be at least 1, got 0"):
        kernels.set_num_threads(0)


def test_pool_works_in_a_forked_child(kernels: NativeKernels) -> None:
    """Worker threads do not survive a fork; the child starts its own."""
    x, packed = random_bf16(8, 2048), PackedWeight(kernels, random_bf16(4096, 2048, seed=1))
    expected = ops.linear(x, packed)
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(ops.linear(x, packed), expected) else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_idle_workers_use_no_processor_time(kernels: NativeKernels) -> None:
    kernels.set_num_threads(8)
    x, packed = random_bf16(8, 2048), PackedWeight(kernels, random_bf16(4096, 2048, seed=1))
    ops.linear(x, packed)
    before = os.times()
    time.sleep(0.3)
    after = os.times()
    assert (after.user - before.user) + (after.system - before.system) < 0.1
