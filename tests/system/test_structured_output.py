"""Structured output through whole engines: every kind valid, and the same in any company and layout."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_actors import LLM, AsyncLLM, SamplingParams
from engine_actors.errors import InvalidRequestError, RequestFailedError
from scheduler.output import pack_int32
from tests.fakes import CONFIG, EOS, byte_level_tokenizer

INPROC: dict[str, Any] = {"engine_core": "inproc", "distributed_executor_backend": "uni"}
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 300, "torch_num_threads": 1, "num_cpus_per_worker": 1,
}  # fmt: skip
PROMPT = [(37 * i) % 500 + 2 for i in range(45)]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "kind": {"enum": ["cat", "dog", "bird"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 4},
        "home": {"anyOf": [{"type": "null"}, {"type": "string", "format": "date"}]},
    },
    "required": ["name", "kind", "ages", "home"],
}
TAG = {
    "type": "structural_tag",
    "format": {"type": "tag", "begin": "<n>", "content": {"type": "regex", "pattern": "[0-9]{2}"}, "end": "</n>"},
}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "compact json": {"json": SCHEMA, "disable_any_whitespace": True},
    "json_object": {"json_object": True},
    "regex": {"regex": r"[a-c]{3}-(\d{2,4}|x+y)"},
    "choice": {"choice": ["yes", "no", "perhaps not"]},
    "grammar": {"grammar": 'root ::= "(" root ")" | [0-9]'},
    "structural_tag": {"structural_tag": TAG},
}
MAX_TOKENS = 120


def params_of(form: str, seed: int = 7, **changes: Any) -> SamplingParams:
    return SamplingParams(**{
        "seed": seed, "temperature": 0.8, "top_k": 40, "max_tokens": MAX_TOKENS, "logprobs": 1,
        "structured_outputs": FORMS[form], **changes,
    })  # fmt: skip


def is_valid(form: str, text: str) -> bool:
    if "json" in form:
        value = json.loads(text)
        if form != "json_object":
            jsonschema.validate(value, SCHEMA, format_checker=jsonschema.FormatChecker())
        return isinstance(value, dict)
    if form == "grammar":
        return re.fullmatch(r"(\(*)\d(\)*)", text) is not None and text.count("(") == text.count(")")
    if form == "choice":
        return text in FORMS["choice"]["choice"]
    pattern = {"regex": FORMS["regex"]["regex"], "structural_tag": r"<n>[0-9]{2}</n>"}[form]
    return re.fullmatch(pattern, text) is not None


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, and a tokenizer that names its end-of-sequence token."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**CONFIG, "initializer_range": 0.2})).save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}'
    )
    return folder


@pytest.fixture(scope="module")
def llm(llama_dir: Path) -> Iterator[LLM]:
    with LLM(str(llama_dir), **INPROC, **OPTIONS) as engine:
        yield engine


Result = tuple[str, list[int], str | None]


def result(output: Any) -> Result:
    completion = output.outputs[0]
    assert len(completion.logprobs) == len(completion.token_ids)
    return completion.text, completion.token_ids, completion.finish_reason


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, Result]:
    return {form: result(llm.generate(PROMPT, params_of(form), use_tqdm=False)[0]) for form in FORMS}


def mixed_batch() -> tuple[list[list[int]], list[SamplingParams]]:
    """Every form on PROMPT, as many with other prompts, and requests without a form between them."""
    prompts, params = [], []
    for index, form in enumerate(FORMS):
        prompts += [PROMPT, PROMPT[: 16 * (index % 3)] + [index + 20] * (1 + 7 * index), PROMPT[:5]]
        params += [params_of(form), params_of(form, seed=index), SamplingParams(seed=index, max_tokens=20)]
    return prompts, params


def check_mixed(outputs: list[Any], alone: dict[str, Result]) -> None:
    for index, form in enumerate(FORMS):
        assert result(outputs[3 * index]) == alone[form]
        other = outputs[3 * index + 1].outputs[0]
        assert other.finish_reason == "length" or is_valid(form, other.text)


def test_every_form_is_valid_when_it_stops(alone: dict[str, Result]) -> None:
    stopped = [form for form, (_, _, reason) in alone.items() if reason == "stop"]
    assert len(stopped) >= 5, alone
    for form in stopped:
        assert is_valid(form, alone[form][0])


def test_among_neighbours_with_and_without_a_form(llm: LLM, alone: dict[str, Result]) -> None:
    check_mixed(llm.generate(*mixed_batch(), use_tqdm=False), alone)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 16, "max_num_seqs": 16}, id="chunked"),
        pytest.param({"async_scheduling": True}, id="async"),
        pytest.param({"async_scheduling": True, "max_num_batched_tokens": 24, "max_num_seqs": 5}, id="async-chunked"),
    ],
)
def test_in_process_layouts(llama_dir: Path, alone: dict[str, Result], options: dict[str, Any]) -> None:
    with LLM(str(llama_dir), **{**INPROC, **OPTIONS, **options}) as engine:
        check_mixed(engine.generate(*mixed_batch(), use_tqdm=False), alone)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preempted(llama_dir: Path, alone: dict[str, Result], asynchronous: bool) -> None:
    options = {"num_gpu_blocks_override": 24, "max_model_len": 200, "async_scheduling": asynchronous}
    with LLM(str(llama_dir), **{**INPROC, **OPTIONS, **options}) as engine:
        engine.generate(*mixed_batch(), use_tqdm=False)
        outputs = engine.generate(*mixed_batch(), use_tqdm=False)  # All grammars are there: all run at once.
    check_mixed(outputs, alone)
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="one-worker"),
        pytest.param({"tensor_parallel_size": 2}, id="tp2"),
        pytest.param({"pipeline_parallel_size": 2, "max_num_batched_tokens": 32, "max_num_seqs": 16}, id="pp2-chunked"),
    ],
)
def test_layouts_of_worker_actors(llama_dir: Path, alone: dict[str, Result], options: dict[str, Any]) -> None:
    with LLM(str(llama_dir), **{**OPTIONS, **options}) as engine:
        check_mixed(engine.generate(*mixed_batch(), use_tqdm=False), alone)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
async def test_through_async_llm_a_grammar_on_its_way_holds_nobody_up_and_can_be_aborted(
    llama_dir: Path, alone: dict[str, Result]
) -> None:
    engine = AsyncLLM(str(llama_dir), **OPTIONS)
    try:
        # The first grammar waits for the compiler process to start: seconds, in which the plain request runs.
        slow = await engine.add_request(PROMPT, params_of("json"), "slow")
        (plain,) = await engine.generate_all([PROMPT], SamplingParams(max_tokens=8, seed=1))
        assert len(plain.outputs[0].token_ids) == 8
        assert not slow.finished
        await engine.abort("slow")
        ended = [output async for output in slow][-1]
        assert (ended.outputs[0].finish_reason, ended.outputs[0].token_ids) == ("abort", [])
        check_mixed(await asyncio.wait_for(engine.generate_all(*mixed_batch()), 300), alone)
    finally:
        await engine.shutdown_async()


def test_new_workers_go_on_with_the_text(llama_dir: Path, alone: dict[str, Result]) -> None:
    with LLM(str(llama_dir), **INPROC, **OPTIONS) as engine:
        core = engine.llm_engine.client.core  # type: ignore[attr-defined]
        engine.llm_engine.add_request("a", PROMPT, params_of("json", logprobs=None))
        outputs = []
        while not outputs or len(outputs[-1].outputs[0].token_ids) < 5:
            outputs += engine.llm_engine.step()
        core.go_on_with(core.start_new_workers(120.0), "the test says so")
        while engine.llm_engine.has_unfinished_requests():
            outputs += engine.llm_engine.step()
    completion = outputs[-1].outputs[0]
    assert (completion.text, completion.token_ids, completion.finish_reason) == alone["json"]


def test_a_new_engine_replays_the_tokens_that_another_generated(llm: LLM, alone: dict[str, Result]) -> None:
    core = llm.llm_engine.client.core  # type: ignore[attr-defined]
    _, tokens, reason = alone["json"]
    (child,) = llm.llm_engine.input_processor.process("again", PROMPT, params_of("json", logprobs=None)).children
    core.add_request(msgspec.structs.replace(child, output_token_ids=pack_int32(tokens[:7])))
    found: list[int] = []
    ends = []
    while core.has_requests():
        for outputs in core.step_fn().values():
            found += outputs.token_ids
            ends += outputs.finished
    assert found == tokens[7:]
    assert str(ends[0].reason) == reason


def test_n_completions_each_have_their_own_matcher(llm: LLM) -> None:
    (output,) = llm.generate(PROMPT, params_of("regex", n=4), use_tqdm=False)
    texts = [completion.text for completion in output.outputs]
    assert all(re.fullmatch(FORMS["regex"]["regex"], text) for text in texts)
    assert len(set(texts)) > 1


def test_together_with_every_other_feature(llm: LLM) -> None:
    params = params_of(
        "regex", min_tokens=3, presence_penalty=0.5, repetition_penalty=1.2, logit_bias={40: 2.0}, bad_words=["aa"],
        prompt_logprobs=1, min_p=0.001, top_p=0.99,
    )  # fmt: skip
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert is_valid("regex", output.outputs[0].text)
    assert "aa" not in output.outputs[0].text
    assert len(output.prompt_logprobs) == len(PROMPT)
    outputs = llm.generate([PROMPT, *mixed_batch()[0]], [params, *mixed_batch()[1]], use_tqdm=False)
    assert result(outputs[0]) == result(output)


def test_a_text_that_may_go_on_ends_by_eos_or_length(llm: LLM) -> None:
    form = {"regex": "[ab]+"}
    biased = SamplingParams(max_tokens=50, temperature=0.0, structured_outputs=form, logit_bias={EOS: 50.0})
    (output,) = llm.generate(PROMPT, biased, use_tqdm=False)
    completion = output.outputs[0]
    assert re.fullmatch("[ab]+", completion.text)
    assert (completion.finish_reason, completion.stop_reason, completion.token_ids[-1]) == ("stop", None, EOS)
    (output,) = llm.generate(PROMPT, biased.clone(ignore_eos=True), use_tqdm=False)
    assert output.outputs[0].finish_reason == "length"
    (output,) = llm.generate(PROMPT, biased.clone(min_tokens=10), use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 11


def test_a_stop_string_ends_it_early(llm: LLM, alone: dict[str, Result]) -> None:
    text = alone["regex"][0]
    (output,) = llm.generate(PROMPT, params_of("regex", stop=["-"]), use_tqdm=False)
    assert (output.outputs[0].text, output.outputs[0].stop_reason) == (text.split("-")[0], "-")


def test_the_last_token_of_a_complete_text_is_part_of_it_when_length_is_reached_too(llm: LLM) -> None:
    form = {"regex": "abc"}
    params = SamplingParams(max_tokens=20, seed=1, structured_outputs=form)
    (output,) = llm.generate(PROMPT, params, use_tqdm=False)
    count = len(output.outputs[0].token_ids)
    (again,) = llm.generate(PROMPT, params.clone(max_tokens=count), use_tqdm=False)
    assert (again.outputs[0].text, again.outputs[0].finish_reason) == ("abc", "stop")


def test_a_request_that_leaves_no_token_fails_alone(llm: LLM, alone: dict[str, Result]) -> None:
    digits = llm.get_tokenizer().encode("0123456789")
    impossible = SamplingParams(max_tokens=9, structured_outputs={"regex": "[a-c]+[0-9]"}, allowed_token_ids=digits)
    engine = llm.llm_engine
    engine.add_request("bad", PROMPT, impossible)
    engine.add_request("good", PROMPT, params_of("regex"))
    outputs: dict[str, Any] = {}
    while engine.has_unfinished_requests():
        outputs.update((output.request_id, output) for output in engine.step())
    assert isinstance(outputs["bad"].error, RequestFailedError)
    assert "no token is left to sample" in str(outputs["bad"].error)
    assert result(outputs["good"]) == alone["regex"]


@pytest.mark.parametrize(
    ("form", "error"),
    [
        ({"regex": "(a"}, "structured_outputs: regular expression"),
        ({"json": {"type": "object", "if": {}}}, "structured_outputs: json: 'if' cannot be enforced"),
        ({"grammar": 'root ::= "a" other'}, "structured_outputs: grammar, line 1: rule 'other' is not defined"),
        ({"json": '{"type": '}, "structured_outputs.json is not valid JSON"),
    ],
)
def test_what_cannot_be_enforced_is_refused_before_the_engine(llm: LLM, form: dict[str, Any], error: str) -> None:
    with pytest.raises((InvalidRequestError, ValueError), match=re.escape(error)):
        llm.generate(PROMPT, SamplingParams(structured_outputs=form), use_tqdm=False)


def test_without_a_tokenizer_structured_output_is_refused(llama_dir: Path) -> None:
    with LLM(str(llama_dir), **INPROC, **OPTIONS, skip_tokenizer_init=True) as engine:
        params = SamplingParams(structured_outputs={"json_object": True}, detokenize=False)
        with pytest.raises(InvalidRequestError, match="need a tokenizer, but skip_tokenizer_init") as caught:
            engine.generate(PROMPT, params, use_tqdm=False)
    assert caught.value.field == "structured_outputs"
