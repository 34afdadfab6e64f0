"""The commands that talk to a server (chat, bench serve, run-batch), against the HTTP app over a fake engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from engine_actors.cli.main import app
from engine_actors.errors import QueueFullError
from engine_actors.serve.direct import free_ports
from tests.engine_actors.serve.fake_llm import DEFAULT_REPLY
from tests.engine_actors.serve.server import MODEL, RunningServer

runner = CliRunner()


def chat(server: RunningServer, *arguments: str, stdin: str | None = None) -> Result:
    return runner.invoke(app, ["chat", "--url", f"{server.url}/v1", *arguments], input=stdin)


def test_chat_prints_the_answer(server: RunningServer) -> None:
    result = chat(server, "-q", "Hello", "--stats", "--temperature", "0", "--max-tokens", "50")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0] == DEFAULT_REPLY
    assert lines[1].startswith("first token after ")
    assert (server.llm.calls[0].params.temperature, server.llm.calls[0].params.max_tokens) == (0, 50)


def test_chat_keeps_the_conversation_until_reset(server: RunningServer) -> None:
    server.llm.reply = "Certainly"
    result = chat(server, "--system-prompt", "Be kind", stdin="One\nTwo\n/help\n/reset\nThree\n/quit\n")
    assert result.exit_code == 0, result.output
    prompts = [server.llm.tokenizer.decode(call.token_ids) for call in server.llm.calls]
    assert len(prompts) == 3
    assert all("Be kind" in prompt for prompt in prompts)
    assert all(part in prompts[1] for part in ("One", "Certainly", "Two"))
    assert "One" not in prompts[2]
    assert "Ctrl-C stops an answer" in result.stdout.split("> ")[3]


def test_an_error_ends_the_answer_not_the_conversation(server: RunningServer) -> None:
    server.llm.refusal = QueueFullError("too many")
    result = chat(server, stdin="One\n/quit\n")
    assert result.exit_code == 0
    assert "Error: the server answered 429: too many" in result.stderr


def test_chat_without_a_server_says_what_to_do() -> None:
    (port,) = free_ports(1)
    result = runner.invoke(app, ["chat", "--url", f"http://127.0.0.1:{port}/v1", "-q", "Hi"])
    assert result.exit_code == 1
    assert "start one with `engine-actors serve MODEL`" in result.stderr


@pytest.mark.parametrize("backend", ["openai", "openai-chat"])
def test_bench_serve_has_vllms_keys(server: RunningServer, smollm2_dir: Path, tmp_path: Path, backend: str) -> None:
    server.llm.reply = [504] * 5
    arguments = [
        "bench", "serve", "--base-url", server.url, "--backend", backend, "--tokenizer", str(smollm2_dir),
        "--num-prompts", "6", "--input-len", "16", "--output-len", "5", "--max-concurrency", "3",
        "--request-rate", "50,100", "--plot", str(tmp_path / "latency.png"), "--goodput", "ttft:60000",
        "--metric-percentiles", "50,99", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json",
    ]  # fmt: skip
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    figures = json.loads((tmp_path / "r.json").read_text())
    assert (figures["completed"], figures["failed"], figures["model_id"]) == (6, 0, MODEL)
    assert figures["total_output_tokens"] == 30
    if backend == "openai":
        assert figures["total_input_tokens"] == 96
    assert figures["request_goodput"] == figures["request_throughput"]
    for metric in ("ttft", "tpot", "itl"):
        assert 0 < figures[f"median_{metric}_ms"] <= figures[f"p99_{metric}_ms"]
    assert figures["max_concurrent_requests"] <= 3
    assert "ttfts" not in figures
    assert (tmp_path / "latency.png").read_bytes().startswith(b"\x89PNG")
    assert all(call.params.ignore_eos for call in server.llm.calls)


def test_bench_serve_fails_when_requests_fail(server: RunningServer, smollm2_dir: Path) -> None:
    server.llm.refusal = QueueFullError("too many")
    result = runner.invoke(app, ["bench", "serve", "--base-url", server.url, "--tokenizer", str(smollm2_dir),
                                 "--num-prompts", "2", "--input-len", "4"])  # fmt: skip
    assert result.exit_code == 1
    assert "2 requests failed, the first with: HTTP 429" in result.stderr


def test_run_batch_and_again(server: RunningServer, tmp_path: Path) -> None:
    body = {"model": MODEL, "prompt": "One, two,", "max_tokens": 30}
    requests = [
        {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions", "body": {**body, "temperature": 9}},
        {"custom_id": "c", "method": "POST", "url": "/v1/embeddings", "body": body},
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, requests)) + "\nno json\n")
    arguments = ["run-batch", "-i", str(source), "-o", str(target), "--url", server.url]
    assert runner.invoke(app, arguments).exit_code == 0
    answers = {answer["custom_id"]: answer for answer in map(json.loads, target.read_text().splitlines())}
    assert answers["a"]["response"]["body"]["choices"][0]["text"] == DEFAULT_REPLY
    assert answers["a"]["response"]["body"]["id"] == "cmpl-" + answers["a"]["response"]["request_id"]
    assert answers["a"]["error"] is None
    assert answers["b"]["response"]["status_code"] == 400
    assert "temperature" in answers["b"]["error"]["message"]
    assert "url must be one of" in answers["c"]["error"]["message"]
    assert "line 4 is no JSON" in answers[None]["error"]["message"]
    # A run that was cut off in the middle of a line goes on behind the last whole one.
    target.write_text(json.dumps({**answers["a"], "id": "kept"}) + "\n" + '{"custom_id": "b", "resp')
    assert runner.invoke(app, arguments).exit_code == 0
    again = list(map(json.loads, target.read_text().splitlines()))
    assert again[0]["id"] == "kept"
    assert sorted(str(answer["custom_id"]) for answer in again) == ["None", "a", "b", "c"]
    assert len(server.llm.calls) == 1


def test_run_batch_needs_one_place_to_ask(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.touch()
    result = runner.invoke(app, ["run-batch", "-i", str(source), "-o", str(tmp_path / "out.jsonl")])
    assert result.exit_code == 1
    assert "give either --model, to load it here, or --url of a server" in result.stderr
