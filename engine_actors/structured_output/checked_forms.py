"""The forms of structured output a front end has checked lately. Used by `engine_actors.param_checks`.

Checking takes up to some tenths of a second, and a program asks for the same form over and over.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from engine_actors.structured_output.source import check_spec
from scheduler.structured_output import StructuredOutputError
from scheduler.structured_params import GrammarSpec, StructuredOutputsParams

MAX_ENTRIES = 256
MAX_CHARS = 4 * 1024 * 1024
"""Of all texts that are kept."""


class CheckedForms:
    """Verdicts by form, the latest used ones. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: OrderedDict[GrammarSpec, str | None] = OrderedDict()
        self._num_chars = 0

    def knows(self, params: Any) -> bool:
        """`check` will answer at once. False too where `params` are not well-formed."""
        if not isinstance(params, StructuredOutputsParams):
            return False
        try:
            spec = params.spec()
        except (ValueError, TypeError):
            return False
        with self._lock:
            return spec in self._errors

    def check(self, params: StructuredOutputsParams) -> GrammarSpec:
        """See `structured_output.check`; returns what will be compiled.

        Raises:
            ValueError: `params` are not well-formed.
            StructuredOutputError: They cannot be enforced.
        """
        spec = params.spec()
        with self._lock:
            is_known = spec in self._errors
            if is_known:
                self._errors.move_to_end(spec)
                error = self._errors[spec]
        if not is_known:
            error = _error_of(spec)
            self._keep(spec, error)
        if error is not None:
            raise StructuredOutputError(error)
        return spec

    def _keep(self, spec: GrammarSpec, error: str | None) -> None:
        with self._lock:
            if spec in self._errors:
                return
            self._errors[spec] = error
            self._num_chars += len(spec.text)
            while len(self._errors) > MAX_ENTRIES or self._num_chars > MAX_CHARS:
                oldest, _ = self._errors.popitem(last=False)
                self._num_chars -= len(oldest.text)


def _error_of(spec: GrammarSpec) -> str | None:
    try:
        check_spec(spec)
    except StructuredOutputError as error:
        return str(error)
    return None
