"""Prompts of a benchmark: random tokens, or those of a file. Used by `engine-actors bench`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from engine_actors.bench.client import BenchRequest


def random_prompts(
    tokenizer: str,
    num_prompts: int,
    input_len: int,
    output_len: int,
    range_ratio: float,
    prefix_len: int,
    seed: int,
    *,
    as_text: bool,
) -> list[BenchRequest]:
    """Prompts of random tokens that are not special.

    Args:
        tokenizer: Directory or hub id.
        range_ratio: Lengths are drawn evenly from len × (1 - ratio) to len × (1 + ratio).
        prefix_len: Tokens that all begin with, besides input_len.
        as_text: Decode the prompts; their length as tokens may then differ by a few.
    """
    for name, value, least in (("num_prompts", num_prompts, 1), ("input_len", input_len, 1),
                               ("output_len", output_len, 1), ("prefix_len", prefix_len, 0)):  # fmt: skip
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    if not 0 <= range_ratio < 1:
        raise ValueError(f"random_range_ratio must be in [0, 1), got {range_ratio}")
    loaded = _load(tokenizer)
    special = set(loaded.all_special_ids)
    allowed = [token for token in range(len(loaded)) if token not in special]
    draw = random.Random(seed)
    prefix = draw.choices(allowed, k=prefix_len)
    requests = []
    for _ in range(num_prompts):
        length, max_tokens = (_vary(draw, value, range_ratio) for value in (input_len, output_len))
        token_ids = prefix + draw.choices(allowed, k=length)
        prompt: str | list[int] = loaded.decode(token_ids) if as_text else token_ids
        requests.append(BenchRequest(prompt, len(token_ids), max_tokens))
    return requests


def read_prompts(path: Path, tokenizer: str, num_prompts: int, output_len: int) -> list[BenchRequest]:
    """The first prompts of a file, a JSON object {"prompt": text, "output_tokens": optional} a line."""
    loaded = _load(tokenizer)
    requests: list[BenchRequest] = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if len(requests) == num_prompts:
            break
        if not line.strip():
            continue
        try:
            data = json.loads(line)
            prompt = data["prompt"]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path}, line {number} must be an object with a prompt: {error!r}") from error
        requests.append(BenchRequest(prompt, len(loaded.encode(prompt)), int(data.get("output_tokens", output_len))))
    if not requests:
        raise ValueError(f"{path} has no prompts")
    return requests


def _load(tokenizer: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(tokenizer)
    except (OSError, ValueError) as error:
        raise ValueError(f"no tokenizer at {tokenizer!r}; give --tokenizer") from error


def _vary(draw: random.Random, value: int, ratio: float) -> int:
    return draw.randint(max(1, round(value * (1 - ratio))), max(1, round(value * (1 + ratio)))) if ratio else value
