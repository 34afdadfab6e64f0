"""Token embedding and LM head, both divided over the TP ranks by vocabulary rows, padded to equal shares."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from executors.layers.context import LayerContext
from executors.layers.partition import shard_in_order
from executors.layers.weights import WeightTarget, make_parameter


class VocabParallelEmbedding(nn.Module):
    """Token ids [n] → [n, hidden]: each rank looks up its own rows, the sum over ranks is the embedding."""

    def __init__(self, context: LayerContext, name: str, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.name = name
        self.vocab_size = vocab_size
        self.hidden_size = hidden_size
        self._parallel = context.parallel
        self._method = context.linear_method
        self.shard = shard_in_order(vocab_size, context.parallel.tp_rank, context.parallel.tp_size)
        self.weight = make_parameter(
            (self.shard.size, hidden_size), context.dtype, context.device, padded=self.shard.padded
        )

    def weight_targets(self) -> Iterator[WeightTarget]:
        yield WeightTarget(
            f"{self.name}.weight", self.weight, (self.vocab_size, self.hidden_size),
            start=self.shard.start, stop=self.shard.stop,
        )  # fmt: skip

    def prepare(self) -> None:
        self._method.prepare_embedding(self)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        if self._parallel.tp_size == 1:
            return self._method.embed(self, input_ids)
        local = input_ids - self.shard.start
        elsewhere = (local < 0) | (local >= self.shard.stop - self.shard.start)
        rows = self._method.embed(self, local.masked_fill(elsewhere, 0))
        return self._parallel.all_reduce(rows.masked_fill_(elsewhere.unsqueeze(-1), 0))


class ParallelLMHead(nn.Module):
    """Hidden states [n, hidden] → logits [n, vocab_size], the same on every TP rank."""

    def __init__(
        self,
        context: LayerContext,
        name: str,
        vocab_size: int,
        hidden_size: int,
        tied_to: VocabParallelEmbedding | None = None,
    ) -> None:
        """
        Args:
            name: Checkpoint module its weight is read from (the embedding's, for a tied head on its own stage).
            tied_to: Embedding on this rank whose weight is used; nothing is loaded then.
        """
        super().__init__()
        self.name = name
        self.vocab_size = vocab_size
        self.in_features = hidden_size
        self._parallel = context.parallel
        self._method = context.linear_method
        self.shard = shard_in_order(vocab_size, context.parallel.tp_rank, context.parallel.tp_size)
        self.out_features = self.shard.size
        self._tied_to = (tied_to,)  # in a tuple: not a submodule
        self.weight = (
            tied_to.weight
            if tied_to is not None
            else make_parameter((self.shard.size, hidden_size), context.dtype, context.device, padded=self.shard.padded)
        )

    @property
    def tied_to(self) -> VocabParallelEmbedding | None:
        """The embedding whose weight this is too."""
        return self._tied_to[0]

    def weight_targets(self) -> Iterator[WeightTarget]:
        if self.tied_to is None:
            yield WeightTarget(
                f"{self.name}.weight", self.weight, (self.vocab_size, self.in_features),
                start=self.shard.start, stop=self.shard.stop,
            )  # fmt: skip

    def prepare(self) -> None:
        self._method.prepare(self)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        logits = self._method.apply(self, hidden_states, None)
        if self._parallel.tp_size == 1:
            return logits
        return self._parallel.all_gather(logits)[:, : self.vocab_size]
