"""SmolLM2 in float32, greedy: the engine's tokens are those of transformers, whatever the layout and the limits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine_actors import LLM, AsyncLLM, SamplingParams
from tests.system.reference import MAX_TOKENS, greedy_reference, mixed_prompts

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]
GREEDY = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, detokenize=False)
INPROC: dict[str, Any] = {"engine_core": "inproc", "distributed_executor_backend": "uni"}
BLOCKS = {"num_gpu_blocks_override": 2600}
"""Room for all 30 sequences at once; the preemption test gives less."""


@pytest.fixture(scope="module")
def prompts(smollm2_dir: Path) -> list[list[int]]:
    return mixed_prompts(smollm2_dir)


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path, prompts: list[list[int]]) -> list[list[int]]:
    return greedy_reference(smollm2_dir, prompts, MAX_TOKENS)


def tokens_of(outputs: Sequence[Any]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def generate(model: Path, prompts: list[list[int]], params: Any = GREEDY, **options: Any) -> list[list[int]]:
    options = {"dtype": "float32", "max_model_len": 1024, **BLOCKS, **options}
    with LLM(model=str(model), **options) as llm:
        return tokens_of(llm.generate(prompts, params, use_tqdm=False))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="default"),
        pytest.param({"max_num_batched_tokens": 64}, id="chunked"),
        pytest.param({"enable_prefix_caching": False, "async_scheduling": True}, id="no-prefix-cache-async"),
    ],
)
def test_in_process_equals_transformers(
    smollm2_dir: Path, prompts: list[list[int]], reference: list[list[int]], options: dict[str, Any]
) -> None:
    assert generate(smollm2_dir, prompts, **INPROC, **options) == reference


def test_preemption_does_not_change_tokens(
    smollm2_dir: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    # 964 tokens of the longest request take 61 blocks of 16; all thirty would need about 560.
    options = {**INPROC, "num_gpu_blocks_override": 90, "dtype": "float32", "max_model_len": 1024}
    with LLM(model=str(smollm2_dir), **options) as llm:
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens_of(outputs) == reference
    assert sum(output.metrics.num_preemptions for output in outputs) > 0


def test_prefix_hits_do_not_change_tokens(
    smollm2_dir: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    with LLM(model=str(smollm2_dir), dtype="float32", max_model_len=1024, **BLOCKS, **INPROC) as llm:
        first = llm.generate(prompts, GREEDY, use_tqdm=False)
        again = llm.generate(prompts, GREEDY, use_tqdm=False)
    assert tokens_of(first) == reference
    assert tokens_of(again) == reference
    for prompt, output in zip(prompts, again, strict=True):
        assert output.num_cached_tokens == (len(prompt) - 1) // 16 * 16


@pytest.mark.ray
@pytest.mark.parametrize(("tensor_parallel_size", "pipeline_parallel_size"), [(1, 1), (2, 1), (1, 2), (2, 2)], ids=str)
def test_every_layout_through_actors_equals_transformers(
    ray_cluster: None,
    smollm2_dir: Path,
    prompts: list[list[int]],
    reference: list[list[int]],
    tensor_parallel_size: int,
    pipeline_parallel_size: int,
) -> None:
    tokens = generate(
        smollm2_dir,
        prompts,
        tensor_parallel_size=tensor_parallel_size,
        pipeline_parallel_size=pipeline_parallel_size,
    )
    assert tokens == reference


@pytest.mark.ray
async def test_async_client_equals_transformers(
    ray_cluster: None, smollm2_dir: Path, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    engine = AsyncLLM(model=str(smollm2_dir), dtype="float32", max_model_len=1024, **BLOCKS)

    async def run(prompt: list[int]) -> list[int]:
        final = None
        async for output in engine.generate(prompt, GREEDY):
            final = output
        assert final is not None
        return list(final.outputs[0].token_ids)

    try:
        assert await asyncio.gather(*map(run, prompts)) == reference
    finally:
        engine.shutdown()


@pytest.mark.ray
def test_a_seeded_request_draws_the_same_tokens_everywhere(
    ray_cluster: None, smollm2_dir: Path, prompts: list[list[int]]
) -> None:
    def params(seed: int) -> SamplingParams:
        return SamplingParams(temperature=0.9, top_p=0.95, top_k=50, seed=seed, max_tokens=32, ignore_eos=True)

    target, neighbours = prompts[8], [*prompts[:8], *prompts[9:16]]
    batch, seeds = [*neighbours, target], [params(seed) for seed in range(100, 116)]
    alone = generate(smollm2_dir, [target], params(115), **INPROC)[0]
    assert len(set(alone)) > 4
    assert generate(smollm2_dir, [target], params(116), **INPROC)[0] != alone
    assert generate(smollm2_dir, batch, seeds, **INPROC)[-1] == alone
    assert generate(smollm2_dir, batch, seeds, **INPROC, num_gpu_blocks_override=20, max_model_len=256)[-1] == alone
    assert generate(smollm2_dir, batch, seeds, tensor_parallel_size=2)[-1] == alone
