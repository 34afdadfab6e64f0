"""Builds one rank's model and fills it: from safetensors straight into its shards, or with dummy weights."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from tqdm import tqdm

from executors.attention.base import AttentionBackend
from executors.layers.linear_method import LinearMethod
from executors.layers.ops import LayerOps
from executors.layers.weights import SliceableTensor, WeightLoadError, WeightTarget
from executors.loader.checkpoint import Checkpoint
from executors.model_config import ResolvedModelConfig, download_from_hub
from executors.models.base import CausalLM
from executors.models.decoder import EMBEDDING, LM_HEAD
from executors.models.registry import build_model
from executors.parallel_state import ParallelState

logger = logging.getLogger(__name__)

EMBEDDING_WEIGHT = f"{EMBEDDING}.weight"
LM_HEAD_WEIGHT = f"{LM_HEAD}.weight"
# Missing tensors named in an error; the rest are counted.
_MAX_NAMED = 5
_DUMMY_STD = 0.02

Item = TypeVar("Item")


def load_model(
    config: ResolvedModelConfig,
    parallel: ParallelState,
    device: torch.device | str,
    *,
    attention_backend: AttentionBackend | None = None,
    linear_method: LinearMethod | None = None,
    ops: LayerOps | None = None,
    show_progress: bool = True,
    before_prepare: Callable[[CausalLM], None] | None = None,
) -> CausalLM:
    """This rank's share of the model, ready to run once its KV caches are bound.

    Args:
        show_progress: A progress bar on stderr, on global rank 0 only.
        attention_backend, linear_method, ops: See `build_model`.
        before_prepare: Called with the filled model, before its weights are packed.

    Raises:
        WeightLoadError: The checkpoint lacks, repeats, or misshapes a tensor, or a file is missing or broken.
    """

    def build(resolved: ResolvedModelConfig) -> CausalLM:
        return build_model(
            resolved,
            parallel,
            device,
            attention_backend=attention_backend,
            linear_method=linear_method,
            ops=ops,
        )

    show_progress = show_progress and parallel.rank == 0
    if config.model_config.load_format == "dummy":
        model = build(config)
        _fill_dummy(model, config.model_config.seed, show_progress)
    else:
        checkpoint = Checkpoint(_weights_dir(config))
        config, renamed = _settle_head(config, checkpoint)
        model = build(config)
        _fill_from_checkpoint(model, checkpoint, renamed, show_progress)
    if before_prepare is not None:
        before_prepare(model)
    model.prepare()
    return model


def _weights_dir(config: ResolvedModelConfig) -> Path:
    """The model's own directory, or the hub snapshot with its weights."""
    path = Path(config.model_config.model).expanduser()
    if path.is_dir():
        return path
    return download_from_hub(
        config.model_config.model, config.model_config.revision, ["*.json", "*.safetensors", "*.bin.index.json"]
    )


def _settle_head(
    config: ResolvedModelConfig, checkpoint: Checkpoint
) -> tuple[ResolvedModelConfig, dict[str, str | None]]:
    """What the checkpoint means by a tied head, and checkpoint names to load under another name (None: skip).

    As in transformers: a tied head that is stored too is skipped when it equals the embedding, and used, untied, when
    it does not; either of the two may stand for both.
    """
    if not config.tie_word_embeddings or LM_HEAD_WEIGHT not in checkpoint.files:
        return config, {}
    if EMBEDDING_WEIGHT not in checkpoint.files:
        return config, {LM_HEAD_WEIGHT: EMBEDDING_WEIGHT}
    embedding, head = checkpoint.tensor(EMBEDDING_WEIGHT), checkpoint.tensor(LM_HEAD_WEIGHT)
    if embedding.shape == head.shape and torch.equal(embedding[:], head[:]):
        return config, {LM_HEAD_WEIGHT: None}
    logger.warning(
        "config.json of %s ties %s to %s, but its checkpoint holds different values for them: using both, untied",
        checkpoint.model_dir, LM_HEAD_WEIGHT, EMBEDDING_WEIGHT,
    )  # fmt: skip
    untied = replace(config.decoder, tie_word_embeddings=False)
    return replace(config, tie_word_embeddings=False, decoder=untied), {}


def _fill_from_checkpoint(
    model: CausalLM, checkpoint: Checkpoint, renamed: dict[str, str | None], show_progress: bool
) -> None:
    def tensors() -> Iterator[tuple[str, SliceableTensor]]:
        stored = checkpoint.tensors()
        for name, tensor in _progress(stored, len(checkpoint.files), "Loading weights", show_progress):
            target = renamed.get(name, name)
            if target is not None:
                yield target, tensor

    needed = model.weight_targets()
    missing = sorted(needed.keys() - {renamed.get(name, name) for name in checkpoint.files})
    if missing:
        more = f" and {len(missing) - _MAX_NAMED} more" if len(missing) > _MAX_NAMED else ""
        raise WeightLoadError(
            f"tensor {', '.join(map(repr, missing[:_MAX_NAMED]))}{more} missing in {_described_files(checkpoint)}"
        )
    model.load_weights(tensors())


def _described_files(checkpoint: Checkpoint) -> str:
    names = sorted({path.name for path in checkpoint.files.values()})
    if len(names) == 1:
        return str(checkpoint.model_dir / names[0])
    return f"the {len(names)} safetensors files of {checkpoint.model_dir}"


def _fill_dummy(model: CausalLM, seed: int, show_progress: bool) -> None:
    """Values depend on seed and tensor name only, so every parallel layout holds the same model."""
    targets = model.weight_targets()
    for name, tensor_targets in _progress(targets.items(), len(targets), "Making dummy weights", show_progress):
        tensor = _dummy_tensor(tensor_targets[0], seed, name)
        for target in tensor_targets:
            target.load(tensor)


def _dummy_tensor(target: WeightTarget, seed: int, name: str) -> torch.Tensor:
    if target.dummy_value is not None:
        return torch.full(target.full_shape, target.dummy_value)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(target.full_shape).normal_(0.0, _DUMMY_STD, generator=generator)


def _progress(items: Iterable[Item], total: int, description: str, show: bool) -> Iterable[Item]:
    bar: Iterable[Item] = tqdm(items, total=total, desc=description, unit="tensor", disable=not show, leave=True)
    return bar
