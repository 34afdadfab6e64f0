"""What every layer of one rank is built with: its place in the grid, device, dtype and the compute strategies."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from executors.attention.base import AttentionBackend
from executors.layers.linear_method import LinearMethod, TorchLinearMethod
from executors.layers.ops import LayerOps, TorchOps
from executors.parallel_state import ParallelState


@dataclass(frozen=True)
class LayerContext:
    """Chosen once, by `executors.models.registry.build_model`; layers keep what they use of it."""

    parallel: ParallelState
    device: torch.device
    dtype: torch.dtype
    attention_backend: AttentionBackend
    linear_method: LinearMethod = field(default_factory=TorchLinearMethod)
    ops: LayerOps = field(default_factory=TorchOps)
