"""The engine's log-probabilities → the three shapes of the API: completions, chat, and vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_actors.outputs import Logprob
from engine_actors.serve.tokenization import Tokenization

LOWEST = -9999.0
"""Stands for minus infinity, which JSON lacks."""

Position = Mapping[int, Logprob]


class LogprobFormatter:
    """Formats one request's log-probabilities.

    Args:
        num_alternatives: As the request asked; -1 is the whole vocabulary.
        as_token_ids: Write tokens as "token_id:N" instead of their text.
    """

    def __init__(self, tokenization: Tokenization, num_alternatives: int, as_token_ids: bool) -> None:
        self._tokenization = tokenization
        self._num_alternatives = num_alternatives
        self._as_token_ids = as_token_ids

    def completion(
        self, token_ids: Sequence[int], positions: Sequence[Position | None], text_offset: int
    ) -> tuple[dict[str, Any], int]:
        """OpenAI's legacy shape, and the text offset after the last token.

        Args:
            text_offset: Of the first token: characters of the answer before it.
        """
        offsets: list[int] = []
        token_logprobs: list[float | None] = []
        tokens: list[str] = []
        top_logprobs: list[dict[str, float] | None] = []
        for token_id, position in zip(token_ids, positions, strict=True):
            chosen = position.get(token_id) if position is not None else None
            text = self._text(token_id, chosen)
            offsets.append(text_offset)
            text_offset += len(text)
            tokens.append(text)
            if position is None or chosen is None:  # the first prompt token
                token_logprobs.append(None)
                top_logprobs.append(None)
                continue
            token_logprobs.append(finite(chosen.logprob))
            top: dict[str, float] = {}
            for other_id, other in position.items():
                name = self._text(other_id, other)
                # Different tokens may read the same; the likelier one counts.
                top[name] = max(finite(other.logprob), top.get(name, LOWEST))
            top_logprobs.append(top)
        shape = {
            "text_offset": offsets,
            "token_logprobs": token_logprobs,
            "tokens": tokens,
            "top_logprobs": top_logprobs,
        }
        return shape, text_offset

    def chat(self, token_ids: Sequence[int], positions: Sequence[Position]) -> dict[str, Any]:
        """`{"content": [{token, logprob, bytes, top_logprobs}, …]}`."""
        content = []
        for token_id, position in zip(token_ids, positions, strict=True):
            entry = self._chat_entry(token_id, position[token_id])
            entry["top_logprobs"] = [self._chat_entry(other, position[other]) for other in self._likeliest(position)]
            content.append(entry)
        return {"content": content}

    def _likeliest(self, position: Position) -> list[int]:
        """The asked number of alternatives, the likeliest first."""
        ordered = sorted(position, key=lambda token_id: -position[token_id].logprob)
        return ordered if self._num_alternatives == -1 else ordered[: self._num_alternatives]

    def _chat_entry(self, token_id: int, entry: Logprob) -> dict[str, Any]:
        return {
            "token": self._text(token_id, entry),
            "logprob": finite(entry.logprob),
            "bytes": self._tokenization.token_bytes(token_id),
        }

    def _text(self, token_id: int, entry: Logprob | None) -> str:
        if self._as_token_ids:
            return f"token_id:{token_id}"
        decoded = entry.decoded_token if entry is not None else None
        return decoded if decoded is not None else self._tokenization.token_text(token_id)


def prompt_logprobs(positions: Sequence[Position | None] | None) -> list[dict[str, Any] | None] | None:
    """vLLM's shape: null for the first token, then token id → logprob, rank and text."""
    if positions is None:
        return None
    return [
        None
        if position is None
        else {
            str(token_id): {
                "logprob": finite(entry.logprob),
                "rank": entry.rank,
                "decoded_token": entry.decoded_token,
            }
            for token_id, entry in position.items()
        }
        for position in positions
    ]


def finite(logprob: float) -> float:
    """`logprob`, with minus infinity as `LOWEST`."""
    return max(logprob, LOWEST)
