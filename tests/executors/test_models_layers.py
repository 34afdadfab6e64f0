"""The building blocks alone: norms, rotation, the seams where kernels plug in, and misuse that is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from executors.layers.linear_method import TorchLinearMethod
from executors.layers.ops import TorchOps
from executors.layers.rotary import RopeSpec, RotaryTable
from executors.layers.weights import WeightLoadError
from executors.loader import load_model
from executors.models.registry import build_model
from executors.parallel_state import ParallelState
from tests.executors.paged_runner import PagedRequest, PagedRunner, load, random_tokens, resolve
from tests.executors.test_models_llama import SMALL, reference_logits, save_random_model

OPS = TorchOps()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_rounds_like_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, weight = torch.randn(5, 48).to(dtype), torch.randn(5, 48).to(dtype), torch.randn(48).to(dtype)
    llama = transformers.models.llama.modeling_llama.LlamaRMSNorm(48, eps=1e-5)
    gemma = transformers.models.gemma3.modeling_gemma3.Gemma3RMSNorm(48, eps=1e-5)
    for reference, unit_offset in ((llama, False), (gemma, True)):
        reference.weight.data = weight
        assert torch.equal(OPS.rms_norm(x, weight, 1e-5, unit_offset), reference(x))
        normed, total = OPS.add_rms_norm(x, residual, weight, 1e-5, unit_offset)
        assert torch.equal(total, x + residual)
        assert torch.equal(normed, reference(x + residual))


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "linear", "factor": 3.0},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 8192},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096},
        {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 16.0,
         "beta_slow": 2.0, "mscale": 1.0, "mscale_all_dim": 0.7, "truncate": False},
        {"rope_type": "yarn", "factor": 2.0, "attention_factor": 1.25},
    ],
)  # fmt: skip
def test_rope_frequencies_match_transformers(parameters: dict[str, object]) -> None:
    parameters = {"rope_theta": 500000.0, **parameters}
    config = transformers.LlamaConfig(
        hidden_size=512, num_attention_heads=4, max_position_embeddings=16384, rope_parameters=dict(parameters)
    )
    expected, factor = ROPE_INIT_FUNCTIONS[str(parameters["rope_type"])](config, "cpu")
    ours, our_factor = RopeSpec.from_config(config.rope_parameters, 128, 16384).inverse_frequencies()
    torch.testing.assert_close(ours, expected, rtol=1e-6, atol=0)
    assert our_factor == pytest.approx(factor)


def test_partial_rotation_leaves_the_rest_of_the_head() -> None:
    spec = RopeSpec.from_config({"rope_theta": 100.0, "partial_rotary_factor": 0.5}, 16, 64)
    assert spec.rotary_size == 8
    cos, sin = RotaryTable(spec, 64, torch.float32, torch.device("cpu"))(torch.tensor([0, 3]))
    head = torch.randn(2, 1, 16)
    rotated, _ = OPS.rotary(head, head, cos, sin)
    assert torch.equal(rotated[..., 8:], head[..., 8:])
    torch.testing.assert_close(rotated[0], head[0])
    # Element i turns with element i + 4, by position × theta^(-2 i / 8).
    angle = 3 * 100.0 ** (-2 / 8)
    expected = head[1, 0, 1] * math.cos(angle) - head[1, 0, 5] * math.sin(angle)
    torch.testing.assert_close(rotated[1, 0, 1], expected)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "longrope", "rope_theta": 1e4}, "rope_type must be one of .* got 'longrope'"),
        ({"rope_type": "linear", "rope_theta": 1e4}, "rope_type 'linear' needs a positive 'factor', got None"),
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0}, "'llama3' needs a positive 'low_freq_factor'"),
        ({"rope_theta": 0}, "rope_theta must be a positive number, got 0"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.2}, "rotates 3 elements; an even number from 2 to 16"),
    ],
)
def test_wrong_rope_parameters_are_refused(parameters: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RopeSpec.from_config(parameters, 16, 64)


class PackingMethod(TorchLinearMethod):
    """Stores weights transposed, elsewhere, as a packed kernel would."""

    def prepare(self, layer: nn.Module) -> None:
        assert not hasattr(layer, "packed"), "prepared twice"
        layer.packed = layer.weight.data.t().contiguous()
        del layer.weight

    def apply(self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        out = x @ layer.packed
        return out if bias is None else out + bias


@pytest.mark.parametrize("tied", [False, True])
def test_a_linear_method_may_replace_the_weight_storage_of_every_linear(tied: bool, tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**{**SMALL, "attention_bias": True, "tie_word_embeddings": tied})
    reference = save_random_model(config, tmp_path)
    model = load_model(resolve(tmp_path), ParallelState(), "cpu", linear_method=PackingMethod(), show_progress=False)
    assert not any(name.endswith("_proj.weight") for name in model.state_dict())
    request = PagedRequest(random_tokens(10, 97, seed=0))
    (logits,) = PagedRunner(model).run_schedule([request], [(9,), (1,)])
    torch.testing.assert_close(logits, reference_logits(reference, request.tokens), atol=1e-4, rtol=0)


def test_element_wise_ops_are_one_strategy(tmp_path: Path) -> None:
    calls: set[str] = set()

    class CountingOps(TorchOps):
        def __getattribute__(self, name: str) -> object:
            if not name.startswith("__"):
                calls.add(name)
            return super().__getattribute__(name)

    save_random_model(transformers.LlamaConfig(**SMALL), tmp_path)
    model = load_model(resolve(tmp_path), ParallelState(), "cpu", ops=CountingOps(), show_progress=False)
    PagedRunner(model).run_schedule([PagedRequest([1, 2, 3])], [(3,)])
    assert {"rms_norm", "add_rms_norm", "rotary", "gated_activation"} <= calls


def test_misuse_is_refused(tmp_path: Path) -> None:
    save_random_model(transformers.LlamaConfig(**SMALL), tmp_path)
    model = load(tmp_path)
    with pytest.raises(ValueError, match=r"no KV cache for layer 'model\.layers\.0\.self_attn\.attn'; got \['other'\]"):
        model.bind_kv_caches({"other": torch.zeros(1)})
    with pytest.raises(RuntimeError, match=r"layer 'model\.layers\.0\.self_attn\.attn' has no KV cache"):
        model(torch.tensor([1]), torch.tensor([0]), {})
    with pytest.raises(ValueError, match=r"activation must be one of .* got 'relu'"):
        OPS.gated_activation(torch.zeros(1, 4), "relu")
    first = load(tmp_path, ParallelState(0, pp_size=2))
    with pytest.raises(RuntimeError, match="only the last pipeline stage holds the LM head"):
        first.compute_logits(torch.zeros(1, 48))
    last = load(tmp_path, ParallelState(1, pp_size=2))
    with pytest.raises(ValueError, match="hidden_states of the previous stage are needed"):
        last(torch.tensor([1]), torch.tensor([0]), {})


def test_load_weights_takes_plain_tensors_and_refuses_repeats(tmp_path: Path) -> None:
    reference = save_random_model(transformers.LlamaConfig(**SMALL), tmp_path)
    model = build_model(resolve(tmp_path), ParallelState(), "cpu")
    weights = list(reference.state_dict().items())
    assert model.load_weights(weights) == set(model.weight_targets()) == {name for name, _ in weights}
    with pytest.raises(WeightLoadError, match=r"'model\.norm\.weight' is there twice"):
        model.load_weights([("model.norm.weight", torch.ones(48))] * 2)
