"""A user's logits processor, imported by name in the workers."""

from __future__ import annotations

import numpy as np
import torch

from engine_actors import LogitsProcessor
from executors.logits_processors import BatchView
from scheduler.output import NewRequestData


class StepBy(LogitsProcessor):
    """With extra_args["step_by"] = n, each token is the one before it plus n."""

    def __init__(self, batch: BatchView) -> None:
        super().__init__(batch)
        self._steps = np.zeros(batch.max_num_seqs, dtype=np.int64)

    def set_row(self, row: int, request: NewRequestData) -> bool:
        self._steps[row] = (request.sampling_params.extra_args or {}).get("step_by", 0)
        return bool(self._steps[row])

    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
        last = self.batch.token_ids[rows, self.batch.num_tokens[rows] - 1]
        wanted = (last + self._steps[rows]) % logits.shape[1]
        logits[torch.from_numpy(indices)] = float("-inf")
        logits[torch.from_numpy(indices), torch.from_numpy(wanted)] = 0.0


class Faulty(LogitsProcessor):
    """Raises for requests with extra_args["faulty"]: "set_row", or the number of output tokens at which to."""

    def __init__(self, batch: BatchView) -> None:
        super().__init__(batch)
        self._at = np.full(batch.max_num_seqs, -1, dtype=np.int64)

    def set_row(self, row: int, request: NewRequestData) -> bool:
        faulty = (request.sampling_params.extra_args or {}).get("faulty")
        if faulty == "set_row":
            raise KeyError("no such thing")
        self._at[row] = -1 if faulty is None else faulty
        return faulty is not None

    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
        num_output_tokens = self.batch.num_tokens[rows] - self.batch.num_prompt_tokens[rows]
        if (num_output_tokens == self._at[rows]).any():
            logits[torch.from_numpy(indices)] = float("nan")
            raise ZeroDivisionError("in the user's own code")
