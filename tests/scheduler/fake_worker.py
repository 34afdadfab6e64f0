"""A worker without a model, for tests: it obeys SchedulerOutput messages, and its tokens depend on all KV it reads.

`FakeWorker` keeps numbers in block-indexed memory as a real worker keeps keys and values, KV group by KV group. The
number stored for a token depends on the token, its position, and everything that the groups before could read; the
sampled token depends on the seed, the position and all that the last group read. So a wrong, stale, stolen or missing
block changes the tokens. `reference_tokens` computes the same function for one request alone, without any blocks.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from kv.spec import KVCacheConfig, SlidingWindowSpec
from scheduler.output import ModelRunnerOutput, NewRequestData, SchedulerOutput, pack_int32, unpack_int32

VOCABULARY = 997
WORD = 2**64 - 1
START = 0x243F6A8885A308D3
FACTOR = 0x9E3779B97F4A7C15


def mix(*values: int) -> int:
    """A 64-bit hash of numbers."""
    result = START
    for value in values:
        result = (result ^ value) * FACTOR & WORD
        result ^= result >> 29
    return result


def mix_columns(*columns: np.ndarray | int) -> np.ndarray:
    """`mix` of each row of the columns."""
    result = np.full(1, START, np.uint64)
    for column in columns:
        result = (result ^ np.asarray(column).astype(np.uint64)) * np.uint64(FACTOR)
        result = result ^ (result >> np.uint64(29))
    return result


def windows(config: KVCacheConfig) -> tuple[int | None, ...]:
    """Per group the sliding window, None for full attention."""
    return tuple(
        group.spec.sliding_window if isinstance(group.spec, SlidingWindowSpec) else None for group in config.groups
    )


def read(stored: np.ndarray, first: int, window: int | None) -> np.ndarray:
    """What tokens from position `first` on read of `stored` [num_tokens]: a sum over each one's window, by position."""
    weighted = stored * (2 * np.arange(len(stored), dtype=np.uint64) + np.uint64(1))
    sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(weighted, dtype=np.uint64)])
    ends = np.arange(first + 1, len(stored) + 1)
    starts = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
    return sums[ends] - sums[starts]


def sample(state: int, seed: int, position: int, masked: frozenset[int]) -> int:
    """The token at `position`: the first unmasked one from a pseudo-random place on."""
    token = mix(state, seed, position) % VOCABULARY
    while token in masked:
        token = (token + 1) % VOCABULARY
    return token


@lru_cache(maxsize=4096)
def reference_tokens(
    prompt: tuple[int, ...],
    seed: int,
    group_windows: tuple[int | None, ...],
    count: int,
    masked: frozenset[int] = frozenset(),
    min_tokens: int = 0,
) -> tuple[int, ...]:
    """The first `count` tokens after `prompt`, computed alone, token by token, without blocks.

    Args:
        masked: Tokens that cannot be sampled before there are `min_tokens`.
    """
    tokens = list(prompt)
    sums: list[list[int]] = [[0] for _ in group_windows]  # per group, of what is stored before each position
    position = 0
    while len(tokens) < len(prompt) + count:
        state = 0
        for group, window in enumerate(group_windows):
            stored = mix(group, tokens[position], position, state)
            sums[group].append((sums[group][-1] + stored * (2 * position + 1)) & WORD)
            start = 0 if window is None else max(0, position + 1 - window)
            state = (sums[group][-1] - sums[group][start]) & WORD
        position += 1
        if position == len(tokens):
            generated = len(tokens) - len(prompt)
            tokens.append(sample(state, seed, position, masked if generated < min_tokens else frozenset()))
    return tuple(tokens[len(prompt) :])


class Row:
    """One row of the persistent batch."""

    def __init__(self, new: NewRequestData) -> None:
        self.request_id = new.request_id
        self.tokens = list(unpack_int32(new.token_ids))
        self.num_prompt_tokens = new.num_prompt_tokens
        self.computed = new.num_computed_tokens
        self.tables = [list(unpack_int32(table)) for table in new.block_ids]
        self.params = new.sampling_params
        self.masked = frozenset(new.stop_ids_until_min_tokens)

    def sample(self, state: int) -> int:
        generated = len(self.tokens) - self.num_prompt_tokens
        masked = self.masked if generated < self.params.min_tokens else frozenset()
        return sample(state, self.params.seed or 0, len(self.tokens), masked)


