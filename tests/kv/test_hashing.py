"""Block hashes: chained, domain-tagged, the same everywhere."""

from __future__ import annotations

import struct
import subprocess
import sys
from array import array
from hashlib import sha256

from hypothesis import given
from hypothesis import strategies as st

from kv.hashing import extend_block_hashes, root_hash


def hashes(tokens: list[int], block_size: int = 4, **extra: str | None) -> list[bytes]:
    result: list[bytes] = []
    count = len(tokens) // block_size
    extend_block_hashes(result, root_hash(block_size, **extra), array("i", tokens), block_size, count)
    return result


TOKENS = [1, 2, 3, 4, -1, 2**31 - 1, 0, 7]


def test_hashes_are_the_same_in_every_process_and_run() -> None:
    code = f"from tests.kv.test_hashing import hashes; print(hashes({TOKENS})[1].hex())"
    for seed in ("1", "2"):
        environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
        )  # fmt: skip
        assert done.stdout.strip() == hashes(TOKENS)[1].hex()


def test_the_hashed_bytes_are_canonical() -> None:
    # Written out, because changing them would silently invalidate hashes shared between processes and versions.
    root = sha256(b"engine-actors/kv-block/1" + struct.pack("<i", 4) + b"salt" + struct.pack("<q", 2) + b"\xc3\xa9")
    first = sha256(root.digest() + struct.pack("<4i", *TOKENS[:4]))
    second = sha256(first.digest() + struct.pack("<4i", *TOKENS[4:]))
    assert hashes(TOKENS, cache_salt="é") == [first.digest(), second.digest()]


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(hashes(list(range(length)))) for length in (0, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


def test_a_hash_covers_all_tokens_before_it_and_none_after() -> None:
    base = hashes([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    changed = hashes([1, 2, 3, 4, 5, 6, 0, 8, 9, 10, 11, 12])
    assert [a == b for a, b in zip(base, changed, strict=True)] == [True, False, False]
    assert len(set(hashes([7] * 12))) == 3


@given(st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40), st.lists(st.integers(0, 10), max_size=5))
def test_hashes_grow_as_if_computed_at_once(tokens: list[int], stops: list[int]) -> None:
    grown: list[bytes] = []
    for count in [*stops, len(tokens) // 4]:
        extend_block_hashes(grown, root_hash(4), array("i", tokens), 4, min(count, len(tokens) // 4))
    assert grown == hashes(tokens)


def test_extra_keys_never_collide() -> None:
    roots = {
        root_hash(16),
        root_hash(32),
        root_hash(16, cache_salt=""),
        root_hash(16, adapter=""),
        root_hash(16, cache_salt="x"),
        root_hash(16, adapter="x"),
        root_hash(16, cache_salt="x", adapter="y"),
        root_hash(16, cache_salt="y", adapter="x"),
        root_hash(16, cache_salt="xadapter\x01\x00\x00\x00\x00\x00\x00\x00y"),
        root_hash(16, cache_salt="\udc80"),
    }
    assert len(roots) == 10
    assert root_hash(16, cache_salt="x") == root_hash(16, cache_salt="x")
