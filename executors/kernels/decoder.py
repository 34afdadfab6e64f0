"""From the layers of a `DecoderLM` (one rank, one stage, bfloat16) to the packed `Decoder` that a program records."""

from __future__ import annotations

import torch

from executors.kernels import abi
from executors.kernels.library import NativeKernels
from executors.kernels.memory import HugePageArena
from executors.kernels.packed import PackedWeight
from executors.kernels.program import ACTIVATIONS, Decoder, DecoderLayer
from executors.kernels.quantization import WeightFormats
from executors.layers.linear import ColumnParallelLinear, RowParallelLinear
from executors.layers.norm import RMSNorm
from executors.layers.partition import shard_balanced
from executors.models.decoder import DecoderLayer as TorchLayer
from executors.models.decoder import DecoderLM
from executors.models.spec import DecoderSpec


def reason_against(model: DecoderLM) -> str | None:
    """Why a program cannot stand for this model, or None when it can."""
    dtype = next(model.parameters()).dtype
    if dtype != torch.bfloat16:
        return f"its dtype is {dtype}, not bfloat16"
    if not (model.is_first_stage and model.is_last_stage):
        return "it is divided into pipeline stages"
    return reason_against_shape(model.spec)


def reason_against_shape(spec: DecoderSpec, tp_size: int = 1) -> str | None:
    """Why the kernels cannot compute the layers of such a model, divided over `tp_size` ranks; None when they can."""
    if spec.activation not in ACTIVATIONS:
        return f"its activation {spec.activation!r} is none of {tuple(ACTIVATIONS)}"
    if spec.head_size % 16:
        return f"its head_size {spec.head_size} is not a multiple of 16"
    if spec.hidden_size % 2:
        return f"its hidden_size {spec.hidden_size} is odd"
    if shard_balanced(spec.intermediate_size, 0, tp_size).size % 2:
        return f"its intermediate_size {spec.intermediate_size} over {tp_size} ranks is odd"
    return None


def decoder_of(
    model: DecoderLM, kernels: NativeKernels, formats: WeightFormats | None = None, *, release: bool = False
) -> Decoder:
    """Pack the weights of `model`, in the order of their use.

    Args:
        formats: Of the packed weights; None is bfloat16.
        release: Drop each matrix of the model as soon as it is packed, so that no second copy of the weights exists at
            any time; only `attention_layers` of the model can be used afterwards.

    Raises:
        ValueError: `reason_against(model)`.
    """
    reason = reason_against(model)
    if reason is not None:
        raise ValueError(f"the model cannot run as a native program: {reason}")
    spec, pack = model.spec, _Packer(kernels, formats or WeightFormats())
    tables = {name: torch.cat([rope.cos, rope.sin], dim=1).float().contiguous() for name, rope in model.ropes.items()}
    if model.embed_tokens is None:
        raise RuntimeError("a first stage has an embedding")
    layers = []
    for layer in model.layers:
        layers.append(_pack_layer(pack, layer, tables))
        if release:
            attention, mlp = layer.self_attn, layer.mlp
            for linear in (attention.qkv_proj, attention.o_proj, mlp.gate_up_proj, mlp.down_proj):
                drop_weight(linear)
    head = pack.vocabulary(model.lm_head.weight[: spec.vocab_size])
    tied = model.lm_head.weight is model.embed_tokens.weight
    if release:
        drop_weight(model.lm_head)
    embedding = head if tied else pack.vocabulary(model.embed_tokens.weight[: spec.vocab_size])
    if release:
        drop_weight(model.embed_tokens)
    return Decoder(
        layers=layers,
        embedding=embedding,
        head=head,
        final_norm=_norm_weight(model.norm),
        eps=spec.rms_norm_eps,
        norm_style=abi.NormStyle.SCALE_IN_FLOAT if spec.norm_unit_offset else abi.NormStyle.ROUND_THEN_SCALE,
        activation=spec.activation,
        embedding_scale=1.0 if spec.embedding_scale is None else spec.embedding_scale,
        logits_soft_cap=spec.final_soft_cap,
    )


def drop_weight(module: torch.nn.Module) -> None:
    """Leave an empty matrix in place of `module.weight`, of its dtype."""
    module.weight = torch.nn.Parameter(module.weight.new_empty(0), requires_grad=False)


class _Packer:
    """Packs one model's weights in the order of its calls."""

    def __init__(self, kernels: NativeKernels, formats: WeightFormats) -> None:
        self._kernels, self._formats, self._arena = kernels, formats, HugePageArena()

    def linear(
        self, layer: ColumnParallelLinear | RowParallelLinear, *, gate_up: bool = False, fine_inputs: bool = False
    ) -> PackedWeight:
        return PackedWeight(
            self._kernels,
            layer.weight,
            gate_up=gate_up,
            fine_inputs=fine_inputs,
            format=self._formats.layers,
            importance=layer.input_importance,
            arena=self._arena,
        )

    def vocabulary(self, weight: torch.Tensor) -> PackedWeight:
        return PackedWeight(self._kernels, weight, format=self._formats.vocabulary, arena=self._arena)


def _pack_layer(pack: _Packer, layer: TorchLayer, tables: dict[str, torch.Tensor]) -> DecoderLayer:
    attention, mlp = layer.self_attn, layer.mlp
    qkv = pack.linear(attention.qkv_proj, fine_inputs=True)
    output = pack.linear(attention.o_proj)
    gate_up = pack.linear(mlp.gate_up_proj, gate_up=True)
    down = pack.linear(mlp.down_proj)

    def bias(packed: PackedWeight, values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else packed.pack_bias(values.detach())

    def norm(module: torch.nn.Module | None) -> torch.Tensor | None:
        return _norm_weight(module) if isinstance(module, RMSNorm) else None

    return DecoderLayer(
        name=attention.attention.layer_name,
        params=attention.attention.params,
        input_norm=_norm_weight(layer.input_norm),
        qkv=qkv,
        attention_output=output,
        pre_mlp_norm=_norm_weight(layer.mlp_norm),
        gate_up=gate_up,
        down=down,
        cos_sin=tables[layer.rope],
        qkv_bias=bias(qkv, attention.qkv_proj.bias),
        attention_output_bias=bias(output, attention.o_proj.bias),
        gate_up_bias=bias(gate_up, mlp.gate_up_proj.bias),
        down_bias=bias(down, mlp.down_proj.bias),
        q_norm=norm(attention.q_norm),
        k_norm=norm(attention.k_norm),
        post_attention_norm=norm(layer.after_attention),
        post_mlp_norm=norm(layer.after_mlp),
    )


def _norm_weight(norm: RMSNorm) -> torch.Tensor:
    weight = norm.weight.detach().float()
    return 1.0 + weight if norm.unit_offset else weight
