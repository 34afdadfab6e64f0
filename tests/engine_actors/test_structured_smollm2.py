"""Structured output with SmolLM2's vocabulary: random tokens among those allowed make valid texts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from engine_actors.structured_output.manager import StructuredOutputManager
from engine_actors.structured_output.vocabulary import token_texts
from engine_actors.structured_output.xgrammar_backend import XGrammarBackend
from scheduler.structured_output import GrammarStatus
from scheduler.structured_params import StructuredOutputsParams
from tests.engine_actors.structured_schemas import REALISTIC

pytestmark = pytest.mark.model

VOCAB_SIZE = 49280
"""Padded: the tokenizer has 49,152 tokens."""
EOS = 2
WAIT_S = 120.0
MAX_TOKENS = 1500


@pytest.fixture(scope="module")
def tokenizer(smollm2_dir: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(smollm2_dir))


@pytest.fixture(scope="module")
def texts(tokenizer: Any) -> list[bytes]:
    return token_texts(tokenizer, VOCAB_SIZE)


@pytest.fixture(scope="module")
def manager(smollm2_dir: Path) -> Iterator[StructuredOutputManager]:
    manager = StructuredOutputManager(XGrammarBackend(str(smollm2_dir), VOCAB_SIZE, [EOS]), max_num_rows=4)
    manager.warm_up()
    yield manager
    manager.close()


def start(manager: StructuredOutputManager, request_id: str, **params: Any) -> None:
    """A request whose grammar is ready."""
    manager.request_grammar(request_id, StructuredOutputsParams(**params))
    while manager.status(request_id) is GrammarStatus.COMPILING:
        assert manager.wait(WAIT_S)
    manager.take_ready()
    assert manager.take_failures() == []


def allowed(manager: StructuredOutputManager, request_id: str) -> list[int]:
    bitmask = manager.fill_bitmask([(3, request_id)])
    assert bitmask is not None
    return np.flatnonzero(np.unpackbits(np.frombuffer(bitmask.mask, np.uint8), bitorder="little")).tolist()


Choose = Callable[[random.Random, list[int]], int]


@pytest.fixture(scope="module")
def choose(texts: list[bytes]) -> Choose:
    """A random token, with a liking for those that close strings, arrays and objects."""
    closing = {token for token, text in enumerate(texts) if text and text[:1] in b'"}]' and b"[" not in text}

    def choose(rng: random.Random, tokens: list[int]) -> int:
        closers = [token for token in tokens if token in closing]
        return rng.choice(closers if closers and rng.random() < 0.5 else tokens)

    return choose


def generate(manager: StructuredOutputManager, choose: Choose, seed: int, **params: Any) -> list[int] | None:
    """The tokens of one request; None if it came to no end."""
    request_id = f"request {seed}"
    rng = random.Random(seed)
    start(manager, request_id, **params)
    tokens: list[int] = []
    try:
        while len(tokens) < MAX_TOKENS:
            choices = allowed(manager, request_id)
            assert choices, tokens
            assert max(choices) < 49152
            if EOS in choices and rng.random() < 0.5:
                return tokens
            choices = [token for token in choices if token != EOS]
            tokens.append(choose(rng, choices))
            if manager.accept_tokens(request_id, tokens[-1:]):
                return tokens
            assert manager.take_failures() == []
        return None
    finally:
        manager.release(request_id)


def decoded(tokenizer: Any, tokens: list[int]) -> str:
    return str(tokenizer.decode(tokens, skip_special_tokens=True))


@pytest.mark.parametrize("name", REALISTIC)
def test_random_tokens_make_valid_json(
    name: str, manager: StructuredOutputManager, choose: Choose, tokenizer: Any
) -> None:
    schema = REALISTIC[name]
    is_old = "exclusiveMinimum" in schema or isinstance(schema.get("items"), list)
    kind = jsonschema.Draft4Validator if is_old else jsonschema.Draft202012Validator
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    done = [tokens for seed in range(4) if (tokens := generate(manager, choose, seed, json=schema)) is not None]
    assert done, "no request came to an end"
    for tokens in done:
        text = decoded(tokenizer, tokens)
        error = next(validator.iter_errors(json.loads(text)), None)
        assert error is None, f"{text}: {error}"


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{4}-\d{2}-\d{2}",
        r"(\+\d{1,3} )?\(?\d{3}\)?[- ]\d{3}-\d{4}",
        r"[A-Z][a-z]+( [A-Z][a-z]+){1,2}",
        r"[^,\n]{3,20}(, [^,\n]{3,20}){2}",
        r"(yes|no|maybe), because \w{1,12}\.",
        r"é+|[αβγ]{2,5}|[😀-😎]",
        r"(a|b)*a(a|b){8}",
        r"#[0-9a-f]{6}",
    ],
)
def test_random_tokens_match_regular_expressions(
    pattern: str, manager: StructuredOutputManager, choose: Choose, tokenizer: Any
) -> None:
    for seed in range(6):
        tokens = generate(manager, choose, seed, regex=pattern)
        assert tokens is not None
        assert re.fullmatch(pattern, decoded(tokenizer, tokens))


def test_random_tokens_are_one_of_the_choices(manager: StructuredOutputManager, choose: Choose, tokenizer: Any) -> None:
    choices = ["positive", "negative", "neutral", "very positive", "naïve 😀", "n"]
    found = {decoded(tokenizer, generate(manager, choose, seed, choice=choices) or []) for seed in range(40)}
    assert found <= set(choices)
    assert len(found) > 3


def test_random_tokens_follow_a_grammar(manager: StructuredOutputManager, choose: Choose, tokenizer: Any) -> None:
    grammar = 'root ::= sum\nsum ::= product (" + " product){0,2}\nproduct ::= [1-9] [0-9]? | "(" sum ")"'
    for seed in range(10):
        tokens = generate(manager, choose, seed, grammar=grammar)
        if tokens is not None:
            text = decoded(tokenizer, tokens)
            assert re.fullmatch(r"[0-9()+ ]+", text)
            eval(compile(text, "sum", "eval"), {})  # the language is that of Python's own parser


def test_special_tokens_have_no_text_and_so_no_place(texts: list[bytes], tokenizer: Any) -> None:
    for token in tokenizer.added_tokens_decoder:
        assert texts[token] == b""
    assert texts[tokenizer.encode("hello")[0]] == b"hello"
    assert texts[49152:] == [b""] * (VOCAB_SIZE - 49152)
    ids = tokenizer.encode('naïve 😀 {"a": 1}\n')
    assert b"".join(texts[token] for token in ids).decode() == 'naïve 😀 {"a": 1}\n'


def test_what_the_model_would_write_is_allowed(manager: StructuredOutputManager, tokenizer: Any) -> None:
    """Usual JSON in the tokenizer's own tokens, compact and printed."""
    value = {"name": 'Ada "L." \u00e9\n', "tags": ["x", "y"], "age": 36, "ok": True, "more": {"a": None, "b": [1.5]}}
    schema = {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "tags": {"type": "array", "items": {"type": "string"}},
            "age": {"type": "integer"},
            "ok": {"type": "boolean"},
            "more": {"type": "object"},
        },
        "required": ["name", "tags", "age", "ok", "more"],
    }
    styles: list[dict[str, Any]] = [{}, {"indent": 2}, {"indent": 4}, {"indent": "\t"}, {"separators": (",", ":")}]
    for number, style in enumerate(styles):
        start(manager, f"style {number}", json=schema)
        tokens = tokenizer.encode(json.dumps(value, ensure_ascii=False, **style))
        assert manager.accept_tokens(f"style {number}", tokens) is True, style
        assert manager.take_failures() == []
        manager.release(f"style {number}")
