"""Log-probabilities of tokens by the model's own logits: the tokens' own, their ranks, and the most likely others.

`executors.model_runner` calls it on logits that nothing has changed, for sampled and for prompt tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from scheduler.logprobs import TokenLogprobs, pack_rows
from scheduler.output import NewRequestData

MAX_ELEMENTS = 1 << 25
"""Of logits that `by_chunk` works on at once."""

BLOCK = 64
"""Tokens of a block in the search for the most likely ones: only blocks with a large maximum are looked into."""

MAX_CACHED_ELEMENTS = 1 << 18
"""Of logits that `by_row` works on at once."""

NOT_ASKED = -1

_NO_IDS = np.zeros(0, dtype=np.int64)


class LogprobsState:
    """By row of the persistent batch, how many log-probabilities a request wants: NOT_ASKED, or the number of most
    likely tokens (int64 [max_num_seqs]; larger than any vocabulary for all).

    Attributes:
        num_logprobs: For sampled tokens.
        num_prompt_logprobs: For prompt tokens.
        asked_ids: Tokens whose log-probabilities are wanted with each sampled token, instead of the most likely ones.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.num_logprobs = np.full(max_num_seqs, NOT_ASKED, dtype=np.int64)
        self.num_prompt_logprobs = np.full(max_num_seqs, NOT_ASKED, dtype=np.int64)
        self.asked_ids: dict[int, list[int]] = {}

    def set_row(self, row: int, request: NewRequestData) -> None:
        """`request` now owns `row`."""
        params = request.sampling_params
        self.num_logprobs[row] = _wanted(params.logprobs)
        self.asked_ids.pop(row, None)
        if params.logprob_token_ids:
            self.num_logprobs[row], self.asked_ids[row] = 0, params.logprob_token_ids
        self.num_prompt_logprobs[row] = _wanted(params.prompt_logprobs)

    def asked_ids_of(self, rows: np.ndarray) -> dict[int, list[int]]:
        """By index into `rows`, where there are any."""
        return {index: self.asked_ids[row] for index, row in enumerate(rows.tolist()) if row in self.asked_ids}


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_most_likely: np.ndarray) -> TokenLogprobs:
    """Log-probabilities of one token for each row of the logits.

    Args:
        logits: [n, vocab_size], any float type. Not changed.
        token_ids: int64 [n], on the logits' device.
        num_most_likely: int64 [n], how many others each row wants.
    """
    num_most_likely = np.minimum(num_most_likely, logits.shape[1])
    compute = by_row if logits.device.type == "cpu" else by_chunk
    return compute(logits, token_ids, num_most_likely)


def with_asked_ids(
    logprobs: TokenLogprobs, logits: torch.Tensor, token_ids: torch.Tensor, asked_ids: Mapping[int, Sequence[int]]
) -> TokenLogprobs:
    """`logprobs` with other tokens' after each token's own, and the ranks of all.

    Args:
        logits, token_ids: As for `compute_logprobs`.
        asked_ids: By index into them, the other tokens.
    """
    rows = list(logprobs.rows())
    for index, others in asked_ids.items():
        ids = list(dict.fromkeys([int(token_ids[index]), *others]))
        values = logits[index].to(torch.float32)
        wanted = torch.tensor(ids, device=logits.device)
        in_order = values.sort().values
        ranks = len(values) - torch.searchsorted(in_order, values[wanted], right=True) + 1
        rows[index] = ids, values.log_softmax(-1)[wanted].tolist(), ranks.tolist()
    return pack_rows(rows)


