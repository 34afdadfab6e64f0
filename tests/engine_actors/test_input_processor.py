"""What is wrong with a request is found before it reaches the engine, and said by field, value and limit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engine_actors.config import EngineConfig
from engine_actors.errors import InvalidRequestError
from engine_actors.input_processor import InputProcessor, load_tokenizer
from scheduler.output import unpack_int32
from scheduler.sampling_params import SamplingParams, TokenColumns
from tests.fakes import EOS, write_model_dir


def processor(folder: Path, **options: Any) -> InputProcessor:
    config = EngineConfig.from_kwargs(str(folder), **options)
    return InputProcessor(config, load_tokenizer(config), max_model_len=64)


@pytest.fixture(scope="module")
def inputs(fake_model_dir: Path) -> InputProcessor:
    return processor(fake_model_dir)


def ids_of(request: Any) -> list[int]:
    return list(unpack_int32(request.children[0].prompt_token_ids))


@pytest.mark.parametrize(
    "prompt", [[5, 6, 7], (5, 6, 7), np.array([5, 6, 7]), {"prompt_token_ids": [5, 6, 7]}], ids=str
)
def test_token_ids_are_taken_in_any_form(inputs: InputProcessor, prompt: Any) -> None:
    request = inputs.process("a", prompt)
    assert ids_of(request) == request.parent.prompt_token_ids == [5, 6, 7]
    assert request.parent.prompt is None


def test_text_is_tokenised_alone_and_in_a_batch_alike(inputs: InputProcessor) -> None:
    expected = inputs.tokenizer("The quick fox").input_ids
    alone = inputs.process("a", {"prompt": "The quick fox", "cache_salt": "tenant"})
    assert ids_of(alone) == expected
    assert alone.children[0].cache_salt == "tenant"
    batch = inputs.process_batch(["a", "b", "c"], ["The quick fox", [5], "x"], [None] * 3, [0] * 3)
    assert ids_of(batch[0]) == expected
    assert batch[0].parent.prompt == "The quick fox"
    assert ids_of(batch[1]) == [5]


@pytest.mark.parametrize(
    ("prompt", "field", "text"),
    [
        ("", "prompt", "prompt is empty"),
        ([], "prompt", "prompt is empty"),
        ({"prompt": ""}, "prompt", "prompt is empty"),
        ({}, "prompt", 'needs "prompt" or "prompt_token_ids"'),
        ({"promt": "x"}, "prompt", "unknown prompt key 'promt'; allowed are prompt, prompt_token_ids, cache_salt"),
        ({"prompt": 3}, "prompt", "prompt must be a string, got int"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt", "cache_salt must be a string of 1 to 128"),
        (None, "prompt", "must be a string, a list of token ids or a dictionary, got NoneType"),
        (b"bytes", "prompt", "got bytes"),
        (3.5, "prompt", "got float"),
        ([5, "x"], "prompt", "token ids must be integers, got str"),
        ([5, 1.0], "prompt", "token ids must be integers, got float"),
        ([5, True], "prompt", "token ids must be integers, got bool"),
        ([5, 512], "prompt", "token id 512; the model's vocabulary is 0 to 511"),
        ("half \ud800 a pair", "prompt", "half of a surrogate pair"),
        ({"prompt": "\ud800"}, "prompt", "half of a surrogate pair"),
        ({"prompt": "x", "cache_salt": "\ud800"}, "cache_salt", "cache_salt must be a string of 1 to 128"),
        ([5, -1], "prompt", "token id -1; the model's vocabulary is 0 to 511"),
        ([5, 2**40], "prompt", f"token id {2**40}; the model's vocabulary"),
        ([5] * 64, "prompt", "This model's maximum context length is 64 tokens. However, the prompt has 64 tokens"),
    ],
    ids=str,
)
def test_wrong_prompts_are_refused(inputs: InputProcessor, prompt: Any, field: str, text: str) -> None:
    with pytest.raises(InvalidRequestError, match=text) as raised:
        inputs.process("a", prompt)
    assert raised.value.field == field


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"params": {"temperature": 0}}, "sampling_params"),
        ({"params": SamplingParams(stop_token_ids=[512])}, "stop_token_ids"),
        ({"priority": "high"}, "priority"),
        ({"priority": True}, "priority"),
        ({"priority": 2**63}, "priority"),
        ({"request_id": "\ud800"}, "request_id"),
        ({"params": SamplingParams(structured_outputs={"regex": "(a"})}, "structured_outputs"),
        ({"params": SamplingParams(token_columns=TokenColumns())}, "token_columns"),
        ({"request_id": ""}, "request_id"),
        ({"request_id": 7}, "request_id"),
    ],
    ids=str,
)
def test_wrong_parameters_are_refused(inputs: InputProcessor, arguments: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        inputs.process(**{"request_id": "a", "prompt": [5], **arguments})
    assert raised.value.field == field


def test_parameters_changed_after_construction_are_checked_again(inputs: InputProcessor) -> None:
    params = SamplingParams()
    params.temperature = -1.0
    with pytest.raises(InvalidRequestError, match="temperature") as raised:
        inputs.process("a", [5], params)
    assert raised.value.field == "temperature"


def test_max_tokens_is_clamped_to_the_rest_of_the_context(inputs: InputProcessor) -> None:
    def sent(**params: Any) -> SamplingParams:
        return inputs.process("a", [5] * 60, SamplingParams(**params)).children[0].sampling_params

    assert sent(max_tokens=None).max_tokens == 4
    assert sent(max_tokens=100).max_tokens == 4
    assert sent(max_tokens=3).max_tokens == 3
    assert sent(max_tokens=100, min_tokens=50).min_tokens == 4


def test_every_request_has_a_seed_and_equal_engines_give_equal_ones(fake_model_dir: Path) -> None:
    def seeds(**options: Any) -> list[Any]:
        inputs = processor(fake_model_dir, **options)
        return [inputs.process("a", [5]).children[0].sampling_params.seed for _ in range(3)]

    assert len(set(seeds())) == 3
    assert seeds() == seeds()
    assert seeds(seed=1) != seeds()
    other = InputProcessor(EngineConfig.from_kwargs(str(fake_model_dir)), None, 64, client_index=1)
    assert other.process("a", [5]).children[0].sampling_params.seed not in seeds()


def test_n_completions_are_requests_of_their_own_with_seeds_of_their_own(inputs: InputProcessor) -> None:
    request = inputs.process("a", [5], SamplingParams(n=4, seed=3))
    seeds = [child.sampling_params.seed for child in request.children]
    assert seeds[0] == 3
    assert len(set(seeds)) == 4
    assert [child.sampling_params.n for child in request.children] == [1] * 4
    assert len({child.request_id for child in request.children}) == 4
    again = inputs.process("a", [5], SamplingParams(n=4, seed=3))
    assert [child.sampling_params.seed for child in again.children] == seeds
    # Ids of the engine are never used twice, so late outputs of an old request cannot reach a new one.
    assert {child.request_id for child in again.children}.isdisjoint(child.request_id for child in request.children)


def test_defaults_and_end_tokens_come_from_generation_config_unless_told_otherwise(tmp_path: Path) -> None:
    values = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "max_new_tokens": 99, "eos_token_id": [7, 8]}
    folder = write_model_dir(tmp_path / "model", generation_config=values)
    auto = processor(folder)
    defaults = auto.default_sampling_params()
    assert (defaults.temperature, defaults.top_k, defaults.top_p, defaults.max_tokens) == (0.6, 20, 0.95, 99)
    assert auto.process("a", [5]).children[0].eos_token_ids == [7, 8, EOS]
    plain = processor(folder, generation_config="vllm")
    assert plain.default_sampling_params() == SamplingParams()
    assert plain.process("a", [5]).children[0].eos_token_ids == [EOS]


def test_unusable_generation_config_is_named(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path / "model", generation_config={"temperature": -3})
    with pytest.raises(ValueError, match=r"generation_config\.json holds unusable defaults: temperature"):
        processor(folder)


def test_without_a_tokenizer_text_is_refused_and_ids_work(fake_model_dir: Path) -> None:
    inputs = processor(fake_model_dir, skip_tokenizer_init=True)
    assert ids_of(inputs.process("a", [5])) == [5]
    for arguments in ({"prompt": "x"}, {"prompt": [5], "params": SamplingParams(stop=["x"])}):
        with pytest.raises(InvalidRequestError, match=r"needs? a tokenizer, but skip_tokenizer_init is set"):
            inputs.process("a", **arguments)


def test_folder_without_a_tokenizer_is_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = write_model_dir(tmp_path / "model")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ValueError, match="skip_tokenizer_init=True"):
        processor(folder)


def test_chat_uses_the_models_template(inputs: InputProcessor) -> None:
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": [{"type": "text", "text": "U"}]}]
    assert inputs.render_chat(messages) == "<system>S\n<user>U\n<assistant>"
    assert inputs.render_chat(messages, add_generation_prompt=False) == "<system>S\n<user>U\n"
    assert inputs.render_chat(messages, chat_template="{{ messages[0]['content'] }}") == "S"
    parts = "{% for part in messages[0]['content'] %}{{ part['type'] }}:{{ part['text'] }}{% endfor %}"
    assert inputs.render_chat(messages, chat_template=parts, content_format="openai") == "text:S"


@pytest.mark.parametrize(
    ("messages", "options", "field"),
    [
        ([], {}, "messages"),
        ("hi", {}, "messages"),
        ([{"content": "x"}], {}, "messages"),
        (["x"], {}, "messages"),
        ([{"role": "user", "content": 3}], {}, "messages"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], {}, "messages"),
        ([{"role": "user", "content": "x"}], {"chat_template": "{{ raise_exception('no') }}"}, "messages"),
        ([{"role": "user", "content": "x"}], {"content_format": "html"}, "chat_template_content_format"),
        ([{"role": "user", "content": "x"}], {"continue_final_message": True}, "continue_final_message"),
    ],
    ids=str,
)
def test_wrong_conversations_are_refused(
    inputs: InputProcessor, messages: Any, options: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        inputs.render_chat(messages, **options)
    assert raised.value.field == field


def test_model_without_a_chat_template_says_so(tmp_path: Path) -> None:
    inputs = processor(write_model_dir(tmp_path / "model", chat_template=False))
    with pytest.raises(InvalidRequestError, match="has no chat template"):
        inputs.render_chat([{"role": "user", "content": "x"}])
