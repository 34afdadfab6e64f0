"""What a replica of a model reserves and how Serve runs it: LLMConfig → placement group and deployment options.

The replica sits in the first bundle; its EngineCore and its workers take their places in the same group.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import ray

from engine_actors.config import DEFAULT_MAX_NUM_SEQS
from engine_actors.serve.llm_config import LLMConfig

ACCELERATOR_SHARE = 0.001
"""Ray's convention: so little of `accelerator_type:X` that it only restricts where a bundle may go."""
GPU_REPLICA_CPUS = 1.0
"""For HTTP and tokenisation beside a GPU. On CPUs alone the workers have them all, and the front end shares."""
ONGOING_PER_SEQ = 16
"""Requests a replica takes in at once, for each row of its batch; the engine queues what does not run."""
RETRY_AFTER_S = 5
DRAIN_S = 600.0
"""Streams of a replica that is scaled down or updated may go on for so long."""
HEALTH_PERIOD_S = 2.0
REPLICA_ENV = {
    # The app never blocks its loop; a thread of its own would cost a hop for every token.
    "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
    "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": "100",
}


@dataclass(frozen=True)
class ReplicaResources:
    """What one replica needs.

    Attributes:
        device: "cpu" or "cuda", for the engine.
        worker: Resources of a worker.
        bundles: Of the placement group, in its order.
        strategy: Of the placement group.
        actor: Resources of the replica itself, part of the first bundle.
    """

    device: str
    worker: dict[str, float]
    bundles: list[dict[str, float]]
    strategy: str
    actor: dict[str, float]

    def engine_options(self) -> dict[str, Any]:
        """Options that make the engine's workers fit the bundles."""
        if self.device == "cuda":
            return {"device": "cuda", "num_gpus_per_worker": self.worker["GPU"]}
        return {"device": "cpu", "num_cpus_per_worker": self.worker["CPU"]}


def replica_resources(config: LLMConfig) -> ReplicaResources:
    """Size the placement group of a model's replicas.

    Raises:
        ValueError: The bundles given cannot hold the workers.
    """
    given = config.placement_group_config or {}
    options = config.options.engine
    device = _device(config)
    kind = "GPU" if device == "cuda" else "CPU"
    per_worker = dict(given.get("bundle_per_worker", {}))
    default = options.get("num_gpus_per_worker" if kind == "GPU" else "num_cpus_per_worker") or per_worker.get(
        kind, 1.0
    )
    worker = {kind: float(default)}
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    if "bundles" in given:
        bundles = [dict(bundle) for bundle in given["bundles"]]
    elif per_worker:
        bundles = [dict(per_worker) for _ in range(tp_size * pp_size)]
    else:
        bundles = _default_bundles(config, worker)
    room = sum(math.floor(bundle.get(kind, 0.0) / worker[kind] + 1e-6) for bundle in bundles)
    if room < tp_size * pp_size:
        raise ValueError(
            f"placement_group_config has room for {room} workers with {worker[kind]:g} {kind} each, but "
            f"tensor_parallel_size {tp_size} × pipeline_parallel_size {pp_size} needs {tp_size * pp_size}"
        )
    if config.accelerator_type is not None:
        for bundle in bundles:
            bundle.setdefault(f"accelerator_type:{config.accelerator_type}", ACCELERATOR_SHARE)
    actor_options = config.deployment_config.get("ray_actor_options") or {}
    num_cpus = float(actor_options.get("num_cpus", GPU_REPLICA_CPUS if kind == "GPU" else 0.0))
    actor = {
        "CPU": num_cpus,
        **{name: float(amount) for name, amount in (actor_options.get("resources") or {}).items()},
    }
    for name, amount in actor.items():
        if amount:
            bundles[0][name] = bundles[0].get(name, 0.0) + amount
    return ReplicaResources(device, worker, bundles, given.get("strategy", "PACK"), actor)


