"""The actor around a Worker: one process per rank, driven by RayExecutor.

Steps and other calls run in order on one thread. The concurrency group "control" has threads of its own, so that
`watch` and `ping` answer while a step runs. This module loads no torch, so that EngineCore, whose executor creates the
actors, needs none; a worker imports it in `init_worker`.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray

from executors.network import use_interface_of
from executors.niceness import undo_ray_niceness

if TYPE_CHECKING:
    from executors.worker import Worker

_CONTROL_THREADS = 4
"""One is taken by `watch`."""


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
        return self._run_step(lambda worker: worker.execute_model(scheduler_output))

    def sample_tokens(self, grammar_bitmask: bytes | None) -> bytes | None:
        """See `Worker.sample_tokens`. What it raises ends `watch` too."""
        return self._run_step(lambda worker: worker.sample_tokens(grammar_bitmask))

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
    def ping(self) -> None:
        """Answers while the process is alive and Python runs in it."""

    def shutdown(self) -> None:
        """Leave the process group. The executor kills the actor afterwards."""
        if self._worker is not None:
            self._worker.shutdown()

    def _run_step(self, step: Callable[[Worker], bytes | None]) -> bytes | None:
        try:
            return step(self._live_worker)
        except BaseException as error:
            self._failure = error
            self._failed.set()
            if self._gives_output:
                raise
            return None

    @property
    def _live_worker(self) -> Worker:
        if self._worker is None:
            raise RuntimeError(f"worker rank {self._rank} is not initialised")
        return self._worker


RayWorkerActor = ray.remote(concurrency_groups={"control": _CONTROL_THREADS})(RayWorker)


def _cuda_index() -> int:
    """Ray hides all devices but this actor's, unless it was told to leave CUDA_VISIBLE_DEVICES alone."""
    if os.environ.get("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "0").lower() in ("", "0", "false"):
        return 0
    ids = ray.get_gpu_ids()
    if not ids:
        raise RuntimeError("this worker was given no GPU by Ray; num_gpus_per_worker must be above 0")
    return int(ids[0])
