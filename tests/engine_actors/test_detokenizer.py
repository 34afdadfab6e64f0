"""Text comes out token by token exactly as decoding all tokens at once gives it, and stops where it should."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_actors.detokenizer import BROKEN, Detokenizer, StopStrings, TokenDecoder
from tests.fakes import VOCAB_SIZE, WrappedTokenizer, byte_fallback_tokenizer, byte_level_tokenizer


@lru_cache
def tokenizer(kind: str) -> WrappedTokenizer:
    return WrappedTokenizer(byte_level_tokenizer() if kind == "byte-level" else byte_fallback_tokenizer())


class SlowTokenizer:
    """A tokenizer that is not from the tokenizers library."""

    def __init__(self, fast: WrappedTokenizer) -> None:
        self._backend = fast.backend_tokenizer
        self.all_special_ids = list(self._backend.get_added_tokens_decoder())

    def decode(self, ids: list[int], skip_special_tokens: bool = False, **_: Any) -> str:
        return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab()


def ids_of(kind: str, text: str) -> list[int]:
    """`text` by single bytes in byte-fallback vocabularies, by the tokenizer otherwise."""
    backend = tokenizer(kind).backend_tokenizer
    if kind == "byte-level":
        return backend.encode(text).ids
    return [backend.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]


def byte_ids(kind: str, data: bytes) -> list[int]:
    """One token for each byte."""
    backend = tokenizer(kind).backend_tokenizer
    if kind == "byte-fallback":
        return [backend.token_to_id(f"<0x{byte:02X}>") for byte in data]
    from tokenizers import pre_tokenizers

    found = []
    for byte in data:
        # ByteLevel maps each byte to one printable character.
        text = bytes([byte]).decode("latin-1")
        mapped = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(text)
        if byte < 128:
            found.append(backend.token_to_id(mapped[0][0]))
        else:
            found.append(next(i for t, i in BYTE_TOKENS() if t == byte))
    return found


@lru_cache
def BYTE_TOKENS() -> tuple[tuple[int, int], ...]:
    """(byte, id) of the byte-level alphabet, by GPT-2's table: printable bytes stand for themselves, others follow."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    table = {byte: chr(byte) for byte in printable}
    table |= {byte: chr(256 + i) for i, byte in enumerate(b for b in range(256) if b not in printable)}
    backend = tokenizer("byte-level").backend_tokenizer
    return tuple((byte, backend.token_to_id(char)) for byte, char in table.items())


def stream(decoder: TokenDecoder, prompt: list[int], ids: list[int], **options: Any) -> tuple[list[str], Detokenizer]:
    """Deltas of one token at a time, the end's last."""
    detokenizer = Detokenizer(decoder, prompt, **options)
    deltas = []
    for token_id in ids:
        detokenizer.push([token_id])
        deltas.append(detokenizer.take_delta())
        if detokenizer.stop is not None:
            break
    detokenizer.finish()
    return [*deltas, detokenizer.take_delta()], detokenizer


KINDS = pytest.mark.parametrize("kind", ["byte-level", "byte-fallback"])


@KINDS
@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_deltas_add_up_to_decoding_everything_at_once(kind: str, data: st.DataObject) -> None:
    size = VOCAB_SIZE if kind == "byte-level" else tokenizer(kind).backend_tokenizer.get_vocab_size()
    ids = data.draw(st.lists(st.integers(0, size - 1), max_size=40))
    decoder = TokenDecoder(tokenizer(kind))
    deltas, detokenizer = stream(decoder, [], ids)
    assert "".join(deltas) == decoder.decode(ids)
    assert detokenizer.text == decoder.decode(ids)


@KINDS
@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30), prompt=st.text(max_size=10))
def test_text_by_single_bytes_is_never_broken_on_the_way(kind: str, text: str, prompt: str) -> None:
    decoder = TokenDecoder(tokenizer(kind))
    ids, prompt_ids = byte_ids(kind, text.encode()), byte_ids(kind, ("x" + prompt).encode())
    deltas, _ = stream(decoder, prompt_ids, ids)
    assert "".join(deltas) == text
    if BROKEN not in text:
        assert not any(BROKEN in delta for delta in deltas)


@KINDS
@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=60))
def test_invalid_bytes_come_out_as_decoded_at_once(kind: str, data: bytes) -> None:
    decoder = TokenDecoder(tokenizer(kind))
    ids = byte_ids(kind, data)
    word = tokenizer(kind).backend_tokenizer.token_to_id
    prompt = byte_ids(kind, b"ok") if kind == "byte-level" else [word("▁The")]
    deltas, _ = stream(decoder, prompt, ids)
    if kind == "byte-level":
        assert "".join(deltas) == data.decode(errors="replace")
    else:
        # One invalid byte breaks all of a byte run, by this decoder's definition.
        # The first space of a whole text is stripped, so the text is taken behind the prompt's.
        assert decoder.decode(prompt) + "".join(deltas) == decoder.decode([*prompt, *ids])


@settings(max_examples=100, deadline=None)
@given(data=st.binary(min_size=80, max_size=400))
def test_long_runs_of_invalid_bytes_are_emitted_and_exact(data: bytes) -> None:
    decoder = TokenDecoder(tokenizer("byte-level"))
    deltas, _ = stream(decoder, [], byte_ids("byte-level", data))
    assert "".join(deltas) == data.decode(errors="replace")
    continuation = bytes([0x80]) * 200
    deltas, _ = stream(decoder, [], byte_ids("byte-level", continuation))
    assert "".join(deltas) == BROKEN * 200
    assert "".join(deltas[:150])


