"""Counter-based random numbers of the sampler: the noise of token t at position p of a request is f(seed, p, t).

There is no generator state, so neither batch composition nor preemption nor the parallel layout can change a draw.
Called by `executors.sampler`. The definition is exact, so that C++ or Triton can reproduce it bit for bit;
all integer arithmetic is modulo 2**64, and `>>` shifts zeros in:

    mix(z)      : z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
    key(s, p)   = mix(mix(s + G) + p * G)                   with G = 0x9E3779B97F4A7C15
    hash(s,p,t) = mix(key(s, p) + (t + 1) * G)
    uniform     = ((hash >> 12) + 0.5) * 2**-52             a float64 strictly between 0 and 1, without rounding
    gumbel      = float32(-log(-log(uniform)))              both logarithms in float64

The logarithms are in float64 so that libraries that differ in its last bits still agree after rounding to float32.
`mix` is the finaliser of SplitMix64 (Steele, Lea, Flood 2014; constants by Stafford), G its increment.
"""

from __future__ import annotations

import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The int64 with the same 64 bits: torch has no complete uint64 arithmetic, but int64 wraps alike."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _xor_shifted(z: torch.Tensor, bits: int) -> None:
    """z ^= z >> bits, with zeros shifted in (torch's >> on int64 copies the sign)."""
    z.bitwise_xor_((z >> bits).bitwise_and_((1 << (64 - bits)) - 1))


def _mix(z: torch.Tensor) -> torch.Tensor:
    """`mix` of the module docstring, in place."""
    _xor_shifted(z, 30)
    z.mul_(_signed(_MULTIPLIER_1))
    _xor_shifted(z, 27)
    z.mul_(_signed(_MULTIPLIER_2))
    _xor_shifted(z, 31)
    return z


def row_keys(seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """`key` of each row.

    Args:
        seeds: int64 [n].
        positions: int64 [n], index of the token to be drawn in prompt + output.

    Returns:
        int64 [n].
    """
    golden = _signed(_GOLDEN)
    return _mix(_mix(seeds + golden).add_(positions * golden))


def token_hashes(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """`hash` of each row's tokens.

    Args:
        keys: int64 [n], from `row_keys`.
        token_ids: int64 [k], the same for all rows, or [n, k].

    Returns:
        int64 [n, k], all 64 bits random.
    """
    return _mix((token_ids + 1) * _signed(_GOLDEN) + keys.unsqueeze(-1))


def gumbel_noise(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Standard Gumbel noise of each row's tokens; arguments as for `token_hashes`.

    Adding it to scaled logits and taking the largest draws from their softmax (Gumbel 1954).

    Returns:
        float32 [n, k].
    """
    bits = (token_hashes(keys, token_ids) >> 12).bitwise_and_((1 << 52) - 1)
    uniform = bits.to(torch.float64).add_(0.5).mul_(2.0**-52)
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
