"""Log-probabilities of tokens by the model's own logits: the tokens' own, their ranks, and the most likely others.

`executors.model_runner` calls it on logits that nothing has changed, for sampled and for prompt tokens.
"""

from __future__ import annotations

import numpy as np
import torch

from scheduler.logprobs import TokenLogprobs
from scheduler.output import NewRequestData

MAX_ELEMENTS = {"cpu": 1 << 18, "cuda": 1 << 25}
"""Of logits worked on at once: cache-sized on CPU, memory-bounded on CUDA."""

BLOCK = 64
"""Tokens of a block in the search for the most likely ones: only blocks with a large maximum are looked into."""

NOT_ASKED = -1


class LogprobsState:
    """By row of the persistent batch, how many log-probabilities a request wants: NOT_ASKED, or the number of most
    likely tokens (int64 [max_num_seqs]; larger than any vocabulary for all).

    Attributes:
        num_logprobs: For sampled tokens.
        num_prompt_logprobs: For prompt tokens.
    """

    def __init__(self, max_num_seqs: int) -> None:
        self.num_logprobs = np.full(max_num_seqs, NOT_ASKED, dtype=np.int64)
        self.num_prompt_logprobs = np.full(max_num_seqs, NOT_ASKED, dtype=np.int64)

    def set_row(self, row: int, request: NewRequestData) -> None:
        """`request` now owns `row`."""
        params = request.sampling_params
        self.num_logprobs[row] = _wanted(params.logprobs)
        self.num_prompt_logprobs[row] = _wanted(params.prompt_logprobs)


def compute_logprobs(logits: torch.Tensor, token_ids: torch.Tensor, num_most_likely: np.ndarray) -> TokenLogprobs:
    """Log-probabilities of one token for each row of the logits.

    Args:
        logits: [n, vocab_size], any float type. Not changed.
        token_ids: int64 [n], on the logits' device.
        num_most_likely: int64 [n], how many others each row wants.
    """
    num_rows, vocab_size = logits.shape
    num_most_likely = np.minimum(num_most_likely, vocab_size)
    width = int(num_most_likely.max())
    ids = np.empty((num_rows, 1 + width), dtype="<i4")
    logprobs = np.empty((num_rows, 1 + width), dtype="<f4")
    ranks = np.empty(num_rows, dtype="<i4")
    step = max(1, MAX_ELEMENTS[logits.device.type] // vocab_size)
    for start in range(0, num_rows, step):
        rows = slice(start, start + step)
        chunk, tokens = logits[rows].to(torch.float32), token_ids[rows].unsqueeze(-1)
        chosen = chunk.gather(-1, tokens)
        largest, largest_ids = most_likely(chunk, width)
        values, all_ids = torch.cat([chosen, largest], -1), torch.cat([tokens, largest_ids], -1)
        ranks[rows] = ((chunk > chosen).sum(-1) + 1).cpu().numpy()
        logprobs[rows] = (values - log_totals(chunk)).cpu().numpy()
        ids[rows] = all_ids.cpu().numpy()
    wanted = np.arange(1 + width) <= num_most_likely[:, None]
    return TokenLogprobs(
        (num_most_likely + 1).astype("<i4").tobytes(),
        ids[wanted].tobytes(),
        logprobs[wanted].tobytes(),
        ranks.tobytes(),
    )


def spread(logprobs: TokenLogprobs, asked: np.ndarray) -> TokenLogprobs:
    """`logprobs` of the tokens that `asked` (bool [n]) marks, with empty entries for the others between them."""
    if asked.all():
        return logprobs
    columns = []
    for column in (logprobs.num_entries, logprobs.ranks):
        values = np.zeros(len(asked), dtype="<i4")
        values[asked] = np.frombuffer(column, dtype="<i4")
        columns.append(values.tobytes())
    return TokenLogprobs(columns[0], logprobs.token_ids, logprobs.logprobs, columns[1])


def log_totals(logits: torch.Tensor) -> torch.Tensor:
    """Logarithm of each row's sum of exp(logit). float32 [n, vocab_size] → float32 [n, 1]."""
    largest = logits.amax(-1, keepdim=True)
    return (logits - largest).exp_().sum(-1, keepdim=True).log_().add_(largest)


def most_likely(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `count` largest logits of each row, descending, equal ones by ascending token id.

    Args:
        logits: float32 [n, vocab_size].

    Returns:
        float32 and int64 [n, count]: logits, token ids.
    """
    num_rows, vocab_size = logits.shape
    num_blocks = vocab_size // BLOCK
    if count == 0:
        return logits[:, :0], torch.empty(num_rows, 0, dtype=torch.int64, device=logits.device)
    if count == vocab_size:
        return logits.sort(dim=-1, descending=True, stable=True)
    if count * 4 > num_blocks:
        ids = torch.arange(vocab_size, device=logits.device)
        ids = _order_keys(logits, ids).topk(count, dim=-1).indices
        return logits.gather(-1, ids), ids
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
    ids = ids.gather(-1, order)
    return logits.gather(-1, ids), ids


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
