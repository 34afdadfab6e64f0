"""What HTTP and Ray Serve cost, beside vLLM's server: TTFT, inter-token latency and throughput by number of streams.

    python benchmarks/serving.py MODEL [--vllm-python VENV/bin/python] [--streams 1 8 32 64] [--json FILE]

Measured in turn, each engine alone on the machine, with the same prompts: AsyncLLM in this process, our server
(`engine-actors serve`, with HAProxy; with `--proxies haproxy ray` also with Serve's own proxy), and vLLM's. As many
requests are kept in flight as there are streams; the client of the servers is this process, one and the same for all
(`lean_client.py`). "front ms" is the CPU time per token of everything but engine core and workers: HTTP, proxies, Ray's
own processes, detokenisation; "client ms" is the client's, which for AsyncLLM is part of the front.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

sys.path.insert(0, str(Path(__file__).parent.parent))
from benchmarks.lean_client import run_streams
from engine_actors.bench.client import BenchRequest, BenchResult, Target
from engine_actors.bench.figures import load_figures
from engine_actors.bench.load import LoadReport

START_S = 600
COLUMNS = ("median_ttft_ms", "median_itl_ms", "mean_tpot_ms", "output_throughput", "front_cpu_ms", "client_cpu_ms")
ENGINE_PROCESSES = ("EngineCore", "RayWorker", "VLLM::Worker")
Measured = dict[int, dict[str, Any]]


def requests_for(num_streams: int, args: argparse.Namespace) -> list[BenchRequest]:
    draw = random.Random(num_streams)
    prompts = [
        [draw.randrange(1000, args.vocab) for _ in range(args.input_len)] for _ in range(num_streams * args.waves)
    ]
    return [BenchRequest(prompt, len(prompt), args.output_len) for prompt in prompts]


def front_cpu_s(root: psutil.Process) -> float:
    """CPU time of a process and those under it, less engine core and workers."""
    total = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            if not any(name in " ".join([process.name(), *process.cmdline()]) for name in ENGINE_PROCESSES):
                times = process.cpu_times()
                total += times.user + times.system
    return total


def measure_server(url: str, model: str, args: argparse.Namespace, root: psutil.Process) -> Measured:
    target = Target(f"{url}/v1/completions", model, extra={"ignore_eos": True, "temperature": 0})
    asyncio.run(run_streams(target, requests_for(4, args)[:4], 4))
    measured = {}
    for num_streams in args.streams:
        before_s, client_before_s = front_cpu_s(root), time.process_time()
        figures = load_figures(asyncio.run(run_streams(target, requests_for(num_streams, args), num_streams)))
        client_s, front_s = time.process_time() - client_before_s, front_cpu_s(root) - before_s
        num_tokens = max(1, figures["total_output_tokens"])
        figures |= {"front_cpu_ms": 1000 * front_s / num_tokens, "client_cpu_ms": 1000 * client_s / num_tokens}
        measured[num_streams] = figures
    return measured


def measure_async_llm(args: argparse.Namespace) -> Measured:
    """The same without HTTP."""
    from engine_actors import AsyncLLM, SamplingParams
    from scheduler.sampling_params import RequestOutputKind

    llm = AsyncLLM(args.model, max_model_len=args.max_model_len, num_gpu_blocks_override=args.num_blocks)
    params = SamplingParams(
        temperature=0, max_tokens=args.output_len, ignore_eos=True, output_kind=RequestOutputKind.DELTA
    )

    async def one(request: BenchRequest, limit: asyncio.Semaphore) -> BenchResult:
        async with limit:
            result = BenchResult(started_s=time.perf_counter(), num_prompt_tokens=request.num_prompt_tokens)
            last_s = result.started_s
            async for output in llm.generate(list(request.prompt), params):  # type: ignore[arg-type]
                now_s = time.perf_counter()
                if result.ttft_s:
                    result.itl_s.append(now_s - last_s)
                else:
                    result.ttft_s = now_s - last_s
                last_s = now_s
                result.num_output_tokens += len(output.outputs[0].token_ids)
            result.latency_s = last_s - result.started_s
            return result

    async def run(num_streams: int) -> LoadReport:
        limit = asyncio.Semaphore(num_streams)
        started_s = time.perf_counter()
        results = await asyncio.gather(*(one(request, limit) for request in requests_for(num_streams, args)))
        return LoadReport(list(results), time.perf_counter() - started_s)

    async def all_of_them() -> Measured:
        await asyncio.gather(*(one(request, asyncio.Semaphore(4)) for request in requests_for(4, args)[:4]))
        measured = {}
        for num_streams in args.streams:
            before_s = time.process_time()
            measured[num_streams] = load_figures(await run(num_streams))
            spent_s = time.process_time() - before_s
            measured[num_streams]["front_cpu_ms"] = 1000 * spent_s / measured[num_streams]["total_output_tokens"]
            measured[num_streams]["client_cpu_ms"] = 0.0
        await llm.shutdown_async(0.0)
        return measured

    measured = asyncio.run(all_of_them())
    import ray

    ray.shutdown()
    return measured


@contextmanager
def server(command: list[str], port: int, environment: dict[str, str]) -> Iterator[tuple[str, psutil.Process]]:
    """A server's URL and process, once it answers; ended by Ctrl-C."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env={**os.environ, **environment}, start_new_session=True
        )
        url = f"http://127.0.0.1:{port}"
        try:
            deadline_s = time.monotonic() + START_S
            while not answers(url):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    log.seek(0)
                    raise RuntimeError(f"{command[0]} did not start:\n{log.read().decode(errors='replace')[-4000:]}")
                time.sleep(0.5)
            yield url, psutil.Process(process.pid)
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def answers(url: str) -> bool:
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=5).status == 200
    except (urllib.error.URLError, OSError):
        return False


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def measure(engine: str, args: argparse.Namespace) -> Measured:
    if engine == "AsyncLLM":
        return measure_async_llm(args)
    port = free_port()
    if engine == "vLLM":
        # The environment's own packages, not ours.
        command = [args.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", args.model, "--port",
                   str(port), "--host", "127.0.0.1", "--max-model-len", str(args.max_model_len),
                   "--served-model-name", "model", "--disable-uvicorn-access-log"]  # fmt: skip
        environment = {"PYTHONPATH": "", "VLLM_CPU_KVCACHE_SPACE": "1"}
    else:
        proxy = engine.removeprefix("server, ")
        command = [sys.executable, "-m", "engine_actors.cli.main", "serve", args.model, "--port", str(port),
                   "--max-model-len", str(args.max_model_len), "--served-model-name", "model",
                   "--num-gpu-blocks-override", str(args.num_blocks), "--proxy", proxy]  # fmt: skip
        environment = {}
    with server(command, port, environment) as (url, root):
        return measure_server(url, "model", args, root)


