"""An executor without a model, and model folders without weights, for fast tests of everything above the executor.

`FakeExecutor` obeys the contract of `executors.base.Executor`: it keeps the persistent batch, and its next token is a
hash of all tokens before it and, unless the request is greedy, of the seed. `expected_tokens` computes the same for
one request alone.
It runs in any process: `executor_class=FakeExecutor`, or `functools.partial(FakeExecutor, step_s=0.01)`.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import hashlib
import json
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from executors.base import Executor, ExecutorFailedError, FailureCallback, StepFuture
from executors.config import ModelConfig, ParallelConfig
from kv.config import CacheConfig
from kv.spec import FullAttentionSpec, KVCacheConfig, KVCacheSpec
from scheduler.config import SchedulerConfig
from scheduler.output import ModelRunnerOutput, NewRequestData, SchedulerOutput, pack_int32, unpack_int32
from scheduler.sampling_params import SamplingParams

VOCAB_SIZE = 512
EOS = 1
MAX_MODEL_LEN = 256


def next_token(token_ids: Sequence[int], seed: int, greedy: bool) -> int:
    """A token of the vocabulary, never EOS."""
    digest = hashlib.blake2b(pack_int32(token_ids) + (b"" if greedy else str(seed).encode()), digest_size=8).digest()
    return 2 + int.from_bytes(digest, "little") % (VOCAB_SIZE - 2)


def expected_tokens(prompt: Sequence[int], count: int, seed: int = 0, greedy: bool = True) -> list[int]:
    """What FakeExecutor generates for a prompt."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed, greedy))
    return tokens[len(prompt) :]


class FakeFuture(StepFuture[ModelRunnerOutput | None]):
    """A step of FakeExecutor on its way."""

    def __init__(self) -> None:
        self.future: concurrent.futures.Future[ModelRunnerOutput | None] = concurrent.futures.Future()
        self.future.set_running_or_notify_cancel()

    def result(self, timeout_s: float | None = None) -> ModelRunnerOutput | None:
        return self.future.result(timeout_s)

    def __await__(self) -> Generator[Any, None, ModelRunnerOutput | None]:
        return asyncio.wrap_future(self.future).__await__()

    def done(self) -> bool:
        return self.future.done()

    def add_done_callback(self, callback: Callable[[], Any]) -> None:
        self.future.add_done_callback(lambda _: callback())


class _Row:
    def __init__(self, data: NewRequestData) -> None:
        self.token_ids = list(unpack_int32(data.token_ids))
        self.prompt = set(self.token_ids[: data.num_prompt_tokens])
        self.num_computed = data.num_computed_tokens
        self.params: SamplingParams = data.sampling_params


