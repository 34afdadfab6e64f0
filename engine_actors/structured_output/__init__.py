"""Structured output: grammars from schemas, expressions and EBNF, compiled in a helper process, matched per request.

The front end calls `check` before it admits a request; EngineCore owns a `StructuredOutputManager` over a back end.
`docs/structured_output.md` says what is enforced and how. Importing this loads neither torch nor xgrammar.
"""

from engine_actors.structured_output.compile_messages import CompileLimits
from engine_actors.structured_output.manager import StructuredOutputManager
from engine_actors.structured_output.source import check
from engine_actors.structured_output.xgrammar_backend import XGrammarBackend

__all__ = ["CompileLimits", "StructuredOutputManager", "XGrammarBackend", "check"]
