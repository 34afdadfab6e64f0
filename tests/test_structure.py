"""Imports run kv ← scheduler ← executors ← engine_actors, and only files whose job is Ray import ray."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("kv", "scheduler", "executors", "engine_actors")
RAY_FILES = (
    "executors/ray_*.py",
    "executors/placement.py",
    "executors/placement_guard.py",
    "engine_actors/core_actor.py",
    "engine_actors/ray_*.py",
    "engine_actors/engine.py",
    "engine_actors/serve/*.py",
    "engine_actors/cli/*.py",
)
"""Where an import of ray is expected; elsewhere it would tie plain logic to a cluster."""


def imported_modules(path: Path) -> set[str]:
    """Top-level names of every import in a file, inside functions too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.split(".")[0])
    return names


def files_of(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_packages_before_it(package: str) -> None:
    later = set(PACKAGES[PACKAGES.index(package) + 1 :])
    wrong = {str(f.relative_to(ROOT)): imported_modules(f) & later for f in files_of(package)}
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize("package", ["kv", "scheduler"])
def test_kv_and_scheduler_name_neither_torch_nor_ray(package: str) -> None:
    wrong = [str(f) for f in files_of(package) if imported_modules(f) & {"torch", "ray", "transformers"}]
    assert wrong == []


def test_importing_kv_and_scheduler_loads_neither_torch_nor_ray() -> None:
    modules = [
        ".".join(f.relative_to(ROOT).with_suffix("").parts)
        for package in ("kv", "scheduler")
        for f in files_of(package)
        if f.name != "__init__.py"
    ]
    code = (
        f"import sys\nfor name in {modules!r}: __import__(name)\nprint(sorted({{'torch', 'ray'}} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_an_engine_core_that_starts_ray_workers_loads_no_torch() -> None:
    """Its start is part of every start and recovery: torch and transformers cost seconds of it."""
    code = (
        "import sys, engine_actors.core_actor, executors.ray_executor\n"
        "print(sorted({'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_only_ray_files_import_ray() -> None:
    allowed = {path for pattern in RAY_FILES for path in ROOT.glob(pattern)}
    wrong = [
        str(f.relative_to(ROOT))
        for package in ("executors", "engine_actors")
        for f in files_of(package)
        if f not in allowed and "ray" in imported_modules(f)
    ]
    assert wrong == []
