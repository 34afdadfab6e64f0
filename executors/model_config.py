"""From a ModelConfig to facts: reads the model's config files, settles dtype, length and sizes, or says what is wrong.

Called by the front end (lengths, vocabulary, EOS, legal parallel layouts), which passes what it found to the workers.
"""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from executors.config import ModelConfig, ModelFacts
from executors.layers.partition import legal_tensor_parallel_sizes
from executors.models.registry import describe_model, supported_architectures
from executors.models.spec import DecoderSpec

_TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_SAFETENSORS_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
# A hub id is "name" or "owner/name"; anything else can only be a path.
_HUB_ID = re.compile(r"[\w][\w.-]*(/[\w][\w.-]*)?")
# Everything of a hub repository but its weights.
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model"]


class ModelConfigError(ValueError):
    """The model folder, or a setting of ModelConfig, cannot be used. The text names the value and what is allowed."""


@dataclass(frozen=True)
class ResolvedModelConfig:
    """What a model is, after its config files were read.

    Attributes:
        model_config: What it was resolved from.
        model_dir: Local directory of the config files (and, unless they come from a hub, the weights).
        hf_config: The transformers config object.
        architecture: E.g. "LlamaForCausalLM".
        dtype: Of weights and activations.
        max_model_len: Longest prompt + output. With `auto_fit_max_model_len` the upper end of what may be chosen.
        auto_fit_max_model_len: The length asked for was -1: as long as KV memory allows.
        num_heads, num_kv_heads, head_size: Of the whole model.
        eos_token_ids: From generation_config.json and config.json, ascending.
        sliding_windows: Per layer; None is full attention.
        decoder: The model as `executors.models.decoder` builds it.
    """

    model_config: ModelConfig
    model_dir: Path
    hf_config: Any
    architecture: str
    dtype: torch.dtype
    max_model_len: int
    auto_fit_max_model_len: bool
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    eos_token_ids: tuple[int, ...]
    sliding_windows: tuple[int | None, ...]
    tie_word_embeddings: bool
    decoder: DecoderSpec


def resolve_model_config(config: ModelConfig, device: str = "cpu") -> ResolvedModelConfig:
    """Read and check the model's config files.

    Args:
        device: "cpu" or "cuda": decides what dtype="auto" makes of a float32 checkpoint, and which dtypes can be used.

    Raises:
        ModelConfigError: See the class.
    """
    model_dir = find_model_dir(config.model, config.revision)
    hf_config = _read_hf_config(model_dir, config)
    architecture = _architecture(hf_config, model_dir)
    try:
        decoder = describe_model(architecture, hf_config)
    except (ValueError, AttributeError, KeyError) as error:
        raise ModelConfigError(f"model {config.model!r}: {error}") from error
    limit = model_length_limit(hf_config)
    asked = config.max_model_len
    if asked is not None and asked > limit:
        raise ModelConfigError(
            f"max_model_len {asked} is larger than the {limit} tokens that model {config.model!r} supports"
        )
    return ResolvedModelConfig(
        model_config=config,
        model_dir=model_dir,
        hf_config=hf_config,
        architecture=architecture,
        dtype=_resolve_dtype(config, hf_config, model_dir, device),
        max_model_len=limit if asked is None or asked == -1 else asked,
        auto_fit_max_model_len=asked == -1,
        vocab_size=decoder.vocab_size,
        hidden_size=decoder.hidden_size,
        num_layers=len(decoder.layers),
        num_heads=decoder.num_heads,
        num_kv_heads=decoder.num_kv_heads,
        head_size=decoder.head_size,
        eos_token_ids=_eos_token_ids(hf_config, model_dir),
        sliding_windows=tuple(layer.sliding_window for layer in decoder.layers),
        tie_word_embeddings=decoder.tie_word_embeddings,
        decoder=decoder,
    )


def with_resolution(resolved: ResolvedModelConfig) -> ModelConfig:
    """The ModelConfig it came from, with `resolved` and `facts` set: workers and EngineCore are spared seconds of
    imports."""
    return replace(
        resolved.model_config,
        resolved=pickle.dumps(replace(resolved, hf_config=None)),
        facts=ModelFacts(str(resolved.model_dir), resolved.vocab_size),
    )


