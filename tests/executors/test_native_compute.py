"""bfloat16 on the CPU through an executor: the kernels are used, and a request's bits do not depend on its company."""

from __future__ import annotations

import gc
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, PretrainedConfig, Qwen3Config

from executors.base import ExecutorFailedError
from executors.calibration import measure_input_importance
from executors.config import ModelConfig, ParallelConfig
from executors.kernels import ops, threads
from executors.kernels.library import NativeKernels
from executors.kernels.packed import PackedWeight
from executors.kernels.step import NativeCompute
from executors.kernels.threads import CpuClaim, cpus_of_worker
from executors.loader import load_model
from executors.logits_processors import LogitsProcessor
from executors.model_config import resolve_model_config
from executors.models.decoder import DecoderLM
from executors.parallel_state import ParallelState
from executors.uniproc import UniProcExecutor
from executors.worker import Worker
from kv.config import CacheConfig
from scheduler.config import SchedulerConfig
from scheduler.output import NewRequestData
from scheduler.sampling_params import SamplingParams
from tests.executors.kernel_cases import kernels_or_skip
from tests.executors.step_driver import GREEDY, Request, StepDriver

CACHE = CacheConfig(block_size=16, num_gpu_blocks_override=200)
SCHEDULER = SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=512, max_model_len=256)
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 260,
    "max_position_embeddings": 256, "initializer_range": 0.1,
}  # fmt: skip
FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, num_hidden_layers=3),
    "qwen3": Qwen3Config(**SIZES, num_hidden_layers=2, head_dim=32, tie_word_embeddings=True),
    "gemma3": Gemma3TextConfig(
        **SIZES, num_hidden_layers=6, head_dim=16, sliding_window=20,
        layer_types=["sliding_attention"] * 2 + ["full_attention"] + ["sliding_attention"] * 2 + ["full_attention"],
    ),
}  # fmt: skip
PROMPTS = [[(7 * i + 31 * n) % 250 + 3 for i in range(n)] for n in (1, 7, 16, 40, 100)]
NUM_TOKENS = 12


@pytest.fixture(scope="module", autouse=True)
def _kernels() -> Iterator[None]:
    kernels = kernels_or_skip()
    yield
    kernels.set_num_threads(1)


@pytest.fixture(scope="module", params=FAMILIES)
def model_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random("llama", tmp_path_factory.mktemp("llama"))


