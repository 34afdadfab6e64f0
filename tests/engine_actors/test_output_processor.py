"""Each request's outputs are its own: late, faulty and refused ones touch nobody else."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest

from engine_actors.errors import InvalidRequestError, QueueFullError, RequestFailedError
from engine_actors.output_processor import OutputProcessor, ParentRequest
from engine_actors.outputs import RequestOutput
from scheduler.output import EngineCoreOutputs, FinishedRequest, FinishReason, RequestEvents, pack_int32
from scheduler.request import EngineCoreRequest
from scheduler.sampling_params import RequestOutputKind, SamplingParams
from tests.fakes import WrappedTokenizer, byte_level_tokenizer


@lru_cache
def tokenizer() -> WrappedTokenizer:
    return WrappedTokenizer(byte_level_tokenizer())


def ids_of(text: str) -> list[int]:
    return tokenizer().backend_tokenizer.encode(text).ids


def add(processor: OutputProcessor, request_id: str, **params: Any) -> None:
    sampling = SamplingParams(**{"max_tokens": 100, **params})
    parent = ParentRequest(request_id, None, [5], sampling)
    names = [request_id] if sampling.n == 1 else [f"{request_id}.{i}" for i in range(sampling.n)]
    processor.add(parent, [EngineCoreRequest(name, pack_int32([5]), sampling.clone(n=1)) for name in names])


def step(tokens: dict[str, list[int]], *finished: FinishedRequest, **fields: Any) -> EngineCoreOutputs:
    counts = [len(ids) for ids in tokens.values()]
    return EngineCoreOutputs(
        list(tokens),
        [token for ids in tokens.values() for token in ids],
        [] if set(counts) <= {1} else counts,
        list(finished),
        **fields,
    )


@pytest.fixture
def processor() -> OutputProcessor:
    return OutputProcessor(tokenizer())


def test_outputs_of_unknown_requests_are_dropped(processor: OutputProcessor) -> None:
    add(processor, "a")
    outputs = step({"gone": [5], "a": [6], "gone too": [7]}, FinishedRequest("gone", FinishReason.LENGTH))
    (output,) = processor.process(outputs).request_outputs
    assert (output.request_id, output.outputs[0].token_ids) == ("a", [6])


def test_several_tokens_in_one_step_go_to_their_requests(processor: OutputProcessor) -> None:
    add(processor, "a")
    add(processor, "b")
    a, b = processor.process(step({"a": [5, 6, 7], "b": [8]})).request_outputs
    assert (a.outputs[0].token_ids, b.outputs[0].token_ids) == ([5, 6, 7], [8])


def test_fault_in_one_request_ends_it_alone_and_aborts_it_in_the_engine(processor: OutputProcessor) -> None:
    add(processor, "a", output_kind=RequestOutputKind.DELTA)
    add(processor, "b", output_kind=RequestOutputKind.DELTA)
    broken = processor._states["a"].detokenizer
    assert broken is not None
    broken.push = None  # type: ignore[method-assign, assignment]
    processed = processor.process(step({"a": ids_of("x"), "b": ids_of("y")}))
    a, b = processed.request_outputs
    assert processed.aborts == ["a"]
    assert (a.finished, a.outputs[0].finish_reason) == (True, "error")
    assert isinstance(a.error, RequestFailedError)
    assert (b.finished, b.outputs[0].text, b.error) == (False, "y", None)
    assert processor.num_unfinished == 1


@pytest.mark.parametrize(
    ("error_type", "kind"),
    [("InvalidRequestError", InvalidRequestError), ("QueueFullError", QueueFullError), (None, RequestFailedError)],
)
def test_engines_refusal_becomes_the_public_error(
    processor: OutputProcessor, error_type: str | None, kind: type[Exception]
) -> None:
    add(processor, "a")
    refusal = FinishedRequest("a", FinishReason.ERROR, error="the numbers", error_type=error_type)
    (output,) = processor.process(step({}, refusal)).request_outputs
    assert type(output.error) is kind
    assert str(output.error) == "the numbers"
    assert (output.finished, output.outputs[0].finish_reason) == (True, "error")


def test_stop_token_is_reported_but_not_part_of_the_text(processor: OutputProcessor) -> None:
    for kind in RequestOutputKind:
        add(processor, "a", output_kind=kind)
        ids = ids_of("fox.")
        texts, tokens = [], []
        for token in ids[:-1]:
            texts += [o.outputs[0].text for o in processor.process(step({"a": [token]})).request_outputs]
        end = FinishedRequest("a", FinishReason.STOP, ids[-1], num_preemptions=2)
        (last,) = processor.process(step({"a": [ids[-1]]}, end)).request_outputs
        tokens = last.outputs[0].token_ids
        assert last.outputs[0].stop_reason == ids[-1]
        assert last.metrics.num_preemptions == 2
        assert last.metrics.num_generation_tokens == len(ids)
        if kind is RequestOutputKind.DELTA:
            assert "".join([*texts, last.outputs[0].text]) == "fox"
            assert tokens == ids[-1:]
        else:
            assert last.outputs[0].text == "fox"
            assert tokens == ids


def test_stop_token_as_the_only_token(processor: OutputProcessor) -> None:
    add(processor, "a", output_kind=RequestOutputKind.FINAL_ONLY)
    (output,) = processor.process(step({"a": [1]}, FinishedRequest("a", FinishReason.STOP))).request_outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids, output.outputs[0].stop_reason) == ("", [1], None)


def test_tokens_behind_a_stop_string_in_the_same_step_are_dropped(processor: OutputProcessor) -> None:
    add(processor, "a", stop=["b"])
    ids = [ids_of(character)[0] for character in "abcd"]
    processed = processor.process(step({"a": ids}, FinishedRequest("a", FinishReason.LENGTH)))
    (output,) = processed.request_outputs
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("a", ids[:2])
    assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "b")


def test_final_only_request_gives_one_output_with_all_completions(processor: OutputProcessor) -> None:
    add(processor, "a", n=2, output_kind=RequestOutputKind.FINAL_ONLY)
    ids = ids_of("fox")
    seen: list[RequestOutput] = []
    for token in ids:
        seen += processor.process(step({"a.0": [token], "a.1": [token]})).request_outputs
    seen += processor.process(step({}, FinishedRequest("a.1", FinishReason.LENGTH))).request_outputs
    assert seen == []
    (output,) = processor.process(step({}, FinishedRequest("a.0", FinishReason.LENGTH))).request_outputs
    assert output.finished
    assert [(c.index, c.text, c.token_ids) for c in output.outputs] == [(0, "fox", ids), (1, "fox", ids)]


def test_events_set_the_times_and_the_prefix_hit(processor: OutputProcessor) -> None:
    add(processor, "a")
    events = RequestEvents("a", queued_s=1.0, scheduled_s=2.0, num_cached_tokens=16)
    (output,) = processor.process(step({"a": [5]}, started=[events], timestamp_s=3.0)).request_outputs
    assert output.num_cached_tokens == 16
    times = output.metrics
    assert (times.queued_ts, times.scheduled_ts, times.first_token_ts, times.last_token_ts) == (1.0, 2.0, 3.0, 3.0)


def test_finishing_everything_leaves_nothing(processor: OutputProcessor) -> None:
    add(processor, "a", n=2)
    add(processor, "b")
    processor.forget(["b"])
    outputs = processor.finish_all(None)
    assert [output.outputs[0].finish_reason for output in outputs] == ["abort", "abort"]
    assert processor.num_unfinished == 0
    assert processor._states == {}
