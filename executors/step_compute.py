"""How a step's tensors become hidden states, logits and greedy tokens: the strategy a ModelRunner is built with.

`TorchCompute` runs the model's layers one by one, on any device and at any place in a pipeline. A kernel package may
bring another (`executors.kernels.step`); `executors.worker` chooses once, the runner never asks which it has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch

from executors.input_batch import StepInputs, Wanted
from executors.parallel_state import ParallelState
from executors.sampler import sample
from kv.spec import KVCacheConfig

if TYPE_CHECKING:
    from executors.models.base import CausalLM


class StepCompute(ABC):
    """Use: `bind` when the KV caches are bound to the model, then `forward` per step and one of the others.

    What they return may be memory that the next `forward` overwrites, and the caller may change it.
    """

    @abstractmethod
    def bind(self, config: KVCacheConfig) -> None:
        """The caches of the model's layers are in place, in the groups of `config`."""

    @abstractmethod
    def unbind(self) -> None:
        """Hold the caches no longer; `bind` comes before the next `forward`."""

    @abstractmethod
    def forward(self, inputs: StepInputs, wanted: Wanted) -> None:
        """Run this rank's layers, receiving from the stage before and sending to the next where there is one."""

    @abstractmethod
    def greedy_tokens(self) -> torch.Tensor:
        """The likeliest token of each of `inputs.sample_indices`, the lowest id among equals. int64 [num_sampling].

        -1, or any token, where the logits are not numbers.
        """

    @abstractmethod
    def sampled_logits(self) -> torch.Tensor:
        """[num_sampling, vocab_size], any float type, on all TP ranks of the last stage."""

    @abstractmethod
    def logits_of(self, token_rows: torch.Tensor) -> torch.Tensor:
        """Logits [n, vocab_size] of any of the step's tokens, int64 [n]; after a forward that wanted `ANY_ROW`."""


class TorchCompute(StepCompute):
    """The model's own `forward` and `compute_logits`."""

    def __init__(
        self, model: CausalLM, parallel: ParallelState, *, hidden_size: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._model = model
        self._parallel = parallel
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._group_of_layer: list[tuple[str, int]] = []
        self._hidden_states: torch.Tensor | None = None
        self._sample_indices: torch.Tensor | None = None

    def bind(self, config: KVCacheConfig) -> None:
        self._group_of_layer = [(name, i) for i, group in enumerate(config.groups) for name in group.layer_names]

    def unbind(self) -> None:
        self._hidden_states = None

    def forward(self, inputs: StepInputs, wanted: Wanted) -> None:
        received = None
        if not self._parallel.is_first_stage:
            shape = (len(inputs.input_ids), self._hidden_size)
            received = self._parallel.recv_hidden_states(shape, self._dtype, self._device)
        metadata = {name: inputs.metadata[group] for name, group in self._group_of_layer}
        hidden_states = self._model.forward(inputs.input_ids, inputs.positions, metadata, received)
        if not self._parallel.is_last_stage:
            self._parallel.send_hidden_states(hidden_states)
        self._hidden_states, self._sample_indices = hidden_states, inputs.sample_indices

    def greedy_tokens(self) -> torch.Tensor:
        return sample(self.sampled_logits(), None)

    def sampled_logits(self) -> torch.Tensor:
        if self._sample_indices is None:
            raise RuntimeError("no step was computed yet")
        return self.logits_of(self._sample_indices)

    def logits_of(self, token_rows: torch.Tensor) -> torch.Tensor:
        if self._hidden_states is None:
            raise RuntimeError("no step was computed yet")
        return self._model.compute_logits(self._hidden_states[token_rows])
