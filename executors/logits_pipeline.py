"""All logits processors of a worker, in their order; and where the user's own are found by name.

Owned by `executors.input_batch`, which sets rows; `executors.model_runner` applies it to each step's logits. Batches
without a feature pay nothing for it.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Sequence

import numpy as np
import torch

from executors.logits_processors import BatchView, LogitsProcessor, MinTokens
from executors.penalties import Penalties
from executors.token_limits import AllowedTokens, BadWords, LogitBias
from scheduler.output import NewRequestData

logger = logging.getLogger(__name__)


class LogitsPipeline:
    """All processors of a worker in their order: masks and biases, the user's own, penalties.

    When a processor of the user's own raises, the requests it was to process end, and no others: in `set_row` the one
    request, in `apply` all that use it in that step, since their logits may be half changed.
    """

    def __init__(self, batch: BatchView, custom: Sequence[type[LogitsProcessor]] = ()) -> None:
        kinds: list[type[LogitsProcessor]] = [AllowedTokens, BadWords, MinTokens, LogitBias, *custom, Penalties]
        self._processors = [kind(batch) for kind in kinds]
        # One column for each processor: the rows that use it.
        self._users = np.zeros((len(kinds), batch.max_num_seqs), dtype=np.bool_)
        self._is_used = np.zeros(batch.max_num_seqs, dtype=np.bool_)
        self._custom = tuple(custom)
        self._broken_rows: dict[int, str] = {}
        self._failures: dict[int, str] = {}

    def set_row(self, row: int, request: NewRequestData) -> None:
        """`request` now owns `row`."""
        self._broken_rows.pop(row, None)
        for users, processor in zip(self._users, self._processors, strict=True):
            try:
                users[row] = processor.set_row(row, request)
            except Exception as error:
                users[row] = False
                self._broken_rows[row] = self._failure_of(processor, error)
        self._is_used[row] = self._users[:, row].any() or row in self._broken_rows

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
                try:
                    processor.apply(logits, rows[indices], indices)
                except Exception as error:
                    text = self._failure_of(processor, error)
                    self._failures |= dict.fromkeys(indices.tolist(), text)
        if self._broken_rows:
            broken = {index: self._broken_rows.get(row) for index, row in enumerate(rows.tolist())}
            self._failures |= {index: text for index, text in broken.items() if text is not None}
        return logits

    def take_failures(self) -> dict[int, str]:
        """By index into the logits that `apply` got last, rows that the user's own processors failed on, and why."""
        failures, self._failures = self._failures, {}
        return failures

    def _failure_of(self, processor: LogitsProcessor, error: Exception) -> str:
        """The text for the request. What the engine's own processors raise is a bug, and goes on up."""
        if not isinstance(processor, self._custom):
            raise error
        name = f"{type(processor).__module__}.{type(processor).__qualname__}"
        logger.error("The logits processor %s failed; the requests it was to process end", name, exc_info=error)
        return f"the logits processor {name} failed: {type(error).__name__}: {error}"


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
