"""Gemma 2 and 3 against transformers in float32: layer patterns, norms, ropes, soft caps, prefix-LM attention."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from kv.spec import FullAttentionSpec, SlidingWindowSpec
from tests.executors.paged_runner import PagedRequest, PagedRunner, load, random_tokens
from tests.executors.test_models_llama import reference_logits, save_random_model

SLIDING, FULL = "sliding_attention", "full_attention"
SMALL: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "sliding_window": 7,
    "query_pre_attn_scalar": 24,
    "pad_token_id": 0,
}
PATTERNS = {
    "local-first": [SLIDING, SLIDING, SLIDING, FULL],
    "alternating": [SLIDING, FULL, SLIDING, FULL],
    "global-first": [FULL, SLIDING, SLIDING, SLIDING],
    "all-local": [SLIDING] * 4,
    "all-global": [FULL] * 4,
}


@pytest.mark.parametrize("pattern", PATTERNS)
def test_logits_match_transformers_for_each_layer_pattern(pattern: str, tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(**SMALL, layer_types=PATTERNS[pattern])
    reference = save_random_model(config, tmp_path)
    runner = PagedRunner(load(tmp_path))
    requests = [PagedRequest(random_tokens(length, 101, seed=length)) for length in (41, 17)]
    chunks = [(5, 17), (24, 0), *[(1, 0)] * 12]
    for request, logits in zip(requests, runner.run_schedule(requests, chunks), strict=True):
        expected = reference_logits(reference, request.tokens)
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_scaled_global_rope_and_final_soft_cap_match_transformers(tmp_path: Path) -> None:
    rope = {
        FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000.0},
        SLIDING: {"rope_type": "default", "rope_theta": 100.0},
    }
    config = transformers.Gemma3TextConfig(
        **SMALL, layer_types=PATTERNS["alternating"], rope_parameters=rope, final_logit_softcapping=3.0
    )
    reference = save_random_model(config, tmp_path)
    request = PagedRequest(random_tokens(30, 101, seed=1))
    (logits,) = PagedRunner(load(tmp_path)).run_schedule([request], [(20,), (10,)])
    torch.testing.assert_close(logits, reference_logits(reference, request.tokens), atol=1e-4, rtol=0)
    assert logits.abs().max() < 3.0


def test_gemma2_soft_caps_match_transformers(tmp_path: Path) -> None:
    config = transformers.Gemma2Config(
        **SMALL, layer_types=PATTERNS["alternating"], attn_logit_softcapping=2.0, final_logit_softcapping=5.0
    )
    config._attn_implementation = "eager"
    reference = save_random_model(config, tmp_path)
    requests = [PagedRequest(random_tokens(length, 101, seed=length)) for length in (30, 11)]
    chunks = [(20, 11), *[(1, 0)] * 10]
    for request, logits in zip(requests, PagedRunner(load(tmp_path)).run_schedule(requests, chunks), strict=True):
        torch.testing.assert_close(logits, reference_logits(reference, request.tokens), atol=1e-4, rtol=0)


def test_specs_follow_layer_types(tmp_path: Path) -> None:
    save_random_model(transformers.Gemma3TextConfig(**SMALL, layer_types=PATTERNS["local-first"]), tmp_path)
    model = load(tmp_path)
    assert list(model.kv_cache_specs(16, 4).values()) == [
        *[SlidingWindowSpec(16, 2, 16, 4, sliding_window=7)] * 3,
        FullAttentionSpec(16, 2, 16, 4),
    ]


@pytest.mark.parametrize("pattern", ["all-global", "alternating"])
def test_bidirectional_config_is_a_prefix_lm(pattern: str, tmp_path: Path) -> None:
    config = transformers.Gemma3TextConfig(**SMALL, layer_types=PATTERNS[pattern], use_bidirectional_attention=True)
    reference = save_random_model(config, tmp_path)
    model = load(tmp_path)
    assert all(spec.non_causal for spec in model.kv_cache_specs(16, 4).values())
    tokens = random_tokens(24, 101, seed=3)
    request = PagedRequest(tokens, prompt_len=20)
    (logits,) = PagedRunner(model).run_schedule([request], [(20,), (1,), (1,), (1,), (1,)])

    with torch.no_grad():
        out = reference(torch.tensor([tokens[:20]]), use_cache=True)
        expected = [out.logits[0]]
        for token in tokens[20:]:
            out = reference(torch.tensor([[token]]), use_cache=True, past_key_values=out.past_key_values)
            expected.append(out.logits[0])
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-4, rtol=0)

    # Recomputed after a preemption, prompt and generated tokens come in one step: the same result.
    again = PagedRequest(tokens, prompt_len=20)
    (logits,) = PagedRunner(model).run_schedule([again], [(24,)])
    torch.testing.assert_close(logits, torch.cat(expected), atol=1e-4, rtol=0)
