"""Streamed chunks as bytes, built by hand: the parts that do not change once per stream, the rest by concatenation.

A token costs a few microseconds here, whatever the model's speed. Used by completions.py and chat.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from engine_actors.serve.generation import Usage

to_json = msgspec.json.Encoder().encode


class ChunkEncoder:
    """Chunks of one stream.

    Args:
        fields: The constant first fields: id, object, created, model.
        usage: The request's counts, when every chunk carries them.
    """

    def __init__(self, fields: dict[str, Any], usage: Usage | None) -> None:
        self._head = b"data: " + to_json(fields)[:-1] + b',"choices":['
        self._usage = usage

    def chunk(self, choice: bytes, more: bytes = b"") -> bytes:
        """One event.

        Args:
            choice: The choice as JSON; empty for no choice.
            more: Further top-level fields, each `,"name":value`.
        """
        if self._usage is not None:
            more += usage_field(self._usage)
        return self._head + choice + b"]" + more + b"}\n\n"

    def opening_chunk(self, choice: bytes, more: bytes) -> bytes:
        """One event before the first token's: its usage counts no generated token yet."""
        if self._usage is not None:
            more += usage_field(replace(self._usage, num_generated=0))
        return self._head + choice + b"]" + more + b"}\n\n"

    def usage_chunk(self, usage: Usage) -> bytes:
        """The chunk without choices that ends a stream with include_usage."""
        return self._head + b"]" + usage_field(usage) + b"}\n\n"


def usage_field(usage: Usage) -> bytes:
    return b',"usage":' + to_json(usage.as_json())


class PendingChoice:
    """What one choice has got since its last chunk, until a chunk is due."""

    __slots__ = ("index", "is_first", "logprobs", "num_tokens", "text", "text_offset", "token_ids")

    def __init__(self, index: int) -> None:
        self.index = index
        self.is_first = True
        self.text = ""
        self.token_ids: list[int] = []
        self.logprobs: list[Any] | None = None
        self.text_offset = 0
        self.num_tokens = 0

    def add(self, text: str, token_ids: Sequence[int], logprobs: Sequence[Any] | None) -> None:
        """Take in an output's delta."""
        self.text += text
        self.token_ids += token_ids
        if logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *logprobs]

    def is_due(self, interval: int, finish_reason: str | None) -> bool:
        """The first chunk and the last go at once, others after `interval` tokens."""
        return finish_reason is not None or self.is_first or len(self.token_ids) >= interval

    def take(self) -> tuple[str, list[int], list[Any] | None]:
        """(text, token ids, logprobs) of the chunk that is due."""
        taken = (self.text, self.token_ids, self.logprobs)
        self.text, self.token_ids, self.logprobs, self.is_first = "", [], None, False
        return taken
