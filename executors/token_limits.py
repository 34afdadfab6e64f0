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
        params = request.sampling_params
        columns, allowed = params.token_columns, params.allowed_token_ids
        if columns is not None and columns.allowed is not None:
            self._token_ids[row] = np.unique(_token_ids(columns.allowed))
        else:
            self._token_ids[row] = _NONE if allowed is None else np.unique(np.array(allowed, dtype=np.int64))
        return len(self._token_ids[row]) > 0

    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
        for row, index in zip(rows.tolist(), indices.tolist(), strict=True):
            token_ids = torch.from_numpy(self._token_ids[row]).to(logits.device)
            kept = logits[index].index_select(0, token_ids)
            logits[index].fill_(float("-inf")).index_copy_(0, token_ids, kept)


class LogitBias(LogitsProcessor):
    """Adds `logit_bias`."""

    def __init__(self, batch: BatchView) -> None:
        super().__init__(batch)
        self._token_ids: list[np.ndarray] = [_NONE] * batch.max_num_seqs
        self._biases: list[np.ndarray] = [_NONE] * batch.max_num_seqs

    def set_row(self, row: int, request: NewRequestData) -> bool:
        params = request.sampling_params
        columns, biases = params.token_columns, params.logit_bias or {}
        if columns is not None:
            self._token_ids[row] = _token_ids(columns.biased)
            self._biases[row] = np.frombuffer(columns.biases, dtype="<f4").astype(np.float32)
        else:
            self._token_ids[row] = np.fromiter(biases, dtype=np.int64, count=len(biases))
            self._biases[row] = np.fromiter(biases.values(), dtype=np.float32, count=len(biases))
        return len(self._token_ids[row]) > 0

    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
        for row, index in zip(rows.tolist(), indices.tolist(), strict=True):
            token_ids, biases = torch.from_numpy(self._token_ids[row]), torch.from_numpy(self._biases[row])
            logits[index].index_add_(0, token_ids.to(logits.device), biases.to(logits.device))


def _token_ids(column: bytes) -> np.ndarray:
    return np.frombuffer(column, dtype="<i4").astype(np.int64)


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
