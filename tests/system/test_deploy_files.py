"""The files people deploy with hold what their readers (Ray's launcher, Serve, KubeRay, Grafana) demand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import yaml

from engine_actors.engine_metrics import EngineMetrics
from engine_actors.metrics import ServerMetrics
from engine_actors.serve import build_openai_app

ROOT = Path(__file__).parents[2]


def load(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text())


def test_rays_own_loader_takes_the_cluster_file() -> None:
    from ray.autoscaler._private.util import prepare_config, validate_config

    config = prepare_config(load("ray_cluster.yaml"))
    validate_config(config)
    assert set(config["available_node_types"]) == {"head", "cpu_worker", "gpu_worker"}
    assert config["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert any("engine-actors[serve]" in line for line in config["setup_commands"])


def test_serves_schema_takes_the_example_and_the_app_can_be_built() -> None:
    from ray.serve.schema import ServeDeploySchema

    schema = ServeDeploySchema.model_validate(load("examples/serve_config.yaml"))
    assert schema.http_options.host == "127.0.0.1"
    assert build_openai_app(schema.applications[0].args)._bound_deployment.name == "LLMServer:smollm2"


def test_the_kuberay_manifest_holds_a_serve_config_and_matching_groups() -> None:
    from ray.serve.schema import ServeDeploySchema

    manifest = load("examples/kuberay.yaml")
    assert (manifest["apiVersion"], manifest["kind"]) == ("ray.io/v1", "RayService")
    schema = ServeDeploySchema.model_validate(yaml.safe_load(manifest["spec"]["serveConfigV2"]))
    options = build_openai_app(schema.applications[0].args)._bound_deployment.ray_actor_options
    assert options["num_cpus"] == 1.0
    cluster = manifest["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        names = {entry["name"] for entry in container["env"]}
        assert {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN"} <= names
        assert container["resources"]["limits"]["cpu"]
    (worker,) = cluster["workerGroupSpecs"]
    assert worker["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"] == "1"


def test_every_metric_of_the_dashboard_is_exposed() -> None:
    dashboard = json.loads((ROOT / "examples/grafana_dashboard.json").read_text())
    metrics = EngineMetrics("model", 4096)
    metrics.finished["stop"] = 1
    text = ServerMetrics([metrics]).render().decode()
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for query in queries for name in re.findall(r"\$\{prefix\}(\w+)", query)}
    assert len(names) > 15
    for name in names:
        assert re.search(rf"^engine_actors_{name}\{{", text, re.MULTILINE), name
