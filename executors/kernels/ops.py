"""The kernels one by one, on torch tensors: for layers outside a recorded program, for tests and benchmarks.

Each call costs a few microseconds of Python; a decoder's step is recorded once with `executors.kernels.program`.
All tensors are bfloat16 on the CPU unless said otherwise; only the last dimension needs to be contiguous.
"""

from __future__ import annotations

import ctypes

import torch

from executors.attention.base import AttentionMetadata, AttentionParams
from executors.kernels import abi
from executors.kernels.abi import WeightFormat
from executors.kernels.library import NativeKernels
from executors.kernels.packed import PackedWeight

CACHE_BLOCK_SIZES = (16, 32, 64, 128, 256)


def rows_step(num_rows: int) -> abi.Step:
    """A step for operations that know no requests."""
    return abi.Step(num_tokens=num_rows)


def _check_rows(name: str, tensor: torch.Tensor, columns: int) -> None:
    if tensor.dim() != 2 or tensor.shape[1] != columns or tensor.dtype != torch.bfloat16 or tensor.stride(1) != 1:
        raise ValueError(
            f"{name} must be bfloat16 [rows, {columns}] with contiguous rows, got {tensor.dtype} "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        )


def linear(
    x: torch.Tensor,
    weight: PackedWeight,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
    num_threads: int = 0,
) -> torch.Tensor:
    """x @ weight.T + bias, then either `+ residual` or act(gate) * up.

    Args:
        x: [rows, num_inputs].
        bias: float32, from `weight.pack_bias`.
        residual: [rows, num_outputs], added after rounding to bfloat16. May be `out`.
        activation: "silu" or "gelu_tanh" for a gate-up weight; the result then has num_outputs / 2 columns.

    Returns:
        [rows, columns], `out` when given.
    """
    _check_rows("x", x, weight.num_inputs)
    columns = weight.num_outputs
    epilogue = abi.Epilogue.STORE
    if weight.gate_up:
        columns //= 2
        if activation not in ("silu", "gelu_tanh"):
            raise ValueError(f"activation must be 'silu' or 'gelu_tanh' for a gate-up weight, got {activation!r}")
        epilogue = abi.Epilogue.SILU_UP if activation == "silu" else abi.Epilogue.GELU_UP
    if residual is not None:
        _check_rows("residual", residual, columns)
        epilogue = abi.Epilogue.RESIDUAL
    if out is None:
        out = torch.empty(x.shape[0], columns, dtype=torch.bfloat16)
    _check_rows("out", out, columns)
    op = linear_op(
        weight,
        epilogue,
        x=x.data_ptr(),
        ldx=x.stride(0),
        y=out.data_ptr(),
        ldy=out.stride(0),
        bias=bias,
        residual=0 if residual is None else residual.data_ptr(),
        ldres=0 if residual is None else residual.stride(0),
    )
    weight.kernels.run_op(op, rows_step(x.shape[0]), num_threads)
    return out


def linear_op(
    weight: PackedWeight,
    epilogue: abi.Epilogue,
    *,
    x: int,
    ldx: int,
    y: int,
    ldy: int,
    bias: torch.Tensor | None = None,
    residual: int = 0,
    ldres: int = 0,
    scale: float = 1.0,
    soft_cap: float = 0.0,
) -> abi.Op:
    """The operation behind `linear`, `logits` and `greedy`, on addresses."""
    op = abi.Op(kind=abi.OpKind.LINEAR)
    op.linear = abi.LinearOp(
        x=x,
        weight=weight.data.data_ptr(),
        weight_scale=weight.scale_address,
        bias=0 if bias is None else bias.data_ptr(),
        residual=residual,
        y=y,
        ldx=ldx,
        ldres=ldres,
        ldy=ldy,
        n=weight.num_outputs,
        k=weight.num_inputs,
        scale=scale,
        soft_cap=soft_cap,
        epilogue=epilogue,
        weight_format=weight.format,
        fine_inputs=int(weight.fine_inputs),
    )
    return op


