"""Moving weights out of a device's memory and back, and giving freed memory back to the system. Used by Worker."""

from __future__ import annotations

import ctypes
import gc

import torch
from torch import nn


class HostWeights:
    """Weights and buffers of a model that left their device; tensors that modules share stay shared."""

    def __init__(self, model: nn.Module) -> None:
        """Copies them to pinned host memory and frees the device's."""
        tensors = [*model.parameters(), *model.buffers()]
        self._places = [(tensor, tensor.device) for tensor in {id(tensor): tensor for tensor in tensors}.values()]
        for tensor, _ in self._places:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            host.copy_(tensor.data)
            tensor.data = host

    def restore(self) -> None:
        """Back to where they were."""
        for tensor, device in self._places:
            tensor.data = tensor.data.to(device)


def return_free_memory(device: torch.device) -> None:
    """Let the system, or other processes on the device, have what this process has freed."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        return
    # glibc keeps freed memory for later; other C libraries have no such call.
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
