"""Prompts and parameters → EngineCoreRequests: the front end's first half. What is wrong with a request is found here.

Owned by `LLMEngine` and `AsyncLLM`. Reads the tokenizer and the model's config files, never the weights.
"""

from __future__ import annotations

import copy
import itertools
import logging
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine_actors.chat_rendering import render_chat
from engine_actors.config import EngineConfig
from engine_actors.errors import InvalidRequestError
from engine_actors.output_processor import ParentRequest
from engine_actors.param_checks import ParamsChecker
from executors.model_config import ResolvedModelConfig, read_json, resolve_model_config
from scheduler.output import pack_int32
from scheduler.request import EngineCoreRequest
from scheduler.sampling_params import SamplingParams
from scheduler.values import is_text, shown

logger = logging.getLogger(__name__)

PromptType = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, {"prompt": text} or {"prompt_token_ids": ids}; both dictionaries may add "cache_salt"."""
PROMPT_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
MAX_CACHE_SALT_LENGTH = 128
_MASK64 = (1 << 64) - 1


@dataclass(slots=True)
class ProcessedRequest:
    """A request ready to send.

    Attributes:
        parent: For the output processor.
        children: n requests for the engine; their `client_index` is the client's to set.
    """

    parent: ParentRequest
    children: list[EngineCoreRequest]


@dataclass(slots=True)
class _Prompt:
    text: str | None
    token_ids: list[int] | None
    cache_salt: str | None = None


class InputProcessor:
    """Checks and tokenises requests of one front end.

    Args:
        max_model_len: As settled at the engine's start-up.
        client_index: Tells this front end's unseeded requests from another's.
    """

    def __init__(self, config: EngineConfig, tokenizer: Any | None, max_model_len: int, client_index: int = 0) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._max_token_chars: int | None = None
        resolved = resolve_model_config(config.model_config)
        self.vocab_size = resolved.vocab_size
        generation = _generation_config(resolved) if config.generation_config == "auto" else {}
        self.eos_token_ids = _eos_token_ids(resolved, generation, tokenizer)
        self._checker = ParamsChecker(self.vocab_size, tokenizer, self.eos_token_ids, config.max_logprobs)
        self._defaults = _default_params(generation)
        self._seed = _mix(config.model_config.seed & _MASK64, client_index)
        self._serials = itertools.count(1)
        self._suffix = f"-{client_index}." if client_index else "-"

    def default_sampling_params(self) -> SamplingParams:
        """What a request without parameters gets: the model's own defaults over `SamplingParams`'."""
        return self._defaults.clone()

    def process(
        self,
        request_id: str,
        prompt: PromptType,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        add_special_tokens: bool = True,
    ) -> ProcessedRequest:
        """One request, or `InvalidRequestError` naming the field, the value and what is allowed."""
        return self.process_batch([request_id], [prompt], [params], [priority], add_special_tokens=add_special_tokens)[
            0
        ]

    def process_batch(
        self,
        request_ids: Sequence[str],
        prompts: Sequence[PromptType],
        params: Sequence[SamplingParams | None],
        priorities: Sequence[int],
        *,
        add_special_tokens: bool = True,
        limit_logprobs: bool = True,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ProcessedRequest]:
        """Several requests; raises for the first wrong one and then none is made. Texts are tokenised together.

        Args:
            limit_logprobs: EngineConfig.max_logprobs holds for them.
            tokenization_kwargs: More arguments for the tokenizer's call.
        """
        arrival_s = time.time()
        for request_id in request_ids:
            if not is_text(request_id) or not request_id:
                raise InvalidRequestError(
                    f"request_id must be a non-empty string, got {shown(request_id)}", "request_id"
                )
        parsed = [self._parse_prompt(prompt) for prompt in prompts]
        checked = [self._check_params(p, limit_logprobs) for p in params]
        self._tokenize([p for p in parsed if p.token_ids is None], add_special_tokens, tokenization_kwargs or {})
        rows = zip(request_ids, parsed, checked, priorities, strict=True)
        return [self._make(request_id, p, sp, priority, arrival_s) for request_id, p, sp, priority in rows]

    def is_quick(self, params: Sequence[SamplingParams | None]) -> bool:
        """Whether checking these parameters takes no time worth a thread. The same form is quick the second time."""
        return all(not isinstance(each, SamplingParams) or self._checker.is_quick(each) for each in params)

    def render_chat(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> str:
        """A conversation as prompt text; see `chat_rendering.render_chat`."""
        return render_chat(self.tokenizer, messages, **options)

    # Prompts

    def _parse_prompt(self, prompt: PromptType) -> _Prompt:
        if isinstance(prompt, str):
            return _Prompt(_checked_text(prompt), None)
        if isinstance(prompt, Mapping):
            return self._parse_mapping(prompt)
        if (isinstance(prompt, Sequence) and not isinstance(prompt, bytes)) or hasattr(prompt, "tolist"):
            return _Prompt(None, _check_id_types(prompt))
        raise InvalidRequestError(
            f"prompt must be a string, a list of token ids or a dictionary, got {type(prompt).__name__}", "prompt"
        )

    def _parse_mapping(self, prompt: Mapping[str, Any]) -> _Prompt:
        unknown = [key for key in prompt if key not in PROMPT_KEYS]
        if unknown:
            raise InvalidRequestError(
                f"unknown prompt key {unknown[0]!r}; allowed are {', '.join(PROMPT_KEYS)}", "prompt"
            )
        text, ids, salt = (prompt.get(key) for key in PROMPT_KEYS)
        if text is None and ids is None:
            raise InvalidRequestError('a prompt dictionary needs "prompt" or "prompt_token_ids"', "prompt")
        if text is not None and not isinstance(text, str):
            raise InvalidRequestError(f"prompt must be a string, got {type(text).__name__}", "prompt")
        if text is not None:
            _checked_text(text)
        if salt is not None and not (is_text(salt) and 0 < len(salt) <= MAX_CACHE_SALT_LENGTH):
            raise InvalidRequestError(
                f"cache_salt must be a string of 1 to {MAX_CACHE_SALT_LENGTH} characters, got {shown(salt)}",
                "cache_salt",
            )
        return _Prompt(text, None if ids is None else _check_id_types(ids), salt)

    def _tokenize(self, prompts: list[_Prompt], add_special_tokens: bool, options: Mapping[str, Any]) -> None:
        if not prompts:
            return
        if self.tokenizer is None:
            raise InvalidRequestError("a text prompt needs a tokenizer, but skip_tokenizer_init is set", "prompt")
        for prompt in prompts:
            if not prompt.text:
                raise InvalidRequestError("prompt is empty; at least one token is needed", "prompt")
            if not options.get("truncation"):
                self._check_length(prompt.text)
        texts = [prompt.text for prompt in prompts]
        call: dict[str, Any] = {
            "add_special_tokens": add_special_tokens, "return_attention_mask": False, "verbose": False, **options
        }  # fmt: skip
        if not options:
            rows = self.tokenizer(texts, **call)["input_ids"]
        else:
            try:
                rows = [_check_id_types(ids) for ids in self.tokenizer(texts, **call)["input_ids"]]
                if len(rows) != len(texts):
                    raise ValueError(f"{len(rows)} lists of tokens for {len(texts)} texts")
            except Exception as error:  # transformers raises many types
                raise InvalidRequestError(
                    f"tokenization_kwargs must be arguments that the tokenizer takes, got {shown(dict(options))}: "
                    f"{error}",
                    "tokenization_kwargs",
                ) from error
        for prompt, ids in zip(prompts, rows, strict=True):
            prompt.token_ids = ids

    def _check_length(self, text: str) -> None:
        """Refuse a text too long even if each of its tokens were the vocabulary's longest. Megabytes take seconds to
        tokenise."""
        if self.tokenizer is None or len(text) < self.max_model_len:
            return
        if self._max_token_chars is None:
            self._max_token_chars = max(map(len, self.tokenizer.get_vocab()), default=1)
        at_least = len(text) // self._max_token_chars
        if at_least >= self.max_model_len:
            raise InvalidRequestError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, the prompt has at least "
                f"{at_least} tokens in {len(text)} characters, and at least one must be left to generate",
                "prompt",
            )

    def _check_ids(self, ids: list[int]) -> bytes:
        if not ids:
            raise InvalidRequestError("prompt is empty; at least one token is needed", "prompt")
        if len(ids) >= self.max_model_len:
            raise InvalidRequestError(
                f"This model's maximum context length is {self.max_model_len} tokens. However, the prompt has "
                f"{len(ids)} tokens, and at least one must be left to generate",
                "prompt",
            )
        for wrong in (min(ids), max(ids)):
            if not 0 <= wrong < self.vocab_size:
                raise InvalidRequestError(
                    f"prompt has token id {wrong}; the model's vocabulary is 0 to {self.vocab_size - 1}", "prompt"
                )
        return pack_int32(ids)

    # Parameters

    def _check_params(self, params: SamplingParams | None, limit_logprobs: bool = True) -> SamplingParams:
        if params is None:
            return self._defaults
        if not isinstance(params, SamplingParams):
            raise InvalidRequestError(
                f"sampling_params must be SamplingParams or None, got {type(params).__name__}", "sampling_params"
            )
        try:
            # A copy: the caller may change the original, and what was changed after construction is checked here.
            params = params.clone()
        except (ValueError, TypeError) as error:
            field = re.match(r"\w*", str(error))
            raise InvalidRequestError(str(error), field[0] if field is not None else None) from error
        self._checker.check(params, limit_logprobs=limit_logprobs)
        return params

    def _make(
        self, request_id: str, prompt: _Prompt, params: SamplingParams, priority: int, arrival_s: float
    ) -> ProcessedRequest:
        if not isinstance(priority, int) or isinstance(priority, bool) or not -(2**63) <= priority < 2**63:
            raise InvalidRequestError(f"priority must be a 64-bit integer, got {shown(priority)}", "priority")
        ids = prompt.token_ids or []
        packed = self._check_ids(ids)
        parent = ParentRequest(request_id, prompt.text, ids, params)
        number = next(self._serials)
        room = self.max_model_len - len(ids)
        max_tokens = room if params.max_tokens is None else min(params.max_tokens, room)
        seed = params.seed if params.seed is not None else _as_seed(_mix(self._seed, number))
        serial = f"{request_id}{self._suffix}{number:x}"
        first = params.for_engine()
        first.n = 1
        first.seed = seed
        first.max_tokens = max_tokens
        first.min_tokens = min(params.min_tokens, max_tokens)
        children = [
            EngineCoreRequest(
                serial if params.n == 1 else f"{serial}.{index}",
                packed,
                first if index == 0 else _of_further_completion(first, index),
                self.eos_token_ids,
                arrival_s,
                priority=priority,
                cache_salt=prompt.cache_salt,
            )
            for index in range(params.n)
        ]
        return ProcessedRequest(parent, children)


def load_tokenizer(config: EngineConfig) -> Any | None:
    """The model's transformers tokenizer; None with skip_tokenizer_init.

    Raises:
        ValueError: It cannot be loaded.
    """
    if config.skip_tokenizer_init:
        return None
    from transformers import AutoTokenizer

    from executors.model_config import find_model_dir

    model = config.model_config
    name = model.tokenizer or str(find_model_dir(model.model, model.revision))
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=model.trust_remote_code)
    except Exception as error:  # transformers raises many types
        raise ValueError(
            f"the tokenizer of {name!r} cannot be loaded: {error}; pass tokenizer=..., or skip_tokenizer_init=True "
            f"to work on token ids alone"
        ) from error


def _of_further_completion(first: SamplingParams, index: int) -> SamplingParams:
    """Parameters of completion `index` > 0, by those of completion 0."""
    params = copy.copy(first)
    params.prompt_logprobs = None  # The completions share one prompt.
    params.seed = _as_seed(_mix((first.seed or 0) & _MASK64, index))
    return params


def _checked_text(text: str) -> str:
    if not is_text(text):
        raise InvalidRequestError("prompt holds half of a surrogate pair, which is no text", "prompt")
    return text


def _check_id_types(ids: Any) -> list[int]:
    """Token ids as a list of Python ints."""
    values = ids.tolist() if hasattr(ids, "tolist") else list(ids)
    if not isinstance(values, list):
        values = [values]
    for kind in set(map(type, values)):
        if kind is bool or not hasattr(kind, "__index__"):
            raise InvalidRequestError(f"a prompt's token ids must be integers, got {kind.__name__}", "prompt")
    return [value.__index__() for value in values]


def _generation_config(resolved: ResolvedModelConfig) -> dict[str, Any]:
    path = resolved.model_dir / "generation_config.json"
    return read_json(path) if path.is_file() else {}


def _eos_token_ids(resolved: ResolvedModelConfig, generation: dict[str, Any], tokenizer: Any | None) -> list[int]:
    """generation_config.json's if it names any, else config.json's; the tokenizer's in any case."""
    named = generation.get("eos_token_id")
    if named is None:
        named = getattr(resolved.hf_config, "eos_token_id", None)
    ids = list(named) if isinstance(named, list) else [] if named is None else [named]
    ids.append(getattr(tokenizer, "eos_token_id", None))
    return list(dict.fromkeys(i for i in ids if isinstance(i, int) and 0 <= i < resolved.vocab_size))


def _default_params(generation: dict[str, Any]) -> SamplingParams:
    names = {field.name for field in msgspec.structs.fields(SamplingParams)}
    values: dict[str, Any] = {}
    for theirs, ours in (
        ("temperature", "temperature"),
        ("top_k", "top_k"),
        ("top_p", "top_p"),
        ("min_p", "min_p"),
        ("repetition_penalty", "repetition_penalty"),
        ("max_new_tokens", "max_tokens"),
    ):
        value = generation.get(theirs)
        if value is None:
            continue
        if ours not in names:
            logger.warning("generation_config.json sets %s=%r, which is not supported and ignored", theirs, value)
            continue
        values[ours] = value
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise ValueError(
            f"generation_config.json holds unusable defaults: {error}; generation_config='vllm' ignores that file"
        ) from error


def _mix(a: int, b: int) -> int:
    """A well-scattered 64-bit function of two integers: splitmix64's finaliser (Steele, Lea, Flood 2014)."""
    x = (a + (b + 1) * 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _as_seed(value: int) -> int:
    """The value's lower 63 bits: never negative, since a seed of -1 means none."""
    return value & (2**63 - 1)
