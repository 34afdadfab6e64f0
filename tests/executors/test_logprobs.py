"""Log-probabilities are those of log_softmax, ranks and order exact with ties, columns cut without loss."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from executors.logprobs import by_chunk, by_row, compute_logprobs, most_likely, spread, with_asked_ids
from scheduler.logprobs import TokenLogprobs


def random_logits(num_rows: int, vocab_size: int, ties: bool = False) -> torch.Tensor:
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(vocab_size)) * 3
    return logits.round() if ties else logits


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize(("vocab_size", "count"), [(50, 5), (4096, 8), (4101, 8), (4101, 0), (300, 300), (20_000, 20)])
def test_most_likely_tokens_are_the_first_of_a_stable_sort(vocab_size: int, count: int, ties: bool) -> None:
    logits = random_logits(6, vocab_size, ties)
    logits[0, ::3] = float("-inf")
    logits[1] = -0.0
    logits[1, 7] = 0.0
    ids = most_likely(logits, count)
    assert torch.equal(ids, logits.sort(dim=-1, descending=True, stable=True).indices[:, :count])
    columns = by_row(logits, torch.zeros(6, dtype=torch.int64), np.full(6, count))
    assert [row[0][1:] for row in columns.rows()] == ids.tolist()


@pytest.mark.parametrize("compute", [by_row, by_chunk])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab_size", [40, 5000])
def test_logprobs_are_log_softmax_with_the_token_first(vocab_size: int, dtype: torch.dtype, compute: Any) -> None:
    logits = random_logits(7, vocab_size).to(dtype)
    before = logits.clone()
    tokens = torch.arange(7) * 5
    wanted = np.array([0, 1, 3, 5, 2, 0, vocab_size])
    columns = compute(logits, tokens, wanted)
    assert torch.equal(logits, before)
    expected = logits.float().log_softmax(-1)
    for index, (ids, logprobs, rank) in enumerate(columns.rows()):
        count = int(wanted[index])
        order = expected[index].sort(descending=True, stable=True).indices[:count].tolist()
        assert ids == [int(tokens[index]), *order]
        torch.testing.assert_close(torch.tensor(logprobs), expected[index][ids], rtol=1e-5, atol=1e-5)
        assert rank == int((logits[index] > logits[index, tokens[index]]).sum()) + 1


def test_the_most_likely_tokens_own_logprob_is_bit_equal_to_the_largest() -> None:
    logits = random_logits(20, 3000)
    columns = compute_logprobs(logits, logits.argmax(-1), np.ones(20, dtype=np.int64))
    assert all(logprobs[0] == logprobs[1] and rank == 1 for _, logprobs, rank in columns.rows())


def test_rank_is_one_more_than_the_number_of_larger_logits() -> None:
    """Of tokens among the most likely ones, at their edge, beyond it, and the last of all."""
    places = torch.tensor([0, 1, 4, 5, 6, 20, 300, 5002])
    logits = torch.cat([random_logits(8, 5003), random_logits(8, 5003, ties=True)])
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    tokens = order.gather(-1, places.repeat(2).unsqueeze(-1)).squeeze(-1)
    columns = by_row(logits, tokens, np.full(16, 5))
    expected = (logits > logits.gather(-1, tokens.unsqueeze(-1))).sum(-1) + 1
    assert [rank for _, _, rank in columns.rows()] == expected.tolist()


def test_columns_are_spread_and_selected_without_loss() -> None:
    logits = random_logits(3, 100)
    columns = compute_logprobs(logits, torch.tensor([3, 4, 5]), np.array([2, 0, 4]))
    rows = list(columns.rows())
    full = spread(columns, np.array([False, True, True, False, True]))
    empty: tuple[list[int], list[float], int] = ([], [], 0)
    assert list(full.rows()) == [empty, rows[0], rows[1], empty, rows[2]]
    assert list(full.select([4, 0, 1]).rows()) == [rows[2], empty, rows[0]]
    assert full.select([]) == TokenLogprobs(b"", b"", b"", b"")


def test_a_rows_logprobs_do_not_depend_on_its_neighbours() -> None:
    logits = random_logits(16, 6000, ties=True).to(torch.bfloat16)
    wanted = np.arange(16)
    together = list(compute_logprobs(logits, torch.arange(16), wanted).rows())
    for index in range(16):
        alone = compute_logprobs(logits[index : index + 1], torch.tensor([index]), wanted[index : index + 1])
        assert list(alone.rows()) == [together[index]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_asked_for_by_id_come_with_their_ranks(dtype: torch.dtype) -> None:
    logits = random_logits(4, 3000, ties=True).to(dtype)
    tokens = torch.tensor([5, 6, 7, 8])
    plain = compute_logprobs(logits, tokens, np.array([2, 0, 0, 3]))
    columns = with_asked_ids(plain, logits, tokens, {1: [9, 6, 2000], 2: [7]})
    rows, before = list(columns.rows()), list(plain.rows())
    assert [ids for ids, _, _ in rows] == [before[0][0], [6, 9, 2000], [7], before[3][0]]
    assert [rows[index][1] for index in (0, 3)] == [before[index][1] for index in (0, 3)]
    assert [rows[index][2] for index in (0, 3)] == [[before[0][2], 1, 2], [before[3][2], 1, 2, 3]]
    for index in (1, 2):
        ids, logprobs, ranks = rows[index]
        values = logits[index].float()
        torch.testing.assert_close(torch.tensor(logprobs), values.log_softmax(-1)[ids])
        assert ranks == [int((values > values[token]).sum()) + 1 for token in ids]
    full = spread(columns, np.array([True, False, True, True, True]))
    assert list(full.rows()) == [rows[0], ([], [], []), *rows[1:]]
    assert list(full.select([3, 0]).rows()) == [rows[2], rows[0]]
