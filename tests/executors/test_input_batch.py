"""The persistent batch applies deltas in their order, prepares exact inputs, and refuses what it does not know."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from executors.input_batch import InputBatch, InvalidStepError
from scheduler.output import BlockAppends, NewRequestData, SchedulerOutput, pack_int32
from scheduler.sampling_params import SamplingParams

GREEDY = SamplingParams(temperature=0)


def make_batch(block_sizes: tuple[int, ...] = (4,), max_num_seqs: int = 8, max_model_len: int = 32) -> InputBatch:
    return InputBatch(max_num_seqs, max_model_len, block_sizes, torch.device("cpu"))


def new(
    row: int, tokens: list[int], *blocks: list[int], computed: int = 0, prompt: int | None = None
) -> NewRequestData:
    return NewRequestData(
        row, f"r{row}", pack_int32(tokens), prompt or len(tokens), computed, [pack_int32(b) for b in blocks], GREEDY
    )


def step(number: int, rows: list[int], counts: list[int] | None = None, **fields: Any) -> SchedulerOutput:
    for name in ("known_rows", "known_tokens"):
        if name in fields:
            fields[name] = pack_int32(fields[name])
    return SchedulerOutput(number, pack_int32(rows), pack_int32(counts or []), **fields)


def appends(rows: list[int], blocks: list[int]) -> BlockAppends:
    return BlockAppends(pack_int32(rows), pack_int32(blocks))


def pack(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


def run(batch: InputBatch, output: SchedulerOutput, append_known_tokens: bool = False) -> Any:
    rows = batch.apply(output, append_known_tokens=append_known_tokens)
    inputs = batch.prepare(rows)
    batch.advance(rows)
    return rows, inputs


def test_a_mixed_step_is_flattened_in_batch_order() -> None:
    batch = make_batch()
    requests = [new(3, [10, 11, 12, 13, 14, 15], [7, 2], computed=0), new(1, [20, 21, 22], [5], computed=1)]
    rows, inputs = run(batch, step(1, [1, 3], [2, 5], new_requests=requests))
    assert inputs.input_ids.tolist() == [21, 22, 10, 11, 12, 13, 14]
    assert inputs.input_ids.dtype == inputs.positions.dtype == torch.int64
    assert inputs.positions.tolist() == [1, 2, 0, 1, 2, 3, 4]
    (metadata,) = inputs.metadata
    assert metadata.query_start_loc.tolist() == [0, 2, 7]
    assert metadata.seq_lens.tolist() == [3, 5]
    assert metadata.block_table.tolist() == [[5, 0], [7, 2]]
    assert metadata.slot_mapping.tolist() == [21, 22, 28, 29, 30, 31, 8]
    assert metadata.prompt_lens is not None
    assert metadata.prompt_lens.tolist() == [3, 6]
    assert (metadata.num_reqs, metadata.num_tokens, metadata.max_query_len, metadata.max_seq_len) == (2, 7, 5, 5)
    assert {t.dtype for t in (metadata.query_start_loc, metadata.seq_lens, metadata.block_table)} == {torch.int32}
    assert metadata.slot_mapping.dtype == torch.int64
    # Row 1 is computed to its end and samples, row 3 has a token left.
    assert rows.samples.tolist() == [True, False]
    assert inputs.sample_indices.tolist() == [1]
    assert batch.num_computed_tokens[[1, 3]].tolist() == [3, 5]


def test_decode_steps_carry_only_rows_and_appended_blocks() -> None:
    batch = make_batch()
    rows, _ = run(batch, step(1, [0, 2], [3, 4], new_requests=[new(0, [1, 2, 3], [4]), new(2, [5, 6, 7, 8], [9])]))
    batch.append_tokens(rows.rows, pack([30, 80]))
    rows, inputs = run(batch, step(2, [2, 0], new_blocks=[appends([2], [6])]))
    assert inputs.input_ids.tolist() == [80, 30]
    assert inputs.positions.tolist() == [4, 3]
    assert inputs.metadata[0].slot_mapping.tolist() == [24, 19]
    assert inputs.metadata[0].block_table.tolist() == [[9, 6], [4, 0]]
    assert inputs.metadata[0].max_query_len == 1
    assert rows.samples.tolist() == [True, True]


def test_each_kv_group_has_its_own_table_and_block_size() -> None:
    batch = make_batch(block_sizes=(4, 2))
    _, inputs = run(batch, step(1, [0], [3], new_requests=[new(0, [1, 2, 3], [5], [8, 3])]))
    assert [m.slot_mapping.tolist() for m in inputs.metadata] == [[20, 21, 22], [16, 17, 6]]
    assert [m.block_table.tolist() for m in inputs.metadata] == [[[5]], [[8, 3]]]
    batch.append_tokens(np.array([0]), pack([4]))
    _, inputs = run(batch, step(2, [0], new_blocks=[appends([], []), appends([], [])]))
    assert [m.slot_mapping.tolist() for m in inputs.metadata] == [[23], [7]]


def test_several_blocks_for_one_row_are_appended_in_their_order() -> None:
    batch = make_batch()
    requests = [new(0, list(range(12)), [1]), new(5, list(range(9)), [2])]
    output = step(1, [0, 5], [12, 9], new_requests=requests, new_blocks=[appends([5, 0, 5, 0], [11, 12, 13, 14])])
    _, inputs = run(batch, output)
    assert inputs.metadata[0].block_table.tolist() == [[1, 12, 14], [2, 11, 13]]


def test_a_new_request_replaces_what_was_in_its_row() -> None:
    batch = make_batch()
    run(batch, step(1, [0], [9], new_requests=[new(0, list(range(9)), [1, 2, 3])]))
    rows, inputs = run(batch, step(2, [0], [2], new_requests=[new(0, [40, 41, 42], [4], computed=1, prompt=2)]))
    assert inputs.input_ids.tolist() == [41, 42]
    assert inputs.metadata[0].block_table.tolist() == [[4]]
    assert batch.num_prompt_tokens[0] == 2
    assert rows.samples.tolist() == [True]


def test_stages_that_do_not_sample_learn_tokens_after_new_requests_and_before_the_step() -> None:
    batch = make_batch()
    run(batch, step(1, [0], [2], new_requests=[new(0, [1, 2], [4])]), append_known_tokens=True)
    output = step(2, [0, 1], new_requests=[new(1, [6], [5])], known_rows=[0, 1], known_tokens=[3, 7])
    rows, inputs = run(batch, output, append_known_tokens=True)
    assert inputs.input_ids.tolist() == [3, 6]
    assert batch.num_tokens[:2].tolist() == [3, 2]
    assert rows.samples.tolist() == [True, False]


def test_stages_that_sample_ignore_known_tokens() -> None:
    batch = make_batch()
    rows, _ = run(batch, step(1, [0], [2], new_requests=[new(0, [1, 2], [4])]))
    batch.append_tokens(rows.rows, pack([3]))
    _, inputs = run(batch, step(2, [0], known_rows=[0], known_tokens=[3]))
    assert inputs.input_ids.tolist() == [3]
    assert batch.num_tokens[0] == 3


def test_a_sampled_token_beyond_the_length_limit_is_counted_but_has_no_place() -> None:
    batch = make_batch(max_model_len=4)
    rows, _ = run(batch, step(1, [0], [4], new_requests=[new(0, [1, 2, 3, 4], [1])]))
    batch.append_tokens(rows.rows, pack([9]))
    assert batch.num_tokens[0] == 5
    assert batch.token_ids[0].tolist() == [1, 2, 3, 4]


PROBLEMS: list[tuple[SchedulerOutput, str]] = [
    (step(3, [0]), "step 3 came after step 1"),
    (step(1, [0]), "step 1 came after step 1"),
    (step(2, [0, 5]), "rows [5] are unknown: no request was sent for them"),
    (step(2, [-1, 99]), "rows [-1, 99] are unknown"),
    (step(2, []), "step 2 has no rows"),
    (step(2, [0], [3]), "row 0: tokens up to 5 are scheduled, but only 3 are known"),
    (step(2, [0], [0]), "num_scheduled_tokens must hold 1 positive numbers"),
    (step(2, [0], [1, 1]), "num_scheduled_tokens must hold 1 positive numbers"),
    (
        step(2, [1], [5], new_requests=[new(1, [1, 2, 3, 4, 5], [2])]),
        "row 1: tokens up to 5 are scheduled, but its 1 blocks in KV group 0 hold 4",
    ),
    (step(2, [0], new_blocks=[appends([3], [1])]), "rows [3] are unknown"),
    (step(2, [0], new_blocks=[appends([0], [1, 2])]), "new_blocks: 1 rows but 2 block ids"),
    (step(2, [0], new_blocks=[appends([], [])] * 2), "new_blocks of 2 KV groups, this worker has 1"),
    (step(2, [0], new_blocks=[appends([0] * 8, [1] * 8)]), "row 0: block 8 appended, a table holds 8"),
    (step(2, [0], new_requests=[new(8, [1], [1])]), "request r8 in row 8: rows are 0 to 7"),
    (step(2, [0], new_requests=[new(1, [], [1])]), "request r1 in row 1: 0 tokens; allowed are 1 to 32"),
    (step(2, [0], new_requests=[new(1, [1] * 33, [1])]), "request r1 in row 1: 33 tokens; allowed are 1 to 32"),
    (step(2, [0], new_requests=[new(1, [1], [1], computed=1)]), "request r1 in row 1: 1 of 1 tokens are computed"),
    (
        step(2, [0], new_requests=[new(1, [1], [1], [1])]),
        "request r1 in row 1: blocks of 2 KV groups, this worker has 1",
    ),
    (step(2, [0], new_requests=[new(1, [1], [1] * 9)]), "row 1: 9 blocks, a table holds 8"),
]


@pytest.mark.parametrize(("output", "message"), PROBLEMS, ids=[message for _, message in PROBLEMS])
def test_a_step_that_does_not_fit_is_refused_with_what_is_wrong(output: SchedulerOutput, message: str) -> None:
    batch = make_batch()
    rows, _ = run(batch, step(1, [0], [2], new_requests=[new(0, [1, 2], [4])]))
    batch.append_tokens(rows.rows, pack([3]))
    with pytest.raises(InvalidStepError, match=re.escape(message)):
        batch.apply(output, append_known_tokens=False)
