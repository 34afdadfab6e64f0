"""The command line: what it prints, and errors as one line."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

import engine_actors.core
from engine_actors.cli.main import app
from tests.fakes import FakeExecutor

runner = CliRunner()


@pytest.fixture
def fake_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    def make(config: engine_actors.core.EngineConfig) -> FakeExecutor:
        return FakeExecutor(config.model_config, config.cache_config, config.scheduler_config, config.parallel_config)

    monkeypatch.setattr(engine_actors.core, "make_executor", make)


def generate(folder: Path, *arguments: str, stdin: str | None = None) -> list[str]:
    command = ["generate", str(folder), "--in-process", "--temperature", "0", *arguments]
    result = runner.invoke(app, command, input=stdin, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.mark.usefixtures("fake_executor")
def test_generate_prints_prompts_and_texts(fake_model_dir: Path) -> None:
    quiet = generate(fake_model_dir, "-q", "-p", "The fox", "-p", "The dog", "--max-tokens", "2")
    assert len(quiet) == 2
    shown = generate(fake_model_dir, "-p", "The fox", "-p", "The dog", "--max-tokens", "2")
    assert [line for line in shown if line.startswith("> ")] == ["> The fox", "> The dog"]
    assert shown[2] == quiet[0]
    assert generate(fake_model_dir, "-q", "--max-tokens", "2", stdin="The fox\nThe dog\n") == quiet


@pytest.mark.usefixtures("fake_executor")
def test_generate_passes_every_option_on(fake_model_dir: Path) -> None:
    options = ["-q", "-p", "x", "-n", "3", "--seed", "1", "-o", "max_num_seqs=4", "-o", "scheduling-policy=priority"]
    command = ["generate", str(fake_model_dir), "--in-process", "--max-tokens", "1", *options]
    assert runner.invoke(app, command, catch_exceptions=False).exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["-p", "x", "-o", "tensor_paralel_size=2"], "did you mean 'tensor_parallel_size'"),
        (["-p", "x", "-o", "nonsense"], "--option needs NAME=VALUE, got 'nonsense'"),
        (["-p", "x", "-tp", "2", "--in-process"], "'uni' runs one worker"),
        (["-p", "x", "--dtype", "float8"], "got 'float8'"),
        ([], "no prompt: give --prompt, or lines on stdin"),
    ],
)
def test_errors_are_one_line_and_status_one(fake_model_dir: Path, arguments: list[str], text: str) -> None:
    result = runner.invoke(app, ["generate", str(fake_model_dir), *arguments], input="")
    assert result.exit_code == 1
    assert text in result.stderr
    assert "Traceback" not in result.output


def test_help_teaches_by_example() -> None:
    result = runner.invoke(app, ["generate", "--help"])
    assert "engine-actors generate path/to/model --prompt" in result.stdout
    assert {"generate", "fetch-model"} <= set(runner.invoke(app, ["--help"]).stdout.split())
