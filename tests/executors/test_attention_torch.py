"""The torch attention backend against dense attention, in mixed batches over paged caches; and the registry."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from executors.attention.base import AttentionParams
from executors.attention.registry import _BACKENDS, backend_names, get_backend, register_backend
from executors.attention.torch_backend import TorchAttentionBackend, _bucket
from tests.executors.attention_cases import MIXED, dense_attention, make_case, run

BASE = AttentionParams(num_heads=6, num_kv_heads=2, head_size=16, scale=0.25)
VARIANTS = {
    "grouped": BASE,
    "multi-head": replace(BASE, num_kv_heads=6),
    "multi-query": replace(BASE, num_kv_heads=1),
    "window": replace(BASE, sliding_window=20),
    "window-of-block": replace(BASE, sliding_window=16),
    "window-of-one": replace(BASE, sliding_window=1),
    "soft-cap": replace(BASE, logits_soft_cap=2.0),
    "window-and-soft-cap": replace(BASE, sliding_window=33, logits_soft_cap=2.0),
}
BACKEND = TorchAttentionBackend()


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("block_size", [1, 16])
def test_mixed_batch_matches_dense_attention(variant: str, block_size: int) -> None:
    case = make_case(VARIANTS[variant], MIXED, block_size=block_size)
    torch.testing.assert_close(run(BACKEND, case).double(), dense_attention(case), atol=1e-5, rtol=0)


def test_long_prompts_are_exact_over_several_query_blocks() -> None:
    for params in (BASE, replace(BASE, sliding_window=300), replace(BASE, logits_soft_cap=1.0)):
        case = make_case(params, [(100, 700), (0, 257), (3, 1)])
        torch.testing.assert_close(run(BACKEND, case).double(), dense_attention(case), atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("prompt_lens", [None, [40, 300, 1, 20]])
def test_non_causal_prompts_see_later_prompt_tokens_only(window: int | None, prompt_lens: list[int] | None) -> None:
    params = replace(BASE, non_causal=True, sliding_window=window)
    case = make_case(params, [(0, 40), (0, 300), (30, 1), (0, 25)], prompt_lens=prompt_lens)
    torch.testing.assert_close(run(BACKEND, case).double(), dense_attention(case), atol=1e-5, rtol=0)


@pytest.mark.parametrize("window", [None, 20])
def test_slots_of_no_token_never_reach_the_result(window: int | None) -> None:
    case = make_case(replace(BASE, sliding_window=window), MIXED)
    out = run(BACKEND, case, unused=float("nan"))
    torch.testing.assert_close(out.double(), dense_attention(case), atol=1e-5, rtol=0)


@pytest.mark.parametrize("extra", [0, 64, 5])
def test_pages_may_be_spaced_apart(extra: int) -> None:
    case = make_case(BASE, MIXED)
    out = run(BACKEND, case, extra_page_elements=extra)
    torch.testing.assert_close(out.double(), dense_attention(case), atol=1e-5, rtol=0)


def test_layers_of_a_group_share_one_plan_without_mixing_their_windows() -> None:
    case = make_case(BASE, MIXED)
    assert torch.equal(run(BACKEND, case), run(BACKEND, case))
    assert len(case.metadata.plans) == 1
    case.params = replace(BASE, sliding_window=5)
    torch.testing.assert_close(run(BACKEND, case).double(), dense_attention(case), atol=1e-5, rtol=0)
    assert len(case.metadata.plans) == 2


def test_cache_may_be_narrower_than_the_model() -> None:
    case = make_case(BASE, MIXED)
    rounded = make_case(BASE, MIXED)
    rounded.keys = [keys.bfloat16().float() for keys in rounded.keys]
    rounded.values = [values.bfloat16().float() for values in rounded.values]
    out = run(BACKEND, case, cache_dtype=torch.bfloat16)
    torch.testing.assert_close(out.double(), dense_attention(rounded), atol=1e-5, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_close_to_exact(dtype: torch.dtype) -> None:
    case = make_case(BASE, MIXED, dtype=dtype)
    out = run(BACKEND, case)
    assert out.dtype is dtype
    torch.testing.assert_close(out.double(), dense_attention(case), atol=2e-2, rtol=0)


def test_padding_of_decodes_is_bounded_for_very_mixed_lengths() -> None:
    seq_lens = [1, 3, 20, 40, 41, 300, 310, 4000, 4100, 100_000]
    buckets = _bucket([(0, request) for request in range(len(seq_lens))], seq_lens)
    assert [request for bucket in buckets for _, request in bucket] == list(range(len(seq_lens)))
    for bucket in buckets:
        lengths = [seq_lens[request] for _, request in bucket]
        assert max(lengths) <= max(1.25 * min(lengths), min(lengths) + 32)


def test_auto_backend_on_cpu_is_usable_and_torch_can_be_asked_for() -> None:
    assert "torch" in backend_names()
    assert get_backend("torch", "cpu").name == "torch"
    assert get_backend("auto", torch.device("cpu")).name in backend_names()


def test_unknown_or_unusable_backends_are_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("executors.attention.registry._BACKENDS", dict(_BACKENDS))
    with pytest.raises(ValueError, match=r"attention_backend must be 'auto' or one of .*'torch'.* got 'flash'"):
        get_backend("flash", "cpu")
    location = "executors.attention.torch_backend:TorchAttentionBackend"
    register_backend("elsewhere", location, device_types=("cuda",), priority=99)
    with pytest.raises(ValueError, match="'elsewhere' cannot be used on device 'cpu': it runs on cuda only"):
        get_backend("elsewhere", "cpu")
    register_backend("old", location, device_types=("cpu",), priority=99, unusable=lambda device: "needs a newer CPU")
    with pytest.raises(ValueError, match="'old' cannot be used on device 'cpu': needs a newer CPU"):
        get_backend("old", "cpu")
    get_backend("auto", "cpu")
