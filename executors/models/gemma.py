"""Gemma 2 and Gemma 3 (text): sandwich norms stored as offsets from 1, scaled embeddings, local and global layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from executors.layers.rotary import RopeSpec
from executors.models.llama import layers_by_type
from executors.models.spec import DecoderSpec, LayerSpec, activation_name


def describe_gemma2(config: Any) -> DecoderSpec:
    """From a Gemma2Config: one rope for all layers, soft caps on scores and logits."""
    rope = RopeSpec.from_config(config.rope_parameters, config.head_dim, config.max_position_embeddings)
    return _describe(config, layers_by_type(config), {"default": rope}, qk_norm=False)


def describe_gemma3(config: Any) -> DecoderSpec:
    """From a Gemma3TextConfig: a rope per layer type. With `use_bidirectional_attention` it is a prefix LM."""
    layers = layers_by_type(config, rope_by_type=True)
    ropes = {
        name: RopeSpec.from_config(config.rope_parameters[name], config.head_dim, config.max_position_embeddings)
        for name in sorted({layer.rope for layer in layers})
    }
    return _describe(config, layers, ropes, qk_norm=True)


def _describe(
    config: Any, layers: tuple[LayerSpec, ...], ropes: Mapping[str, RopeSpec], *, qk_norm: bool
) -> DecoderSpec:
    bias = bool(config.attention_bias)
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads,
        head_size=config.head_dim,
        rms_norm_eps=config.rms_norm_eps,
        layers=layers,
        ropes=ropes,
        tie_word_embeddings=bool(config.tie_word_embeddings),
        attention_scale=config.query_pre_attn_scalar**-0.5,
        activation=activation_name(config.hidden_activation),
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=qk_norm,
        norm_unit_offset=True,
        sandwich_norms=True,
        embedding_scale=config.hidden_size**0.5,
        attention_soft_cap=config.attn_logit_softcapping,
        final_soft_cap=config.final_logit_softcapping,
        non_causal=bool(getattr(config, "use_bidirectional_attention", False)),
    )
