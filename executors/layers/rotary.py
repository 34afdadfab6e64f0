"""Rotary position embedding: frequencies of each supported rope type, and the cos/sin table of a model.

Formulas: RoPE arXiv:2104.09864; linear interpolation arXiv:2306.15595; YaRN arXiv:2309.00071; "llama3" is the
wavelength-dependent interpolation of Meta's Llama 3.1 reference code.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

ROPE_TYPES = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True)
class RopeSpec:
    """One kind of rotation.

    Attributes:
        rotary_size: Elements of a head that are rotated; even.
        scaling: The remaining numbers of the config's rope parameters.
    """

    rope_type: str
    theta: float
    rotary_size: int
    scaling: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def from_config(cls, parameters: Mapping[str, Any], head_size: int, max_position_embeddings: int) -> RopeSpec:
        """From one `rope_parameters` dictionary of a Hugging Face config.

        Raises:
            ValueError: The type is not supported, or a number it needs is missing or wrong.
        """
        rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type must be one of {ROPE_TYPES}, got {rope_type!r}")
        theta = parameters.get("rope_theta")
        if not isinstance(theta, (int, float)) or theta <= 0:
            raise ValueError(f"rope_theta must be a positive number, got {theta!r}")
        rotary_size = int(head_size * (parameters.get("partial_rotary_factor") or 1.0))
        if rotary_size <= 0 or rotary_size % 2 or rotary_size > head_size:
            raise ValueError(
                f"partial_rotary_factor {parameters.get('partial_rotary_factor')!r} of head_size {head_size} rotates "
                f"{rotary_size} elements; an even number from 2 to {head_size} is allowed"
            )
        scaling = {
            key: value
            for key, value in parameters.items()
            if key not in ("rope_type", "type", "rope_theta", "partial_rotary_factor") and value is not None
        }
        if rope_type in ("llama3", "yarn"):
            scaling.setdefault("original_max_position_embeddings", max_position_embeddings)
        required = {
            "linear": ("factor",),
            "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
            "yarn": ("factor",),
        }.get(rope_type, ())
        for key in required:
            if not isinstance(scaling.get(key), (int, float)) or scaling[key] <= 0:
                raise ValueError(f"rope_type {rope_type!r} needs a positive {key!r}, got {scaling.get(key)!r}")
        return cls(rope_type, float(theta), rotary_size, scaling)

    def inverse_frequencies(self) -> tuple[torch.Tensor, float]:
        """(float32 [rotary_size / 2] radians per position, factor of cos and sin)."""
        exponents = torch.arange(0, self.rotary_size, 2, dtype=torch.float32) / self.rotary_size
        base = 1.0 / self.theta**exponents
        if self.rope_type == "linear":
            return base / self.scaling["factor"], 1.0
        if self.rope_type == "llama3":
            return _llama3_frequencies(base, self.scaling), 1.0
        if self.rope_type == "yarn":
            return _yarn_frequencies(base, self), _yarn_attention_factor(self.scaling)
        return base, 1.0


class RotaryTable(nn.Module):
    """cos and sin of every position below `max_positions`, looked up once per step and shared by the layers."""

    def __init__(self, spec: RopeSpec, max_positions: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        frequencies, factor = spec.inverse_frequencies()
        angles = torch.outer(torch.arange(max_positions, dtype=torch.float32), frequencies)
        self.register_buffer("cos", (angles.cos() * factor).to(dtype=dtype, device=device), persistent=False)
        self.register_buffer("sin", (angles.sin() * factor).to(dtype=dtype, device=device), persistent=False)

    def forward(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [n] → cos, sin, each [n, rotary_size / 2]."""
        return self.cos[positions], self.sin[positions]


def _llama3_frequencies(base: torch.Tensor, scaling: Mapping[str, Any]) -> torch.Tensor:
    """Long wavelengths are interpolated by `factor`, short ones kept, those between blended."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * base / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return base * kept + base / scaling["factor"] * (1.0 - kept)


def _yarn_frequencies(base: torch.Tensor, spec: RopeSpec) -> torch.Tensor:
    """Dimensions that turn often within the original context are kept, slow ones interpolated, with a ramp between."""
    scaling = spec.scaling
    original = scaling["original_max_position_embeddings"]

    def dimension_of(turns: float) -> float:
        return spec.rotary_size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = dimension_of(scaling.get("beta_fast") or 32)
    high = dimension_of(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, spec.rotary_size - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(base.shape[0], dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    return base * (1.0 - ramp) + base / scaling["factor"] * ramp


def _yarn_attention_factor(scaling: Mapping[str, Any]) -> float:
    given = scaling.get("attention_factor")
    if given is not None:
        return float(given)
    factor = scaling["factor"]

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0

    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if mscale and mscale_all_dim:
        return magnitude(mscale) / magnitude(mscale_all_dim)
    return magnitude(1.0)
