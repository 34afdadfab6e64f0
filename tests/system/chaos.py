"""Mixed traffic on an engine while its processes are killed and stopped at random; run by test_chaos.py, or by hand:

    python -m tests.system.chaos MODEL --recovery replay --layout pp2 --duration 60

Two raylets on this machine make the cluster. Client actors stream from an Engine actor (seeds, priorities, aborts) and
compare each text with that of an undisturbed run. Every few seconds a worker, EngineCore, the Engine actor, a client or
the second raylet is killed, or a worker stopped. Without recovery a failed engine is replaced by a new one.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ["RAY_TMPDIR"] = tempfile.mkdtemp(prefix="ea-chaos-", dir="/tmp")  # others shall not join this cluster

import ray
from ray.cluster_utils import Cluster
from ray.exceptions import RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from engine_actors import Engine, EngineDeadError, SamplingParams
from engine_actors.errors import EngineRecoveredError

LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_parallel_size": 2},
    "pp2": {"pipeline_parallel_size": 2, "placement_strategy": "SPREAD"},
}
EVENTS = ("kill worker", "kill worker", "stop worker", "kill core", "kill engine", "kill client", "kill raylet")
STEP_TIMEOUT_S = 5.0
END_LIMIT_S = 2.0
"""After the event (and the step deadline, when a process was stopped rather than killed) every call must have ended."""
NODE_LIMIT_S = 15.0
"""The same for a lost node: Ray itself takes its time to believe it."""
HANG_S = 120.0
NUM_CLIENTS = 3
STREAMS_PER_CLIENT = 4


@dataclass
class Counts:
    """What became of calls.

    Attributes:
        failed: Ended with an error that says the engine died.
        hung: Got nothing for HANG_S.
        wrong: Other tokens than the undisturbed run's, or an error that should not be.
        end_s: `time.time()` of each failed call's end.
    """

    finished: int = 0
    aborted: int = 0
    failed: int = 0
    hung: int = 0
    wrong: list[str] = field(default_factory=list)
    end_s: list[float] = field(default_factory=list)

    def add(self, other: Counts) -> None:
        self.finished += other.finished
        self.aborted += other.aborted
        self.failed += other.failed
        self.hung += other.hung
        self.wrong += other.wrong


def catalogue(seed: int = 0) -> list[tuple[list[int], SamplingParams]]:
    """Requests of all kinds; a few hundred tokens each at most."""
    rng = random.Random(seed)
    head = [rng.randrange(10, 500) for _ in range(40)]
    requests = []
    for index in range(24):
        prompt = head[: rng.choice([0, 16, 40])] + [rng.randrange(10, 500) for _ in range(rng.choice([1, 7, 33, 150]))]
        params = SamplingParams(
            temperature=rng.choice([0.0, 0.8, 1.0]),
            top_p=rng.choice([1.0, 0.9]),
            seed=index,
            max_tokens=rng.choice([8, 40, 120]),
            presence_penalty=rng.choice([0.0, 0.0, 0.7]),
            ignore_eos=True,
        )
        requests.append((prompt, params))
    return requests


@ray.remote(num_cpus=0, max_concurrency=50)
class Client:
    """Streams random requests of the catalogue, several at a time, and checks what comes."""

    def __init__(self, seed: int, expected: list[list[int]]) -> None:
        self._rng = random.Random(seed)
        self._requests = catalogue()
        self._expected = expected
        self._counts = Counts()
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self._next_id = seed * 1_000_000

    async def run(self, engine: Any) -> None:
        """Begin to send requests to this engine."""
        self._stopping = False
        self._tasks = [asyncio.create_task(self._stream(engine)) for _ in range(STREAMS_PER_CLIENT)]

    async def drain(self) -> Counts:
        """Send no more; when all calls have ended, what became of them since the last time."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        counts, self._counts = self._counts, Counts()
        return counts

    async def _stream(self, engine: Any) -> None:
        while not self._stopping:
            index = self._rng.randrange(len(self._requests))
            abort_after = self._rng.choice([None, None, None, self._rng.randrange(1, 20)])
            try:
                await self._one(engine, index, abort_after)
            except TimeoutError:
                self._counts.hung += 1
            except (EngineDeadError, RayActorError):
                self._counts.failed += 1
                self._counts.end_s.append(time.time())
                return  # the driver gives us another engine
            except Exception as error:
                self._counts.wrong.append(f"request {index}: {error!r}")

    async def _one(self, engine: Any, index: int, abort_after: int | None) -> None:
        prompt, params = self._requests[index]
        self._next_id += 1
        request_id, tokens, reason = str(self._next_id), list[int](), None
        stream = engine.stream.remote(prompt, params, request_id, priority=self._rng.randrange(3))
        while True:
            try:
                ref = await asyncio.wait_for(anext(stream), HANG_S)
            except StopAsyncIteration:
                break
            output = await ref
            tokens += output.outputs[0].token_ids
            reason = output.outputs[0].finish_reason
            if abort_after is not None and len(tokens) >= abort_after:
                abort_after = None
                engine.abort.remote(request_id)
        expected = self._expected[index]
        if tokens != (expected[: len(tokens)] if reason == "abort" else expected):
            self._counts.wrong.append(f"request {index}: {tokens} instead of {expected}, finish_reason {reason}")
        elif reason == "abort":
            self._counts.aborted += 1
        elif reason == "length":
            self._counts.finished += 1
        else:
            self._counts.wrong.append(f"request {index}: finish_reason {reason}")


