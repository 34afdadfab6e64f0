"""All logits processors of a worker, in their order; and where the user's own are found by name.

Owned by `executors.input_batch`, which sets rows; `executors.model_runner` applies it to each step's logits. Batches
without a feature pay nothing for it.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence

import numpy as np
import torch

from executors.logits_processors import BatchView, LogitsProcessor, MinTokens
from executors.penalties import Penalties
from executors.token_limits import AllowedTokens, BadWords, LogitBias
from scheduler.output import NewRequestData


class LogitsPipeline:
    """All processors of a worker in their order: masks and biases, the user's own, penalties."""

    def __init__(self, batch: BatchView, custom: Sequence[type[LogitsProcessor]] = ()) -> None:
        kinds: list[type[LogitsProcessor]] = [AllowedTokens, BadWords, MinTokens, LogitBias, *custom, Penalties]
        self._processors = [kind(batch) for kind in kinds]
        # One column for each processor: the rows that use it.
        self._users = np.zeros((len(kinds), batch.max_num_seqs), dtype=np.bool_)
        self._is_used = np.zeros(batch.max_num_seqs, dtype=np.bool_)

    def set_row(self, row: int, request: NewRequestData) -> None:
        """`request` now owns `row`."""
        for users, processor in zip(self._users, self._processors, strict=True):
            users[row] = processor.set_row(row, request)
        self._is_used[row] = self._users[:, row].any()

    def is_used(self, rows: np.ndarray) -> bool:
        """Whether `apply` would change logits of these rows."""
        return bool(self._is_used[rows].any())

    def apply(self, logits: torch.Tensor, rows: np.ndarray) -> torch.Tensor:
        """Process the logits of sampling rows.

        Args:
            logits: [n, vocab_size], any float type; changed in place if it is float32.
            rows: int64 [n], their persistent-batch rows.

        Returns:
            float32 [n, vocab_size]; `logits` itself if no row uses a processor.
        """
        if not self.is_used(rows):
            return logits
        logits = logits.to(torch.float32)
        for users, processor in zip(self._users[:, rows], self._processors, strict=True):
            indices = users.nonzero()[0]
            if len(indices):
                processor.apply(logits, rows[indices], indices)
        return logits


def load_logits_processor(name: str) -> type[LogitsProcessor]:
    """The class of a qualified name, "package.module.Class" or "package.module:Class".

    Raises:
        ValueError: There is none, or it is not a LogitsProcessor.
    """
    module_name, separator, class_name = name.rpartition(":" if ":" in name else ".")
    if not separator or not module_name or not class_name:
        raise ValueError(f"logits_processors must hold qualified names like 'package.module.Class', got {name!r}")
    try:
        found = getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"logits_processors names {name!r}, which cannot be imported: {error}") from error
    if not (isinstance(found, type) and issubclass(found, LogitsProcessor)):
        raise ValueError(f"logits_processors names {name!r}, which is not a subclass of LogitsProcessor")
    return found
