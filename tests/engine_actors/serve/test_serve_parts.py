"""Small parts of serving: flags, the config file, merged metrics, HAProxy's wrapper."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from engine_actors.cli.main import app
from engine_actors.cli.run_batch import finished_ids
from engine_actors.cli.serve_flags import FLAGS, human_int
from engine_actors.serve import direct
from engine_actors.serve.merge import merge_metrics
from engine_actors.serve.options import serve_option_names

runner = CliRunner()


def failed(*arguments: str) -> str:
    result = runner.invoke(app, list(arguments), env={"COLUMNS": "300", "RAY_ADDRESS": ""})
    assert result.exit_code != 0
    return " ".join(result.stderr.replace("│", " ").split())


def test_every_flag_is_an_option() -> None:
    assert {flag.option for flag in FLAGS} <= {*serve_option_names(), "tokenizer"}


@pytest.mark.parametrize(("text", "number"), [("4096", 4096), ("32k", 32_000), ("1.5K", 1536), ("2G", 2**31), (-1, -1)])
def test_counts_may_have_a_scale(text: Any, number: int) -> None:
    assert human_int(text) == number


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "MODEL is missing"),
        (["some/model", "--max-model-len", "long"], "--max-model-len must be a whole number such as 4096 or 32k"),
        (["some/model", "--proxy", "nginx"], "--proxy must be auto, haproxy or ray, got 'nginx'"),
        (["some/model", "--detach"], "--detach needs a cluster"),
        (["some/model", "-o", "max_num_sequences=3"], "or 'max_num_seqs'"),
        (["some/model", "--proxy", "haproxy", "--host", "10.1.2.3"], "HAProxy cannot be used with host '10.1.2.3'"),
    ],
)
def test_wrong_flags_are_one_line(arguments: list[str], text: str) -> None:
    assert text in failed("serve", *arguments)


def test_keys_of_the_config_file_are_flags(tmp_path: Path) -> None:
    file = tmp_path / "server.yaml"
    file.write_text("max-num-seq: 3\n")
    assert "did you mean 'max_num_seqs'" in failed("serve", "--config", str(file))
    file.write_text("- 1\n")
    assert "must map flags to values, got list" in failed("serve", "--config", str(file))
    assert "cannot be read" in failed("serve", "--config", str(tmp_path / "none.yaml"))


def test_help_teaches() -> None:
    text = runner.invoke(app, ["serve", "--help"], env={"COLUMNS": "200"}).stdout
    for part in ("engine-actors serve path/to/model --port 9000", "--tensor-parallel-size", "Memory and shape", "32k"):
        assert part in text


def test_metrics_of_several_models_make_one_text() -> None:
    def text(model: str, value: int) -> str:
        return (
            f'# HELP a_total Help.\n# TYPE a_total counter\na_total{{model_name="{model}"}} {value}\n'
            f"# HELP process_x Help.\n# TYPE process_x gauge\nprocess_x {value}\n"
        )

    assert merge_metrics([text("m", 1), text("n", 2)]) == (
        '# HELP a_total Help.\n# TYPE a_total counter\na_total{model_name="m"} 1\na_total{model_name="n"} 2\n'
        "# HELP process_x Help.\n# TYPE process_x gauge\nprocess_x 1\n"
    )


def test_haproxys_statistics_stay_on_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = tmp_path / "show"
    shown.write_text('#!/bin/sh\ncat "$3"\n')
    shown.chmod(0o755)
    monkeypatch.setattr(direct, "haproxy_binary", lambda: str(shown))
    environment = direct.direct_environment()
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", environment["RAY_SERVE_HAPROXY_BINARY_PATH"])
    metrics, stats = environment["RAY_SERVE_HAPROXY_METRICS_PORT"], environment["RAY_SERVE_HAPROXY_STATS_PORT"]
    config = tmp_path / "haproxy.cfg"
    config.write_text(
        f"frontend prometheus\n    bind :{metrics}\nlisten stats\n  bind *:{stats}\nbind 127.0.0.1:8000\n"
    )
    command = [environment["RAY_SERVE_HAPROXY_BINARY_PATH"], "-db", "-f", str(config)]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.strip() for line in written if "bind" in line] == [
        f"bind 127.0.0.1:{metrics}",
        f"bind 127.0.0.1:{stats}",
        "bind 127.0.0.1:8000",
    ]
    # HAProxy's socket paths hold 97 characters, of which Serve adds a node id.
    assert len(environment["RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH"]) + 57 <= 97
    direct.remove_direct_files()
    assert not Path(environment["RAY_SERVE_HAPROXY_BINARY_PATH"]).exists()


@pytest.mark.parametrize(
    ("host", "num_nodes", "can"),
    [("127.0.0.1", 1, True), ("127.0.0.1", 2, False), ("0.0.0.0", 3, True), ("10.0.0.5", 1, False)],
)
def test_where_haproxy_can_reach_replicas(
    host: str, num_nodes: int, can: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "haproxy_binary", lambda: "/bin/true")
    assert direct.can_be_direct(host, num_nodes) is can


def test_answers_that_may_get_better_are_asked_for_again(tmp_path: Path) -> None:
    file = tmp_path / "out.jsonl"
    lines = [f'{{"custom_id": "{status}", "response": {{"status_code": {status}}}}}' for status in (200, 400, 429, 503)]
    file.write_text("\n".join(lines) + "\n")
    assert finished_ids(file) == {"200", "400"}
