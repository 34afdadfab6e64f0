"""xgrammar's native classes, without its Python package.

The package imports torch and transformers for helpers that are not used here: seconds and hundreds of megabytes before
the first grammar of an engine. Its generated binding module needs neither, so it is loaded by its file; the signatures
in it belong to the version that pyproject.toml pins. Called by `compiler`, `compile_server`, `compile_worker` and
`xgrammar_backend`. What fails in xgrammar raises RuntimeError.
"""

from __future__ import annotations

import importlib.util
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_BINDING = "xgrammar.tvm_ffi_binding._ffi_api"
_RAW_TEXTS = 0
"""Kind of vocabulary: tokens are given as the bytes they stand for."""

_lock = threading.Lock()


def load() -> ModuleType:
    """The module with the native classes. Takes tens of milliseconds the first time. Thread-safe.

    Raises:
        ImportError: xgrammar is not installed.
    """
    with _lock:
        if _BINDING in sys.modules:  # Loaded before, or somebody imported the package.
            return sys.modules[_BINDING]
        _import_tvm_ffi()
        from tvm_ffi.libinfo import load_lib_module

        package = importlib.util.find_spec("xgrammar")
        if package is None or not package.submodule_search_locations:
            raise ImportError("structured output needs the package xgrammar")
        folder = Path(next(iter(package.submodule_search_locations)))
        load_lib_module("xgrammar", "xgrammar_bindings", extra_lib_paths=[folder])
        spec = importlib.util.spec_from_file_location(_BINDING, folder / "tvm_ffi_binding" / "_ffi_api.py")
        if spec is None or spec.loader is None:
            raise ImportError(f"{folder} does not hold xgrammar's binding module")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        # By its own name: classes can be registered once, so an import of the whole package must find this module.
        sys.modules[_BINDING] = module
        return module


def _import_tvm_ffi() -> None:
    """Without torch, unless this process has it: tvm_ffi takes it if it can, which costs EngineCore a second and more
    beside running steps, and 200 MB.
    """
    if "torch" in sys.modules:
        import tvm_ffi

        return
    sys.modules["torch"] = None  # type: ignore[assignment]
    try:
        import tvm_ffi  # noqa: F401
    finally:
        del sys.modules["torch"]


def new_tokenizer_info(texts: Sequence[bytes], stop_token_ids: Sequence[int]) -> Any:
    """A vocabulary: `texts[t]` is what token t stands for, b"" for tokens that are no text."""
    return load().TokenizerInfo(list(texts), _RAW_TEXTS, len(texts), list(stop_token_ids), False)


def read_tokenizer_info(text: str) -> Any:
    """From its `serialize_json`."""
    return load().TokenizerInfo.deserialize_json(text)


def new_compiler(tokenizer_info: Any) -> Any:
    """Without a cache, since the caller has one, and with one thread, which a forked process must not exceed."""
    return load().GrammarCompiler(tokenizer_info, 1, False, -1, False)


def compile_grammar(compiler: Any, text: str, *, is_structural_tag: bool) -> Any:
    """From EBNF with a rule `root`, or from a structural tag as JSON."""
    if is_structural_tag:
        return compiler.compile_structural_tag(text)
    return compiler.compile_grammar_from_strings(text, "root")


def read_grammar(text: str, tokenizer_info: Any) -> Any:
    """From its `serialize_json`."""
    return load().CompiledGrammar.deserialize_json(text, tokenizer_info)


def new_matcher(grammar: Any, stop_token_ids: Sequence[int] | None = None) -> Any:
    """Args:
    stop_token_ids: What ends the text; None takes the vocabulary's.
    """
    return load().GrammarMatcher(grammar, None if stop_token_ids is None else list(stop_token_ids), False, -1, None)


def accept_token(matcher: Any, token_id: int) -> bool:
    return bool(matcher.accept_token(token_id, False))


def fill_bitmask(matcher: Any, bitmask: Any, row: int) -> None:
    """Allowed tokens into one row of int32 masks; bits beyond the vocabulary stay as they are."""
    matcher.fill_next_token_bitmask(bitmask, row, False)
