"""The persistent batch: what a worker knows about every running request, by row.

The scheduler sends deltas (`scheduler/output.py`); the model runner, the only caller, applies a step's deltas, asks for
the step's tensors, and records what was computed and sampled. Everything is by numpy column, so a decode step costs the
same few array operations for any number of requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np
import torch

from executors.attention.base import AttentionMetadata
from executors.logits_pipeline import LogitsPipeline
from executors.logits_processors import BatchView, LogitsProcessor
from executors.logprobs import NOT_ASKED, LogprobsState
from executors.sampling_state import SamplingState
from scheduler.output import BlockAppends, NewRequestData, SchedulerOutput


class Wanted(Enum):
    """What is read of a step on a stage that samples; each includes what stands before it."""

    GREEDY = "greedy tokens"
    LOGITS = "logits of the rows that sample"
    ANY_ROW = "logits of any row"


_WANTED = tuple(Wanted)


class InvalidStepError(ValueError):
    """A SchedulerOutput that does not fit what this worker knows: steps were lost, or scheduler and worker disagree."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one step in batch order.

    Attributes:
        rows: int64 [num_reqs].
        num_scheduled: int64 [num_reqs], tokens to compute.
        num_computed: int64 [num_reqs], tokens computed before.
        samples: bool [num_reqs], the step computes the row's last known token, so a new one is drawn.
    """

    rows: np.ndarray
    num_scheduled: np.ndarray
    num_computed: np.ndarray
    samples: np.ndarray


@dataclass(frozen=True, slots=True)
class StepInputs:
    """What the forward pass of one step takes, on the device.

    Attributes:
        input_ids, positions: int64 [num_tokens].
        metadata: One per KV group.
        sample_indices: int64 [num_sampling], the flattened index of each sampling row's last token.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    metadata: list[AttentionMetadata]
    sample_indices: torch.Tensor