def logits(x: torch.Tensor, weight: PackedWeight, *, scale: float = 1.0, soft_cap: float | None = None) -> torch.Tensor:
    """float32 [rows, num_outputs]: the head's sums rounded to bfloat16, scaled and soft-capped in bfloat16 steps."""
    _check_rows("x", x, weight.num_inputs)
    out = torch.empty(x.shape[0], weight.num_outputs, dtype=torch.float32)
    op = linear_op(
        weight,
        abi.Epilogue.LOGITS,
        x=x.data_ptr(),
        ldx=x.stride(0),
        y=out.data_ptr(),
        ldy=out.stride(0),
        scale=scale,
        soft_cap=soft_cap or 0.0,
    )
    weight.kernels.run_op(op, rows_step(x.shape[0]))
    return out


def greedy(x: torch.Tensor, weight: PackedWeight, *, scale: float = 1.0, soft_cap: float | None = None) -> torch.Tensor:
    """int64 [rows]: the first index of the largest of `logits`, which are never stored. -1 when all are NaN."""
    _check_rows("x", x, weight.num_inputs)
    out = torch.empty(x.shape[0], dtype=torch.int64)
    op = linear_op(
        weight,
        abi.Epilogue.ARGMAX,
        x=x.data_ptr(),
        ldx=x.stride(0),
        y=out.data_ptr(),
        ldy=1,
        scale=scale,
        soft_cap=soft_cap or 0.0,
    )
    step = rows_step(x.shape[0])
    step.num_samples = x.shape[0]
    weight.kernels.run_op(op, step)
    return out


def embed(weight: PackedWeight, input_ids: torch.Tensor) -> torch.Tensor:
    """Rows of a packed embedding (bfloat16 or int8): int64 [n] → bfloat16 [n, num_inputs]."""
    if input_ids.dim() != 1 or input_ids.dtype != torch.int64 or not input_ids.is_contiguous():
        raise ValueError(f"input_ids must be contiguous int64 [n], got {input_ids.dtype} {tuple(input_ids.shape)}")
    out = torch.empty(len(input_ids), weight.num_inputs, dtype=torch.bfloat16)
    step = rows_step(len(input_ids))
    step.input_ids = input_ids.data_ptr()
    weight.kernels.run_op(embed_op(weight, y=out.data_ptr(), ldy=weight.num_inputs), step)
    return out


def embed_op(weight: PackedWeight, *, y: int, ldy: int, scale: float = 1.0) -> abi.Op:
    """The rows of the step's input ids, times `scale` in bfloat16."""
    if weight.gate_up or weight.format is WeightFormat.INT4:
        raise ValueError(f"rows cannot be taken from a {weight.format.name} weight with gate_up={weight.gate_up}")
    op = abi.Op(kind=abi.OpKind.EMBED)
    op.embed = abi.EmbedOp(
        weight=weight.data.data_ptr(),
        weight_scale=weight.scale_address,
        y=y,
        ldy=ldy,
        n=weight.num_outputs,
        k=weight.num_inputs,
        scale=scale,
        weight_format=weight.format,
    )
    return op


def rms_norm(
    kernels: NativeKernels,
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    style: abi.NormStyle = abi.NormStyle.ROUND_THEN_SCALE,
    residual: torch.Tensor | None = None,
    pre_weight: torch.Tensor | None = None,
) -> torch.Tensor:
    """RMSNorm of x, or of `residual += x` (updated in place), where x is normalised first by `pre_weight` if given.

    Args:
        x: [rows, hidden].
        weight, pre_weight: float32 [hidden]; for Gemma's style 1 + the checkpoint's weight.
    """
    rows, hidden = x.shape
    _check_rows("x", x, hidden)
    for name, values in (("weight", weight), ("pre_weight", pre_weight)):
        if values is not None and (values.dtype != torch.float32 or values.shape != (hidden,)):
            raise ValueError(f"{name} must be float32 [{hidden}], got {values.dtype} {tuple(values.shape)}")
    if residual is not None:
        _check_rows("residual", residual, hidden)
    out = torch.empty(rows, hidden, dtype=torch.bfloat16)
    op = abi.Op(kind=abi.OpKind.NORM)
    op.norm = abi.NormOp(
        x=x.data_ptr(),
        residual=0 if residual is None else residual.data_ptr(),
        pre_weight=0 if pre_weight is None else pre_weight.data_ptr(),
        weight=weight.data_ptr(),
        y=out.data_ptr(),
        ldx=x.stride(0),
        ldres=0 if residual is None else residual.stride(0),
        ldy=hidden,
        hidden=hidden,
        eps=eps,
        style=style,
    )
    kernels.run_op(op, rows_step(rows))
    return out


