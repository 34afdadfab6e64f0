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
"""Prefixes tried before the whole vocabulary is looked at."""

MAX_SORTED_VOCABULARY = 8192

NUM_BINS = 4096
"""Of the histogram that finds a wide top-p set: fine enough that few tokens share the bin of the cut."""

MAX_NOISE_ELEMENTS = {"cpu": 1 << 17, "cuda": 1 << 26}
"""Elements of noise made at once for whole-vocabulary draws: cache-sized on CPU, memory-bounded on CUDA."""

MAX_CONVERTED_ELEMENTS = 1 << 18
"""Of logits converted to float32 at once on CPU."""

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
        int64 [n]. A greedy row takes its largest logit, the lowest id among equals. -1 where the logits hold a NaN or
        +inf: such a row says nothing.
    """
    if columns is None:
        return _first_argmax(logits)
    if columns.rows is None:
        return _draw(logits.to(torch.float32), columns)
    tokens = _first_argmax(logits)
    tokens[columns.rows] = _draw(logits[columns.rows].to(torch.float32), columns)
    return tokens


def _first_argmax(values: torch.Tensor) -> torch.Tensor:
    """Index of each row's largest value, the first among equals; -1 where that is NaN or +inf. [n, k] → int64 [n].

    On CPU torch.argmax is not vectorised: numpy's is 6 times faster for float32, and for bfloat16 13 times in spite of
    the conversion, which is done in pieces that stay in the cache.
    """
    if values.device.type != "cpu":
        tokens = values.argmax(dim=-1)
    elif values.dtype == torch.float32:
        tokens = torch.from_numpy(values.numpy().argmax(axis=-1))
    else:
        chunks = values.split(max(1, MAX_CONVERTED_ELEMENTS // values.shape[-1]))
        tokens = torch.cat([torch.from_numpy(chunk.float().numpy().argmax(axis=-1)) for chunk in chunks])
    # A NaN counts as the largest of its row.
    return tokens.masked_fill(_is_overflow(values.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)), -1)


def _is_overflow(largest: torch.Tensor) -> torch.Tensor:
    """Which rows, of which these are the largest values, hold something that is no number: bool."""
    return ~(largest < float("inf"))


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
        tokens.append(_first_argmax(scores))
    return torch.cat(tokens)


def _draw_truncated(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """Draws from a prefix of each row's order, the shortest of `PREFIX_LENGTHS` that suffices, or from all tokens."""
    vocab_size = logits.shape[-1]
    lengths = [length for length in PREFIX_LENGTHS if length < vocab_size] or [vocab_size]
    totals = None
    if columns.any_top_p and not columns.all_top_k:
        totals = _probability_totals(logits, columns.temperature)
    tokens, complete = _draw_from_prefix(logits, columns, lengths[0], totals)
    pending = (~complete).nonzero().squeeze(-1)
    # Many rows of a small vocabulary are sorted faster than they are looked at one by one; so are rows on CUDA.
    sorts = logits.device.type != "cpu" or vocab_size <= MAX_SORTED_VOCABULARY
    for length in (*lengths[1:], vocab_size) if sorts else lengths[1:]:
        if not len(pending):
            return tokens
        pending_totals = None if totals is None else totals[pending]
        drawn, complete = _draw_from_prefix(logits[pending], columns.select(pending), length, pending_totals)
        tokens[pending] = drawn
        pending = pending[~complete]
    for row in pending.tolist():
        tokens[row] = _draw_from_wide_set(logits[row], columns.select(torch.tensor([row])))
    return tokens


