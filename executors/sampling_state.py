"""Sampling parameters by row of the persistent batch, and their columns for one step's sampling rows.

Owned by `executors.input_batch`; `executors.model_runner` asks for a step's columns.
"""

from __future__ import annotations

import numpy as np
import torch

from executors.sampler import SamplingColumns
from scheduler.output import NewRequestData


class SamplingState:
    """Parameter columns [max_num_seqs]."""

    def __init__(self, max_num_seqs: int) -> None:
        self._greedy = np.ones(max_num_seqs, dtype=np.bool_)
        self._truncated = np.zeros(max_num_seqs, dtype=np.bool_)
        self._temperature = np.ones(max_num_seqs, dtype=np.float32)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self._top_p = np.full(max_num_seqs, np.inf, dtype=np.float64)
        self._log_min_p = np.full(max_num_seqs, -np.inf, dtype=np.float32)
        self._seeds = np.zeros(max_num_seqs, dtype=np.int64)

    def set_row(self, row: int, request: NewRequestData) -> None:
        """`request` now owns `row`.

        Raises:
            ValueError: A request that draws at random came without a seed.
        """
        params = request.sampling_params
        if params.seed is None and not params.is_greedy:
            raise ValueError(f"request {request.request_id}: seed must be set at admission, got None")
        self._greedy[row] = params.is_greedy
        self._temperature[row] = params.temperature
        self._top_k[row] = params.top_k
        self._top_p[row] = params.top_p if params.top_p < 1.0 else np.inf
        self._log_min_p[row] = np.log(params.min_p) if params.min_p > 0.0 else -np.inf
        self._truncated[row] = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
        self._seeds[row] = params.seed or 0

    def is_greedy(self, rows: np.ndarray) -> bool:
        """Whether all these rows take their likeliest token."""
        return bool(self._greedy[rows].all())

    def columns(self, rows: np.ndarray, positions: np.ndarray, device: torch.device) -> SamplingColumns | None:
        """What `sampler.sample` needs for logits whose row i is `rows[i]`'s; None when all are greedy.

        Args:
            rows: int64 [n], persistent-batch rows.
            positions: int64 [n], index in prompt + output of the token to be drawn.
        """
        is_random = ~self._greedy[rows]
        num_random = int(is_random.sum())
        if num_random == 0:
            return None
        logits_rows: torch.Tensor | None = None
        if num_random < len(rows):
            indices = is_random.nonzero()[0]
            rows, positions = rows[indices], positions[indices]
            logits_rows = torch.from_numpy(indices).to(device)

        def to_device(column: np.ndarray) -> torch.Tensor:
            return torch.from_numpy(column).to(device)

        truncated, top_k, top_p = self._truncated[rows], self._top_k[rows], self._top_p[rows]
        return SamplingColumns(
            rows=logits_rows,
            temperature=to_device(self._temperature[rows]),
            top_k=to_device(top_k),
            top_p=to_device(top_p),
            log_min_p=to_device(self._log_min_p[rows]),
            seeds=to_device(self._seeds[rows]),
            positions=to_device(positions),
            truncated=to_device(truncated),
            any_truncated=bool(truncated.any()),
            all_truncated=bool(truncated.all()),
            all_top_k=bool((top_k[truncated] > 0).all()),
            any_top_p=bool((top_p < np.inf).any()),
        )
