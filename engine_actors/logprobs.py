"""Columns of log-probabilities from the workers → what callers see: `Logprob` by token id, with the tokens' text.

Used by `engine_actors.output_processor`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from engine_actors.outputs import Logprob, TokenLogprobsByID
from scheduler.logprobs import LogprobsRow, PromptLogprobs

TOKEN_CACHE_SIZE = 65_536


class LogprobsReader:
    """Reads columns; knows each token's own text.

    Args:
        tokenizer: A transformers tokenizer; None leaves `decoded_token` None.
    """

    def __init__(self, tokenizer: Any | None) -> None:
        self._text = lru_cache(TOKEN_CACHE_SIZE)(lambda token_id: _text_of(tokenizer, token_id))

    def read(self, rows: Iterable[LogprobsRow], with_text: bool = True) -> list[TokenLogprobsByID]:
        """One dictionary for each token: the token itself first, then the most likely ones.

        Raises:
            ValueError: A token has no entries.
        """
        return [self._position(*row, with_text) for row in rows]

    def read_prompt(
        self, pieces: Iterable[PromptLogprobs], num_prompt_tokens: int, with_text: bool = True
    ) -> list[TokenLogprobsByID | None]:
        """One entry for each prompt token; None for the first, which nothing predicts.

        Raises:
            ValueError: A token is in no piece.
        """
        positions: list[TokenLogprobsByID | None] = [None] * num_prompt_tokens
        for piece in pieces:
            for offset, position in enumerate(self.read(piece.tokens.rows(), with_text)):
                positions[piece.start + offset] = position
        missing = [index for index, position in enumerate(positions) if index and position is None]
        if missing:
            raise ValueError(f"the engine sent no log-probabilities of prompt tokens {missing[:10]}")
        return positions

    def _position(
        self, token_ids: Sequence[int], logprobs: Sequence[float], rank: int | Sequence[int], with_text: bool
    ) -> TokenLogprobsByID:
        if not token_ids:
            raise ValueError("the engine sent a token without the log-probabilities that were asked for")
        text = self._text if with_text else _no_text
        if not isinstance(rank, int):
            entries = zip(token_ids, logprobs, rank, strict=True)
            return {token_id: Logprob(logprob, each, text(token_id)) for token_id, logprob, each in entries}
        position = {token_ids[0]: Logprob(logprobs[0], rank, text(token_ids[0]))}
        for index in range(1, len(token_ids)):
            token_id = token_ids[index]
            if token_id != token_ids[0]:
                position[token_id] = Logprob(logprobs[index], index, text(token_id))
        return position


def _no_text(token_id: int) -> str | None:
    return None


def _text_of(tokenizer: Any | None, token_id: int) -> str | None:
    """The token alone as text: special tokens by name, incomplete characters as U+FFFD, ids without a token empty."""
    if tokenizer is None:
        return None
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        return str(backend.decode([token_id], skip_special_tokens=False))
    return str(tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False))
