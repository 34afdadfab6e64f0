"""The attention backends by name, and which one "auto" picks on a device. Read once, when a model is built.

A backend is imported only when chosen, so that one for another device costs nothing.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch

from executors.attention.base import AttentionBackend


@dataclass(frozen=True)
class BackendEntry:
    """
    Attributes:
        location: "module:Class"; the class takes no arguments.
        device_types: Torch device types it runs on.
        priority: "auto" takes the usable backend with the highest.
        unusable: Why it cannot run here (a missing package, an old processor), or None.
    """

    location: str
    device_types: tuple[str, ...]
    priority: int
    unusable: Callable[[torch.device], str | None]

    def reason_against(self, device: torch.device) -> str | None:
        if device.type not in self.device_types:
            return f"it runs on {', '.join(self.device_types)} only"
        return self.unusable(device)


_BACKENDS: dict[str, BackendEntry] = {}


def register_backend(
    name: str,
    location: str,
    *,
    device_types: tuple[str, ...],
    priority: int,
    unusable: Callable[[torch.device], str | None] = lambda device: None,
) -> None:
    """Make a backend available under `name`; a later registration replaces an earlier one."""
    _BACKENDS[name] = BackendEntry(location, device_types, priority, unusable)


def backend_names() -> tuple[str, ...]:
    return tuple(sorted(_BACKENDS))


def get_backend(name: str, device: torch.device | str) -> AttentionBackend:
    """The backend called `name`, or for "auto" the best one that can run on `device`.

    Raises:
        ValueError: The name is unknown, or the backend cannot run on the device.
    """
    device = torch.device(device)
    if name == "auto":
        usable = [entry for entry in _BACKENDS.values() if entry.reason_against(device) is None]
        if not usable:
            raise ValueError(f"no attention backend runs on device {str(device)!r}; there are {backend_names()}")
        return _load(max(usable, key=lambda entry: entry.priority))
    if name not in _BACKENDS:
        raise ValueError(f"attention_backend must be 'auto' or one of {backend_names()}, got {name!r}")
    reason = _BACKENDS[name].reason_against(device)
    if reason is not None:
        raise ValueError(f"attention_backend {name!r} cannot be used on device {str(device)!r}: {reason}")
    return _load(_BACKENDS[name])


def _load(entry: BackendEntry) -> AttentionBackend:
    module, _, attribute = entry.location.partition(":")
    backend: AttentionBackend = getattr(importlib.import_module(module), attribute)()
    return backend


register_backend(
    "torch",
    "executors.attention.torch_backend:TorchAttentionBackend",
    device_types=("cpu", "cuda", "mps", "xpu"),
    priority=0,
)


def _triton_unusable(device: torch.device) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "the package triton is not installed"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= 7 else f"it needs compute capability 7.0, the device has {major}.{minor}"


register_backend(
    "triton",
    "executors.attention.triton_backend:TritonAttentionBackend",
    device_types=("cuda",),
    priority=10,
    unusable=_triton_unusable,
)

# Where it is the best, `executors.kernels.choice` takes it: that depends on the dtype too.
register_backend(
    "native",
    "executors.attention.native_backend:NativeAttentionBackend",
    device_types=("cpu",),
    priority=-1,
)
