"""Each CPU kernel's speed beside what this machine can do: GB/s for the few-row kernels, GFLOP/s for the others.

    python benchmarks/kernels.py [--threads 2] [--isa avx512] [--only linear attention rows]
                                 [--format bf16 int8 int4]

The limits are measured in the same run: reading 512 MB, and multiply-adds on registers. With one thread the clock is
the thread's CPU time, so that other work on the machine disturbs less; otherwise wall time, the best of several.
"""

from __future__ import annotations

import argparse
import ctypes
import time
from collections.abc import Callable

import torch

from executors.attention.base import AttentionMetadata, AttentionParams
from executors.kernels import abi, ops
from executors.kernels.abi import WeightFormat
from executors.kernels.library import NativeKernels
from executors.kernels.memory import HugePageArena, huge_zeros
from executors.kernels.packed import PackedWeight

MODELS = {
    "SmolLM2-135M": {"hidden": 576, "heads": 9, "kv": 3, "head": 64, "mlp": 1536},
    "Gemma3-270M": {"hidden": 640, "heads": 4, "kv": 1, "head": 256, "mlp": 2048},
    "Qwen3-0.6B": {"hidden": 1024, "heads": 16, "kv": 8, "head": 128, "mlp": 3072},
}


class Bench:
    def __init__(self, kernels: NativeKernels, threads: int) -> None:
        self.kernels, self.threads = kernels, threads
        kernels.set_num_threads(threads)
        self.clock = time.thread_time if threads == 1 else time.perf_counter
        memory = huge_zeros((512 << 20,), torch.uint8).fill_(1)  # untouched pages would all be one zero page
        library, isa = kernels.library, kernels.isa_index
        self.gb_s = (
            memory.numel()
            / 1e9
            / self.best(lambda: library.ea_probe_read(isa, memory.data_ptr(), memory.numel(), threads))
        )
        rounds = 300_000
        done = library.ea_probe_arithmetic(isa, rounds, threads)
        self.gflop_s = done / self.best(lambda: library.ea_probe_arithmetic(isa, rounds, threads)) / 1e9
        print(f"{kernels.isa}, {threads} threads: reads {self.gb_s:.1f} GB/s, arithmetic {self.gflop_s:.0f} GFLOP/s")

    def best(self, call: Callable[[], object], seconds: float = 0.25) -> float:
        """Shortest of the calls that fit into `seconds` (at least 3)."""
        times: list[float] = []
        while len(times) < 3 or sum(times) < seconds:
            start = self.clock()
            call()
            times.append(self.clock() - start)
        return min(times)

    def seconds_per_op(self, recorded: list[abi.Op], step: abi.Step) -> float:
        """Run all operations as one program; what one of them takes."""
        library = self.kernels.library
        array = (abi.Op * len(recorded))(*recorded)
        handle = library.ea_program_create(self.kernels.isa_index, array, len(recorded))
        seconds = self.best(lambda: library.ea_program_run(handle, ctypes.byref(step), self.threads))
        library.ea_program_destroy(handle)
        return seconds / len(recorded)

    def report(self, name: str, seconds: float, num_bytes: float, flop: float) -> None:
        """Share of the limit: the time the machine needs at least, over the time taken."""
        gb_s, gflop_s = num_bytes / seconds / 1e9, flop / seconds / 1e9
        share = max(gb_s / self.gb_s, gflop_s / self.gflop_s)
        print(f"{name:58s} {seconds * 1e6:10.1f} us {gb_s:7.1f} GB/s {gflop_s:7.1f} GFLOP/s {share:6.0%}", flush=True)


