"""Token masks as int32 words: bit `t % 32` of word `t // 32` stands for token t."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

Mask = NDArray[np.int32]


def num_words(vocab_size: int) -> int:
    """Words of a mask."""
    return -(-vocab_size // 32)


def full_mask(vocab_size: int) -> Mask:
    """Every token of the vocabulary, and no bit beyond."""
    bits = np.zeros(num_words(vocab_size) * 32, dtype=np.uint8)
    bits[:vocab_size] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


def mask_of(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """These tokens only."""
    bits = np.zeros(num_words(vocab_size) * 32, dtype=np.uint8)
    bits[list(token_ids)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