@KINDS
def test_prompt_that_ends_inside_a_character_is_completed_by_the_output(kind: str) -> None:
    decoder = TokenDecoder(tokenizer(kind))
    emoji = "🙂".encode()
    for cut in (1, 2, 3):
        deltas, _ = stream(decoder, byte_ids(kind, b"a" + emoji[:cut]), byte_ids(kind, emoji[cut:] + b"b"))
        assert "".join(deltas) == "🙂b"


def test_prompts_own_broken_end_is_not_part_of_the_output() -> None:
    decoder = TokenDecoder(tokenizer("byte-level"))
    deltas, _ = stream(decoder, byte_ids("byte-level", b"a" + "🙂".encode()[:2]), byte_ids("byte-level", b"bc"))
    assert "".join(deltas) == "bc"


def test_spaces_after_the_prompt_are_kept_though_the_decoder_strips_the_first() -> None:
    decoder = TokenDecoder(tokenizer("byte-fallback"))
    word = tokenizer("byte-fallback").backend_tokenizer.token_to_id
    prompt = [word("▁The")]
    assert "".join(stream(decoder, prompt, [word("▁fox"), word("▁a")])[0]) == " fox a"
    assert "".join(stream(decoder, [], [word("▁fox"), word("▁a")])[0]) == "fox a"
    # A prompt whose last tokens decode to nothing still counts as what stands before.
    special = [word("</s>")] * 10
    assert "".join(stream(decoder, prompt + special, [word("▁fox"), word("▁a")])[0]) == " fox a"


def test_special_tokens_are_left_out_or_shown_as_asked() -> None:
    fast = tokenizer("byte-level")
    eos = fast.backend_tokenizer.token_to_id("<eos>")
    ids = [*ids_of("byte-level", "fox"), eos, *ids_of("byte-level", " dog")]
    assert "".join(stream(TokenDecoder(fast, skip_special_tokens=True), [], ids)[0]) == "fox dog"
    assert "".join(stream(TokenDecoder(fast, skip_special_tokens=False), [], ids)[0]) == "fox<eos> dog"


def test_tokenizer_without_a_fast_backend_gives_the_same_text() -> None:
    slow = TokenDecoder(SlowTokenizer(tokenizer("byte-fallback")))
    fast = TokenDecoder(tokenizer("byte-fallback"))
    assert slow.byte_token_ids == fast.byte_token_ids
    ids = [*byte_ids("byte-fallback", "añ🙂".encode()), *byte_ids("byte-fallback", b"\xff")]
    assert stream(slow, [], ids)[0] == stream(fast, [], ids)[0]


def first_stop(text: str, stops: list[str]) -> tuple[int, str] | None:
    """Brute force: read character by character; the stop complete first, the longest of those complete together."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return end - len(longest), longest
    return None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("abc", max_size=40),
    stops=st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 7), min_size=1, max_size=40),
    include=st.booleans(),
)
def test_stop_strings_end_the_text_where_brute_force_says(
    text: str, stops: list[str], sizes: list[int], include: bool
) -> None:
    decoder = TokenDecoder(tokenizer("byte-level"))
    ids = byte_ids("byte-level", text.encode())
    detokenizer = Detokenizer(decoder, [], stops, include)
    deltas, position, used = [], 0, 0
    for size in sizes * 40:
        piece = ids[position : position + size]
        if not piece:
            break
        position += len(piece)
        count = detokenizer.push(piece)
        used += count
        deltas.append(detokenizer.take_delta())
        if detokenizer.stop is not None:
            break
    detokenizer.finish()
    deltas.append(detokenizer.take_delta())
    expected = first_stop(text, stops)
    if expected is None:
        assert detokenizer.stop is None
        assert "".join(deltas) == text
        return
    start, stop = expected
    assert detokenizer.stop == stop
    assert "".join(deltas) == detokenizer.text == text[: start + (len(stop) if include else 0)]
    assert used == start + len(stop)  # tokens behind the stop string are not counted


@settings(max_examples=300, deadline=None)
@given(text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=6), min_size=1, max_size=3))
def test_no_more_is_held_back_than_a_stop_string_could_need(text: str, stops: list[str]) -> None:
    held = StopStrings(stops).num_held(text)
    live = [n for n in range(1, len(text) + 1) if any(len(s) > n and s.startswith(text[-n:]) for s in stops)]
    assert held == max(live, default=0)


def test_stop_strings_inside_the_minimum_number_of_tokens_do_not_count() -> None:
    decoder = TokenDecoder(tokenizer("byte-level"))
    ids = byte_ids("byte-level", b"abcabc")
    deltas, detokenizer = stream(decoder, [], ids, stops=["b"], min_tokens=3)
    assert ("".join(deltas), detokenizer.stop) == ("abca", "b")


def test_stop_string_in_text_held_back_until_the_end_is_found() -> None:
    decoder = TokenDecoder(tokenizer("byte-fallback"))
    deltas, detokenizer = stream(decoder, [], byte_ids("byte-fallback", b"xSTOPy"), stops=["STOP"])
    assert ("".join(deltas), detokenizer.stop) == ("x", "STOP")
