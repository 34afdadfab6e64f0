"""Grammar masks on logits. Called by the model runner between the forward and the sampler, when a step has masks."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

_MAX_BYTES_AT_ONCE = 32 * 1024 * 1024
"""Unpacked masks are bytes per token; rows are done in chunks of about this much memory."""


def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    Args:
        logits: [num_rows, vocab_size], of any floating dtype, on any device.
        mask: int32 [num_masks, ceil(vocab_size / 32)], on the same device: bit `t % 32` of word `t // 32` is set where
            token t is allowed. Bits beyond the vocabulary are not looked at.
        rows: int64 [num_masks]: the row of `logits` that each mask belongs to; None for the first `num_masks` rows.

    Raises:
        ValueError: The shapes do not fit: a token without a bit would be neither allowed nor forbidden.
    """
    num_masks, num_words = mask.shape
    vocab_size = logits.shape[1]
    if num_words != -(-vocab_size // 32):
        raise ValueError(f"a mask of {num_words} words does not fit logits of {vocab_size} tokens")
    if num_masks > len(logits) and rows is None:
        raise ValueError(f"{num_masks} masks do not fit {len(logits)} rows of logits")
    table = _forbidden_by_byte(logits.device)
    step = max(1, _MAX_BYTES_AT_ONCE // (num_words * 32))
    for start in range(0, num_masks, step):
        # Byte by byte through a table of 256 × 8: several times faster than shifting bits.
        bytes_ = mask[start : start + step].contiguous().view(torch.uint8)
        forbidden = table[bytes_.to(torch.int32)].view(len(bytes_), -1)[:, :vocab_size]
        if rows is None:
            logits[start : start + step].masked_fill_(forbidden, float("-inf"))
        else:
            chosen = rows[start : start + step]
            logits[chosen] = logits[chosen].masked_fill_(forbidden, float("-inf"))


@functools.cache
def _forbidden_by_byte(device: torch.device) -> Tensor:
    """bool [256, 8]: which of a byte's eight tokens are not allowed."""
    values = torch.arange(256, dtype=torch.int32, device=device)
    return (values[:, None] >> torch.arange(8, dtype=torch.int32, device=device)) & 1 == 0
