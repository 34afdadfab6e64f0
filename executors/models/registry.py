"""The supported model families by the architecture name of their config, and the way to build one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from executors.attention.base import AttentionBackend
from executors.attention.registry import get_backend
from executors.layers.context import LayerContext
from executors.layers.linear_method import LinearMethod, TorchLinearMethod
from executors.layers.ops import LayerOps, TorchOps
from executors.models.base import CausalLM
from executors.models.decoder import DecoderLM
from executors.models.gemma import describe_gemma2, describe_gemma3
from executors.models.llama import describe_llama, describe_mistral, describe_qwen2, describe_qwen3
from executors.models.spec import DecoderSpec
from executors.parallel_state import ParallelState

if TYPE_CHECKING:
    from executors.model_config import ResolvedModelConfig

_FAMILIES: dict[str, Callable[[Any], DecoderSpec]] = {
    "LlamaForCausalLM": describe_llama,
    "MistralForCausalLM": describe_mistral,
    "Qwen2ForCausalLM": describe_qwen2,
    "Qwen3ForCausalLM": describe_qwen3,
    "Gemma2ForCausalLM": describe_gemma2,
    "Gemma3ForCausalLM": describe_gemma3,
}


def supported_architectures() -> tuple[str, ...]:
    return tuple(sorted(_FAMILIES))


def describe_model(architecture: str, hf_config: Any) -> DecoderSpec:
    """The decoder that a Hugging Face config stands for.

    Raises:
        ValueError: The architecture, or something its config asks for, is not supported.
    """
    if architecture not in _FAMILIES:
        raise ValueError(
            f"architecture {architecture!r} is not supported; supported are {', '.join(supported_architectures())}"
        )
    return _FAMILIES[architecture](hf_config)


def build_model(
    config: ResolvedModelConfig,
    parallel: ParallelState,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    *,
    attention_backend: AttentionBackend | None = None,
    linear_method: LinearMethod | None = None,
    ops: LayerOps | None = None,
) -> CausalLM:
    """This rank's share of the model, weights not set yet (see `executors.loader.load_model`).

    Args:
        dtype: None is the config's.
        attention_backend: None is the one `config.model_config.attention_backend` names.
        linear_method, ops: None is plain torch.
    """
    device = torch.device(device)
    context = LayerContext(
        parallel=parallel,
        device=device,
        dtype=config.dtype if dtype is None else dtype,
        attention_backend=attention_backend or get_backend(config.model_config.attention_backend, device),
        linear_method=linear_method or TorchLinearMethod(),
        ops=ops or TorchOps(),
    )
    return DecoderLM(context, config.decoder, max_positions=config.max_model_len).eval()
