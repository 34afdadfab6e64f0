"""Linear layers whose weight is divided over the TP ranks: by output rows (column) or by input features (row)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from executors.layers.context import LayerContext
from executors.layers.partition import Shard
from executors.layers.weights import WeightTarget, make_parameter


@dataclass(frozen=True)
class OutputPart:
    """One checkpoint linear inside a merged one.

    Attributes:
        name: Checkpoint module, e.g. "model.layers.0.self_attn.q_proj".
        out_features: Rows of the full weight.
        shard: The rows of this rank.
    """

    name: str
    out_features: int
    shard: Shard


class ColumnParallelLinear(nn.Module):
    """x [n, in] → this rank's rows of every part, concatenated: [n, sum of shard sizes]. Needs no communication.

    Attributes:
        input_importance: float32 [in], set by `executors.calibration` for the packing of weights; else None.
    """

    def __init__(self, context: LayerContext, in_features: int, parts: Sequence[OutputPart], *, bias: bool) -> None:
        super().__init__()
        self.in_features = in_features
        self.parts = tuple(parts)
        self.out_features = sum(part.shard.size for part in parts)
        padded = any(part.shard.padded for part in parts)
        self.weight = make_parameter((self.out_features, in_features), context.dtype, context.device, padded=padded)
        self.bias = make_parameter((self.out_features,), context.dtype, context.device, padded=padded) if bias else None
        self._method = context.linear_method
        self.input_importance: torch.Tensor | None = None

    def weight_targets(self) -> Iterator[WeightTarget]:
        offset = 0
        for part in self.parts:
            shard = part.shard
            yield WeightTarget(
                f"{part.name}.weight", self.weight, (part.out_features, self.in_features),
                start=shard.start, stop=shard.stop, offset=offset,
            )  # fmt: skip
            if self.bias is not None:
                yield WeightTarget(
                    f"{part.name}.bias", self.bias, (part.out_features,),
                    start=shard.start, stop=shard.stop, offset=offset,
                )  # fmt: skip
            offset += shard.size

    def prepare(self) -> None:
        self._method.prepare(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._method.apply(self, x, self.bias)


class GatedLinear(ColumnParallelLinear):
    """activation(gate(x)) × up(x): x [n, in] → this rank's features [n, shard size]."""

    def __init__(
        self, context: LayerContext, in_features: int, gate: OutputPart, up: OutputPart, *, activation: str, bias: bool
    ) -> None:
        """
        Args:
            activation: One of `ops.GATED_ACTIVATIONS`.
        """
        super().__init__(context, in_features, [gate, up], bias=bias)
        self.activation = activation
        self.ops = context.ops

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._method.apply_gated(self, x, self.bias)


class RowParallelLinear(nn.Module):
    """x [n, shard.size], this rank's input features → [n, out], summed over the TP ranks.

    Attributes:
        input_importance: As of ColumnParallelLinear.
    """

    def __init__(
        self, context: LayerContext, name: str, in_features: int, shard: Shard, out_features: int, *, bias: bool
    ) -> None:
        super().__init__()
        self.name = name
        self.full_in_features = in_features
        self.shard = shard
        self.in_features = shard.size
        self.out_features = out_features
        self.weight = make_parameter((out_features, shard.size), context.dtype, context.device, padded=shard.padded)
        self.bias = make_parameter((out_features,), context.dtype, context.device, padded=False) if bias else None
        self._method = context.linear_method
        self._parallel = context.parallel
        self.input_importance: torch.Tensor | None = None

    def weight_targets(self) -> Iterator[WeightTarget]:
        yield WeightTarget(
            f"{self.name}.weight", self.weight, (self.out_features, self.full_in_features),
            dim=1, start=self.shard.start, stop=self.shard.stop,
        )  # fmt: skip
        if self.bias is not None:
            yield WeightTarget(f"{self.name}.bias", self.bias, (self.out_features,))

    def prepare(self) -> None:
        self._method.prepare(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._parallel.tp_size == 1:
            return self._method.apply(self, x, self.bias)
        out = self._parallel.all_reduce(self._method.apply(self, x, None))
        # After the sum: each rank holds the whole bias.
        return out if self.bias is None else out + self.bias
