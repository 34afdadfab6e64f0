"""ctypes mirrors of the structures in csrc/abi.h; `library` checks their sizes against the compiled ones.

Addresses are plain integers (`tensor.data_ptr()`), 0 is null. Whoever builds a structure keeps the tensors alive.
"""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from enum import IntEnum


class Epilogue(IntEnum):
    """What a linear layer does with its sums; see csrc/abi.h."""

    STORE = 0
    RESIDUAL = 1
    SILU_UP = 2
    GELU_UP = 3
    LOGITS = 4
    ARGMAX = 5


class NormStyle(IntEnum):
    """Where RMSNorm rounds: before the weight (Llama, Qwen) or after it (Gemma)."""

    ROUND_THEN_SCALE = 0
    SCALE_IN_FLOAT = 1


class WeightFormat(IntEnum):
    """How a packed weight holds its numbers; see csrc/weight_layout.h."""

    BF16 = 0
    INT8 = 1
    INT4 = 2


class OpKind(IntEnum):
    LINEAR = 0
    NORM = 1
    QKV = 2
    ATTENTION = 3
    EMBED = 4
    GATHER = 5


class RowSet(IntEnum):
    """Rows an operation works on: all tokens of the step, or those whose logits are wanted."""

    TOKENS = 0
    SAMPLED = 1


class Condition(IntEnum):
    """Whether an operation runs in a step."""

    ALWAYS = 0
    GREEDY = 1
    LOGITS = 2


class LinearOp(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p), ("weight", c_void_p), ("weight_scale", c_void_p), ("bias", c_void_p),
        ("residual", c_void_p), ("y", c_void_p), ("ldx", c_int64), ("ldres", c_int64), ("ldy", c_int64),
        ("n", c_int64), ("k", c_int64), ("scale", c_float), ("soft_cap", c_float), ("epilogue", c_int32),
        ("weight_format", c_int32), ("fine_inputs", c_int32), ("reserved", c_int32),
    )  # fmt: skip


class NormOp(ctypes.Structure):
    _fields_ = (
        ("x", c_void_p), ("residual", c_void_p), ("pre_weight", c_void_p), ("weight", c_void_p), ("y", c_void_p),
        ("ldx", c_int64), ("ldres", c_int64), ("ldy", c_int64), ("hidden", c_int64),
        ("eps", c_float), ("style", c_int32),
    )  # fmt: skip


class QkvOp(ctypes.Structure):
    _fields_ = (
        ("qkv", c_void_p), ("q_weight", c_void_p), ("k_weight", c_void_p), ("cos_sin", c_void_p),
        ("kv_cache", c_void_p), ("ldqkv", c_int64), ("max_position", c_int64), ("block_stride", c_int64),
        ("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_size", c_int32), ("rotary_dim", c_int32),
        ("eps", c_float), ("style", c_int32), ("group", c_int32),
    )  # fmt: skip


class AttentionOp(ctypes.Structure):
    _fields_ = (
        ("q", c_void_p), ("kv_cache", c_void_p), ("out", c_void_p), ("ldq", c_int64), ("ldout", c_int64),
        ("block_stride", c_int64),
        ("num_heads", c_int32), ("num_kv_heads", c_int32), ("head_size", c_int32), ("sliding_window", c_int32),
        ("scale", c_float), ("soft_cap", c_float), ("group", c_int32), ("non_causal", c_int32),
    )  # fmt: skip


class EmbedOp(ctypes.Structure):
    _fields_ = (
        ("weight", c_void_p), ("weight_scale", c_void_p), ("y", c_void_p), ("ldy", c_int64), ("n", c_int64),
        ("k", c_int64), ("scale", c_float), ("weight_format", c_int32),
    )  # fmt: skip


class GatherOp(ctypes.Structure):
    _fields_ = (
        ("src", c_void_p), ("dst", c_void_p), ("ldsrc", c_int64), ("lddst", c_int64), ("columns", c_int64),
    )  # fmt: skip


class _OpUnion(ctypes.Union):
    _fields_ = (
        ("linear", LinearOp), ("norm", NormOp), ("qkv", QkvOp), ("attention", AttentionOp), ("embed", EmbedOp),
        ("gather", GatherOp),
    )  # fmt: skip


class Op(ctypes.Structure):
    _anonymous_ = ("u",)
    _fields_ = (
        ("kind", c_int32), ("rows", c_int32), ("condition", c_int32), ("reserved", c_int32), ("u", _OpUnion),
    )  # fmt: skip


class StepGroup(ctypes.Structure):
    _fields_ = (
        ("query_start_loc", c_void_p), ("seq_lens", c_void_p), ("block_table", c_void_p),
        ("slot_mapping", c_void_p), ("prompt_lens", c_void_p), ("block_table_stride", c_int64), ("num_blocks", c_int64),
        ("block_size", c_int32), ("reserved", c_int32),
    )  # fmt: skip


class Step(ctypes.Structure):
    _fields_ = (
        ("input_ids", c_void_p), ("positions", c_void_p), ("sample_rows", c_void_p), ("groups", c_void_p),
        ("num_tokens", c_int64), ("num_reqs", c_int64), ("num_samples", c_int64),
        ("num_groups", c_int32), ("outputs", c_int32), ("profile", c_void_p),
    )  # fmt: skip


STRUCTURES = (LinearOp, NormOp, QkvOp, AttentionOp, EmbedOp, GatherOp, Op, StepGroup, Step)

GREEDY_OUTPUT = 1
LOGITS_OUTPUT = 2

STATUS_TEXT = {
    1: "an input token id lies outside the vocabulary",
    2: "a slot lies outside the KV cache",
    3: "a block id lies outside the KV cache, or a sequence is longer than its block table",
    4: "a position lies outside the rotary table",
    5: "block_size must be 16, 32, 64, 128 or 256",
    6: "query_start_loc does not rise to num_tokens, or a sequence is shorter than its queries",
    7: "sample_rows are not ascending rows of the batch",
}
