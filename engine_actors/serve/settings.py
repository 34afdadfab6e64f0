"""What an operator may set about the HTTP server. Built by the CLI and by LLMConfig, read by every part of serve/."""

from __future__ import annotations

from dataclasses import dataclass, field

COUNTS = ("max_body_bytes", "max_prompts", "max_n", "max_sequences", "max_stop_strings", "max_stop_chars", "max_tools",
          "stream_interval")  # fmt: skip
TOOL_CALL_PARSERS = ("auto", "hermes", "llama3_json", "none")


@dataclass(frozen=True)
class ServerSettings:
    """Limits and switches of the HTTP server, independent of the model.

    Attributes:
        api_keys: Accepted bearer tokens; empty switches authentication off.
        max_body_bytes: Larger request bodies are refused with 413.
        max_prompts: Prompts of one completions request.
        max_n: Largest `n`.
        max_sequences: Largest number of prompts times n.
        max_stop_strings: Most `stop` strings, each at most `max_stop_chars` characters.
        max_logprobs: Most alternatives per token; -1 allows the whole vocabulary.
        max_tools: Most `tools`.
        stream_interval: Tokens per streamed chunk, at least; requests may ask for more.
        sse_keep_alive_s: Silence after which a stream sends a comment; None never does.
        first_output_wait_s: A stream's 200 waits so long for the first output, so that errors keep their status.
        request_timeout_s: Longest a request that does not stream may take; None is unlimited.
        tool_call_parser: How `tool_choice: "auto"` reads calls from text: a style, "auto" (by the chat template), or
            "none" (refuse).
        trust_request_chat_template: Let requests bring their own `chat_template`.
        enable_tokenizer_info: Serve /tokenizer_info.
        enable_vllm_metric_names: Also expose metrics under the `vllm:` names that dashboards know.
        allowed_origins: CORS origins; empty switches CORS off.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    max_body_bytes: int = 64 << 20
    max_prompts: int = 1024
    max_n: int = 128
    max_sequences: int = 4096
    max_stop_strings: int = 64
    max_stop_chars: int = 1024
    max_logprobs: int = 20
    max_tools: int = 256
    stream_interval: int = 1
    sse_keep_alive_s: float | None = None
    first_output_wait_s: float = 5.0
    request_timeout_s: float | None = None
    tool_call_parser: str = "auto"
    trust_request_chat_template: bool = False
    enable_tokenizer_info: bool = False
    enable_vllm_metric_names: bool = True
    allowed_origins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in COUNTS:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")
        if self.max_logprobs < -1:
            raise ValueError(f"max_logprobs must be -1 (whole vocabulary) or at least 0, got {self.max_logprobs!r}")
        for name in ("sse_keep_alive_s", "request_timeout_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} must be None or more than 0 seconds, got {value!r}")
        if self.first_output_wait_s < 0:
            raise ValueError(f"first_output_wait_s must be at least 0 seconds, got {self.first_output_wait_s!r}")
        if self.tool_call_parser not in TOOL_CALL_PARSERS:
            raise ValueError(f"tool_call_parser must be one of {TOOL_CALL_PARSERS}, got {self.tool_call_parser!r}")
        if any(not isinstance(key, str) or not key for key in self.api_keys):
            raise ValueError("api_keys must hold non-empty strings")
