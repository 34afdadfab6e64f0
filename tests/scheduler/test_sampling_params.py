"""Every wrong value is refused with the field and the value; right ones survive the wire."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from scheduler.sampling_params import SamplingParams

WRONG: list[tuple[str, Any]] = [
    ("n", 0), ("n", 16385), ("n", True), ("n", "2"),
    ("temperature", -0.1), ("temperature", 2.1), ("temperature", math.nan), ("temperature", "hot"),
    ("top_p", 0.0), ("top_p", 1.1), ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1),
    ("presence_penalty", 2.1), ("presence_penalty", math.nan), ("frequency_penalty", -2.1), ("frequency_penalty", "a"),
    ("repetition_penalty", 0.0), ("repetition_penalty", -1.0), ("repetition_penalty", math.inf),
    ("seed", 2**63), ("seed", 1.5), ("stop", [""]), ("stop", [3]), ("stop_token_ids", [-1]), ("stop_token_ids", ["a"]),
    ("max_tokens", 0), ("min_tokens", -1), ("min_tokens", 17),
    ("bad_words", [""]), ("bad_words", [" "]), ("bad_words", "word"), ("bad_words", [1]),
    ("bad_words_token_ids", [[]]), ("bad_words_token_ids", [[-1]]), ("bad_words_token_ids", [3]),
    ("allowed_token_ids", []), ("allowed_token_ids", [-1]), ("allowed_token_ids", [1.0]), ("allowed_token_ids", 5),
    ("logit_bias", {-1: 1.0}), ("logit_bias", {"a": 1.0}), ("logit_bias", {1: math.inf}), ("logit_bias", [1]),
    ("logprobs", -2), ("logprobs", 1.5), ("prompt_logprobs", -2), ("prompt_logprobs", "5"),
    ("skip_reading_prefix_cache", 1), ("stream_interval", 0), ("stream_interval", 1.5),
    ("extra_args", [1]), ("extra_args", {"a": 2**63}), ("extra_args", {"a": [object()]}), ("extra_args", {1: 2}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "value"), WRONG, ids=str)
def test_a_wrong_value_is_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{field}"):
        SamplingParams(**{field: value})


def test_prompt_logprobs_cannot_come_from_the_prefix_cache() -> None:
    with pytest.raises(ValueError, match="skip_reading_prefix_cache must be True or None with prompt_logprobs"):
        SamplingParams(prompt_logprobs=1, skip_reading_prefix_cache=False)


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
