"""Every wrong value is refused with the field and the value; right ones survive the wire."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from scheduler.sampling_params import RequestOutputKind, SamplingParams

WRONG: list[tuple[str, Any]] = [
    ("n", 0), ("n", 16385), ("n", True), ("n", "2"),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("temperature", "hot"),
    ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1),
    ("presence_penalty", 2.1), ("presence_penalty", math.nan), ("frequency_penalty", -2.1), ("frequency_penalty", "a"),
    ("ignore_eos", 1), ("detokenize", None), ("skip_special_tokens", "no"), ("include_stop_str_in_output", 0),
    ("spaces_between_special_tokens", 1), ("output_kind", 7), ("stop", 5), ("stop", {"a": 1}), ("stop_token_ids", 5),
    ("structured_outputs", {}), ("structured_outputs", {"yaml": "a"}), ("structured_outputs", "json"),
    ("repetition_penalty", 1e9), ("logit_bias", {1: 1e300}), ("top_k", 2**70), ("max_tokens", 2**70),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.inf),
    ("seed", 2**63), ("seed", 1.5), ("stop", [""]), ("stop", [3]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]),
    ("max_tokens", 0), ("min_tokens", -1), ("min_tokens", 17),
    ("bad_words", [""]), ("bad_words", [" "]), ("bad_words", "word"), ("bad_words", [1]),
    ("bad_words_token_ids", [[]]), ("bad_words_token_ids", [[-1]]), ("bad_words_token_ids", [3]),
    ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", [1.0]), ("allowed_token_ids", 5),
    ("logit_bias", {-1: 1.0}), ("logit_bias", {"a": 1.0}), ("logit_bias", {1: math.inf}), ("logit_bias", [1]),
    ("logit_bias", {1: 10**400, 2: 0.5}), ("logit_bias", {1: math.nan, 2: 0.5}), ("logit_bias", {1: -1e31, 2: 1e31}),
    ("allowed_token_ids", [1, True]), ("stop_token_ids", [5, 2**63]), ("bad_words_token_ids", [[1], [2, -1]]),
    ("logprobs", -2), ("logprobs", 1.5), ("prompt_logprobs", -2), ("prompt_logprobs", "5"),
    ("skip_reading_prefix_cache", 1), ("stream_interval", 0), ("stream_interval", 1.5),
    ("token_columns", 5), ("flat_logprobs", 1), ("logprob_token_ids", []), ("logprob_token_ids", [-1]),
    ("logprob_token_ids", list(range(129))), ("logprob_token_ids", 5),
    ("extra_args", [1]), ("extra_args", {"a": 2**63}), ("extra_args", {"a": [object()]}), ("extra_args", {1: 2}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=str)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        SamplingParams(**{field: value})


def test_prompt_logprobs_cannot_come_from_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match="skip_reading_prefix_cache must be True or None with prompt_logprobs"):
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)


def test_tokens_asked_for_by_id_are_as_many_as_logprobs_says() -> None:
    assert SamplingParams(logprobs=2, logprob_token_ids=[5, 9]).wants_logprobs
    with pytest.raises(ValueError, match="logprob_token_ids must be as many as logprobs says, 3; got 2"):
        SamplingParams(logprobs=3, logprob_token_ids=[5, 9])


def test_other_spellings_are_normalised() -> None:
    params = SamplingParams(stop="a", seed=-1, top_k=-1, logprobs=True, prompt_logprobs=False, bad_words=None)  # type: ignore[arg-type]
    assert (params.stop, params.seed, params.top_k, params.logprobs, params.prompt_logprobs) == (
        ["a"],
        None,
        0,
        1,
        None,
    )
    assert params.bad_words == []


def test_biases_of_both_kinds_of_numbers_are_taken() -> None:
    for biases in ({}, {1: 5}, {1: 5, 2: -0.5}, {1: 1e30, 2: -1e30}, {1: 3, 2: 10**30}):
        assert SamplingParams(logit_bias=biases).logit_bias == biases


def test_another_output_kind_leaves_the_original_alone() -> None:
    params = SamplingParams(seed=4, stop=["a"])
    final = params.with_output_kind(RequestOutputKind.FINAL_ONLY)
    assert params == SamplingParams(seed=4, stop=["a"])
    assert final == params.clone(output_kind=RequestOutputKind.FINAL_ONLY)


def test_all_fields_survive_the_wire() -> None:
    params = SamplingParams(
        n=2, temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, presence_penalty=1, frequency_penalty=-1, seed=-5,
        repetition_penalty=1.2, stop=["x"], stop_token_ids=[4, 4], ignore_eos=True, max_tokens=9, min_tokens=2,
        bad_words=["a"], bad_words_token_ids=[[1, 2]], allowed_token_ids=[3], logit_bias={7: -3.5}, logprobs=-1,
        prompt_logprobs=4, stream_interval=3, skip_reading_prefix_cache=True, extra_args={"a": [1, {"b": None}]},
    )  # fmt: skip
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
    assert params.clone() == params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(SamplingParams())) == {}


HALF = "\ud800"
ODD: list[Any] = [
    None, True, False, -1, 0, 1, 5, 2**70, -(2**70), 10**400, 10**5000, 0.5, -0.5, 1e300, 1e-300, math.nan, math.inf,
    "", "x", HALF, b"x", [], [1], [-1], [1.5], [None], ["a"], [""], [HALF], [True], [2**70], [[1]], [[]], [["a"]],
    [[2**70]], (1, 2), {1, 2}, {}, {"a": 1}, {HALF: 1}, {"a": HALF}, {1: 2}, {1: math.nan}, {1: 1e300}, {1: 10**5000},
    {1: None}, {-1: 1.0}, {"regex": "a"}, {"regex": 5}, {"regex": HALF}, {"json": []}, {"json": {"a": 2**70}},
    {"json_object": 1}, {"grammar": []}, {"json_object": True, "whitespace_pattern": HALF}, {"choice": "a"},
    {"whitespace_pattern": "a"}, object(),
]  # fmt: skip


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_whatever_is_given_for_a_field_is_refused_by_name_or_survives_the_wire(field: str) -> None:
    """What the engine cannot read would cost the whole client its connection."""
    nested: Any = {}
    for _ in range(2000):
        nested = {"json": nested}
    for value in [*ODD, nested]:
        try:
            params = SamplingParams(**{field: value})
        except ValueError as error:
            assert str(error).startswith(field), error  # noqa: PT017
            continue
        form = params.structured_outputs
        if form is not None and form.json is not None:
            continue  # Sent as text, which the input processor makes.
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