def kv_cache_shape(num_blocks: int, block_size: int, num_kv_heads: int, head_size: int) -> tuple[int, int, int, int]:
    """[num_blocks, num_kv_heads, keys and values, block_size * head_size]; the last is in tiles (csrc/cache_layout.h).

    A new cache must be zero: a slot never written is multiplied by zero, which must not meet a NaN.
    """
    if block_size not in CACHE_BLOCK_SIZES:
        raise ValueError(f"block_size must be one of {CACHE_BLOCK_SIZES} for native attention, got {block_size}")
    if head_size % 16:
        raise ValueError(f"head_size must be a multiple of 16 for native attention, got {head_size}")
    return (num_blocks, num_kv_heads, 2, block_size * head_size)


def step_group(metadata: AttentionMetadata, num_blocks: int) -> abi.StepGroup:
    """One KV group's view of the batch. The tensors of `metadata` must outlive it."""
    for name, dtype in (
        ("query_start_loc", torch.int32),
        ("seq_lens", torch.int32),
        ("block_table", torch.int32),
        ("slot_mapping", torch.int64),
    ):
        tensor = getattr(metadata, name)
        if tensor.dtype != dtype or tensor.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous {dtype}, got {tensor.dtype} with strides {tensor.stride()}")
    prompt_lens = metadata.prompt_lens
    if prompt_lens is not None and prompt_lens.dtype != torch.int32:
        raise ValueError(f"prompt_lens must be torch.int32, got {prompt_lens.dtype}")
    group = abi.StepGroup(num_blocks=num_blocks)
    fill_step_group(group, metadata)
    return group


def fill_step_group(group: abi.StepGroup, metadata: AttentionMetadata) -> None:
    """All of a group but `num_blocks`, from tensors known to be of the types that `step_group` checks."""
    block_table, prompt_lens = metadata.block_table, metadata.prompt_lens
    group.query_start_loc = metadata.query_start_loc.data_ptr()
    group.seq_lens = metadata.seq_lens.data_ptr()
    group.block_table = block_table.data_ptr()
    group.slot_mapping = metadata.slot_mapping.data_ptr()
    group.prompt_lens = 0 if prompt_lens is None else prompt_lens.data_ptr()
    group.block_table_stride = block_table.stride(0)
    group.block_size = metadata.block_size


def qkv_op(
    params: AttentionParams,
    *,
    qkv: int,
    ldqkv: int,
    kv_cache: torch.Tensor,
    cos_sin: torch.Tensor | None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    style: abi.NormStyle = abi.NormStyle.ROUND_THEN_SCALE,
    group: int = 0,
) -> abi.Op:
    """Norm (optional) and rotation (optional) of q and k, and writing k and v, for rows [q heads, k heads, v heads]."""
    op = abi.Op(kind=abi.OpKind.QKV)
    op.qkv = abi.QkvOp(
        qkv=qkv,
        q_weight=0 if q_weight is None else q_weight.data_ptr(),
        k_weight=0 if k_weight is None else k_weight.data_ptr(),
        cos_sin=0 if cos_sin is None else cos_sin.data_ptr(),
        kv_cache=kv_cache.data_ptr(),
        ldqkv=ldqkv,
        block_stride=kv_cache.stride(0),
        max_position=0 if cos_sin is None else cos_sin.shape[0],
        num_heads=params.num_heads,
        num_kv_heads=params.num_kv_heads,
        head_size=params.head_size,
        rotary_dim=0 if cos_sin is None else cos_sin.shape[1],
        eps=eps,
        style=style,
        group=group,
    )
    return op


