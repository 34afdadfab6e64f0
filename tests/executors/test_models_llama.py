"""Llama, Mistral, Qwen2 and Qwen3 against transformers in float32: chunked prefill and decode in mixed batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.executors.paged_runner import PagedRequest, PagedRunner, load, random_tokens

SMALL: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.15,
    "tie_word_embeddings": False,
}
LLAMA3_ROPE = {
    "rope_type": "llama3", "rope_theta": 1000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0, "original_max_position_embeddings": 64}

CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama-gqa": (transformers.LlamaConfig, {}),
    "llama-tied": (transformers.LlamaConfig, {"tie_word_embeddings": True}),
    "llama-biases": (transformers.LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "llama-head-dim": (transformers.LlamaConfig, {"head_dim": 12}),
    "llama-rope-llama3": (transformers.LlamaConfig, {"rope_parameters": LLAMA3_ROPE}),
    "llama-rope-linear": (
        transformers.LlamaConfig,
        {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}},
    ),
    "llama-rope-yarn": (transformers.LlamaConfig, {"rope_parameters": YARN_ROPE}),
    "mistral-full": (transformers.MistralConfig, {"sliding_window": None}),
    "mistral-window": (transformers.MistralConfig, {"sliding_window": 9}),
    "qwen2": (transformers.Qwen2Config, {}),
    "qwen2-window": (
        transformers.Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": (transformers.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-biases": (transformers.Qwen3Config, {"head_dim": 8, "attention_bias": True}),
}


def save_random_model(config: Any, path: Path, seed: int = 0) -> Any:
    """A transformers model with random weights, norms and biases too, saved to `path` in float32."""
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            elif "layers" in name:
                parameter.mul_(1.5)
    model.save_pretrained(path)
    return model


@torch.no_grad()
def reference_logits(model: Any, tokens: list[int]) -> torch.Tensor:
    return model(torch.tensor([tokens])).logits[0]


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers_through_chunks_and_mixed_batches(case: str, tmp_path: Path) -> None:
    config_class, changes = CASES[case]
    reference = save_random_model(config_class(**{**SMALL, **changes}), tmp_path)
    runner = PagedRunner(load(tmp_path))
    requests = [PagedRequest(random_tokens(length, 97, seed=length)) for length in (41, 13, 30, 1)]
    # Whole prompts, chunks that start and end inside blocks, decodes beside prefills, far past the window.
    chunks = [(7, 13, 0, 0), (20, 0, 5, 1), (1, 0, 11, 0), (1, 0, 1, 0), *[(1, 0, 1, 0)] * 11, (1, 0, 2, 0)]
    ours = runner.run_schedule(requests, chunks)
    for request, logits in zip(requests, ours, strict=True):
        expected = reference_logits(reference, request.tokens)[: request.num_computed]
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_sliding_window_layers_report_window_specs(tmp_path: Path) -> None:
    config_class, changes = CASES["qwen2-window"]
    save_random_model(config_class(**{**SMALL, **changes}), tmp_path)
    specs = load(tmp_path).kv_cache_specs(block_size=16, dtype_bytes=2)
    assert list(specs) == [f"model.layers.{i}.self_attn.attn" for i in range(3)]
    assert [getattr(spec, "sliding_window", None) for spec in specs.values()] == [None, 9, 9]
    assert all((s.block_size, s.num_kv_heads, s.head_size, s.dtype_bytes) == (16, 2, 8, 2) for s in specs.values())
