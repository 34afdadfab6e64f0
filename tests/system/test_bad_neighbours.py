"""One bad request beside seven good streams: it is refused or fails alone, and theirs are what they are without it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from engine_actors import AsyncLLM, RequestOutputKind, SamplingParams
from engine_actors.detokenizer import Detokenizer
from engine_actors.errors import InvalidRequestError, RequestFailedError
from scheduler.structured_params import StructuredOutputsParams
from tests.engine_actors.bad_forms import BAD_FORMS, EXPLOSIVE_FORMS
from tests.fakes import VOCAB_SIZE
from tests.scheduler.test_sampling_params import WRONG

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]
NUM_TOKENS = 60
BASE: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True, "output_kind": RequestOutputKind.DELTA}
GOOD: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9, "seed": 1, "top_p": 0.9},
    {"temperature": 1.0, "seed": 2, "logprobs": 2, "prompt_logprobs": 1},
    {"temperature": 1.0, "seed": 3, "structured_outputs": {"regex": "[a-f ]{55}"}},
    {"temperature": 1.0, "seed": 4, "structured_outputs": {"json": {"type": "array", "minItems": 60}}},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.4, "bad_words": ["e"]},
    {"temperature": 1.0, "seed": 6, "stop": ["no such text"], "logit_bias": {40: 3.0}, "min_tokens": 5},
]
PROMPTS = [[(31 * i + j) % 500 + 2 for i in range(20 + 5 * j)] for j in range(len(GOOD))]
TOO_LARGE = [
    {"stop_token_ids": [VOCAB_SIZE]}, {"allowed_token_ids": [VOCAB_SIZE]}, {"logit_bias": {VOCAB_SIZE: 1.0}},
    {"bad_words_token_ids": [[VOCAB_SIZE]]}, {"logprobs": 21}, {"prompt_logprobs": 21}, {"logprobs": VOCAB_SIZE + 1},
    {"bad_words": [f"{i} word" for i in range(100)]}, {"allowed_token_ids": [4], "bad_words_token_ids": [[4]]},
]  # fmt: skip

Run = Callable[[Callable[[], Awaitable[None]]], Awaitable[None]]


@pytest.fixture(scope="module")
def engine(random_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory, ray_cluster: None) -> Any:
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    folder = tmp_path_factory.mktemp("models") / "with-eos"
    folder.mkdir()
    for file in random_llama_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    engine = AsyncLLM(
        str(folder), distributed_executor_backend="uni", dtype="float32", torch_num_threads=1, max_num_seqs=16,
        num_gpu_blocks_override=300,
    )  # fmt: skip
    yield engine
    engine.shutdown(0.0)


async def stream(engine: AsyncLLM, index: int, started: asyncio.Event) -> tuple[str, list[int], str | None]:
    text, tokens, reason = "", [], None
    async for output in engine.generate(PROMPTS[index], SamplingParams(**{**BASE, **GOOD[index]})):
        completion = output.outputs[0]
        text, tokens, reason = text + completion.text, tokens + completion.token_ids, completion.finish_reason
        started.set()
    return text, tokens, reason


async def good_streams(engine: AsyncLLM, bad: Callable[[], Awaitable[None]] | None = None) -> list[Any]:
    """The seven results; `bad` begins when all of them have begun, and all of them go on to their ends."""
    started = [asyncio.Event() for _ in GOOD]
    tasks = [asyncio.create_task(stream(engine, index, event)) for index, event in enumerate(started)]
    for event in started:
        await event.wait()
    if bad is not None:
        await bad()
    return await asyncio.gather(*tasks)


@pytest.fixture
async def check(engine: AsyncLLM) -> Run:
    """Run something bad beside the streams, and see that they are as in a clean run."""
    if not hasattr(engine, "clean_run"):
        engine.clean_run = await good_streams(engine)  # type: ignore[attr-defined]

    async def check(bad: Callable[[], Awaitable[None]]) -> None:
        assert await good_streams(engine, bad) == engine.clean_run  # type: ignore[attr-defined]
        assert engine.output_processor.num_unfinished == 0

    return check


async def first_output(engine: AsyncLLM, params: SamplingParams) -> Any:
    return await anext(engine.generate([5, 6], params))


async def test_every_invalid_value_of_every_field_is_refused(engine: AsyncLLM, check: Run) -> None:
    fields = set(SamplingParams.__struct_fields__)
    assert {field for field, _ in WRONG} == fields, "every field has invalid values"

    async def bad() -> None:
        for field, value in WRONG:
            params = SamplingParams()
            setattr(params, field, value)  # As a caller may change it after construction.
            with pytest.raises(InvalidRequestError) as caught:
                await first_output(engine, params)
            assert caught.value.field == field, str(caught.value)
        for options in TOO_LARGE:
            with pytest.raises(InvalidRequestError, match="|".join(options)):
                await first_output(engine, SamplingParams(**options))

    await check(bad)


async def test_malformed_and_endless_forms_are_refused(engine: AsyncLLM, check: Run) -> None:
    async def bad() -> None:
        for form in BAD_FORMS.values():
            with pytest.raises(ValueError, match="structured_outputs"):
                await first_output(engine, SamplingParams(structured_outputs=form))

    await check(bad)


@pytest.mark.parametrize("name", EXPLOSIVE_FORMS)
async def test_explosive_forms_harm_nobody_else(engine: AsyncLLM, check: Run, name: str) -> None:
    async def bad() -> None:
        params = SamplingParams(
            max_tokens=20, seed=1, structured_outputs=StructuredOutputsParams(**EXPLOSIVE_FORMS[name])
        )
        results = await asyncio.gather(engine.generate_all([[5, 6]], params), return_exceptions=True)
        if isinstance(results[0], BaseException):
            assert isinstance(results[0], (InvalidRequestError, RequestFailedError))
            assert "structured_outputs" in str(results[0])
        else:
            assert results[0][0].outputs[0].finish_reason in ("length", "stop")

    await check(bad)


async def test_a_fault_in_the_detokeniser_ends_its_request_alone(
    engine: AsyncLLM, check: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def bad() -> None:
        push, calls = Detokenizer.push, 0

        def faulty(self: Detokenizer, token_ids: Any) -> int:
            nonlocal calls
            if self is victim:
                calls += 1
                if calls == 3:
                    raise ZeroDivisionError("injected")
            return push(self, token_ids)

        request = await engine.add_request([5, 6], SamplingParams(**BASE, temperature=0.0), "victim")
        (child,) = engine.output_processor.take_children(["victim"])
        victim = engine.output_processor._states[child].detokenizer
        with monkeypatch.context() as patch:
            patch.setattr(Detokenizer, "push", faulty)
            with pytest.raises(RequestFailedError, match="injected"):
                async for _ in request:
                    pass
        assert calls == 3

    await check(bad)


async def test_a_request_that_leaves_itself_no_token_fails_alone(engine: AsyncLLM, check: Run) -> None:
    async def bad() -> None:
        params = SamplingParams(
            structured_outputs={"regex": "[a-c]+[0-9]"}, bad_words_token_ids=[[i] for i in range(60, 120)]
        )
        with pytest.raises(RequestFailedError, match="no token is left to sample"):
            await engine.generate_all([[5, 6]], params)

    await check(bad)
