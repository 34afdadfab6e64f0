"""Conversations → prompt text, by the model's chat template. Used by `InputProcessor`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from engine_actors.errors import InvalidRequestError
from scheduler.values import shown

CONTENT_FORMATS = ("auto", "string", "openai")


def render_chat(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    *,
    chat_template: str | None = None,
    content_format: str = "auto",
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    tools: list[dict[str, Any]] | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
) -> str:
    """A conversation as prompt text, by the model's chat template. Special tokens are in the text already.

    Args:
        content_format: What the template finds as a message's content: "string" (and "auto") its text, "openai" a
            list of text parts.
    """
    if tokenizer is None:
        raise InvalidRequestError("messages need a tokenizer, but skip_tokenizer_init is set", "messages")
    if chat_template is None and not getattr(tokenizer, "chat_template", None):
        raise InvalidRequestError(
            "the model's tokenizer has no chat template; pass chat_template, or a prompt to generate", "messages"
        )
    if add_generation_prompt and continue_final_message:
        raise InvalidRequestError(
            "add_generation_prompt and continue_final_message cannot both be true", "continue_final_message"
        )
    if content_format not in CONTENT_FORMATS:
        raise InvalidRequestError(
            f"content_format must be one of {', '.join(CONTENT_FORMATS)}; got {shown(content_format)}",
            "chat_template_content_format",
        )
    conversation = [_check_message(message, index) for index, message in enumerate(_check_messages(messages))]
    if content_format == "openai":
        conversation = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in conversation]
    try:
        return str(
            tokenizer.apply_chat_template(
                conversation,
                tools=tools,
                chat_template=chat_template,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                tokenize=False,
                **(chat_template_kwargs or {}),
            )
        )
    except Exception as error:  # Jinja raises many types, and templates raise their own
        raise InvalidRequestError(f"the chat template refused the messages: {error}", "messages") from error


def _check_messages(messages: Any) -> Sequence[Any]:
    if not isinstance(messages, Sequence) or isinstance(messages, (str, bytes)) or not messages:
        raise InvalidRequestError(f"messages must be a non-empty list of messages, got {messages!r}", "messages")
    return messages


def _check_message(message: Any, index: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise InvalidRequestError(
            f'messages[{index}] must be a dictionary with a "role" and a "content", got {message!r}', "messages"
        )
    content = message.get("content")
    if content is None or isinstance(content, str):
        return {**message, "content": content or ""}
    if not isinstance(content, Sequence):
        raise InvalidRequestError(
            f"messages[{index}].content must be a string or a list of text parts, got {type(content).__name__}",
            "messages",
        )
    texts = []
    for part in content:
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise InvalidRequestError(
                f'messages[{index}].content may hold {{"type": "text", "text": ...}} only, got {part!r}', "messages"
            )
        texts.append(text)
    return {**message, "content": "\n".join(texts)}
