"""The Triton attention backend, run by Triton's interpreter on CPU in a process of its own, against dense attention."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
pytest.importorskip("triton")


@pytest.mark.skipif(INTERPRETED, reason="is the outer process")
def test_triton_backend_matches_dense_attention_under_the_interpreter() -> None:
    """TRITON_INTERPRET must be set before triton is imported, hence the process."""
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout


@pytest.mark.skipif(INTERPRETED, reason="needs the compiler")
@pytest.mark.parametrize("num_splits", [1, 4])
def test_kernel_compiles_for_cuda_without_a_device(num_splits: int) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from executors.attention.triton_kernels import attention_kernel

    pointers = {"table_ptr": "*i32", "seq_len_ptr": "*i32", "query_start_ptr": "*i32", "prompt_len_ptr": "*i32",
                "partial_ptr": "*fp32", "stats_ptr": "*fp32", "scale": "fp32", "soft_cap": "fp32"}  # fmt: skip
    constants = {"NUM_HEADS": 8, "NUM_KV_HEADS": 2, "HEAD_SIZE": 64, "HEAD_PADDED": 64, "BLOCK_SIZE": 16, "BLOCK_Q": 4,
                 "BLOCK_M": 16, "TILE": 64, "WINDOW": 512, "HAS_SOFT_CAP": True, "NON_CAUSAL": True,
                 "HAS_PROMPT_LENS": True, "NUM_SPLITS": num_splits}  # fmt: skip
    signature = {}
    for name in attention_kernel.arg_names:
        other = "*bf16" if name.endswith("_ptr") else "i32"
        signature[name] = "constexpr" if name in constants else pointers.get(name, other)
    source = ASTSource(
        fn=attention_kernel,
        signature=signature,
        constexprs={(attention_kernel.arg_names.index(name),): value for name, value in constants.items()},
    )
    assert "attention_kernel" in compile(source, target=GPUTarget("cuda", 80, 32)).asm["ptx"]


if INTERPRETED:
    import torch

    from executors.attention import triton_backend
    from executors.attention.base import AttentionParams
    from executors.attention.triton_backend import TritonAttentionBackend, _num_splits
    from tests.executors.attention_cases import dense_attention, make_case, run

    # (cached, new) tokens; the interpreter is slow.
    MIXED = [(0, 1), (70, 1), (15, 1), (16, 1), (0, 37), (31, 5), (0, 2)]

    BASE = AttentionParams(num_heads=6, num_kv_heads=2, head_size=16, scale=0.25)
    BACKEND = TritonAttentionBackend()
    VARIANTS = {
        "grouped": BASE,
        "multi-query": replace(BASE, num_kv_heads=1),
        "head-size-not-a-power-of-two": replace(BASE, head_size=24),
        "window": replace(BASE, sliding_window=20),
        "window-of-one": replace(BASE, sliding_window=1),
        "window-and-soft-cap": replace(BASE, sliding_window=33, logits_soft_cap=2.0),
    }

    @pytest.mark.parametrize("variant", VARIANTS)
    def test_mixed_batch_matches_dense_attention(variant: str) -> None:
        case = make_case(VARIANTS[variant], MIXED)
        out = run(BACKEND, case, unused=float("nan"), extra_page_elements=5)
        torch.testing.assert_close(out.double(), dense_attention(case), atol=1e-5, rtol=0)

    def test_chunk_longer_than_a_query_block_matches_dense_attention() -> None:
        case = make_case(BASE, [(20, 90), (0, 70)], block_size=8)
        torch.testing.assert_close(run(BACKEND, case).double(), dense_attention(case), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("window", [None, 100, 200])
    def test_decodes_over_long_caches_are_split_and_joined(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton_backend, "_MIN_KEYS_PER_SPLIT", 40)
        case = make_case(replace(BASE, sliding_window=window), [(270, 1), (0, 1), (60, 1)])
        assert _num_splits(case.params, case.metadata, torch.device("cpu")) == (2 if window == 100 else 4)
        torch.testing.assert_close(run(BACKEND, case).double(), dense_attention(case), atol=1e-5, rtol=0)

    @pytest.mark.parametrize(("window", "prompt_lens"), [(None, None), (None, [20, 70, 1]), (8, [20, 70, 1])])
    def test_non_causal_prompts_see_later_prompt_tokens(window: int | None, prompt_lens: list[int] | None) -> None:
        params = replace(BASE, non_causal=True, sliding_window=window)
        case = make_case(params, [(0, 20), (0, 75), (30, 1)], prompt_lens=prompt_lens)
        torch.testing.assert_close(run(BACKEND, case).double(), dense_attention(case), atol=1e-5, rtol=0)

    def test_float16_is_close_to_exact() -> None:
        # The interpreter's dot product cannot do bfloat16.
        case = make_case(BASE, MIXED, dtype=torch.float16)
        out = run(BACKEND, case)
        assert out.dtype is torch.float16
        torch.testing.assert_close(out.double(), dense_attention(case), atol=2e-2, rtol=0)
