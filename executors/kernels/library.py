"""The compiled library of this process: loaded once, instruction set chosen by cpuid, threads set by the worker.

`native_kernels()` is what the rest of the engine asks; None means "use torch", and the reason is logged once.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Sequence

from executors.kernels import abi
from executors.kernels.build import KernelBuildError, build_library

logger = logging.getLogger(__name__)

ISA_NAMES = ("avx512", "avx2")  # best first; the order of kTables in csrc/api.cpp


class NativeKernels:
    """The library with one instruction set.

    Args:
        isa: "avx512" (with BF16), "avx2" (with FMA), or None for the best this CPU has.

    Raises:
        KernelBuildError: It cannot be compiled, or the CPU lacks the instruction set.
    """

    def __init__(self, isa: str | None = None) -> None:
        self.library = _load()
        supported = [name for i, name in enumerate(ISA_NAMES) if self.library.ea_isa_supported(i)]
        if isa is None and not supported:
            raise KernelBuildError(f"the CPU has none of {ISA_NAMES}")
        self.isa = supported[0] if isa is None else isa
        if self.isa not in supported:
            raise KernelBuildError(f"isa must be one of {supported} on this CPU, got {isa!r}")
        self.isa_index = ISA_NAMES.index(self.isa)

    @property
    def num_threads(self) -> int:
        return int(self.library.ea_threads())

    def set_num_threads(self, num_threads: int, cpus: Sequence[int] = ()) -> None:
        """Size the process's thread pool; thread 0 is the caller of each step.

        Args:
            num_threads: At least 1.
            cpus: CPU of each thread, the calling thread's first; empty leaves them to the scheduler.
        """
        if num_threads < 1:
            raise ValueError(f"num_threads must be at least 1, got {num_threads!r}")
        array = (ctypes.c_int * max(1, len(cpus)))(*cpus)
        self.library.ea_set_threads(num_threads, array, len(cpus))

    def run_op(self, op: abi.Op, step: abi.Step, num_threads: int = 0) -> None:
        """Run one operation; 0 threads is all that the pool has."""
        check_status(self.library.ea_run_op(self.isa_index, ctypes.byref(op), ctypes.byref(step), num_threads))


def check_status(status: int) -> None:
    if status != 0:
        raise ValueError(f"native step refused: {abi.STATUS_TEXT.get(status, f'status {status}')}")


@functools.cache
def native_kernels() -> NativeKernels | None:
    """The process's kernels, or None where they cannot be built or run (announced once)."""
    try:
        return NativeKernels()
    except KernelBuildError as error:
        logger.warning("CPU kernels are not available, computing with torch instead (slower): %s", error)
        return None


@functools.cache
def _load() -> ctypes.CDLL:
    path = build_library()
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise KernelBuildError(f"cannot load {path}: {error}") from error
    _declare(library)
    for index, structure in enumerate(abi.STRUCTURES):
        compiled = library.ea_struct_size(index)
        if compiled != ctypes.sizeof(structure):
            raise RuntimeError(  # a mistake in the source, not something this machine lacks
                f"{structure.__name__} is {compiled} bytes in {path} but {ctypes.sizeof(structure)} in abi.py"
            )
    return library


def _declare(library: ctypes.CDLL) -> None:
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
    signatures = {
        "ea_isa_supported": (i32, [i32]),
        "ea_struct_size": (i64, [i32]),
        "ea_set_threads": (None, [i32, pointer, i32]),
        "ea_threads": (i32, []),
        "ea_program_create": (pointer, [i32, pointer, i32]),
        "ea_program_destroy": (None, [pointer]),
        "ea_program_run": (i32, [pointer, pointer, i32]),
        "ea_run_op": (i32, [i32, pointer, pointer, i32]),
        "ea_pack_bf16": (None, [pointer, i64, i64, i64, i32, pointer]),
        "ea_panel_bytes": (i64, [i32, i64]),
        "ea_quantize": (None, [pointer, i64, i64, i64, i32, i32, pointer, pointer, pointer]),
        "ea_dequantize": (None, [pointer, pointer, i64, i64, i32, i32, pointer, i64]),
        "ea_group_segment_bytes": (i64, [i32, i64]),
        "ea_group_create": (pointer, [pointer, i32, i32, i64, i64]),
        "ea_group_destroy": (None, [pointer]),
        "ea_group_all_reduce": (i32, [pointer, pointer, i64, i32]),
        "ea_group_all_gather": (i32, [pointer, pointer, i64, pointer]),
        "ea_probe_read": (None, [i32, pointer, i64, i32]),
        "ea_probe_arithmetic": (ctypes.c_double, [i32, i64, i32]),
        "ea_unpack_bf16": (None, [pointer, i64, i64, i32, pointer, i64]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
