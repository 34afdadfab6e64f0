"""Fixed token-id workloads: (name, prompts, tokens to generate per prompt, what is counted).

Random ids, so no engine profits from a prefix cache or from stopping early. Figures count prompt tokens for the prefill
workload and output tokens for the others.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

VOCABULARY = range(100, 49000)


@dataclass(frozen=True)
class Workload:
    """Prompts that all arrive at once, and how many tokens each asks for."""

    name: str
    prompts: list[list[int]]
    max_tokens: list[int]
    counts_prompt: bool = False

    @property
    def counted_tokens(self) -> int:
        return sum(map(len, self.prompts)) if self.counts_prompt else sum(self.max_tokens)


def random_prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.choice(VOCABULARY) for _ in range(length)]


def standard_workloads() -> list[Workload]:
    """Decode at three batch sizes, one long prefill, a mix of lengths."""
    rng = random.Random(17)
    rows = [
        Workload(f"decode-{batch}", [random_prompt(rng, 16) for _ in range(batch)], [128] * batch)
        for batch in (1, 8, 32)
    ]
    rows.append(Workload("prefill-1900", [random_prompt(rng, 1900)], [1], counts_prompt=True))
    mixed = [random_prompt(rng, rng.randint(32, 512)) for _ in range(64)]
    rows.append(Workload("mixed-64", mixed, [rng.randint(32, 128) for _ in mixed]))
    return rows


def shared_prefix_workload() -> Workload:
    """32 requests behind one prefix of 1024 tokens, for engines with a prefix cache."""
    rng = random.Random(23)
    prefix = random_prompt(rng, 1024)
    return Workload("prefix-32", [prefix + random_prompt(rng, 64) for _ in range(32)], [32] * 32)