def deployment_options(config: LLMConfig, resources: ReplicaResources) -> dict[str, Any]:
    """Options of the model's Serve deployment: the user's, over defaults that suit an engine."""
    given = dict(config.deployment_config)
    given_actor = dict(given.pop("ray_actor_options", None) or {})
    runtime_env = {**(given_actor.get("runtime_env") or {}), **(config.runtime_env or {})}
    runtime_env["env_vars"] = {**REPLICA_ENV, **(runtime_env.get("env_vars") or {})}
    max_num_seqs = int(config.options.engine.get("max_num_seqs") or DEFAULT_MAX_NUM_SEQS)
    options: dict[str, Any] = {
        "name": deployment_name(config.model_id),
        "max_ongoing_requests": max(1024, ONGOING_PER_SEQ * max_num_seqs),
        "max_queued_requests": max(1024, ONGOING_PER_SEQ * max_num_seqs),
        "backpressure_config": {"status_code": 503, "retry_after_s": RETRY_AFTER_S},
        "health_check_period_s": HEALTH_PERIOD_S,
        "health_check_timeout_s": 30.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        "graceful_shutdown_timeout_s": DRAIN_S,
        **{name: value for name, value in given.items() if value is not None},
        "ray_actor_options": {**given_actor, "num_cpus": resources.actor["CPU"], "runtime_env": runtime_env},
        "placement_group_bundles": resources.bundles,
        "placement_group_strategy": resources.strategy,
    }
    if options.get("num_replicas") == "auto" or "autoscaling_config" in options:
        # Serve's own default target is 2, ray.serve.llm's a thousand million. A full batch is when more replicas help.
        target = min(max_num_seqs, options["max_ongoing_requests"])
        options["autoscaling_config"] = {
            "target_ongoing_requests": target,
            **dict(options.get("autoscaling_config") or {}),
        }
    return options


def room_problem(config: LLMConfig) -> str | None:
    """Why the cluster as it is could not hold a replica even when idle, with what its nodes have; None if it could."""
    resources = replica_resources(config)
    nodes = [node for node in ray.nodes() if node["Alive"]]
    rooms = [dict(node["Resources"]) for node in nodes]
    strict = resources.strategy == "STRICT_PACK"
    bundles = [_sum(resources.bundles)] if strict else resources.bundles
    for bundle in sorted(bundles, key=lambda bundle: -max(bundle.values())):
        room = next((room for room in rooms if all(room.get(name, 0.0) >= need for name, need in bundle.items())), None)
        if room is None:
            break
        for name, need in bundle.items():
            room[name] -= need
    else:
        return None
    needed = " + ".join(_shown(bundle) for bundle in bundles)
    names = _sum(bundles)
    has = ", ".join(
        f"node {node['NodeManagerAddress']}: {_shown({name: node['Resources'].get(name, 0.0) for name in names})}"
        for node in nodes
    )
    return (
        f"a replica of {config.model_id} needs {needed} ({resources.strategy}), more than the cluster can give: {has}. "
        f"Use fewer workers (tensor_parallel_size, pipeline_parallel_size) or fewer CPUs each (num_cpus_per_worker)"
    )


def _sum(bundles: list[dict[str, float]]) -> dict[str, float]:
    total: dict[str, float] = {}
    for bundle in bundles:
        for name, amount in bundle.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def _shown(resources: dict[str, float]) -> str:
    return "{" + ", ".join(f"{amount:g} {name}" for name, amount in resources.items()) + "}"


def deployment_name(model_id: str) -> str:
    """As ray.serve.llm names them: Serve allows no slashes there."""
    return "LLMServer:" + model_id.replace("/", "--").replace(".", "_")


def _device(config: LLMConfig) -> str:
    """The engine's device, from what was said most directly to what the cluster has."""
    device = config.options.engine.get("device", "auto")
    if device != "auto":
        return str(device)
    if config.accelerator_config is not None:
        return "cuda" if config.accelerator_config["kind"] == "gpu" else "cpu"
    given = config.placement_group_config
    if given is not None:
        bundles = given.get("bundles") or [given.get("bundle_per_worker", {})]
        return "cuda" if any(bundle.get("GPU") for bundle in bundles) else "cpu"
    if config.accelerator_type is not None:
        return "cuda"
    gpus = ray.cluster_resources().get("GPU", 0.0) if ray.is_initialized() else 0.0
    return "cuda" if gpus > 0 else "cpu"


def _default_bundles(config: LLMConfig, worker: dict[str, float]) -> list[dict[str, float]]:
    """A bundle for each stage, which keeps its TP ranks on one node; for each worker where no node is so large."""
    tp_size, pp_size = config.tensor_parallel_size, config.pipeline_parallel_size
    stage = {name: amount * tp_size for name, amount in worker.items()}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]] if ray.is_initialized() else []
    fits = not nodes or any(all(node.get(name, 0.0) >= need for name, need in stage.items()) for node in nodes)
    return [dict(stage) for _ in range(pp_size)] if fits else [dict(worker) for _ in range(tp_size * pp_size)]