def resolve_on_worker(config: ModelConfig, device: str) -> ResolvedModelConfig:
    """What the front end found, if it holds for this config and device; else as `resolve_model_config`."""
    if config.resolved is not None and device == "cpu":
        resolved: ResolvedModelConfig = pickle.loads(config.resolved)
        if resolved.model_config == config:
            return resolved
    return resolve_model_config(config, device)


def check_parallel(resolved: ResolvedModelConfig, tensor_parallel_size: int, pipeline_parallel_size: int = 1) -> None:
    """Refuse a layout the model cannot be divided into. Called before any worker starts.

    Raises:
        ModelConfigError: With the sizes that are legal.
    """
    check_tensor_parallel(resolved, tensor_parallel_size)
    if pipeline_parallel_size > resolved.num_layers:
        raise ModelConfigError(
            f"pipeline_parallel_size {pipeline_parallel_size} is larger than the {resolved.num_layers} layers of model "
            f"{resolved.model_config.model!r}"
        )


def check_tensor_parallel(resolved: ResolvedModelConfig, tensor_parallel_size: int) -> None:
    """Refuse a tensor_parallel_size that the model's heads cannot be divided into.

    Raises:
        ModelConfigError: With the sizes that are legal.
    """
    legal = legal_tensor_parallel_sizes(resolved.num_heads, resolved.num_kv_heads, resolved.decoder.intermediate_size)
    if tensor_parallel_size not in legal:
        raise ModelConfigError(
            f"tensor_parallel_size {tensor_parallel_size} does not suit the {resolved.num_heads} attention heads, "
            f"{resolved.num_kv_heads} KV heads and intermediate size {resolved.decoder.intermediate_size} of model "
            f"{resolved.model_config.model!r}; legal sizes are {', '.join(map(str, legal))}"
        )


def find_model_dir(model: str, revision: str | None = None) -> Path:
    """The local directory of a model: `model` itself, or a hub snapshot's config and tokenizer files.

    Raises:
        ModelConfigError: It is no directory, holds no config.json, or the hub does not give it.
    """
    path = Path(model).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ModelConfigError(f"model directory {model!r} holds no config.json")
        return path
    if path.exists():
        raise ModelConfigError(f"model {model!r} is a file; a Hugging Face model directory is needed")
    if not _HUB_ID.fullmatch(model):
        raise ModelConfigError(f"model directory {model!r} does not exist")
    return download_from_hub(model, revision, _SMALL_FILES)


