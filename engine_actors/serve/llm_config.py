"""`LLMConfig`: a served model as configuration, in the shape of ray.serve.llm's. Read by builder.py and deployment.py.

Everything that can be found wrong without the model's files is refused here, unknown keys with close matches.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from engine_actors.config import EngineConfig
from engine_actors.serve.options import ServeOptions, check_key, check_keys, sort_options
from executors.config import PLACEMENT_STRATEGIES

ENGINE_NAMES = ("EngineActors", "engine_actors", "engine-actors")
ACCELERATOR_KINDS = ("cpu", "gpu")
NOT_SUPPORTED = {
    "lora_config": "adapters are not served yet",
    "server_cls": "the deployment class is engine_actors.serve.LLMServer",
    "callback_config": "there are no start-up callbacks",
    "experimental_configs": "streams are never batched, and there are no separate ingress replicas",
}
"""Keys of ray.serve.llm that have no counterpart, and why."""
DEPLOYMENT_KEYS = frozenset(
    {
        "name",
        "num_replicas",
        "ray_actor_options",
        "max_ongoing_requests",
        "max_queued_requests",
        "backpressure_config",
        "autoscaling_config",
        "health_check_period_s",
        "health_check_timeout_s",
        "graceful_shutdown_wait_loop_s",
        "graceful_shutdown_timeout_s",
        "logging_config",
        "request_router_config",
        "max_replicas_per_node",
    }
)
"""Options of a Serve deployment that a model may set."""
PLACEMENT_KEYS = ("bundle_per_worker", "bundles", "strategy")


@dataclass(frozen=True)
class ModelLoadingConfig:
    """Which model, and what clients call it.

    Attributes:
        model_id: The name in requests.
        model_source: Hugging Face directory, or hub id; None is `model_id`.
        tokenizer_source: Same, for the tokenizer; None is the model's.
        aliases: More names that requests may use.
    """

    model_id: str
    model_source: str | None = None
    tokenizer_source: str | None = None
    aliases: Sequence[str] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.model_id, str) or not self.model_id:
            raise ValueError(f"model_loading_config.model_id must be a non-empty string, got {self.model_id!r}")
        is_list = isinstance(self.aliases, (list, tuple))
        if not is_list or not all(isinstance(alias, str) and alias for alias in self.aliases):
            raise ValueError(f"model_loading_config.aliases must be a list of non-empty strings, got {self.aliases!r}")
        for name in ("model_source", "tokenizer_source"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, str) or not value):
                raise ValueError(f"model_loading_config.{name} must be a path, a hub id or None, got {value!r}")
            if value is not None and "://" in value:
                raise ValueError(
                    f"model_loading_config.{name} must be a directory or a hub id, got {value!r}; remote "
                    f"storage is not read: mount or copy it first"
                )


@dataclass(frozen=True)
class LLMConfig:
    """One model to serve.

        LLMConfig(
            model_loading_config={"model_id": "smollm2", "model_source": "path/to/model"},
            engine_kwargs={"tensor_parallel_size": 2, "max_num_seqs": 64},
            deployment_config={"autoscaling_config": {"min_replicas": 1, "max_replicas": 4}},
        )

    Attributes:
        model_loading_config: A ModelLoadingConfig, or a mapping of its fields.
        llm_engine: "EngineActors".
        engine_kwargs: Options of the engine and of the HTTP server, see `options.py`.
        accelerator_type: Ray's name of a GPU type, e.g. "H100": workers run on nodes that have it.
        accelerator_config: {"kind": "cpu"} or {"kind": "gpu"}; None decides by the bundles, the accelerator type, and
            at last by whether the cluster has a GPU.
        placement_group_config: `bundle_per_worker` (repeated for each worker) or `bundles`, and `strategy`; None has
            one bundle for each pipeline stage, PACKed.
        deployment_config: Options of the Serve deployment.
        runtime_env: Of the replica, and so of its engine and workers.
        log_engine_metrics: Also export the engine's figures through ray.util.metrics.
    """

    model_loading_config: ModelLoadingConfig
    llm_engine: str = ENGINE_NAMES[0]
    engine_kwargs: Mapping[str, Any] = field(default_factory=dict)
    accelerator_type: str | None = None
    accelerator_config: Mapping[str, Any] | None = None
    placement_group_config: Mapping[str, Any] | None = None
    deployment_config: Mapping[str, Any] = field(default_factory=dict)
    runtime_env: Mapping[str, Any] | None = None
    log_engine_metrics: bool = True

    def __post_init__(self) -> None:
        loading = self.model_loading_config
        if isinstance(loading, Mapping):
            known = {each.name for each in fields(ModelLoadingConfig)}
            check_keys(loading, known, "model_loading_config")
            if "model_id" not in loading:
                raise ValueError("model_loading_config.model_id is missing: the name that requests use")
            object.__setattr__(self, "model_loading_config", ModelLoadingConfig(**loading))
        elif not isinstance(loading, ModelLoadingConfig):
            raise ValueError(f"model_loading_config must be a mapping, got {loading!r}")
        if self.llm_engine not in ENGINE_NAMES:
            raise ValueError(f"llm_engine must be {ENGINE_NAMES[0]!r} or left out, got {self.llm_engine!r}")
        for name in ("engine_kwargs", "deployment_config"):
            object.__setattr__(self, name, dict(_mapping(name, getattr(self, name) or {})))
        if not isinstance(self.log_engine_metrics, bool):
            raise ValueError(f"log_engine_metrics must be true or false, got {self.log_engine_metrics!r}")
        self._check_deployment()
        self._check_placement()
        self._check_accelerator()
        self._check_engine()

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> LLMConfig:
        """Same, from what YAML gives.

        Raises:
            ValueError: An unknown key, one that is not supported, or a wrong value.
        """
        data = _mapping("an entry of llm_configs", data)
        for name, reason in NOT_SUPPORTED.items():
            if data.get(name):
                raise ValueError(f"{name} is not supported: {reason}; leave it out")
        known = {each.name for each in fields(LLMConfig)}
        check_keys(set(data) - set(NOT_SUPPORTED), known, "llm_config")
        if "model_loading_config" not in data:
            raise ValueError("model_loading_config is missing: it names the model (model_id, model_source)")
        return LLMConfig(**{name: value for name, value in data.items() if name in known})

    @staticmethod
    def from_file(path: str | Path) -> LLMConfig:
        """Same, from a YAML file with one model."""
        try:
            data = yaml.safe_load(Path(path).read_text())
        except OSError as error:
            raise ValueError(f"the LLM config {str(path)!r} cannot be read: {error.strerror}") from error
        except yaml.YAMLError as error:
            raise ValueError(f"the LLM config {str(path)!r} is no YAML: {error}") from error
        return LLMConfig.from_dict(data)

    @property
    def model_id(self) -> str:
        return self.model_loading_config.model_id

    @property
    def model_source(self) -> str:
        return self.model_loading_config.model_source or self.model_id

    @cached_property
    def options(self) -> ServeOptions:
        """`engine_kwargs`, sorted out."""
        return sort_options(self.engine_kwargs)

    @property
    def tensor_parallel_size(self) -> int:
        return _size(self.engine_kwargs, "tensor_parallel_size")

    @property
    def pipeline_parallel_size(self) -> int:
        return _size(self.engine_kwargs, "pipeline_parallel_size")

    def engine_options(self) -> dict[str, Any]:
        """Keyword arguments of `AsyncLLM`, besides the model, as the user gave them."""
        options = dict(self.options.engine)
        if self.model_loading_config.tokenizer_source is not None:
            options["tokenizer"] = self.model_loading_config.tokenizer_source
        return options

    def _check_deployment(self) -> None:
        for name in self.deployment_config:
            if name in ("placement_group_bundles", "placement_group_strategy"):
                raise ValueError(f"deployment_config.{name} cannot be set; set placement_group_config")
            check_key(name, DEPLOYMENT_KEYS, "deployment_config")
        _mapping("deployment_config.ray_actor_options", self.deployment_config.get("ray_actor_options") or {})
        _mapping("deployment_config.autoscaling_config", self.deployment_config.get("autoscaling_config") or {})

    def _check_placement(self) -> None:
        if self.placement_group_config is None:
            return
        config = _mapping("placement_group_config", self.placement_group_config)
        check_keys(config, PLACEMENT_KEYS, "placement_group_config")
        if ("bundle_per_worker" in config) == ("bundles" in config):
            raise ValueError(
                "placement_group_config needs either bundle_per_worker (repeated for each worker) or bundles"
            )
        bundles = config.get("bundles", [config.get("bundle_per_worker")])
        if not isinstance(bundles, list) or not bundles:
            raise ValueError(f"placement_group_config.bundles must be a non-empty list, got {bundles!r}")
        for bundle in bundles:
            amounts = _mapping("a bundle of placement_group_config", bundle)
            if not amounts or not all(_is_amount(amount) for amount in amounts.values()):
                raise ValueError(f"a bundle must map resources to positive amounts, got {bundle!r}")
        strategy = config.get("strategy", PLACEMENT_STRATEGIES[0])
        if strategy not in PLACEMENT_STRATEGIES:
            raise ValueError(f"placement_group_config.strategy must be one of {PLACEMENT_STRATEGIES}, got {strategy!r}")

    def _check_accelerator(self) -> None:
        config = self.accelerator_config
        if config is not None:
            config = _mapping("accelerator_config", config)
            check_keys(config, ("kind",), "accelerator_config")
            if config.get("kind") not in ACCELERATOR_KINDS:
                raise ValueError(
                    f"accelerator_config.kind must be one of {ACCELERATOR_KINDS}, got {config.get('kind')!r}"
                )
        if self.accelerator_type is not None:
            if not isinstance(self.accelerator_type, str) or not self.accelerator_type:
                raise ValueError(f"accelerator_type must be a name such as 'H100', got {self.accelerator_type!r}")
            if config is not None and config["kind"] == "cpu":
                raise ValueError(
                    f"accelerator_type {self.accelerator_type!r} conflicts with accelerator_config.kind 'cpu'"
                )

    def _check_engine(self) -> None:
        """Names always; values too where the model's folder is here."""
        options = self.engine_options()
        self.tensor_parallel_size, self.pipeline_parallel_size  # noqa: B018  raise for wrong values
        if (Path(self.model_source) / "config.json").is_file():
            EngineConfig.from_kwargs(self.model_source, **options)


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping, got {value!r}")
    return value


def _is_amount(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0


def _size(options: Mapping[str, Any], name: str) -> int:
    value = options.get(name, 1)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"engine_kwargs.{name} must be an integer of at least 1, got {value!r}")
    return value