class Chaos:
    """One run. `report` has the figures at the end."""

    def __init__(self, model: str, recovery: str, layout: str, seed: int, options: dict[str, Any]) -> None:
        self.rng = random.Random(seed)
        self.recovery = recovery
        self.options = {
            "model": model,
            "recovery": recovery,
            "max_recovery_attempts": 10,
            "step_timeout_s": STEP_TIMEOUT_S,
            "num_gpu_blocks_override": 600,
            "max_num_seqs": 8,
            "max_model_len": 512,
            "torch_num_threads": 1,
            "scheduling_policy": "priority",
            **LAYOUTS[layout],
            **options,
        }
        self.cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "include_dashboard": False})
        self.second: Any = self.cluster.add_node(num_cpus=2)
        ray.init(address=self.cluster.address, log_to_driver=False, logging_level="ERROR")
        self.head_id = ray.get_runtime_context().get_node_id()
        self.engine: Any = None
        self.clients: list[Any] = []
        self.num_clients = 0
        self.counts = Counts()
        self.events: dict[str, int] = {}
        self.detection_s: list[float] = []
        self.ends_s: list[float] = []
        self.late: list[str] = []
        self.recovery_s: list[float] = []
        self.engine_starts_s: list[float] = []

    def start_engine(self) -> None:
        for attempt in range(3):
            began = time.monotonic()
            here = NodeAffinitySchedulingStrategy(self.head_id, soft=False)
            self.engine = Engine.options(scheduling_strategy=here).remote(**self.options)
            try:
                ray.get(self.engine.health.remote(), timeout=HANG_S)
                break
            except RayActorError:
                # Ray may place parts of it on the node that was just killed, as long as it thinks that it lives.
                if attempt == 2:
                    raise
        self.engine_starts_s.append(time.monotonic() - began)
        self.seen_recoveries, self.seen_lost_s = 0, 0.0

    def start_client(self) -> Any:
        self.num_clients += 1
        here = NodeAffinitySchedulingStrategy(self.head_id, soft=False)
        return Client.options(scheduling_strategy=here).remote(self.num_clients, self.expected)

    def run(self, duration_s: float) -> dict[str, Any]:
        self.start_engine()
        prompts, params = zip(*catalogue(), strict=True)
        outputs = ray.get(self.engine.generate.remote(list(prompts), list(params)), timeout=HANG_S)
        self.expected = [output.outputs[0].token_ids for output in outputs]
        self.clients = [self.start_client() for _ in range(NUM_CLIENTS)]
        self.run_clients()
        end = time.monotonic() + duration_s
        while time.monotonic() < end:
            time.sleep(self.rng.uniform(2.0, 5.0))
            self.event(self.rng.choice(EVENTS))
        self.collect(None, 0.0)
        self.note_recoveries()
        deadline = time.monotonic() + 30
        while not (is_empty := ray.get(self.engine.reset_prefix_cache.remote())) and time.monotonic() < deadline:
            time.sleep(0.1)
        return self.report(is_empty)

    def run_clients(self) -> None:
        ray.get([client.run.remote(self.engine) for client in self.clients])

    def event(self, kind: str) -> None:
        """Let it happen, and see that every call ends as it must."""
        pids = self.pids()
        if pids is None:
            return  # a recovery is under way; its end comes first
        # The answer comes as soon as a recovery has ended. Kills at that very moment, time after time, look like a
        # request that kills the engine whenever it is computed, which ends alone for it (scheduler.probation).
        time.sleep(self.rng.uniform(0.0, 2.0))
        self.events[kind] = self.events.get(kind, 0) + 1
        workers = [pid for name, pid in pids.items() if name.startswith("Worker")]
        happened = time.time()
        match kind:
            case "kill worker":
                os.kill(self.rng.choice(workers), signal.SIGKILL)
            case "stop worker":
                os.kill(self.rng.choice(workers), signal.SIGSTOP)
            case "kill core":
                os.kill(pids["EngineCore"], signal.SIGKILL)
            case "kill engine":
                os.kill(pids["Engine"], signal.SIGKILL)
            case "kill client":
                victim = self.clients.pop(self.rng.randrange(len(self.clients)))
                ray.kill(victim)
                self.clients.append(self.start_client())
                ray.get(self.clients[-1].run.remote(self.engine))
            case "kill raylet":
                self.cluster.remove_node(self.second, allow_graceful=False)
                self.second = self.cluster.add_node(num_cpus=2)
        if kind == "kill engine" or self.recovery == "none":
            self.after_failure(kind, happened)
        else:
            self.note_recoveries()

    def after_failure(self, kind: str, happened: float) -> None:
        """All calls have ended in time; if the engine is dead, there is a new one."""
        self.collect(kind, happened)
        try:
            ray.get(self.engine.health.remote(), timeout=HANG_S)
        except (EngineDeadError, RayActorError):
            with contextlib.suppress(RayError):
                ray.get(self.engine.shutdown.remote(), timeout=30)
            ray.kill(self.engine)
            self.start_engine()
        self.run_clients()

    def collect(self, kind: str | None, happened: float) -> None:
        all_counts = ray.get([client.drain.remote() for client in self.clients], timeout=2 * HANG_S)
        ends: list[float] = []
        for counts in all_counts:
            ends += counts.end_s
            self.counts.add(counts)
        if not ends or kind is None:
            if ends:
                self.counts.wrong.append(f"{len(ends)} calls failed at the end of the run")
            return
        first, last = min(ends) - happened, max(ends) - happened
        if first < 0:
            self.counts.wrong.append(f"a call failed {-first:.1f} s before '{kind}'")
        limit = END_LIMIT_S + (STEP_TIMEOUT_S if kind == "stop worker" else 0.0)
        limit = NODE_LIMIT_S if kind == "kill raylet" else limit
        if last > limit:
            self.late.append(f"{kind}: the last call ended after {last:.1f} s")
        if kind in ("kill worker", "kill core", "kill engine"):
            self.detection_s.append(first)
            self.ends_s.append(last)

    def note_recoveries(self) -> None:
        with contextlib.suppress(RayError):
            stats = ray.get(self.engine.recovery_stats.remote(), timeout=10)
            new = stats.recoveries - self.seen_recoveries
            if new:
                self.recovery_s += [(stats.lost_s - self.seen_lost_s) / new] * new
                self.seen_recoveries, self.seen_lost_s = stats.recoveries, stats.lost_s

    def pids(self) -> dict[str, int] | None:
        """Of each process of the engine; None while it cannot tell."""
        try:
            places = ray.get(self.engine.where.remote(), timeout=60)
        except (EngineRecoveredError, TimeoutError, RayError):
            return None
        return {name: int(place.split("pid ")[1].split(",")[0]) for name, place in places.items()}

    def report(self, is_empty: bool) -> dict[str, Any]:
        def figures(values: list[float]) -> dict[str, float] | None:
            if not values:
                return None
            return {"median": round(statistics.median(values), 3), "max": round(max(values), 3), "n": len(values)}

        counts = asdict(self.counts)
        counts.pop("end_s")
        return {
            "recovery": self.recovery,
            "events": self.events,
            **counts,
            "late": self.late,
            "engine is empty at the end": is_empty,
            "detection_s (killed process to the first caller's error)": figures(self.detection_s),
            "end_s (killed process to the last caller's error)": figures(self.ends_s),
            "recovery_s": figures(self.recovery_s),
            "engine_start_s": figures(self.engine_starts_s),
        }

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--recovery", choices=["none", "replay"], default="replay")
    parser.add_argument("--layout", choices=sorted(LAYOUTS), default="tp2")
    parser.add_argument("--duration", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--report", help="also write the figures to this file")
    parser.add_argument("--options", type=json.loads, default={}, help="JSON of further engine options")
    args = parser.parse_args()
    chaos = Chaos(args.model, args.recovery, args.layout, args.seed, args.options)
    try:
        report = json.dumps(chaos.run(args.duration), indent=1)
        print(report, flush=True)
        if args.report is not None:
            Path(args.report).write_text(report)
    finally:
        chaos.close()


if __name__ == "__main__":
    main()