def save_random(family: str, directory: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(FAMILIES[family], dtype=torch.bfloat16).save_pretrained(directory)
    return directory


def make_executor(model: Path, *, cache: CacheConfig = CACHE, threads: int = 2, **settings: object) -> UniProcExecutor:
    return UniProcExecutor(
        ModelConfig(model=str(model), **{"dtype": "bfloat16", **settings}),  # type: ignore[arg-type]
        cache,
        SCHEDULER,
        ParallelConfig(distributed_executor_backend="uni", device="cpu", torch_num_threads=threads),
    )


def compute_of(executor: UniProcExecutor) -> str:
    return str(executor.collective_rpc("describe")[0]["compute"])


class Recorder(LogitsProcessor):
    """Keeps every row of logits, by the tokens before it."""

    seen: ClassVar[dict[tuple[int, ...], np.ndarray]] = {}

    def set_row(self, row: int, request: NewRequestData) -> bool:
        return bool((request.sampling_params.extra_args or {}).get("record"))

    def apply(self, logits: torch.Tensor, rows: np.ndarray, indices: np.ndarray) -> None:
        for row, index in zip(rows.tolist(), indices.tolist(), strict=True):
            context = tuple(self.batch.token_ids[row, : self.batch.num_tokens[row]].tolist())
            bits = logits[index].numpy().copy()
            assert np.array_equal(self.seen.setdefault(context, bits), bits)


@pytest.mark.parametrize(("eager", "quantization"), [(False, None), (True, None), (False, "int8"), (True, "int4")])
def test_logits_have_the_same_bits_alone_in_a_batch_chunked_resumed_and_behind_a_prefix(
    model_dir: Path, eager: bool, quantization: str | None
) -> None:
    """`Recorder` compares the logits of equal contexts, whichever way they came about."""
    name = f"{Recorder.__module__}.{Recorder.__qualname__}"
    executor = make_executor(model_dir, enforce_eager=eager, quantization=quantization, logits_processors=[name])
    try:
        expected = f"{quantization} weights, " if quantization else ""
        expected += "layer by layer" if eager else "whole steps"
        assert f", {expected}" in compute_of(executor)
        Recorder.seen.clear()
        recorded = SamplingParams(temperature=0, extra_args={"record": True})
        driver = StepDriver(executor, CACHE, SCHEDULER)
        tokens = driver.generate(PROMPTS, NUM_TOKENS, recorded)
        count = len(Recorder.seen)
        assert count == len(PROMPTS) * NUM_TOKENS
        assert driver.generate(PROMPTS, NUM_TOKENS, recorded, chunk=9) == tokens
        # A preempted request comes back with all of its tokens.
        assert driver.generate([PROMPTS[3] + tokens[3][:5]], NUM_TOKENS - 5, recorded) == [tokens[3][5:]]
        assert behind_prefix(driver, driver.requests[4], NUM_TOKENS, recorded) == tokens[4]
        assert [driver.generate([prompt], NUM_TOKENS, recorded)[0] for prompt in PROMPTS[:2]] == tokens[:2]
        assert len(Recorder.seen) == count
        # Greedy rows that need no logits take another way to the same tokens.
        assert driver.generate(PROMPTS[2:4], NUM_TOKENS) == tokens[2:4]
    finally:
        executor.shutdown()


def behind_prefix(driver: StepDriver, owner: Request, num_tokens: int, params: SamplingParams = GREEDY) -> list[int]:
    """What `owner`'s prompt generates on top of the full blocks that `owner` filled."""
    request = driver.add(owner.token_ids[: owner.num_prompt_tokens], params)
    share_prefix(request, owner, driver.block_size)
    while len(request.token_ids) - request.num_prompt_tokens < num_tokens:
        driver.run_step([request])
    return request.token_ids[request.num_prompt_tokens :]


def share_prefix(request: Request, owner: Request, block_size: int) -> None:
    hit = (request.num_prompt_tokens - 1) // block_size
    request.blocks = [list(table[:hit]) for table in owner.blocks]
    request.num_computed = hit * block_size


@pytest.mark.parametrize("eager", [False, True])
def test_a_request_may_read_a_prefix_that_another_of_the_same_step_writes(model_dir: Path, eager: bool) -> None:
    executor = make_executor(model_dir, enforce_eager=eager)
    try:
        driver = StepDriver(executor, CACHE, SCHEDULER)
        prompt, others = PROMPTS[4], [[*PROMPTS[4][:80], 5, 6, 7], PROMPTS[4][:66]]
        expected = [driver.generate([p], 6)[0] for p in (prompt, *others)]
        writer = driver.add(prompt)
        # Its blocks, before any step wrote to them; and a reader that comes before it in the batch.
        num_blocks = -(-len(prompt) // driver.block_size)
        for table in writer.blocks:
            table += range(driver.next_block, driver.next_block + num_blocks)
            driver.next_block += num_blocks
        readers = [driver.add(p) for p in others]
        for reader in readers:
            share_prefix(reader, writer, driver.block_size)
        batch = [readers[0], writer, readers[1]]
        for _ in range(6):
            driver.run_step(batch)
        generated = [r.token_ids[r.num_prompt_tokens :] for r in (writer, *readers)]
        assert generated == expected
    finally:
        executor.shutdown()


def test_logprobs_of_prompts_and_tokens_are_the_same_in_chunks_beside_plain_greedy_rows(llama_dir: Path) -> None:
    """Steps that want them take all rows through the last layer, or logits instead of greedy tokens."""
    executor = make_executor(llama_dir)
    params = SamplingParams(temperature=0, logprobs=2, prompt_logprobs=1)
    try:
        driver = StepDriver(executor, CACHE, SCHEDULER)
        expected = driver.generate(PROMPTS[3:], 4)
        seen = []
        for chunk in (1000, 7):
            requests = [driver.add(PROMPTS[3], params), driver.add(PROMPTS[4])]
            prompt_logprobs = []
            while len(requests[0].token_ids) < len(PROMPTS[3]) + 4:
                output = driver.dispatch(requests, chunk).result(60)
                assert output is not None
                pieces = [np.frombuffer(piece.tokens.logprobs, dtype="<f4") for piece in output.prompt_logprobs]
                prompt_logprobs += [piece.reshape(-1, 2) for piece in pieces]
                driver.finish(requests, chunk, output)
            seen.append(np.concatenate(prompt_logprobs))
            assert requests[0].token_ids[len(PROMPTS[3]) :] == expected[0]
    finally:
        executor.shutdown()
    assert seen[0].shape == (len(PROMPTS[3]) - 1, 2)
    assert np.array_equal(seen[0], seen[1])


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_layers_one_by_one_have_the_bits_of_whole_steps(model_dir: Path, quantization: str | None) -> None:
    tokens = []
    for eager in (False, True):
        executor = make_executor(model_dir, enforce_eager=eager, quantization=quantization)
        tokens.append(StepDriver(executor, CACHE, SCHEDULER).generate(PROMPTS, NUM_TOKENS))
        executor.shutdown()
    assert tokens[0] == tokens[1]


def test_window_and_full_layers_come_as_several_groups_through_one_program(tmp_path: Path) -> None:
    executor = make_executor(save_random("gemma3", tmp_path))
    try:
        driver = StepDriver(executor, CACHE, SCHEDULER)
        assert driver.num_groups == 3
        tokens = driver.generate(PROMPTS, 30)
    finally:
        executor.shutdown()
    reference = make_executor(tmp_path, attention_backend="torch")
    try:
        assert compute_of(reference) == "torch (attention_backend is 'torch')"
        expected = StepDriver(reference, CACHE, SCHEDULER).generate(PROMPTS, 30)
    finally:
        reference.shutdown()
    # Both round to bfloat16, in places; a near tie may fall either way, and then the texts part.
    same = [a == b for ours, theirs in zip(tokens, expected, strict=True) for a, b in zip(ours, theirs, strict=True)]
    assert np.mean(same) > 0.6


@pytest.mark.parametrize(("eager", "quantization"), [(False, None), (True, None), (True, "int8")])
def test_no_row_major_copy_of_the_weights_is_kept(llama_dir: Path, eager: bool, quantization: str | None) -> None:
    executor = make_executor(llama_dir, enforce_eager=eager, quantization=quantization)
    try:
        (sizes,) = executor.collective_rpc(
            lambda worker: {name: p.numel() for name, p in worker.model.named_parameters() if p.dim() > 1}
        )
    finally:
        executor.shutdown()
    assert not any(sizes.values())


@pytest.mark.parametrize("eager", [False, True])
def test_a_tied_head_and_its_embedding_are_one_packed_weight(tmp_path: Path, eager: bool) -> None:
    executor = make_executor(save_random("qwen3", tmp_path), enforce_eager=eager)

    def packed_vocabularies(worker: Worker) -> int:
        return sum(w.num_outputs == SIZES["vocab_size"] for w in gc.get_objects() if type(w) is PackedWeight)

    gc.collect()
    try:
        assert executor.collective_rpc(packed_vocabularies) == [1]
    finally:
        executor.shutdown()


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_logits_are_close_to_those_of_the_rounded_weights(model_dir: Path, quantization: str) -> None:
    """Against float32 with the weights that the kernels hold: what is left is the rounding of activations."""
    executor = make_executor(model_dir, quantization=quantization)
    try:
        weights = executor.collective_rpc(_dequantised)[0]
        driver = StepDriver(executor, CACHE, SCHEDULER)
        params = SamplingParams(temperature=0, logprobs=5)
        requests = [driver.add(PROMPTS[4], params)]
        output = driver.dispatch(requests, 1000).result(60)
        assert output is not None
        assert output.logprobs is not None
        ids = np.frombuffer(output.logprobs.token_ids, dtype="<i4")
        logprobs = np.frombuffer(output.logprobs.logprobs, dtype="<f4")
    finally:
        executor.shutdown()
    model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32)
    with torch.no_grad():
        for name, weight in weights.items():
            model.get_parameter(name).copy_(weight)
        exact = model(torch.tensor([PROMPTS[4]])).logits[0, -1].log_softmax(-1)
    np.testing.assert_allclose(logprobs, exact[ids.tolist()].numpy(), atol=0.1)


def _dequantised(worker: Worker) -> dict[str, torch.Tensor]:
    """The weights of a worker that runs whole steps, by their names in transformers."""
    compute = worker.runner._compute
    assert isinstance(compute, NativeCompute)
    decoder, found = compute._decoder, {}
    found["model.embed_tokens.weight"] = decoder.embedding.unpack()
    found["lm_head.weight"] = decoder.head.unpack()
    for index, layer in enumerate(decoder.layers):
        prefix, params = f"model.layers.{index}", layer.params
        sizes = [n * params.head_size for n in (params.num_heads, params.num_kv_heads, params.num_kv_heads)]
        for name, part in zip("qkv", layer.qkv.unpack().split(sizes), strict=True):
            found[f"{prefix}.self_attn.{name}_proj.weight"] = part
        found[f"{prefix}.self_attn.o_proj.weight"] = layer.attention_output.unpack()
        gate, up = layer.gate_up.unpack().chunk(2)
        found |= {f"{prefix}.mlp.gate_proj.weight": gate, f"{prefix}.mlp.up_proj.weight": up}
        found[f"{prefix}.mlp.down_proj.weight"] = layer.down.unpack()
    return found


def test_a_sample_finds_the_inputs_that_are_larger_than_the_rest(tmp_path: Path) -> None:
    torch.manual_seed(0)
    reference = AutoModelForCausalLM.from_config(FAMILIES["llama"], dtype=torch.bfloat16)
    reference.model.layers[1].post_attention_layernorm.weight.data[17] = 30.0
    reference.save_pretrained(tmp_path)
    config = resolve_model_config(ModelConfig(model=str(tmp_path), dtype="bfloat16"))
    model = load_model(config, ParallelState(), "cpu", show_progress=False)
    measure_input_importance(model, config, ParallelState())
    assert isinstance(model, DecoderLM)
    for layer in model.layers:
        for linear in (layer.self_attn.qkv_proj, layer.self_attn.o_proj, layer.mlp.gate_up_proj, layer.mlp.down_proj):
            assert linear.input_importance is not None
            assert linear.input_importance.mean().item() == pytest.approx(1.1, rel=1e-3)
            assert linear.input_importance.min() >= 0.1
        assert layer.self_attn.attention.kv_cache is None
    importance = model.layers[1].mlp.gate_up_proj.input_importance
    assert importance is not None
    assert importance.argmax() == 17
    assert importance[17] > 50


def test_quantization_that_cannot_be_done_is_refused_with_the_reason(llama_dir: Path) -> None:
    with pytest.raises(ValueError, match=r"quantization must be one of \('int8', 'int4'\) or None, got 'fp8'"):
        make_executor(llama_dir, quantization="fp8")
    with pytest.raises(
        ExecutorFailedError, match="quantization 'int8' needs dtype 'bfloat16' on the CPU, got dtype 'f"
    ):
        make_executor(llama_dir, quantization="int8", dtype="float32")
    with pytest.raises(ExecutorFailedError, match="quantization 'int4' needs the native CPU kernels, which cannot"):
        make_executor(llama_dir, quantization="int4", attention_backend="torch")


def test_what_the_kernels_cannot_do_is_computed_by_torch_and_the_reason_is_logged(
    llama_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    small_blocks = replace(CACHE, block_size=8)
    with caplog.at_level(logging.WARNING):
        executor = make_executor(llama_dir, cache=small_blocks)
    assert compute_of(executor) == "torch (block_size is 8, the kernels can do 16, 32, 64, 128, 256)"
    executor.shutdown()
    assert [r.message for r in caplog.records if "instead of the native CPU kernels" in r.message] == [
        "Computing with torch instead of the native CPU kernels (slower): block_size is 8, the kernels can do "
        "16, 32, 64, 128, 256"
    ]
    with pytest.raises(ExecutorFailedError, match="attention_backend 'native' cannot be used: block_size is 8"):
        make_executor(llama_dir, cache=small_blocks, attention_backend="native")


def test_float32_stays_with_torch_without_a_word(llama_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        executor = make_executor(llama_dir, dtype="float32")
    assert compute_of(executor).startswith("torch (dtype is float32")
    executor.shutdown()
    assert not [r for r in caplog.records if "native" in r.message]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_numbers_fail_their_row_alone(tmp_path: Path, bad: float) -> None:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES["llama"], dtype=torch.bfloat16)
    model.model.embed_tokens.weight.data[77] = bad
    model.save_pretrained(tmp_path)
    executor = make_executor(tmp_path)
    try:
        driver = StepDriver(executor, CACHE, SCHEDULER)
        good, broken = driver.add([5, 6]), driver.add([5, 77])
        for _ in range(3):
            output = driver.dispatch([good, broken]).result()
            assert output is not None
            (failure,) = output.failures
            assert failure.index == 1
            assert "not numbers (NaN or infinite)" in failure.error
            driver.finish([good, broken], 1000, output)
        assert driver.generate([[5, 6]], 3) == [good.token_ids[2:]]
    finally:
        executor.shutdown()


def test_the_thread_that_runs_steps_is_pinned_with_the_pool_and_let_go_with_it() -> None:
    kernels = NativeKernels()
    allowed = sorted(os.sched_getaffinity(0))
    x = torch.zeros(1, 2, dtype=torch.bfloat16)
    with ThreadPoolExecutor(1) as thread:

        def places() -> list[int]:
            ops.rms_norm(kernels, x, torch.ones(2), 1e-6)
            return sorted(os.sched_getaffinity(0))

        for cpus in ([], allowed[-1:], []):
            kernels.set_num_threads(1, cpus)
            assert thread.submit(places).result() == (cpus or allowed)
    assert sorted(os.sched_getaffinity(0)) == allowed


def test_threads_are_pinned_only_where_the_workers_have_all_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {4, 5, 6, 7})
    assert cpus_of_worker(4, 0, 1, usable=4) == [4, 5, 6, 7]
    assert cpus_of_worker(2, 1, 2, usable=4) == [6, 7]
    assert cpus_of_worker(1, 0, 1, usable=4) == []
    assert cpus_of_worker(2, 0, 1, usable=2) == []  # a quota, not an affinity


def test_engines_on_one_machine_do_not_pin_to_the_same_processors(
    llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "CLAIM_NAME", f"tests/{os.getpid()}")  # Whoever else runs engines here.

    def pinned(executor: UniProcExecutor) -> list[int]:
        (described,) = executor.collective_rpc("describe")
        return described["pinned_cpus"]

    monkeypatch.setattr("executors.worker.cpus_of_worker", lambda *args: [0, 1])
    first, second = make_executor(llama_dir), make_executor(llama_dir)
    assert (pinned(first), pinned(second)) == ([0, 1], [])
    first.shutdown()
    third = make_executor(llama_dir)
    assert pinned(third) == [0, 1]
    second.shutdown()
    third.shutdown()


def test_claims_of_a_process_end_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    name = f"tests/{os.getpid()}"
    monkeypatch.setattr(threads, "CLAIM_NAME", name)
    code = (
        f"from executors.kernels import threads; threads.CLAIM_NAME = {name!r}\n"
        "claim = threads.CpuClaim([3, 4]); print(claim.cpus, flush=True); input()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout is not None
    assert other.stdout.readline() == "[3, 4]\n"
    assert CpuClaim([2, 3]).cpus == []
    held = CpuClaim([2])  # What could not be claimed together is free.
    assert held.cpus == [2]
    other.kill()
    other.wait()
    assert CpuClaim([3, 4]).cpus == [3, 4]