def download_from_hub(model: str, revision: str | None, patterns: list[str]) -> Path:
    """A hub snapshot (cached) of the files that match.

    Raises:
        ModelConfigError: The hub cannot be reached, or does not have it.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        path = Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelConfigError(
            f"model {model!r} is neither a local directory nor could it be fetched from the Hugging Face hub: {error}"
        ) from error
    if not (path / "config.json").is_file():
        raise ModelConfigError(f"hub model {model!r} holds no config.json")
    return path


def model_length_limit(hf_config: Any) -> int:
    """Longest sequence the model was made for, in tokens.

    `max_position_embeddings` times the rope scaling factor, except where configs already include the factor: "llama3"
    and models with different ropes per layer type. YaRN's factor applies to the original length.
    """
    limit = getattr(hf_config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1:
        raise ModelConfigError(f"max_position_embeddings in config.json must be a positive integer, got {limit!r}")
    rope = getattr(hf_config, "rope_parameters", None) or {}
    rope_type, factor = rope.get("rope_type"), rope.get("factor")
    if not isinstance(factor, (int, float)) or rope_type not in ("linear", "yarn"):
        return limit
    if rope_type == "yarn":
        return int(rope.get("original_max_position_embeddings", limit) * factor)
    return int(limit * factor)


def _read_hf_config(model_dir: Path, config: ModelConfig) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    values = read_json(model_dir / "config.json")
    _merge(values, config.hf_overrides)
    quantization = values.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise ModelConfigError(
            f"model {config.model!r} is quantised ({method!r}); float32, bfloat16 and float16 weights are supported"
        )
    model_type = values.get("model_type")
    if model_type not in CONFIG_MAPPING:
        architectures = values.get("architectures") or ["(none named)"]
        raise ModelConfigError(
            f"model {config.model!r} has the unknown model_type {model_type!r}, architecture {architectures[0]!r}; "
            f"supported are {', '.join(supported_architectures())}"
        )
    try:
        return CONFIG_MAPPING[model_type].from_dict(values)
    except Exception as error:  # transformers raises many types for a config it cannot read
        raise ModelConfigError(f"config.json of model {config.model!r} cannot be used: {error}") from error


def _merge(values: dict[str, Any], overrides: dict[str, Any]) -> None:
    """Overwrite in place; nested dictionaries are merged."""
    for key, value in overrides.items():
        if isinstance(value, dict) and isinstance(values.get(key), dict):
            _merge(values[key], value)
        else:
            values[key] = value


def _architecture(hf_config: Any, model_dir: Path) -> str:
    names = getattr(hf_config, "architectures", None) or []
    for name in names:
        if name in supported_architectures():
            return str(name)
    raise ModelConfigError(
        f"architecture {(names or ['(none named)'])[0]!r} of {str(model_dir)!r} is not supported; supported are "
        f"{', '.join(supported_architectures())}"
    )


def _resolve_dtype(config: ModelConfig, hf_config: Any, model_dir: Path, device: str) -> torch.dtype:
    name = config.dtype
    if name == "auto":
        name = _checkpoint_dtype(hf_config, model_dir)
        if device.startswith("cuda") and name == "float32":
            name = "bfloat16" if torch.cuda.is_bf16_supported() else "float16"
    if name not in _TORCH_DTYPES:
        raise ModelConfigError(
            f"dtype {name!r} of model {config.model!r} is not supported; allowed are {', '.join(_TORCH_DTYPES)}"
        )
    dtype = _TORCH_DTYPES[name]
    if config.quantization is not None and (dtype != torch.bfloat16 or device.startswith("cuda")):
        raise ModelConfigError(
            f"quantization {config.quantization!r} needs dtype 'bfloat16' on the CPU, got dtype {name!r} on device "
            f"{device!r}"
        )
    reason = _dtype_unusable(dtype, device)
    if reason is not None:
        raise ModelConfigError(
            f"dtype {name!r} cannot be computed on device {device!r} ({reason}); choose another of "
            f"{', '.join(_TORCH_DTYPES)}"
        )
    return dtype


def _checkpoint_dtype(hf_config: Any, model_dir: Path) -> str:
    """The config's dtype, else that of the first floating-point tensor of the checkpoint, else float32."""
    from executors.loader.safetensors_file import SafetensorsHeader

    named = getattr(hf_config, "dtype", None)
    if named is not None:
        return str(named).removeprefix("torch.")
    for path in sorted(model_dir.glob("*.safetensors")):
        for entry in SafetensorsHeader.read(path).tensors.values():
            if entry.dtype in _SAFETENSORS_DTYPES:
                return _SAFETENSORS_DTYPES[entry.dtype]
    return "float32"


def _dtype_unusable(dtype: torch.dtype, device: str) -> str | None:
    """Why torch cannot compute a linear layer in this dtype here; None if it can."""
    if dtype == torch.float32:
        return None
    try:
        x = torch.ones(2, 2, dtype=dtype, device=device)
        torch.nn.functional.linear(x, x)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def _eos_token_ids(hf_config: Any, model_dir: Path) -> tuple[int, ...]:
    found: set[int] = set()
    generation = model_dir / "generation_config.json"
    sources = [getattr(hf_config, "eos_token_id", None)]
    if generation.is_file():
        sources.append(read_json(generation).get("eos_token_id"))
    for value in sources:
        for token in value if isinstance(value, list) else [value]:
            if token is None:
                continue
            if not isinstance(token, int) or isinstance(token, bool):
                raise ModelConfigError(f"eos_token_id of {str(model_dir)!r} must hold integers, got {token!r}")
            found.add(token)
    return tuple(sorted(found))


def read_json(path: Path) -> dict[str, Any]:
    """Raises ModelConfigError, naming the file, unless it holds a JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelConfigError(f"{str(path)!r} cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ModelConfigError(f"{str(path)!r} must hold a JSON object, got {type(values).__name__}")
    return values
