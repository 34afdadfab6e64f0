"""SmolLM2 in float32, greedy: the engine's tokens are those of transformers, whatever the layout and the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine_actors import LLM, AsyncLLM, SamplingParams
from tests.system.reference import (
    MAX_TOKENS,
    PROMPT_LENGTHS,
    QUICK_LENGTHS,
    QUICK_MAX_TOKENS,
    greedy_reference,
    mixed_prompts,
)

pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]
INPROC: dict[str, Any] = {"engine_core": "inproc", "distributed_executor_backend": "uni"}
OPTIONS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "num_gpu_blocks_override": 2600}
"""Room for all sequences at once; the preemption test gives less."""


@dataclass(frozen=True)
class Case:
    """Prompts, the tokens transformers generates for each alone, and a pool too small for all of them."""

    prompts: list[list[int]]
    reference: list[list[int]]
    params: SamplingParams
    tight_num_blocks: int


@pytest.fixture(scope="module", params=["quick", pytest.param("full", marks=pytest.mark.soak)])
def case(request: pytest.FixtureRequest, smollm2_dir: Path) -> Case:
    # The longest request takes 61 blocks of 16 (full) or 35 (quick); all together would need some 560, or 90.
    lengths, max_tokens, tight = {
        "quick": (QUICK_LENGTHS, QUICK_MAX_TOKENS, 37),
        "full": (PROMPT_LENGTHS, MAX_TOKENS, 90),
    }[request.param]
    prompts = mixed_prompts(smollm2_dir, lengths)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
    return Case(prompts, greedy_reference(smollm2_dir, prompts, max_tokens), params, tight)


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate(model: Path, prompts: list[list[int]], params: Any, **options: Any) -> list[list[int]]:
    with LLM(model=str(model), **{**OPTIONS, **options}) as llm:
        return tokens_of(llm.generate(prompts, params, use_tqdm=False))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="default"),
        pytest.param({"max_num_batched_tokens": 64}, id="chunked"),
        pytest.param({"enable_prefix_caching": False, "async_scheduling": True}, id="no-prefix-cache-async"),
    ],
)
def test_in_process_equals_transformers(smollm2_dir: Path, case: Case, options: dict[str, Any]) -> None:
    assert generate(smollm2_dir, case.prompts, case.params, **INPROC, **options) == case.reference


def test_preemption_does_not_change_tokens(smollm2_dir: Path, case: Case) -> None:
    longest = max(map(len, case.prompts)) + case.params.max_tokens
    tight = {"num_gpu_blocks_override": case.tight_num_blocks, "max_model_len": longest}
    with LLM(model=str(smollm2_dir), **{**OPTIONS, **INPROC, **tight}) as llm:
        outputs = llm.generate(case.prompts, case.params, use_tqdm=False)
    assert tokens_of(outputs) == case.reference
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_prefix_hits_do_not_change_tokens(smollm2_dir: Path, case: Case) -> None:
    with LLM(model=str(smollm2_dir), **OPTIONS, **INPROC) as llm:
        first = llm.generate(case.prompts, case.params, use_tqdm=False)
        again = llm.generate(case.prompts, case.params, use_tqdm=False)
    assert tokens_of(first) == case.reference
    assert tokens_of(again) == case.reference
    for prompt, output in zip(case.prompts, again, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.ray
@pytest.mark.parametrize(("tensor_parallel_size", "pipeline_parallel_size"), [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_every_layout_through_actors_equals_transformers(
    ray_cluster: None, smollm2_dir: Path, case: Case, tensor_parallel_size: int, pipeline_parallel_size: int
) -> None:
    layout = {
        "tensor_parallel_size": tensor_parallel_size,
        "pipeline_parallel_size": pipeline_parallel_size,
        "torch_num_threads": 1 if tensor_parallel_size * pipeline_parallel_size > 1 else None,
    }
    assert generate(smollm2_dir, case.prompts, case.params, **layout) == case.reference


@pytest.mark.ray
async def test_async_client_equals_transformers(ray_cluster: None, smollm2_dir: Path, case: Case) -> None:
    engine = AsyncLLM(model=str(smollm2_dir), **OPTIONS)

    async def run(prompt: list[int]) -> list[int]:
        final = None
        async for output in engine.generate(prompt, case.params):
            final = output
        assert final is not None
        return list(final.outputs[0].token_ids)

    try:
        assert await asyncio.gather(*map(run, case.prompts)) == case.reference
    finally:
        engine.shutdown()


@pytest.mark.ray
def test_a_seeded_request_draws_the_same_tokens_everywhere(ray_cluster: None, smollm2_dir: Path) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=seed, max_tokens=24, ignore_eos=True)

    batch = mixed_prompts(smollm2_dir, [*range(5, 20), 33])
    seeds = [params(seed) for seed in range(100, 116)]
    target = batch[-1]
    tight = {"num_gpu_blocks_override": 20, "max_model_len": 256}
    alone = generate(smollm2_dir, [target], params(115), **INPROC)[0]
    assert len(set(alone)) > 4
    assert generate(smollm2_dir, [target], params(116), **INPROC)[0] != alone
    assert generate(smollm2_dir, batch, seeds, **INPROC)[-1] == alone
    assert generate(smollm2_dir, batch, seeds, **INPROC, **tight)[-1] == alone
    assert generate(smollm2_dir, batch, seeds, tensor_parallel_size=2, torch_num_threads=1)[-1] == alone
