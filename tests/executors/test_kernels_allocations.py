"""A recorded step takes no memory from the heap once it has run with as many requests and tokens."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from executors.kernels.build import KernelBuildError, find_compiler

COUNTER = """
#include <atomic>
#include <cstddef>
extern "C" void* __libc_malloc(size_t);
static std::atomic<long> count;
extern "C" void* malloc(size_t size) { count++; return __libc_malloc(size); }
extern "C" long malloc_count() { return count; }
"""

SCRIPT = """
import ctypes, torch
from executors.attention.base import AttentionMetadata, AttentionParams
from executors.kernels import abi, ops
from executors.kernels.library import NativeKernels
from executors.kernels.memory import huge_zeros
from executors.kernels.packed import PackedWeight

kernels = NativeKernels()
kernels.set_num_threads(2)
library = kernels.library
params = AttentionParams(4, 2, 32, 1.0)
requests, length = 8, 600
blocks = 1 + requests * 38
cache = huge_zeros(ops.kv_cache_shape(blocks, 16, 2, 32), torch.bfloat16)
x, qkv, out = (torch.zeros(requests, n, dtype=torch.bfloat16) for n in (64, 256, 128))
tables = torch.arange(1, blocks, dtype=torch.int32).view(requests, 38).contiguous()
tables[:, :20] = tables[0, :20]  # a shared prefix
meta = AttentionMetadata(
    requests, requests, 1, length, torch.arange(requests + 1, dtype=torch.int32),
    torch.full((requests,), length, dtype=torch.int32), tables, torch.arange(requests) * 16 + 16, 16,
)
group = ops.step_group(meta, blocks)
weight = PackedWeight(kernels, torch.zeros(4096, 64).bfloat16(), format=abi.WeightFormat.INT8)
greedy = torch.zeros(requests, dtype=torch.int64)
recorded = [
    ops.qkv_op(params, qkv=qkv.data_ptr(), ldqkv=256, kv_cache=cache, cos_sin=None),
    ops.attention_op(params, q=qkv.data_ptr(), ldq=256, kv_cache=cache, out=out.data_ptr(), ldout=128),
    ops.linear_op(weight, abi.Epilogue.ARGMAX, x=x.data_ptr(), ldx=64, y=greedy.data_ptr(), ldy=1),
]
array = (abi.Op * 3)(*recorded)
handle = library.ea_program_create(kernels.isa_index, array, 3)
step = abi.Step(num_tokens=requests, num_reqs=requests, num_samples=requests, num_groups=1,
                groups=ctypes.addressof(group))
address = ctypes.addressof(step)
counter = ctypes.CDLL(None).malloc_count
counter.restype = ctypes.c_long

def spent(repeat):
    before = counter()
    for _ in range(repeat):
        assert library.ea_program_run(handle, address, 2) == 0
    return counter() - before

spent(3)
assert counter() > 1000
few, many = spent(10), spent(210)
print(many - few)
"""


def test_steps_after_the_first_allocate_nothing(tmp_path: Path) -> None:
    try:
        compiler = find_compiler()
    except KernelBuildError as error:
        pytest.skip(str(error))
    source, shim = tmp_path / "count.cpp", tmp_path / "count.so"
    source.write_text(COUNTER)
    subprocess.run([compiler, "-O2", "-shared", "-fPIC", str(source), "-o", str(shim)], check=True)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env={**os.environ, "LD_PRELOAD": str(shim)}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # 200 steps more. Python's own calls may take a few blocks.
    assert int(done.stdout) < 20
