"""Every sampling feature over a small random Llama: transformers' values, and the same in any company and layout."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_actors import LLM, AsyncLLM, BeamSearchParams, RequestOutputKind, SamplingParams
from engine_actors.errors import EngineStartupError, InvalidRequestError
from engine_actors.flat_logprobs import FlatLogprobs
from tests.fakes import CONFIG, VOCAB_SIZE, byte_level_tokenizer

INPROC: dict[str, Any] = {"engine_core": "inproc", "distributed_executor_backend": "uni"}
OPTIONS: dict[str, Any] = {
    "dtype": "float32", "num_gpu_blocks_override": 200, "torch_num_threads": 1, "num_cpus_per_worker": 1,
}  # fmt: skip
NUM_TOKENS = 56
PROMPT = [(37 * i) % 500 + 2 for i in range(45)]
FEATURES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "repetition": {"temperature": 0.0, "repetition_penalty": 1.4},
    "penalties": {"temperature": 0.8, "presence_penalty": 1.2, "frequency_penalty": 0.7, "repetition_penalty": 1.1},
    "bias": {"temperature": 1.0, "logit_bias": {40: 9.0, 41: 8.5, 42: -100.0}, "top_k": 20},
    "allowed": {"temperature": 1.2, "allowed_token_ids": [5, 6, 7, 100, 101], "top_p": 0.9},
    "bad words": {"temperature": 0.0, "bad_words_token_ids": [[40], [41, 42], [5]], "min_tokens": 3},
    "min-p": {"temperature": 1.1, "min_p": 0.02, "top_p": 0.95},
    "stop strings": {"temperature": 1.0, "stop": ["th", "e", "no such text"], "include_stop_str_in_output": True},
    "stop tokens": {"temperature": 1.0, "top_k": 30, "stop_token_ids": list(range(50, 80)), "min_tokens": 7},
    "log-probabilities by id": {"temperature": 1.0, "logprob_token_ids": [40, 9, 250]},
    "all": {
        "structured_outputs": {"regex": "[ -~]{100,}"},
        "temperature": 0.9, "top_k": 50, "top_p": 0.95, "min_p": 0.001, "repetition_penalty": 1.1, "min_tokens": 4,
        "presence_penalty": 0.3, "frequency_penalty": 0.2, "logit_bias": {9: 3.0}, "bad_words_token_ids": [[11, 12]],
        "allowed_token_ids": list(range(2, 300)),
    },
}  # fmt: skip


def params_of(feature: str, seed: int = 7, **changes: Any) -> SamplingParams:
    base = {"seed": seed, "max_tokens": NUM_TOKENS, "ignore_eos": True, "logprobs": 3, "prompt_logprobs": 2}
    return SamplingParams(**{**base, **FEATURES[feature], **changes})


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**CONFIG, "initializer_range": 0.2})).save_pretrained(folder)
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    return folder


@pytest.fixture(scope="module")
def llm(llama_dir: Path) -> Iterator[LLM]:
    with LLM(str(llama_dir), **INPROC, **OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(llm: LLM) -> dict[str, Any]:
    """Each feature's output when nothing else runs."""
    return {name: llm.generate(PROMPT, params_of(name), use_tqdm=False)[0] for name in FEATURES}


def assert_same(output: Any, expected: Any) -> None:
    """Tokens equal; log-probabilities to rounding, with entries, ranks and text."""
    mine, theirs = output.outputs[0], expected.outputs[0]
    assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
    assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
    assert len(mine.logprobs) == len(mine.token_ids)
    assert mine.cumulative_logprob == pytest.approx(theirs.cumulative_logprob, abs=1e-3)
    pairs = [*zip(mine.logprobs, theirs.logprobs, strict=True)]
    assert output.prompt_logprobs[0] is None
    pairs += zip(output.prompt_logprobs[1:], expected.prompt_logprobs[1:], strict=True)
    for position, other in pairs:
        assert list(position) == list(other)
        for token_id, entry in position.items():
            assert (entry.rank, entry.decoded_token) == (other[token_id].rank, other[token_id].decoded_token)
            assert entry.logprob == pytest.approx(other[token_id].logprob, abs=1e-4)


def mixed_batch() -> tuple[list[list[int]], list[SamplingParams]]:
    """Every feature on PROMPT, then as many others that share a part of it."""
    names = list(FEATURES)
    others = [PROMPT[: 16 * (i % 3)] + [i + 20] * (1 + 7 * i) for i in range(len(names))]
    other_params = [params_of(name, seed=i, prompt_logprobs=None) for i, name in enumerate(names)]
    return [PROMPT] * len(names) + others, [params_of(name) for name in names] + other_params


