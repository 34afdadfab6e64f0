"""The decoder-only transformer that all families share, shaped by a DecoderSpec and one rank's place in the grid."""

from __future__ import annotations

import re

import torch
from torch import nn

from executors.attention.base import AttentionMetadata, AttentionParams
from executors.layers.attention import Attention
from executors.layers.context import LayerContext
from executors.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from executors.layers.linear import ColumnParallelLinear, GatedLinear, OutputPart, RowParallelLinear
from executors.layers.norm import RMSNorm
from executors.layers.partition import layers_of_stage, shard_balanced, shard_heads
from executors.layers.rotary import RotaryTable
from executors.models.base import CausalLM
from executors.models.spec import DecoderSpec, LayerSpec

EMBEDDING = "model.embed_tokens"
FINAL_NORM = "model.norm"
LM_HEAD = "lm_head"
_LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.")

CosSin = tuple[torch.Tensor, torch.Tensor]


class DecoderAttention(nn.Module):
    """q, k, v projection → head norms → rotation → attention → output projection."""

    def __init__(self, context: LayerContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__()
        heads = shard_heads(spec.num_heads, spec.num_kv_heads, context.parallel.tp_rank, context.parallel.tp_size)
        query = heads.query.times(spec.head_size)
        key_value = heads.key_value.times(spec.head_size)
        query_size, kv_size = spec.num_heads * spec.head_size, spec.num_kv_heads * spec.head_size
        self.sizes = [query.size, key_value.size, key_value.size]
        self.head_size = spec.head_size
        self.qkv_proj = ColumnParallelLinear(
            context,
            spec.hidden_size,
            [
                OutputPart(f"{name}.q_proj", query_size, query),
                OutputPart(f"{name}.k_proj", kv_size, key_value),
                OutputPart(f"{name}.v_proj", kv_size, key_value),
            ],
            bias=spec.qkv_bias,
        )
        self.o_proj = RowParallelLinear(
            context, f"{name}.o_proj", query_size, query, spec.hidden_size, bias=spec.o_bias
        )
        self.q_norm: RMSNorm | None = None
        self.k_norm: RMSNorm | None = None
        if spec.qk_norm:
            self.q_norm, self.k_norm = (
                RMSNorm(context, f"{name}.{which}", spec.head_size, spec.rms_norm_eps,
                        unit_offset=spec.norm_unit_offset)
                for which in ("q_norm", "k_norm")
            )  # fmt: skip
        self.attention = Attention(
            context,
            f"{name}.attn",
            AttentionParams(
                num_heads=heads.query.size,
                num_kv_heads=heads.key_value.size,
                head_size=spec.head_size,
                scale=spec.attention_scale,
                sliding_window=layer.sliding_window,
                logits_soft_cap=spec.attention_soft_cap,
                non_causal=spec.non_causal,
            ),
        )
        self._ops = context.ops

    def forward(self, x: torch.Tensor, cos_sin: CosSin, metadata: dict[str, AttentionMetadata]) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (-1, self.head_size)) for part in self.qkv_proj(x).split(self.sizes, dim=-1)
        )
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key = self._ops.rotary(query, key, *cos_sin)
        return self.o_proj(self.attention(query, key, value, metadata))


class GatedMLP(nn.Module):
    """activation(gate(x)) × up(x) → down."""

    def __init__(self, context: LayerContext, spec: DecoderSpec, name: str) -> None:
        super().__init__()
        shard = shard_balanced(spec.intermediate_size, context.parallel.tp_rank, context.parallel.tp_size)
        self.gate_up_proj = GatedLinear(
            context,
            spec.hidden_size,
            OutputPart(f"{name}.gate_proj", spec.intermediate_size, shard),
            OutputPart(f"{name}.up_proj", spec.intermediate_size, shard),
            activation=spec.activation,
            bias=spec.mlp_bias,
        )
        self.down_proj = RowParallelLinear(
            context, f"{name}.down_proj", spec.intermediate_size, shard, spec.hidden_size, bias=spec.mlp_bias
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.gate_up_proj(x))


