"""A decoder's step as one native call: the operations of all layers, recorded once and replayed for every batch.

`DecoderProgram` takes weights already packed (`DecoderLayer`), owns the activation buffers, and is bound to the KV
caches when they exist. `run` then computes embedding, layers, final norm, head and greedy tokens without
returning to Python.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from executors.attention.base import AttentionMetadata, AttentionParams
from executors.kernels import abi, ops
from executors.kernels.library import NativeKernels, check_status
from executors.kernels.memory import huge_zeros
from executors.kernels.packed import PackedWeight

CACHE_LINE_ELEMENTS = 32  # of bfloat16
ACTIVATIONS = {"silu": abi.Epilogue.SILU_UP, "gelu_tanh": abi.Epilogue.GELU_UP}


@dataclass(frozen=True)
class DecoderLayer:
    """One layer. Norm weights are float32 [hidden] (Gemma: 1 + the checkpoint's), biases are in panel order.

    Attributes:
        name: Key of its KV cache and of its group in `DecoderProgram.bind`.
        input_norm, pre_mlp_norm: Before attention and before the MLP.
        post_attention_norm, post_mlp_norm: Of the block's result, before it joins the residual (Gemma); None: no norm.
        q_norm, k_norm: float32 [head_size], or None.
        cos_sin: float32 [max_position, rotary_dim].
    """

    name: str
    params: AttentionParams
    input_norm: torch.Tensor
    qkv: PackedWeight
    attention_output: PackedWeight
    pre_mlp_norm: torch.Tensor
    gate_up: PackedWeight
    down: PackedWeight
    cos_sin: torch.Tensor | None
    qkv_bias: torch.Tensor | None = None
    attention_output_bias: torch.Tensor | None = None
    gate_up_bias: torch.Tensor | None = None
    down_bias: torch.Tensor | None = None
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    post_attention_norm: torch.Tensor | None = None
    post_mlp_norm: torch.Tensor | None = None


@dataclass(frozen=True)
class Decoder:
    """A whole Llama-shaped decoder.

    Attributes:
        embedding: [vocab_size, hidden], the same object as `head` where they are tied.
        embedding_scale: Multiplies embeddings, in bfloat16 (Gemma: sqrt(hidden)).
        activation: "silu" or "gelu_tanh".
        logits_scale, logits_soft_cap: Of the head.
    """

    layers: Sequence[DecoderLayer]
    embedding: PackedWeight
    head: PackedWeight
    final_norm: torch.Tensor
    eps: float
    norm_style: abi.NormStyle = abi.NormStyle.ROUND_THEN_SCALE
    activation: str = "silu"
    embedding_scale: float = 1.0
    logits_scale: float = 1.0
    logits_soft_cap: float | None = None


@dataclass
class _Buffer:
    """Activations [rows, columns] whose row stride keeps neighbouring rows in different cache sets."""

    rows: int
    columns: int
    data: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        lines = -(-self.columns // CACHE_LINE_ELEMENTS)
        self.stride = (lines | 1) * CACHE_LINE_ELEMENTS
        self.data = huge_zeros((self.rows, self.stride), torch.bfloat16)

    @property
    def address(self) -> int:
        return self.data.data_ptr()

    def view(self, rows: int) -> torch.Tensor:
        return self.data[:rows, : self.columns]


class DecoderProgram:
    """The recorded step of one decoder.

    Args:
        max_num_tokens: Most tokens of one step.
        max_num_samples: Most rows whose logits or greedy tokens are wanted in one step.
    """

    def __init__(self, kernels: NativeKernels, decoder: Decoder, *, max_num_tokens: int, max_num_samples: int) -> None:
        self._kernels, self._decoder = kernels, decoder
        self.max_num_tokens, self.max_num_samples = max_num_tokens, max_num_samples
        first = decoder.layers[0]
        widest_mlp = max(layer.gate_up.num_outputs // 2 for layer in decoder.layers)
        widest_q = max(layer.params.num_heads * layer.params.head_size for layer in decoder.layers)
        widest_qkv = max(layer.qkv.num_outputs for layer in decoder.layers)
        hidden = first.qkv.num_inputs
        self._residual = _Buffer(max_num_tokens, hidden)
        self._normed = _Buffer(max_num_tokens, hidden)
        self._projected = _Buffer(max_num_tokens, hidden)
        self._qkv = _Buffer(max_num_tokens, widest_qkv)
        self._attended = _Buffer(max_num_tokens, widest_q)
        self._mlp = _Buffer(max_num_tokens, widest_mlp)
        self._sampled = _Buffer(max_num_tokens, hidden)
        self._greedy = torch.zeros(max_num_samples, dtype=torch.int64)
        self._logits: torch.Tensor | None = None
        self._ops: list[abi.Op] = []
        self._handle: int | None = None
        self._group_names: list[str] = []
        self._num_blocks: dict[str, int] = {}
        self._caches: dict[str, torch.Tensor] = {}

    def bind(self, kv_caches: Mapping[str, torch.Tensor], group_of_layer: Mapping[str, str]) -> None:
        """Record the operations over these caches (`ops.kv_cache_shape`).

        Args:
            kv_caches: By layer name.
            group_of_layer: Which entry of `run`'s metadata describes each layer.
        """
        self._close()
        self._group_names = list(dict.fromkeys(group_of_layer[layer.name] for layer in self._decoder.layers))
        for layer in self._decoder.layers:
            self._num_blocks[group_of_layer[layer.name]] = kv_caches[layer.name].shape[0]
        self._caches = dict(kv_caches)
        self._ops = self._record(group_of_layer)
        array = (abi.Op * len(self._ops))(*self._ops)
        self._handle = self._kernels.library.ea_program_create(self._kernels.isa_index, array, len(self._ops))
        # Filled anew in each step.
        self._group_array = (abi.StepGroup * len(self._group_names))(
            *(abi.StepGroup(num_blocks=self._num_blocks[name]) for name in self._group_names)
        )
        self._groups = list(self._group_array)  # views, not copies
        self._step = abi.Step(groups=ctypes.addressof(self._group_array), num_groups=len(self._group_names))
        self._step_address = ctypes.addressof(self._step)

    def unbind(self) -> None:
        """Let go of the caches; `bind` comes before the next `run`."""
        self._close()
        self._caches, self._ops = {}, []

    def run(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: Mapping[str, AttentionMetadata],
        sample_rows: torch.Tensor,
        *,
        want_greedy: bool = True,
        want_logits: bool = False,
        num_threads: int = 0,
        profile: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute one step.

        Args:
            input_ids, positions: int64 [num_tokens].
            metadata: By group name.
            sample_rows: int64 [num_samples], ascending rows of the batch that leave the last layer. With neither
                greedy tokens nor logits wanted there may be max_num_tokens of them (for `hidden_states`).
            profile: int64 [num_ops]; nanoseconds of each operation are added (thread 0, waiting included).

        Returns:
            Greedy token ids int64 [num_samples] and, with `want_logits`, float32 logits [num_samples, vocab_size].
            Both are buffers that the next step overwrites.
        """
        num_tokens, num_samples = len(input_ids), len(sample_rows)
        if self._handle is None:
            raise RuntimeError("bind() must come before run()")
        max_rows = self.max_num_samples if want_greedy or want_logits else self.max_num_tokens
        if num_tokens > self.max_num_tokens or num_samples > max_rows:
            raise ValueError(
                f"a step may have {self.max_num_tokens} tokens and {max_rows} samples, "
                f"got {num_tokens} and {num_samples}"
            )
        if want_logits and self._logits is None:
            self._logits = torch.zeros(self.max_num_samples, self._decoder.head.num_outputs)
            self._rebind_logits()
        for group, name in zip(self._groups, self._group_names, strict=True):
            ops.fill_step_group(group, metadata[name])
        step = self._step
        step.input_ids = input_ids.data_ptr()
        step.positions = positions.data_ptr()
        step.sample_rows = sample_rows.data_ptr()
        step.num_tokens = num_tokens
        step.num_reqs = metadata[self._group_names[0]].num_reqs
        step.num_samples = num_samples
        step.profile = 0 if profile is None else profile.data_ptr()
        step.outputs = want_greedy * abi.GREEDY_OUTPUT | want_logits * abi.LOGITS_OUTPUT
        self._run(num_threads)
        return self._greedy[:num_samples], self._logits[
            :num_samples
        ] if want_logits and self._logits is not None else None

    def run_again(self) -> None:
        """Compute another step on the tensors of the last `run`, which must still exist, with what they hold now.

        Its results are written to the same places.
        """
        self._run(0)

    def _run(self, num_threads: int) -> None:
        check_status(self._kernels.library.ea_program_run(self._handle, self._step_address, num_threads))

    def hidden_states(self, num_samples: int) -> torch.Tensor:
        """Normalised hidden states of the last step's `sample_rows`: bfloat16 [num_samples, hidden], a view."""
        return self._normed.view(num_samples)

    def _close(self) -> None:
        if self._handle is not None:
            self._kernels.library.ea_program_destroy(self._handle)
            self._handle = None

    def __del__(self) -> None:
        self._close()

    def _rebind_logits(self) -> None:
        assert self._logits is not None
        for op in self._ops:
            if op.kind == abi.OpKind.LINEAR and op.linear.epilogue == abi.Epilogue.LOGITS:
                op.linear.y = self._logits.data_ptr()
        array = (abi.Op * len(self._ops))(*self._ops)
        self._close()
        self._handle = self._kernels.library.ea_program_create(self._kernels.isa_index, array, len(self._ops))

    # Recording ------------------------------------------------------------------------------------------------------

    def _record(self, group_of_layer: Mapping[str, str]) -> list[abi.Op]:
        decoder, residual = self._decoder, self._residual
        recorded = [
            ops.embed_op(decoder.embedding, y=residual.address, ldy=residual.stride, scale=decoder.embedding_scale)
        ]
        recorded.append(self._norm(self._residual, decoder.layers[0].input_norm))
        for index, layer in enumerate(decoder.layers):
            is_last = index + 1 == len(decoder.layers)
            following = decoder.final_norm if is_last else decoder.layers[index + 1].input_norm
            group = self._group_names.index(group_of_layer[layer.name])
            recorded += self._layer(layer, following, group, is_last)
        for epilogue, condition, out, stride in (
            (abi.Epilogue.ARGMAX, abi.Condition.GREEDY, self._greedy.data_ptr(), 1),
            (abi.Epilogue.LOGITS, abi.Condition.LOGITS, 0 if self._logits is None else self._logits.data_ptr(),
             decoder.head.num_outputs),
        ):  # fmt: skip
            op = ops.linear_op(
                decoder.head,
                epilogue,
                x=self._normed.address,
                ldx=self._normed.stride,
                y=out,
                ldy=stride,
                scale=decoder.logits_scale,
                soft_cap=decoder.logits_soft_cap or 0.0,
            )
            op.rows, op.condition = abi.RowSet.SAMPLED, condition
            recorded.append(op)
        return recorded

    def _layer(self, layer: DecoderLayer, following_norm: torch.Tensor, group: int, is_last: bool) -> list[abi.Op]:
        """After the last layer's attention only sampled rows go on, gathered to the front of the buffers."""
        decoder, recorded, residual = self._decoder, [], self._residual
        recorded.append(self._linear(layer.qkv, abi.Epilogue.STORE, self._normed, self._qkv, layer.qkv_bias))
        cache = self._caches[layer.name]
        recorded.append(
            ops.qkv_op(
                layer.params,
                qkv=self._qkv.address,
                ldqkv=self._qkv.stride,
                kv_cache=cache,
                cos_sin=layer.cos_sin,
                q_weight=layer.q_norm,
                k_weight=layer.k_norm,
                eps=decoder.eps,
                style=decoder.norm_style,
                group=group,
            )
        )
        rest = [
            ops.attention_op(
                layer.params,
                q=self._qkv.address,
                ldq=self._qkv.stride,
                kv_cache=cache,
                out=self._attended.address,
                ldout=self._attended.stride,
                group=group,
            )
        ]
        if is_last:
            gather = abi.Op(kind=abi.OpKind.GATHER)
            gather.gather = abi.GatherOp(
                src=residual.address,
                dst=self._sampled.address,
                ldsrc=residual.stride,
                lddst=self._sampled.stride,
                columns=residual.columns,
            )
            rest.append(gather)
            residual = self._sampled
        rest += self._block_output(
            layer.attention_output,
            self._attended,
            layer.attention_output_bias,
            residual,
            layer.post_attention_norm,
            layer.pre_mlp_norm,
        )
        rest.append(
            self._linear(layer.gate_up, ACTIVATIONS[decoder.activation], self._normed, self._mlp, layer.gate_up_bias)
        )
        rest += self._block_output(
            layer.down, self._mlp, layer.down_bias, residual, layer.post_mlp_norm, following_norm
        )
        for op in rest:
            op.rows = abi.RowSet.SAMPLED if is_last else abi.RowSet.TOKENS
        return recorded + rest

    def _block_output(
        self,
        weight: PackedWeight,
        x: _Buffer,
        bias: torch.Tensor | None,
        residual: _Buffer,
        post_norm: torch.Tensor | None,
        following_norm: torch.Tensor,
    ) -> list[abi.Op]:
        """residual += norm?(x @ weight); normed = norm(residual)."""
        if post_norm is None:
            return [
                self._linear(weight, abi.Epilogue.RESIDUAL, x, residual, bias, residual),
                self._norm(residual, following_norm),
            ]
        return [
            self._linear(weight, abi.Epilogue.STORE, x, self._projected, bias),
            self._norm(self._projected, following_norm, residual, post_norm),
        ]

    def _linear(
        self,
        weight: PackedWeight,
        epilogue: abi.Epilogue,
        x: _Buffer,
        y: _Buffer,
        bias: torch.Tensor | None,
        residual: _Buffer | None = None,
    ) -> abi.Op:
        return ops.linear_op(
            weight,
            epilogue,
            x=x.address,
            ldx=x.stride,
            y=y.address,
            ldy=y.stride,
            bias=bias,
            residual=residual.address if residual else 0,
            ldres=residual.stride if residual else 0,
        )

    def _norm(
        self, x: _Buffer, weight: torch.Tensor, residual: _Buffer | None = None, pre_weight: torch.Tensor | None = None
    ) -> abi.Op:
        op = abi.Op(kind=abi.OpKind.NORM)
        op.norm = abi.NormOp(
            x=x.address,
            residual=residual.address if residual else 0,
            pre_weight=0 if pre_weight is None else pre_weight.data_ptr(),
            weight=weight.data_ptr(),
            y=self._normed.address,
            ldx=x.stride,
            ldres=residual.stride if residual else 0,
            ldy=self._normed.stride,
            hidden=x.columns,
            eps=self._decoder.eps,
            style=self._decoder.norm_style,
        )
        return op
