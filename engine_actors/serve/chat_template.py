"""Messages and tools → the prompt's text, through the model's chat template. One `ChatTemplate` per served model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import loopcontrols

from engine_actors.serve.errors import BadRequest
from engine_actors.serve.messages import normalise_messages, with_parts, with_tools_as_text
from engine_actors.serve.tokenization import INLINE_CHARS, Tokenization

logger = logging.getLogger(__name__)

RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
"""Names a request may not pass on to the template: they have fields of their own, or change what is returned."""
_PROBE = "content probe"


class ChatTemplate:
    """How a model turns a conversation into a prompt.

    Args:
        tokenization: The model's tokenizer, which brings the template.
        template: Used instead of the tokenizer's own.

    Attributes:
        source: The template's text; None when the model has none.
        knows_tools: The template has a place for tools. Otherwise they are described in a system message.
    """

    def __init__(self, tokenization: Tokenization, template: str | None = None) -> None:
        self._tokenization = tokenization
        self._tokenizer = tokenization.tokenizer
        self._template = template
        own = getattr(self._tokenizer, "chat_template", None)
        if isinstance(own, Mapping):
            self.source: str | None = template or "\n".join(str(part) for part in own.values())
        else:
            self.source = template or own
        self.knows_tools = self.source is not None and "tools" in _variables(self.source)
        self._wants_parts = self.source is not None and self._probe_wants_parts()

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | None = None,
        kwargs: Mapping[str, Any] | None = None,
        template: str | None = None,
    ) -> str:
        """The prompt's text.

        Raises:
            BadRequest: The messages are malformed, the template refuses them, or the flags contradict each other.
        """
        if continue_final_message and add_generation_prompt:
            raise BadRequest("continue_final_message and add_generation_prompt cannot both be true",
                             "continue_final_message")  # fmt: skip
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if template is None and self.source is None:
            raise BadRequest("the model has no chat template; use /v1/completions, or start the server with "
                             "--chat-template", "messages")  # fmt: skip
        reserved = sorted(RESERVED_KWARGS & (kwargs or {}).keys())
        if reserved:
            raise BadRequest(f"chat_template_kwargs must not hold {', '.join(reserved)}", "chat_template_kwargs")
        conversation = normalise_messages(messages)
        knows_tools, wants_parts = self.knows_tools, self._wants_parts
        if template is not None:
            knows_tools, wants_parts = "tools" in _variables(template), False
        if not knows_tools:
            conversation, tools = with_tools_as_text(conversation, tools), None
        if wants_parts:
            conversation = with_parts(conversation)
        options = {**(kwargs or {}), "add_generation_prompt": add_generation_prompt}
        arguments = (conversation, tools, bool(continue_final_message), options, template or self._template)
        if sum(len(str(message.get("content"))) for message in conversation) <= INLINE_CHARS:
            return self._render(*arguments)
        text: str = await self._tokenization.in_thread(self._render, *arguments)
        return text

    def _render(
        self,
        conversation: list[dict[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        continue_final_message: bool,
        options: Mapping[str, Any],
        template: str | None,
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                conversation,
                tools=list(tools) if tools else None,
                chat_template=template,
                continue_final_message=continue_final_message,
                tokenize=False,
                **options,
            )
        # A template is a program of the model's: whatever it raises is about these messages.
        except Exception as error:
            logger.info("the chat template failed", exc_info=True)
            raise BadRequest(f"the chat template does not accept the messages: {error}", "messages") from error
        return text

    def _probe_wants_parts(self) -> bool:
        """Whether the template reads `content` as a list of parts only, and not as a string."""
        if self._probe(_PROBE):
            return False
        return self._probe([{"type": "text", "text": _PROBE}])

    def _probe(self, content: Any) -> bool:
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": content}], chat_template=self._template, tokenize=False
            )
        except Exception as error:  # a template may raise anything
            logger.debug("the chat template does not accept the probe: %s", error)
            return False
        return _PROBE in text and "'type'" not in text and '"type"' not in text


def _variables(template: str) -> set[str]:
    """Names the template reads from its caller. Broken templates have none, and fail when rendered."""
    environment = jinja2.Environment(extensions=[loopcontrols], autoescape=False)
    environment.tests.setdefault("contains", lambda *_: False)
    try:
        return jinja2.meta.find_undeclared_variables(environment.parse(template))
    except jinja2.TemplateSyntaxError:
        # transformers' own tags, e.g. {% generation %}: fall back to the word itself.
        return {"tools"} if "tools" in template else set()
