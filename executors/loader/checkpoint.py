"""A checkpoint directory: which safetensors file holds which tensor, by index or by looking into the files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from executors.layers.weights import WeightLoadError
from executors.loader.safetensors_file import SafetensorsFile, SafetensorsHeader, StoredTensor
from executors.model_config import ModelConfigError, read_json

INDEX_FILE = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
# Tensors that old checkpoints carry though they follow from the config.
_IGNORED_SUFFIXES = (".rotary_emb.inv_freq", ".attn.bias", ".attn.masked_bias")


class Checkpoint:
    """The tensors of one model directory.

    Attributes:
        files: Tensor name → file. Tensors that can be ignored are left out.
    """

    def __init__(self, model_dir: Path) -> None:
        """
        Raises:
            WeightLoadError: There are no safetensors files, one is missing or broken, or index and files disagree.
        """
        self.model_dir = model_dir
        if (model_dir / INDEX_FILE).is_file():
            files = _files_by_index(model_dir)
        else:
            files = _files_by_content(model_dir)
        self.files = {name: path for name, path in files.items() if not name.endswith(_IGNORED_SUFFIXES)}

    def tensors(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, StoredTensor]]:
        """(name, tensor) file by file, so that one file at a time is open. `names` None is all."""
        wanted = set(self.files if names is None else names)
        by_file: dict[Path, list[str]] = {}
        for name, path in self.files.items():
            if name in wanted:
                by_file.setdefault(path, []).append(name)
        for path, names_in_file in by_file.items():
            file = SafetensorsFile(path)
            for name in names_in_file:
                yield name, file.tensor(name)

    def tensor(self, name: str) -> StoredTensor:
        return SafetensorsFile(self.files[name]).tensor(name)


def _files_by_index(model_dir: Path) -> dict[str, Path]:
    index = model_dir / INDEX_FILE
    try:
        weight_map = read_json(index).get("weight_map")
    except ModelConfigError as error:
        raise WeightLoadError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightLoadError(f"{index} holds no weight_map")
    headers: dict[str, SafetensorsHeader] = {}
    for name, file_name in weight_map.items():
        path = model_dir / str(file_name)
        if file_name not in headers:
            if not path.is_file():
                raise WeightLoadError(f"{path} is missing; {index} says that it holds tensor {name!r}")
            headers[file_name] = SafetensorsHeader.read(path)
        if name not in headers[file_name].tensors:
            raise WeightLoadError(f"tensor {name!r} is missing in {path}, where {index} says that it is")
    return {name: model_dir / file_name for name, file_name in weight_map.items()}


def _files_by_content(model_dir: Path) -> dict[str, Path]:
    if (model_dir / SINGLE_FILE).is_file():
        paths = [model_dir / SINGLE_FILE]
    else:
        # "consolidated" files repeat the same weights under other names.
        paths = sorted(path for path in model_dir.glob("*.safetensors") if not path.name.startswith("consolidated"))
    if not paths:
        others = sorted(
            path.name for pattern in ("*.bin", "*.pt", "*.pth", "*.gguf") for path in model_dir.glob(pattern)
        )
        hint = (
            f"; it holds {', '.join(others)}, which must be converted to safetensors first "
            "(save_pretrained of transformers writes them)"
            if others
            else ""
        )
        raise WeightLoadError(f"no .safetensors files in {model_dir}{hint}")
    files: dict[str, Path] = {}
    for path in paths:
        for name in SafetensorsHeader.read(path).tensors:
            if name in files:
                raise WeightLoadError(f"tensor {name!r} is in both {files[name]} and {path}")
            files[name] = path
    return files
