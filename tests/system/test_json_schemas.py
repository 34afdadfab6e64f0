"""SmolLM2 writes JSON by schemas of realistic size: whenever a text stops, json and jsonschema accept it."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from engine_actors import LLM, SamplingParams
from tests.engine_actors.structured_schemas import REALISTIC

pytestmark = pytest.mark.model

NUM_REQUESTS = 200
STYLES: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.1},
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.0, "compact": True},
    {"temperature": 1.0, "top_k": 50, "presence_penalty": 0.5},
    {"temperature": 1.3, "min_p": 0.02, "logprobs": 2},
]
TASKS = ["Give an example of this.", "Fill this form for a customer.", "Invent some data.", "Answer in JSON.", "Go."]
SAMPLE = [
    "person_with_address",
    "discriminated",
    "formats",
    "numbers",
    "pydantic_style",
    "arrays",
    "tool_call",
    "enum_only",
]


@pytest.fixture(scope="module")
def llm(smollm2_dir: Path) -> Iterator[LLM]:
    with LLM(
        str(smollm2_dir), engine_core="inproc", distributed_executor_backend="uni", max_model_len=2048,
        kv_cache_memory_bytes=512 * 2**20, max_num_seqs=32,
    ) as engine:  # fmt: skip
        yield engine


def request(llm: LLM, index: int, name: str, max_tokens: int) -> tuple[str, SamplingParams]:
    schema = REALISTIC[name]
    style = dict(STYLES[index % len(STYLES)])
    form = {"json": schema, "disable_any_whitespace": style.pop("compact", False)}
    text = f"{TASKS[index % len(TASKS)]} The JSON schema: {json.dumps(schema)[:2000]}"
    prompt = llm.llm_engine.input_processor.render_chat([{"role": "user", "content": text}])
    return prompt, SamplingParams(seed=index, max_tokens=max_tokens, structured_outputs=form, **style)


def error_of(schema: dict[str, Any], text: str) -> str | None:
    is_old = "exclusiveMinimum" in schema or isinstance(schema.get("items"), list)
    kind = jsonschema.Draft4Validator if is_old else jsonschema.Draft202012Validator
    try:
        error = next(kind(schema, format_checker=kind.FORMAT_CHECKER).iter_errors(json.loads(text)), None)
    except ValueError as invalid:
        return str(invalid)
    return None if error is None else error.message


def check(llm: LLM, names: list[str], max_tokens: int, start: int = 0) -> Counter[str]:
    """Run one request for each name. Finish reasons, of texts that are all valid."""
    prompts, params = zip(*(request(llm, start + i, name, max_tokens) for i, name in enumerate(names)), strict=True)
    reasons: Counter[str] = Counter()
    for name, output in zip(names, llm.generate(list(prompts), list(params), use_tqdm=False), strict=True):
        completion = output.outputs[0]
        reasons[str(completion.finish_reason)] += 1
        if completion.finish_reason == "stop":
            assert (error := error_of(REALISTIC[name], completion.text)) is None, (
                f"{name}: {completion.text!r}: {error}"
            )
    return reasons


def test_a_sample_of_schemas_is_valid(llm: LLM) -> None:
    reasons = check(llm, SAMPLE, 120)
    assert reasons["stop"] >= len(SAMPLE) // 2
    assert set(reasons) <= {"stop", "length"}


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_two_hundred_requests_are_valid(llm: LLM) -> None:
    names = list(itertools.islice(itertools.cycle(REALISTIC), NUM_REQUESTS))
    reasons: Counter[str] = Counter()
    for start in range(0, NUM_REQUESTS, 40):
        reasons += check(llm, names[start : start + 40], 600, start)
        print(f"{reasons.total()} requests over {len(REALISTIC)} schemas ended with {dict(reasons)}", flush=True)
    assert set(reasons) <= {"stop", "length"}
    assert reasons["stop"] >= 0.9 * NUM_REQUESTS
