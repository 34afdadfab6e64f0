"""The text of every token id, as bytes. Called once per engine, in the compiler process."""

from __future__ import annotations

import json
import re
from typing import Any

from scheduler.structured_output import StructuredOutputError

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPACE_MARK = "\u2581"


def token_texts(tokenizer: Any, vocab_size: int) -> list[bytes]:
    """What each id below `vocab_size` adds to the text; b"" where it adds nothing: special tokens, which the
    detokeniser skips, and ids the tokenizer has no token for. Those can never be part of a structured text.

    Raises:
        StructuredOutputError: The tokenizer's way of spelling tokens is not known.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise StructuredOutputError(
            f"structured output needs a fast tokenizer (tokenizers library), got {type(tokenizer).__name__}"
        )
    # The decoder's own state: the whole tokenizer's, with all tokens, takes longer to write and read than all the rest.
    decoder = json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {}
    steps = decoder.get("decoders", []) if decoder.get("type") == "Sequence" else [decoder]
    kinds = {step.get("type") for step in steps}
    if "ByteLevel" in kinds:
        spell = _ByteLevel().text
    elif "ByteFallback" in kinds or "Metaspace" in kinds:
        spell = _byte_fallback_text
    else:
        raise StructuredOutputError(
            f"structured output knows byte-level and byte-fallback tokenizers; this one decodes by "
            f"{', '.join(sorted(filter(None, kinds))) or 'nothing'}"
        )
    texts = [b""] * vocab_size
    special = {number for number, token in backend.get_added_tokens_decoder().items() if token.special}
    for token, number in tokenizer.get_vocab().items():
        if number < vocab_size and number not in special:
            texts[number] = spell(token)
    return texts


class _ByteLevel:
    """GPT-2's spelling: each byte is a printable character."""

    def __init__(self) -> None:
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = [byte for byte in range(256) if byte not in set(printable)]
        self._bytes = {chr(byte): byte for byte in printable}
        self._bytes |= {chr(256 + index): byte for index, byte in enumerate(others)}

    def text(self, token: str) -> bytes:
        try:
            return bytes(self._bytes[char] for char in token)
        except KeyError:  # an added token in plain text
            return token.encode()


def _byte_fallback_text(token: str) -> bytes:
    """SentencePiece's spelling: a mark for spaces, and single bytes by their number."""
    byte = _BYTE_PIECE.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace(_SPACE_MARK, " ").encode()
