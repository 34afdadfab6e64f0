"""Building Ray Serve applications from configuration, with ray.serve.llm's names: `build_openai_app` and its parts.

# config.yaml, for `serve run config.yaml`
applications:
  - name: llm
    route_prefix: /
    import_path: engine_actors.serve:build_openai_app
    args:
      llm_configs:
        - model_loading_config: {model_id: smollm2, model_source: path/to/model}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ray import serve
from ray.serve import Application

from engine_actors.serve.deployment import LLMServer
from engine_actors.serve.llm_config import LLMConfig
from engine_actors.serve.model_router import ModelRouter, router_options
from engine_actors.serve.options import check_keys
from engine_actors.serve.resources import deployment_options, replica_resources

APP_KEYS = ("llm_configs", "ingress_deployment_config", "ingress_cls_config")


def build_llm_deployment(llm_config: LLMConfig | Mapping[str, Any], *, is_ingress: bool = True) -> Application:
    """A deployment of one model.

    Args:
        is_ingress: It is the application's HTTP ingress; else it is asked through its handle (`relay`, `answer`).

    Raises:
        ValueError: A wrong configuration.
    """
    config = _as_config(llm_config)
    resources = replica_resources(config)
    server = serve.ingress()(LLMServer) if is_ingress else LLMServer
    deployment = serve.deployment(server, **deployment_options(config, resources))
    return deployment.bind(config, resources.engine_options())


def build_openai_app(args: Mapping[str, Any] | Sequence[Any]) -> Application:
    """An OpenAI-compatible application: one model is served by its own replicas, several behind a `ModelRouter`.

    Args:
        args: {"llm_configs": [...]}, each an LLMConfig, a mapping of its fields, or the path of a YAML file with them.
            `ingress_deployment_config` has options for the router's deployment.

    Raises:
        ValueError: A wrong configuration; unknown keys are named with close matches.
    """
    if not isinstance(args, Mapping):
        args = {"llm_configs": args}
    check_keys(args, APP_KEYS, "args")
    given = args.get("llm_configs")
    if not isinstance(given, (list, tuple)) or not given:
        raise ValueError(f"args.llm_configs must be a list of at least one model, got {given!r}")
    if args.get("ingress_cls_config"):
        raise ValueError("args.ingress_cls_config is not supported, replicas are their own ingress; leave it out")
    configs = [_as_config(each) for each in given]
    names = [name for config in configs for name in (config.model_id, *config.model_loading_config.aliases)]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ValueError(f"each model needs names of its own, but {', '.join(map(repr, twice))} is given twice")
    ingress_options = args.get("ingress_deployment_config") or {}
    if len(configs) == 1:
        if ingress_options:
            raise ValueError(
                "args.ingress_deployment_config is for several models; with one, set its deployment_config instead"
            )
        return build_llm_deployment(configs[0])
    handles = {config.model_id: build_llm_deployment(config, is_ingress=False) for config in configs}
    aliases = {config.model_id: list(config.model_loading_config.aliases) for config in configs}
    router = serve.deployment(serve.ingress()(ModelRouter), **router_options(configs, ingress_options))
    return router.bind(handles, aliases, max(config.options.settings.max_body_bytes for config in configs))


def _as_config(given: Any) -> LLMConfig:
    if isinstance(given, LLMConfig):
        return given
    if isinstance(given, str):
        return LLMConfig.from_file(given)
    return LLMConfig.from_dict(given)
