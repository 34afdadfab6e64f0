"""One rank of the engine: its device, its place among the ranks, its share of the model and of KV memory.

No Ray here: `executors.ray_worker` wraps a Worker in an actor, `executors.uniproc` calls one on a thread. Methods are
called one at a time; between stages and TP ranks they meet in collectives, so every rank gets the same calls in order.
"""

from __future__ import annotations

import logging
import os
import platform
import time
from typing import Any

import msgspec
import torch

from executors.calibration import measure_input_importance
from executors.config import ModelConfig, ParallelConfig
from executors.kernels.abi import WeightFormat
from executors.kernels.choice import ComputeChoice, choose_compute
from executors.kernels.step import NativeCompute
from executors.kernels.threads import CpuClaim, cpus_of_worker
from executors.loader import load_model
from executors.logits_pipeline import load_logits_processor
from executors.memory import allocate_kv_caches, default_cpu_kv_bytes
from executors.model_config import resolve_on_worker
from executors.model_runner import ModelRunner
from executors.models.base import CausalLM
from executors.parallel_state import ParallelState
from executors.profiler import WorkerProfiler
from executors.sleep import HostWeights, return_free_memory
from executors.step_compute import StepCompute, TorchCompute
from kv.config import CacheConfig
from kv.spec import KVCacheConfig, KVCacheGroup, KVCacheSpec, KVCacheTensor
from scheduler.config import SchedulerConfig
from scheduler.output import ModelRunnerOutput, SchedulerOutput

logger = logging.getLogger(__name__)

_CACHE_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

COLLECTIVE_TIMEOUT_MARGIN_S = 30.0
"""Collectives outlast the step deadline: the executor, which knows more, shall be first to report a stuck step."""

WARM_UP_TOKENS = 16

_SLEEP_EFFECTS = {
    (1, True): "the KV cache is given back, the weights stay in host memory",
    (1, False): "the KV cache is given back, the weights are moved to host memory",
    (2, True): "weights and KV cache are given back",
    (2, False): "weights and KV cache are given back",
}
"""By level, and whether the device is the CPU."""


