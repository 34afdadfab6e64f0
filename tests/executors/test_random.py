"""The noise is exactly its definition, and looks random."""

from __future__ import annotations

import math

import numpy as np
import torch

from executors.random import gumbel_noise, row_keys, token_hashes

MASK = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def mix(z: int) -> int:
    z ^= z >> 30
    z = z * 0xBF58476D1CE4E5B9 & MASK
    z ^= z >> 27
    z = z * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def reference_hash(seed: int, position: int, token: int) -> int:
    key = mix((mix((seed + GOLDEN) & MASK) + position * GOLDEN) & MASK)
    return mix((key + (token + 1) * GOLDEN) & MASK)


def reference_gumbel(seed: int, position: int, token: int) -> np.float32:
    uniform = ((reference_hash(seed, position, token) >> 12) + 0.5) * 2.0**-52
    return np.float32(-math.log(-math.log(uniform)))


SEEDS = [0, 1, -1, 12345, 2**63 - 1, -(2**63)]
POSITIONS = [0, 1, 7, 4095, 131071, 3]
TOKENS = [0, 1, 2, 49151, 262143]


def test_hashes_equal_a_plain_python_reference_bit_for_bit() -> None:
    keys = row_keys(torch.tensor(SEEDS), torch.tensor(POSITIONS))
    hashes = token_hashes(keys, torch.tensor(TOKENS))
    expected = [[reference_hash(s, p, t) for t in TOKENS] for s, p in zip(SEEDS, POSITIONS, strict=True)]
    assert [[h & MASK for h in row] for row in hashes.tolist()] == expected


def test_noise_equals_a_plain_python_reference_bit_for_bit() -> None:
    noise = gumbel_noise(row_keys(torch.tensor(SEEDS), torch.tensor(POSITIONS)), torch.tensor(TOKENS))
    expected = [[reference_gumbel(s, p, t) for t in TOKENS] for s, p in zip(SEEDS, POSITIONS, strict=True)]
    assert noise.dtype == torch.float32
    assert noise.tolist() == np.array(expected).tolist()


def test_token_ids_may_differ_by_row() -> None:
    keys = row_keys(torch.tensor([5, 6]), torch.tensor([1, 2]))
    both = gumbel_noise(keys, torch.tensor([[3, 9], [9, 4]]))
    shared = gumbel_noise(keys, torch.arange(10))
    assert both.tolist() == [[shared[0, 3], shared[0, 9]], [shared[1, 9], shared[1, 4]]]


def test_noise_has_the_mean_and_variance_of_a_gumbel_distribution() -> None:
    noise = gumbel_noise(row_keys(torch.arange(100), torch.arange(100)), torch.arange(10_000)).double()
    assert abs(noise.mean().item() - 0.5772157) < 0.01
    assert abs(noise.var().item() - math.pi**2 / 6) < 0.02
    assert torch.isfinite(noise).all()


def test_neighbouring_seeds_positions_and_tokens_are_uncorrelated() -> None:
    def row(seed: int, position: int) -> torch.Tensor:
        return gumbel_noise(row_keys(torch.tensor([seed]), torch.tensor([position])), torch.arange(50_000))[0]

    base = row(7, 7)
    for other in (row(8, 7), row(7, 8), row(8, 6), base.roll(1)):
        correlation = torch.corrcoef(torch.stack([base, other]))[0, 1].item()
        assert abs(correlation) < 4 / math.sqrt(50_000)