def attention_op(
    params: AttentionParams, *, q: int, ldq: int, kv_cache: torch.Tensor, out: int, ldout: int, group: int = 0
) -> abi.Op:
    """Attention of rows of q over the cache, which already holds this step's keys and values."""
    op = abi.Op(kind=abi.OpKind.ATTENTION)
    op.attention = abi.AttentionOp(
        q=q,
        kv_cache=kv_cache.data_ptr(),
        out=out,
        ldq=ldq,
        ldout=ldout,
        block_stride=kv_cache.stride(0),
        num_heads=params.num_heads,
        num_kv_heads=params.num_kv_heads,
        head_size=params.head_size,
        sliding_window=params.sliding_window or 0,
        scale=params.scale,
        soft_cap=params.logits_soft_cap or 0.0,
        group=group,
        non_causal=int(params.non_causal),
    )
    return op


def attention(
    kernels: NativeKernels,
    params: AttentionParams,
    qkv: torch.Tensor,
    kv_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    positions: torch.Tensor | None = None,
    cos_sin: torch.Tensor | None = None,
    q_weight: torch.Tensor | None = None,
    k_weight: torch.Tensor | None = None,
    eps: float = 0.0,
    style: abi.NormStyle = abi.NormStyle.ROUND_THEN_SCALE,
    num_threads: int = 0,
) -> torch.Tensor:
    """Norm and rotate q and k of `qkv` (in place), write k and v into the cache, and attend.

    Args:
        qkv: [num_tokens, (num_heads + 2 * num_kv_heads) * head_size].
        kv_cache: Of `kv_cache_shape`, bfloat16.
        positions: int64 [num_tokens]; needed with `cos_sin`.
        cos_sin: float32 [max_position, rotary_dim], cosines then sines; None does not rotate.
        q_weight, k_weight: float32 [head_size]; None does not normalise.

    Returns:
        [num_tokens, num_heads * head_size].
    """
    _check_rows("qkv", qkv, (params.num_heads + 2 * params.num_kv_heads) * params.head_size)
    expected = kv_cache_shape(kv_cache.shape[0], metadata.block_size, params.num_kv_heads, params.head_size)
    if kv_cache.shape != expected or kv_cache.dtype != torch.bfloat16 or not kv_cache[0].is_contiguous():
        raise ValueError(
            f"kv_cache must be bfloat16 {expected} with contiguous blocks, got {kv_cache.dtype} "
            f"{tuple(kv_cache.shape)} with strides {kv_cache.stride()}"
        )
    if (cos_sin is None) != (positions is None):
        raise ValueError("positions and cos_sin go together")
    out = torch.empty(qkv.shape[0], params.num_heads * params.head_size, dtype=torch.bfloat16)
    group = step_group(metadata, kv_cache.shape[0])
    step = abi.Step(
        positions=0 if positions is None else positions.data_ptr(),
        num_tokens=metadata.num_tokens,
        num_reqs=metadata.num_reqs,
        num_groups=1,
    )
    step.groups = ctypes.addressof(group)
    kernels.run_op(
        qkv_op(
            params,
            qkv=qkv.data_ptr(),
            ldqkv=qkv.stride(0),
            kv_cache=kv_cache,
            cos_sin=cos_sin,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=eps,
            style=style,
        ),
        step,
        num_threads,
    )
    kernels.run_op(
        attention_op(
            params, q=qkv.data_ptr(), ldq=qkv.stride(0), kv_cache=kv_cache, out=out.data_ptr(), ldout=out.stride(0)
        ),
        step,
        num_threads,
    )
    return out
