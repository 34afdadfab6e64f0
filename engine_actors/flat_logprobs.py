"""`FlatLogprobs`: log-probabilities of many tokens in six lists, for requests with `flat_logprobs`.

A list of dictionaries of `Logprob`s is an object for each entry, which the garbage collector walks again and again.
Made by `engine_actors.logprobs`; attribute names are vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import overload

from engine_actors.outputs import Logprob, TokenLogprobsByID


@dataclass(slots=True)
class FlatLogprobs(Sequence[TokenLogprobsByID]):
    """Reads like a list with one dictionary (token id → Logprob) for each position; empty for a prompt's first token.

    Attributes:
        start_indices, end_indices: Of each position's entries in the other lists.
        token_ids, logprobs, ranks, decoded_tokens: Of all entries; at each position the token's own first.
    """

    start_indices: list[int] = field(default_factory=list)
    end_indices: list[int] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    ranks: list[int] = field(default_factory=list)
    decoded_tokens: list[str | None] = field(default_factory=list)

    def append(self, position: TokenLogprobsByID | None) -> None:
        """One more position; None is an empty one."""
        self.start_indices.append(len(self.token_ids))
        for token_id, entry in (position or {}).items():
            self.token_ids.append(token_id)
            self.logprobs.append(entry.logprob)
            self.ranks.append(entry.rank)
            self.decoded_tokens.append(entry.decoded_token)
        self.end_indices.append(len(self.token_ids))

    def extend(self, positions: Iterable[TokenLogprobsByID | None]) -> None:
        for position in positions:
            self.append(position)

    def __len__(self) -> int:
        return len(self.start_indices)

    @overload
    def __getitem__(self, index: int) -> TokenLogprobsByID: ...
    @overload
    def __getitem__(self, index: slice) -> FlatLogprobs: ...
    def __getitem__(self, index: int | slice) -> TokenLogprobsByID | FlatLogprobs:
        if isinstance(index, slice):
            return self._part(range(*index.indices(len(self))))
        return {
            self.token_ids[entry]: Logprob(self.logprobs[entry], self.ranks[entry], self.decoded_tokens[entry])
            for entry in range(self.start_indices[index], self.end_indices[index])
        }

    def _part(self, positions: range) -> FlatLogprobs:
        part = FlatLogprobs()
        if positions.step != 1 or not positions:
            part.extend(self[position] for position in positions)
            return part
        first, last = self.start_indices[positions[0]], self.end_indices[positions[-1]]
        part.start_indices = [start - first for start in self.start_indices[positions.start : positions.stop]]
        part.end_indices = [end - first for end in self.end_indices[positions.start : positions.stop]]
        for name in ("token_ids", "logprobs", "ranks", "decoded_tokens"):
            setattr(part, name, getattr(self, name)[first:last])
        return part

    def __add__(self, other: FlatLogprobs) -> FlatLogprobs:
        both = self[:]
        both.extend(other)
        return both
