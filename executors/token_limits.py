"""What a request allows, forbids or favours among tokens: allowed_token_ids, bad_words, logit_bias.

Part of `executors.logits_processors.LogitsPipeline`.
"""

from __future__ import annotations

import numpy as np
import torch

from executors.logits_processors import BatchView, LogitsProcessor, flat_positions
from scheduler.output import NewRequestData

_NONE = np.zeros(0, dtype=np.int64)


class AllowedTokens(LogitsProcessor):
    """Masks every token but `allowed_token_ids`."""

    def __init__(self, batch: BatchView) -> None:
        super().__init__(batch)
        self._token_ids: list[np.ndarray] = [_NONE] * batch.max_num_seqs

    def set_row(self, row: int, request: NewRequestData) -> bool:
        allowed = request.sampling_params.allowed_token_ids
        self._token_ids[row] = _NONE if allowed is None else np.unique(np.array(allowed, dtype=np.int64))
        return allowed is not None

    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
        where = flat_positions(indices, [self._token_ids[row] for row in rows.tolist()], logits.device)
        kept = logits[where]
        logits[torch.from_numpy(indices).to(logits.device)] = float("-inf")
        logits[where] = kept


class LogitBias(LogitsProcessor):
    """Adds `logit_bias`."""

    def __init__(self, batch: BatchView) -> None:
        super().__init__(batch)
        self._token_ids: list[np.ndarray] = [_NONE] * batch.max_num_seqs
        self._biases: list[np.ndarray] = [_NONE] * batch.max_num_seqs

    def set_row(self, row: int, request: NewRequestData) -> bool:
        biases = request.sampling_params.logit_bias or {}
        self._token_ids[row] = np.fromiter(biases, dtype=np.int64, count=len(biases))
        self._biases[row] = np.fromiter(biases.values(), dtype=np.float32, count=len(biases))
        return bool(biases)

    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
        where = flat_positions(indices, [self._token_ids[row] for row in rows.tolist()], logits.device)
        biases = np.concatenate([self._biases[row] for row in rows.tolist()])
        logits[where] += torch.from_numpy(biases).to(logits.device)


class BadWords(LogitsProcessor):
    """Masks the last token of each of `bad_words_token_ids` whose other tokens are the last ones of prompt + output.

    As transformers' NoBadWordsLogitsProcessor. Sequences are found by their last token but one, so a step looks at
    few of them.
    """

    def __init__(self, batch: BatchView) -> None:
        super().__init__(batch)
        self._single: list[np.ndarray] = [_NONE] * batch.max_num_seqs
        self._by_previous: list[dict[int, list[tuple[np.ndarray, int]]]] = [{} for _ in range(batch.max_num_seqs)]
        """Token → sequences it may complete but for the last: (all but the last, the last)."""

    def set_row(self, row: int, request: NewRequestData) -> bool:
        sequences = request.sampling_params.bad_words_token_ids
        self._single[row] = np.array([sequence[0] for sequence in sequences if len(sequence) == 1], dtype=np.int64)
        by_previous: dict[int, list[tuple[np.ndarray, int]]] = {}
        for sequence in sequences:
            if len(sequence) > 1:
                prefix = np.array(sequence[:-1], dtype=np.int32)
                by_previous.setdefault(sequence[-2], []).append((prefix, sequence[-1]))
        self._by_previous[row] = by_previous
        return bool(sequences)

    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
        masked = [self._masked(row) for row in rows.tolist()]
        logits[flat_positions(indices, masked, logits.device)] = float("-inf")

    def _masked(self, row: int) -> np.ndarray:
        num_tokens = int(self.batch.num_tokens[row])
        tokens = self.batch.token_ids[row, :num_tokens]
        candidates = self._by_previous[row].get(int(tokens[-1]), ())
        completed = [
            last
            for prefix, last in candidates
            if len(prefix) <= num_tokens and np.array_equal(tokens[num_tokens - len(prefix) :], prefix)
        ]
        return (
            np.concatenate([self._single[row], np.array(completed, dtype=np.int64)]) if completed else self._single[row]
        )
