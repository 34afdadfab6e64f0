"""Compiles the native CPU kernels on first use and caches the library. Called by `executors.kernels.library`.

The library's name is a hash of everything that decides its content: sources, flags, compiler and CPU. Concurrent
processes take turns on a lock file, and the finished library appears by an atomic rename.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCE_DIR = Path(__file__).parent / "csrc"
COMMON_FLAGS = (
    "-std=c++17", "-O3", "-fPIC", "-fno-math-errno", "-fvisibility=hidden", "-pthread",
    # The compiler must not reorder or contract sums: results are compared bit by bit.
    "-ffp-contract=off",
)  # fmt: skip
# Instruction sets are switched on per file; which one runs is decided by cpuid at run time.
FILE_FLAGS = {
    "isa_avx512.cpp": ("-mavx2", "-mfma", "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512bf16",
                       "-mavx512vnni", "-mf16c",
                       "-mprefer-vector-width=512"),
    "isa_avx2.cpp": ("-mavx2", "-mfma", "-mf16c"),
    "collective.cpp": ("-fno-trapping-math",),
    "quantize.cpp": ("-fno-trapping-math",),  # lets comparisons be vectors
}  # fmt: skip


class KernelBuildError(RuntimeError):
    """The kernels cannot be compiled here; the text says why."""


def cache_dir() -> Path:
    """Where compiled libraries live: $ENGINE_ACTORS_CACHE/kernels, or ~/.cache/engine-actors/kernels."""
    root = os.environ.get("ENGINE_ACTORS_CACHE")
    return (Path(root) if root else Path.home() / ".cache" / "engine-actors") / "kernels"


def find_compiler() -> str:
    """The C++ compiler: $CXX, or the first of c++, g++, clang++ on PATH."""
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (path := shutil.which(name)):
            return path
    raise KernelBuildError("no C++ compiler: set CXX, or install g++ or clang++")


def build_library() -> Path:
    """Path of the compiled library, compiling it if this source, compiler and CPU have none yet.

    Raises:
        KernelBuildError: Not x86-64, no compiler, or it failed.
    """
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        raise KernelBuildError(f"native kernels need Linux on x86-64, not {sys.platform} on {platform.machine()}")
    compiler = find_compiler()
    sources = sorted(SOURCE_DIR.glob("*.cpp"))
    directory = cache_dir()
    target = directory / f"engine_actors_kernels-{_build_key(compiler)}.so"
    if target.exists():
        return target
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with open(directory / "build.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(compiler, sources, target)
    except OSError as error:
        raise KernelBuildError(f"cannot write the kernel cache {directory}: {error}") from error
    return target


def _build_key(compiler: str) -> str:
    digest = hashlib.sha256()
    for path in sorted(SOURCE_DIR.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(path.name.encode() + b"\0" + path.read_bytes())
    digest.update(repr((COMMON_FLAGS, sorted(FILE_FLAGS.items()))).encode())
    digest.update(_run([compiler, "--version"]).encode())
    digest.update(_cpu_flags().encode())
    return digest.hexdigest()[:20]


def _cpu_flags() -> str:
    with open("/proc/cpuinfo") as file:
        return next((line for line in file if line.startswith("flags")), "")


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError as error:
        raise KernelBuildError(f"{command[0]} did not start: {error}") from error
    if done.returncode != 0:
        raise KernelBuildError(f"{' '.join(command)} failed:\n{done.stderr[-4000:]}")
    return done.stdout


def _compile(compiler: str, sources: list[Path], target: Path) -> None:
    print("engine-actors: compiling CPU kernels (once per machine) ...", end="", file=sys.stderr, flush=True)
    start = time.monotonic()
    try:
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            objects = [os.path.join(folder, source.stem + ".o") for source in sources]
            commands = [
                [compiler, *COMMON_FLAGS, *FILE_FLAGS.get(source.name, ()), "-c", str(source), "-o", obj]
                for source, obj in zip(sources, objects, strict=True)
            ]
            with ThreadPoolExecutor(max_workers=os.cpu_count() or 1) as pool:
                list(pool.map(_run, commands))
            library = os.path.join(folder, "library.so")
            _run([compiler, "-shared", "-pthread", *objects, "-o", library])
            os.replace(library, target)
    except BaseException:
        print(" failed", file=sys.stderr, flush=True)
        raise
    print(f" done in {time.monotonic() - start:.1f} s", file=sys.stderr, flush=True)
