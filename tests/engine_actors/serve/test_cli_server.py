"""`engine-actors serve` with a real model, and what talks to it: curl, openai's parsing, lm-eval, instructor."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from engine_actors.serve.direct import free_ports, haproxy_binary
from tests.engine_actors.serve.cli_server import CliServer, cli_server, command, environment

pytestmark = [pytest.mark.ray, pytest.mark.model]
WAIT_S = 120


@pytest.fixture(scope="module")
def server(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CliServer]:
    (port,) = free_ports(1)
    config = tmp_path_factory.mktemp("config") / "server.yaml"
    # float32, so that log-probabilities can be compared with transformers'.
    config.write_text(
        f"model: {smollm2_dir}\nport: 1\nmax-model-len: 1k\ndtype: float32\nenable_tokenizer_info_endpoint: true\n"
    )
    arguments = ("--config", str(config), "--port", str(port), "--served-model-name", "smollm2")
    with cli_server(*arguments, "--num-gpu-blocks-override", "512", "--max-num-seqs", "64") as running:
        yield running


@pytest.fixture(scope="module")
def client(server: CliServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=WAIT_S) as made:
        yield made


def test_it_prints_what_a_newcomer_needs(server: CliServer) -> None:
    assert f"Serving smollm2 at {server.url}/v1" in server.text
    assert "KV cache: 511 blocks of 16 tokens" in server.text
    answer = subprocess.run(shlex.split(server.curl), capture_output=True, text=True, timeout=WAIT_S, check=True)
    assert json.loads(answer.stdout)["choices"][0]["message"]["content"]


def test_the_command_line_wins_over_the_config_file(server: CliServer) -> None:
    (card,) = httpx.get(f"{server.url}/v1/models", timeout=WAIT_S).json()["data"]
    assert (card["id"], card["max_model_len"]) == ("smollm2", 1000)
    assert httpx.get(f"{server.url}/tokenizer_info", timeout=WAIT_S).status_code == 200


def test_it_listens_on_localhost_alone(server: CliServer) -> None:
    import psutil

    root = psutil.Process(server.process.pid)
    proxies = [child for child in root.children(recursive=True) if "haproxy" in child.name()]
    if haproxy_binary() is not None:
        assert proxies
    for proxy in proxies:
        listening = [each.laddr.ip for each in proxy.net_connections("tcp") if each.status == psutil.CONN_LISTEN]
        assert set(listening) <= {"127.0.0.1"}


def test_streams_through_the_proxy(client: openai.OpenAI) -> None:
    chunks = client.completions.create(
        model="smollm2", prompt="The capital of France is", max_tokens=8, temperature=0, stream=True
    )
    texts = [chunk.choices[0].text for chunk in chunks]
    assert "".join(texts).startswith(" Paris")
    assert len(texts) == 8


def test_lm_eval_gets_transformers_log_likelihoods(server: CliServer, smollm2_dir: Path, tmp_path: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (the extra `clients`)")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    questions = [
        ("The capital of France is", [" Paris", " London"]),
        ("Two plus two is", [" four", " a fish"]),
        ("The opposite of hot is", [" cold", " seven"]),
    ]
    data = [{"question": question, "choices": choices, "answer": 0} for question, choices in questions]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, data)))
    (tmp_path / "task.yaml").write_text(
        "task: facts\ndataset_path: json\ntest_split: test\noutput_type: multiple_choice\n"
        f"dataset_kwargs: {{data_files: {{test: {tmp_path}/data.jsonl}}}}\n"
        'doc_to_text: "{{question}}"\ndoc_to_choice: "{{choices}}"\ndoc_to_target: answer\ntarget_delimiter: ""\n'
        "metric_list: [{metric: acc}]\n"
    )
    model_args = (
        f"model=smollm2,base_url={server.url}/v1/completions,tokenizer={smollm2_dir},tokenizer_backend=huggingface,"
        "num_concurrent=2,max_retries=1,tokenized_requests=True"
    )
    arguments = ["--model", "local-completions", "--tasks", "facts", "--include_path", str(tmp_path),
                 "--model_args", model_args, "--output_path", str(tmp_path / "out"), "--log_samples"]  # fmt: skip
    run = subprocess.run(
        [command()[0], "-m", "lm_eval", *arguments], env=environment(HF_HOME=str(tmp_path / "hf")),
        capture_output=True, text=True, timeout=WAIT_S,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    (samples,) = (tmp_path / "out").rglob("samples_facts_*.jsonl")
    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    for sample in map(json.loads, samples.read_text().splitlines()):
        question, choices = questions[sample["doc_id"]]
        start = len(tokenizer.encode(question))
        for choice, response in zip(choices, sample["resps"], strict=True):
            token_ids = torch.tensor([tokenizer.encode(question + choice)])
            with torch.inference_mode():
                logprobs = model(token_ids).logits[0].log_softmax(-1)
            wanted = sum(logprobs[at - 1, token_ids[0, at]].item() for at in range(start, token_ids.shape[1]))
            assert float(response[0][0]) == pytest.approx(wanted, abs=2e-3)


def test_instructor_gets_objects(client: openai.OpenAI) -> None:
    instructor = pytest.importorskip("instructor", reason="instructor is not installed (the extra `clients`)")
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        country: str

    for mode in (instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS):
        city: Any = instructor.from_openai(client, mode=mode).chat.completions.create(
            model="smollm2",
            response_model=City,
            messages=[{"role": "user", "content": "Paris is the capital of France. Give name and country."}],
            temperature=0,
            max_tokens=80,
            max_retries=0,
        )
        assert isinstance(city, City)


def test_openais_own_parsing_gets_objects(client: openai.OpenAI) -> None:
    from pydantic import BaseModel

    class City(BaseModel):
        name: str
        is_capital: bool

    completion = client.chat.completions.parse(
        model="smollm2",
        messages=[{"role": "user", "content": "Is Paris a capital?"}],
        response_format=City,
        temperature=0,
        max_tokens=60,
    )
    assert isinstance(completion.choices[0].message.parsed, City)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_forced_tool_calls_have_arguments_of_the_schema(client: openai.OpenAI, choice: Any) -> None:
    parameters = {"type": "object", "properties": {"city": {"enum": ["Paris", "Oslo"]}}, "required": ["city"],
                  "additionalProperties": False}  # fmt: skip
    tools: Any = [{"type": "function", "function": {"name": "weather", "parameters": parameters}}]
    message = client.chat.completions.create(
        model="smollm2", messages=[{"role": "user", "content": "How is the weather in Oslo?"}], tools=tools,
        tool_choice=choice, temperature=0, max_tokens=60,
    ).choices[0].message  # fmt: skip
    assert message.tool_calls
    call: Any = message.tool_calls[0]
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Oslo")


def test_a_refused_schema_is_a_400_before_the_stream(client: openai.OpenAI) -> None:
    response_format: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no such type"}}}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(
            model="smollm2", messages=[{"role": "user", "content": "Hi"}], response_format=response_format, stream=True
        )
    assert caught.value.param == "response_format"


# What `vllm bench serve` runs; the command itself asks for the version of a distribution that vLLM's CPU builds lack.
VLLM_BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser

parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""


def test_vllms_own_benchmark_takes_the_server_for_vllms(server: CliServer, smollm2_dir: Path, tmp_path: Path) -> None:
    python = os.environ.get("VLLM_PYTHON")
    if not python:
        pytest.skip("VLLM_PYTHON names no Python with vLLM")
    arguments = [
        "--base-url", server.url, "--model", "smollm2", "--tokenizer", str(smollm2_dir),
        "--dataset-name", "random", "--num-prompts", "6", "--random-input-len", "16", "--random-output-len", "5",
        "--max-concurrency", "3", "--save-result", "--result-dir", str(tmp_path), "--result-filename", "r.json",
    ]  # fmt: skip
    run = subprocess.run(
        [python, "-c", VLLM_BENCH_SERVE, *arguments], env={**environment(), "PYTHONPATH": ""},
        capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    figures = json.loads((tmp_path / "r.json").read_text())
    assert (figures["completed"], figures["failed"], figures["total_output_tokens"]) == (6, 0, 30)
