"""Texts and token ids of a request → checked prompts for the engine. Called by completions.py and chat.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from engine_actors.serve.errors import BadRequest, bad_value
from engine_actors.serve.protocol import GenerationRequest
from engine_actors.serve.tokenization import Tokenization, check_token_ids

MAX_CACHE_SALT_CHARS = 128
CUT_MARGIN_TOKENS = 256
_SALT_FORBIDDEN = frozenset("@/\\\0")


@dataclass(slots=True)
class Prompt:
    """One prompt of a request.

    Attributes:
        text: None until needed, when the client sent token ids.
        cache_salt: Separates prefix-cache entries of tenants.
    """

    token_ids: list[int]
    text: str | None = None
    cache_salt: str | None = None

    def engine_input(self) -> dict[str, Any]:
        """What `AsyncLLM.generate` takes."""
        prompt: dict[str, Any] = {"prompt_token_ids": self.token_ids}
        if self.cache_salt is not None:
            prompt["cache_salt"] = self.cache_salt
        return prompt


@dataclass(frozen=True)
class PromptLimits:
    """What a model allows.

    Attributes:
        max_model_len: Prompt and output, tokens.
        vocab_size: Ids of prompts are below it.
        max_prompts: Prompts of one request.
    """

    max_model_len: int
    vocab_size: int
    max_prompts: int = 1


def split_prompt_field(prompt: Any, max_prompts: int) -> list[str | list[int]]:
    """The `prompt` field's four forms as one list of texts or token-id lists.

    Raises:
        BadRequest: It is missing or empty, mixes kinds, or holds more than `max_prompts`.
    """
    if prompt is None or prompt == "":
        raise BadRequest("prompt must be a non-empty string, or a list of strings or token ids; it is missing or empty",
                         "prompt")  # fmt: skip
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise BadRequest("prompt must not be an empty list", "prompt")
    kinds = {type(part) for part in prompt}
    if kinds == {int}:
        return [prompt]
    if len(kinds) > 1:
        raise BadRequest("prompt must hold only strings, only token ids, or only lists of token ids; it mixes them",
                         "prompt")  # fmt: skip
    if len(prompt) > max_prompts:
        raise BadRequest(f"prompt must hold at most {max_prompts} prompts, got {len(prompt)}", "prompt")
    for index, part in enumerate(prompt):
        if not part:
            raise BadRequest(f"prompt[{index}] must not be empty", "prompt")
        if isinstance(part, list) and not all(type(token) is int for token in part):
            raise BadRequest(f"prompt[{index}] must be a list of token ids, got {type(part[0]).__name__} in it",
                             "prompt")  # fmt: skip
    return list(prompt)


async def to_prompt(
    given: str | list[int],
    request: GenerationRequest,
    tokenization: Tokenization,
    limits: PromptLimits,
    *,
    add_special_tokens: bool,
    param: str,
    has_output: bool = True,
) -> Prompt:
    """Tokenise, truncate as asked, and check one prompt.

    Args:
        given: Text, or token ids.
        add_special_tokens: For texts, unless the request says otherwise.
        param: The field it came from.
        has_output: At least one token is to be generated, and needs room.

    Raises:
        BadRequest: It is empty, too long, or has ids outside the vocabulary.
    """
    truncate_to = _truncation_limit(request, limits)
    if isinstance(given, str):
        if truncate_to is None:
            _refuse_hopeless_text(given, tokenization, limits)
        else:
            given = _shortened(given, truncate_to, _side(request, tokenization), tokenization)
        add_special = add_special_tokens if request.add_special_tokens is None else request.add_special_tokens
        token_ids = await tokenization.encode(given, add_special)
        text: str | None = given
    else:
        check_token_ids(given, limits.vocab_size, param)
        token_ids, text = given, None
    if truncate_to is not None and len(token_ids) > truncate_to:
        is_left = _side(request, tokenization) == "left"
        token_ids = token_ids[len(token_ids) - truncate_to :] if is_left else token_ids[:truncate_to]
        text = None
    if not token_ids:
        raise BadRequest(f"{param} must hold at least one token; it is empty after tokenisation", param)
    _check_length(len(token_ids), limits, has_output)
    return Prompt(token_ids, text, check_cache_salt(request.cache_salt))


def check_cache_salt(salt: str | None) -> str | None:
    """The request's cache salt, if it is a usable one."""
    if salt is None:
        return None
    if not salt or len(salt) > MAX_CACHE_SALT_CHARS or _SALT_FORBIDDEN & set(salt):
        raise bad_value("cache_salt", salt, f"1 to {MAX_CACHE_SALT_CHARS} characters other than @ / \\ and NUL")
    return salt


def _truncation_limit(request: GenerationRequest, limits: PromptLimits) -> int | None:
    side = request.truncation_side
    if side is not None and side not in ("left", "right"):
        raise bad_value("truncation_side", side, '"left" or "right"')
    wanted = request.truncate_prompt_tokens
    if wanted is None:
        return None
    if wanted == -1:
        return limits.max_model_len - 1
    if wanted < 1 or wanted > limits.max_model_len:
        raise bad_value("truncate_prompt_tokens", wanted,
                        f"-1 (the model's limit) or 1 to {limits.max_model_len}")  # fmt: skip
    return wanted


def _side(request: GenerationRequest, tokenization: Tokenization) -> str:
    """Where truncation cuts."""
    return request.truncation_side or str(getattr(tokenization.tokenizer, "truncation_side", "right"))


def _shortened(text: str, truncate_to: int, side: str, tokenization: Tokenization) -> str:
    """The part of a very long text that the kept tokens are in.

    Twice as long as it need be even if each token were the vocabulary's longest, because tokens next to the cut change.
    """
    num_chars = (2 * truncate_to + CUT_MARGIN_TOKENS) * tokenization.max_token_chars
    if len(text) <= num_chars:
        return text
    return text[-num_chars:] if side == "left" else text[:num_chars]


def _refuse_hopeless_text(text: str, tokenization: Tokenization, limits: PromptLimits) -> None:
    """A text that cannot fit even if each token were the vocabulary's longest need not be tokenised to be refused."""
    at_least = len(text) // tokenization.max_token_chars
    if at_least > limits.max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt has "
            f"{len(text)} characters, which are at least {at_least} tokens. Please reduce the length of the prompt.",
            "input_text",
        )


def _check_length(num_tokens: int, limits: PromptLimits, has_output: bool) -> None:
    if num_tokens > limits.max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains "
            f"{num_tokens} input tokens. Please reduce the length of the prompt.",
            "input_tokens",
        )
    if has_output and num_tokens == limits.max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {limits.max_model_len} tokens. However, your prompt contains "
            f"{num_tokens} input tokens, which plus the number of requested output tokens (at least 1) is longer than "
            "that. Please reduce the length of the prompt.",
            "input_tokens",
        )