class BlockTable:
    """Block ids of every row in one KV group. [max_num_seqs, max_blocks]."""

    def __init__(self, max_num_seqs: int, max_model_len: int, block_size: int) -> None:
        self.block_size = block_size
        self.ids = np.zeros((max_num_seqs, -(-max_model_len // block_size)), dtype=np.int32)
        self.num_blocks = np.zeros(max_num_seqs, dtype=np.int64)

    def set_row(self, row: int, block_ids: np.ndarray) -> None:
        if len(block_ids) > self.ids.shape[1]:
            raise InvalidStepError(f"row {row}: {len(block_ids)} blocks, a table holds {self.ids.shape[1]}")
        self.ids[row, : len(block_ids)] = block_ids
        self.num_blocks[row] = len(block_ids)

    def append(self, rows: np.ndarray, block_ids: np.ndarray) -> None:
        """Append `block_ids[i]` to row `rows[i]`; a row may occur several times."""
        if len(rows) != len(block_ids):
            raise InvalidStepError(f"new_blocks: {len(rows)} rows but {len(block_ids)} block ids")
        order = np.argsort(rows, kind="stable")
        rows, block_ids = rows[order], block_ids[order]
        # Offset of each entry among those of its row: its index minus that of the row's first entry.
        first = np.searchsorted(rows, rows, side="left")
        columns = self.num_blocks[rows] + np.arange(len(rows)) - first
        if len(columns) and int(columns.max()) >= self.ids.shape[1]:
            raise InvalidStepError(
                f"row {rows[columns.argmax()]}: block {columns.max()} appended, a table holds {self.ids.shape[1]}"
            )
        self.ids[rows, columns] = block_ids
        np.add.at(self.num_blocks, rows, 1)


class InputBatch:
    """State by row. Rows are numbered below `max_num_seqs`; one that no request was sent for is unknown.

    Attributes:
        num_tokens: int64 [max_num_seqs], known tokens (prompt + generated); 0 marks an unknown row.
        num_prompt_tokens, num_computed_tokens: int64 [max_num_seqs].
        request_ids: Of the request that owns, or last owned, each row.
        sampling: Sampling parameters of the rows.
        logits: What changes the rows' logits before the draw.
        logprobs: Which log-probabilities the rows want.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_model_len: int,
        block_sizes: Sequence[int],
        device: torch.device,
        logits_processors: Sequence[type[LogitsProcessor]] = (),
        *,
        needs_prompt_lens: bool = True,
    ) -> None:
        """
        Args:
            block_sizes: Tokens per block of each KV group.
            logits_processors: The user's own.
            needs_prompt_lens: Some layer reads `AttentionMetadata.prompt_lens`.
        """
        self.max_num_seqs = max_num_seqs
        self.max_model_len = max_model_len
        self.device = device
        self._needs_prompt_lens = needs_prompt_lens
        # Zero pages cost nothing until they are written, so the array's nominal size does not matter.
        self.token_ids = np.zeros((max_num_seqs, max_model_len), dtype=np.int32)
        self.num_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_prompt_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_computed_tokens = np.zeros(max_num_seqs, dtype=np.int64)
        self.request_ids = [""] * max_num_seqs
        self.block_tables = [BlockTable(max_num_seqs, max_model_len, size) for size in block_sizes]
        self.sampling = SamplingState(max_num_seqs)
        self.logprobs = LogprobsState(max_num_seqs)
        self.logits = LogitsPipeline(
            BatchView(self.token_ids, self.num_tokens, self.num_prompt_tokens), logits_processors
        )
        self._wanted = np.zeros(max_num_seqs, dtype=np.int8)
        self._last_step = 0

    def apply(self, output: SchedulerOutput, *, append_known_tokens: bool) -> StepRows:
        """Take in a step's deltas: new requests, then known tokens, then appended blocks.

        Args:
            append_known_tokens: False on workers that sample: they know the tokens already.

        Raises:
            InvalidStepError: A step is missing, or a row, token or block is needed that this worker does not know.
        """
        self.accept_step(output.step)
        for request in output.new_requests:
            self._set_row(request)
        if append_known_tokens and output.known_rows:
            self.append_tokens(self._known_rows(output.known_rows), _int32_column(output.known_tokens))
        if output.new_blocks:
            self._append_blocks(output.new_blocks)
        return self._step_rows(output)

    def accept_step(self, step: int) -> None:
        """
        Raises:
            InvalidStepError: It does not follow the step before.
        """
        if step != self._last_step + 1:
            raise InvalidStepError(f"step {step} came after step {self._last_step}")
        self._last_step = step

    def prepare(self, step: StepRows) -> StepInputs:
        """The tensors of a step that `apply` returned."""
        rows, num_computed, counts = step.rows, step.num_computed, step.num_scheduled
        num_reqs = len(rows)
        seq_lens = num_computed + counts
        query_start_loc = np.zeros(num_reqs + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start_loc[1:])
        num_tokens = int(query_start_loc[-1])
        if num_tokens == num_reqs:
            token_rows, positions = rows, num_computed
        else:
            token_rows = np.repeat(rows, counts)
            positions = np.arange(num_tokens) + np.repeat(num_computed - query_start_loc[:-1], counts)
        query_start_loc_t, seq_lens_t = self._to_device(query_start_loc), self._to_device(seq_lens.astype(np.int32))
        prompt_lens_t = None
        if self._needs_prompt_lens:
            prompt_lens_t = self._to_device(self.num_prompt_tokens[rows].astype(np.int32))
        max_query_len, max_seq_len = int(counts.max()), int(seq_lens.max())
        metadata = [
            AttentionMetadata(
                num_reqs=num_reqs,
                num_tokens=num_tokens,
                max_query_len=max_query_len,
                max_seq_len=max_seq_len,
                query_start_loc=query_start_loc_t,
                seq_lens=seq_lens_t,
                block_table=self._to_device(table.ids[rows, : -(-max_seq_len // table.block_size)]),
                slot_mapping=self._to_device(_slots(table, token_rows, positions)),
                block_size=table.block_size,
                prompt_lens=prompt_lens_t,
            )
            for table in self.block_tables
        ]
        return StepInputs(
            input_ids=self._to_device(self.token_ids[token_rows, positions].astype(np.int64)),
            positions=self._to_device(positions),
            metadata=metadata,
            sample_indices=self._to_device(query_start_loc[1:][step.samples].astype(np.int64) - 1),
        )

    def wanted(self, step: StepRows) -> Wanted:
        """What must be read of the step, as its rows' parameters have it."""
        return _WANTED[int(self._wanted[step.rows].max())]

    def advance(self, step: StepRows) -> None:
        """The step's tokens are computed."""
        self.num_computed_tokens[step.rows] += step.num_scheduled

    def append_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> None:
        """Append one token to each of `rows` (int64 [n], each once)."""
        if len(rows) != len(token_ids):
            raise InvalidStepError(f"{len(rows)} rows but {len(token_ids)} tokens to append")
        columns = self.num_tokens[rows]
        # A request's last token has no place where its length ends exactly at the limit, and is never computed.
        fits = columns < self.max_model_len
        self.token_ids[rows[fits], columns[fits]] = token_ids[fits]
        self.num_tokens[rows] += 1

    def _set_row(self, request: NewRequestData) -> None:
        row, token_ids = request.row, _int32_column(request.token_ids)
        name = f"request {request.request_id} in row {row}"
        if not 0 <= row < self.max_num_seqs:
            raise InvalidStepError(f"{name}: rows are 0 to {self.max_num_seqs - 1}")
        if not 1 <= len(token_ids) <= self.max_model_len:
            raise InvalidStepError(f"{name}: {len(token_ids)} tokens; allowed are 1 to {self.max_model_len}")
        if not 0 <= request.num_computed_tokens < len(token_ids):
            raise InvalidStepError(f"{name}: {request.num_computed_tokens} of {len(token_ids)} tokens are computed")
        if len(request.block_ids) != len(self.block_tables):
            raise InvalidStepError(
                f"{name}: blocks of {len(request.block_ids)} KV groups, this worker has {len(self.block_tables)}"
            )
        self.token_ids[row, : len(token_ids)] = token_ids
        self.num_tokens[row] = len(token_ids)
        self.request_ids[row] = request.request_id
        self.num_prompt_tokens[row] = request.num_prompt_tokens
        self.num_computed_tokens[row] = request.num_computed_tokens
        for table, block_ids in zip(self.block_tables, request.block_ids, strict=True):
            table.set_row(row, _int32_column(block_ids))
        self.sampling.set_row(row, request)
        self.logits.set_row(row, request)
        self.logprobs.set_row(row, request)
        self._wanted[row] = self._wanted_of(row)

    def _wanted_of(self, row: int) -> int:
        if self.logprobs.num_prompt_logprobs[row] != NOT_ASKED:
            return _WANTED.index(Wanted.ANY_ROW)
        rows = np.array([row])
        plain = (
            self.sampling.is_greedy(rows)
            and not self.logits.is_used(rows)
            and self.logprobs.num_logprobs[row] == NOT_ASKED
        )
        return _WANTED.index(Wanted.GREEDY if plain else Wanted.LOGITS)

    def _append_blocks(self, new_blocks: list[BlockAppends]) -> None:
        if len(new_blocks) != len(self.block_tables):
            raise InvalidStepError(
                f"new_blocks of {len(new_blocks)} KV groups, this worker has {len(self.block_tables)}"
            )
        for table, appends in zip(self.block_tables, new_blocks, strict=True):
            if appends.rows:
                table.append(self._known_rows(appends.rows), _int32_column(appends.block_ids))

    def _step_rows(self, output: SchedulerOutput) -> StepRows:
        rows = self._known_rows(output.rows)
        if not len(rows):
            raise InvalidStepError(f"step {output.step} has no rows")
        if output.num_scheduled_tokens:
            counts = _int32_column(output.num_scheduled_tokens).astype(np.int64)
            if len(counts) != len(rows) or counts.min() < 1:
                raise InvalidStepError(f"num_scheduled_tokens must hold {len(rows)} positive numbers, got {counts}")
        else:
            counts = np.ones(len(rows), dtype=np.int64)
        num_computed = self.num_computed_tokens[rows]
        num_tokens, ends = self.num_tokens[rows], num_computed + counts
        if (ends > num_tokens).any():
            at = int((ends > num_tokens).argmax())
            raise InvalidStepError(
                f"row {rows[at]}: tokens up to {ends[at]} are scheduled, but only {num_tokens[at]} are known"
            )
        for group, table in enumerate(self.block_tables):
            capacity = table.num_blocks[rows] * table.block_size
            if (ends > capacity).any():
                at = int((ends > capacity).argmax())
                raise InvalidStepError(
                    f"row {rows[at]}: tokens up to {ends[at]} are scheduled, but its {table.num_blocks[rows[at]]} "
                    f"blocks in KV group {group} hold {capacity[at]}"
                )
        return StepRows(rows, counts, num_computed, ends == num_tokens)

    def _known_rows(self, column: bytes) -> np.ndarray:
        rows = _int32_column(column).astype(np.int64)
        if len(rows) and (rows.min() < 0 or rows.max() >= self.max_num_seqs or not self.num_tokens[rows].all()):
            unknown = [row for row in rows.tolist() if not 0 <= row < self.max_num_seqs or not self.num_tokens[row]]
            raise InvalidStepError(f"rows {unknown} are unknown: no request was sent for them")
        return rows

    def _to_device(self, array: np.ndarray) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)


def _int32_column(data: bytes) -> np.ndarray:
    return np.frombuffer(data, dtype="<i4")


def _slots(table: BlockTable, token_rows: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Cache slot of each token: block id × block_size + offset. int64 [num_tokens]."""
    block_index, offset = np.divmod(positions, table.block_size)
    return table.ids[token_rows, block_index].astype(np.int64) * table.block_size + offset
