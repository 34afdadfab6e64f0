"""The shape of a decoder-only transformer, as data. A family file turns a Hugging Face config into a DecoderSpec,
`executors.models.decoder` builds and runs any of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from executors.layers.ops import GATED_ACTIVATIONS
from executors.layers.rotary import RopeSpec

# What configs call the activation of a gated MLP → what LayerOps calls it.
_ACTIVATION_NAMES = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


@dataclass(frozen=True)
class LayerSpec:
    """What may differ from layer to layer.

    Attributes:
        rope: Key in DecoderSpec.ropes.
        sliding_window: Token reads itself and this many - 1 before it; None is all.
    """

    rope: str = "default"
    sliding_window: int | None = None


@dataclass(frozen=True)
class DecoderSpec:
    """Sizes are of the whole model, before any division over ranks.

    Attributes:
        attention_scale: Multiplies q·k.
        activation: One of GATED_ACTIVATIONS.
        qkv_bias, o_bias, mlp_bias: Which linears have one.
        qk_norm: RMS norm of each query and key head before rotation.
        norm_unit_offset: Norm weights are stored as the difference from 1.
        sandwich_norms: Attention and MLP outputs are normalised too, before the residual addition.
        embedding_scale: Multiplies token embeddings, rounded to the model's dtype first.
        attention_soft_cap, final_soft_cap: cap × tanh(x / cap) on scores and on logits.
        non_causal: Prompt tokens attend to later ones (prefix LM).
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    rms_norm_eps: float
    layers: tuple[LayerSpec, ...]
    ropes: Mapping[str, RopeSpec]
    tie_word_embeddings: bool
    attention_scale: float
    activation: str = "silu"
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    norm_unit_offset: bool = False
    sandwich_norms: bool = False
    embedding_scale: float | None = None
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    non_causal: bool = False

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_size"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a positive integer, got {value!r}")
        if not self.layers:
            raise ValueError("num_hidden_layers must be at least 1, got 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got {self.num_heads} and "
                f"{self.num_kv_heads}"
            )
        if self.activation not in GATED_ACTIVATIONS:
            raise ValueError(f"activation must be one of {GATED_ACTIVATIONS}, got {self.activation!r}")
        for layer in self.layers:
            if layer.sliding_window is not None and layer.sliding_window < 1:
                raise ValueError(f"sliding_window must be at least 1, got {layer.sliding_window}")


def activation_name(config_name: object) -> str:
    """What LayerOps calls the activation a config names.

    Raises:
        ValueError: It is not supported.
    """
    if config_name not in _ACTIVATION_NAMES:
        raise ValueError(f"hidden activation must be one of {tuple(_ACTIVATION_NAMES)}, got {config_name!r}")
    return _ACTIVATION_NAMES[str(config_name)]
