"""Norms, rotation and cache writes against the rounding of the torch layers."""

from __future__ import annotations

import pytest
import torch

from executors.attention.base import AttentionMetadata, AttentionParams
from executors.kernels import abi, ops
from executors.kernels.library import NativeKernels
from executors.layers.ops import TorchOps
from tests.executors.kernel_cases import kernels, random_bf16

__all__ = ["kernels"]

EPS = 1e-5


@pytest.mark.parametrize("hidden", [576, 64, 50])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_rms_norm_rounds_like_the_torch_layer(kernels: NativeKernels, hidden: int, rows: int) -> None:
    x, weight = random_bf16(rows, hidden), random_bf16(hidden, seed=1)
    llama = ops.rms_norm(kernels, x, weight.float(), EPS)
    gemma = ops.rms_norm(kernels, x, 1 + weight.float(), EPS, style=abi.NormStyle.SCALE_IN_FLOAT)
    # The sums of squares may differ in the last float32 bit, which may move a rounding: one bfloat16 step.
    torch.testing.assert_close(llama, TorchOps().rms_norm(x, weight, EPS, False), rtol=2.0**-7, atol=0)
    torch.testing.assert_close(gemma, TorchOps().rms_norm(x, weight, EPS, True), rtol=2.0**-7, atol=0)


def test_residual_is_updated_in_place_and_normalised(kernels: NativeKernels) -> None:
    x, residual, weight = random_bf16(5, 96), random_bf16(5, 96, seed=1), torch.rand(96) + 0.5
    pre_weight = torch.rand(96) + 0.5
    total = x + residual
    stream = residual.clone()
    normed = ops.rms_norm(kernels, x, weight, EPS, residual=stream)
    assert torch.equal(stream, total)
    assert torch.equal(normed, ops.rms_norm(kernels, total, weight, EPS))

    stream = residual.clone()
    sandwich = ops.rms_norm(kernels, x, weight, EPS, residual=stream, pre_weight=pre_weight)
    assert torch.equal(stream, ops.rms_norm(kernels, x, pre_weight, EPS) + residual)
    assert torch.equal(sandwich, ops.rms_norm(kernels, stream, weight, EPS))


@pytest.mark.parametrize("rotary_dim", [64, 32, 20])
def test_rotation_has_the_bits_of_the_torch_layer(kernels: NativeKernels, rotary_dim: int) -> None:
    params = AttentionParams(num_heads=4, num_kv_heads=2, head_size=64, scale=0.125)
    num_tokens = 21
    qkv = random_bf16(num_tokens, (4 + 2 * 2) * 64)
    positions = torch.arange(num_tokens) * 3
    angles = torch.rand(100, rotary_dim // 2) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    slots = torch.arange(16, 16 + num_tokens)
    metadata = AttentionMetadata(
        1, num_tokens, num_tokens, num_tokens, torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32), torch.tensor([[1, 2]], dtype=torch.int32), slots, 16,
    )  # fmt: skip
    cache = torch.zeros(ops.kv_cache_shape(3, 16, 2, 64), dtype=torch.bfloat16)
    rotated = qkv.clone()
    ops.attention(
        kernels, params, rotated, cache, metadata, positions=positions,
        cos_sin=torch.cat([cos, sin], dim=1).float().contiguous(),
    )  # fmt: skip
    query, key, value = (part.unflatten(-1, (-1, 64)) for part in qkv.split([4 * 64, 2 * 64, 2 * 64], dim=-1))
    query, key = TorchOps().rotary(query, key, cos[positions], sin[positions])
    assert torch.equal(rotated[:, : 4 * 64], query.flatten(1))
    # Keys: [block, head][dims / 2][16 tokens][2]; values: [8 token pairs][dims][2].
    stored = cache[1:].view(2, 2, 2, 32, 16, 2)[:, :, 0].permute(0, 3, 1, 2, 4).reshape(32, 2, 64)
    assert torch.equal(stored[:num_tokens], key)
    values = cache[1:].view(2, 2, 2, 8, 64, 2)[:, :, 1].permute(0, 2, 4, 1, 3).reshape(32, 2, 64)
    assert torch.equal(values[:num_tokens], value)


def test_writing_the_first_token_of_a_pair_clears_the_second(kernels: NativeKernels) -> None:
    """A block's former owner may have left NaN there, which a weight of zero would not silence."""
    params = AttentionParams(num_heads=1, num_kv_heads=1, head_size=16, scale=0.25)
    cache = torch.full(ops.kv_cache_shape(2, 16, 1, 16), float("nan"), dtype=torch.bfloat16)
    qkv = random_bf16(3, 48)
    metadata = AttentionMetadata(
        1, 3, 3, 3, torch.tensor([0, 3], dtype=torch.int32), torch.tensor([3], dtype=torch.int32),
        torch.tensor([[1]], dtype=torch.int32), torch.tensor([16, 17, 18]), 16,
    )  # fmt: skip
    assert ops.attention(kernels, params, qkv, cache, metadata).isfinite().all()
