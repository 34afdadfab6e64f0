"""Structured output over HTTP down to the workers: what clients ask for is what the text looks like."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import httpx
import jsonschema
import openai
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from engine_actors.async_llm import AsyncLLM
from engine_actors.serve import ServedModel, ServerSettings
from tests.engine_actors.serve.server import serving
from tests.engine_actors.serve.test_errors import error_of
from tests.fakes import CONFIG, write_model_dir

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["cat", "dog"]}, "age": {"type": "integer", "minimum": 0, "maximum": 30}},
    "required": ["kind", "age"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "pet", "parameters": SCHEMA}}]
CHAT: dict[str, Any] = {
    "model": "llama",
    "messages": [{"role": "user", "content": "A pet?"}],
    "max_tokens": 150,
    "seed": 1,
}


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Iterator[str]:
    folder = write_model_dir(tmp_path_factory.mktemp("models") / "llama")
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**{**CONFIG, "max_position_embeddings": 1024})).save_pretrained(folder)
    llm = AsyncLLM(
        str(folder),
        distributed_executor_backend="uni",
        dtype="float32",
        torch_num_threads=1,
        num_gpu_blocks_override=200,
    )
    try:
        with serving(ServedModel.from_async_llm(llm, ["llama"]), ServerSettings()) as server:
            yield server.url
    finally:
        llm.shutdown(0.0)


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120) as made:
        yield made


def is_valid(text: str | None) -> bool:
    jsonschema.validate(json.loads(text or ""), SCHEMA)
    return True


def test_response_format_json_schema(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA, "strict": True}}
    for seed in range(4):
        answer = client.chat.completions.create(**{**CHAT, "seed": seed}, response_format=form)  # type: ignore[call-overload]
        assert answer.choices[0].finish_reason == "stop"
        assert is_valid(answer.choices[0].message.content)


def test_streamed(client: openai.OpenAI) -> None:
    form = {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}
    chunks = list(client.chat.completions.create(**CHAT, response_format=form, stream=True))  # type: ignore[call-overload]
    assert is_valid("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pet"}}], ids=str)
def test_a_forced_tool_is_called_with_valid_arguments(client: openai.OpenAI, choice: Any) -> None:
    answer = client.chat.completions.create(
        **{**CHAT, "max_tokens": 220}, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False
    )  # type: ignore[call-overload]
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "pet"
    assert is_valid(call.function.arguments)


def test_completions_with_structured_outputs(url: str) -> None:
    body = {
        "model": "llama", "prompt": "Code: ", "max_tokens": 30, "n": 3, "seed": 2,
        "structured_outputs": {"regex": "[A-F]{3}-[0-9]{2}"},
    }  # fmt: skip
    choices = httpx.post(f"{url}/v1/completions", json=body, timeout=120).json()["choices"]
    assert len(choices) == 3
    assert all(re.fullmatch("[A-F]{3}-[0-9]{2}", choice["text"]) for choice in choices)


@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_enforced_is_a_400_with_the_requests_own_field(url: str, stream: bool) -> None:
    schema = {"not": {"type": "null"}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    response = httpx.post(
        f"{url}/v1/chat/completions", json={**CHAT, "response_format": form, "stream": stream}, timeout=120
    )
    error = error_of(response, 400)
    assert error["param"] == "response_format"
    assert "'not' cannot be enforced" in error["message"]
