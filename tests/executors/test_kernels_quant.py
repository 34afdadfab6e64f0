"""Integer weights: rounded as documented, multiplied exactly, and the same bits whatever runs beside a row."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from executors.kernels import ops
from executors.kernels.abi import WeightFormat
from executors.kernels.library import ISA_NAMES, NativeKernels
from executors.kernels.packed import PackedWeight
from tests.executors.kernel_cases import assert_within_bf16_rounding, kernels, kernels_or_skip, random_bf16

__all__ = ["kernels"]

INTEGER_FORMATS = [WeightFormat.INT8, WeightFormat.INT4]
GROUP = 32
# (rows, outputs, inputs): groups that inputs end inside, outputs that end inside a panel, several row chunks.
SHAPES = [(1, 960, 576), (5, 100, 70), (13, 33, 640), (1, 1, 2), (300, 64, 1536)]


def rounded_inputs(x: torch.Tensor) -> torch.Tensor:
    """Each 32 inputs of a row as int8 times their largest magnitude / 127: what the kernels multiply. float64."""
    rows, k = x.shape
    groups = F.pad(x.float(), (0, -k % GROUP)).view(rows, -1, GROUP)
    top = groups.abs().amax(-1, keepdim=True)
    codes = (groups * torch.where(top > 0, torch.tensor(127.0).div(top), 0.0)).round()
    scale = top * torch.tensor(1.0 / 127.0)
    return (codes.double() * scale.double()).reshape(rows, -1)[:, :k]


def float_sum_error(x: torch.Tensor, weight: torch.Tensor) -> float:
    """Bound of the float32 roundings: a few for each group and each addition of groups, of the sum of magnitudes."""
    magnitude = (x.abs() @ weight.double().abs().T).max().item()
    return magnitude * (x.shape[1] / GROUP + 8) * 2.0**-23


@pytest.mark.parametrize("format", INTEGER_FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_linear_is_the_product_of_rounded_inputs_and_dequantised_weights(
    kernels: NativeKernels, format: WeightFormat, rows: int, n: int, k: int
) -> None:
    x, packed = random_bf16(rows, k), PackedWeight(kernels, random_bf16(n, k, seed=1, scale=k**-0.5), format=format)
    inputs, weight = rounded_inputs(x), packed.unpack()
    # int4 weights are `low + q * step`, whose parts are summed up on their own.
    magnitude = weight.abs() if format is WeightFormat.INT8 else weight.abs().amax(1, keepdim=True).expand(-1, k) * 2
    exact = inputs @ weight.double().T
    assert_within_bf16_rounding(ops.linear(x, packed), exact, float_sum_error(inputs, magnitude))


def test_int8_weights_are_rounded_to_the_nearest_of_each_groups_steps(kernels: NativeKernels) -> None:
    weight = random_bf16(70, 96) * torch.logspace(-3, 3, 70).unsqueeze(1).bfloat16()
    packed = PackedWeight(kernels, weight, format=WeightFormat.INT8)
    step = weight.float().view(70, 3, GROUP).abs().amax(-1) / 127
    # The steps themselves have the 11 bits of float16.
    assert ((packed.unpack() - weight.float()).view(70, 3, GROUP).abs().amax(-1) <= step * (0.5 + 127 / 2048)).all()


def test_int4_weights_lose_no_more_than_rounding_to_16_even_steps_of_each_group(kernels: NativeKernels) -> None:
    weight = random_bf16(70, 96) * torch.logspace(-3, 3, 70).unsqueeze(1).bfloat16()
    packed = PackedWeight(kernels, weight, format=WeightFormat.INT4)
    groups = weight.float().view(70, -1, GROUP)
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    step = (high - low) / 15
    plain = ((groups - low) / step).round() * step + low
    squared = (packed.unpack().view_as(groups) - groups).square().sum(-1)
    assert (squared <= (plain - groups).square().sum(-1) * 1.01).all()


def test_int4_weights_of_important_inputs_come_nearer(kernels: NativeKernels) -> None:
    weight = random_bf16(200, 96)
    importance = torch.ones(96)
    importance[[3, 40, 77]] = 1000.0

    def squared_errors(given: torch.Tensor | None) -> torch.Tensor:
        packed = PackedWeight(kernels, weight, format=WeightFormat.INT4, importance=given)
        return (packed.unpack() - weight.float()).square().mean(0)

    alike, preferred = squared_errors(None), squared_errors(importance)
    assert torch.equal(alike, squared_errors(torch.full((96,), 7.0)))
    assert (preferred[[3, 40, 77]] < alike[[3, 40, 77]] / 10).all()
    assert preferred.mean() < alike.mean() * 1.5
    for wrong in (torch.ones(95), torch.zeros(96), torch.full((96,), float("nan"))):
        with pytest.raises(ValueError, match="importance must be 96 positive numbers"):
            squared_errors(wrong)


@pytest.mark.parametrize("format", INTEGER_FORMATS)
def test_weights_that_have_few_values_come_back(kernels: NativeKernels, format: WeightFormat) -> None:
    """Up to the 11 bits of float16 that int4's steps are kept in."""
    weight = (torch.randint(-8, 8, (64, 128), generator=torch.Generator().manual_seed(0)) / 8).bfloat16()
    weight[:, 0] = -1.0
    weight[40] = 0.0
    weight[41] = 0.75
    packed = PackedWeight(kernels, weight, format=format)
    torch.testing.assert_close(
        packed.unpack(), weight.float(), rtol=0, atol=2e-3 if format is WeightFormat.INT4 else 4e-3
    )
    assert not packed.unpack()[40].any()


