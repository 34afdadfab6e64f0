"""The actor around a Worker: one process per rank, driven by RayExecutor.

Steps and other calls run in order on one thread; with a step channel that thread spends its time in `serve_steps`. The
concurrency group "control" has threads of its own, so that `watch` and `ping` answer while a step runs. This module
loads no torch, so that EngineCore, whose executor creates the actors, needs none; a worker imports it in `init_worker`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray

from executors.network import use_interface_of
from executors.niceness import undo_ray_niceness
from executors.step_channel import Packet, PacketKind, StepChannel, StepListener

if TYPE_CHECKING:
    from executors.worker import Worker

_CONTROL_THREADS = 4
"""One is taken by `watch`."""

_KEPT_RESULTS = 16
"""Of the last steps that came over the channel, for `result_of`."""


class RayWorker:
    """Created by RayExecutor with the rank's resources; never restarted by Ray."""

    def __init__(self, rank: int, gives_output: bool) -> None:
        """
        Args:
            gives_output: This rank's step results are read. The others' failures are told by `watch` alone, for Ray
                logs an error that nobody reads.
        """
        undo_ray_niceness()
        self._rank = rank
        self._gives_output = gives_output
        self._worker: Worker | None = None
        self._failure: BaseException | None = None
        self._failed = threading.Event()
        self._store: Any = None
        self._listener: StepListener | None = None
        self._channel: StepChannel | None = None
        # Results by number of the step, which counts what was executed and sampled.
        self._num_steps = 0
        self._results: dict[int, bytes | None] = {}
        self._progress = threading.Condition()

    @ray.method(concurrency_group="control")
    def where(self) -> dict[str, Any]:
        """Node id, node address and process id."""
        return {
            "node_id": ray.get_runtime_context().get_node_id(),
            "node_ip": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
        }

    def listen(self) -> str:
        """On rank 0: where the other ranks find it, as an init method of torch.distributed.

        The store listens from here on, on a port the system picked, and init_process_group finds it in this process
        (`multi_tenant`). So nobody else can take the port in between.
        """
        from torch.distributed import TCPStore

        address = ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
        return f"tcp://{address}:{self._store.port}"

    def init_worker(self, configs: tuple[Any, ...], device: str, **kwargs: Any) -> None:
        """Construct the Worker; returns when all ranks have met. Arguments are Worker's.

        Args:
            device: "cpu" or "cuda"; on CUDA the device is the one Ray gave this actor.
        """
        if device == "cuda":
            device = f"cuda:{_cuda_index()}"
        from executors.worker import Worker

        use_interface_of(ray.util.get_node_ip_address())
        self._worker = Worker(*configs, rank=self._rank, device=device, **kwargs)
        self._store = None  # The process group keeps it now.

    def execute_model(self, scheduler_output: bytes) -> bytes | None:
        """See `Worker.execute_model`. What it raises ends `watch` too."""
        return self._answer(lambda worker: worker.execute_model(scheduler_output))

    def sample_tokens(self, grammar_bitmask: bytes | None) -> bytes | None:
        """See `Worker.sample_tokens`. What it raises ends `watch` too."""
        return self._answer(lambda worker: worker.sample_tokens(grammar_bitmask))

    def listen_for_steps(self) -> str:
        """The name of the socket that `serve_steps` takes steps from."""
        self._listener = StepListener()
        return self._listener.name

    def serve_steps(self) -> None:
        """Run the steps that come over the channel until it says pause, or is closed. What one raises ends `watch`."""
        if self._channel is None:
            if self._listener is None:
                raise RuntimeError("listen_for_steps must come before serve_steps")
            self._channel = self._listener.accept()
        while (packet := self._channel.receive()) is not None and packet.kind is not PacketKind.PAUSE:
            try:
                result = self._run_packet(packet)
            except BaseException:
                return
            if self._gives_output:
                try:
                    self._channel.send(PacketKind.RESULT, result)
                except ConnectionError:
                    return  # The owner is gone; Ray ends this process.

    @ray.method(concurrency_group="results")
    def result_of(self, number: int) -> bytes | None:
        """The result of a step, waited for. The last `_KEPT_RESULTS` are known.

        Args:
            number: 1 for the first step this worker executed or sampled.
        """
        with self._progress:
            self._progress.wait_for(lambda: self._num_steps >= number or self._failed.is_set())
            if number in self._results:
                return self._results[number]
        if self._failure is not None:
            raise self._failure
        raise LookupError(
            f"the result of step {number} is gone: the last {_KEPT_RESULTS} of {self._num_steps} are kept"
        )

    def call(self, method: str | Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a Worker method by name, or a function that takes the Worker first. Errors are the caller's alone."""
        if isinstance(method, str):
            return getattr(self._live_worker, method)(*args, **kwargs)
        return method(self._live_worker, *args, **kwargs)

    @ray.method(concurrency_group="control")
    def watch(self) -> None:
        """Never returns while this worker is well; raises what a step raised. Fails when the process dies."""
        self._failed.wait()
        if self._failure is not None:
            raise self._failure

    @ray.method(concurrency_group="control")
    def ping(self) -> int:
        """How many steps this worker has finished. Answers while the process is alive and Python runs in it."""
        return self._num_steps

    def shutdown(self) -> None:
        """Leave the process group. The executor kills the actor afterwards."""
        if self._worker is not None:
            self._worker.shutdown()

    def _answer(self, step: Callable[[Worker], bytes | None]) -> bytes | None:
        """The result of an actor call that is a step."""
        try:
            return self._run_step(step)
        except BaseException:
            if self._gives_output:
                raise
            return None

    def _run_packet(self, packet: Packet) -> bytes | None:
        payload = packet.payload
        if packet.kind is PacketKind.EXECUTE:
            return self._run_step(lambda worker: worker.execute_model(payload or b""))
        return self._run_step(lambda worker: worker.sample_tokens(payload))

    def _run_step(self, step: Callable[[Worker], bytes | None]) -> bytes | None:
        try:
            result = step(self._live_worker)
        except BaseException as error:
            self._failure = error
            with self._progress:
                self._failed.set()
                self._progress.notify_all()
            raise
        with self._progress:
            self._num_steps += 1
            self._results[self._num_steps] = result
            self._results.pop(self._num_steps - _KEPT_RESULTS, None)
            self._progress.notify_all()
        return result

    @property
    def _live_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError(f"worker rank {self._rank} is not initialised")
        return self._worker


RayWorkerActor = ray.remote(concurrency_groups={"control": _CONTROL_THREADS, "results": 1})(RayWorker)


def _cuda_index() -> int:
    """Ray hides all devices but this actor's, unless it was told to leave CUDA_VISIBLE_DEVICES alone."""
    if os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "0").lower() in ("", "0", "false"):
        return 0
    ids = ray.get_gpu_ids()
    if not ids:
        raise RuntimeError("this worker was given no GPU by Ray; num_gpus_per_worker must be above 0")
    return int(ids[0])
