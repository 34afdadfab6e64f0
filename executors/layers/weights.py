"""Which checkpoint tensor fills which part of which parameter. Layers declare it, `CausalLM.load_weights` obeys."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn


class WeightLoadError(RuntimeError):
    """A checkpoint does not hold what the model needs. The text names the tensor and the file."""


class SliceableTensor(Protocol):
    """A torch.Tensor, or a tensor still on disk of which only the asked-for part is read."""

    @property
    def shape(self) -> Any: ...

    @property
    def dtype(self) -> torch.dtype: ...

    def __getitem__(self, index: Any) -> torch.Tensor: ...


@dataclass(frozen=True)
class WeightTarget:
    """Checkpoint tensor `name`, of which rows `start:stop` along `dim` go to `parameter` from `offset` on.

    What a rank does not hold (start == stop) is declared too, so that the tensor is known and its shape is checked.

    Attributes:
        full_shape: Shape the tensor must have in the checkpoint.
        dummy_value: What load_format="dummy" fills in; None is random.
    """

    name: str
    parameter: torch.Tensor
    full_shape: tuple[int, ...]
    dim: int = 0
    start: int = 0
    stop: int | None = None
    offset: int = 0
    dummy_value: float | None = None

    def load(self, tensor: SliceableTensor) -> None:
        """Copy this rank's part, converting the dtype.

        Raises:
            WeightLoadError: The shape is not `full_shape`, or the elements are not floating point.
        """
        where = getattr(tensor, "file", None)
        described = f"tensor {self.name!r}" + (f" in {where}" if where else "")
        if tuple(tensor.shape) != self.full_shape:
            raise WeightLoadError(
                f"{described} has shape {list(tensor.shape)}, but the model's config needs {list(self.full_shape)}"
            )
        if not tensor.dtype.is_floating_point or tensor.dtype.itemsize < 2:
            raise WeightLoadError(
                f"{described} has dtype {tensor.dtype}; float32, bfloat16, float16 and float64 can be loaded"
            )
        stop = self.full_shape[self.dim] if self.stop is None else self.stop
        if stop <= self.start:
            return
        source = tensor[(slice(None),) * self.dim + (slice(self.start, stop),)]
        with torch.no_grad():
            self.parameter.narrow(self.dim, self.offset, stop - self.start).copy_(source)


@runtime_checkable
class HoldsWeights(Protocol):
    """A module that fills parameters from a checkpoint."""

    def weight_targets(self) -> Iterator[WeightTarget]: ...


def make_parameter(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, padded: bool) -> nn.Parameter:
    """An uninitialised parameter; zeroed when `padded`, as then loading leaves parts of it untouched."""
    make = torch.zeros if padded else torch.empty
    return nn.Parameter(make(shape, dtype=dtype, device=device), requires_grad=False)
