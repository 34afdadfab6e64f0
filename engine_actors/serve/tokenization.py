"""Text ↔ tokens for the HTTP server, off the event loop when a text is long. One `Tokenization` per served model.

The engine gets token ids only, so that a request's length is known, and refused if need be, before its stream begins.
"""

from __future__ import annotations

import asyncio
import json
import re
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, TypeVar

from engine_actors.serve.errors import BadRequest

T = TypeVar("T")

INLINE_CHARS = 1000
"""Texts up to here (about 0.3 ms) are tokenised on the event loop; a thread hand-over would cost as much."""
LONG_CHARS = 100_000
"""Longer texts (seconds, for megabytes) have a thread of their own, so that others do not wait for them."""
MAX_THREADS = 4
_BYTE_TOKEN = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")
TOKEN_CACHE_SIZE = 65536


class Tokenization:
    """What the HTTP server needs of a transformers tokenizer. Thread-safe.

    Args:
        tokenizer: A transformers tokenizer.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        # The Rust tokenizer without the wrapper: it has no settings that calls from two threads could change under
        # each other, and it releases the GIL, so that a 27 MB prompt does not stop the event loop.
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        # A tokenizer in Python gets one thread only: nothing says that it may be called from two.
        threads = MAX_THREADS if self._backend is not None else 1
        self._threads = ThreadPoolExecutor(threads, thread_name_prefix="tokenize")
        self._long_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenize-long") if threads > 1 else self._threads
        vocabulary = tokenizer.get_vocab()
        self.size: int = max(vocabulary.values(), default=-1) + 1
        self.max_token_chars: int = max(map(len, vocabulary), default=1)
        self._specials = set(getattr(tokenizer, "all_special_ids", ()))
        self._byte_level = self._is_byte_level()
        self.token_text = lru_cache(TOKEN_CACHE_SIZE)(self._token_text)
        self.token_bytes = lru_cache(TOKEN_CACHE_SIZE)(self._token_bytes)

    async def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`."""
        if len(text) <= INLINE_CHARS and self._backend is not None:
            return self._encode(text, add_special_tokens)
        if len(text) > LONG_CHARS:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._long_thread, self._encode, text, add_special_tokens)
        return await self.in_thread(self._encode, text, add_special_tokens)

    async def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Text of `token_ids`.

        Raises:
            BadRequest: An id is not in the vocabulary.
        """
        if len(token_ids) <= INLINE_CHARS and self._backend is not None:
            return self._decode(token_ids, skip_special_tokens)
        return await self.in_thread(self._decode, token_ids, skip_special_tokens)

    async def in_thread(self, function: Any, *args: Any) -> Any:
        """Run `function` on the tokenizer's threads."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    def raw_token(self, token_id: int) -> str:
        """The vocabulary's own string of a token, "Ġhello"."""
        token = self.tokenizer.convert_ids_to_tokens(token_id)
        return token if isinstance(token, str) else ""

    def special_token_ids(self) -> set[int]:
        return self._specials

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._backend is None:
            return list(self.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return list(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def _decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        text: str = self.tokenizer.decode(
            token_ids, skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def _token_text(self, token_id: int) -> str:
        """The token alone as text; special tokens by name; incomplete characters as U+FFFD."""
        return self._decode([token_id], False)

    def _token_bytes(self, token_id: int) -> list[int]:
        """The token's own bytes: those of consecutive tokens join to the text even inside a character."""
        raw = self.raw_token(token_id)
        if token_id not in self._specials:
            if self._byte_level and all(character in _BYTE_OF_CHARACTER for character in raw):
                return [_BYTE_OF_CHARACTER[character] for character in raw]
            byte = _BYTE_TOKEN.match(raw)
            if byte:
                return [int(byte[1], 16)]
        return list(self.token_text(token_id).encode())

    def _is_byte_level(self) -> bool:
        decoder = getattr(self._backend, "decoder", None)
        return decoder is not None and '"ByteLevel"' in json.dumps(json.loads(decoder.__getstate__()))


def _byte_level_alphabet() -> dict[str, int]:
    """Byte-level BPE's printable stand-in of each byte: printable Latin-1 is itself, the others are U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return alphabet


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def check_token_ids(token_ids: list[int], vocab_size: int, param: str) -> None:
    """Refuse ids outside the vocabulary.

    Raises:
        BadRequest: Naming the first such id.
    """
    if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
        wrong = next(i for i in token_ids if not 0 <= i < vocab_size)
        raise BadRequest(f"{param} must hold token ids from 0 to {vocab_size - 1}, got {wrong}", param)
