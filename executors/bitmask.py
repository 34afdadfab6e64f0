"""Grammar masks on logits. Called by the model runner between the forward and the sampler, when a step has masks."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_MAX_BYTES_AT_ONCE = 32 * 1024 * 1024
"""Unpacked masks have a byte per token; rows are done in chunks of about this much memory."""


def apply_bitmask(logits: Tensor, mask: Tensor, rows: Tensor | None = None) -> None:
    """Set the logits of tokens that are not allowed to -inf, in place.

    Args:
        logits: [num_rows, vocab_size], of any floating dtype, on any device.
        mask: int32 [num_masks, ceil(vocab_size / 32)], on the same device: bit `t % 32` of word `t // 32` is set where
            token t is allowed. Bits beyond the vocabulary are not looked at.
        rows: int64 [num_masks]: the row of `logits` that each mask belongs to, all different; None for the first ones.

    Raises:
        ValueError: The shapes do not fit: a token without a bit would be neither allowed nor forbidden.
    """
    num_masks, num_words = mask.shape
    vocab_size = logits.shape[1]
    if num_words != -(-vocab_size // 32):
        raise ValueError(f"a mask of {num_words} words does not fit logits of {vocab_size} tokens")
    if num_masks > len(logits):
        raise ValueError(f"{num_masks} masks do not fit {len(logits)} rows of logits")
    if logits.device.type == "cpu":
        _apply_on_cpu(logits, mask, range(num_masks) if rows is None else rows.tolist())
        return
    step = max(1, _MAX_BYTES_AT_ONCE // (num_words * 32))
    for start in range(0, num_masks, step):
        forbidden = _unpack_forbidden(mask[start : start + step])[:, :vocab_size]
        if rows is None:
            logits[start : start + len(forbidden)].masked_fill_(forbidden, float("-inf"))
        else:
            chosen = rows[start : start + step]
            logits[chosen] = logits[chosen].masked_fill_(forbidden, float("-inf"))


def _apply_on_cpu(logits: Tensor, mask: Tensor, rows: Sequence[int]) -> None:
    """Row by row, on the bits of the logits: masked_fill is not vectorised on CPU and takes ten times as long."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[logits.element_size()]
    minus_infinity = torch.tensor([float("-inf")], dtype=logits.dtype).view(integers).numpy()
    kept_bits = _kept_bits_by_byte(integers)
    vocab_size = logits.shape[1]
    for row, mask_bytes in zip(rows, mask.contiguous().view(torch.uint8).numpy(), strict=True):
        bits = logits[row].view(integers).numpy()
        kept = kept_bits.take(mask_bytes, axis=0).reshape(-1)[:vocab_size]
        np.bitwise_and(bits, kept, out=bits)
        np.bitwise_or(bits, np.bitwise_and(np.invert(kept, out=kept), minus_infinity, out=kept), out=bits)


@functools.cache
def _kept_bits_by_byte(dtype: torch.dtype) -> np.ndarray:
    """[256, 8] of an integer type: all bits set where the byte's token is allowed, else none."""
    is_allowed = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    return (-is_allowed).to(dtype).numpy()


def _unpack_forbidden(mask: Tensor) -> Tensor:
    """bool [num_masks, num_words * 32]: True where a bit is clear."""
    bytes_ = mask.contiguous().view(torch.uint8)
    # Through a table of 256 words, each of which holds eight booleans: no arithmetic on bits.
    return _forbidden_by_byte(mask.device)[bytes_.to(torch.int64)].view(torch.bool)


@functools.cache
def _forbidden_by_byte(device: torch.device) -> Tensor:
    """int64 [256]: in its eight bytes, which of a byte's eight tokens are not allowed."""
    values = torch.arange(256, dtype=torch.int32, device=device)
    forbidden = (values[:, None] >> torch.arange(8, dtype=torch.int32, device=device)) & 1 == 0
    return forbidden.view(torch.int64).squeeze(1)