class FakeWorker:
    """Executes steps in the order given. With `samples=False` it is a stage that must be told the tokens.

    Attributes:
        writes: Of the last step: block → request that wrote it.
        window_writes: The same for groups with a window.
        batch: Of the last step: row → request.
        scheduled: Of the last step: request → tokens computed, in batch order.
    """

    def __init__(self, config: KVCacheConfig, *, samples: bool = True) -> None:
        self.block_size = config.groups[0].spec.block_size
        self.windows = windows(config)
        self.samples = samples
        rng = np.random.default_rng(7)
        self.memory = rng.integers(1, 2**63, (config.num_blocks, self.block_size)).astype(np.uint64)
        self.rows: dict[int, Row] = {}
        self.last_step = 0
        self.writes: dict[int, str] = {}
        self.window_writes: dict[int, str] = {}
        self.batch: dict[int, str] = {}
        self.scheduled: dict[str, int] = {}

    def execute(self, message: SchedulerOutput) -> ModelRunnerOutput:
        assert message.step == self.last_step + 1, "a gap in the steps"
        self.last_step = message.step
        self._apply(message)
        rows = list(unpack_int32(message.rows))
        counts = list(unpack_int32(message.num_scheduled_tokens)) or [1] * len(rows)
        assert len(rows) == len(counts) == len(set(rows)), "a row is in the batch twice"
        batch = [(self.rows[row], count) for row, count in zip(rows, counts, strict=True)]
        self.writes, self.window_writes = {}, {}
        self.batch = {index: self.rows[index].request_id for index in rows}
        self.scheduled = {row.request_id: count for row, count in batch}
        states = [np.zeros(count, np.uint64) for _, count in batch]
        for group, window in enumerate(self.windows):
            for index, (row, count) in enumerate(batch):
                self._write(group, row, count, states[index])
            for index, (row, count) in enumerate(batch):
                states[index] = self._read(group, window, row, count)
        sampled = []
        for (row, count), state in zip(batch, states, strict=True):
            row.computed += count
            assert row.computed <= len(row.tokens), f"{row.request_id}: computes a token nobody knows"
            if row.computed == len(row.tokens) and self.samples:
                token = row.sample(int(state[-1]))
                row.tokens.append(token)
                sampled.append(token)
        return ModelRunnerOutput(message.step, pack_int32(sampled))

    def _apply(self, message: SchedulerOutput) -> None:
        for new in message.new_requests:
            self.rows[new.row] = Row(new)
        if not self.samples:
            known_rows, known_tokens = unpack_int32(message.known_rows), unpack_int32(message.known_tokens)
            for row, token in zip(known_rows, known_tokens, strict=True):
                self.rows[row].tokens.append(token)
        for group, appends in enumerate(message.new_blocks):
            for row, block in zip(unpack_int32(appends.rows), unpack_int32(appends.block_ids), strict=True):
                self.rows[row].tables[group].append(block)

    def _write(self, group: int, row: Row, count: int, state: np.ndarray) -> None:
        positions = np.arange(row.computed, row.computed + count)
        blocks = np.array(row.tables[group])[positions // self.block_size]
        assert blocks.all(), f"{row.request_id}: writes to the null block"
        ids = np.array(row.tokens[row.computed : row.computed + count])
        self.memory[blocks, positions % self.block_size] = mix_columns(group, ids, positions, state)
        writes = self.writes if self.windows[group] is None else self.window_writes
        for block in set(blocks.tolist()):
            writer = writes.setdefault(block, row.request_id)
            assert writer == row.request_id, f"block {block} is written by {writer} and {row.request_id} in one step"

    def _read(self, group: int, window: int | None, row: Row, count: int) -> np.ndarray:
        end = row.computed + count
        table = np.array(row.tables[group])[: -(-end // self.block_size)]
        return read(self.memory[table].reshape(-1)[:end], row.computed, window)
