"""What changes logits before the draw, one class for each request feature; the interface, and the smallest features.

A processor keeps its own state by row of the persistent batch: `set_row` on every request that enters the batch,
`apply` on the logits of each step's sampling rows that use it. `executors.logits_pipeline` has all of them in order.

Users write processors too: a subclass named by `ModelConfig.logits_processors` runs in every worker that samples.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from scheduler.output import NewRequestData


@dataclass(frozen=True, slots=True)
class BatchView:
    """The persistent batch as processors may read it, by row. Never write to it.

    Attributes:
        token_ids: int32 [max_num_seqs, max_model_len], prompt then output; valid up to `num_tokens`.
        num_tokens, num_prompt_tokens: int64 [max_num_seqs].
    """

    token_ids: np.ndarray
    num_tokens: np.ndarray
    num_prompt_tokens: np.ndarray

    @property
    def max_num_seqs(self) -> int:
        return len(self.num_tokens)


class LogitsProcessor(ABC):
    """One feature, for all rows at once. Subclass it for processors of your own.

        class OnlyEven(LogitsProcessor):
            def set_row(self, row: int, request: NewRequestData) -> bool:
                return bool((request.sampling_params.extra_args or {}).get("only_even"))

            def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
                logits[torch.from_numpy(indices), 1::2] = float("-inf")

    What it does to a row must depend on that row alone (its parameters and tokens), or batching would change results;
    and it must do the same on all ranks, each of which runs it. Where `set_row` raises, that request ends with an
    error; where `apply` raises, all requests that use the processor in that step.
    """

    def __init__(self, batch: BatchView) -> None:
        """
        Args:
            batch: All tokens of all rows, kept up to date by the worker.
        """
        self.batch = batch

    @abstractmethod
    def set_row(self, row: int, request: NewRequestData) -> bool:
        """`request` now owns `row`; forget what was there before. True: it uses this processor.

        Called again when a preempted request resumes, with the tokens generated before.
        """

    @abstractmethod
    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
        """Change logits in place.

        Args:
            logits: float32 [n, vocab_size] of all sampling rows.
            rows: int64 [m], at least one: the persistent-batch rows that use this processor.
            indices: int64 [m]: logits[indices[i]] are those of rows[i]. Touch no others.
        """


class MinTokens(LogitsProcessor):
    """Masks EOS and stop tokens while a request has generated fewer than `min_tokens`."""

    def __init__(self, batch: BatchView) -> None:
        super().__init__(batch)
        self._min_tokens = np.zeros(batch.max_num_seqs, dtype=np.int64)
        self._stop_ids: list[np.ndarray] = [np.zeros(0, dtype=np.int64)] * batch.max_num_seqs

    def set_row(self, row: int, request: NewRequestData) -> bool:
        self._min_tokens[row] = request.sampling_params.min_tokens
        self._stop_ids[row] = np.array(request.stop_ids_until_min_tokens, dtype=np.int64)
        return bool(request.sampling_params.min_tokens and request.stop_ids_until_min_tokens)

    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
        num_output_tokens = self.batch.num_tokens[rows] - self.batch.num_prompt_tokens[rows]
        waiting = num_output_tokens < self._min_tokens[rows]
        if waiting.any():
            rows, indices = rows[waiting], indices[waiting]
            where = flat_positions(indices, [self._stop_ids[row] for row in rows.tolist()], logits.device)
            logits[where] = float("-inf")


def flat_positions(
    indices: np.ndarray, token_ids: Sequence[np.ndarray], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Index tensors of `token_ids[i]` in row `indices[i]` of the logits, flattened."""
    lengths = np.fromiter((len(ids) for ids in token_ids), dtype=np.int64, count=len(token_ids))
    logits_rows = torch.from_numpy(np.repeat(indices, lengths)).to(device)
    return logits_rows, torch.from_numpy(np.concatenate(token_ids)).to(device)
