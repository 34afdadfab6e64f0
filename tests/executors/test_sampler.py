"""Draws follow the distribution that transformers' processors leave, and a row never depends on other rows."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from executors.random import gumbel_noise, row_keys
from executors.sampler import MAX_SORTED_VOCABULARY, PREFIX_LENGTHS, _nucleus, sample
from executors.sampling_state import SamplingState
from scheduler.output import NewRequestData, pack_int32
from scheduler.sampling_params import SamplingParams

CPU = torch.device("cpu")


def draw(logits: torch.Tensor, params: list[SamplingParams], positions: list[int] | None = None) -> list[int]:
    """Sample row i of the logits by params[i]."""
    state = SamplingState(len(params))
    for row, row_params in enumerate(params):
        state.set_row(row, NewRequestData(row, f"r{row}", pack_int32([1]), 1, 0, [], row_params))
    rows = np.arange(len(params))
    return sample(logits, state.columns(rows, np.array(positions or [1] * len(params)), CPU)).tolist()


def transformers_distribution(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    scores = TemperatureLogitsWarper(params.temperature)(None, logits[None].float())
    if params.top_k:
        scores = TopKLogitsWarper(params.top_k)(None, scores)
    if params.top_p < 1:
        scores = TopPLogitsWarper(params.top_p)(None, scores)
    if params.min_p > 0:
        scores = MinPLogitsWarper(params.min_p)(None, scores)
    return scores.softmax(-1)[0]


MIXES = [
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.7, "top_k": 5},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 1.3, "top_k": 12, "min_p": 0.05},
    {"temperature": 1.5, "top_k": 30, "top_p": 0.85, "min_p": 0.02},
    {"temperature": 1.2, "top_p": 0.95, "min_p": 0.03},
]


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("vocab_size", [50, 700])
def test_draws_follow_the_distribution_transformers_leaves(mix: dict, vocab_size: int) -> None:
    num_draws = 20_000
    logits = torch.randn(vocab_size, generator=torch.Generator().manual_seed(3)) * 2
    params = SamplingParams(seed=1, **mix)
    expected = transformers_distribution(logits, params) * num_draws
    state = SamplingState(num_draws)
    for row in range(num_draws):
        state.set_row(row, NewRequestData(row, "", b"", 1, 0, [], params))
    columns = state.columns(np.arange(num_draws), np.arange(num_draws), CPU)
    counts = torch.bincount(sample(logits.expand(num_draws, -1), columns), minlength=vocab_size)

    assert counts[expected == 0].sum() == 0
    # Pearson's chi-square; cells too small for it are put together.
    big = expected >= 5
    observed_cells = torch.cat([counts[big], counts[~big].sum()[None]]).double()
    expected_cells = torch.cat([expected[big], expected[~big].sum()[None]]).double()
    valid = expected_cells >= 5
    chi_square = ((observed_cells - expected_cells) ** 2 / expected_cells)[valid].sum().item()
    freedom = int(valid.sum()) - 1
    # Wilson-Hilferty: the cube root is nearly normal. 4 standard deviations.
    deviation = ((chi_square / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / (2 / (9 * freedom)) ** 0.5
    assert deviation < 4


def test_greedy_takes_the_largest_logit_and_the_lowest_id_among_equals() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0, 1.0], [5.0, 1.0, 2.0, 5.0]])
    assert draw(logits, [SamplingParams(temperature=0)] * 2) == [1, 0]


def test_top_k_one_is_greedy_and_ties_at_k_are_all_kept() -> None:
    logits = torch.tensor([0.0, 2.0, 1.0, 1.0, 1.0])
    assert draw(logits[None], [SamplingParams(top_k=1, seed=3)]) == [1]
    params = [SamplingParams(top_k=2, temperature=2.0, seed=seed) for seed in range(200)]
    assert set(draw(logits.expand(200, -1), params)) == {1, 2, 3, 4}


def test_ties_at_the_end_of_the_prefix_reach_beyond_it() -> None:
    """All logits equal: top-k keeps every token, so draws must come from the whole vocabulary."""
    params = [SamplingParams(top_k=3, seed=seed) for seed in range(300)]
    tokens = draw(torch.zeros(300, 2000), params)
    assert max(tokens) > 1500
    assert len(set(tokens)) > 200


@pytest.mark.parametrize(
    "width", [PREFIX_LENGTHS[0] - 1, PREFIX_LENGTHS[0], PREFIX_LENGTHS[0] + 1, PREFIX_LENGTHS[1] + 1]
)
def test_kept_sets_wider_than_a_prefix_are_drawn_from_completely(width: int) -> None:
    logits = torch.full((400, 3000), -50.0)
    logits[:, 100 : 100 + width] = torch.linspace(0, 0.01, width)
    params = [SamplingParams(top_p=0.9999, seed=seed) for seed in range(400)]
    tokens = draw(logits, params)
    assert {100 <= token < 100 + width for token in tokens} == {True}
    assert max(tokens) - min(tokens) > 0.8 * width


def test_a_wide_top_p_set_is_exactly_the_sorted_prefix() -> None:
    generator = torch.Generator().manual_seed(4)
    for step in range(60):
        size = [1, 2, 50, 3000][step % 4]
        values = torch.randn(size, generator=generator) * [0.01, 1, 6][step % 3]
        if step % 5 == 0:
            values = values.round()  # Many ties.
        top_p = [0.0123, 0.3001, 0.9003, 0.9991, 0.9999999][step % 5]
        probabilities = values.double().softmax(-1)
        order = values.sort(descending=True, stable=True).indices
        expected = torch.zeros(size, dtype=torch.bool)
        expected[order[probabilities[order].cumsum(-1) - probabilities[order] < top_p]] = True
        assert torch.equal(_nucleus(values, top_p), expected)


WIDE = [{"top_p": 0.97}, {"top_k": 900, "top_p": 0.9}, {"top_k": 900}, {"min_p": 1e-4}]


@pytest.mark.parametrize("mix", WIDE, ids=str)
@pytest.mark.parametrize("vocab_size", [4000, MAX_SORTED_VOCABULARY + 1])
def test_wide_sets_are_drawn_from_exactly(mix: dict, vocab_size: int) -> None:
    logits = torch.randn(40, vocab_size, generator=torch.Generator().manual_seed(5))
    params = [SamplingParams(seed=seed, **mix) for seed in range(40)]
    tokens = draw(logits, params)
    expected = []
    for row, row_params in enumerate(params):
        kept = transformers_distribution(logits[row], row_params) > 0
        assert kept.sum() > PREFIX_LENGTHS[-1]
        keys = row_keys(torch.tensor([row_params.seed]), torch.tensor([1]))
        scores = logits[row] + gumbel_noise(keys, torch.arange(vocab_size))[0]
        expected.append(scores.masked_fill(~kept, float("-inf")).argmax().item())
    assert tokens == expected


def test_a_mask_that_leaves_fewer_tokens_than_top_k_never_yields_a_masked_one() -> None:
    logits = torch.full((50, 1000), float("-inf"))
    logits[:, [7, 70]] = 0.0
    tokens = draw(logits, [SamplingParams(top_k=40, top_p=0.99, seed=seed) for seed in range(50)])
    assert set(tokens) == {7, 70}


def mixed_params(seed: int) -> list[SamplingParams]:
    return [SamplingParams(seed=seed + i, **mix) for i, mix in enumerate([*MIXES, {"temperature": 0.0}] * 2)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [40, 5000, 10_000])
def test_a_row_is_sampled_the_same_alone_and_in_any_batch(dtype: torch.dtype, vocab_size: int) -> None:
    params = mixed_params(100)
    logits = (torch.randn(len(params), vocab_size, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)
    positions = list(range(10, 10 + len(params)))
    together = draw(logits, params, positions)
    alone = [draw(logits[i : i + 1], [params[i]], [positions[i]])[0] for i in range(len(params))]
    assert alone == together
    order = torch.randperm(len(params), generator=torch.Generator().manual_seed(1)).tolist()
    shuffled = draw(logits[order], [params[i] for i in order], [positions[i] for i in order])
    assert shuffled == [together[i] for i in order]


def test_seed_and_position_both_change_the_draw() -> None:
    logits = torch.zeros(2000, 1000)
    by_seed = draw(logits, [SamplingParams(seed=seed) for seed in range(2000)])
    by_position = draw(logits, [SamplingParams(seed=0)] * 2000, list(range(2000)))
    again = draw(logits, [SamplingParams(seed=seed) for seed in range(2000)])
    assert by_seed == again
    for tokens in (by_seed, by_position):
        assert len(set(tokens)) > 800


def test_logits_are_not_changed() -> None:
    params = mixed_params(5)
    logits = torch.randn(len(params), 300)
    before = logits.clone()
    draw(logits, params)
    assert torch.equal(before, logits)


def test_a_random_request_without_a_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="request r0: seed must be set"):
        draw(torch.zeros(1, 4), [SamplingParams()])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("vocab_size", [50, 700, MAX_SORTED_VOCABULARY + 100])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_that_are_no_numbers_draw_nothing_and_the_others_what_they_always_do(
    dtype: torch.dtype, vocab_size: int, bad: float
) -> None:
    mixes = [{"temperature": 0.0}, {}, {"top_k": 5}, {"temperature": 2.0, "top_p": 0.999}]
    params = [SamplingParams(seed=i, **mix) for i, mix in enumerate(mixes * 2)]  # type: ignore[arg-type]
    logits = torch.randn(8, vocab_size, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = draw(logits, params)
    logits[4:, vocab_size // 2] = bad
    logits[7] = bad
    assert draw(logits, params) == [*expected[:4], -1, -1, -1, -1]
    assert draw(logits[4:], params[4:]) == [-1] * 4
