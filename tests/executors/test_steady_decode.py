"""A decode step carried on in place is the step that would have been made anew, for as long as it may be."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from executors.input_batch import InputBatch, InvalidStepError, StepInputs, StepRows, Wanted
from executors.steady_decode import SteadyDecode
from scheduler.output import SchedulerOutput
from tests.executors.test_input_batch import appends, make_batch, new, pack, step


class Twins:
    """Two persistent batches that get the same steps: one makes each anew, one carries steps on where it can."""

    def __init__(self, **sizes: Any) -> None:
        self.anew, self.carried = make_batch(**sizes), make_batch(**sizes)
        self.steady: SteadyDecode | None = None
        self.was_carried: list[bool] = []

    def run(self, output: SchedulerOutput, tokens: list[int]) -> None:
        """Both must have the same inputs, and know the same afterwards."""
        rows, inputs = self._begin(self.anew, output)
        is_carried = self.steady is not None and self.steady.continues(output)
        self.was_carried.append(is_carried)
        if not is_carried:
            new_rows, new_inputs = self._begin(self.carried, output)
            self.steady = None
            if SteadyDecode.can_carry_on(self.carried, output, new_rows):
                self.steady = SteadyDecode(self.carried, output, new_rows, new_inputs, Wanted.GREEDY)
        if self.steady is None:
            self.carried.advance(new_rows)
            self.carried.append_tokens(new_rows.rows[new_rows.samples], pack(tokens))
        else:
            assert_same(self.steady.inputs, inputs)
            assert_same(self.steady.rows, rows)
            self.steady.append(pack(tokens))
        self.anew.advance(rows)
        self.anew.append_tokens(rows.rows[rows.samples], pack(tokens))
        for name in ("token_ids", "num_tokens", "num_computed_tokens"):
            np.testing.assert_array_equal(getattr(self.carried, name), getattr(self.anew, name))

    @staticmethod
    def _begin(batch: InputBatch, output: SchedulerOutput) -> tuple[StepRows, StepInputs]:
        rows = batch.apply(output, append_known_tokens=False)
        return rows, batch.prepare(rows)


def assert_same(one: Any, other: Any) -> None:
    """Dataclasses of arrays, tensors and numbers, or such values."""
    if isinstance(one, list):
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)
    elif dataclasses.is_dataclass(one):
        for field in dataclasses.fields(one):
            assert_same(getattr(one, field.name), getattr(other, field.name))
    elif isinstance(one, (np.ndarray, torch.Tensor)):
        assert one.dtype == other.dtype
        assert one.tolist() == other.tolist()
    else:
        assert one == other


@pytest.mark.parametrize("rows", [[0, 1], [1, 4], [4, 1]])
def test_steps_are_carried_on_until_a_row_begins_a_block(rows: list[int]) -> None:
    twins = Twins(block_sizes=(8, 4))
    requests = [new(rows[0], [1, 2, 3], [4], [5]), new(rows[1], [5, 6, 7, 8], [9], [6])]
    twins.run(step(1, rows, [3, 4], new_requests=requests), [30, 80])
    blocks = [appends([], []), appends([rows[1]], [7])]
    twins.run(step(2, rows, new_blocks=blocks), [31, 81])  # the second row is at the start of a block of 4
    twins.run(step(3, rows, new_blocks=[appends([], []), appends([rows[0]], [8])]), [32, 82])
    twins.run(step(4, rows), [33, 83])
    twins.run(step(5, rows), [34, 84])
    twins.run(step(6, rows, new_blocks=[appends([rows[1]], [3]), appends([rows[1]], [2])]), [35, 85])
    assert twins.was_carried == [False, False, False, True, True, False]


def test_a_row_is_filled_to_its_last_place() -> None:
    twins = Twins(block_sizes=(16,), max_model_len=6)
    twins.run(step(1, [2], [3], new_requests=[new(2, [1, 2, 3], [4])]), [10])
    for number, token in ((2, 11), (3, 12), (4, 13)):
        twins.run(step(number, [2]), [token])
    assert twins.was_carried == [False, False, True, True]
    assert twins.carried.token_ids[2].tolist() == [1, 2, 3, 10, 11, 12]


def test_another_batch_is_not_carried_on() -> None:
    twins = Twins(block_sizes=(16,))
    requests = [new(0, [1, 2, 3], [4]), new(1, [5, 6], [9])]
    twins.run(step(1, [0, 1], [3, 2], new_requests=requests), [30, 80])
    twins.run(step(2, [0, 1]), [31, 81])
    twins.run(step(3, [1]), [82])
    twins.run(step(4, [1, 0]), [83, 32])
    twins.run(step(5, [1, 0], new_requests=[new(1, [7], [2])]), [40, 33])
    twins.run(step(6, [1, 0]), [41, 34])
    assert twins.was_carried == [False, False, False, False, False, True]


def test_steps_in_two_halves_and_unknown_steps_are_not_carried_on() -> None:
    twins = Twins(block_sizes=(16,))
    twins.run(step(1, [0], [3], new_requests=[new(0, [1, 2, 3], [4])]), [30])
    twins.run(step(2, [0]), [31])
    assert twins.steady is not None
    assert not twins.steady.continues(step(3, [0], has_structured_output=True))
    with pytest.raises(InvalidStepError, match="step 4 came after step 2"):
        twins.steady.continues(step(4, [0]))
