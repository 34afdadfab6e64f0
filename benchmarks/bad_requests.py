"""Requests that go wrong, or ask for a lot, for `benchmarks/neighbours.py`: how to send one of each kind."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from engine_actors import AsyncLLM, EngineDeadError, RequestOutputKind, SamplingParams

Send = Callable[[AsyncLLM, int], Awaitable[None]]
"""Sends the i-th request of a kind (no two are equal); returns when it has been refused, has failed or has ended."""

PROMPT = [5, 6]
COMMON: dict[str, Any] = {"seed": 0, "ignore_eos": True, "max_tokens": 20}


def asking(params: Callable[[int], dict[str, Any]]) -> Send:
    """A kind that is bad by its sampling parameters."""

    async def send(engine: AsyncLLM, index: int) -> None:
        try:
            await engine.generate_all([PROMPT], SamplingParams(**{**COMMON, **params(index)}))
        except EngineDeadError:
            raise
        except (ValueError, RuntimeError):  # Refused, or failed alone.
            pass

    return send


async def send_with_faulty_detokenizer(engine: AsyncLLM, index: int) -> None:
    """A request whose detokenizer raises at its third token."""
    name = f"faulty-{index}"
    params = SamplingParams(**COMMON, output_kind=RequestOutputKind.DELTA)
    stream = await engine.add_request(PROMPT, params, name)
    (child,) = engine.output_processor.take_children([name])
    detokenizer: Any = engine.output_processor._states[child].detokenizer
    push, num_calls = detokenizer.push, 0

    def faulty(token_ids: Any) -> int:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 3:
            raise ZeroDivisionError("injected")
        return int(push(token_ids))

    detokenizer.push = faulty
    try:
        async for _ in stream:
            pass
    except EngineDeadError:
        raise
    except RuntimeError:
        return
    raise RuntimeError("the fault in the detokenizer did not end its request")


def form(**kinds: Any) -> dict[str, Any]:
    return {"structured_outputs": kinds, "ignore_eos": False}


def many(index: int, count: int) -> range:
    """Token ids, others for each index."""
    return range(100 + index, 100 + index + count)


PLAIN = asking(lambda i: {"temperature": 0.8, "seed": i})
CONTROL = "another plain one"
"""Not bad at all: what the comparison says of it is noise."""

BAD: dict[str, Send] = {
    CONTROL: PLAIN,
    "wrong value": asking(lambda i: {"logprobs": 1000 + i}),
    "malformed form": asking(lambda i: form(regex=f"(a{i}")),
    "exponential schema": asking(lambda i: form(json={"allOf": [{"anyOf": [
        {"type": "object", "properties": {f"p{i}_{option}": {"const": option}}} for option in range(12)
    ]}] * 12})),
    "exponential regex": asking(lambda i: form(regex=f"(a|b)*a(a|b){{{40 + i}}}")),
    "huge regex": asking(lambda i: form(regex="|".join(f"{i}x{number}" for number in range(900)))),
    "nested repeats": asking(lambda i: form(regex=f"((a{{1,{900 + i}}}){{1,900}}){{1,900}}")),
    "ambiguous grammar": asking(lambda i: form(grammar=f'root ::= p p p p "{i}"\np ::= ("a" | "aa" | p p)*')),
    "wide grammar": asking(lambda i: form(grammar="root ::= " + "r? " * 300 + f'"{i}"\nr ::= "a"+')),
    "large arrays": asking(lambda i: form(
        json={"type": "array", "minItems": 5000 + i, "items": {"type": "string", "maxLength": 5000}}
    )),
    "many choices": asking(lambda i: form(choice=[f"{i} or {number:06}" for number in range(5000)])),
    "bias on 40,000 tokens": asking(lambda i: {"logit_bias": dict.fromkeys(many(i, 40_000), 1.0)}),
    "40,000 allowed tokens": asking(lambda i: {"allowed_token_ids": list(many(i, 40_000))}),
    "1,000 stop strings": asking(lambda i: {"stop": [f"{i}-{number}" for number in range(1000)]}),
    "128 bad words": asking(lambda i: {"bad_words_token_ids": [[t, t, t] for t in many(i, 128)]}),
    "no token left": asking(lambda i: {"structured_outputs": {"regex": f"[a-c]+{i}"}, "allowed_token_ids": [100]}),
    "faulty detokenizer": send_with_faulty_detokenizer,
}  # fmt: skip
