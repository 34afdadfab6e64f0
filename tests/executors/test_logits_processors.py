"""Each processor gives the logits of transformers' own, row by row, through tokens, preemption and mixed batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import NoBadWordsLogitsProcessor, RepetitionPenaltyLogitsProcessor, SequenceBiasLogitsProcessor

from executors.input_batch import InputBatch
from executors.logits_pipeline import load_logits_processor
from executors.logits_processors import LogitsProcessor
from scheduler.output import NewRequestData, pack_int32
from scheduler.sampling_params import SamplingParams

VOCAB_SIZE = 30
MAX_SEQS = 20


class OnlyMultiples(LogitsProcessor):
    """A user's: masks all but the multiples of extra_args["multiple"]."""

    def __init__(self, batch: Any) -> None:
        super().__init__(batch)
        self.multiples = np.zeros(batch.max_num_seqs, dtype=np.int64)

    def set_row(self, row: int, request: NewRequestData) -> bool:
        self.multiples[row] = (request.sampling_params.extra_args or {}).get("multiple", 0)
        return bool(self.multiples[row])

    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
        tokens = np.arange(logits.shape[1])
        masked = tokens % self.multiples[rows][:, None] != 0
        logits[torch.from_numpy(indices)] = logits[torch.from_numpy(indices)].masked_fill(
            torch.from_numpy(masked), float("-inf")
        )


