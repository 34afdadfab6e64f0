"""A request's GrammarSpec → the text that the back end compiles. Pure Python, without the back end.

The front end calls `check` so that a request is refused before it is admitted; the compiler process calls
`grammar_source` again, where a time limit and a memory limit hold.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from engine_actors.structured_output.ebnf_grammar import user_grammar
from engine_actors.structured_output.ebnf_writer import GrammarWriter, quote
from engine_actors.structured_output.schema_grammar import schema_to_ebnf, spacing
from engine_actors.structured_output.schema_nodes import Object, Schema
from engine_actors.structured_output.schema_parser import parse_schema
from engine_actors.structured_output.structural_tags import regex_source, structural_tag_source
from scheduler.structured_output import StructuredOutputError
from scheduler.structured_params import GrammarSpec, StructuredOutputsParams


@dataclass(frozen=True)
class GrammarSource:
    """`text` is EBNF, or with `is_structural_tag` a structural tag in JSON."""

    text: str
    is_structural_tag: bool = False


def grammar_source(spec: GrammarSpec) -> GrammarSource:
    """What to compile.

    Raises:
        StructuredOutputError: The request's form is invalid or cannot be enforced.
    """
    try:
        return _source(spec)
    except RecursionError:
        raise StructuredOutputError(f"{spec.kind} is nested too deeply") from None


def check(params: StructuredOutputsParams) -> None:
    """Refuse what is known to be impossible without compiling it. Milliseconds for most requests; some formats, bounds
    and expressions take tenths of a second.

    Raises:
        StructuredOutputError: The text names the keyword or position, and why.
    """
    check_spec(params.spec())


def check_spec(spec: GrammarSpec) -> None:
    """Same, of what `StructuredOutputsParams.spec` gave."""
    grammar_source(spec)


def _source(spec: GrammarSpec) -> GrammarSource:
    match spec.kind:
        case "regex":
            return GrammarSource(regex_source(spec.text))
        case "grammar":
            return GrammarSource(user_grammar(spec.text))
        case "choice":
            return GrammarSource(GrammarWriter().grammar(" | ".join(map(quote, json.loads(spec.text)))))
    space = spacing(spec.any_whitespace, spec.whitespace_pattern)
    if spec.kind == "structural_tag":
        return GrammarSource(structural_tag_source(spec.text, space), is_structural_tag=True)
    schema = Schema(Object(), {}) if spec.kind == "json_object" else parse_schema(json.loads(spec.text))
    return GrammarSource(schema_to_ebnf(schema, space))
