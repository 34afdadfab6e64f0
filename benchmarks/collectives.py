"""All-reduce between two ranks of one machine: shared memory beside gloo, in the same run.

    python benchmarks/collectives.py [--hidden 576] [--rows 1 8 64 1024]

Two processes meet as TP ranks do. Prints the mean time of an all-reduce of [rows, hidden] bfloat16 in microseconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def rank_main(rank: int, folder: str, hidden: int, row_counts: list[int]) -> None:
    import torch
    import torch.distributed as dist

    from executors.parallel_state import ParallelState

    torch.set_num_threads(1)
    parallel = ParallelState.initialize(rank=rank, tp_size=2, init_method=f"file://{folder}/meet", timeout_s=60)
    if parallel.transport != "shared memory":
        raise SystemExit(f"the ranks meet over {parallel.transport}")
    group = parallel._require_tp_group()
    if rank == 0:
        print(f"{'rows':>6}{'shared memory, us':>20}{'gloo, us':>12}", flush=True)
    for rows in row_counts:
        x = torch.randn(rows, hidden).bfloat16()
        repeat = max(20, min(2000, 400_000 // rows))
        microseconds = []
        for call in (parallel.all_reduce, lambda tensor: dist.all_reduce(tensor, group=group)):
            for _ in range(10):
                call(x.clone())
            buffers = [x.clone() for _ in range(8)]
            dist.barrier(group=group)
            start = time.perf_counter()
            for i in range(repeat):
                call(buffers[i % 8].fill_(1.0))
            microseconds.append((time.perf_counter() - start) / repeat * 1e6)
        if rank == 0:
            print(f"{rows:>6}{microseconds[0]:>20.1f}{microseconds[1]:>12.1f}", flush=True)
    parallel.destroy()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 1024])
    args = parser.parse_args()
    import torch.multiprocessing

    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(rank_main, args=(folder, args.hidden, args.rows), nprocs=2)


if __name__ == "__main__":
    main()
