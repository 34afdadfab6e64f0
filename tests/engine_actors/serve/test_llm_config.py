"""LLMConfig and build_openai_app: ray.serve.llm's shape is taken, everything wrong is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from engine_actors.serve import LLMConfig, build_openai_app, resources
from engine_actors.serve.options import sort_options
from engine_actors.serve.resources import deployment_options, replica_resources

LOADING = {"model_id": "org/model-1.5", "model_source": "some/folder"}


@pytest.fixture(autouse=True)
def _no_cluster(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is chosen by the cluster's nodes is chosen as before joining one, also when other tests have started Ray."""
    monkeypatch.setattr(resources.ray, "is_initialized", lambda: False)


def config(**fields: Any) -> LLMConfig:
    return LLMConfig.from_dict({"model_loading_config": LOADING, **fields})


def options(**fields: Any) -> dict[str, Any]:
    made = config(**fields)
    return deployment_options(made, replica_resources(made))


def test_the_yaml_of_ray_serve_llm_is_taken(tmp_path: Path) -> None:
    path = tmp_path / "model.yaml"
    path.write_text(
        """
        model_loading_config:
          model_id: qwen
          model_source: Qwen/Qwen2.5-7B-Instruct
        accelerator_type: A10G
        engine_kwargs: {tensor_parallel_size: 2, max_model_len: 8192, gpu_memory_utilization: 0.9, dtype: bfloat16}
        deployment_config:
          autoscaling_config: {min_replicas: 1, max_replicas: 4}
          max_ongoing_requests: 512
        runtime_env: {env_vars: {HF_TOKEN: x}}
        lora_config: null
        """
    )
    made = LLMConfig.from_file(path)
    assert (made.model_id, made.model_source) == ("qwen", "Qwen/Qwen2.5-7B-Instruct")
    resources = replica_resources(made)
    assert resources.device == "cuda"
    assert resources.bundles == [{"GPU": 2.0, "accelerator_type:A10G": 0.001, "CPU": 1.0}]
    assert resources.engine_options() == {"device": "cuda", "num_gpus_per_worker": 1.0}
    built = deployment_options(made, resources)
    assert built["autoscaling_config"] == {"min_replicas": 1, "max_replicas": 4, "target_ongoing_requests": 256}
    assert built["max_ongoing_requests"] == 512
    assert built["ray_actor_options"]["runtime_env"]["env_vars"]["HF_TOKEN"] == "x"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"model_loading_confg": {}}, "did you mean 'model_loading_config'"),
        ({"engine_kwargs": {"max_num_seq": 3}}, "did you mean 'max_num_seqs'"),
        ({"engine_kwargs": {"model": "x"}}, "set model_loading_config.model_source"),
        ({"engine_kwargs": {"served_model_name": "x"}}, "set model_loading_config.model_id"),
        (
            {"engine_kwargs": {"tensor_parallel_size": 0}},
            "tensor_parallel_size must be an integer of at least 1, got 0",
        ),
        ({"engine_kwargs": {"max_n": "many"}}, "max_n must be of type int, got 'many'"),
        ({"engine_kwargs": {"chat_template": "no/such/file.jinja"}}, "no Jinja text, and no file"),
        ({"deployment_config": {"num_replica": 2}}, "did you mean 'num_replicas'"),
        ({"deployment_config": {"placement_group_bundles": []}}, "set placement_group_config"),
        ({"placement_group_config": {"bundle_per_worker": {"CPU": 1}, "bundles": []}}, "either bundle_per_worker"),
        ({"placement_group_config": {"bundles": [{"CPU": 0}]}}, "positive amounts"),
        ({"placement_group_config": {"bundles": [{"CPU": 1}], "strategy": "TIGHT"}}, "strategy must be one of"),
        ({"accelerator_config": {"kind": "tpu"}}, "kind must be one of ('cpu', 'gpu'), got 'tpu'"),
        ({"accelerator_config": {"kind": "cpu"}, "accelerator_type": "L4"}, "conflicts"),
        ({"llm_engine": "vLLM"}, "llm_engine must be 'EngineActors'"),
        ({"lora_config": {"dynamic_lora_loading_path": "s3://x"}}, "lora_config is not supported"),
        ({"experimental_configs": {"num_ingress_replicas": 2}}, "experimental_configs is not supported"),
        ({"model_loading_config": {"model_source": "x"}}, "model_id is missing"),
        ({"model_loading_config": {"model_id": "x", "model_source": "s3://bucket/x"}}, "remote storage is not read"),
        ({"model_loading_config": {"model_id": "x", "aliases": "y"}}, "aliases must be a list"),
    ],
)
def test_what_is_wrong_is_named(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # the text is compared below
        config(**fields).options  # noqa: B018
    assert text in str(caught.value)


def test_engine_values_are_checked_where_the_model_is(random_llama_dir: Path) -> None:
    loading = {"model_id": "tiny", "model_source": str(random_llama_dir)}
    with pytest.raises(ValueError, match="block_size must be a power of two"):
        config(model_loading_config=loading, engine_kwargs={"block_size": 3})


def test_cpu_is_the_default_without_gpus() -> None:
    resources = replica_resources(config(engine_kwargs={"tensor_parallel_size": 2, "pipeline_parallel_size": 3}))
    assert resources.device == "cpu"
    # A bundle for each stage keeps its TP ranks on one node.
    assert resources.bundles == [{"CPU": 2.0}] * 3
    assert resources.strategy == "PACK"
    assert resources.actor == {"CPU": 0.0}


def test_bundles_for_each_worker_and_a_strategy() -> None:
    placement = {"bundle_per_worker": {"CPU": 4, "special": 1}, "strategy": "SPREAD"}
    resources = replica_resources(
        config(
            engine_kwargs={"tensor_parallel_size": 2},
            placement_group_config=placement,
            deployment_config={"ray_actor_options": {"num_cpus": 0.5}},
        )
    )
    assert resources.bundles == [{"CPU": 4.5, "special": 1}, {"CPU": 4, "special": 1}]
    assert resources.strategy == "SPREAD"
    assert resources.engine_options() == {"device": "cpu", "num_cpus_per_worker": 4.0}


def test_bundles_too_few_for_the_workers() -> None:
    made = config(
        engine_kwargs={"tensor_parallel_size": 4}, placement_group_config={"bundles": [{"GPU": 2}, {"GPU": 1}]}
    )
    with pytest.raises(ValueError, match="room for 3 workers with 1 GPU each"):
        replica_resources(made)


def test_defaults_push_back_scale_and_drain() -> None:
    built = options(engine_kwargs={"max_num_seqs": 128})
    assert built["name"] == "LLMServer:org--model-1_5"
    assert built["max_ongoing_requests"] == built["max_queued_requests"] == 2048
    assert built["backpressure_config"] == {"status_code": 503, "retry_after_s": 5}
    assert built["graceful_shutdown_timeout_s"] == 600.0
    assert "autoscaling_config" not in built
    auto = options(engine_kwargs={"max_num_seqs": 128}, deployment_config={"num_replicas": "auto"})
    assert auto["autoscaling_config"] == {"target_ongoing_requests": 128}


def test_server_settings_are_told_from_engine_options() -> None:
    sorted_out = sort_options(
        {
            "api_key": "secret",
            "max_num_seqs": 8,
            "max_logprobs": 5,
            "max_num_queued_reqs": 3,
            "enable_auto_tool_choice": False,
            "sse_keep_alive_interval": 0,
            "chat_template": "{{ messages }}",
        }
    )
    assert sorted_out.engine == {"max_num_seqs": 8, "max_logprobs": 5, "max_num_queued_requests": 3}
    assert sorted_out.settings.api_keys == ("secret",)
    assert (sorted_out.settings.max_logprobs, sorted_out.settings.tool_call_parser) == (5, "none")
    assert sorted_out.chat_template == "{{ messages }}"


def test_secrets_are_not_shown() -> None:
    with pytest.raises(ValueError, match="got a secret"):
        sort_options({"api_key": {"key": "hidden"}})


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ({"llm_config": []}, "did you mean 'llm_configs'"),
        ({"llm_configs": []}, "at least one model"),
        ({"llm_configs": [{"model_loading_config": LOADING}] * 2}, "'org/model-1.5' is given twice"),
        ({"llm_configs": ["no/such.yaml"]}, "cannot be read"),
        ({"llm_configs": [{"model_loading_config": LOADING}], "ingress_deployment_config": {"num_replicas": 2}},
         "is for several models"),
    ],
)  # fmt: skip
def test_an_application_that_cannot_be_built(args: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as caught:  # the text is compared below
        build_openai_app(args)
    assert text in str(caught.value)


def test_one_model_is_its_own_ingress_and_several_have_a_router() -> None:
    one = build_openai_app({"llm_configs": [{"model_loading_config": LOADING}]})
    assert one._bound_deployment.name == "LLMServer:org--model-1_5"
    other = {"model_loading_config": {"model_id": "other", "aliases": ["second"]}}
    several = build_openai_app({"llm_configs": [{"model_loading_config": LOADING}, other]})
    assert several._bound_deployment.name == "ModelRouter"


def test_serves_own_schema_takes_the_documented_yaml() -> None:
    from ray.serve.schema import ServeDeploySchema

    import engine_actors.serve.builder as builder

    text = "\n".join((builder.__doc__ or "").splitlines()[2:])
    schema = ServeDeploySchema.model_validate(yaml.safe_load(text))
    assert schema.applications[0].import_path == "engine_actors.serve:build_openai_app"
    build_openai_app(schema.applications[0].args)