def test_integer_weights_take_the_bytes_they_should(kernels: NativeKernels) -> None:
    weight = random_bf16(1024, 512)
    sizes = {f: PackedWeight(kernels, weight, format=f).num_bytes * 8 / weight.numel() for f in WeightFormat}
    assert sizes == {
        WeightFormat.BF16: 16,
        WeightFormat.INT8: 8 + 16 / GROUP + 32 / 512,
        WeightFormat.INT4: 4 + 2 * 16 / GROUP + 32 / 512,
    }


@pytest.mark.parametrize("format", INTEGER_FORMATS)
def test_bias_residual_and_activation_work_as_for_bfloat16(kernels: NativeKernels, format: WeightFormat) -> None:
    x, residual, bias = random_bf16(9, 64), random_bf16(9, 80, seed=3), random_bf16(80, seed=2)
    weight = random_bf16(80, 64, seed=1, scale=0.2)
    plain, gated = (PackedWeight(kernels, weight, format=format, gate_up=gate_up) for gate_up in (False, True))
    assert torch.equal(plain.unpack(), gated.unpack())
    with_bias = ops.linear(x, plain, bias=plain.pack_bias(bias))
    assert torch.equal(ops.linear(x, plain, bias=plain.pack_bias(bias), residual=residual), with_bias + residual)
    gate, up = with_bias.split(40, dim=1)
    out = ops.linear(x, gated, bias=gated.pack_bias(bias), activation="silu")
    torch.testing.assert_close(out.double(), F.silu(gate.double()) * up.double(), rtol=2.0**-7, atol=1e-6)


@pytest.mark.parametrize("format", INTEGER_FORMATS)
@pytest.mark.parametrize(("rows", "n", "k"), SHAPES)
def test_fine_inputs_lose_less_than_bfloat16_does(
    kernels: NativeKernels, format: WeightFormat, rows: int, n: int, k: int
) -> None:
    x = random_bf16(rows, k)
    packed = PackedWeight(kernels, random_bf16(n, k, seed=1, scale=k**-0.5), format=format, fine_inputs=True)
    exact = x.double() @ packed.unpack().double().T
    # Half of a 254th of a step of each group, of which the largest magnitude is at most that of the row.
    rounding = (x.double().abs().amax(1, keepdim=True) / 127 / 254 / 2) * packed.unpack().double().abs().sum(1)
    assert_within_bf16_rounding(ops.linear(x, packed), exact, rounding.max().item() + 1e-5)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("format", INTEGER_FORMATS)