def bench_linear(bench: Bench, format: WeightFormat) -> None:
    """Integer weights may pass the arithmetic limit, which is that of bfloat16."""
    for model, size in MODELS.items():
        hidden, q_size = size["hidden"], size["heads"] * size["head"]
        shapes = {
            "qkv": (q_size + 2 * size["kv"] * size["head"], hidden), "output": (hidden, q_size),
            "gate_up": (2 * size["mlp"], hidden), "down": (hidden, size["mlp"]),
        }  # fmt: skip
        for name, (n, k) in shapes.items():
            gate_up = name == "gate_up"
            epilogue = abi.Epilogue.SILU_UP if gate_up else abi.Epilogue.STORE
            arena, weight = HugePageArena(), torch.randn(n, k).bfloat16()
            copies = max(2, (96 << 20) // (n * k))  # more than caches hold: few rows must come from memory
            packed = [
                PackedWeight(bench.kernels, weight, gate_up=gate_up, format=format, arena=arena) for _ in range(copies)
            ]
            for rows in (1, 4, 8, 16, 32, 512):
                x, out = torch.randn(rows, k).bfloat16(), torch.empty(rows, n, dtype=torch.bfloat16)
                recorded = [
                    ops.linear_op(p, epilogue, x=x.data_ptr(), ldx=k, y=out.data_ptr(), ldy=n)
                    for p in (packed if rows <= 64 else packed[:1])
                ]
                seconds = bench.seconds_per_op(recorded, ops.rows_step(rows))
                what = f"{model} {name} {n}x{k} {format.name.lower()}, {rows} rows"
                bench.report(what, seconds, packed[0].num_bytes, 2.0 * rows * n * k)


def bench_attention(bench: Bench) -> None:
    """Decode at several contexts, behind a shared prefix, and a whole prompt. Blocks lie in random order."""
    cases = (
        ("decode", 1, 1, 1024, 0), ("decode", 32, 1, 80, 0), ("decode", 32, 1, 1024, 0),
        ("decode, 1024 shared,", 32, 1, 1100, 1024), ("prefill", 1, 1900, 1900, 0),
    )  # fmt: skip
    for model, size in MODELS.items():
        params = AttentionParams(size["heads"], size["kv"], size["head"], size["head"] ** -0.5)
        for name, requests, new, length, shared in cases:
            blocks = -(-length // 16)
            kv_bytes = 4.0 * requests * length * size["kv"] * size["head"]
            layers = max(1, min(30, int((64 << 20) // kv_bytes))) if new == 1 else 1
            shape = ops.kv_cache_shape(requests * blocks + 1, 16, size["kv"], size["head"])
            caches = [huge_zeros(shape, torch.bfloat16).normal_() for _ in range(layers)]
            table = (torch.randperm(requests * blocks).to(torch.int32) + 1).view(requests, blocks).contiguous()
            table[:, : shared // 16] = table[0, : shared // 16]
            metadata = AttentionMetadata(
                requests, requests * new, new, length, torch.arange(requests + 1, dtype=torch.int32) * new,
                torch.full((requests,), length, dtype=torch.int32), table,
                torch.zeros(requests * new, dtype=torch.int64), 16,
            )  # fmt: skip
            q = torch.randn(requests * new, size["heads"] * size["head"]).bfloat16()
            out = torch.empty_like(q)
            recorded = [
                ops.attention_op(params, q=q.data_ptr(), ldq=q.stride(0), kv_cache=cache, out=out.data_ptr(),
                                 ldout=out.stride(0))
                for cache in caches
            ]  # fmt: skip
            group = ops.step_group(metadata, shape[0])
            step = abi.Step(num_tokens=requests * new, num_reqs=requests, num_groups=1, groups=ctypes.addressof(group))
            pairs = requests * (length if new == 1 else new * (new + 1) / 2)
            bench.report(
                f"{model} {name} {requests} x {length} keys", bench.seconds_per_op(recorded, step), kv_bytes,
                4.0 * pairs * size["heads"] * size["head"],
            )  # fmt: skip


def bench_rows(bench: Bench) -> None:
    for model, size in MODELS.items():
        hidden, qkv_size = size["hidden"], (size["heads"] + 2 * size["kv"]) * size["head"]
        params = AttentionParams(size["heads"], size["kv"], size["head"], 1.0)
        for rows in (1, 32, 1024):
            x, weight = torch.randn(rows, hidden).bfloat16(), torch.ones(hidden)
            out, qkv = torch.empty_like(x), torch.randn(rows, qkv_size).bfloat16()
            norm = abi.Op(kind=abi.OpKind.NORM)
            norm.norm = abi.NormOp(
                x=x.data_ptr(), weight=weight.data_ptr(), y=out.data_ptr(), ldx=hidden, ldy=hidden, hidden=hidden,
                eps=1e-5,
            )  # fmt: skip
            cache = huge_zeros(ops.kv_cache_shape(rows // 16 + 1, 16, size["kv"], size["head"]), torch.bfloat16)
            cos_sin = torch.randn(2048, size["head"])
            rotary = ops.qkv_op(params, qkv=qkv.data_ptr(), ldqkv=qkv_size, kv_cache=cache, cos_sin=cos_sin)
            slots = torch.arange(rows)
            group = abi.StepGroup(slot_mapping=slots.data_ptr(), block_size=16, num_blocks=cache.shape[0])
            step = abi.Step(num_tokens=rows, num_groups=1, groups=ctypes.addressof(group), positions=slots.data_ptr())
            for name, op, moved in (
                ("norm", norm, 4.0 * rows * hidden),
                ("rotary + KV write", rotary, 4.0 * rows * qkv_size),
            ):
                seconds = bench.seconds_per_op([op] * (200 if rows == 1 else 20), step)
                bench.report(f"{model} {name}, {rows} rows", seconds, moved, 0.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", choices=("avx512", "avx2"))
    parser.add_argument("--format", nargs="+", choices=("bf16", "int8", "int4"), default=["bf16", "int8", "int4"])
    parser.add_argument("--only", nargs="*", choices=("linear", "attention", "rows"))
    parser.add_argument("--model", nargs="*", choices=tuple(MODELS))
    args = parser.parse_args()
    for name in set(MODELS) - set(args.model or MODELS):
        del MODELS[name]
    torch.manual_seed(0)
    torch.set_num_threads(1)
    bench = Bench(NativeKernels(args.isa), args.threads)
    wanted = args.only or ("linear", "attention", "rows")
    if "linear" in wanted:
        for format in args.format:
            bench_linear(bench, WeightFormat[format.upper()])
    if "attention" in wanted:
        bench_attention(bench)
    if "rows" in wanted:
        bench_rows(bench)


if __name__ == "__main__":
    main()
