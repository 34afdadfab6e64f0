"""What it costs to get a step from one actor to another and its answer back: sockets, plain calls, a compiled graph.

    python benchmarks/transport.py [--steps 1000]

As between EngineCoreActor and a worker: an asyncio actor with two steps in flight, 40 bytes there and 4 back. Prints
for each transport the wall time of a step, the CPU time both processes spend on it, and how much of a second the
worker's process computes while nothing is under way. A worker whose idle share is near 1 takes a processor from
everything else on its machine, which is why the engine uses no compiled graphs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import queue
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import ray

sys.path.insert(0, str(Path(__file__).parent.parent))
from executors.step_channel import PacketKind, StepChannel, StepListener

IDLE_S = 3.0


class Worker:
    def execute_model(self, payload: bytes) -> bytes:
        return payload[:4]

    def listen(self) -> str:
        self._listener = StepListener()
        return self._listener.name

    @ray.method(concurrency_group="steps")
    def serve(self) -> None:
        channel = self._listener.accept()
        while (packet := channel.receive()) is not None:
            channel.send(PacketKind.RESULT, self.execute_model(packet.payload or b""))

    def cpu_s(self) -> float:
        return time.process_time()


class Core:
    """Drives one worker over the transport of the given name."""

    def __init__(self, transport: str) -> None:
        self._transport = transport
        self._worker: Any = ray.remote(concurrency_groups={"steps": 1})(Worker).options(num_cpus=1).remote()
        self._graph: Any = None
        self._channel: StepChannel | None = None
        self._waiting: deque[asyncio.Future[bytes]] = deque()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    async def start(self) -> None:
        await self._worker.cpu_s.remote()
        if self._transport == "compiled graph":
            await asyncio.to_thread(self._compile)
            threading.Thread(target=self._read, daemon=True).start()
        if self._transport == "socket":
            self._channel = StepChannel.connect(await self._worker.listen.remote())
            self._worker.serve.remote()
            asyncio.get_running_loop().add_reader(self._channel.fileno(), self._receive, self._channel)

    def _receive(self, channel: StepChannel) -> None:
        packet = channel.receive()
        if packet is not None:
            self._waiting.popleft().set_result(packet.payload or b"")

    def _compile(self) -> None:
        from ray.dag import InputNode

        with InputNode() as payload:
            self._graph = self._worker.execute_model.bind(payload).experimental_compile()

    def _read(self) -> None:
        """Answers of the graph come by a call that blocks."""
        while True:
            reference, future, loop = self._answers.get()
            loop.call_soon_threadsafe(future.set_result, ray.get(reference))

    def _dispatch(self) -> asyncio.Future[bytes]:
        payload = os.urandom(40)
        if self._channel is not None:
            self._waiting.append(asyncio.get_running_loop().create_future())
            self._channel.send(PacketKind.EXECUTE, payload)
            return self._waiting[-1]
        if self._graph is None:
            return asyncio.wrap_future(self._worker.execute_model.remote(payload).future())
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        self._answers.put((self._graph.execute(payload), future, loop))
        return future

    async def run(self, steps: int) -> tuple[float, float, float]:
        """(wall, own CPU, worker's CPU) seconds a step."""
        worker_s, own_s, wall_s = await self._worker.cpu_s.remote(), time.process_time(), time.perf_counter()
        in_flight: list[asyncio.Future[bytes]] = []
        for _ in range(steps):
            in_flight.append(self._dispatch())
            if len(in_flight) == 2:
                await in_flight.pop(0)
        await asyncio.gather(*in_flight)
        wall_s, own_s = time.perf_counter() - wall_s, time.process_time() - own_s
        return wall_s / steps, own_s / steps, (await self._worker.cpu_s.remote() - worker_s) / steps

    async def idle_share(self) -> float:
        before = await self._worker.cpu_s.remote()
        await asyncio.sleep(IDLE_S)
        return (await self._worker.cpu_s.remote() - before) / IDLE_S


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    args = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    print(f"{'us a step':<18}{'wall':>8}{'core CPU':>12}{'worker CPU':>12}{'idle share':>12}")
    for transport in ("socket", "plain calls", "compiled graph"):
        core = ray.remote(Core).options(num_cpus=0).remote(transport)
        ray.get(core.start.remote())
        ray.get(core.run.remote(args.steps))
        times = "".join(
            f"{s * 1e6:>{w}.0f}" for s, w in zip(ray.get(core.run.remote(args.steps)), (8, 12, 12), strict=True)
        )
        print(f"{transport:<18}{times}{ray.get(core.idle_share.remote()):>12.2f}", flush=True)
        ray.kill(core)


if __name__ == "__main__":
    main()