@pytest.mark.parametrize(("n", "k"), [(100, 70), (576, 1536)])
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_threads(
    kernels: NativeKernels, format: WeightFormat, n: int, k: int, fine: bool
) -> None:
    x = random_bf16(150, k)
    packed = PackedWeight(kernels, random_bf16(n, k, seed=1), format=format, fine_inputs=fine)
    alone = torch.cat([ops.linear(x[i : i + 1], packed, num_threads=1) for i in range(len(x))])
    for rows in (2, 3, 4, 5, 6, 7, 8, 12, 13, 150):
        for threads in (1, 2):
            assert torch.equal(ops.linear(x[-rows:], packed, num_threads=threads), alone[-rows:]), (rows, threads)


@pytest.mark.parametrize("fine", [False, True])
@pytest.mark.parametrize("format", INTEGER_FORMATS)
def test_instruction_sets_give_the_same_bits(format: WeightFormat, fine: bool) -> None:
    outputs = []
    for isa in ISA_NAMES:
        packed = PackedWeight(kernels_or_skip(isa), random_bf16(100, 70, seed=1), format=format, fine_inputs=fine)
        outputs.append(ops.linear(random_bf16(7, 70), packed))
    assert torch.equal(*outputs)


def test_greedy_is_the_argmax_of_the_logits_of_integer_weights(kernels: NativeKernels) -> None:
    x, packed = random_bf16(33, 64), PackedWeight(kernels, random_bf16(1000, 64, seed=1), format=WeightFormat.INT8)
    logits = ops.logits(x, packed)
    assert torch.equal(logits, ops.linear(x, packed).float())
    assert torch.equal(ops.greedy(x, packed), logits.argmax(-1))


@pytest.mark.parametrize("format", [WeightFormat.BF16, WeightFormat.INT8])
@pytest.mark.parametrize("k", [64, 70])
def test_embedding_rows_are_the_unpacked_weights_rounded_to_bfloat16(
    kernels: NativeKernels, format: WeightFormat, k: int
) -> None:
    packed = PackedWeight(kernels, random_bf16(77, k), format=format)
    ids = torch.tensor([76, 0, 31, 32, 31])
    assert torch.equal(ops.embed(packed, ids), packed.unpack()[ids].bfloat16())


def test_embedding_ids_and_formats_are_checked(kernels: NativeKernels) -> None:
    packed = PackedWeight(kernels, random_bf16(40, 64))
    with pytest.raises(ValueError, match="input token id lies outside the vocabulary"):
        ops.embed(packed, torch.tensor([40]))
    with pytest.raises(ValueError, match="input_ids must be contiguous int64"):
        ops.embed(packed, torch.tensor([4], dtype=torch.int32))
    with pytest.raises(ValueError, match="rows cannot be taken from a INT4 weight"):
        ops.embed(PackedWeight(kernels, random_bf16(40, 64), format=WeightFormat.INT4), torch.tensor([4]))


@pytest.mark.parametrize("format", INTEGER_FORMATS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_does_not_pass_unseen(kernels: NativeKernels, format: WeightFormat, bad: float) -> None:
    x, weight = random_bf16(3, 70), random_bf16(50, 70, seed=1)
    weight[20, 69] = bad
    assert ops.linear(x, PackedWeight(kernels, weight, format=format)).isnan().sum(0).nonzero().tolist() == [[20]]
    x[1, 3] = bad
    out = ops.linear(x, PackedWeight(kernels, random_bf16(50, 70, seed=1), format=format))
    assert out.isnan().all(1).tolist() == [False, True, False]
    assert out[0].isfinite().all()


def test_inputs_that_vanish_count_as_zero(kernels: NativeKernels) -> None:
    x = torch.full((2, 64), 1e-35).bfloat16()
    x[1, 40] = 1.0
    packed = PackedWeight(kernels, random_bf16(5, 64), format=WeightFormat.INT8)
    out = ops.linear(x, packed)
    assert not out[0].any()
    torch.testing.assert_close(out[1].float(), packed.unpack()[:, 40], rtol=2.0**-7, atol=0)