def table(figures: dict[str, Measured], streams: list[int]) -> str:
    titles = ("streams", "TTFT ms", "ITL ms", "TPOT ms", "tokens/s", "front ms", "client ms", "failed")
    lines = [f"{'':<16}{titles[0]:>8}" + "".join(f"{title:>10}" for title in titles[1:-1]) + f"{titles[-1]:>8}"]
    for num_streams in streams:
        for engine, measured in figures.items():
            row = measured[num_streams]
            values = "".join(f"{row[column]:>10.{2 if column in COLUMNS[-2:] else 1}f}" for column in COLUMNS)
            lines.append(f"{engine:<16}{num_streams:>8}{values}{row['failed']:>8}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--vllm-python", help="python of an environment with vLLM, to compare in the same run")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--proxies", nargs="+", default=["haproxy"], choices=["haproxy", "ray"])
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--waves", type=int, default=2, help="requests per stream")
    parser.add_argument("--vocab", type=int, default=40_000, help="token ids are drawn from 1000 up to here")
    parser.add_argument("--max-model-len", type=int, default=2048)
    parser.add_argument("--num-blocks", type=int, default=1024)
    parser.add_argument("--json", type=Path, help="write all figures here")
    args = parser.parse_args()
    args.model = str(Path(args.model).resolve())
    engines = ["AsyncLLM", *(f"server, {proxy}" for proxy in args.proxies), *(["vLLM"] if args.vllm_python else [])]
    figures = {}
    for engine in engines:
        print(f"measuring {engine}", file=sys.stderr, flush=True)
        figures[engine] = measure(engine, args)
    print(table(figures, args.streams))
    if args.json:
        args.json.write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
