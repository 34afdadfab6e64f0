"""What the model runner and the loader ask of a model: one pipeline stage's share of one rank."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator

import torch
from torch import nn

from executors.attention.base import AttentionMetadata
from executors.layers.attention import Attention
from executors.layers.embedding import ParallelLMHead, VocabParallelEmbedding
from executors.layers.linear import ColumnParallelLinear, RowParallelLinear
from executors.layers.weights import HoldsWeights, SliceableTensor, WeightLoadError, WeightTarget
from kv.spec import KVCacheSpec


class CausalLM(nn.Module):
    """Base of the model implementations. Built with unset weights; `load_weights`, then `prepare`, make it usable."""

    @abstractmethod
    def forward(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        metadata: dict[str, AttentionMetadata],
        hidden_states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run this stage over the flattened batch.

        Args:
            input_ids, positions: int64 [num_tokens].
            metadata: By layer name, for this stage's layers.
            hidden_states: [num_tokens, hidden] from the previous stage; None on the first.

        Returns:
            Hidden states [num_tokens, hidden], normalised on the last stage.
        """

    @abstractmethod
    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """[n, hidden] of the last stage → [n, vocab_size] in the model's dtype, equal on all its TP ranks."""

    @abstractmethod
    def owned_by_other_stage(self, name: str) -> bool:
        """Whether the checkpoint tensor `name` belongs to the model, but to another pipeline stage."""

    def attention_layers(self) -> Iterator[Attention]:
        return (module for module in self.modules() if isinstance(module, Attention))

    def kv_cache_specs(self, block_size: int, dtype_bytes: int) -> dict[str, KVCacheSpec]:
        """By layer name, in layer order.

        Args:
            dtype_bytes: Bytes per KV element.
        """
        return {layer.layer_name: layer.kv_cache_spec(block_size, dtype_bytes) for layer in self.attention_layers()}

    def bind_kv_caches(self, caches: dict[str, torch.Tensor]) -> None:
        """Give each attention layer its cache, shaped by its backend's `kv_cache_shape` and zeroed.

        Raises:
            ValueError: A layer is missing in `caches`.
        """
        for layer in self.attention_layers():
            if layer.layer_name not in caches:
                raise ValueError(f"no KV cache for layer {layer.layer_name!r}; got {sorted(caches)}")
            layer.kv_cache = caches[layer.layer_name]

    def weight_targets(self) -> dict[str, list[WeightTarget]]:
        """By checkpoint tensor, the parameters of this rank that it fills."""
        targets: dict[str, list[WeightTarget]] = {}
        for module in self.modules():
            if module is not self and isinstance(module, HoldsWeights):
                for target in module.weight_targets():
                    targets.setdefault(target.name, []).append(target)
        return targets

    def load_weights(self, weights: Iterable[tuple[str, SliceableTensor]]) -> set[str]:
        """Fill parameters from (name, tensor) pairs; of a tensor on disk only this rank's part is read.

        Returns:
            Names of the tensors that were used. Completeness is the caller's to check, against `weight_targets`.

        Raises:
            WeightLoadError: A tensor is unexpected, given twice, or has the wrong shape or dtype.
        """
        targets = self.weight_targets()
        loaded: set[str] = set()
        for name, tensor in weights:
            if name not in targets:
                if self.owned_by_other_stage(name):
                    continue
                where = getattr(tensor, "file", None)
                raise WeightLoadError(
                    f"unexpected tensor {name!r}" + (f" in {where}" if where else "") + ": the model has no such weight"
                )
            if name in loaded:
                raise WeightLoadError(f"tensor {name!r} is there twice")
            for target in targets[name]:
                target.load(tensor)
            loaded.add(name)
        return loaded

    def prepare(self) -> None:
        """Let the linear method pack the final weights. Called once, after loading."""
        for module in self.modules():
            if isinstance(module, VocabParallelEmbedding):
                module.prepare()
        for module in self.modules():
            if isinstance(module, (ColumnParallelLinear, RowParallelLinear, ParallelLMHead)):
                module.prepare()
