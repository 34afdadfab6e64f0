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
from scheduler.output import ModelRunnerOutput, SchedulerOutput, pack_int32, unpack_int32
from scheduler.sampling_params import SamplingParams

VOCABULARY = 997
MIX = np.uint64(0x9E3779B97F4A7C15)


def mix(*columns: np.ndarray | int) -> np.ndarray:
    """A 64-bit hash of columns of numbers."""
    with np.errstate(over="ignore"):
        value = np.uint64(0x243F6A8885A308D3)
        for column in columns:
            value = (value ^ np.asarray(column).astype(np.uint64)) * MIX
            value = value ^ (value >> np.uint64(29))
        return value


def windows(config: KVCacheConfig) -> tuple[int | None, ...]:
    """Per group the sliding window, None for full attention."""
    return tuple(
        group.spec.sliding_window if isinstance(group.spec, SlidingWindowSpec) else None for group in config.groups
    )


def read(stored: np.ndarray, first: int, window: int | None) -> np.ndarray:
    """What tokens from position `first` on read of `stored` [num_tokens]: a sum over each one's window, by position."""
    with np.errstate(over="ignore"):
        weighted = stored * (2 * np.arange(len(stored), dtype=np.uint64) + np.uint64(1))
        sums = np.concatenate([np.zeros(1, np.uint64), np.cumsum(weighted, dtype=np.uint64)])
        ends = np.arange(first + 1, len(stored) + 1)
        starts = np.zeros_like(ends) if window is None else np.maximum(0, ends - window)
        return sums[ends] - sums[starts]


def sample(state: np.uint64, seed: int, position: int) -> int:
    return int(mix(state, seed, position) % np.uint64(VOCABULARY))


@lru_cache(maxsize=4096)
def reference_tokens(
    prompt: tuple[int, ...], seed: int, group_windows: tuple[int | None, ...], count: int
) -> tuple[int, ...]:
    """The first `count` tokens after `prompt`, computed alone and from scratch."""
    tokens = list(prompt)
    for _ in range(count):
        ids, positions = np.array(tokens), np.arange(len(tokens))
        state = np.zeros(len(tokens), np.uint64)
        for group, window in enumerate(group_windows):
            state = read(mix(group, ids, positions, state), 0, window)
        tokens.append(sample(state[-1], seed, len(tokens)))
    return tuple(tokens[len(prompt) :])


class Row:
    """One row of the persistent batch."""

    def __init__(
        self, tokens: list[int], computed: int, tables: list[list[int]], params: SamplingParams, request_id: str
    ) -> None:
        self.tokens = tokens
        self.computed = computed
        self.tables = tables
        self.params = params
        self.request_id = request_id


class FakeWorker:
    """Executes steps in the order given. With `samples=False` it is a stage that must be told the tokens.

    Attributes:
        writes: Of the last step: (row, request_id, block) of each block it wrote.
    """

    def __init__(self, config: KVCacheConfig, *, samples: bool = True) -> None:
        self.block_size = config.groups[0].spec.block_size
        self.windows = windows(config)
        self.samples = samples
        rng = np.random.default_rng(7)
        self.memory = rng.integers(1, 2**63, (config.num_blocks, self.block_size)).astype(np.uint64)
        self.rows: dict[int, Row] = {}
        self.last_step = 0
        self.writes: set[tuple[int, str, int]] = set()
        self.num_tokens: dict[str, int] = {}

    def execute(self, message: SchedulerOutput) -> ModelRunnerOutput:
        assert message.step == self.last_step + 1, "a gap in the steps"
        self.last_step = message.step
        self._apply(message)
        rows = list(unpack_int32(message.rows))
        counts = list(unpack_int32(message.num_scheduled_tokens)) or [1] * len(rows)
        assert len(rows) == len(counts) == len(set(rows)), "a row is in the batch twice"
        batch = [(self.rows[row], count) for row, count in zip(rows, counts, strict=True)]
        self.writes = set()
        states = [np.zeros(count, np.uint64) for _, count in batch]
        for group, window in enumerate(self.windows):
            for index, (row, count) in enumerate(batch):
                self._write(group, rows[index], row, count, states[index])
            for index, (row, count) in enumerate(batch):
                states[index] = self._read(group, window, row, count)
        sampled = []
        for (row, count), state in zip(batch, states, strict=True):
            row.computed += count
            assert row.computed <= len(row.tokens), f"{row.request_id}: computes a token nobody knows"
            self.num_tokens[row.request_id] = row.computed
            if row.computed == len(row.tokens) and self.samples:
                token = sample(state[-1], row.params.seed or 0, len(row.tokens))
                row.tokens.append(token)
                sampled.append(token)
        return ModelRunnerOutput(message.step, pack_int32(sampled))

    def _apply(self, message: SchedulerOutput) -> None:
        for new in message.new_requests:
            self.rows[new.row] = Row(
                list(unpack_int32(new.token_ids)),
                new.num_computed_tokens,
                [list(unpack_int32(table)) for table in new.block_ids],
                new.sampling_params,
                new.request_id,
            )
        if not self.samples:
            known_rows, known_tokens = unpack_int32(message.known_rows), unpack_int32(message.known_tokens)
            for row, token in zip(known_rows, known_tokens, strict=True):
                self.rows[row].tokens.append(token)
        for group, appends in enumerate(message.new_blocks):
            for row, block in zip(unpack_int32(appends.rows), unpack_int32(appends.block_ids), strict=True):
                self.rows[row].tables[group].append(block)

    def _write(self, group: int, index: int, row: Row, count: int, state: np.ndarray) -> None:
        positions = np.arange(row.computed, row.computed + count)
        blocks = np.array(row.tables[group])[positions // self.block_size]
        assert blocks.all(), f"{row.request_id}: writes to the null block"
        ids = np.array(row.tokens[row.computed : row.computed + count])
        self.memory[blocks, positions % self.block_size] = mix(group, ids, positions, state)
        self.writes.update((index, row.request_id, int(block)) for block in blocks)

    def _read(self, group: int, window: int | None, row: Row, count: int) -> np.ndarray:
        end = row.computed + count
        table = np.array(row.tables[group])[: -(-end // self.block_size)]
        return read(self.memory[table].reshape(-1)[:end], row.computed, window)
