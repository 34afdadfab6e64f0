"""A recorded decoder step: its logits against the float32 model, and their bits in every batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from executors.kernels import ops
from executors.kernels.decoder import decoder_of
from executors.kernels.library import NativeKernels
from executors.kernels.program import DecoderProgram
from executors.models.decoder import DecoderLM
from tests.executors.kernel_cases import kernels
from tests.executors.paged_runner import PagedRequest, PagedRunner, load, random_tokens

__all__ = ["kernels"]

VOCAB, BLOCK_SIZE, NUM_BLOCKS = 263, 16, 64
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": VOCAB, "max_position_embeddings": 512, "initializer_range": 0.1,
}  # fmt: skip
SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "gemma2": Gemma2Config(**SIZES, head_dim=16, sliding_window=20, layer_types=SLIDING, query_pre_attn_scalar=16),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=32, sliding_window=20, layer_types=SLIDING),
}


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model whose weights are bfloat16 numbers, so that float32 and bfloat16 models are the same function."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[request.param], dtype=torch.bfloat16)
    directory = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(directory)
    return directory


class ProgramRunner(PagedRunner):
    """A PagedRunner that computes with the program; logits are those of every token."""

    def __init__(self, model: DecoderLM, kernels: NativeKernels) -> None:
        super().__init__(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
        decoder = decoder_of(model, kernels)
        params = decoder.layers[0].params
        shape = ops.kv_cache_shape(NUM_BLOCKS, BLOCK_SIZE, params.num_kv_heads, params.head_size)
        self.native_caches = {layer.name: torch.full(shape, 1e4).bfloat16() for layer in decoder.layers}
        self.program = DecoderProgram(kernels, decoder, max_num_tokens=256, max_num_samples=256)
        self.program.bind(self.native_caches, {layer.name: "all" for layer in decoder.layers})
        self.greedy: list[torch.Tensor] = []

    def step(self, batch, hidden_states=None):  # type: ignore[no-untyped-def]
        metadata = self.metadata(batch)
        metadata.prompt_lens = None
        ids, positions = self.inputs(batch)
        rows = torch.arange(len(ids))
        greedy, logits = self.program.run(ids, positions, {"all": metadata}, rows, want_logits=True)
        assert logits is not None
        assert torch.equal(greedy, logits.argmax(-1))
        start = 0
        for request, count in batch:
            request.logits += list(logits[start : start + count].clone())
            request.num_computed += count
            start += count
        return logits


CHUNKS = [[40, 0, 1], [1, 30, 1], [1, 1, 50], [29, 1, 1], [1, 20, 1]]


def requests_of_test() -> list[PagedRequest]:
    return [PagedRequest(random_tokens(sum(c[r] for c in CHUNKS), VOCAB, seed=r)) for r in range(3)]


def bfloat16_model(model_dir: Path) -> DecoderLM:
    model = load(model_dir, dtype="bfloat16")
    assert isinstance(model, DecoderLM)
    return model


def test_logits_are_as_near_to_float32_as_those_of_the_torch_bfloat16_model(
    kernels: NativeKernels, model_dir: Path
) -> None:
    exact = PagedRunner(load(model_dir, dtype="float32"), block_size=BLOCK_SIZE).run_schedule(
        requests_of_test(), CHUNKS
    )
    model = bfloat16_model(model_dir)
    torch_logits = PagedRunner(model, block_size=BLOCK_SIZE).run_schedule(requests_of_test(), CHUNKS)
    native_logits = ProgramRunner(model, kernels).run_schedule(requests_of_test(), CHUNKS)

    def error(logits: list[torch.Tensor]) -> float:
        return (torch.cat(logits).float() - torch.cat(exact)).square().mean().sqrt().item()

    assert error(native_logits) < 1.25 * error(torch_logits)
    assert error(native_logits) < 0.02 * torch.cat(exact).std().item()


def test_logits_have_the_same_bits_in_one_prefill_and_in_mixed_chunks(kernels: NativeKernels, model_dir: Path) -> None:
    model = bfloat16_model(model_dir)
    mixed = ProgramRunner(model, kernels).run_schedule(requests_of_test(), CHUNKS)
    for index, request in enumerate(requests_of_test()):
        alone = ProgramRunner(model, kernels).run_schedule([request], [[len(request.tokens)]])
        assert torch.equal(alone[0], mixed[index])


def test_only_sampled_rows_leave_the_last_layer(kernels: NativeKernels, model_dir: Path) -> None:
    model = bfloat16_model(model_dir)
    runner, full = ProgramRunner(model, kernels), requests_of_test()
    expected = runner.run_schedule(full, [[len(request.tokens) for request in full]])
    requests = requests_of_test()
    batch = [(request, len(request.tokens)) for request in requests]
    metadata = runner.metadata(batch)
    metadata.prompt_lens = None
    ids, positions = runner.inputs(batch)
    last = metadata.query_start_loc[1:].long() - 1
    greedy, logits = runner.program.run(ids, positions, {"all": metadata}, last, want_logits=True)
    assert logits is not None
    assert torch.equal(logits, torch.stack([rows[-1] for rows in expected]))
    assert torch.equal(greedy, logits.argmax(-1))


def test_inputs_outside_the_model_are_refused(kernels: NativeKernels, model_dir: Path) -> None:
    runner = ProgramRunner(bfloat16_model(model_dir), kernels)
    request = PagedRequest(random_tokens(5, VOCAB, seed=0))
    metadata = runner.metadata([(request, 5)])
    ids, positions = runner.inputs([(request, 5)])
    for wrong_ids, wrong_positions, rows, message in (
        (ids + VOCAB, positions, torch.tensor([4]), "token id lies outside the vocabulary"),
        (ids, positions + 10_000, torch.tensor([4]), "position lies outside the rotary table"),
        (ids, positions, torch.tensor([4, 3]), "sample_rows are not ascending"),
        (ids, positions, torch.tensor([5]), "sample_rows are not ascending"),
    ):
        with pytest.raises(ValueError, match=message):
            runner.program.run(wrong_ids, wrong_positions, {"all": metadata}, rows)
    with pytest.raises(ValueError, match="a step may have 256 tokens"):
        runner.program.run(torch.zeros(257, dtype=torch.int64), torch.arange(257), {"all": metadata}, torch.tensor([0]))
