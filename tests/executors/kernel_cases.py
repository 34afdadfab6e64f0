"""What the kernel tests share: the kernels under each instruction set, and comparison in bfloat16 steps."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from executors.kernels.build import KernelBuildError
from executors.kernels.library import ISA_NAMES, NativeKernels


def kernels_or_skip(isa: str | None = None) -> NativeKernels:
    """Skips the test where the CPU or the system cannot have them; kernels that do not compile fail it."""
    try:
        return NativeKernels(isa)
    except KernelBuildError as error:
        if " failed:\n" in str(error):  # a compiler is there, and does not accept the source
            raise
        pytest.skip(str(error))


@pytest.fixture(params=ISA_NAMES)
def kernels(request: pytest.FixtureRequest) -> Iterator[NativeKernels]:
    """Both instruction sets where the CPU has them, two threads."""
    native = kernels_or_skip(request.param)
    native.set_num_threads(2)
    torch_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield native
    native.set_num_threads(1)
    torch.set_num_threads(torch_threads)


def random_bf16(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale).bfloat16()


def assert_within_bf16_rounding(actual: torch.Tensor, exact: torch.Tensor, accumulation: float) -> None:
    """|actual - exact| is at most half a bfloat16 step of the value, plus `accumulation` for float32 sums."""
    bound = exact.abs() * 2.0**-8 + accumulation
    excess = ((actual.double() - exact).abs() - bound).max().item()
    assert excess <= 0, f"off by {excess:.3g} more than the bound"