def check_mixed(engine: LLM, alone: dict[str, Any]) -> list[Any]:
    outputs = engine.generate(*mixed_batch(), use_tqdm=False)
    for name, output in zip(FEATURES, outputs, strict=False):
        assert_same(output, alone[name])
    return outputs


def test_logprobs_are_those_of_transformers_whatever_is_sampled(llama_dir: Path, alone: dict[str, Any]) -> None:
    model = LlamaForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    for name, output in alone.items():
        tokens = PROMPT + output.outputs[0].token_ids
        asked_ids = FEATURES[name].get("logprob_token_ids")
        with torch.inference_mode():
            logprobs = model(torch.tensor([tokens])).logits[0].log_softmax(-1)
        positions = output.prompt_logprobs + output.outputs[0].logprobs
        assert len(positions) == len(tokens)
        for index in range(1, len(tokens)):
            expected, position = logprobs[index - 1], positions[index]
            count = 2 if index < len(PROMPT) else 3
            by_id = asked_ids is not None and index >= len(PROMPT)
            others = asked_ids if by_id else expected.topk(count).indices.tolist()
            assert list(position) == [tokens[index], *(t for t in others if t != tokens[index])]
            for token_id, entry in position.items():
                assert entry.rank == int((expected > expected[token_id]).sum()) + 1
                assert entry.logprob == pytest.approx(expected[token_id].item(), abs=2e-4)
        total = sum(logprobs[index - 1, tokens[index]].item() for index in range(len(PROMPT), len(tokens)))
        assert output.outputs[0].cumulative_logprob == pytest.approx(total, abs=2e-3)


def test_greedy_with_repetition_penalty_is_transformers_generate(llama_dir: Path, alone: dict[str, Any]) -> None:
    model = LlamaForCausalLM.from_pretrained(llama_dir, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    for feature, options in (
        ("repetition", {"repetition_penalty": 1.4}),
        ("bad words", {"bad_words_ids": FEATURES["bad words"]["bad_words_token_ids"]}),
    ):
        out = model.generate(
            torch.tensor([PROMPT]), do_sample=False, max_new_tokens=NUM_TOKENS, pad_token_id=0, **options
        )
        assert alone[feature].outputs[0].token_ids == out[0, len(PROMPT) :].tolist()


def test_among_sixteen_neighbours(llm: LLM, alone: dict[str, Any]) -> None:
    check_mixed(llm, alone)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_num_batched_tokens": 16, "max_num_seqs": 16}, id="chunked"),
        pytest.param({"async_scheduling": True}, id="async"),
        pytest.param({"async_scheduling": True, "max_num_batched_tokens": 24, "max_num_seqs": 5}, id="async-chunked"),
        pytest.param({"enable_prefix_caching": False}, id="no-prefix-cache"),
    ],
)
def test_in_process_layouts(llama_dir: Path, alone: dict[str, Any], options: dict[str, Any]) -> None:
    with LLM(str(llama_dir), **{**INPROC, **OPTIONS, **options}) as engine:
        check_mixed(engine, alone)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_preempted(llama_dir: Path, alone: dict[str, Any], asynchronous: bool) -> None:
    options = {"num_gpu_blocks_override": 24, "max_model_len": 200, "async_scheduling": asynchronous}
    with LLM(str(llama_dir), **{**INPROC, **OPTIONS, **options}) as engine:
        outputs = check_mixed(engine, alone)
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
def test_layouts_of_worker_actors(llama_dir: Path, alone: dict[str, Any], options: dict[str, Any]) -> None:
    with LLM(str(llama_dir), **{**OPTIONS, **options}) as engine:
        check_mixed(engine, alone)


@pytest.fixture(scope="module")
def async_llm(llama_dir: Path, ray_cluster: None) -> Iterator[AsyncLLM]:
    engine = AsyncLLM(str(llama_dir), **OPTIONS)
    yield engine
    engine.shutdown(0.0)


@pytest.mark.ray
async def test_async_llm(async_llm: AsyncLLM, alone: dict[str, Any]) -> None:
    outputs = await async_llm.generate_all(*mixed_batch())
    for name, output in zip(FEATURES, outputs, strict=False):
        assert_same(output, alone[name])


