"""What changes logits before the draw, one class for each request feature.

A processor keeps its own state by row of the persistent batch: `set_row` on every request that enters the batch,
`apply` on the logits of each step's sampling rows. `apply` returns at once when no row uses the feature, so a feature
costs nothing to batches without it. Called by `executors.sampling_state`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import torch

from scheduler.output import NewRequestData


class LogitsProcessor(ABC):
    """One feature. The rows of `apply` are persistent-batch rows; row i of the logits belongs to `rows[i]`."""

    @abstractmethod
    def set_row(self, row: int, request: NewRequestData) -> None:
        """`request` now owns `row`; forget what was there before."""

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: np.ndarray, num_output_tokens: np.ndarray) -> None:
        """Change the logits in place.

        Args:
            logits: [n, vocab_size].
            rows: int64 [n].
            num_output_tokens: int64 [n], tokens each row has generated so far.
        """


class MinTokens(LogitsProcessor):
    """Masks EOS and stop tokens while a request has generated fewer than `min_tokens`."""

    def __init__(self) -> None:
        self._pending: dict[int, tuple[int, list[int]]] = {}
        """Row → (min_tokens, masked ids), until min_tokens are reached."""

    def set_row(self, row: int, request: NewRequestData) -> None:
        self._pending.pop(row, None)
        if request.sampling_params.min_tokens and request.stop_ids_until_min_tokens:
            self._pending[row] = (request.sampling_params.min_tokens, request.stop_ids_until_min_tokens)

    def apply(self, logits: torch.Tensor, rows: np.ndarray, num_output_tokens: np.ndarray) -> None:
        if not self._pending:
            return
        logits_rows: list[int] = []
        token_ids: list[int] = []
        for index, (row, num_output) in enumerate(zip(rows.tolist(), num_output_tokens.tolist(), strict=True)):
            min_tokens, stop_ids = self._pending.get(row, (0, []))
            if num_output < min_tokens:
                logits_rows.extend([index] * len(stop_ids))
                token_ids.extend(stop_ids)
            else:
                self._pending.pop(row, None)
        if logits_rows:
            where = torch.tensor([logits_rows, token_ids], device=logits.device)
            logits[where[0], where[1]] = float("-inf")


def apply_grammar_bitmask(logits: torch.Tensor, bitmask: bytes) -> None:
    """Mask, in place, the tokens a grammar forbids.

    Args:
        logits: [n, vocab_size].
        bitmask: int32 words [n, ceil(vocab_size / 32)], little-endian; bit t % 32 of word t // 32 is 1 where token t
            is allowed. Rows without a grammar have all ones.

    Raises:
        ValueError: The size does not fit the logits.
    """
    num_rows, vocab_size = logits.shape
    num_words = -(-vocab_size // 32)
    if len(bitmask) != num_rows * num_words * 4:
        raise ValueError(
            f"grammar bitmask has {len(bitmask)} bytes, but {num_rows} sampling rows × {num_words} words of 4 bytes "
            f"(vocabulary of {vocab_size}) need {num_rows * num_words * 4}"
        )
    bits = np.frombuffer(bitmask, dtype=np.uint8).reshape(num_rows, num_words * 4)
    allowed = np.unpackbits(bits, axis=1, bitorder="little", count=vocab_size)
    logits.masked_fill_(torch.from_numpy(allowed == 0).to(logits.device), float("-inf"))
