"""Whether a worker computes with the native kernels, and how: whole steps, layer by layer, or not at all.

Asked once by `executors.worker`, before the model is built: the KV cache's layout and the weights' follow from it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import torch

from executors.attention.base import AttentionBackend
from executors.attention.native_backend import NativeAttentionBackend
from executors.kernels.decoder import reason_against_shape
from executors.kernels.layers import NativeLinearMethod, NativeOps
from executors.kernels.library import NativeKernels, native_kernels
from executors.kernels.ops import CACHE_BLOCK_SIZES
from executors.kernels.quantization import WeightFormats, weight_formats
from executors.layers.linear_method import LinearMethod, TorchLinearMethod
from executors.layers.ops import LayerOps, TorchOps
from executors.model_config import ResolvedModelConfig
from executors.parallel_state import ParallelState

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ComputeChoice:
    """What the layers are built with; and, with `whole_steps`, that a `NativeCompute` shall replace them.

    Attributes:
        kernels: None computes with torch.
        whole_steps: The model's step can be recorded as one program.
        attention_backend: None leaves it to `executors.attention.registry`.
        reason: Why nothing faster was chosen; empty where nothing is.
        formats: Of the weights that the kernels read.
    """

    kernels: NativeKernels | None = None
    whole_steps: bool = False
    attention_backend: AttentionBackend | None = None
    reason: str = ""
    formats: WeightFormats = field(default_factory=WeightFormats)

    @property
    def linear_method(self) -> LinearMethod:
        """Of the layers. A program packs their weights itself."""
        if self.kernels is None or self.whole_steps:
            return TorchLinearMethod()
        return NativeLinearMethod(self.kernels, self.formats)

    @property
    def ops(self) -> LayerOps:
        return TorchOps() if self.kernels is None else NativeOps(self.kernels)

    def __str__(self) -> str:
        if self.kernels is None:
            return f"torch ({self.reason})" if self.reason else "torch"
        how = "whole steps" if self.whole_steps else f"layer by layer, because {self.reason}"
        weights = "" if self.formats == WeightFormats() else f"{self.formats.layers.name.lower()} weights, "
        return f"native kernels ({self.kernels.isa}, {weights}{how})"


def choose_compute(
    config: ResolvedModelConfig, parallel: ParallelState, device: torch.device, *, block_size: int,
    cache_dtype: torch.dtype,
) -> ComputeChoice:  # fmt: skip
    """The fastest way there is for this model, place and cache. A fallback from the kernels is logged with its reason.

    Raises:
        ValueError: attention_backend is "native", or the weights shall be quantised, and the kernels cannot be used.
    """
    backend = config.model_config.attention_backend
    reason = _reason_for_torch(config, parallel, device, block_size, cache_dtype)
    expected = device.type == "cpu" and config.dtype == torch.bfloat16 and backend in ("auto", "native")
    kernels = None
    if reason is None:
        kernels = native_kernels()
        reason = None if kernels is not None else "the CPU kernels are not available here"
    if kernels is None:
        if config.model_config.quantization is not None:
            raise ValueError(
                f"quantization {config.model_config.quantization!r} needs the native CPU kernels, which cannot be "
                f"used: {reason}"
            )
        if backend == "native":
            raise ValueError(f"attention_backend 'native' cannot be used: {reason}")
        if expected:
            logger.warning("Computing with torch instead of the native CPU kernels (slower): %s", reason)
        return ComputeChoice(reason=reason or "")
    reason = _reason_for_layers(config, parallel)
    formats = weight_formats(config.model_config.quantization)
    return ComputeChoice(kernels, reason is None, NativeAttentionBackend(), reason or "", formats)


def _reason_for_torch(
    config: ResolvedModelConfig,
    parallel: ParallelState,
    device: torch.device,
    block_size: int,
    cache_dtype: torch.dtype,
) -> str | None:
    if device.type != "cpu":
        return f"the device is {device.type}"
    if config.dtype != torch.bfloat16:
        return f"dtype is {_name(config.dtype)}, the kernels compute bfloat16"
    if config.model_config.attention_backend not in ("auto", "native"):
        return f"attention_backend is {config.model_config.attention_backend!r}"
    if cache_dtype != torch.bfloat16:
        return f"cache_dtype is {_name(cache_dtype)}, the kernels read bfloat16"
    if block_size not in CACHE_BLOCK_SIZES:
        return f"block_size is {block_size}, the kernels can do {', '.join(map(str, CACHE_BLOCK_SIZES))}"
    reason = reason_against_shape(config.decoder, parallel.tp_size)
    return None if reason is None else f"the model does not suit the kernels: {reason}"


def _reason_for_layers(config: ResolvedModelConfig, parallel: ParallelState) -> str | None:
    """Why no whole step can be recorded."""
    if parallel.tp_size > 1:
        return f"tensor_parallel_size is {parallel.tp_size}"
    if parallel.pp_size > 1:
        return f"pipeline_parallel_size is {parallel.pp_size}"
    return "enforce_eager is set" if config.model_config.enforce_eager else None


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
