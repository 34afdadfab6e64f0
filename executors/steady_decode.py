"""A decode step carried on to the next one, for `executors.model_runner`.

A step between two of the same batch differs from the one before by one token in each row. Its tensors are then moved on
in place, in a few array operations, instead of being built anew: after a pass over the weights has emptied the caches
every operation on a small array costs microseconds, and a step of one request is short.
"""

from __future__ import annotations

import numpy as np
import torch

from executors.input_batch import InputBatch, StepInputs, StepRows, Wanted
from scheduler.output import SchedulerOutput


class SteadyDecode:
    """The step's rows and tensors, valid until the batch changes or a row begins another block.

    Attributes:
        rows, inputs, wanted: Of the step that comes next.
    """

    def __init__(self, batch: InputBatch, output: SchedulerOutput, rows: StepRows, inputs: StepInputs, wanted: Wanted):
        """Before the step's tokens are known; `append` comes next.

        Args:
            output: Of the step that `rows` and `inputs` were made for; `can_carry_on` holds. `inputs` is taken over.
        """
        self._batch = batch
        self._row_column = output.rows
        self.wanted = wanted
        num_rows = len(rows.rows)
        # One array, so that one operation moves all of it on: positions, slots by KV group, places of the next tokens.
        self._columns = np.empty((2 + len(inputs.metadata), num_rows), dtype=np.int64)
        self._columns[0] = rows.num_computed
        for group, metadata in enumerate(inputs.metadata):
            self._columns[1 + group] = metadata.slot_mapping.numpy()
        self._columns[-1] = rows.rows * batch.max_model_len + batch.num_tokens[rows.rows]
        self._next_places = self._columns[-1]
        self._token_ids = batch.token_ids.reshape(-1)
        self._input_ids = inputs.input_ids.numpy()
        self._seq_lens = inputs.metadata[0].seq_lens.numpy()
        first, last = int(rows.rows[0]), int(rows.rows[-1])
        is_run = last - first == num_rows - 1 and bool((np.diff(rows.rows) == 1).all())
        self._selected = slice(first, last + 1) if is_run else rows.rows
        self.rows = StepRows(rows.rows, rows.num_scheduled, self._columns[0], rows.samples)
        self.inputs = StepInputs(
            inputs.input_ids, torch.from_numpy(self._columns[0]), inputs.metadata, inputs.sample_indices
        )
        for group, metadata in enumerate(inputs.metadata):
            metadata.slot_mapping = torch.from_numpy(self._columns[1 + group])
        # Positions end at max_model_len - 1.
        steps = [batch.max_model_len - 1 - int(rows.num_computed.max())]
        steps += [
            table.block_size - 1 - int((rows.num_computed % table.block_size).max()) for table in batch.block_tables
        ]
        self._steps_left = min(steps)

    @staticmethod
    def can_carry_on(batch: InputBatch, output: SchedulerOutput, rows: StepRows) -> bool:
        """Every row computes one token and draws the next one in the same call; tensors share memory with arrays."""
        if output.num_scheduled_tokens or output.has_structured_output or batch.device.type != "cpu":
            return False
        return bool(rows.samples.all())

    def continues(self, output: SchedulerOutput) -> bool:
        """Whether `output` is the step that this object is ready for. Takes note of it if so."""
        is_next = (
            self._steps_left > 0
            and output.rows == self._row_column
            and not (output.num_scheduled_tokens or output.new_requests or output.new_blocks)
            and not output.has_structured_output
        )
        if is_next:
            self._batch.accept_step(output.step)
            self._steps_left -= 1
        return is_next

    def append(self, token_ids: np.ndarray) -> None:
        """The step is computed and drew these tokens, int [num_rows]: get ready for the next one."""
        batch, selected = self._batch, self._selected
        batch.num_computed_tokens[selected] += 1
        if self._steps_left == 0:  # the next token may have no place
            batch.append_tokens(self.rows.rows, token_ids)
            return
        self._token_ids[self._next_places] = token_ids
        batch.num_tokens[selected] += 1
        self._input_ids[:] = token_ids
        self._columns += 1
        self._seq_lens += 1
        for metadata in self.inputs.metadata:
            metadata.max_seq_len += 1
            metadata.plans.clear()