class Worker:
    """Call order: __init__, load_model, get_kv_cache_spec, determine_available_memory, initialize_from_config, then
    execute_model (and sample_tokens) per step, then shutdown.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        parallel_config: ParallelConfig,
        *,
        rank: int,
        local_rank: int = 0,
        distributed_init_method: str = "",
        device: str = "cpu",
        num_workers_on_node: int = 1,
    ) -> None:
        """Takes the device and joins the other ranks; returns when all have joined.

        Args:
            rank: Global rank, pp_rank × tp_size + tp_rank.
            local_rank: Number among this engine's workers on the node.
            distributed_init_method: Where rank 0 listens, "tcp://address:port"; unused with one rank.
            device: "cpu", "cuda" or "cuda:N".
            num_workers_on_node: This engine's workers that share the node's processors and memory.

        Raises:
            ModelConfigError: The model's config cannot be read, or does not fit the settings.
            RuntimeError: The device cannot be used, or the ranks did not meet in time.
        """
        self.rank = rank
        self.local_rank = local_rank
        self.device = torch.device(device)
        self._num_workers_on_node = num_workers_on_node
        self._cache_config = cache_config
        self._scheduler_config = scheduler_config
        self._parallel_config = parallel_config
        self._num_threads = torch.get_num_threads()
        self._startup_s: dict[str, float] = {}
        started_s = time.monotonic()
        self._cpu_claim: CpuClaim | None = None
        self.compute_name = ""
        self._init_device()
        self.model_config = resolve_on_worker(model_config, self.device.type)
        self._cache_dtype = _CACHE_DTYPES.get(cache_config.cache_dtype, self.model_config.dtype)
        self.parallel = ParallelState.initialize(
            rank=rank,
            tp_size=parallel_config.tensor_parallel_size,
            pp_size=parallel_config.pipeline_parallel_size,
            init_method=distributed_init_method,
            backend="nccl" if self.device.type == "cuda" else "gloo",
            timeout_s=parallel_config.step_timeout_s + COLLECTIVE_TIMEOUT_MARGIN_S,
        )
        self._model: CausalLM | None = None
        self._runner: ModelRunner | None = None
        self._kv_cache_config: KVCacheConfig | None = None
        self._has_kv_caches = False
        self._host_weights: HostWeights | None = None
        self._profiler = WorkerProfiler(parallel_config.torch_profiler_dir, rank, self.device)
        self._decoder = msgspec.msgpack.Decoder(SchedulerOutput)
        self._encoder = msgspec.msgpack.Encoder()
        self._startup_s["join the ranks"] = time.monotonic() - started_s

    def load_model(self) -> None:
        """Build this rank's share of the model and fill it with weights.

        Raises:
            WeightLoadError: The checkpoint lacks, repeats or misshapes a tensor.
            ValueError: A logits processor cannot be imported.
        """
        started_s = time.monotonic()
        self._model, compute = self._build_model()
        self._startup_s["load the model"] = time.monotonic() - started_s
        self._runner = ModelRunner(
            compute,
            self.parallel,
            self._scheduler_config,
            device=self.device,
            logits_processors=[load_logits_processor(n) for n in self.model_config.model_config.logits_processors],
        )

    def _build_model(self) -> tuple[CausalLM, StepCompute]:
        choice = choose_compute(
            self.model_config,
            self.parallel,
            self.device,
            block_size=self._cache_config.block_size,
            cache_dtype=self._cache_dtype,
        )
        model = load_model(
            self.model_config,
            self.parallel,
            self.device,
            attention_backend=choice.attention_backend,
            linear_method=choice.linear_method,
            ops=choice.ops,
            before_prepare=self._calibrate if choice.formats.layers is WeightFormat.INT4 else None,
        )
        return model, self._make_compute(choice, model)

    def _calibrate(self, model: CausalLM) -> None:
        measure_input_importance(model, self.model_config, self.parallel)

    def _make_compute(self, choice: ComputeChoice, model: CausalLM) -> StepCompute:
        """Also gives the worker's threads to whoever computes."""
        self.compute_name = str(choice)
        logger.info("rank %d computes with %s, %d threads", self.rank, choice, self._num_threads)
        if choice.kernels is not None:
            if self._cpu_claim is None:  # Asked once: later this thread is pinned to one of them.
                cpus = cpus_of_worker(self._num_threads, self.local_rank, self._num_workers_on_node, usable_cpus())
                self._cpu_claim = CpuClaim(cpus)
                if len(self._cpu_claim.cpus) < len(cpus):
                    logger.info("rank %d pins no threads: another engine here has pinned its own", self.rank)
            choice.kernels.set_num_threads(self._num_threads, self._cpu_claim.cpus)
            # What torch still does is small, and its threads would spin on the processors of the pool's.
            torch.set_num_threads(1)
            if choice.whole_steps:
                return NativeCompute(
                    choice.kernels,
                    model,
                    choice.formats,
                    max_num_tokens=self._scheduler_config.max_num_batched_tokens,
                    max_num_samples=self._scheduler_config.max_num_seqs,
                )
        return TorchCompute(
            model,
            self.parallel,
            hidden_size=self.model_config.hidden_size,
            dtype=self.model_config.dtype,
            device=self.device,
        )

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """By name, the KV needs of the attention layers this rank holds."""
        return self.model.kv_cache_specs(self._cache_config.block_size, self._cache_dtype.itemsize)

    def determine_available_memory(self) -> int:
        """Bytes this rank can give to the KV cache.

        `kv_cache_memory_bytes` where set. Else on CUDA: `gpu_memory_utilization` of the device less the peak of a
        forward pass as large as any step, which is run here. Else `memory.default_cpu_kv_bytes`.
        """
        if self._cache_config.kv_cache_memory_bytes is not None:
            return self._cache_config.kv_cache_memory_bytes
        if self.device.type != "cuda":
            return default_cpu_kv_bytes(self._num_workers_on_node)
        return self._profiled_cuda_bytes()

    def initialize_from_config(self, config: KVCacheConfig) -> None:
        """Allocate the KV cache, start with an empty batch, and run a small forward pass to warm up.

        Raises:
            ValueError: The config does not fit this rank's layers.
        """
        started_s = time.monotonic()
        self._allocate_kv_caches(config)
        self.runner.set_kv_cache_config(config)
        self._kv_cache_config = config
        num_tokens = min(WARM_UP_TOKENS, self._scheduler_config.max_num_batched_tokens)
        self.runner.dummy_run(num_tokens, min(2, num_tokens, self._scheduler_config.max_num_seqs))
        self._startup_s["KV cache and warm-up"] = time.monotonic() - started_s

    def execute_model(self, scheduler_output: bytes) -> bytes | None:
        """Run one step.

        Args:
            scheduler_output: msgpack SchedulerOutput.

        Returns:
            msgpack ModelRunnerOutput on rank 0 of the last stage, unless the tokens come from `sample_tokens`; else
            None.

        Raises:
            InvalidStepError: The step does not follow the one before, or names what this worker does not know.
        """
        if self._profiler.counts_steps:
            self._profiler.before_step()
        return self._encoded(self.runner.execute(self._decoder.decode(scheduler_output)))

    def sample_tokens(self, grammar_bitmask: bytes | None) -> bytes | None:
        """Second half of a step that has structured output; returns as `execute_model`."""
        return self._encoded(self.runner.sample(grammar_bitmask))

    def execute_dummy_batch(self) -> None:
        """One forward pass on a token of nobody. Every rank must be asked for it.

        Raises:
            RuntimeError: The worker is asleep.
        """
        if self._model is not None and not self._has_kv_caches:
            raise RuntimeError("the worker's KV cache was given back; wake_up must come first")
        self.runner.dummy_run(1, 1)

    def start_profile(self, prefix: str | None = None, delay_iterations: int = 0, max_iterations: int = 0) -> None:
        """See `WorkerProfiler.start`."""
        self._profiler.start(prefix, delay_iterations, max_iterations)

    def stop_profile(self) -> str:
        """See `WorkerProfiler.stop`."""
        return self._profiler.stop()

    # Sleep

    def sleep(self, level: int) -> None:
        """Give memory back until `wake_up`: the KV cache, and at level 2 the weights too.

        Level 1 moves weights from a device to host memory. On CPU that is where they are: they stay, packed as they
        are. No step may be in flight, and no running request may have KV. May be called again after an error.
        """
        if self._has_kv_caches:
            self._has_kv_caches = False
            self.runner.unbind_caches()
            for layer in self.model.attention_layers():
                layer.kv_cache = None
        if level == 2:
            self._host_weights = None
            self.runner.replace_compute(None)
            self._model = None
        elif self.device.type != "cpu" and self._host_weights is None:
            self._host_weights = HostWeights(self.model)
        return_free_memory(self.device)
        logger.info(
            "rank %d sleeps at level %d: %s", self.rank, level, _SLEEP_EFFECTS[level, self.device.type == "cpu"]
        )

    def wake_up(self, tags: list[str]) -> None:
        """Take back "weights" (reading them again if they are gone), "kv_cache", or both. May be called again.

        Raises:
            WeightLoadError: The checkpoint is no longer what it was.
            RuntimeError: The KV cache is asked for before the weights.
        """
        if "weights" in tags and self._host_weights is not None:
            self._host_weights.restore()
            self._host_weights = None
        if "weights" in tags and self._model is None:
            model, compute = self._build_model()
            self.runner.replace_compute(compute)
            self._model = model
        if "kv_cache" in tags and not self._has_kv_caches and self._kv_cache_config is not None:
            self._allocate_kv_caches(self._kv_cache_config)
            self.runner.rebind_caches(self._kv_cache_config)

    def _allocate_kv_caches(self, config: KVCacheConfig) -> None:
        self.model.bind_kv_caches(
            allocate_kv_caches(config, self.model.attention_layers(), self._cache_dtype, self.device)
        )
        self._has_kv_caches = True

    def describe(self) -> dict[str, Any]:
        """Where this rank runs, for logs, the demo and tests."""
        return {
            "rank": self.rank,
            "tp_rank": self.parallel.tp_rank,
            "pp_rank": self.parallel.pp_rank,
            "device": str(self.device),
            "dtype": str(self.model_config.dtype).removeprefix("torch."),
            "compute": self.compute_name,
            "num_threads": self._num_threads,
            "pinned_cpus": [] if self._cpu_claim is None else list(self._cpu_claim.cpus),
            "collectives": self.parallel.transport,
            "startup_s": self._startup_s,
            "pid": os.getpid(),
            "host": platform.node(),
        }

    def shutdown(self) -> None:
        """Leave the process group and the processors. Idempotent."""
        if self._cpu_claim is not None:
            self._cpu_claim.release()
        self.parallel.destroy()

    @property
    def model(self) -> CausalLM:
        if self._model is None:
            raise RuntimeError("the worker has no model: load_model, or wake_up with the weights, must come first")
        return self._model

    @property
    def runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError("the worker has no model yet: call load_model first")
        return self._runner

    def _encoded(self, output: ModelRunnerOutput | None) -> bytes | None:
        return None if output is None or self.parallel.tp_rank != 0 else self._encoder.encode(output)

    def _init_device(self) -> None:
        if self.device.type == "cuda":
            if not torch.cuda.is_available():
                raise RuntimeError(f"device {str(self.device)!r}: torch {torch.__version__} finds no CUDA device here")
            torch.cuda.set_device(self.device)
            self.device = torch.device("cuda", torch.cuda.current_device())
            return
        # Not left to OMP_NUM_THREADS: Ray sets it to the CPUs an actor reserves, which say nothing about the machine.
        num_threads = self._parallel_config.torch_num_threads
        self._num_threads = num_threads or max(1, usable_cpus() // self._num_workers_on_node)
        torch.set_num_threads(self._num_threads)

    def _profiled_cuda_bytes(self) -> int:
        config = self._scheduler_config
        _, total = torch.cuda.mem_get_info(self.device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        # One page in each layer's own tensor: the dummy batch reads and writes the null block only.
        specs = self.get_kv_cache_spec()
        profile_config = KVCacheConfig(
            num_blocks=1,
            groups=tuple(KVCacheGroup((name,), spec) for name, spec in specs.items()),
            tensors=tuple(KVCacheTensor((name,), spec.page_size_bytes) for name, spec in specs.items()),
        )
        self.model.bind_kv_caches(
            allocate_kv_caches(profile_config, self.model.attention_layers(), self._cache_dtype, self.device)
        )
        self.runner.set_kv_cache_config(profile_config)
        self.runner.dummy_run(config.max_num_batched_tokens, min(config.max_num_seqs, config.max_num_batched_tokens))
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        outside_torch = total - free - torch.cuda.memory_reserved(self.device)
        available = int(total * self._cache_config.gpu_memory_utilization) - peak - outside_torch
        logger.info(
            "rank %d: KV cache gets %.2f of %.2f GiB; model and activations peak at %.2f GiB, other use %.2f GiB",
            self.rank, available / 2**30, total / 2**30, peak / 2**30, outside_torch / 2**30,
        )  # fmt: skip
        return available


def usable_cpus() -> int:
    """Processors this process may use: its affinity, within a cgroup v2 quota."""
    count = len(os.sched_getaffinity(0))
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except FileNotFoundError:
        return count
    return count if quota == "max" else max(1, min(count, int(quota) // int(period)))
