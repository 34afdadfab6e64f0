"""RMS normalisation, alone or fused with the residual addition before it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from executors.layers.context import LayerContext
from executors.layers.weights import WeightTarget, make_parameter


class RMSNorm(nn.Module):
    """Over the last dimension. With `unit_offset` the stored weight is the difference from 1 (Gemma)."""

    def __init__(self, context: LayerContext, name: str, size: int, eps: float, *, unit_offset: bool = False) -> None:
        super().__init__()
        self.name = name
        self.size = size
        self.eps = eps
        self.unit_offset = unit_offset
        self.weight = make_parameter((size,), context.dtype, context.device, padded=False)
        self._ops = context.ops

    def weight_targets(self) -> Iterator[WeightTarget]:
        yield WeightTarget(
            f"{self.name}.weight", self.weight, (self.size,), dummy_value=0.0 if self.unit_offset else 1.0
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._ops.rms_norm(x, self.weight, self.eps, self.unit_offset)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(norm(x + residual), x + residual)."""
        return self._ops.add_rms_norm(x, residual, self.weight, self.eps, self.unit_offset)
