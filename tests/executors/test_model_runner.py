"""The model runner between a fake model and fake neighbours: what reaches the model, and what leaves the stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from executors.input_batch import InvalidStepError
from executors.model_runner import ModelRunner
from executors.parallel_state import ParallelState
from executors.step_compute import TorchCompute
from kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheGroup
from scheduler.config import SchedulerConfig
from scheduler.output import NewRequestData, SchedulerOutput, pack_int32, unpack_int32
from scheduler.sampling_params import SamplingParams

HIDDEN, VOCAB = 4, 50
CONFIG = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64)
SPEC = FullAttentionSpec(block_size=16, num_kv_heads=1, head_size=4, dtype_bytes=4)
KV = KVCacheConfig(8, (KVCacheGroup(("layer.0", "layer.1"), SPEC), KVCacheGroup((), SPEC)))


class FakeModel:
    """Hidden states hold each token's id; the next token is the last one plus 1."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []
        self.logits_for: list[list[int]] = []

    def forward(self, input_ids: Any, positions: Any, metadata: Any, hidden_states: Any = None) -> torch.Tensor:
        self.calls.append(
            {"ids": input_ids.tolist(), "positions": positions, "metadata": metadata, "received": hidden_states}
        )
        return input_ids.to(torch.float32).unsqueeze(-1).expand(-1, HIDDEN)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        tokens = hidden_states[:, 0].long()
        self.logits_for.append(tokens.tolist())
        return torch.nn.functional.one_hot(tokens + 1, VOCAB).float()


class FakeParallel(ParallelState):
    """One stage of a pipeline whose neighbours are lists."""

    def __init__(self, rank: int, pp_size: int) -> None:
        super().__init__(rank, 1, pp_size)
        self.sent: list[torch.Tensor] = []

    def send_hidden_states(self, tensor: torch.Tensor) -> None:
        self.sent.append(tensor)

    def recv_hidden_states(self, shape: tuple[int, ...], dtype: torch.dtype, device: Any = "cpu") -> torch.Tensor:
        return torch.full(shape, 7.0, dtype=dtype)


def make_runner(parallel: ParallelState) -> tuple[ModelRunner, FakeModel]:
    model = FakeModel()
    cpu = torch.device("cpu")
    compute = TorchCompute(model, parallel, hidden_size=HIDDEN, dtype=torch.float32, device=cpu)  # type: ignore[arg-type]
    runner = ModelRunner(compute, parallel, CONFIG, device=cpu)
    runner.set_kv_cache_config(KV)
    return runner, model


def new(row: int, tokens: list[int]) -> NewRequestData:
    return NewRequestData(
        row, f"r{row}", pack_int32(tokens), len(tokens), 0, [pack_int32([1 + row])] * 2, SamplingParams(temperature=0)
    )


def step(number: int, rows: list[int], counts: list[int] | None = None, **fields: Any) -> SchedulerOutput:
    return SchedulerOutput(number, pack_int32(rows), pack_int32(counts or []), **fields)


def test_logits_are_computed_for_sampling_rows_only_and_tokens_stay_for_the_next_step() -> None:
    runner, model = make_runner(ParallelState())
    output = runner.execute(step(1, [0, 1, 2], [2, 3, 1], new_requests=[new(0, [1, 2]), new(1, [3] * 5), new(2, [9])]))
    assert output is not None
    assert model.logits_for == [[2, 9]]
    assert list(unpack_int32(output.sampled_token_ids)) == [3, 10]
    output = runner.execute(step(2, [2, 0]))
    assert output is not None
    assert model.calls[1]["ids"] == [10, 3]
    assert list(unpack_int32(output.sampled_token_ids)) == [11, 4]
    metadata = model.calls[1]["metadata"]
    assert set(metadata) == {"layer.0", "layer.1"}
    assert metadata["layer.0"] is metadata["layer.1"]


def test_a_step_in_which_nothing_is_sampled_has_an_empty_output() -> None:
    runner, model = make_runner(ParallelState())
    output = runner.execute(step(1, [0], [2], new_requests=[new(0, [1, 2, 3])]))
    assert output is not None
    assert (output.step, output.sampled_token_ids) == (1, b"")
    assert model.logits_for == []


def test_stages_but_the_last_send_hidden_states_and_return_nothing() -> None:
    parallel = FakeParallel(0, 2)
    runner, model = make_runner(parallel)
    assert runner.execute(step(1, [0], [2], new_requests=[new(0, [1, 2])])) is None
    assert parallel.sent[0].tolist() == [[1.0] * HIDDEN, [2.0] * HIDDEN]
    assert runner.execute(step(2, [0], known_rows=pack_int32([0]), known_tokens=pack_int32([5]))) is None
    assert model.calls[1]["ids"] == [5]
    assert model.calls[1]["received"] is None
    assert runner.sample(None) is None


def test_stages_but_the_first_compute_on_what_they_receive() -> None:
    parallel = FakeParallel(1, 2)
    runner, model = make_runner(parallel)
    assert runner.execute(step(1, [0], [2], new_requests=[new(0, [1, 2])])) is not None
    assert model.calls[0]["received"].tolist() == [[7.0] * HIDDEN] * 2
    assert parallel.sent == []


def test_with_structured_output_nothing_may_come_between_the_two_calls() -> None:
    runner, _ = make_runner(ParallelState())
    assert runner.execute(step(1, [0], [2], new_requests=[new(0, [1, 2])], has_structured_output=True)) is None
    with pytest.raises(InvalidStepError, match="step 2 came while step 1 waits for its bitmask"):
        runner.execute(step(2, [0]))
    output = runner.sample(None)
    assert output is not None
    assert list(unpack_int32(output.sampled_token_ids)) == [3]
    with pytest.raises(InvalidStepError, match="no step waits for it"):
        runner.sample(None)


def test_a_dummy_run_touches_the_null_block_only_and_leaves_the_batch_alone() -> None:
    runner, model = make_runner(ParallelState())
    runner.dummy_run(40, 3)
    metadata = model.calls[0]["metadata"]["layer.0"]
    assert metadata.query_start_loc.tolist() == [0, 14, 27, 40]
    assert metadata.slot_mapping.max() < SPEC.block_size
    assert not metadata.block_table.any()
    assert runner.execute(step(1, [0], [1], new_requests=[new(0, [1])])) is not None


def test_a_dummy_run_over_a_budget_longer_than_a_sequence_stays_within_the_positions_there_are() -> None:
    runner, model = make_runner(ParallelState())
    runner.dummy_run(CONFIG.max_model_len + 5, 1)
    assert int(model.calls[0]["positions"].max()) == CONFIG.max_model_len - 1
