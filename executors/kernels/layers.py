"""The native kernels behind the layers of `executors.layers`, for models that are computed layer by layer.

That is, where no whole step can be recorded: divided over ranks or stages, or with enforce_eager.
"""

from __future__ import annotations

from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import nn

from executors.kernels import abi, ops
from executors.kernels.abi import WeightFormat
from executors.kernels.decoder import drop_weight
from executors.kernels.library import NativeKernels
from executors.kernels.memory import HugePageArena
from executors.kernels.packed import PackedWeight
from executors.kernels.quantization import WeightFormats
from executors.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from executors.layers.linear import ColumnParallelLinear, GatedLinear
from executors.layers.linear_method import TorchLinearMethod
from executors.layers.ops import TorchOps


@dataclass(frozen=True)
class _Packed:
    weight: PackedWeight
    bias: torch.Tensor | None


class NativeLinearMethod(TorchLinearMethod):
    """Weights in panels, in place of the row-major ones; before they are packed torch multiplies.

    A tied head reads the embedding's panels.
    """

    def __init__(self, kernels: NativeKernels, formats: WeightFormats) -> None:
        self._kernels, self._formats = kernels, formats
        self._arena = HugePageArena()
        self._packed: WeakKeyDictionary[nn.Module, _Packed] = WeakKeyDictionary()
        self._embeddings: WeakKeyDictionary[nn.Module, PackedWeight] = WeakKeyDictionary()

    def prepare(self, layer: nn.Module) -> None:
        if isinstance(layer, ParallelLMHead):
            tied = None if layer.tied_to is None else self._embeddings.get(layer.tied_to)
            self._packed[layer] = _Packed(tied or self._pack(layer.weight, self._formats.vocabulary), None)
        else:
            gate_up = isinstance(layer, GatedLinear)
            is_qkv = isinstance(layer, ColumnParallelLinear) and not gate_up
            weight = self._pack(
                layer.weight,
                self._formats.layers,
                importance=layer.input_importance,
                gate_up=gate_up,
                fine_inputs=is_qkv,
            )
            bias = getattr(layer, "bias", None)
            self._packed[layer] = _Packed(weight, None if bias is None else weight.pack_bias(bias.detach()))
        drop_weight(layer)

    def prepare_embedding(self, layer: VocabParallelEmbedding) -> None:
        self._embeddings[layer] = self._pack(layer.weight, self._formats.vocabulary)
        drop_weight(layer)

    def embed(self, layer: VocabParallelEmbedding, input_ids: torch.Tensor) -> torch.Tensor:
        packed = self._embeddings.get(layer)
        return super().embed(layer, input_ids) if packed is None else ops.embed(packed, input_ids)

    def _pack(
        self, weight: torch.Tensor, format: WeightFormat, importance: torch.Tensor | None = None, **options: bool
    ) -> PackedWeight:
        return PackedWeight(
            self._kernels, weight.detach(), format=format, importance=importance, arena=self._arena, **options
        )

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed = self._packed.get(layer)
        if packed is None:
            return super().apply(layer, x, bias)
        return ops.linear(_rows(x), packed.weight, bias=None if bias is None else packed.bias)

    def apply_gated(self, layer: GatedLinear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        packed = self._packed.get(layer)
        if packed is None:
            return super().apply_gated(layer, x, bias)
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
