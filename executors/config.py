"""Settings of the model and of its parallel layout. Owned by executors/, composed into EngineConfig.

Reading the model's `config.json` and resolving `dtype` and `max_model_len` happens in `executors.model_config`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

DTYPES = ("auto", "float32", "bfloat16", "float16")
EXECUTOR_BACKENDS = ("ray", "uni")
LOAD_FORMATS = ("auto", "safetensors", "dummy")
QUANTIZATIONS = ("int8", "int4")
DEVICES = ("auto", "cpu", "cuda")
PLACEMENT_STRATEGIES = ("PACK", "STRICT_PACK", "SPREAD", "STRICT_SPREAD")


@dataclass(frozen=True)
class ModelFacts:
    """What EngineCore needs to know of a model's files, whose reader needs torch.

    Attributes:
        model_dir: Local directory.
        vocab_size: Tokens the model has logits for.
    """

    model_dir: str
    vocab_size: int


@dataclass(frozen=True)
class ModelConfig:
    """Which model, and how it is loaded and computed.

    Attributes:
        model: Local Hugging Face directory, or a hub id where a hub can be reached.
        tokenizer: Same, for the tokenizer; None is the model's.
        dtype: Of weights and activations; "auto" is the checkpoint's, but bfloat16 for a float32 one only on CUDA.
        max_model_len: Longest prompt + output; None is the model's own limit.
        enforce_eager: No graph capture or kernel recording.
        load_format: "dummy" fills weights at random (for benchmarks without a checkpoint).
        quantization: Round the weights while loading, for the native CPU kernels and bfloat16: "int8" (a scale for each
            output), or "int4" (step and offset for each 32 inputs; embedding and head int8). None leaves them.
        attention_backend: "auto", or a name in `executors.attention.registry`.
        logits_processors: Qualified names of `executors.logits_processors.LogitsProcessor` subclasses, which every
            worker that samples imports and runs, in this order.
        resolved: No option: what `executors.model_config.with_resolution` has read for CPU workers, as bytes that need
            neither torch nor transformers to be passed on. None: each worker reads the model's config files.
        facts: No option: set with `resolved`.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    dtype: str = "auto"
    max_model_len: int | None = None
    seed: int = 0
    trust_remote_code: bool = False
    enforce_eager: bool = False
    load_format: str = "auto"
    quantization: str | None = None
    attention_backend: str = "auto"
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    logits_processors: list[str] = field(default_factory=list)
    resolved: bytes | None = field(default=None, repr=False, compare=False)
    facts: ModelFacts | None = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str) or not self.model:
            raise ValueError(f"model must be a directory or a hub id, got {self.model!r}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {DTYPES}, got {self.dtype!r}")
        if self.load_format not in LOAD_FORMATS:
            raise ValueError(f"load_format must be one of {LOAD_FORMATS}, got {self.load_format!r}")
        if self.quantization is not None and self.quantization not in QUANTIZATIONS:
            raise ValueError(f"quantization must be one of {QUANTIZATIONS} or None, got {self.quantization!r}")
        if self.max_model_len is not None and self.max_model_len < 1 and self.max_model_len != -1:
            raise ValueError(
                f"max_model_len must be at least 1, -1 (fit to memory) or None, got {self.max_model_len!r}"
            )


@dataclass(frozen=True)
class ParallelConfig:
    """How many workers, of which kind, and where.

    Attributes:
        tensor_parallel_size: Ranks that share each layer.
        pipeline_parallel_size: Consecutive groups of layers.
        distributed_executor_backend: "ray" (one actor per rank) or "uni" (in EngineCore's own process).
        device: "auto" is cuda when the cluster has GPUs enough (ray) or this process sees one (uni), else cpu.
        num_cpus_per_worker: CPUs a CPU worker reserves in Ray; None is 1.
        num_gpus_per_worker: GPUs (may be a fraction) a CUDA worker reserves.
        placement_strategy: Of the executor's own placement group, whose bundles are pipeline stages where a node can
            hold one, else ranks; None is PACK.
        worker_resources: Extra custom resources of each worker, e.g. {"accelerator_type:H100": 0.001}.
        torch_num_threads: Threads per CPU worker; None divides the node's processors among its workers.
        step_timeout_s: Deadline of one step, in force on driver and workers.
        startup_timeout_s: Deadline for placing, starting and loading all workers.
        wait_for_nodes: Wait up to that deadline for nodes to join a cluster that cannot hold the workers (an autoscaler
            adds them), instead of refusing at once.
        torch_profiler_dir: Where workers write the traces of `start_profile`, each on its own node; None: nowhere.
    """

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: str = "ray"
    device: str = "auto"
    num_cpus_per_worker: float | None = None
    num_gpus_per_worker: float = 1.0
    placement_strategy: str | None = None
    worker_resources: dict[str, float] = field(default_factory=dict)
    torch_num_threads: int | None = None
    step_timeout_s: float = 300.0
    startup_timeout_s: float = 600.0
    wait_for_nodes: bool = False
    torch_profiler_dir: str | None = None

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __post_init__(self) -> None:
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        backend = self.distributed_executor_backend
        if backend not in EXECUTOR_BACKENDS:
            raise ValueError(f"distributed_executor_backend must be one of {EXECUTOR_BACKENDS}, got {backend!r}")
        if backend == "uni" and self.world_size > 1:
            raise ValueError(
                f"distributed_executor_backend='uni' runs one worker, but tensor_parallel_size "
                f"{self.tensor_parallel_size} × pipeline_parallel_size {self.pipeline_parallel_size} needs "
                f"{self.world_size}; use 'ray'"
            )
        if self.device not in DEVICES:
            raise ValueError(f"device must be one of {DEVICES}, got {self.device!r}")
        if self.placement_strategy is not None and self.placement_strategy not in PLACEMENT_STRATEGIES:
            raise ValueError(
                f"placement_strategy must be one of {PLACEMENT_STRATEGIES}, got {self.placement_strategy!r}"
            )
        if self.torch_num_threads is not None and self.torch_num_threads < 1:
            raise ValueError(f"torch_num_threads must be at least 1 or None, got {self.torch_num_threads!r}")
        if self.num_cpus_per_worker is not None and self.num_cpus_per_worker <= 0:
            raise ValueError(f"num_cpus_per_worker must be positive or None, got {self.num_cpus_per_worker!r}")
        for name in ("num_gpus_per_worker", "step_timeout_s", "startup_timeout_s"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)!r}")
