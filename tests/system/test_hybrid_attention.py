"""Sliding windows and prefix LMs through the whole engine: the tokens of transformers, whatever the scheduler does.

The random models have a window of 12 tokens and blocks of 8, so every prompt but the shortest ones leaves its window.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from engine_actors import LLM, SamplingParams
from tests.system.reference import greedy_reference, mixed_prompts

SLIDING, FULL = "sliding_attention", "full_attention"
WINDOW, BLOCK, VOCAB, NUM_TOKENS = 12, 8, 200, 20
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256, "initializer_range": 0.2,
    "tie_word_embeddings": False, "sliding_window": WINDOW, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
PATTERNS = {
    "gemma-local-first": [SLIDING, SLIDING, SLIDING, FULL],
    "gemma-alternating": [SLIDING, FULL, SLIDING, FULL],
    "gemma-all-local": [SLIDING] * 4,
}
LENGTHS = (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * BLOCK, 2 * WINDOW + 1, 63, 90)
OPTIONS: dict[str, Any] = {
    "engine_core": "inproc", "distributed_executor_backend": "uni", "skip_tokenizer_init": True, "dtype": "float32",
    "block_size": BLOCK, "max_model_len": 128, "torch_num_threads": 1, "max_num_seqs": 8,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, detokenize=False)


def random_prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCAB, (length,), generator=generator).tolist()


PROMPTS = [random_prompt(length) for length in LENGTHS]


def make_model(name: str) -> torch.nn.Module:
    torch.manual_seed(0)
    if name == "mistral":
        return transformers.MistralForCausalLM(transformers.MistralConfig(**SMALL))
    bidirectional = name == "prefix-lm"
    layers = PATTERNS["gemma-alternating" if bidirectional else name]
    config = transformers.Gemma3TextConfig(
        **SMALL, query_pre_attn_scalar=16, layer_types=layers, use_bidirectional_attention=bidirectional
    )
    return transformers.Gemma3ForCausalLM(config)


def greedy_alone(model: torch.nn.Module, prompt: list[int]) -> list[int]:
    """Greedy tokens by transformers, step by step over its own cache."""
    tokens: list[int] = []
    out = model.eval()(torch.tensor([prompt]), use_cache=True)
    while True:
        tokens.append(int(out.logits[0, -1].argmax()))
        if len(tokens) == NUM_TOKENS:
            return tokens
        out = model(torch.tensor([tokens[-1:]]), use_cache=True, past_key_values=out.past_key_values)


@pytest.fixture(scope="module")
def model_and_reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, list[list[int]]]]:
    made: dict[str, tuple[Path, list[list[int]]]] = {}

    def get(name: str) -> tuple[Path, list[list[int]]]:
        if name not in made:
            model, folder = make_model(name), tmp_path_factory.mktemp(name)
            model.save_pretrained(folder)  # type: ignore[operator]
            with torch.no_grad():
                made[name] = folder, [greedy_alone(model, prompt) for prompt in PROMPTS]
            # Random models like to repeat one token for ever, whatever they attend to.
            assert all(len(set(tokens)) > 2 for tokens in made[name][1])
        return made[name]

    return get


def run_twice(folder: Path, **options: Any) -> tuple[list[list[int]], list[Any]]:
    """Tokens of the first run of all prompts, and outputs of the second, which may hit the prefix cache."""
    with LLM(str(folder), **{**OPTIONS, **options}) as llm:
        first, second = (llm.generate(PROMPTS, GREEDY, use_tqdm=False) for _ in range(2))
    return [list(output.outputs[0].token_ids) for output in first], second


@pytest.mark.parametrize("name", [*PATTERNS, "mistral"])
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, id="default"),
        pytest.param({"max_num_batched_tokens": 9, "async_scheduling": True}, id="chunked-async"),
        pytest.param({"num_gpu_blocks_override": None}, id="preempted"),
    ],
)
def test_windows_give_the_tokens_of_transformers(
    model_and_reference: Callable[[str], tuple[Path, list[list[int]]]], name: str, options: dict[str, Any]
) -> None:
    folder, reference = model_and_reference(name)
    preempted = "num_gpu_blocks_override" in options
    if preempted:  # room for little more than one sequence of full length in every group
        options = {
            "num_gpu_blocks_override": {"gemma-local-first": 66, "gemma-all-local": 20, "mistral": 20}.get(name, 34)
        }
    first, second = run_twice(folder, **options)
    assert first == reference
    assert [list(output.outputs[0].token_ids) for output in second] == reference
    if preempted and FULL in PATTERNS.get(name, []):  # windows alone never outgrow what admission reserved for them
        assert sum(output.metrics.num_preemptions for output in second) > 0
    elif not preempted:
        assert second[-1].num_cached_tokens >= len(PROMPTS[-1]) // BLOCK * BLOCK - BLOCK


def test_prefix_lm_switches_chunks_and_prefix_cache_off_and_is_right(
    model_and_reference: Callable[[str], tuple[Path, list[list[int]]]], caplog: pytest.LogCaptureFixture
) -> None:
    folder, reference = model_and_reference("prefix-lm")
    with caplog.at_level("INFO"):
        first, second = run_twice(folder)
    assert first == reference
    assert [list(output.outputs[0].token_ids) for output in second] == reference
    assert {output.num_cached_tokens for output in second} == {0}
    assert "non-causal" in caplog.text


def test_prefix_lm_with_chunks_and_prefix_cache_left_on_would_be_wrong(
    model_and_reference: Callable[[str], tuple[Path, list[list[int]]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from kv.spec import KVCacheConfig

    folder, reference = model_and_reference("prefix-lm")
    monkeypatch.setattr(KVCacheConfig, "has_non_causal_layers", property(lambda self: False))
    first, _ = run_twice(folder, max_num_batched_tokens=9)
    assert first[0] == reference[0]  # one token: nothing to look ahead to
    assert first[-1] != reference[-1]


@pytest.mark.soak
@pytest.mark.model
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"num_gpu_blocks_override": 4000}, id="default"),
        pytest.param({"num_gpu_blocks_override": 4000, "max_num_batched_tokens": 128}, id="chunked"),
        pytest.param({"num_gpu_blocks_override": 800}, id="tight"),
    ],
)
def test_real_gemma_3_beyond_several_windows(options: dict[str, Any]) -> None:
    """Gemma 3 270M, window 512. Optional: fetching it means accepting the Gemma terms of use."""
    from engine_actors.fetch_model import fetch_model

    folder = fetch_model("gemma-3-270m")
    prompts = mixed_prompts(folder, [511, 512, 513, 1100, 1700])
    reference = greedy_reference(folder, prompts, 24)
    sizes = {"dtype": "float32", "max_model_len": 2048, "block_size": 16, "torch_num_threads": 2}
    params = GREEDY.clone(max_tokens=24)
    with LLM(str(folder), **{**OPTIONS, **sizes, **options}) as llm:
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == reference
