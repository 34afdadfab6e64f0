"""How a linear layer stores and multiplies its weight: the seam where packed or quantised kernels plug in."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import nn

if TYPE_CHECKING:
    from executors.layers.embedding import VocabParallelEmbedding
    from executors.layers.linear import GatedLinear


class LinearMethod(ABC):
    """One object serves all linears of a model; what it prepares for one layer it keeps on that layer."""

    @abstractmethod
    def prepare(self, layer: nn.Module) -> None:
        """Called once per linear when its `weight` [out, in] (and `bias` [out] or None) hold their final values.

        May repack the weight and drop `layer.weight`. A head tied to an embedding (`layer.tied_to`) comes after it.
        """

    def prepare_embedding(self, layer: VocabParallelEmbedding) -> None:
        """Called once per embedding, before `prepare` of any linear. May repack and drop `layer.weight` as well."""
        return

    def embed(self, layer: VocabParallelEmbedding, input_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the embedding: int64 [n], within its rows → [n, hidden], a new tensor."""
        return F.embedding(input_ids, layer.weight)

    @abstractmethod
    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[n, in] → [n, out], `bias` added if given."""

    def apply_gated(self, layer: GatedLinear, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[n, in] → [n, out / 2]: activation(first half of the outputs) × second half."""
        return layer.ops.gated_activation(self.apply(layer, x, bias), layer.activation)


class TorchLinearMethod(LinearMethod):
    def prepare(self, layer: nn.Module) -> None:
        return

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return F.linear(x, layer.weight, bias)
