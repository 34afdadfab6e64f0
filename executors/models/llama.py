"""Llama, and the families that differ from it by a few switches: Mistral, Qwen2, Qwen3."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from executors.layers.rotary import RopeSpec
from executors.models.spec import DecoderSpec, LayerSpec, activation_name


def describe_llama(config: Any) -> DecoderSpec:
    """From a transformers LlamaConfig (Llama 2 and 3, SmolLM2)."""
    head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    attention_bias = bool(getattr(config, "attention_bias", False))
    return DecoderSpec(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_heads=config.num_attention_heads,
        num_kv_heads=config.num_key_value_heads or config.num_attention_heads,
        head_size=head_size,
        rms_norm_eps=config.rms_norm_eps,
        layers=tuple(LayerSpec() for _ in range(config.num_hidden_layers)),
        ropes={"default": RopeSpec.from_config(config.rope_parameters, head_size, config.max_position_embeddings)},
        tie_word_embeddings=bool(config.tie_word_embeddings),
        attention_scale=head_size**-0.5,
        activation=activation_name(config.hidden_act),
        qkv_bias=attention_bias,
        o_bias=attention_bias,
        mlp_bias=bool(getattr(config, "mlp_bias", False)),
    )


def describe_mistral(config: Any) -> DecoderSpec:
    """From a MistralConfig: one sliding window for all layers, if any."""
    spec = describe_llama(config)
    return replace(spec, layers=tuple(LayerSpec(sliding_window=config.sliding_window) for _ in spec.layers))


def describe_qwen2(config: Any) -> DecoderSpec:
    """From a Qwen2Config: biased q, k and v; sliding windows by layer type."""
    return replace(describe_llama(config), layers=layers_by_type(config), qkv_bias=True, o_bias=False)


def describe_qwen3(config: Any) -> DecoderSpec:
    """From a Qwen3Config: normalised query and key heads; sliding windows by layer type."""
    return replace(describe_llama(config), layers=layers_by_type(config), qk_norm=True)


def layers_by_type(config: Any, *, rope_by_type: bool = False) -> tuple[LayerSpec, ...]:
    """One LayerSpec per entry of the config's `layer_types`.

    Raises:
        ValueError: A type is unknown, there are not as many as layers, or a sliding layer has no window.
    """
    layer_types = config.layer_types
    if len(layer_types) != config.num_hidden_layers:
        raise ValueError(
            f"layer_types must name each of the {config.num_hidden_layers} layers, got {len(layer_types)} names"
        )
    layers = []
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise ValueError(f"layer_types may hold 'full_attention' and 'sliding_attention', got {layer_type!r}")
        window = config.sliding_window if layer_type == "sliding_attention" else None
        if layer_type == "sliding_attention" and not window:
            raise ValueError(f"layer_types holds 'sliding_attention', but sliding_window is {window!r}")
        layers.append(LayerSpec(layer_type if rope_by_type else "default", window))
    return tuple(layers)
