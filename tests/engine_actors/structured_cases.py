"""Matching on bytes, for the tests of structured output: every byte is a token, so that texts need no tokenizer."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from engine_actors.structured_output import native
from engine_actors.structured_output.source import grammar_source
from scheduler.structured_params import StructuredOutputsParams

STOP = 256


@functools.cache
def byte_compiler() -> Any:
    """xgrammar's compiler for the vocabulary of single bytes and a stop token."""
    return native.new_compiler(native.new_tokenizer_info([bytes([byte]) for byte in range(256)] + [b""], [STOP]))


def compile_ebnf(text: str) -> Any:
    return native.compile_grammar(byte_compiler(), text, is_structural_tag=False)


def compile_params(**params: Any) -> Any:
    """The compiled grammar of StructuredOutputsParams."""
    source = grammar_source(StructuredOutputsParams(**params).spec())
    return native.compile_grammar(byte_compiler(), source.text, is_structural_tag=source.is_structural_tag)


def accepts(grammar: Any, text: str | bytes) -> bool:
    """The whole text is in the grammar's language."""
    matcher = native.new_matcher(grammar)
    data = text.encode() if isinstance(text, str) else text
    return all(native.accept_token(matcher, byte) for byte in data) and matcher.is_completed()


def language(grammar: Any, alphabet: str, max_length: int) -> set[str]:
    """Every text of the grammar over an alphabet, up to a length."""
    matcher = native.new_matcher(grammar)
    found: set[str] = set()

    def visit(text: str) -> None:
        if matcher.is_completed():
            found.add(text)
        if len(text) == max_length:
            return
        for char in alphabet:
            if native.accept_token(matcher, ord(char)):
                visit(text + char)
                matcher.rollback(1)

    visit("")
    return found


def random_texts(grammar: Any, count: int, seed: int = 0, max_bytes: int = 400) -> Iterator[bytes]:
    """Complete texts by random bytes among those the mask allows, with a liking for short ones."""
    rng = random.Random(seed)
    for _ in range(count):
        text = _random_text(grammar, rng, max_bytes)
        if text is not None:
            yield text


def _random_text(grammar: Any, rng: random.Random, max_bytes: int) -> bytes | None:
    matcher = native.new_matcher(grammar)
    mask = np.zeros((1, 9), dtype=np.int32)
    text = bytearray()
    while len(text) < max_bytes:
        native.fill_bitmask(matcher, mask, 0)
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[: STOP + 1]).tolist()
        assert allowed, f"dead end after {bytes(text)!r}"
        if STOP in allowed:
            if len(allowed) == 1 or rng.random() < 0.5:
                return bytes(text)
            allowed.remove(STOP)
        closing = [byte for byte in allowed if byte in b'"]},:0']
        ascii_only = [byte for byte in allowed if byte < 128]
        if closing and rng.random() < 0.4:
            allowed = closing
        elif ascii_only and rng.random() < 0.9:
            allowed = ascii_only
        token = rng.choice(allowed)
        assert native.accept_token(matcher, token), (
            f"the mask allows {token} after {bytes(text)!r}, the matcher does not"
        )
        text.append(token)
    return None


def make_tokenizer(directory: Path, extra: tuple[str, ...] = ("ab", "bc", "abc", "{}", '":')) -> Path:
    """A byte-level tokenizer of all bytes, a few longer tokens and two special ones, as a Hugging Face directory."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*alphabet, *extra])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True), AddedToken("<tool>", special=True)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")
    fast.save_pretrained(directory)
    return directory


class FakeClock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s