class DecoderLayer(nn.Module):
    """norm → attention → (norm) → add → norm → MLP → (norm); the last addition happens in the next layer's norm."""

    def __init__(self, context: LayerContext, spec: DecoderSpec, layer: LayerSpec, name: str) -> None:
        super().__init__()

        def norm(which: str) -> RMSNorm:
            return RMSNorm(
                context, f"{name}.{which}", spec.hidden_size, spec.rms_norm_eps, unit_offset=spec.norm_unit_offset
            )

        self.rope = layer.rope
        self.self_attn = DecoderAttention(context, spec, layer, f"{name}.self_attn")
        self.mlp = GatedMLP(context, spec, f"{name}.mlp")
        self.input_norm = norm("input_layernorm")
        self.after_attention: nn.Module
        self.after_mlp: nn.Module
        # Checkpoints of both kinds have a "post_attention_layernorm", with different meanings.
        if spec.sandwich_norms:
            self.after_attention = norm("post_attention_layernorm")
            self.mlp_norm = norm("pre_feedforward_layernorm")
            self.after_mlp = norm("post_feedforward_layernorm")
        else:
            self.after_attention = nn.Identity()
            self.mlp_norm = norm("post_attention_layernorm")
            self.after_mlp = nn.Identity()

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        cos_sin: CosSin,
        metadata: dict[str, AttentionMetadata],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(x, residual) of the previous layer → of this one; the stream's value is their sum (residual None is 0)."""
        if residual is None:
            residual, x = x, self.input_norm(x)
        else:
            x, residual = self.input_norm.add_and_norm(x, residual)
        x = self.after_attention(self.self_attn(x, cos_sin, metadata))
        x, residual = self.mlp_norm.add_and_norm(x, residual)
        return self.after_mlp(self.mlp(x)), residual


class DecoderLM(CausalLM):
    """The layers of one stage; token embedding on the first, final norm and LM head on the last."""

    def __init__(self, context: LayerContext, spec: DecoderSpec, max_positions: int) -> None:
        """
        Args:
            max_positions: Positions run from 0 to below this.
        """
        super().__init__()
        parallel = context.parallel
        self.spec = spec
        self.is_first_stage, self.is_last_stage = parallel.is_first_stage, parallel.is_last_stage
        self.layer_range = layers_of_stage(len(spec.layers), parallel.pp_rank, parallel.pp_size)
        self.embed_tokens: VocabParallelEmbedding | None = None
        if self.is_first_stage:
            self.embed_tokens = VocabParallelEmbedding(context, EMBEDDING, spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(
            DecoderLayer(context, spec, spec.layers[index], f"model.layers.{index}") for index in self.layer_range
        )
        if self.is_last_stage:
            self.norm = RMSNorm(
                context, FINAL_NORM, spec.hidden_size, spec.rms_norm_eps, unit_offset=spec.norm_unit_offset
            )
            self.lm_head = ParallelLMHead(
                context,
                EMBEDDING if spec.tie_word_embeddings else LM_HEAD,
                spec.vocab_size,
                spec.hidden_size,
                tied_to=self.embed_tokens if spec.tie_word_embeddings else None,
            )
        used_ropes = sorted({spec.layers[index].rope for index in self.layer_range})
        self.ropes = nn.ModuleDict(
            {rope: RotaryTable(spec.ropes[rope], max_positions, context.dtype, context.device) for rope in used_ropes}
        )
        # Rounded to the dtype as a tensor, as transformers does.
        self._embedding_scale = (
            None
            if spec.embedding_scale is None
            else torch.tensor(spec.embedding_scale, dtype=context.dtype, device=context.device)
        )

    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, AttentionMetadata],
        hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = self._embed(input_ids) if self.embed_tokens is not None else hidden_states
        if x is None:
            raise ValueError("hidden_states of the previous stage are needed on every stage but the first")
        cos_sin = {name: table(positions) for name, table in self.ropes.items()}
        residual: torch.Tensor | None = None
        for layer in self.layers:
            x, residual = layer(x, residual, cos_sin[layer.rope], metadata)
        if residual is None:
            return x
        return self.norm.add_and_norm(x, residual)[0] if self.is_last_stage else x + residual

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if not self.is_last_stage:
            raise RuntimeError("only the last pipeline stage holds the LM head")
        logits = self.lm_head(hidden_states)
        cap = self.spec.final_soft_cap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def owned_by_other_stage(self, name: str) -> bool:
        layer = _LAYER_NAME.match(name)
        if layer is not None:
            index = int(layer.group(1))
            return index < len(self.spec.layers) and index not in self.layer_range
        if name == f"{EMBEDDING}.weight":
            return not self.is_first_stage
        if name == f"{FINAL_NORM}.weight":
            return not self.is_last_stage
        return name == f"{LM_HEAD}.weight" and not self.is_last_stage and not self.spec.tie_word_embeddings

    def _embed(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self.embed_tokens is None:
            raise RuntimeError("only the first pipeline stage holds the token embedding")
        x = self.embed_tokens(input_ids)
        return x if self._embedding_scale is None else x * self._embedding_scale
