"""A whole step as one native call, for `executors.model_runner`: a `DecoderProgram` over the worker's KV caches.

Made by `executors.kernels.choice` for a model on one rank in bfloat16.
"""

from __future__ import annotations

import torch

from executors.input_batch import StepInputs, Wanted
from executors.kernels import ops
from executors.kernels.decoder import decoder_of
from executors.kernels.library import NativeKernels
from executors.kernels.program import DecoderProgram
from executors.kernels.quantization import WeightFormats
from executors.models.decoder import DecoderLM
from executors.step_compute import StepCompute
from kv.spec import KVCacheConfig


class NativeCompute(StepCompute):
    """Takes over the weights of `model`: they are packed, and the model's own are dropped one by one."""

    def __init__(
        self,
        kernels: NativeKernels,
        model: DecoderLM,
        formats: WeightFormats,
        *,
        max_num_tokens: int,
        max_num_samples: int,
    ) -> None:
        """
        Args:
            max_num_tokens, max_num_samples: Most of one step.
        """
        self._model = model
        self._decoder = decoder_of(model, kernels, formats, release=True)
        self._program = DecoderProgram(
            kernels, self._decoder, max_num_tokens=max_num_tokens, max_num_samples=max_num_samples
        )
        self._group_names: list[str] = []
        self._all_rows = torch.arange(max_num_tokens)
        self._inputs: StepInputs | None = None
        self._wanted = Wanted.GREEDY
        self._greedy: torch.Tensor | None = None
        self._logits: torch.Tensor | None = None

    def bind(self, config: KVCacheConfig) -> None:
        self._inputs = None
        caches = {}
        for layer in self._model.attention_layers():
            if layer.kv_cache is None:
                raise RuntimeError(f"layer {layer.layer_name!r} has no KV cache: call bind_kv_caches first")
            caches[layer.layer_name] = layer.kv_cache
        self._group_names = [f"group {index}" for index in range(len(config.groups))]
        self._program.bind(
            caches,
            {
                layer: name
                for name, group in zip(self._group_names, config.groups, strict=True)
                for layer in group.layer_names
            },
        )

    def unbind(self) -> None:
        self._inputs = None
        self._program.unbind()

    def forward(self, inputs: StepInputs, wanted: Wanted) -> None:
        rows = inputs.sample_indices
        if wanted is Wanted.ANY_ROW:
            rows = self._all_rows[: len(inputs.input_ids)]
        if inputs is self._inputs and wanted is self._wanted:
            # The same tensors moved on in place (`executors.steady_decode`): results are where they were, too.
            self._program.run_again()
            return
        self._inputs, self._wanted = None, wanted
        self._greedy, self._logits = self._program.run(
            inputs.input_ids,
            inputs.positions,
            dict(zip(self._group_names, inputs.metadata, strict=True)),
            rows,
            want_greedy=wanted is Wanted.GREEDY,
            want_logits=wanted is Wanted.LOGITS,
        )
        self._inputs = inputs

    def greedy_tokens(self) -> torch.Tensor:
        if self._greedy is None or self._wanted is not Wanted.GREEDY:
            raise RuntimeError(f"the last step was asked for {self._wanted.value}")
        return self._greedy

    def sampled_logits(self) -> torch.Tensor:
        if self._wanted is Wanted.ANY_ROW and self._inputs is not None:
            return self.logits_of(self._inputs.sample_indices)
        if self._logits is None:
            raise RuntimeError(f"the last step was asked for {self._wanted.value}")
        return self._logits

    def logits_of(self, token_rows: torch.Tensor) -> torch.Tensor:
        if self._wanted is not Wanted.ANY_ROW or self._inputs is None:
            raise RuntimeError(f"the last step was asked for {self._wanted.value}")
        decoder = self._decoder
        hidden_states = self._program.hidden_states(len(self._inputs.input_ids))[token_rows]
        return ops.logits(hidden_states, decoder.head, scale=decoder.logits_scale, soft_cap=decoder.logits_soft_cap)
