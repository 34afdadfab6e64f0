"""The flags of `engine-actors serve` that are options of engine or HTTP server, as a table. Read by serve.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MODEL, MEMORY, SCHEDULING, PARALLEL, API = "Model", "Memory and shape", "Scheduling", "Parallel and placement", "API"


@dataclass(frozen=True)
class Flag:
    """A flag.

    Attributes:
        option: Name of the option, and of the flag with dashes.
        kind: int, float, str, bool, or list (a flag that may be repeated).
        text: Its help.
        short: More names.
    """

    option: str
    kind: type
    text: str
    panel: str
    short: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        name = "--" + self.option.replace("_", "-")
        if self.kind is bool:
            return (f"{name}/--no-{name[2:]}",)
        return (name, *self.short)


def human_int(text: Any) -> int:
    """An integer, also as 32k (thousands), 32K (times 1024), 2g or 2G.

    Raises:
        ValueError: It is none.
    """
    scales = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}
    if isinstance(text, str) and text[-1:] in scales:
        try:
            return int(float(text[:-1]) * scales[text[-1]])
        except ValueError:
            raise ValueError(f"must be a whole number such as 4096 or 32k, got {text!r}") from None
    try:
        return int(text)
    except (TypeError, ValueError):
        raise ValueError(f"must be a whole number such as 4096 or 32k, got {text!r}") from None


FLAGS = (
    Flag("tokenizer", str, "Directory or hub id of another tokenizer than the model's.", MODEL),
    Flag("revision", str, "Branch, tag or commit at the hub.", MODEL),
    Flag("dtype", str, "Of weights and activations: auto, float32, bfloat16 or float16.", MODEL),
    Flag("quantization", str, "Quantise the weights on load: int8 or int4.", MODEL, ("-q",)),
    Flag("load_format", str, "auto, safetensors, or dummy (random weights).", MODEL),
    Flag("trust_remote_code", bool, "Run model code from the hub. Off by default: it is code of strangers.", MODEL),
    Flag("generation_config", str, "auto takes sampling defaults from the model's file; vllm ignores it.", MODEL),
    Flag("seed", int, "Seeds requests that bring none.", MODEL),
    Flag("enforce_eager", bool, "No graph capture or kernel recording.", MODEL),
    Flag(
        "max_model_len",
        int,
        "Longest prompt and output together, in tokens (32k is fine); -1 fits it to memory.",
        MEMORY,
    ),
    Flag("gpu_memory_utilization", float, "Share of each GPU's memory the engine may use.", MEMORY),
    Flag("kv_cache_memory_bytes", int, "Memory of the KV cache per worker (4G is fine); overrides the share.", MEMORY),
    Flag("num_gpu_blocks_override", int, "Exact number of KV blocks, on any device.", MEMORY),
    Flag("kv_cache_dtype", str, "Of cached keys and values: auto, float32, bfloat16 or float16.", MEMORY),
    Flag("block_size", int, "Tokens of a KV block.", MEMORY),
    Flag("enable_prefix_caching", bool, "Share the KV blocks of equal prompt prefixes (on by default).", MEMORY),
    Flag("max_num_seqs", int, "Requests that run at once.", SCHEDULING),
    Flag("max_num_batched_tokens", int, "Tokens of one step.", SCHEDULING),
    Flag("max_num_queued_reqs", int, "Requests that may wait; more get 429. Default: no limit.", SCHEDULING),
    Flag("enable_chunked_prefill", bool, "Compute long prompts over several steps (on by default).", SCHEDULING),
    Flag("scheduling_policy", str, "fcfs, or priority (requests' `priority`, lower first).", SCHEDULING),
    Flag("async_scheduling", bool, "Dispatch a step before the last one's tokens are known.", SCHEDULING),
    Flag("tensor_parallel_size", int, "Worker actors that share each layer.", PARALLEL, ("-tp",)),
    Flag("pipeline_parallel_size", int, "Consecutive groups of layers, each on its own workers.", PARALLEL, ("-pp",)),
    Flag("recovery", str, "replay: workers or an engine core that die are started anew, requests go on.", PARALLEL),
    Flag("device", str, "auto, cpu or cuda.", PARALLEL),
    Flag(
        "num_cpus_per_worker", float, "CPUs a CPU worker reserves in Ray (1 by default, may be a fraction).", PARALLEL
    ),
    Flag("num_gpus_per_worker", float, "GPUs (may be a fraction) a worker reserves in Ray.", PARALLEL),
    Flag("api_key", list, "Accepted key, may be repeated. Default: $ENGINE_ACTORS_API_KEY, or none.", API),
    Flag("chat_template", str, "File with a Jinja chat template, in place of the model's.", API),
    Flag("trust_request_chat_template", bool, "Let requests bring a chat template.", API),
    Flag("enable_auto_tool_choice", bool, "Let the model decide to call tools (on by default).", API),
    Flag("tool_call_parser", str, "How calls are read from text: auto, hermes, llama3_json or none.", API),
    Flag("max_logprobs", int, "Most log-probabilities per token; -1 is no limit.", API),
    Flag("stream_interval", int, "Tokens of a streamed chunk, at least.", API),
    Flag("sse_keep_alive_interval", float, "Seconds of silence after which a stream sends a comment; 0 never.", API),
    Flag("enable_tokenizer_info_endpoint", bool, "Serve /tokenizer_info.", API),
    Flag("allowed_origins", list, "CORS origin, may be repeated.", API),
)
COUNTS = ("max_model_len", "kv_cache_memory_bytes", "max_num_batched_tokens")
"""Flags that take 32k and the like."""
