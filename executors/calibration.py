"""How large each input of a model's linear layers typically is: packing to few bits asks which weights matter.

Run once while loading (`executors.worker`), where weights become int4: the model computes a sample of random tokens.
A few inputs of a layer are often far larger than the rest, whatever the text; the errors of their weights count most.
"""

from __future__ import annotations

import torch
from torch import nn

from executors.attention.base import AttentionMetadata
from executors.input_batch import StepInputs, Wanted
from executors.layers.linear import ColumnParallelLinear, RowParallelLinear
from executors.memory import allocate_kv_caches
from executors.model_config import ResolvedModelConfig
from executors.models.base import CausalLM
from executors.parallel_state import ParallelState
from executors.step_compute import TorchCompute
from kv.spec import KVCacheConfig, KVCacheGroup, KVCacheTensor

SAMPLE_TOKENS = 256
BLOCK_SIZE = 16
FLOOR = 0.1
"""Of the mean: what the sample says is only about right, and no input is without use."""


@torch.no_grad()
def measure_input_importance(model: CausalLM, config: ResolvedModelConfig, parallel: ParallelState) -> None:
    """Set `input_importance` of all linear layers of a CPU model: the mean square of each input, 1 + FLOOR on average.

    All ranks must call it, with weights filled and not yet packed. KV caches are bound for its duration.
    """
    sums: dict[nn.Module, torch.Tensor] = {}

    def record(layer: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        sums[layer] = inputs[0].float().square().mean(0)

    linears = [m for m in model.modules() if isinstance(m, (ColumnParallelLinear, RowParallelLinear))]
    hooks = [linear.register_forward_pre_hook(record) for linear in linears]
    try:
        _run_sample(model, config, parallel)
    finally:
        for hook in hooks:
            hook.remove()
        for layer in model.attention_layers():
            layer.kv_cache = None
    for linear in linears:
        share = sums[linear] / sums[linear].mean().clamp(min=1e-30)
        # Weights that are not numbers are told of when a request meets them.
        linear.input_importance = (share if share.isfinite().all() else torch.ones_like(share)) + FLOOR


def _run_sample(model: CausalLM, config: ResolvedModelConfig, parallel: ParallelState) -> None:
    count = min(SAMPLE_TOKENS, config.max_model_len)
    num_blocks = 1 + -(-count // BLOCK_SIZE)
    specs = model.kv_cache_specs(BLOCK_SIZE, config.dtype.itemsize)
    caches = KVCacheConfig(
        num_blocks=num_blocks,
        groups=tuple(KVCacheGroup((name,), spec) for name, spec in specs.items()),
        tensors=tuple(KVCacheTensor((name,), spec.page_size_bytes) for name, spec in specs.items()),
    )
    device = torch.device("cpu")
    model.bind_kv_caches(allocate_kv_caches(caches, model.attention_layers(), config.dtype, device))
    compute = TorchCompute(model, parallel, hidden_size=config.hidden_size, dtype=config.dtype, device=device)
    compute.bind(caches)
    generator = torch.Generator().manual_seed(0)
    positions = torch.arange(count)
    lens = torch.tensor([count], dtype=torch.int32)
    metadata = [
        AttentionMetadata(
            num_reqs=1,
            num_tokens=count,
            max_query_len=count,
            max_seq_len=count,
            query_start_loc=torch.tensor([0, count], dtype=torch.int32),
            seq_lens=lens,
            block_table=torch.arange(1, num_blocks, dtype=torch.int32).unsqueeze(0),
            slot_mapping=positions + BLOCK_SIZE,
            block_size=BLOCK_SIZE,
            prompt_lens=lens,
        )
        for _ in specs
    ]
    tokens = torch.randint(config.vocab_size, (count,), generator=generator)
    compute.forward(StepInputs(tokens, positions, metadata, torch.tensor([count - 1])), Wanted.LOGITS)
    parallel.drain()
