"""Plays the scheduler for executor tests: rows, blocks and steps made by hand; and a small random Llama to run."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import numpy as np
import torch
from transformers import AutoModelForCausalLM, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from executors.base import Executor, StepFuture
from kv.config import CacheConfig
from kv.planner import plan_kv_cache
from scheduler.config import SchedulerConfig
from scheduler.output import (
    BlockAppends,
    ModelRunnerOutput,
    NewRequestData,
    SchedulerOutput,
    pack_int32,
    unpack_int32,
)
from scheduler.sampling_params import SamplingParams
from scheduler.structured_output import GrammarBitmask

GREEDY = SamplingParams(temperature=0)


def save_tiny_llama(directory: Path) -> Path:
    """A float32 Llama of 4 layers, 4 heads, 2 KV heads and a vocabulary of 260, with random weights."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=260, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(directory)
    return directory


def save_tiny_gemma(directory: Path) -> Path:
    """A float32 Gemma 3 of 6 layers, every third one full attention, the others with a window of 12 tokens."""
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, vocab_size=260, max_position_embeddings=256, sliding_window=12, initializer_range=0.1,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
    )  # fmt: skip
    Gemma3ForCausalLM(config).save_pretrained(directory)
    return directory


def transformers_greedy(directory: Path, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Greedy tokens by transformers, one prompt at a time, never stopping."""
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    tokens = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=num_tokens, min_new_tokens=num_tokens,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        tokens.append(out[0, len(prompt) :].tolist())
    return tokens


@dataclass
class Request:
    row: int
    token_ids: list[int]
    num_prompt_tokens: int
    params: SamplingParams
    num_computed: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    """By KV group."""
    is_new: bool = True


class StepDriver:
    """Gives each request its own blocks and runs all of them in every step."""

    def __init__(
        self,
        executor: Executor,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        known_tokens: bool = False,
    ) -> None:
        """
        Args:
            known_tokens: Send sampled tokens back, as pipeline stages need it.
        """
        self.executor = executor
        self.block_size = cache_config.block_size
        plan = plan_kv_cache(
            executor.get_kv_cache_specs(),
            executor.determine_available_memory(),
            cache_config,
            max_model_len=scheduler_config.max_model_len,
            max_num_batched_tokens=scheduler_config.max_num_batched_tokens,
        )
        executor.initialize_from_config(plan.configs)
        self.num_groups = len(plan.configs[0].groups)
        self.known_tokens = known_tokens
        self.step = 0
        self.next_block = 1
        self.requests: list[Request] = []
        self._known: list[tuple[int, int]] = []

    def add(self, prompt: list[int], params: SamplingParams = GREEDY) -> Request:
        blocks: list[list[int]] = [[] for _ in range(self.num_groups)]
        request = Request(len(self.requests), list(prompt), len(prompt), params, blocks=blocks)
        self.requests.append(request)
        return request

    def schedule(self, requests: list[Request], chunk: int, structured: bool = False) -> SchedulerOutput:
        """One step: up to `chunk` tokens of each request."""
        self.step += 1
        new, counts = [], []
        appended: list[list[tuple[int, int]]] = [[] for _ in range(self.num_groups)]
        for request in requests:
            count = min(chunk, len(request.token_ids) - request.num_computed)
            counts.append(count)
            for table, group_appended in zip(request.blocks, appended, strict=True):
                needed = -(-(request.num_computed + count) // self.block_size) - len(table)
                blocks = range(self.next_block, self.next_block + needed)
                self.next_block += needed
                table += blocks
                if not request.is_new:
                    group_appended += [(request.row, block) for block in blocks]
            if request.is_new:
                request.is_new = False
                new.append(
                    NewRequestData(
                        request.row, f"r{request.row}", pack_int32(request.token_ids), request.num_prompt_tokens,
                        request.num_computed, [pack_int32(table) for table in request.blocks], request.params,
                    )
                )  # fmt: skip
        known, self._known = self._known if self.known_tokens else [], []
        new_blocks = [
            BlockAppends(pack_int32(r for r, _ in pairs), pack_int32(b for _, b in pairs)) for pairs in appended
        ]
        return SchedulerOutput(
            step=self.step,
            rows=pack_int32(r.row for r in requests),
            num_scheduled_tokens=b"" if all(count == 1 for count in counts) else pack_int32(counts),
            new_requests=new,
            new_blocks=new_blocks if any(appended) else [],
            known_rows=pack_int32(row for row, _ in known),
            known_tokens=pack_int32(token for _, token in known),
            has_structured_output=structured,
        )

    def finish(self, requests: list[Request], chunk: int, output: ModelRunnerOutput) -> None:
        """Take in what `schedule(requests, chunk)` produced."""
        sampled = iter(unpack_int32(output.sampled_token_ids))
        for request in requests:
            request.num_computed += min(chunk, len(request.token_ids) - request.num_computed)
            if request.num_computed == len(request.token_ids):
                token = next(sampled)
                request.token_ids.append(token)
                self._known.append((request.row, token))
        assert next(sampled, None) is None

    def dispatch(self, requests: list[Request], chunk: int = 1000) -> StepFuture[ModelRunnerOutput | None]:
        return self.executor.execute_model(self.schedule(requests, chunk))

    def run_step(self, requests: list[Request], chunk: int = 1000) -> None:
        output = self.dispatch(requests, chunk).result(60)
        assert output is not None
        self.finish(requests, chunk, output)

    def generate(
        self, prompts: list[list[int]], num_tokens: int, params: SamplingParams = GREEDY, chunk: int = 1000
    ) -> list[list[int]]:
        requests = [self.add(prompt, params) for prompt in prompts]
        while running := [r for r in requests if len(r.token_ids) - r.num_prompt_tokens < num_tokens]:
            self.run_step(running, chunk)
        return [r.token_ids[r.num_prompt_tokens :] for r in requests]


def only_tokens(allowed: dict[int, list[int]], num_words: int) -> bytes:
    """The message of `sample_tokens` that allows these tokens by row."""
    mask = np.zeros((len(allowed), num_words), dtype=np.uint32)
    for words, tokens in zip(mask, allowed.values(), strict=True):
        for token in tokens:
            words[token // 32] |= np.uint32(1 << token % 32)
    return msgspec.msgpack.encode(GrammarBitmask(pack_int32(allowed), mask.tobytes()))
