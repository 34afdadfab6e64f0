"""One rank's step: SchedulerOutput → tensors → forward pass → logits → tokens. Owns the persistent batch.

Called by `executors.worker` only. Stages of a pipeline run the same code: the first embeds tokens, the others receive
hidden states, the last samples. All TP ranks of the last stage draw every token, each for its own persistent batch; the
draw is a pure function of gathered logits, so they agree without telling each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import torch

from executors.attention.base import AttentionMetadata
from executors.bitmask import apply_bitmask
from executors.input_batch import InputBatch, InvalidStepError, StepInputs, StepRows, Wanted
from executors.logits_processors import LogitsProcessor
from executors.logprobs import NOT_ASKED, compute_logprobs, spread, with_asked_ids
from executors.parallel_state import ParallelState
from executors.sampler import sample
from executors.steady_decode import SteadyDecode
from executors.step_compute import StepCompute
from kv.spec import KVCacheConfig
from scheduler.config import SchedulerConfig
from scheduler.logprobs import PromptLogprobs
from scheduler.output import ModelRunnerOutput, RowFailure, SchedulerOutput, pack_int32
from scheduler.structured_output import GrammarBitmask

NOT_NUMBERS = "its logits are not numbers (NaN or infinite): weights or activations overflowed"

PROMPT_LOGITS_ROWS = 64
"""Prompt positions whose logits are there at once."""


@dataclass(slots=True)
class _PendingSampling:
    """A step whose logits wait for the draw, or for the grammar bitmask before it."""

    step: int
    rows: np.ndarray
    logits: torch.Tensor | None
    prompt_logprobs: list[PromptLogprobs]


class ModelRunner:
    """Runs steps in order. Use: construct, `set_kv_cache_config` (the model's caches bound), `execute` per step."""

    def __init__(
        self,
        compute: StepCompute,
        parallel: ParallelState,
        scheduler_config: SchedulerConfig,
        *,
        device: torch.device,
        logits_processors: Sequence[type[LogitsProcessor]] = (),
    ) -> None:
        self._optional_compute: StepCompute | None = compute
        self._parallel = parallel
        self._config = scheduler_config
        self._device = device
        self._logits_processors = logits_processors
        self._batch: InputBatch | None = None
        self._pending: _PendingSampling | None = None
        self._steady: SteadyDecode | None = None  # of the step under way; it may be carried on to the next one

    def set_kv_cache_config(self, config: KVCacheConfig) -> None:
        """Start with an empty persistent batch over these KV groups."""
        self._batch = InputBatch(
            self._config.max_num_seqs,
            self._config.max_model_len,
            [group.spec.block_size for group in config.groups],
            self._device,
            self._logits_processors,
            needs_prompt_lens=config.has_non_causal_layers,
        )
        self._compute.bind(config)
        self._pending = self._steady = None

    def replace_compute(self, compute: StepCompute | None) -> None:
        """Compute with this from now on. None: not at all, for the time without weights. The batch stays."""
        self._optional_compute = compute

    def unbind_caches(self) -> None:
        """The KV caches go; `rebind_caches` comes before the next step."""
        self._compute.unbind()

    def rebind_caches(self, config: KVCacheConfig) -> None:
        """New caches of the same shape are bound to the model. No running request may have KV in the old ones."""
        self._compute.bind(config)

    @property
    def _compute(self) -> StepCompute:
        if self._optional_compute is None:
            raise RuntimeError("the worker's weights were given back; wake_up must come first")
        return self._optional_compute

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
        if self._steady is not None and self._steady.continues(output):
            rows, inputs, wanted = self._steady.rows, self._steady.inputs, self._steady.wanted
        else:
            rows, inputs, wanted = self._begin(output)
        sampling_rows = rows.rows if self._steady is not None else rows.rows[rows.samples]
        self._compute.forward(inputs, wanted)
        if self._steady is None:
            batch.advance(rows)
        if not self._parallel.is_last_stage:
            return None
        if wanted is Wanted.GREEDY and len(sampling_rows):
            token_ids, failures = _without_overflow(self._compute.greedy_tokens().cpu().numpy(), {})
            return ModelRunnerOutput(output.step, self._append_tokens(sampling_rows, token_ids), failures=failures)
        prompt_logprobs = self._prompt_logprobs(rows) if wanted is Wanted.ANY_ROW else []
        logits = self._compute.sampled_logits() if len(sampling_rows) else None
        self._pending = _PendingSampling(output.step, sampling_rows, logits, prompt_logprobs)
        return None if output.has_structured_output else self._sample(None)

    def _begin(self, output: SchedulerOutput) -> tuple[StepRows, StepInputs, Wanted]:
        """What to compute in a step that does not carry the one before on."""
        batch = self._require_batch()
        rows = batch.apply(output, append_known_tokens=not self._parallel.is_last_stage)
        inputs = batch.prepare(rows)
        wanted = batch.wanted(rows)
        if wanted is Wanted.GREEDY and output.has_structured_output:
            wanted = Wanted.LOGITS
        self._steady = None
        if self._parallel.is_last_stage and SteadyDecode.can_carry_on(batch, output, rows):
            self._steady = SteadyDecode(batch, output, rows, inputs, wanted)
            rows, inputs = self._steady.rows, self._steady.inputs
        return rows, inputs, wanted

    @torch.inference_mode()
    def sample(self, grammar_bitmask: bytes | None) -> ModelRunnerOutput | None:
        """The second half of a step with structured output. None on stages that do not sample.

        Args:
            grammar_bitmask: msgpack GrammarBitmask; None constrains no row.

        Raises:
            InvalidStepError: No step waits for it, or it names a row that does not sample.
            ValueError: A mask does not fit the vocabulary.
        """
        if not self._parallel.is_last_stage:
            return None
        bitmask = None if grammar_bitmask is None else msgspec.msgpack.decode(grammar_bitmask, type=GrammarBitmask)
        return self._sample(bitmask)

    def _sample(self, bitmask: GrammarBitmask | None) -> ModelRunnerOutput:
        pending, self._pending = self._pending, None
        if pending is None:
            raise InvalidStepError("sample_tokens was called, but no step waits for it")
        if pending.logits is None:
            return ModelRunnerOutput(pending.step, prompt_logprobs=pending.prompt_logprobs)
        batch, logits = self._require_batch(), pending.logits
        rows = pending.rows
        positions = batch.num_tokens[rows]
        asked, raw_logits = self._logits_for_logprobs(rows, logits, bitmask is not None)
        is_masked = bitmask is not None or batch.logits.is_used(rows)
        logits = batch.logits.apply(logits, rows)
        if bitmask is not None:
            self._apply_bitmask(logits, rows, bitmask)
        tokens = sample(logits, batch.sampling.columns(rows, positions, self._device))
        ids, failures = _without_overflow(tokens.cpu().numpy(), batch.logits.take_failures())
        if failures:
            tokens = torch.from_numpy(ids).to(self._device)
        without_choice = _rows_without_choice(logits, tokens) if is_masked else b""
        token_ids = self._append_tokens(rows, ids)
        logprobs = None
        if raw_logits is not None:
            asked_tokens = tokens if asked.all() else tokens[torch.from_numpy(asked).to(self._device)]
            logprobs = compute_logprobs(raw_logits, asked_tokens, batch.logprobs.num_logprobs[rows[asked]])
            if batch.logprobs.asked_ids:
                asked_ids = batch.logprobs.asked_ids_of(rows[asked])
                logprobs = with_asked_ids(logprobs, raw_logits, asked_tokens, asked_ids) if asked_ids else logprobs
            logprobs = spread(logprobs, asked)
        return ModelRunnerOutput(pending.step, token_ids, logprobs, pending.prompt_logprobs, without_choice, failures)

    def _apply_bitmask(self, logits: torch.Tensor, rows: np.ndarray, bitmask: GrammarBitmask) -> None:
        index_of = {row: index for index, row in enumerate(rows.tolist())}
        named = np.frombuffer(bitmask.rows, dtype="<i4").tolist()
        try:
            indices = torch.tensor([index_of[row] for row in named], device=self._device)
        except KeyError as error:
            raise InvalidStepError(
                f"the grammar bitmask names row {error}, which does not sample in this step"
            ) from None
        words = np.frombuffer(bitmask.mask, dtype=np.int32)
        if len(words) % len(named):
            raise ValueError(f"a grammar bitmask of {len(words)} words does not fit {len(named)} rows")
        mask = torch.from_numpy(words.reshape(len(named), -1).copy())
        apply_bitmask(logits, mask.to(self._device), indices)

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

    def _prompt_logprobs(self, step: StepRows) -> list[PromptLogprobs]:
        """Those of prompt tokens that this step's positions predict. All TP ranks must call it: logits are gathered."""
        batch = self._require_batch()
        wanted = batch.logprobs.num_prompt_logprobs[step.rows]
        pieces: list[PromptLogprobs] = []
        begins = np.cumsum(step.num_scheduled) - step.num_scheduled
        for index in (wanted != NOT_ASKED).nonzero()[0].tolist():
            row, first, begin = int(step.rows[index]), int(step.num_computed[index]), int(begins[index])
            # The last prompt token predicts the first output.
            count = min(int(step.num_scheduled[index]), int(batch.num_prompt_tokens[row]) - 1 - first)
            for offset in range(0, count, PROMPT_LOGITS_ROWS):
                size = min(PROMPT_LOGITS_ROWS, count - offset)
                token_rows = torch.arange(begin + offset, begin + offset + size, device=self._device)
                logits = self._compute.logits_of(token_rows)
                if self._parallel.tp_rank == 0:
                    start = first + offset + 1
                    token_ids = torch.from_numpy(batch.token_ids[row, start : start + size].astype(np.int64))
                    tokens = compute_logprobs(logits, token_ids.to(self._device), np.full(size, wanted[index]))
                    pieces.append(PromptLogprobs(row, start, tokens))
        return pieces

    def _append_tokens(self, rows: np.ndarray, token_ids: np.ndarray) -> bytes:
        """What `rows` drew is known from now on; as a column of the output."""
        if self._steady is not None:
            self._steady.append(token_ids)
        else:
            self._require_batch().append_tokens(rows, token_ids)
        return token_ids.astype("<i4").tobytes()

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
        # Few requests may share a budget longer than any sequence, but there are no positions beyond max_model_len.
        positions = (np.arange(num_tokens) - np.repeat(query_start_loc[:-1], counts)) % self._config.max_model_len
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
        self._compute.forward(inputs, Wanted.LOGITS)
        if self._parallel.is_last_stage:
            sample(self._compute.sampled_logits(), None)

    def _require_batch(self) -> InputBatch:
        if self._batch is None:
            raise RuntimeError("the model runner has no KV cache yet: call initialize_from_config first")
        return self._batch


def _without_overflow(token_ids: np.ndarray, failures: dict[int, str]) -> tuple[np.ndarray, list[RowFailure]]:
    """Rows that got no token (-1) get token 0, so that steps in flight can go on with them, and a failure.

    Args:
        failures: Known already, by index; their tokens mean nothing.
    """
    if not failures and token_ids.min() >= 0:
        return token_ids, []
    for index in (token_ids < 0).nonzero()[0].tolist():
        failures.setdefault(index, NOT_NUMBERS)
    return token_ids.clip(min=0), [RowFailure(index, error) for index, error in sorted(failures.items())]


def _rows_without_choice(logits: torch.Tensor, tokens: torch.Tensor) -> bytes:
    """int32 column: the rows whose drawn token is masked, which happens only where all are."""
    drawn = logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    return pack_int32((drawn == float("-inf")).nonzero().squeeze(-1).tolist())
