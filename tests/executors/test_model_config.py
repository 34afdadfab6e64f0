"""From a model directory to facts: dtype, length, EOS ids, and refusals that name the value and what is allowed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from executors.config import ModelConfig
from executors.model_config import (
    ModelConfigError,
    model_length_limit,
    resolve_model_config,
    resolve_on_worker,
    with_resolution,
)
from executors.models.registry import supported_architectures
from tests.executors.paged_runner import resolve
from tests.executors.test_models_llama import SMALL, save_random_model


def write_config(path: Path, config: Any = None, **changes: Any) -> Path:
    """A directory with just a config.json."""
    config = config or transformers.LlamaConfig(**SMALL, architectures=["LlamaForCausalLM"])
    config.save_pretrained(path)
    values = json.loads((path / "config.json").read_text())
    values.update(changes)
    (path / "config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
    return path


def test_facts_of_a_saved_model(tmp_path: Path) -> None:
    config = transformers.Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=9, max_window_layers=2, eos_token_id=7
    )
    save_random_model(config, tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [11, 5, 7]}')
    resolved = resolve(tmp_path)
    assert resolved.architecture == "Qwen2ForCausalLM"
    assert resolved.dtype is torch.float32
    assert (resolved.max_model_len, resolved.auto_fit_max_model_len) == (256, False)
    assert (resolved.vocab_size, resolved.hidden_size, resolved.num_layers) == (97, 48, 3)
    assert (resolved.num_heads, resolved.num_kv_heads, resolved.head_size) == (6, 2, 8)
    assert resolved.eos_token_ids == (5, 7, 11)
    assert resolved.sliding_windows == (None, None, 9)
    assert resolved.tie_word_embeddings is False
    assert resolved.hf_config.model_type == "qwen2"
    assert resolved.model_dir == tmp_path


def test_no_eos_anywhere_is_allowed(tmp_path: Path) -> None:
    assert resolve(write_config(tmp_path, eos_token_id=None)).eos_token_ids == (2,)  # Llama's own default
    config = transformers.Qwen3Config(**SMALL, architectures=["Qwen3ForCausalLM"])
    assert resolve(write_config(tmp_path, config)).eos_token_ids == ()


@pytest.mark.parametrize("asked", [1, 255, 256])
def test_max_model_len_up_to_the_limit(asked: int, tmp_path: Path) -> None:
    assert resolve(write_config(tmp_path), max_model_len=asked).max_model_len == asked


def test_max_model_len_over_the_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match="max_model_len 257 is larger than the 256 tokens"):
        resolve(write_config(tmp_path), max_model_len=257)


def test_max_model_len_minus_one_marks_auto_fit(tmp_path: Path) -> None:
    resolved = resolve(write_config(tmp_path), max_model_len=-1)
    assert (resolved.max_model_len, resolved.auto_fit_max_model_len) == (256, True)


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_type": "default"}, 256),
        ({"rope_type": "linear", "factor": 4.0}, 1024),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, 256),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}, 512),
    ],
)
def test_length_limit_considers_rope_scaling(rope: dict[str, Any], limit: int) -> None:
    config = transformers.LlamaConfig(**SMALL, rope_parameters={"rope_theta": 10000.0, **rope})
    assert model_length_limit(config) == limit


def test_old_style_rope_scaling_is_understood(tmp_path: Path) -> None:
    write_config(tmp_path, rope_parameters=None, rope_theta=500.0, rope_scaling={"type": "linear", "factor": 2.0})
    resolved = resolve(tmp_path)
    rope = resolved.decoder.ropes["default"]
    assert (rope.rope_type, rope.theta, resolved.max_model_len) == ("linear", 500.0, 512)


def test_unknown_rope_type_is_refused_by_name(tmp_path: Path) -> None:
    write_config(tmp_path, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ModelConfigError, match=r"rope_type must be one of .*'llama3'.* got 'dynamic'"):
        resolve(tmp_path)


def test_auto_dtype_is_the_configs(tmp_path: Path) -> None:
    assert resolve(write_config(tmp_path, dtype="bfloat16")).dtype is torch.bfloat16
    assert resolve(write_config(tmp_path, dtype=None, torch_dtype="float16")).dtype is torch.float16
    assert resolve(write_config(tmp_path, dtype="bfloat16"), dtype="float32").dtype is torch.float32


def test_auto_dtype_without_one_in_the_config_is_the_weights(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL)).bfloat16()
    model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    del values["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert resolve(tmp_path).dtype is torch.bfloat16


def test_unsupported_dtype_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"dtype must be one of .*'bfloat16'.* got 'int4'"):
        resolve(write_config(tmp_path), dtype="int4")
    with pytest.raises(ModelConfigError, match=r"dtype 'float64' .* allowed are float32, bfloat16, float16"):
        resolve(write_config(tmp_path, dtype="float64"))


def test_dtype_the_device_cannot_compute_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> torch.Tensor:
        raise RuntimeError("\"addmm_impl_cpu_\" not implemented for 'Half'")

    monkeypatch.setattr(torch.nn.functional, "linear", refuse)
    with pytest.raises(ModelConfigError, match=r"dtype 'float16' cannot be computed on device 'cpu'.*not implemented"):
        resolve(write_config(tmp_path), dtype="float16")
    assert resolve(tmp_path, dtype="float32").dtype is torch.float32


def test_overrides_reach_nested_values(tmp_path: Path) -> None:
    overrides = {"rope_parameters": {"rope_theta": 7.0}, "max_position_embeddings": 64}
    resolved = resolve(write_config(tmp_path), hf_overrides=overrides)
    assert resolved.decoder.ropes["default"].theta == 7.0
    assert resolved.max_model_len == 64


def test_missing_directory_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"model directory '.*/nowhere/at/all' does not exist"):
        resolve_model_config(ModelConfig(str(tmp_path / "nowhere" / "at" / "all")))


def test_hub_id_without_a_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelConfigError, match="'nobody/nothing' is neither a local directory nor could it be fetched"):
        resolve_model_config(ModelConfig("nobody/nothing"))


def test_file_instead_of_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelConfigError, match="is a file"):
        resolve(tmp_path / "file")


def test_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelConfigError, match=r"holds no config\.json"):
        resolve(tmp_path)


@pytest.mark.parametrize("text", ["{", "[1]"])
def test_broken_config_is_refused_with_its_path(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError, match=r"config\.json' (cannot be read|must hold a JSON object)"):
        resolve(tmp_path)


def test_unsupported_architecture_is_refused_with_the_supported_ones(tmp_path: Path) -> None:
    write_config(tmp_path, transformers.GPT2Config(architectures=["GPT2LMHeadModel"]))
    with pytest.raises(ModelConfigError, match=r"architecture 'GPT2LMHeadModel' .*not supported.*LlamaForCausalLM"):
        resolve(tmp_path)
    assert {"LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma3ForCausalLM"} <= {
        *supported_architectures()
    }


def test_unknown_model_type_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, model_type="flying-carpet")
    with pytest.raises(ModelConfigError, match=r"unknown model_type 'flying-carpet'.*supported are .*LlamaForCausalLM"):
        resolve(tmp_path)


def test_quantised_model_is_refused(tmp_path: Path) -> None:
    write_config(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelConfigError, match="is quantised \\('gptq'\\)"):
        resolve(tmp_path)


def test_impossible_sizes_are_refused(tmp_path: Path) -> None:
    write_config(tmp_path, num_key_value_heads=4)
    with pytest.raises(
        ModelConfigError, match="num_attention_heads must be a multiple of num_key_value_heads, got 6 a"
    ):
        resolve(tmp_path)
    write_config(tmp_path, hidden_act="relu")
    with pytest.raises(ModelConfigError, match=r"hidden activation must be one of .*'silu'.* got 'relu'"):
        resolve(tmp_path)


def test_unknown_layer_type_is_refused(tmp_path: Path) -> None:
    config = transformers.Qwen3Config(**SMALL, architectures=["Qwen3ForCausalLM"])
    write_config(tmp_path, config, layer_types=["full_attention", "chunked_attention", "full_attention"])
    with pytest.raises(ModelConfigError, match="got 'chunked_attention'"):
        resolve(tmp_path)


def test_a_worker_takes_what_the_front_end_has_read(tmp_path: Path) -> None:
    resolved = resolve_model_config(ModelConfig(str(write_config(tmp_path))))
    (tmp_path / "config.json").unlink()
    assert resolve_on_worker(with_resolution(resolved), "cpu") == replace(resolved, hf_config=None)


def test_a_worker_reads_for_itself_what_holds_for_another_config_or_device(tmp_path: Path) -> None:
    config = with_resolution(resolve_model_config(ModelConfig(str(write_config(tmp_path)))))
    (tmp_path / "config.json").unlink()
    for other, device in ((replace(config, max_model_len=16), "cpu"), (config, "cuda")):
        with pytest.raises(ModelConfigError, match=r"config\.json"):
            resolve_on_worker(other, device)
