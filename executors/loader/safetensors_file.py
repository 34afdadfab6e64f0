"""One safetensors file: its header, checked against its size, and its tensors, of which only the asked part is read.

Format: 8 bytes header length (little endian), a JSON object of tensor name → dtype, shape, data offsets, the data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from executors.layers.weights import WeightLoadError

# Refuse absurd headers before reading them; the format itself allows 100 MB.
_MAX_HEADER_BYTES = 100_000_000
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class HeaderEntry:
    """One tensor; `start` and `end` are byte offsets into the data part."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class SafetensorsHeader:
    """
    Attributes:
        tensors: By name.
        metadata: The file's free-form "__metadata__".
    """

    path: Path
    tensors: Mapping[str, HeaderEntry]
    metadata: Mapping[str, str]

    @classmethod
    def read(cls, path: Path) -> SafetensorsHeader:
        """
        Raises:
            WeightLoadError: The file is unreadable, not safetensors, or shorter than its header says.
        """
        try:
            with path.open("rb") as file:
                length_bytes = file.read(8)
                length = int.from_bytes(length_bytes, "little")
                if len(length_bytes) < 8 or not 2 <= length <= _MAX_HEADER_BYTES:
                    raise WeightLoadError(f"{path} is not a safetensors file: its header length is {length} bytes")
                raw = file.read(length)
            file_size = path.stat().st_size
        except OSError as error:
            raise WeightLoadError(f"{path} cannot be read: {error}") from error
        if len(raw) < length:
            raise WeightLoadError(f"{path} is truncated: {file_size} bytes, within its header of {length} bytes")
        try:
            values = json.loads(raw)
            metadata = values.pop("__metadata__", {})
            tensors = {
                name: HeaderEntry(entry["dtype"], tuple(entry["shape"]), *entry["data_offsets"])
                for name, entry in values.items()
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightLoadError(f"{path} is not a safetensors file: unreadable header ({error})") from error
        available = file_size - 8 - length
        for name, entry in sorted(tensors.items(), key=lambda item: item[1].end):
            if entry.end > available:
                raise WeightLoadError(
                    f"{path} is truncated: tensor {name!r} ends at byte {8 + length + entry.end}, the file at byte "
                    f"{file_size}"
                )
        return cls(path, tensors, metadata)


class StoredTensor:
    """A tensor in a file; indexing it reads that part. `file` is for error messages."""

    def __init__(self, name: str, file: Path, entry: HeaderEntry, handle: Any) -> None:
        self.name = name
        self.file = file
        self.shape = entry.shape
        self._stored_dtype = entry.dtype
        self._handle = handle

    @property
    def dtype(self) -> torch.dtype:
        if self._stored_dtype not in _DTYPES:
            raise WeightLoadError(f"tensor {self.name!r} in {self.file} has the unsupported dtype {self._stored_dtype}")
        return _DTYPES[self._stored_dtype]

    def __getitem__(self, index: Any) -> torch.Tensor:
        try:
            tensor: torch.Tensor = self._handle.get_slice(self.name)[index]
        except (SafetensorError, OSError) as error:
            raise WeightLoadError(f"tensor {self.name!r} in {self.file} cannot be read: {error}") from error
        return tensor


class SafetensorsFile:
    """An open file, memory mapped: reading a slice touches only its pages."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            WeightLoadError: See SafetensorsHeader.read.
        """
        self.header = SafetensorsHeader.read(path)
        try:
            self._handle = safe_open(str(path), framework="pt")
        except (SafetensorError, OSError) as error:
            raise WeightLoadError(f"{path} cannot be opened: {error}") from error

    def tensor(self, name: str) -> StoredTensor:
        return StoredTensor(name, self.header.path, self.header.tensors[name], self._handle)
