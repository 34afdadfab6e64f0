"""One rank's step: SchedulerOutput → tensors → forward pass → logits → tokens. Owns the persistent batch.

Called by `executors.worker` only. Stages of a pipeline run the same code: the first embeds tokens, the others receive
hidden states, the last samples. All TP ranks of the last stage draw every token, each for its own persistent batch; the
draw is a pure function of gathered logits, so they agree without telling each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from executors.attention.base import AttentionMetadata
from executors.input_batch import InputBatch, InvalidStepError, StepInputs, StepRows
from executors.logits_processors import LogitsProcessor, apply_grammar_bitmask
from executors.logprobs import NOT_ASKED, compute_logprobs, spread
from executors.parallel_state import ParallelState
from executors.sampler import sample
from kv.spec import KVCacheConfig
from scheduler.config import SchedulerConfig
from scheduler.logprobs import PromptLogprobs
from scheduler.output import ModelRunnerOutput, SchedulerOutput

if TYPE_CHECKING:
    from executors.models.base import CausalLM


PROMPT_LOGITS_ROWS = 64
"""Prompt positions whose logits are there at once."""


@dataclass(slots=True)
class _PendingSampling:
    """A step whose logits wait for the draw, or for the grammar bitmask before it."""

    step: int
    rows: StepRows
    logits: torch.Tensor | None
    prompt_logprobs: list[PromptLogprobs]


class ModelRunner:
    """Runs steps in order. Use: construct, `set_kv_cache_config` (the model's caches bound), `execute` per step."""

    def __init__(
        self,
        model: CausalLM,
        parallel: ParallelState,
        scheduler_config: SchedulerConfig,
        *,
        hidden_size: int,
        dtype: torch.dtype,
        device: torch.device,
        logits_processors: Sequence[type[LogitsProcessor]] = (),
    ) -> None:
        self._model = model
        self._parallel = parallel
        self._config = scheduler_config
        self._hidden_size = hidden_size
        self._dtype = dtype
        self._device = device
        self._logits_processors = logits_processors
        self._batch: InputBatch | None = None
        self._group_of_layer: list[tuple[str, int]] = []
        self._pending: _PendingSampling | None = None

    def set_kv_cache_config(self, config: KVCacheConfig) -> None:
        """Start with an empty persistent batch over these KV groups."""
        self._batch = InputBatch(
            self._config.max_num_seqs,
            self._config.max_model_len,
            [group.spec.block_size for group in config.groups],
            self._device,
            self._logits_processors,
        )
        self._group_of_layer = [(name, i) for i, group in enumerate(config.groups) for name in group.layer_names]
        self._pending = None

    @torch.inference_mode()
    def execute(self, output: SchedulerOutput) -> ModelRunnerOutput | None:
        """Run one step.

        Returns:
            The sampled tokens; None on stages that do not sample, and where the step has structured output (the
            tokens then come from `sample`).

        Raises:
            InvalidStepError: The step does not continue what this worker knows.
        """
        batch = self._require_batch()
        if self._pending is not None:
            raise InvalidStepError(f"step {output.step} came while step {self._pending.step} waits for its bitmask")
        rows = batch.apply(output, append_known_tokens=not self._parallel.is_last_stage)
        inputs = batch.prepare(rows)
        hidden_states = self._forward(inputs)
        batch.advance(rows)
        if not self._parallel.is_last_stage:
            return None
        prompt_logprobs = self._prompt_logprobs(rows, hidden_states)
        logits = None
        if len(inputs.sample_indices):
            logits = self._model.compute_logits(hidden_states[inputs.sample_indices])
        self._pending = _PendingSampling(output.step, rows, logits, prompt_logprobs)
        return None if output.has_structured_output else self._sample(None)

    @torch.inference_mode()
    def sample(self, grammar_bitmask: bytes | None) -> ModelRunnerOutput | None:
        """The second half of a step with structured output. None on stages that do not sample.

        Args:
            grammar_bitmask: As for `logits_processors.apply_grammar_bitmask`, one row for each row that samples.
        """
        if not self._parallel.is_last_stage:
            return None
        return self._sample(grammar_bitmask)

    def _sample(self, grammar_bitmask: bytes | None) -> ModelRunnerOutput:
        pending, self._pending = self._pending, None
        if pending is None:
            raise InvalidStepError("sample_tokens was called, but no step waits for it")
        if pending.logits is None:
            return ModelRunnerOutput(pending.step, prompt_logprobs=pending.prompt_logprobs)
        batch, logits = self._require_batch(), pending.logits
        rows = pending.rows.rows[pending.rows.samples]
        positions = batch.num_tokens[rows]
        asked, raw_logits = self._logits_for_logprobs(rows, logits, grammar_bitmask is not None)
        logits = batch.logits.apply(logits, rows)
        if grammar_bitmask is not None:
            apply_grammar_bitmask(logits, grammar_bitmask)
        tokens = sample(logits, batch.sampling.columns(rows, positions, self._device))
        token_ids = tokens.cpu().numpy().astype("<i4")
        batch.append_tokens(rows, token_ids)
        logprobs = None
        if raw_logits is not None:
            asked_tokens = tokens if asked.all() else tokens[torch.from_numpy(asked).to(self._device)]
            logprobs = spread(
                compute_logprobs(raw_logits, asked_tokens, batch.logprobs.num_logprobs[rows[asked]]), asked
            )
        return ModelRunnerOutput(pending.step, token_ids.tobytes(), logprobs, pending.prompt_logprobs)

    def _logits_for_logprobs(
        self, rows: np.ndarray, logits: torch.Tensor, will_be_masked: bool
    ) -> tuple[np.ndarray, torch.Tensor | None]:
        """Which rows want log-probabilities (bool), and their logits as the model gave them; None if no row does."""
        batch = self._require_batch()
        asked = batch.logprobs.num_logprobs[rows] != NOT_ASKED
        if self._parallel.tp_rank != 0 or not asked.any():
            return asked, None
        if not asked.all():
            return asked, logits[torch.from_numpy(asked).to(self._device)]
        will_change = will_be_masked or batch.logits.is_used(rows)
        return asked, logits.clone() if will_change else logits

    def _prompt_logprobs(self, step: StepRows, hidden_states: torch.Tensor) -> list[PromptLogprobs]:
        """Those of prompt tokens that this step's positions predict. All TP ranks must call it: logits are gathered.

        Args:
            hidden_states: [num_tokens, hidden_size] of the last stage.
        """
        batch = self._require_batch()
        wanted = batch.logprobs.num_prompt_logprobs[step.rows]
        if (wanted == NOT_ASKED).all():
            return []
        pieces: list[PromptLogprobs] = []
        begins = np.cumsum(step.num_scheduled) - step.num_scheduled
        for index in (wanted != NOT_ASKED).nonzero()[0].tolist():
            row, first, begin = int(step.rows[index]), int(step.num_computed[index]), int(begins[index])
            # The last prompt token predicts the first output.
            count = min(int(step.num_scheduled[index]), int(batch.num_prompt_tokens[row]) - 1 - first)
            for offset in range(0, count, PROMPT_LOGITS_ROWS):
                size = min(PROMPT_LOGITS_ROWS, count - offset)
                logits = self._model.compute_logits(hidden_states[begin + offset : begin + offset + size])
                if self._parallel.tp_rank == 0:
                    start = first + offset + 1
                    token_ids = torch.from_numpy(batch.token_ids[row, start : start + size].astype(np.int64))
                    tokens = compute_logprobs(logits, token_ids.to(self._device), np.full(size, wanted[index]))
                    pieces.append(PromptLogprobs(row, start, tokens))
        return pieces

    def _forward(self, inputs: StepInputs) -> torch.Tensor:
        """Hidden states [num_tokens, hidden_size] of this stage; sent on unless it is the last."""
        received = None
        if not self._parallel.is_first_stage:
            shape = (len(inputs.input_ids), self._hidden_size)
            received = self._parallel.recv_hidden_states(shape, self._dtype, self._device)
        metadata = {name: inputs.metadata[group] for name, group in self._group_of_layer}
        hidden_states = self._model.forward(inputs.input_ids, inputs.positions, metadata, received)
        if not self._parallel.is_last_stage:
            self._parallel.send_hidden_states(hidden_states)
        return hidden_states

    @torch.inference_mode()
    def dummy_run(self, num_tokens: int, num_reqs: int) -> None:
        """A forward pass and a draw with the memory and time of a real one. All ranks must run it alike.

        Every token is written to the null block and every block read is the null block, so any caches will do.

        Args:
            num_tokens: At least num_reqs.
        """
        batch = self._require_batch()
        counts = np.full(num_reqs, num_tokens // num_reqs, dtype=np.int32)
        counts[: num_tokens % num_reqs] += 1
        query_start_loc = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
        positions = np.arange(num_tokens) - np.repeat(query_start_loc[:-1], counts)
        device = self._device
        lens = torch.from_numpy(counts).to(device)
        metadata = [
            AttentionMetadata(
                num_reqs=num_reqs,
                num_tokens=num_tokens,
                max_query_len=int(counts.max()),
                max_seq_len=int(counts.max()),
                query_start_loc=torch.from_numpy(query_start_loc).to(device),
                seq_lens=lens,
                block_table=torch.zeros(
                    num_reqs, -(-int(counts.max()) // table.block_size), dtype=torch.int32, device=device
                ),
                slot_mapping=torch.from_numpy(positions % table.block_size).to(device),
                block_size=table.block_size,
                prompt_lens=lens,
            )
            for table in batch.block_tables
        ]
        inputs = StepInputs(
            input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
            positions=torch.from_numpy(positions).to(device),
            metadata=metadata,
            sample_indices=torch.from_numpy(query_start_loc[1:].astype(np.int64) - 1).to(device),
        )
        hidden_states = self._forward(inputs)
        if self._parallel.is_last_stage:
            sample(self._model.compute_logits(hidden_states[inputs.sample_indices]), None)

    def _require_batch(self) -> InputBatch:
        if self._batch is None:
            raise RuntimeError("the model runner has no KV cache yet: call initialize_from_config first")
        return self._batch
