"""Logits → tokens. A pure function: a row's token depends on its logits, parameters, seed and position, nothing else.

Temperature, top-k, top-p and min-p mean what transformers' logits processors of these names do, applied in this order.
A token is drawn as the largest of `logit / temperature + gumbel(seed, position, token)` over the tokens they keep.
Called by `executors.model_runner` with the columns that `executors.sampling_state` gathers.

Where one of the three is in use, only the most likely tokens are looked at: the `PREFIX_LENGTHS[0]` largest logits, and
more only for rows whose kept set may reach beyond them. How far a row looks depends on that row alone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from executors.random import gumbel_noise, row_keys

PREFIX_LENGTHS = (64, 512)
"""Prefixes tried before sorting the whole vocabulary."""

MAX_NOISE_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Elements of noise made at once for whole-vocabulary draws: cache-sized on CPU, memory-bounded on CUDA."""

_NEGATIVE_INFINITY = float("-inf")


@dataclass(frozen=True, slots=True)
class SamplingColumns:
    """Parameters of the rows that draw at random ([m] each, on the logits' device), and what is known of them all.

    Attributes:
        rows: int64, indices of these rows in the logits; None where they are all of the logits' rows.
        temperature: float32, positive.
        top_k: int64; 0 is off.
        top_p: float64 in (0, 1); inf is off.
        log_min_p: float32, natural logarithm of min_p; -inf is off.
        seeds, positions: int64; position is the drawn token's index in prompt + output.
        truncated: bool, top_k, top_p or min_p in use.
        any_truncated, all_truncated: Of `truncated`. Kept by the host, as the next ones: reading a CUDA tensor waits.
        all_top_k: Every truncated row has top_k.
        any_top_p: Some row has top_p.
    """

    rows: torch.Tensor | None
    temperature: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    log_min_p: torch.Tensor
    seeds: torch.Tensor
    positions: torch.Tensor
    truncated: torch.Tensor
    any_truncated: bool
    all_truncated: bool
    all_top_k: bool
    any_top_p: bool

    def select(self, rows: torch.Tensor) -> SamplingColumns:
        """The columns of some of these rows, given by index."""
        names = ("temperature", "top_k", "top_p", "log_min_p", "seeds", "positions", "truncated")
        return replace(self, rows=None, **{name: getattr(self, name)[rows] for name in names})


def sample(logits: torch.Tensor, columns: SamplingColumns | None) -> torch.Tensor:
    """One token for each row.

    Args:
        logits: [n, vocab_size], any float type. Not changed.
        columns: Parameters of the rows that draw at random; None when all are greedy.

    Returns:
        int64 [n]. A greedy row takes its largest logit, the lowest id among equals.
    """
    if columns is None:
        return logits.argmax(dim=-1)
    if columns.rows is None:
        return _draw(logits.to(torch.float32), columns)
    tokens = logits.argmax(dim=-1)
    tokens[columns.rows] = _draw(logits[columns.rows].to(torch.float32), columns)
    return tokens


def _draw(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    if columns.all_truncated:
        return _draw_truncated(logits, columns)
    if not columns.any_truncated:
        return _draw_from_all(logits, columns)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for mask, draw in ((columns.truncated, _draw_truncated), (~columns.truncated, _draw_from_all)):
        rows = mask.nonzero().squeeze(-1)
        tokens[rows] = draw(logits[rows], columns.select(rows))
    return tokens


def _draw_from_all(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """Draws over the whole vocabulary; of equal sums the lowest id wins."""
    num_rows, vocab_size = logits.shape
    keys = row_keys(columns.seeds, columns.positions)
    token_ids = torch.arange(vocab_size, device=logits.device)
    num_chunk_rows = max(1, MAX_NOISE_ELEMENTS[logits.device.type] // vocab_size)
    tokens = []
    for start in range(0, num_rows, num_chunk_rows):
        chunk = slice(start, start + num_chunk_rows)
        scores = gumbel_noise(keys[chunk], token_ids).add_(logits[chunk] / columns.temperature[chunk].unsqueeze(-1))
        tokens.append(scores.argmax(dim=-1))
    return torch.cat(tokens)


def _draw_truncated(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """Draws from a prefix of each row's order, the shortest of `PREFIX_LENGTHS` (or the vocabulary) that suffices."""
    vocab_size = logits.shape[-1]
    lengths = [length for length in PREFIX_LENGTHS if length < vocab_size]
    tokens, complete = _draw_from_prefix(logits, columns, lengths[0] if lengths else vocab_size)
    pending = (~complete).nonzero().squeeze(-1)
    for length in (*lengths[1:], vocab_size):
        if not len(pending):
            break
        tokens[pending], complete = _draw_from_prefix(logits[pending], columns.select(pending), length)
        pending = pending[~complete]
    return tokens


def _draw_from_prefix(logits: torch.Tensor, columns: SamplingColumns, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the `length` most likely tokens of each row.

    Returns:
        int64 [n] tokens, and bool [n] which of them hold: for the others, tokens beyond the prefix count too.
    """
    values, token_ids = _ordered_prefix(logits, length)
    temperature = columns.temperature.unsqueeze(-1)
    values = values / temperature
    has_top_k = columns.top_k > 0
    # As in transformers, every token as likely as the k-th is kept.
    kth = values.gather(-1, torch.where(has_top_k, columns.top_k, length).clamp(max=length).unsqueeze(-1) - 1)
    kept = (values >= kth) & (values > _NEGATIVE_INFINITY)
    edge = values == values[:, -1:]
    reaches_edge_by_top_k = has_top_k & (kept & edge).any(-1)
    if columns.any_top_p:
        # Probabilities are those of the tokens top-k keeps; without top-k, of the whole vocabulary.
        log_total = values.masked_fill(~kept, _NEGATIVE_INFINITY).logsumexp(-1)
        if not columns.all_top_k:
            log_total = torch.where(has_top_k, log_total, (logits / temperature).logsumexp(-1))
        probabilities = (values - log_total.unsqueeze(-1)).to(torch.float64).exp_()
        kept &= probabilities.cumsum(-1) - probabilities < columns.top_p.unsqueeze(-1)
    kept &= values >= values[:, :1] + columns.log_min_p.unsqueeze(-1)
    noise = gumbel_noise(row_keys(columns.seeds, columns.positions), token_ids)
    scores = (values + noise).masked_fill_(~kept, _NEGATIVE_INFINITY)
    tokens = token_ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1)
    if length == logits.shape[-1]:
        return tokens, torch.ones_like(has_top_k)
    # A kept token as likely as the prefix's last may have equals, or successors, outside of it.
    return tokens, ~(reaches_edge_by_top_k | (kept & edge).any(-1))


def _ordered_prefix(logits: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `length` largest logits of each row in descending order, equal ones by ascending token id; and the ids."""
    if length == logits.shape[-1]:
        values, token_ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, token_ids
    # topk leaves the order of equal logits open.
    token_ids = logits.topk(length, dim=-1, sorted=False).indices.sort(-1).values
    values, order = logits.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(-1, order)