def _probability_totals(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    """What the whole vocabulary's exp(logit - largest logit), after temperature, sum up to. float64 [n].

    It is 1 over the largest probability: softmax does in one pass what exp and sum do in several times as long. On CPU
    in pieces that stay in the cache.
    """
    num_rows, vocab_size = logits.shape
    step = num_rows if logits.device.type != "cpu" else max(1, MAX_CONVERTED_ELEMENTS // vocab_size)
    largest = [
        (logits[start : start + step] / temperature[start : start + step].unsqueeze(-1)).softmax(-1).amax(-1)
        for start in range(0, num_rows, step)
    ]
    return torch.cat(largest).to(torch.float64).reciprocal_()


def _draw_from_prefix(
    logits: torch.Tensor, columns: SamplingColumns, length: int, totals: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw among the `length` most likely tokens of each row.

    Args:
        totals: `_probability_totals`, where a row has top-p but not top-k.

    Returns:
        int64 [n] tokens, and bool [n] which of them hold: for the others, tokens beyond the prefix count too.
    """
    values, token_ids = _ordered_prefix(logits, length)
    overflow = _is_overflow(values[:, 0])  # A NaN sorts before all numbers.
    values = values / columns.temperature.unsqueeze(-1)
    has_top_k = columns.top_k > 0
    # As in transformers, every token as likely as the k-th is kept.
    kth = values.gather(-1, torch.where(has_top_k, columns.top_k, length).clamp(max=length).unsqueeze(-1) - 1)
    kept = (values >= kth) & (values > _NEGATIVE_INFINITY)
    edge = values == values[:, -1:]
    reaches_edge_by_top_k = has_top_k & (kept & edge).any(-1)
    if columns.any_top_p:
        # Shares are of the tokens top-k keeps; without top-k, of the whole vocabulary.
        weights = (values - values[:, :1]).to(torch.float64).exp_()
        kept_totals = weights.masked_fill(~kept, 0.0).sum(-1)
        if totals is not None:
            kept_totals = torch.where(has_top_k, kept_totals, totals)
        kept &= weights.cumsum(-1) - weights < (columns.top_p * kept_totals).unsqueeze(-1)
    kept &= values >= values[:, :1] + columns.log_min_p.unsqueeze(-1)
    noise = gumbel_noise(row_keys(columns.seeds, columns.positions), token_ids)
    scores = (values + noise).masked_fill_(~kept, _NEGATIVE_INFINITY)
    tokens = token_ids.gather(-1, scores.argmax(-1, keepdim=True)).squeeze(-1).masked_fill_(overflow, -1)
    if length == logits.shape[-1]:
        return tokens, torch.ones_like(has_top_k)
    # A kept token as likely as the prefix's last may have equals, or successors, outside of it.
    return tokens, overflow | ~(reaches_edge_by_top_k | (kept & edge).any(-1))


def _draw_from_wide_set(logits: torch.Tensor, columns: SamplingColumns) -> torch.Tensor:
    """Draw for one row [vocab_size] whose kept tokens may be many, without sorting them."""
    scaled = logits / columns.temperature
    kept = scaled > _NEGATIVE_INFINITY
    top_k, top_p = int(columns.top_k), float(columns.top_p)
    if 0 < top_k < len(scaled):
        kept &= scaled >= scaled.topk(top_k, sorted=False).values.min()
    token_ids = kept.nonzero().squeeze(-1)
    values = scaled[token_ids]
    if top_p < 1.0:
        in_nucleus = _nucleus(values, top_p)
        token_ids, values = token_ids[in_nucleus], values[in_nucleus]
    likely = values >= values.max() + columns.log_min_p
    token_ids, values = token_ids[likely], values[likely]
    noise = gumbel_noise(row_keys(columns.seeds, columns.positions), token_ids)[0]
    return token_ids[(values + noise).argmax()]


def _nucleus(values: torch.Tensor, top_p: float) -> torch.Tensor:
    """bool mask of the top-p set of finite values [n]: in descending order, equal ones by index.

    A histogram by value finds the bin where the sum of probabilities reaches top_p; only that bin is sorted.
    """
    depth = values.max() - values
    weights = (-depth).to(torch.float64).exp_()
    bins = (depth * ((NUM_BINS - 1) / depth.max().clamp(min=1e-30))).to(torch.int64).clamp_(max=NUM_BINS - 1)
    reached = torch.bincount(bins, weights=weights, minlength=NUM_BINS).cumsum(-1)
    limit = top_p * reached[-1]
    cut = int(torch.searchsorted(reached, limit))
    mask = bins < cut
    at_cut = (bins == cut).nonzero().squeeze(-1)
    order = at_cut[values[at_cut].sort(dim=-1, descending=True, stable=True).indices]
    before = reached[cut - 1] if cut > 0 else 0.0
    mask[order[before + weights[order].cumsum(-1) - weights[order] < limit]] = True
    return mask


def _ordered_prefix(logits: torch.Tensor, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The `length` largest logits of each row in descending order, equal ones by ascending token id; and the ids."""
    if length == logits.shape[-1]:
        values, token_ids = logits.sort(dim=-1, descending=True, stable=True)
        return values, token_ids
    # topk leaves the order of equal logits open.
    token_ids = logits.topk(length, dim=-1, sorted=False).indices.sort(-1).values
    values, order = logits.gather(-1, token_ids).sort(dim=-1, descending=True, stable=True)
    return values, token_ids.gather(-1, order)