class Harness:
    """A persistent batch and the logits of its rows."""

    def __init__(self, *custom: type[LogitsProcessor]) -> None:
        self.batch = InputBatch(MAX_SEQS, 64, [4], torch.device("cpu"), custom)
        self.step = 0

    def enter(self, row: int, tokens: list[int], num_prompt: int, params: SamplingParams, stop_ids: Any = ()) -> None:
        data = NewRequestData(
            row, f"r{row}", pack_int32(tokens), num_prompt, 0, [b""], params.clone(seed=0), list(stop_ids)
        )
        self.batch._set_row(data)

    def sample(self, row: int, token: int) -> None:
        self.batch.append_tokens(np.array([row]), np.array([token], dtype=np.int32))

    def apply(self, logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
        return self.batch.logits.apply(logits.clone(), np.array(rows))

    def tokens(self, row: int) -> list[int]:
        return self.batch.token_ids[row, : self.batch.num_tokens[row]].tolist()


def some_logits(num_rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 3


def reference(logits: torch.Tensor, tokens: list[int], num_prompt: int, params: SamplingParams) -> torch.Tensor:
    """transformers' processors, and OpenAI's definition of the other penalties. logits [vocab] → [vocab]."""
    scores, ids = logits[None].float().clone(), torch.tensor([tokens])
    if params.allowed_token_ids is not None:
        mask = torch.ones(VOCAB_SIZE, dtype=torch.bool)
        mask[params.allowed_token_ids] = False
        scores[:, mask] = float("-inf")
    if params.bad_words_token_ids:
        scores = NoBadWordsLogitsProcessor(params.bad_words_token_ids)(ids, scores)
    if params.logit_bias:
        scores = SequenceBiasLogitsProcessor({(token,): float(b) for token, b in params.logit_bias.items()})(
            ids, scores
        )
    if params.repetition_penalty != 1.0:
        scores = RepetitionPenaltyLogitsProcessor(params.repetition_penalty)(ids, scores)
    counts = torch.bincount(torch.tensor(tokens[num_prompt:], dtype=torch.int64), minlength=VOCAB_SIZE)
    return (scores - params.frequency_penalty * counts - params.presence_penalty * (counts > 0))[0]


CASES: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.8},
    {"repetition_penalty": 1.2, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    {"logit_bias": {3: 5.0, 29: -100.0, 0: 0.5}},
    {"allowed_token_ids": [1, 5, 9, 9, 28]},
    {"bad_words_token_ids": [[4], [5, 6], [7, 8, 9], [4, 4, 4, 4, 4], [6, 6]]},
    {"repetition_penalty": 1.2, "logit_bias": {3: 5.0}, "bad_words_token_ids": [[3], [5, 6]], "frequency_penalty": 0.5},
    {},
]


@pytest.mark.parametrize("is_sent", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_logits_equal_those_of_transformers_at_every_token(case: dict[str, Any], is_sent: bool) -> None:
    params, harness = SamplingParams(**case), Harness()
    tokens = [5, 7, 8, 5, 29]
    harness.enter(2, tokens, len(tokens), params.for_engine() if is_sent else params)
    for step, token in enumerate([5, 5, 6, 7, 8, 4, 4, 4, 4, 29, 0, 6, 5]):
        logits = some_logits(1, step)
        torch.testing.assert_close(
            harness.apply(logits, [2])[0], reference(logits[0], harness.tokens(2), 5, params), rtol=1e-6, atol=1e-6
        )
        harness.sample(2, token)


def test_sixteen_mixed_neighbours_do_not_change_a_row_and_a_row_may_rest() -> None:
    harness = Harness()
    generator = torch.Generator().manual_seed(1)
    params = [SamplingParams(**CASES[row % len(CASES)]) for row in range(17)]
    prompts = [torch.randint(0, VOCAB_SIZE, (1 + row % 5,), generator=generator).tolist() for row in range(17)]
    for row in range(17):
        harness.enter(row, prompts[row], len(prompts[row]), params[row])
    for step in range(12):
        rows = [row for row in torch.randperm(17, generator=generator).tolist() if (row + step) % 4]
        logits = some_logits(len(rows), step)
        processed = harness.apply(logits, rows)
        for index, row in enumerate(rows):
            expected = reference(logits[index], harness.tokens(row), len(prompts[row]), params[row])
            torch.testing.assert_close(processed[index], expected, rtol=1e-6, atol=1e-6)
            harness.sample(row, int(torch.randint(0, VOCAB_SIZE, (1,), generator=generator)))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_request_that_resumes_in_another_row_goes_on_alike(case: dict[str, Any]) -> None:
    params, harness = SamplingParams(**case), Harness()
    tokens = [5, 7, 8, 5, 5, 6, 4, 4, 7, 8]
    harness.enter(0, [4] * 20, 3, SamplingParams(repetition_penalty=1.9, bad_words_token_ids=[[1]]))
    harness.apply(some_logits(1), [0])
    harness.enter(0, tokens, 4, params)
    logits = some_logits(1, 5)
    torch.testing.assert_close(harness.apply(logits, [0])[0], reference(logits[0], tokens, 4, params))


def test_min_tokens_masks_stop_tokens_until_reached() -> None:
    harness = Harness()
    harness.enter(1, [9, 9], 2, SamplingParams(min_tokens=2), stop_ids=[3, 8])
    logits = some_logits(1)
    for expected in ([3, 8], [3, 8], []):
        masked = (harness.apply(logits, [1])[0] == float("-inf")).nonzero().flatten().tolist()
        assert masked == expected
        harness.sample(1, 4)


def test_rows_without_features_keep_their_very_logits() -> None:
    harness = Harness()
    harness.enter(0, [1], 1, SamplingParams())
    logits = some_logits(1).to(torch.bfloat16)
    assert harness.batch.logits.apply(logits, np.array([0])) is logits
    harness.enter(1, [1], 1, SamplingParams(repetition_penalty=1.5))
    both = harness.apply(torch.cat([logits, logits]), [0, 1])
    assert both.dtype == torch.float32
    assert torch.equal(both[0], logits[0].float())


def test_a_processor_of_the_users_runs_on_its_rows_only() -> None:
    harness = Harness(load_logits_processor(f"{__name__}:OnlyMultiples"))
    harness.enter(0, [1], 1, SamplingParams(extra_args={"multiple": 7}))
    harness.enter(1, [1], 1, SamplingParams())
    logits = some_logits(2)
    processed = harness.apply(logits, [1, 0])
    assert torch.equal(processed[0], logits[0])
    assert (processed[1] > float("-inf")).nonzero().flatten().tolist() == [0, 7, 14, 21, 28]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("nothing", "qualified names like"),
        ("no.such.Thing", "cannot be imported"),
        ("executors.sampler:Nothing", "cannot be imported"),
        ("executors.sampler:SamplingColumns", "not a subclass of LogitsProcessor"),
    ],
)
def test_a_name_that_is_no_processor_is_refused(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_logits_processor(name)
