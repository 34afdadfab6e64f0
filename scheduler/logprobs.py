"""Log-probabilities on their way from the workers to the front ends, as columns: a few copies per step, no objects.

Made by `executors.logprobs`, cut and passed on by the scheduler, read by `engine_actors.logprobs`.
"""

from __future__ import annotations

import array
import sys
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Any

import msgspec

LogprobsRow = tuple[list[int], list[float], int | list[int]]
"""Of one token: ids and log-probabilities of its entries (itself first), and its rank, or those of all entries where
some were asked for by id. No entries: none asked for."""


class TokenLogprobs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Of some tokens, one after the other.

    Attributes:
        num_entries: int32 column [num_tokens]: entries of each token; 0 where none were asked for.
        token_ids: int32 column of all entries: for each token itself, then the most likely ones in their order.
        logprobs: float32 column, likewise.
        ranks: int32 column [num_tokens]: of the token itself, from 1; 0 where none were asked for.
        entry_ranks: int32 column of all entries; empty where no token has entries that were asked for by id, so that
            those after the first are the most likely ones.
    """

    num_entries: bytes
    token_ids: bytes
    logprobs: bytes
    ranks: bytes
    entry_ranks: bytes = b""

    def select(self, tokens: Iterable[int]) -> TokenLogprobs:
        """Those of some tokens, given by index."""
        num_entries = unpack_column("i", self.num_entries)
        ends = list(accumulate(num_entries))
        parts: tuple[list[bytes], ...] = ([], [], [], [], [])
        for index in tokens:
            token = slice(4 * index, 4 * index + 4)
            entries = slice(4 * (ends[index] - num_entries[index]), 4 * ends[index])
            parts[0].append(self.num_entries[token])
            parts[1].append(self.token_ids[entries])
            parts[2].append(self.logprobs[entries])
            parts[3].append(self.ranks[token])
            parts[4].append(self.entry_ranks[entries])
        return TokenLogprobs(*(b"".join(part) for part in parts))

    def rows(self) -> Iterator[LogprobsRow]:
        """Each token's."""
        token_ids = unpack_column("i", self.token_ids).tolist()
        logprobs = unpack_column("f", self.logprobs).tolist()
        entry_ranks = unpack_column("i", self.entry_ranks).tolist()
        start = 0
        for count, rank in zip(unpack_column("i", self.num_entries), unpack_column("i", self.ranks), strict=True):
            end = start + count
            yield token_ids[start:end], logprobs[start:end], entry_ranks[start:end] if entry_ranks else rank
            start = end


def pack_rows(rows: Iterable[LogprobsRow]) -> TokenLogprobs:
    """The inverse of `TokenLogprobs.rows`, for rows of which some have ranks of all entries."""
    num_entries: list[int] = []
    token_ids: list[int] = []
    logprobs: list[float] = []
    ranks: list[int] = []
    entry_ranks: list[int] = []
    for ids, values, rank in rows:
        all_ranks = rank if isinstance(rank, list) else [rank, *range(1, len(ids))][: len(ids)]
        num_entries.append(len(ids))
        token_ids += ids
        logprobs += values
        ranks.append(all_ranks[0] if all_ranks else 0)
        entry_ranks += all_ranks
    return TokenLogprobs(
        pack_column("i", num_entries), pack_column("i", token_ids), pack_column("f", logprobs),
        pack_column("i", ranks), pack_column("i", entry_ranks),
    )  # fmt: skip


class PromptLogprobs(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """Of consecutive prompt tokens of one request.

    Attributes:
        row: The request's, in the workers' persistent batch. No meaning beyond the scheduler.
        start: Index of the first of these tokens in the prompt.
        tokens: Log-probabilities.
    """

    row: int
    start: int
    tokens: TokenLogprobs


def pack_column(typecode: str, values: Iterable[Any]) -> bytes:
    """The inverse of `unpack_column`."""
    column = array.array(typecode, values)
    if sys.byteorder == "big":
        column.byteswap()
    return column.tobytes()


def unpack_column(typecode: str, data: bytes) -> array.array[Any]:
    """Little-endian column of 4-byte values: "i" (int32) or "f" (float32)."""
    values = array.array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
