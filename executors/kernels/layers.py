"""The native kernels behind the layers of `executors.layers`, for models that are computed layer by layer.

That is, where no whole step can be recorded: divided over ranks or stages, or with enforce_eager.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from executors.kernels import abi, ops
from executors.kernels.decoder import drop_weight
from executors.kernels.library import NativeKernels
from executors.kernels.memory import HugePageArena
from executors.kernels.packed import PackedWeight
from executors.layers.linear import GatedLinear
from executors.layers.linear_method import LinearMethod
from executors.layers.ops import TorchOps


@dataclass(frozen=True)
class _Packed:
    weight: PackedWeight
    bias: torch.Tensor | None


class NativeLinearMethod(LinearMethod):
    """Weights in panels; the row-major one is dropped, except where the embedding reads it too."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels
        self._arena = HugePageArena()
        self._packed: WeakKeyDictionary[nn.Module, _Packed] = WeakKeyDictionary()

    def prepare(self, layer: nn.Module) -> None:
        weight = PackedWeight(
            self._kernels, layer.weight.detach(), gate_up=isinstance(layer, GatedLinear), arena=self._arena
        )
        bias = getattr(layer, "bias", None)
        self._packed[layer] = _Packed(weight, None if bias is None else weight.pack_bias(bias.detach()))
        if not layer.shares_weight:
            drop_weight(layer)

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed = self._packed[layer]
        return ops.linear(_rows(x), packed.weight, bias=None if bias is None else packed.bias)

    def apply_gated(self, layer: GatedLinear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed = self._packed[layer]
        bias = None if bias is None else packed.bias
        return ops.linear(_rows(x), packed.weight, bias=bias, activation=layer.activation)


class NativeOps(TorchOps):
    """Norms by kernel. Rotation stays in torch, whose single products and sums of bfloat16 depend on nothing else."""

    def __init__(self, kernels: NativeKernels) -> None:
        self._kernels = kernels

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
        out = ops.rms_norm(
            self._kernels, _rows(x.reshape(-1, x.shape[-1])), _scale(weight, unit_offset), eps,
            style=_style(unit_offset),
        )  # fmt: skip
        return out.view(x.shape)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = _rows(residual)
        scale, style = _scale(weight, unit_offset), _style(unit_offset)
        return ops.rms_norm(self._kernels, _rows(x), scale, eps, style=style, residual=residual), residual


def _rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _scale(weight: torch.Tensor, unit_offset: bool) -> torch.Tensor:
    return 1.0 + weight.float() if unit_offset else weight.float()


def _style(unit_offset: bool) -> abi.NormStyle:
    return abi.NormStyle.SCALE_IN_FLOAT if unit_offset else abi.NormStyle.ROUND_THEN_SCALE