@pytest.mark.ray
async def test_beam_search_through_async_llm_beside_another_request(
    llm: LLM, async_llm: AsyncLLM, alone: dict[str, Any]
) -> None:
    params = BeamSearchParams(beam_width=12, max_tokens=5)  # More log-probabilities than a request may ask for.
    prompts = [PROMPT, PROMPT[:7], [5]]
    found, (other,) = await asyncio.gather(
        async_llm.beam_search(prompts, params, concurrency_limit=2),
        async_llm.generate_all([PROMPT], params_of("all")),
    )
    expected = llm.beam_search(prompts, params)
    for output, same in zip(found, expected, strict=True):
        assert [(s.tokens, s.text) for s in output.sequences] == [(s.tokens, s.text) for s in same.sequences]
    assert_same(other, alone["all"])
    assert async_llm.output_processor.num_unfinished == 0
    with pytest.raises(ValueError, match="concurrency_limit must be an integer, at least 1; got 0"):
        await async_llm.beam_search(prompts, params, concurrency_limit=0)


def test_prompt_logprobs_are_complete_after_prefix_hits(llm: LLM, alone: dict[str, Any]) -> None:
    (hit,) = llm.generate(PROMPT, params_of("greedy", prompt_logprobs=None), use_tqdm=False)
    assert hit.num_cached_tokens == 32
    (again,) = llm.generate(PROMPT, params_of("greedy"), use_tqdm=False)
    assert again.num_cached_tokens == 0
    assert_same(again, alone["greedy"])
    (skipped,) = llm.generate(
        PROMPT, params_of("greedy", prompt_logprobs=None, skip_reading_prefix_cache=True), use_tqdm=False
    )
    assert skipped.num_cached_tokens == 0


def test_n_completions_share_the_prompts_logprobs(llm: LLM, alone: dict[str, Any]) -> None:
    (output,) = llm.generate(PROMPT, params_of("all", n=3), use_tqdm=False)
    assert_same(output, alone["all"])
    assert all(len(c.logprobs) == NUM_TOKENS for c in output.outputs)
    assert len({tuple(c.token_ids) for c in output.outputs}) > 1
    (greedy,) = llm.generate(PROMPT, params_of("greedy", n=3), use_tqdm=False)
    assert [c.token_ids for c in greedy.outputs] == [alone["greedy"].outputs[0].token_ids] * 3


def test_whole_vocabulary(llama_dir: Path) -> None:
    with LLM(str(llama_dir), **INPROC, **OPTIONS, max_logprobs=-1) as engine:
        (output,) = engine.generate([5, 6], SamplingParams(max_tokens=2, logprobs=-1, prompt_logprobs=-1, seed=0))
    for position in [*output.outputs[0].logprobs, output.prompt_logprobs[1]]:
        assert len(position) == VOCAB_SIZE
        assert sum(torch.tensor([e.logprob for e in position.values()]).exp()).item() == pytest.approx(1, abs=1e-4)
        assert sorted(e.rank for e in position.values()) == list(range(1, VOCAB_SIZE + 1))


def test_a_prompt_of_one_token_has_no_logprobs(llm: LLM) -> None:
    (output,) = llm.generate([[5]], SamplingParams(max_tokens=1, prompt_logprobs=0, seed=0), use_tqdm=False)
    assert output.prompt_logprobs == [None]


def test_bad_words_never_appear_in_the_text(llm: LLM) -> None:
    params = SamplingParams(max_tokens=60, seed=1, temperature=2.0, bad_words=["e", "th"], ignore_eos=True)
    for output in llm.generate([[5], [6], [7]], params, use_tqdm=False):
        tokens = output.outputs[0].token_ids
        banned = [llm.get_tokenizer().encode(text) for text in ("e", " e", "th", " th")]
        assert not any(tokens[i : i + len(ids)] == ids for ids in banned for i in range(len(tokens)))


CUSTOM: dict[str, Any] = {"logits_processors": ["tests.system.custom_processors.StepBy"]}


def check_custom_processor(engine: LLM, alone: dict[str, Any]) -> None:
    params = [params_of("all", extra_args=None), SamplingParams(max_tokens=4, extra_args={"step_by": 3}, seed=1)]
    plain, stepping = engine.generate([PROMPT, [7]], params, use_tqdm=False)
    assert_same(plain, alone["all"])
    assert stepping.outputs[0].token_ids == [10, 13, 16, 19]


def test_a_logits_processor_of_the_users(llama_dir: Path, alone: dict[str, Any]) -> None:
    with LLM(str(llama_dir), **INPROC, **OPTIONS, **CUSTOM, async_scheduling=True) as engine:
        check_custom_processor(engine, alone)


@pytest.mark.ray
@pytest.mark.usefixtures("ray_cluster")
def test_a_logits_processor_of_the_users_in_worker_actors(llama_dir: Path, alone: dict[str, Any]) -> None:
    with LLM(str(llama_dir), **OPTIONS, **CUSTOM) as engine:
        check_custom_processor(engine, alone)