def by_row(logits: torch.Tensor, token_ids: torch.Tensor, num_most_likely: np.ndarray) -> TokenLogprobs:
    """For CPUs: a few rows at once, which stay in the cache, then each by numpy, whose small operations cost a fraction
    of torch's."""
    ids: list[np.ndarray] = []
    logprobs: list[np.ndarray] = []
    ranks: list[int] = []
    num_rows, vocab_size = logits.shape
    step = max(1, min(num_rows, MAX_CACHED_ELEMENTS // vocab_size))
    # Filled anew each time: fresh memory costs more than the arithmetic.
    all_logprobs = torch.empty(step, vocab_size)
    as_float32 = None if logits.dtype == torch.float32 else torch.empty(step, vocab_size)
    for start in range(0, num_rows, step):
        chunk = logits[start : start + step]
        if as_float32 is not None:
            chunk = as_float32[: len(chunk)].copy_(chunk)
        counts = num_most_likely[start : start + step].tolist()
        bounds = _bounds_of_first(chunk, counts)
        torch.log_softmax(chunk, -1, out=all_logprobs[: len(chunk)])
        chunk_values, chunk_logprobs = chunk.numpy(), all_logprobs.numpy()
        for row, token_id in enumerate(token_ids[start : start + step].tolist()):
            values, count = chunk_values[row], counts[row]
            # Descending, equal ones by ascending id.
            candidates = np.flatnonzero(values >= bounds[row]) if count else _NO_IDS
            first = candidates[np.argsort(-values[candidates], kind="stable")[:count]]
            ids.append(np.concatenate([[token_id], first]))
            logprobs.append(chunk_logprobs[row][ids[-1]])
            ranks.append(1 + int(np.count_nonzero(values > values[token_id])))
    lengths = np.fromiter(map(len, ids), dtype="<i4", count=len(ids))
    return TokenLogprobs(
        lengths.tobytes(),
        np.concatenate(ids).astype("<i4").tobytes(),
        np.concatenate(logprobs).astype("<f4").tobytes(),
        np.array(ranks, dtype="<i4").tobytes(),
    )


def _bounds_of_first(logits: torch.Tensor, counts: list[int]) -> list[float]:
    """A value for each row that its `counts[i]` largest reach and few others; where that is 0, any."""
    vocab_size = logits.shape[1]
    num_blocks = vocab_size // BLOCK
    width = max((count for count in counts if count * 4 <= num_blocks), default=0)
    largest: list[list[float]] = []
    if width:
        largest = logits[:, : num_blocks * BLOCK].view(len(counts), num_blocks, BLOCK).amax(-1).topk(width)[0].tolist()
    bounds = []
    for row, count in enumerate(counts):
        if count == 0:
            bounds.append(0.0)
        elif count <= width:
            # So many blocks have a value as large as this.
            bounds.append(largest[row][count - 1])
        else:
            bounds.append(float(np.partition(logits[row].numpy(), vocab_size - count)[vocab_size - count]))
    return bounds


def by_chunk(logits: torch.Tensor, token_ids: torch.Tensor, num_most_likely: np.ndarray) -> TokenLogprobs:
    """For accelerators: many rows at once."""
    num_rows, vocab_size = logits.shape
    width = int(num_most_likely.max())
    ids = np.empty((num_rows, 1 + width), dtype="<i4")
    logprobs = np.empty((num_rows, 1 + width), dtype="<f4")
    ranks = np.empty(num_rows, dtype="<i4")
    step = max(1, MAX_ELEMENTS // vocab_size)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        chunk, tokens = logits[rows].to(torch.float32), token_ids[rows].unsqueeze(-1)
        all_ids = torch.cat([tokens, most_likely(chunk, width)], -1)
        ranks[rows] = ((chunk > chunk.gather(-1, tokens)).sum(-1) + 1).cpu().numpy()
        logprobs[rows] = chunk.log_softmax(-1).gather(-1, all_ids).cpu().numpy()
        ids[rows] = all_ids.cpu().numpy()
    wanted = np.arange(1 + width) <= num_most_likely[:, None]
    lengths = (num_most_likely + 1).astype("<i4")
    return TokenLogprobs(lengths.tobytes(), ids[wanted].tobytes(), logprobs[wanted].tobytes(), ranks.tobytes())


def spread(logprobs: TokenLogprobs, asked: np.ndarray) -> TokenLogprobs:
    """`logprobs` of the tokens that `asked` (bool [n]) marks, with empty entries for the others between them."""
    if asked.all():
        return logprobs
    columns = []
    for column in (logprobs.num_entries, logprobs.ranks):
        values = np.zeros(len(asked), dtype="<i4")
        values[asked] = np.frombuffer(column, dtype="<i4")
        columns.append(values.tobytes())
    return TokenLogprobs(columns[0], logprobs.token_ids, logprobs.logprobs, columns[1], logprobs.entry_ranks)


def most_likely(logits: torch.Tensor, count: int) -> torch.Tensor:
    """The tokens of the `count` largest logits of each row, descending, equal ones by ascending id.

    Args:
        logits: float32 [n, vocab_size].

    Returns:
        int64 [n, count].
    """
    num_rows, vocab_size = logits.shape
    num_blocks = vocab_size // BLOCK
    if count == 0:
        return torch.empty(num_rows, 0, dtype=torch.int64, device=logits.device)
    if count == vocab_size:
        return logits.sort(dim=-1, descending=True, stable=True).indices
    if count * 4 > num_blocks:
        ids = torch.arange(vocab_size, device=logits.device)
        return _order_keys(logits, ids).topk(count, dim=-1).indices
    # A token among the `count` first is in one of the `count` first blocks by (maximum, lower index): each block before
    # its own holds a token before it.
    maxima = logits[:, : num_blocks * BLOCK].view(num_rows, num_blocks, BLOCK).amax(-1)
    blocks = (
        _order_keys(maxima, torch.arange(num_blocks, device=logits.device)).topk(count, dim=-1, sorted=False).indices
    )
    ids = (blocks.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=logits.device)).flatten(1)
    rest = torch.arange(num_blocks * BLOCK, vocab_size, device=logits.device).expand(num_rows, -1)
    ids = torch.cat([ids, rest], -1)
    order = _order_keys(logits.gather(-1, ids), ids).topk(count, dim=-1).indices
    return ids.gather(-1, order)


def _order_keys(values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int64 keys, all different, whose order is that of the values, and among equals the lower id's is the larger.

    A float32's bits order like an integer once those below the sign of negative ones are flipped.
    """
    bits = (values + 0.0).view(torch.int32)  # + 0.0: -0.0 equals 0.0.
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (ordered.to(torch.int64) << 32) + (0xFFFFFFFF - ids)


def _wanted(value: int | None) -> int:
    if value is None:
        return NOT_ASKED
    return np.iinfo(np.int64).max - 1 if value == -1 else value
