"""Packed linear layers: right within bfloat16 rounding, and the same bits whatever runs beside a row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from executors.kernels import ops
from executors.kernels.library import NativeKernels
from executors.kernels.packed import PackedWeight
from tests.executors.kernel_cases import assert_within_bf16_rounding, kernels, random_bf16

__all__ = ["kernels"]

# (rows, outputs, inputs): single rows, odd sizes, several row chunks, outputs that end inside a panel.
SHAPES = [(1, 960, 576), (5, 100, 64), (13, 33, 640), (37, 576, 1536), (1, 1, 2), (130, 70, 2048)]


def sum_error(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Bound of a float32 sum's error: one rounding of 2^-24 per addition, of the sum of absolute products."""
    magnitude = (x.double().abs() @ weight.double().abs().T).max().item()
    return magnitude * x.shape[1] * 2.0**-24


@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_linear_rounds_the_float32_sum_once(kernels: NativeKernels, rows: int, n: int, k: int) -> None:
    x, weight = random_bf16(rows, k), random_bf16(n, k, seed=1, scale=k**-0.5)
    out = ops.linear(x, PackedWeight(kernels, weight))
    assert_within_bf16_rounding(out, x.double() @ weight.double().T, sum_error(x, weight))


def test_bias_is_added_before_rounding_and_residual_after(kernels: NativeKernels) -> None:
    x, weight, bias = random_bf16(7, 96), random_bf16(50, 96, seed=1, scale=0.1), random_bf16(50, seed=2)
    residual = random_bf16(7, 50, seed=3)
    packed = PackedWeight(kernels, weight)
    with_bias = ops.linear(x, packed, bias=packed.pack_bias(bias))
    assert_within_bf16_rounding(with_bias, x.double() @ weight.double().T + bias.double(), sum_error(x, weight))
    total = ops.linear(x, packed, bias=packed.pack_bias(bias), residual=residual, out=residual.clone())
    assert torch.equal(total, with_bias + residual)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("half", [16, 40, 1])
def test_gate_up_weight_applies_the_activation_in_bf16_steps(
    kernels: NativeKernels, activation: str, half: int
) -> None:
    x, weight, bias = random_bf16(9, 64), random_bf16(2 * half, 64, seed=1, scale=0.2), random_bf16(2 * half, seed=2)
    packed = PackedWeight(kernels, weight, gate_up=True)
    out = ops.linear(x, packed, bias=packed.pack_bias(bias), activation=activation)
    plain = PackedWeight(kernels, weight)
    gate, up = ops.linear(x, plain, bias=plain.pack_bias(bias)).split(half, dim=1)
    wide = gate.double()
    active = F.silu(wide) if activation == "silu" else F.gelu(wide, approximate="tanh")
    # Two roundings: of the activation and of the product.
    torch.testing.assert_close(out.double(), active * up.double(), rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("gate_up", [False, True])
def test_unpacking_gives_the_weight_back(kernels: NativeKernels, gate_up: bool) -> None:
    weight = random_bf16(70, 38)
    assert torch.equal(PackedWeight(kernels, weight, gate_up=gate_up).unpack(), weight)


@pytest.mark.parametrize(("n", "k"), [(100, 64), (576, 1536), (70, 640)])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(kernels: NativeKernels, n: int, k: int) -> None:
    x, packed = random_bf16(150, k), PackedWeight(kernels, random_bf16(n, k, seed=1))
    alone = torch.cat([ops.linear(x[i : i + 1], packed, num_threads=1) for i in range(len(x))])
    for rows in (2, 3, 4, 5, 7, 8, 11, 12, 13, 24, 25, 150):
        for threads in (1, 2):
            assert torch.equal(ops.linear(x[-rows:], packed, num_threads=threads), alone[-rows:]), (rows, threads)


def test_rows_may_be_far_apart_in_memory(kernels: NativeKernels) -> None:
    wide = random_bf16(20, 100)
    packed = PackedWeight(kernels, random_bf16(33, 64, seed=1))
    out = torch.zeros(20, 50, dtype=torch.bfloat16)
    ops.linear(wide[:, :64], packed, out=out[:, :33])
    assert torch.equal(out[:, :33], ops.linear(wide[:, :64].contiguous(), packed))
    assert not out[:, 33:].any()


@pytest.mark.parametrize("soft_cap", [None, 3.0])
def test_greedy_is_the_first_argmax_of_the_logits(kernels: NativeKernels, soft_cap: float | None) -> None:
    weight = random_bf16(1000, 64, seed=1, scale=0.3)
    weight[700:] = weight[:300]  # ties everywhere
    x, packed = random_bf16(33, 64), PackedWeight(kernels, weight)
    logits = ops.logits(x, packed, soft_cap=soft_cap)
    expected = ops.linear(x, packed)
    if soft_cap is not None:
        expected = torch.tanh(expected / soft_cap) * soft_cap
        torch.testing.assert_close(logits, expected.float(), rtol=2.0**-7, atol=0)
    else:
        assert torch.equal(logits, expected.float())
    first = torch.stack([(row == row.max()).nonzero()[0, 0] for row in logits])
    assert torch.equal(ops.greedy(x, packed, soft_cap=soft_cap), first)


def test_wrong_tensors_are_named(kernels: NativeKernels) -> None:
    packed = PackedWeight(kernels, random_bf16(32, 64))
    with pytest.raises(ValueError, match=r"x must be bfloat16 \[rows, 64\].*float32"):
        ops.linear(torch.zeros(2, 64), packed)
    with pytest.raises(ValueError, match="even number of inputs, got 63"):
        PackedWeight(kernels, random_bf16(32, 63))
    with pytest.raises(ValueError, match="activation must be 'silu' or 'gelu_tanh'"):
        ops.linear(random_bf16(2, 64), PackedWeight(kernels, random_bf16(32, 64), gate_up=True))