def test_a_logits_processor_that_does_not_exist_stops_the_start(llama_dir: Path) -> None:
    with pytest.raises(EngineStartupError, match=r"logits_processors names 'no\.such\.Thing'"):
        LLM(str(llama_dir), **INPROC, **OPTIONS, logits_processors=["no.such.Thing"])


def test_aborting_a_request_aborts_all_of_its_completions(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("parent", [5], SamplingParams(n=4, max_tokens=200, temperature=0.0, ignore_eos=True, logprobs=0))
    outputs = engine.step()
    engine.abort_requests(["parent"])
    while engine.has_unfinished_requests():
        outputs += engine.step()
    ended = {o.outputs[0].index: o.outputs[0] for o in outputs if o.outputs[0].finished()}
    assert [ended[index].finish_reason for index in range(4)] == ["abort"] * 4
    assert outputs[-1].finished
    assert all(len(completion.logprobs) == len(completion.token_ids) > 0 for completion in ended.values())
    # Nothing of them is left in the engine.
    assert llm.reset_prefix_cache()


@pytest.mark.parametrize("kind", [RequestOutputKind.DELTA, RequestOutputKind.CUMULATIVE])
@pytest.mark.parametrize("stop", [None, "e"])
@pytest.mark.parametrize("flat", [False, True])
def test_streamed_logprobs_join_to_the_final_ones(
    llm: LLM, kind: RequestOutputKind, stop: str | None, flat: bool
) -> None:
    params = params_of("all", stop=stop, stream_interval=5, flat_logprobs=flat)
    (final,) = llm.generate(PROMPT, params, use_tqdm=False)
    assert isinstance(final.outputs[0].logprobs, FlatLogprobs if flat else list)
    assert isinstance(final.prompt_logprobs, FlatLogprobs if flat else list)
    if flat:
        (other,) = llm.generate(PROMPT, params.clone(flat_logprobs=False), use_tqdm=False)
        assert list(final.outputs[0].logprobs) == other.outputs[0].logprobs
        assert list(final.prompt_logprobs) == [{}, *other.prompt_logprobs[1:]]
        assert list(final.prompt_logprobs[::-2]) == list(final.prompt_logprobs)[::-2]
    engine, outputs = llm.llm_engine, []
    engine.add_request("streamed", PROMPT, params.clone(output_kind=kind))
    while engine.has_unfinished_requests():
        outputs += engine.step()
    counts = [len(o.outputs[0].token_ids) for o in outputs]
    assert [o.prompt_logprobs is not None for o in outputs[1:]] == [kind is RequestOutputKind.CUMULATIVE] * len(
        counts[1:]
    )
    if kind is RequestOutputKind.CUMULATIVE:
        (joined,) = outputs[-1].outputs
        counts = [new - old for old, new in zip([0, *counts], counts, strict=False)]
    else:
        joined = outputs[0].outputs[0]
        whole = outputs[0]
        for output in outputs[1:]:
            whole.merge(output, kind)
        (joined,) = whole.outputs
    assert counts[0] == 1
    assert counts[1:-1] == [5] * len(counts[1:-1])
    expected = final.outputs[0]
    assert (joined.text, joined.token_ids, joined.logprobs) == (expected.text, expected.token_ids, expected.logprobs)
    assert joined.cumulative_logprob == pytest.approx(expected.cumulative_logprob)
    assert outputs[0].prompt_logprobs == final.prompt_logprobs


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logprobs": 21}, "logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"logit_bias": {VOCAB_SIZE: 1.0}}, "logit_bias"),
        ({"allowed_token_ids": [VOCAB_SIZE]}, "allowed_token_ids"),
        ({"logprob_token_ids": [VOCAB_SIZE]}, "logprob_token_ids"),
        ({"bad_words_token_ids": [[1, VOCAB_SIZE]]}, "bad_words_token_ids"),
        ({"stop_token_ids": [VOCAB_SIZE]}, "stop_token_ids"),
        ({"bad_words_token_ids": [[4]], "allowed_token_ids": [4]}, "allowed_token_ids"),
        (
            {"stop_token_ids": [9], "allowed_token_ids": [9, 4], "bad_words_token_ids": [[4]], "min_tokens": 1},
            "allowed",
        ),
        ({"bad_words": [f"{i} word" for i in range(100)]}, "bad_words"),
    ],
)
def test_what_the_model_cannot_do_is_refused(llm: LLM, options: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError, match=field) as error:
        llm.generate([5], SamplingParams(**options), use_tqdm=False)
    assert error.value.field is not None
    assert error.value.field.startswith(field)
