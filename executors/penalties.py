"""Repetition, presence and frequency penalties. Part of `executors.logits_processors.LogitsPipeline`.

Only tokens that a request contains are touched, so a step's cost grows with the lengths of the texts and not with the
vocabulary. Each row keeps its distinct tokens and how often each was generated; the token of the last step is added
when the row samples next, so neither steps in flight nor preemption need any message.
"""

from __future__ import annotations

import numpy as np
import torch

from executors.logits_processors import BatchView, LogitsProcessor
from scheduler.output import NewRequestData


class Penalties(LogitsProcessor):
    """As transformers' RepetitionPenaltyLogitsProcessor, then OpenAI's frequency and presence penalties.

    With logit l of a token in prompt or output, generated c times: l / r if l > 0 else l · r, less c · f, and less p if
    c > 0.
    """

    def __init__(self, batch: BatchView) -> None:
        super().__init__(batch)
        max_num_seqs = batch.max_num_seqs
        # Zero pages cost nothing until they are written.
        self._token_ids = np.zeros(batch.token_ids.shape, dtype=np.int32)
        self._output_counts = np.zeros(batch.token_ids.shape, dtype=np.int32)
        self._num_distinct = np.zeros(max_num_seqs, dtype=np.int64)
        self._num_counted = np.zeros(max_num_seqs, dtype=np.int64)
        self._repetition = np.ones(max_num_seqs, dtype=np.float32)
        self._frequency = np.zeros(max_num_seqs, dtype=np.float32)
        self._presence = np.zeros(max_num_seqs, dtype=np.float32)

    def set_row(self, row: int, request: NewRequestData) -> bool:
        params = request.sampling_params
        if not params.has_penalties:
            return False
        self._repetition[row] = params.repetition_penalty
        self._frequency[row] = params.frequency_penalty
        self._presence[row] = params.presence_penalty
        num_tokens, num_prompt = int(self.batch.num_tokens[row]), int(self.batch.num_prompt_tokens[row])
        # Without a repetition penalty the prompt does not matter.
        start = 0 if params.repetition_penalty != 1.0 else num_prompt
        tokens, inverse = np.unique(self.batch.token_ids[row, start:num_tokens], return_inverse=True)
        is_output = np.arange(start, num_tokens) >= num_prompt
        self._token_ids[row, : len(tokens)] = tokens
        self._output_counts[row, : len(tokens)] = np.bincount(inverse[is_output], minlength=len(tokens))
        self._num_distinct[row] = len(tokens)
        self._num_counted[row] = num_tokens
        return True

    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
        self._count_new_tokens(rows)
        num_distinct = self._num_distinct[rows]
        which, columns = np.nonzero(np.arange(num_distinct.max(initial=0)) < num_distinct[:, None])
        flat_rows = rows[which]
        counts = self._output_counts[flat_rows, columns].astype(np.float32)
        subtracted = counts * self._frequency[flat_rows] + (counts > 0) * self._presence[flat_rows]

        def to_device(array: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(array).to(logits.device)

        token_ids = self._token_ids[flat_rows, columns].astype(np.int64)
        where = to_device(indices[which]), to_device(token_ids)
        values, factors = logits[where], to_device(self._repetition[flat_rows])
        logits[where] = torch.where(values > 0, values / factors, values * factors) - to_device(subtracted)

    def _count_new_tokens(self, rows: np.ndarray) -> None:
        """Add what was generated since; at most one token for each row, since every token's row samples next."""
        rows = rows[self._num_counted[rows] < self.batch.num_tokens[rows]]
        if not len(rows):
            return
        tokens = self.batch.token_ids[rows, self._num_counted[rows]]
        num_distinct = self._num_distinct[rows]
        width = int(num_distinct.max())
        found = (self._token_ids[rows, :width] == tokens[:, None]) & (np.arange(width) < num_distinct[:, None])
        known = found.any(axis=1)
        columns = np.where(known, found.argmax(axis=1) if width else 0, num_distinct)
        self._token_ids[rows, columns] = tokens
        self._output_counts[rows, columns] = np.where(known, self._output_counts[rows, columns], 0) + 1
        self._num_distinct[rows] += ~known
        self._num_counted[rows] += 1
