"""LLM and LLMEngine over an EngineCore in this process."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from engine_actors.config import EngineConfig
from engine_actors.errors import EngineDeadError, EngineStartupError, InvalidRequestError
from engine_actors.llm import LLM
from engine_actors.llm_engine import LLMEngine
from scheduler.sampling_params import RequestOutputKind, SamplingParams
from tests.fakes import EOS, FakeExecutor, expected_tokens

GREEDY = SamplingParams(temperature=0.0, max_tokens=20)
MakeConfig = Callable[..., EngineConfig]


def generate(llm: LLM, prompts: Any, params: Any = GREEDY, **options: Any) -> list[Any]:
    return llm.generate(prompts, params, use_tqdm=False, **options)


def tokens_of(outputs: list[Any]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    # The first prompt has the longest way to go.
    prompts: list[Any] = [[5], "The fox", {"prompt_token_ids": [6, 7]}, (8, 9)]
    params = [GREEDY.clone(max_tokens=n) for n in (40, 3, 2, 1)]
    outputs = generate(llm, prompts, params)
    assert [len(tokens) for tokens in tokens_of(outputs)] == [40, 3, 2, 1]
    assert tokens_of(outputs)[0] == expected_tokens([5], 40)
    assert tokens_of(outputs)[2] == expected_tokens([6, 7], 2)
    assert [output.prompt for output in outputs] == [None, "The fox", None, None]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_one_prompt_is_a_list_of_one_and_no_prompts_are_none(llm: LLM) -> None:
    assert tokens_of(generate(llm, [5, 6])) == [expected_tokens([5, 6], 20)]
    assert len(generate(llm, "text")) == 1
    assert generate(llm, []) == []


def test_final_text_is_what_decoding_the_tokens_gives(llm: LLM) -> None:
    for output in generate(llm, [[i, 5] for i in range(5, 40)]):
        (completion,) = output.outputs
        assert completion.text == llm.get_tokenizer().decode(completion.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize(
    ("prompts", "params", "field", "text"),
    [
        ([[5], [600]], GREEDY, "prompt", "token id 600"),
        ([[5], [6]], [GREEDY], "sampling_params", "holds 1 values for 2 prompts"),
        ([[5], [6]], [], "sampling_params", "holds 0 values for 2 prompts"),
        ([[5], [6]], [GREEDY, "hot"], "sampling_params", "must be SamplingParams or None, got str"),
        ([5, 6], {"temperature": 0}, "sampling_params", "must be SamplingParams or None, got dict"),
    ],
    ids=str,
)
def test_wrong_batch_queues_nothing_and_the_engine_goes_on(
    llm: LLM, prompts: Any, params: Any, field: str, text: str
) -> None:
    with pytest.raises(InvalidRequestError, match=text) as raised:
        generate(llm, prompts, params)
    assert raised.value.field == field
    assert not llm.llm_engine.has_unfinished_requests()
    assert tokens_of(generate(llm, [[5]])) == [expected_tokens([5], 20)]


def test_chat_takes_one_conversation_or_several(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Hi"}]
    (one,) = llm.chat(conversation, GREEDY, use_tqdm=False)
    several = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in several] == [one.outputs[0].text] * 2
    assert one.prompt == "<user>Hi\n<assistant>"


def test_n_completions_come_back_together_by_index(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=9, max_tokens=5)
    (output,) = generate(llm, [[5]], params)
    assert [completion.index for completion in output.outputs] == [0, 1, 2]
    assert output.outputs[0].token_ids == expected_tokens([5], 5, seed=9, greedy=False)
    assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
    assert generate(llm, [[5]], params)[0].outputs == output.outputs


def test_seeded_request_is_the_same_alone_and_beside_others(llm: LLM) -> None:
    seeded = SamplingParams(seed=11, max_tokens=20)
    alone = tokens_of(generate(llm, [[5]], seeded))
    assert alone == [expected_tokens([5], 20, seed=11, greedy=False)]
    others = [SamplingParams(max_tokens=20)] * 9
    assert tokens_of(generate(llm, [[i] for i in range(6, 15)] + [[5]], [*others, seeded]))[-1:] == alone


def test_end_of_sequence_and_stop_tokens_end_the_text(llm: LLM) -> None:
    tokens = expected_tokens([5], 20)
    (output,) = generate(llm, [[5]], GREEDY.clone(stop_token_ids=[tokens[4]]))
    (completion,) = output.outputs
    first = tokens.index(tokens[4])
    assert completion.token_ids == tokens[: first + 1]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", tokens[4])
    assert completion.text == llm.get_tokenizer().decode(tokens[:first])
    (shown,) = generate(llm, [[5]], GREEDY.clone(stop_token_ids=[tokens[4]], include_stop_str_in_output=True))
    assert shown.outputs[0].text == llm.get_tokenizer().decode(tokens[: first + 1])
    assert EOS not in tokens


def test_stop_string_ends_text_and_request(llm: LLM) -> None:
    (whole,) = generate(llm, [[5]], GREEDY.clone(max_tokens=60))
    text = whole.outputs[0].text
    stop = text[10:13]
    (output,) = generate(llm, [[5]], GREEDY.clone(max_tokens=60, stop=[stop]))
    (completion,) = output.outputs
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert len(completion.token_ids) < 60
    assert generate(llm, [[5]], GREEDY)[0].outputs[0].token_ids == expected_tokens([5], 20)
    assert llm.reset_prefix_cache()  # the stopped request holds no blocks any more


def test_detokenize_false_gives_tokens_alone(llm: LLM) -> None:
    (output,) = generate(llm, [[5]], GREEDY.clone(detokenize=False))
    assert (output.outputs[0].text, output.outputs[0].token_ids) == ("", expected_tokens([5], 20))


def test_metrics_tell_when_what_happened(llm: LLM) -> None:
    (output,) = generate(llm, [[5] * 40])
    metrics = output.metrics
    assert metrics.num_generation_tokens == 20
    assert 0 < metrics.queued_ts <= metrics.scheduled_ts <= metrics.first_token_ts <= metrics.last_token_ts
    assert metrics.first_token_latency > 0
    assert output.num_cached_tokens == 0
    assert generate(llm, [[5] * 40])[0].num_cached_tokens == 32


def test_request_that_can_never_fit_raises_and_the_engine_goes_on(fake_config: MakeConfig) -> None:
    engine = LLMEngine(fake_config(engine_core="inproc", max_model_len=-1, num_gpu_blocks_override=5))
    assert engine.client.info.max_model_len == 64
    with pytest.raises(InvalidRequestError, match="maximum context length is 64 tokens"):
        engine.add_request("a", [5] * 70, GREEDY)
    engine.shutdown()


def test_long_queue_is_fed_as_the_limit_allows(fake_model_dir: Path) -> None:
    options: dict[str, Any] = {"engine_core": "inproc", "executor_class": FakeExecutor}
    with LLM(str(fake_model_dir), max_num_seqs=2, max_num_queued_requests=3, **options) as llm:
        prompts = [[5, i] for i in range(20)]
        assert tokens_of(generate(llm, prompts)) == [expected_tokens(prompt, 20) for prompt in prompts]


@pytest.mark.parametrize("async_scheduling", [False, True])
def test_batch_queue_gives_the_same_tokens(fake_model_dir: Path, async_scheduling: bool) -> None:
    options: dict[str, Any] = {"engine_core": "inproc", "executor_class": FakeExecutor}
    with LLM(str(fake_model_dir), async_scheduling=async_scheduling, max_num_batched_tokens=32, **options) as llm:
        prompts = [[5 + i] * (7 * i + 1) for i in range(20)]
        assert tokens_of(generate(llm, prompts)) == [expected_tokens(prompt, 20) for prompt in prompts]


def test_interrupt_aborts_what_is_in_flight_and_the_next_call_is_clean(fake_model_dir: Path) -> None:
    executor = partial(FakeExecutor, step_s=0.005)
    with LLM(str(fake_model_dir), engine_core="inproc", executor_class=executor) as llm:
        timer = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [[5], [6]], GREEDY.clone(max_tokens=250))
        assert not llm.llm_engine.has_unfinished_requests()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert tokens_of(generate(llm, [[7]])) == [expected_tokens([7], 20)]


def test_failing_worker_ends_this_and_later_calls_with_its_text(fake_model_dir: Path) -> None:
    executor = partial(FakeExecutor, fail_at_step=2)
    llm = LLM(str(fake_model_dir), engine_core="inproc", executor_class=executor)
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="worker rank 0 failed in step 2: boom"):
            generate(llm, [[5]])
    with pytest.raises(EngineDeadError, match="boom"):
        llm.reset_prefix_cache()
    llm.shutdown()


def test_failing_start_has_the_root_cause(fake_model_dir: Path) -> None:
    executor = partial(FakeExecutor, startup_error=ValueError("weights are truncated"))
    with pytest.raises(EngineStartupError, match="weights are truncated"):
        LLM(str(fake_model_dir), engine_core="inproc", executor_class=executor)


def test_shutdown_may_be_repeated_and_is_final(fake_model_dir: Path) -> None:
    llm = LLM(str(fake_model_dir), engine_core="inproc", executor_class=FakeExecutor)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDeadError, match="shut down"):
        generate(llm, [[5]])


def test_utilities_reach_the_worker(llm: LLM) -> None:
    assert llm.collective_rpc("echo", args=("x",)) == ["x"]
    assert llm.collective_rpc(lambda worker, n: worker.echo(n + 1), args=(1,)) == [2]
    llm.llm_engine.check_health()


def test_engine_steps_give_cumulative_and_new_outputs(llm: LLM) -> None:
    engine = llm.llm_engine
    expected = expected_tokens([5], 4)
    engine.add_request("all", [5], GREEDY.clone(max_tokens=4))
    engine.add_request("new", [5], GREEDY.clone(max_tokens=4, output_kind=RequestOutputKind.DELTA))
    with pytest.raises(InvalidRequestError, match="request_id 'all' is in use"):
        engine.add_request("all", [5], GREEDY)
    seen: dict[str, list[list[int]]] = {"all": [], "new": []}
    while engine.has_unfinished_requests():
        for output in engine.step():
            seen[output.request_id].append(output.outputs[0].token_ids)
    assert seen["all"] == [expected[: n + 1] for n in range(4)]
    assert seen["new"] == [[token] for token in expected]
    assert engine.step() == []


def test_aborted_request_ends_with_that_reason(llm: LLM) -> None:
    engine = llm.llm_engine
    engine.add_request("a", [5], SamplingParams(n=2, temperature=0.0, max_tokens=50))
    engine.step()
    engine.abort_requests(["a", "unknown"])
    finished = []
    while engine.has_unfinished_requests():
        finished += [output for output in engine.step() if output.outputs[0].finish_reason]
    assert [output.outputs[0].finish_reason for output in finished] == ["abort", "abort"]
    assert [output.finished for output in finished] == [False, True]


def test_enqueued_prompts_run_when_their_completion_is_waited_for(llm: LLM) -> None:
    ids = llm.enqueue([[5], [6, 7]], GREEDY.clone(max_tokens=3))
    ids += llm.enqueue("The fox", GREEDY.clone(max_tokens=2))
    assert tokens_of(generate(llm, [9])) == [expected_tokens([9], 20)]
    outputs = llm.wait_for_completion(use_tqdm=False)
    assert [output.request_id for output in outputs] == ids
    assert tokens_of(outputs)[:2] == [expected_tokens([5], 3), expected_tokens([6, 7], 3)]
    assert llm.wait_for_completion(use_tqdm=False) == []
    with pytest.raises(InvalidRequestError, match="token id 600"):
        llm.enqueue([[5], [600]], GREEDY)
    assert llm.wait_for_completion(use_tqdm=False) == []


def test_tokenization_arguments_reach_the_tokenizer(llm: LLM) -> None:
    text = "The quick brown fox jumps over the lazy dog"
    (whole,) = generate(llm, text)
    (cut,) = generate(llm, text, tokenization_kwargs={"truncation": True, "max_length": 3})
    assert cut.prompt_token_ids == whole.prompt_token_ids[:3]
    with pytest.raises(InvalidRequestError, match="tokenization_kwargs must be arguments") as raised:
        generate(llm, text, tokenization_kwargs={"max_length": "three", "truncation": True})
    assert raised.value.field == "tokenization_kwargs"


def test_metrics_count_what_was_generated(llm: LLM) -> None:
    def values() -> dict[tuple[str, str | None], Any]:
        return {(metric.name, metric.labels.get("finished_reason")): metric for metric in llm.get_metrics()}

    before = values()
    generate(llm, [[5, 6, 7], [8, 9]], GREEDY.clone(max_tokens=4))
    after = values()

    def grown(name: str, field: str = "value", reason: str | None = None) -> Any:
        return getattr(after[name, reason], field) - getattr(before[name, reason], field)

    assert grown("vllm:prompt_tokens") == 5
    assert grown("vllm:generation_tokens") == 8
    assert grown("vllm:request_success", reason="length") == 2
    assert grown("vllm:request_success", reason="stop") == 0
    assert grown("vllm:time_to_first_token_seconds", "count") == 2
    assert grown("vllm:request_generation_tokens", "sum") == 8
    assert after["vllm:request_generation_tokens", None].buckets["5.0"] >= 2
    assert after["vllm:num_requests_running", None].value == 0
    assert all(metric.labels["engine"] == "0" for metric in after.values())


def test_what_the_engine_is_made_of(llm: LLM) -> None:
    assert llm.get_world_size() == 1
    assert llm.model_config.model == llm.llm_engine.config.model_config.model
