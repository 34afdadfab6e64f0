"""Chained hashes that name the content of full KV blocks. Used by kv.manager; a router may use them too.

The hash of a block covers everything its KV depends on: the tokens of the block, the chain of blocks before it, and
what else changes the values (adapter) or may not be shared (cache salt). It is SHA-256 over canonical bytes, so it is
the same in every process, on every machine and in every run.
"""

from __future__ import annotations

import sys
from array import array
from hashlib import sha256

_DOMAIN = b"engine-actors/kv-block/1"


def root_hash(block_size: int, *, cache_salt: str | None = None, adapter: str | None = None) -> bytes:
    """The parent of a sequence's first block: 32 bytes from the block size and the extra keys.

    Each extra key is written as tag, length, value, so that no two different sets of keys give the same bytes, and
    a missing key differs from an empty one.
    """
    content = _DOMAIN + block_size.to_bytes(4, "little")
    for tag, value in ((b"salt", cache_salt), (b"adapter", adapter)):
        if value is not None:
            encoded = value.encode("utf-8", "surrogatepass")
            content += tag + len(encoded).to_bytes(8, "little") + encoded
    return sha256(content).digest()


def extend_block_hashes(
    hashes: list[bytes], root: bytes, token_ids: array[int], block_size: int, num_blocks: int
) -> None:
    """Append hashes to `hashes` until it has one for each of the first `num_blocks` blocks of `token_ids`."""
    parent = hashes[-1] if hashes else root
    for end in range((len(hashes) + 1) * block_size, num_blocks * block_size + 1, block_size):
        parent = sha256(parent + _canonical_bytes(token_ids[end - block_size : end])).digest()
        hashes.append(parent)


def _canonical_bytes(token_ids: array[int]) -> bytes:
    """Little-endian int32; takes the array over."""
    if sys.byteorder == "big":
        token_ids.byteswap()
    return token_ids.tobytes()
