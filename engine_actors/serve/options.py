"""Names of options: those of the HTTP server told from the engine's, unknown ones refused with what is close.

`engine_kwargs` of LLMConfig and the flags of `engine-actors serve` are one flat set of names, vLLM's where it has any.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from engine_actors.config import option_names
from engine_actors.serve.settings import ServerSettings

RENAMED = {
    "api_key": "api_keys",
    "enable_tokenizer_info_endpoint": "enable_tokenizer_info",
    "sse_keep_alive_interval": "sse_keep_alive_s",
}
"""vLLM's names of settings → ours."""
ENGINE_RENAMED = {"max_num_queued_reqs": "max_num_queued_requests", "shutdown_timeout": "shutdown_timeout_s"}
"""vLLM's names of engine options → ours, besides those `EngineConfig.from_kwargs` knows."""
OTHERS = ("chat_template", "enable_auto_tool_choice")
SET_ELSEWHERE = {
    "model": "model_loading_config.model_source",
    "served_model_name": "model_loading_config.model_id",
    "tokenizer": "model_loading_config.tokenizer_source",
    "engine_core": None,
    "executor_class": None,
}
"""Engine options that a served model does not take, and where they are set instead."""


@dataclass(frozen=True)
class ServeOptions:
    """Flat options, sorted out.

    Attributes:
        engine: For `AsyncLLM`, besides the model and the tokenizer.
        settings: Of the HTTP server.
        chat_template: Jinja text that replaces the model's own.
    """

    engine: dict[str, Any]
    settings: ServerSettings
    chat_template: str | None = None


def sort_options(options: Mapping[str, Any], where: str = "engine_kwargs") -> ServeOptions:
    """Split flat options by whom they are for.

    Raises:
        ValueError: An unknown name, or a wrong value of a server setting. Engine options are checked by EngineConfig.
    """
    hints = get_type_hints(ServerSettings)
    known = serve_option_names()
    engine: dict[str, Any] = {}
    settings: dict[str, Any] = {}
    for name, value in options.items():
        if name in SET_ELSEWHERE:
            instead = SET_ELSEWHERE[name]
            raise ValueError(f"{where}.{name} cannot be set" + (f"; set {instead}" if instead else ""))
        check_key(name, known, where)
        setting = RENAMED.get(name, name)
        if setting in hints:
            settings[setting] = _setting(f"{where}.{name}", setting, value, hints[setting])
        if name not in OTHERS and ((name not in RENAMED and name not in hints) or name == "max_logprobs"):
            engine[ENGINE_RENAMED.get(name, name)] = value
    if options.get("enable_auto_tool_choice") is False:
        settings["tool_call_parser"] = "none"
    return ServeOptions(engine, ServerSettings(**settings), _chat_template(options.get("chat_template"), where))


def serve_option_names() -> list[str]:
    """Every name `sort_options` takes."""
    own = {field.name for field in fields(ServerSettings)} | set(RENAMED) | set(OTHERS)
    return sorted((own | set(ENGINE_RENAMED) | set(option_names())) - set(SET_ELSEWHERE))


def check_key(name: str, known: Collection[str], where: str) -> None:
    """Raise ValueError, with close matches, unless `name` is known."""
    if name in known:
        return
    close = difflib.get_close_matches(str(name), known, n=3)
    hint = f"did you mean {' or '.join(map(repr, close))}?" if close else f"known are {', '.join(sorted(known))}"
    raise ValueError(f"{where} has no key {name!r}; {hint}")


def check_keys(given: Iterable[str], known: Collection[str], where: str) -> None:
    for name in given:
        check_key(name, known, where)


def _setting(where: str, name: str, value: Any, hint: Any) -> Any:
    if name == "api_keys" and isinstance(value, str):
        value = [value]
    if name == "sse_keep_alive_s" and value == 0:
        value = None  # vLLM's way to switch it off
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError as error:
        shown = "a secret" if name == "api_keys" else repr(value)
        raise ValueError(f"{where} must be of type {getattr(hint, '__name__', hint)}, got {shown}") from error


def _chat_template(value: Any, where: str) -> str | None:
    """A template's text, from itself or from a file."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise ValueError(f"{where}.chat_template must be a file's path or Jinja text, got {value!r}")
    if "{" in value or "\n" in value:
        return value
    try:
        return Path(value).read_text()
    except OSError as error:
        raise ValueError(f"{where}.chat_template {value!r} is no Jinja text, and no file: {error.strerror}") from error
