"""Safetensors loading: every head combination, shards, dtypes, and errors that name tensor and file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from executors.loader import WeightLoadError, load_model
from executors.loader.safetensors_file import SafetensorsFile
from executors.parallel_state import ParallelState
from tests.executors.paged_runner import PagedRequest, PagedRunner, load, random_tokens, resolve
from tests.executors.test_models_llama import SMALL, reference_logits, save_random_model

TOKENS = random_tokens(12, 97, seed=2)
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Tensors = dict[str, torch.Tensor]


def save(path: Path, *, tied: bool = False, **changes: Any) -> Any:
    return save_random_model(transformers.LlamaConfig(**{**SMALL, "tie_word_embeddings": tied, **changes}), path)


def edit(path: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path / "model.safetensors")


def logits_of(path: Path, **settings: object) -> torch.Tensor:
    (logits,) = PagedRunner(load(path, **settings)).run_schedule([PagedRequest(TOKENS)], [(len(TOKENS),)])
    return logits


def test_tied_without_stored_head(tmp_path: Path) -> None:
    reference = save(tmp_path, tied=True)
    assert HEAD not in load_file(tmp_path / "model.safetensors")
    model = load(tmp_path)
    assert model.lm_head.weight is model.embed_tokens.weight
    torch.testing.assert_close(logits_of(tmp_path), reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


def test_tied_with_equal_stored_head_uses_one_weight(tmp_path: Path) -> None:
    reference = save(tmp_path, tied=True)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING].clone()}))
    model = load(tmp_path)
    assert model.lm_head.weight is model.embed_tokens.weight
    torch.testing.assert_close(logits_of(tmp_path), reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


def test_tied_with_different_stored_head_is_untied_as_in_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(tmp_path, tied=True)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors[EMBEDDING] * -2}))
    reference = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    torch.testing.assert_close(logits_of(tmp_path), reference_logits(reference, TOKENS), atol=1e-4, rtol=0)
    assert "holds different values for them: using both, untied" in caplog.text


def test_tied_with_only_the_head_stored(tmp_path: Path) -> None:
    reference = save(tmp_path, tied=True)
    edit(tmp_path, lambda tensors: tensors.update({HEAD: tensors.pop(EMBEDDING)}))
    torch.testing.assert_close(logits_of(tmp_path), reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


def test_untied_without_head_is_an_error(tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop(HEAD))
    with pytest.raises(WeightLoadError, match=r"'lm_head\.weight' missing in .*model\.safetensors"):
        load(tmp_path)


def test_tied_head_on_its_own_stage_is_loaded_from_the_embedding(tmp_path: Path) -> None:
    save(tmp_path, tied=True)
    last = load(tmp_path, ParallelState(1, pp_size=2))
    assert last.embed_tokens is None
    torch.testing.assert_close(last.lm_head.weight.data, load_file(tmp_path / "model.safetensors")[EMBEDDING])


def test_sharded_checkpoint_with_index(tmp_path: Path) -> None:
    reference = save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    torch.testing.assert_close(logits_of(tmp_path), reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


def test_only_the_needed_slice_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    read: dict[str, tuple[int, ...]] = {}

    def recording(self: SafetensorsFile, name: str) -> Any:
        tensor = original(self, name)

        class Recorder:
            file, shape, dtype = tensor.file, tensor.shape, tensor.dtype

            def __getitem__(self, index: Any) -> torch.Tensor:
                part = tensor[index]
                read[name] = tuple(part.shape)
                return part

        return Recorder()

    original = SafetensorsFile.tensor
    monkeypatch.setattr(SafetensorsFile, "tensor", recording)
    load(tmp_path, ParallelState(1, tp_size=2))
    layer = "model.layers.0."
    assert read[layer + "self_attn.q_proj.weight"] == (24, 48)
    assert read[layer + "self_attn.o_proj.weight"] == (48, 24)
    assert read[layer + "mlp.down_proj.weight"] == (48, 40)
    assert read[HEAD] == (48, 48)
    assert read["model.norm.weight"] == (48,)


def test_pipeline_stage_reads_only_its_layers(tmp_path: Path) -> None:
    save(tmp_path)
    first, last = (load(tmp_path, ParallelState(rank, pp_size=2)) for rank in range(2))
    assert set(first.kv_cache_specs(16, 4)) | set(last.kv_cache_specs(16, 4)) == {
        f"model.layers.{i}.self_attn.attn" for i in range(3)
    }
    assert not any(name.startswith(("lm_head", "model.norm")) for name in first.weight_targets())
    assert EMBEDDING not in last.weight_targets()


@pytest.mark.parametrize("stage", [0, 1])
def test_every_stage_knows_the_other_stages_tensors_but_no_strangers(stage: int, tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.3.mlp.up_proj.weight": torch.zeros(1)}))
    with pytest.raises(WeightLoadError, match=r"unexpected tensor 'model\.layers\.3\.mlp\.up_proj\.weight'"):
        load(tmp_path, ParallelState(stage, pp_size=2))


def test_dtype_is_converted(tmp_path: Path) -> None:
    save(tmp_path)
    model = load(tmp_path, dtype="bfloat16")
    stored = load_file(tmp_path / "model.safetensors")["model.norm.weight"]
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert torch.equal(model.norm.weight.data, stored.bfloat16())


def test_missing_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(WeightLoadError, match=r"'model\.layers\.1\.mlp\.up_proj\.weight' missing in .*model\.safetens"):
        load(tmp_path)


def test_many_missing_tensors_are_counted(tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, lambda tensors: [tensors.pop(name) for name in list(tensors) if ".1." in name])
    with pytest.raises(WeightLoadError, match="and 4 more missing in"):
        load(tmp_path)


def test_unexpected_tensor_is_named_with_its_file(tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.1.mlp.surprise": torch.zeros(2)}))
    with pytest.raises(WeightLoadError, match=r"unexpected tensor 'model\.layers\.1\.mlp\.surprise' in .*model\.safet"):
        load(tmp_path)


def test_unexpected_bias_is_refused(tmp_path: Path) -> None:
    save(tmp_path, attention_bias=True)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "attention_bias": False}))
    with pytest.raises(WeightLoadError, match=r"unexpected tensor '.*_proj\.bias'"):
        load(tmp_path)


def test_misshapen_tensor_is_named_with_both_shapes(tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.k_proj.weight": torch.zeros(12, 48)}))
    with pytest.raises(
        WeightLoadError, match=r"k_proj\.weight' in .*safetensors has shape \[12, 48\].*needs \[16, 48\]"
    ):
        load(tmp_path)


def test_quantised_tensor_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    with pytest.raises(WeightLoadError, match=r"'model\.norm\.weight' in .* has dtype torch\.int8"):
        load(tmp_path)


def test_truncated_file_names_the_first_tensor_cut_off(tmp_path: Path) -> None:
    save(tmp_path)
    path = tmp_path / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(
        WeightLoadError, match=r"model\.safetensors is truncated: tensor '.+' ends at byte \d+, the file"
    ):
        load(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a safetensors file"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is not a safetensors file"),
        ((500).to_bytes(8, "little") + b"{", "is truncated: 9 bytes, within its header"),
        ((4).to_bytes(8, "little") + b"[[]]", "unreadable header"),
    ],
)
def test_files_that_are_not_safetensors_are_named(content: bytes, message: str, tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(WeightLoadError, match=rf"model\.safetensors.*{message}"):
        load(tmp_path)


def test_missing_shard_is_named_with_a_tensor_it_should_hold(tmp_path: Path) -> None:
    reference = save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(WeightLoadError, match=rf"{shard.name} is missing; .*index\.json says that it holds tensor 'm"):
        load(tmp_path)


def test_index_that_lies_about_a_shard_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    index = {"weight_map": {HEAD: "model.safetensors", "model.extra": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WeightLoadError, match=r"'model\.extra' is missing in .*model\.safetensors, where"):
        load(tmp_path)


def test_rotary_frequencies_of_old_checkpoints_are_ignored(tmp_path: Path) -> None:
    reference = save(tmp_path)
    edit(tmp_path, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}))
    torch.testing.assert_close(logits_of(tmp_path), reference_logits(reference, TOKENS), atol=1e-4, rtol=0)


def test_pickled_weights_only_are_refused_with_what_to_do(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(
        WeightLoadError, match=r"no \.safetensors files in .*pytorch_model\.bin.*converted to safetensors"
    ):
        load(tmp_path)


def test_empty_directory_is_refused(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(WeightLoadError, match=r"no \.safetensors files in"):
        load(tmp_path)


def test_dummy_weights_are_deterministic_and_alike_in_every_layout(tmp_path: Path) -> None:
    save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    whole, again = (load(tmp_path, load_format="dummy", seed=3).state_dict() for _ in range(2))
    other = load(tmp_path, load_format="dummy", seed=4).state_dict()
    assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert not torch.equal(whole["lm_head.weight"], other["lm_head.weight"])
    assert torch.equal(whole["norm.weight"], torch.ones(48))
    shard = load(tmp_path, ParallelState(1, tp_size=2), load_format="dummy", seed=3).state_dict()
    down = "layers.0.mlp.down_proj.weight"
    assert torch.equal(shard[down], whole[down][:, 40:])


def test_progress_bar_is_on_rank_0_only_and_can_be_disabled(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    save(tmp_path)
    capsys.readouterr()
    shown = []
    for rank, show in ((0, True), (0, False), (1, True)):
        load_model(resolve(tmp_path), ParallelState(rank, tp_size=2), "cpu", show_progress=show)
        shown.append("Loading weights" in capsys.readouterr().err)
    assert shown == [True, False, False]