class FakeExecutor(Executor):
    """See the module.

    Args:
        step_s: Time each step takes.
        hold_file: While this file exists, steps do not finish.
        fail_at_step: The step whose worker raises.
        exit_at_step: The step in which this process kills itself.
        startup_error: Raised by the constructor.
        fail_file: The worker raises in a step that finds this file, and removes it.
        fail_on, exit_on: A token of prompts; a step that computes a request with it raises, or kills this process.
        refuse_file: While this file exists, the constructor raises.
    """

    def __init__(
        self,
        model_config: ModelConfig,
        cache_config: CacheConfig,
        scheduler_config: SchedulerConfig,
        parallel_config: ParallelConfig,
        *,
        step_s: float = 0.0,
        hold_file: str | None = None,
        fail_at_step: int | None = None,
        exit_at_step: int | None = None,
        startup_error: Exception | None = None,
        fail_file: str | None = None,
        fail_on: int | None = None,
        exit_on: int | None = None,
        refuse_file: str | None = None,
    ) -> None:
        if startup_error is not None:
            raise startup_error
        if refuse_file is not None and os.path.exists(refuse_file):
            raise ExecutorFailedError("there is no room")
        self.fail_file, self.fail_on, self.exit_on = fail_file, fail_on, exit_on
        self.block_size = cache_config.block_size
        self.async_scheduling = bool(scheduler_config.async_scheduling)
        self.step_s, self.hold_file = step_s, hold_file
        self.fail_at_step, self.exit_at_step = fail_at_step, exit_at_step
        self.rows: dict[int, _Row] = {}
        self.is_shut_down = False
        self.asleep = 0
        self.num_steps = 0
        self._encoder = msgspec.msgpack.Encoder()
        self._failure: ExecutorFailedError | None = None
        self._callbacks: list[FailureCallback] = []
        self._pending: list[FakeFuture] = []
        self._lock = threading.Lock()
        self._work: queue.SimpleQueue[tuple[FakeFuture, bytes] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def get_kv_cache_specs(self) -> list[dict[str, KVCacheSpec]]:
        return [{"layer": FullAttentionSpec(self.block_size, 1, 4, 4)}]

    def determine_available_memory(self) -> list[int]:
        return [1 << 20]

    def initialize_from_config(self, configs: Sequence[KVCacheConfig]) -> None:
        assert len(configs) == 1

    def execute_model(self, scheduler_output: SchedulerOutput) -> StepFuture[ModelRunnerOutput | None]:
        step = FakeFuture()
        with self._lock:
            self._raise_if_failed()
            self._pending.append(step)
        self._work.put((step, self._encoder.encode(scheduler_output)))
        return step

    def sample_tokens(self, grammar_bitmask: bytes | None) -> StepFuture[ModelRunnerOutput]:
        raise NotImplementedError("the fake executor has no grammar")

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout_s: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        self._raise_if_failed()
        function = getattr(self, method) if isinstance(method, str) else lambda *a, **k: method(self, *a, **k)
        return [function(*args, **(kwargs or {}))]

    def register_failure_callback(self, callback: FailureCallback) -> None:
        self._callbacks.append(callback)

    def set_step_timeout(self, step_timeout_s: float) -> None:
        self.step_timeout_s = step_timeout_s

    def check_health(self) -> None:
        self._raise_if_failed()

    def shutdown(self) -> None:
        self.is_shut_down = True
        self._work.put(None)

    @property
    def max_concurrent_batches(self) -> int:
        return 2 if self.async_scheduling else 1

    # Methods for collective_rpc

    def echo(self, value: Any) -> Any:
        return value

    def sleep(self, level: int) -> None:
        assert not self._pending, "steps are in flight"
        self.asleep = level

    def wake_up(self, tags: list[str]) -> None:
        self.asleep = 0

    def execute_dummy_batch(self) -> None:
        assert not self._pending, "steps are in flight"

    def fail_now(self, text: str) -> None:
        """As a worker that dies while idle."""
        self._fail(ExecutorFailedError(text))

    # The worker's thread

    def _serve(self) -> None:
        decoder = msgspec.msgpack.Decoder(SchedulerOutput)
        while (work := self._work.get()) is not None:
            step, payload = work
            scheduled = decoder.decode(payload)
            if scheduled.step == self.exit_at_step:
                os.kill(os.getpid(), signal.SIGKILL)
            if scheduled.step == self.fail_at_step:
                self._fail(ExecutorFailedError(f"worker rank 0 failed in step {scheduled.step}: boom"))
                return
            if self.fail_file is not None and os.path.exists(self.fail_file):
                os.unlink(self.fail_file)
                self._fail(ExecutorFailedError("worker rank 0 died: SIGKILL"))
                return
            output = self._run(scheduled)
            poison = {token for row in unpack_int32(scheduled.rows) for token in self.rows[row].prompt}
            if self.exit_on in poison:
                os.kill(os.getpid(), signal.SIGKILL)
            if self.fail_on in poison:
                self._fail(ExecutorFailedError("worker rank 0 died: segmentation fault"))
                return
            if self.step_s:
                time.sleep(self.step_s)
            while self.hold_file is not None and os.path.exists(self.hold_file) and not self.is_shut_down:
                time.sleep(0.001)
            self.num_steps += 1
            with self._lock:
                if step in self._pending:
                    self._pending.remove(step)
                    step.future.set_result(output)

    def _run(self, scheduled: SchedulerOutput) -> ModelRunnerOutput:
        for data in scheduled.new_requests:
            self.rows[data.row] = _Row(data)
        rows = unpack_int32(scheduled.rows)
        counts = unpack_int32(scheduled.num_scheduled_tokens) or [1] * len(rows)
        sampled = []
        for index, count in zip(rows, counts, strict=True):
            row = self.rows[index]
            row.num_computed += count
            if row.num_computed == len(row.token_ids):
                token = next_token(row.token_ids, row.params.seed or 0, row.params.is_greedy)
                row.token_ids.append(token)
                sampled.append(token)
        return ModelRunnerOutput(scheduled.step, pack_int32(sampled))

    def _raise_if_failed(self) -> None:
        if self._failure is not None:
            raise ExecutorFailedError(str(self._failure))

    def _fail(self, error: ExecutorFailedError) -> None:
        with self._lock:
            self._failure = error
            pending, self._pending = self._pending, []
        for step in pending:
            step.future.set_exception(error)
        for callback in self._callbacks:
            callback(error)


CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_MODEL_LEN,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 0,
    "eos_token_id": EOS,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
CORPUS = ["The quick brown fox jumps over the lazy dog.", "naïve café Übergrößen", "你好，世界", "🙂👨‍👩‍👧 emoji"]


def write_model_dir(
    folder: Path, *, generation_config: dict[str, Any] | None = None, chat_template: bool = True
) -> Path:
    """A model folder with config and tokenizer (byte-level, 512 tokens at most), but no weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    if generation_config is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
    byte_level_tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    if chat_template:
        settings["chat_template"] = CHAT_TEMPLATE
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def byte_level_tokenizer() -> Tokenizer:
    """All 256 bytes and some merges; ids 0 and 1 are <bos> and <eos>."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS * 20, trainer)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """SentencePiece's way: metaspace words, one token for each raw byte, the first space stripped."""
    words = ["▁", "▁The", "▁fox", "a", "b", "▁a", "é", "世", "🙂", "."]
    vocabulary = {token: i for i, token in enumerate(["<unk>", "<s>", "</s>"])}
    for token in [f"<0x{byte:02X}>" for byte in range(256)] + words:
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


class WrappedTokenizer:
    """As much of transformers' fast tokenizers as the detokenizer uses."""

    def __init__(self, backend: Tokenizer) -> None:
        self.backend_tokenizer = backend
