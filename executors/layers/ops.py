"""The element-wise steps between the matrix products, as one strategy object that layers call.

`TorchOps` is exact and runs on any device; a kernel package replaces it as a whole when the model is built.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F

GATED_ACTIVATIONS = ("silu", "gelu_tanh", "gelu")


class LayerOps(ABC):
    """Stateless. Inputs are never modified except where said."""

    @abstractmethod
    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
        """x / rms(x) × weight over the last dimension, computed in float32; × (1 + weight) with `unit_offset`."""

    @abstractmethod
    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(rms_norm(x + residual), x + residual). May write into `x` and `residual`."""

    @abstractmethod
    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate the first 2 × cos.shape[-1] elements of each head, pairing element i with i + cos.shape[-1].

        Args:
            query, key: [num_tokens, heads, head_size]. May be written into.
            cos, sin: [num_tokens, rotary_size / 2], in the dtype of query.
        """

    @abstractmethod
    def gated_activation(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        """[n, 2 m] → [n, m]: activation(first half) × second half. `activation` is one of GATED_ACTIVATIONS."""


class TorchOps(LayerOps):
    """Rounds where transformers' reference models round, so that low-precision results agree with theirs."""

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool) -> torch.Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        if unit_offset:
            return (normed * (1.0 + weight.float())).to(x.dtype)
        return weight * normed.to(x.dtype)

    def add_rms_norm(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, unit_offset: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps, unit_offset), total

    def rotary(
        self, query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        return _rotate(query, cos, sin), _rotate(key, cos, sin)

    def gated_activation(self, gate_up: torch.Tensor, activation: str) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        if activation == "silu":
            return F.silu(gate) * up
        if activation == "gelu_tanh":
            return F.gelu(gate, approximate="tanh") * up
        if activation == "gelu":
            return F.gelu(gate) * up
        raise ValueError(f"activation must be one of {GATED_ACTIVATIONS}, got {activation!r}")


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    half = cos.shape[-1]
    first, second = x[..., :half], x[..., half : 2 * half]
    parts = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < x.shape[-1]:
        parts.append(x[..., 2 * half :])
    return torch.cat(parts, dim=-1)
