"""Structural tags: free text with tagged regions of a given form, checked and rewritten for xgrammar.

Schemas, expressions and grammars inside become EBNF of ours, so that they are enforced as exactly as elsewhere.
The format is xgrammar's (`{"type": "structural_tag", "format": …}`); vLLM's older `{"structures", "triggers"}` is read
too.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from engine_actors.structured_output.ebnf_grammar import user_grammar
from engine_actors.structured_output.ebnf_writer import GrammarWriter
from engine_actors.structured_output.regex_parser import parse_full
from engine_actors.structured_output.schema_grammar import Spacing, schema_to_ebnf
from engine_actors.structured_output.schema_parser import parse_schema
from scheduler.structured_output import StructuredOutputError

MAX_TAGS = 512


def structural_tag_source(text: str, space: Spacing) -> str:
    """The JSON text for xgrammar.

    Raises:
        StructuredOutputError: A malformed or unsupported format, or a bad schema, expression or grammar inside.
    """
    tag = json.loads(text)
    if "structures" in tag or "triggers" in tag:
        tag = _from_structures(tag)
    if tag.get("type") != "structural_tag":
        raise _wrong("", "type", tag.get("type"), '"structural_tag"')
    _only(tag, "", ("type", "format"))
    rewriter = _Rewriter(space)
    return json.dumps({"type": "structural_tag", "format": rewriter.rewrite(tag.get("format"), "/format")})


def _from_structures(tag: dict[str, Any]) -> dict[str, Any]:
    _only(tag, "", ("type", "structures", "triggers"))
    structures = tag.get("structures")
    if not isinstance(structures, list) or not structures:
        raise _wrong("", "structures", structures, "a non-empty list")
    tags = []
    for index, each in enumerate(structures):
        if not isinstance(each, dict):
            raise _wrong("/structures", str(index), each, "an object with begin, schema and end")
        _only(each, f"/structures/{index}", ("begin", "schema", "end"))
        content = {"type": "json_schema", "json_schema": each.get("schema")}
        tags.append({"type": "tag", "begin": each.get("begin"), "content": content, "end": each.get("end")})
    return {
        "type": "structural_tag",
        "format": {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags},
    }


def _wrong(path: str, key: str, value: Any, allowed: str) -> StructuredOutputError:
    return StructuredOutputError(f"structural_tag{path}/{key} must be {allowed}, got {value!r:.100}")


def _only(node: dict[str, Any], path: str, allowed: tuple[str, ...]) -> None:
    for key in node:
        if key not in allowed:
            raise StructuredOutputError(f"structural_tag{path}: unknown {key!r:.60}; known are {', '.join(allowed)}")


class _Rewriter:
    def __init__(self, space: Spacing) -> None:
        self._space = space
        self._num_tags = 0
        self._kinds: dict[str, tuple[tuple[str, ...], Callable[[dict[str, Any], str], dict[str, Any]]]] = {
            "const_string": (("value",), self._const_string),
            "json_schema": (("json_schema", "style"), self._json_schema),
            "regex": (("pattern",), self._regex),
            "grammar": (("grammar", "syntax"), self._grammar),
            "any_text": (("excludes",), self._any_text),
            "sequence": (("elements",), self._elements),
            "or": (("elements",), self._elements),
            "optional": (("content",), self._content),
            "plus": (("content",), self._content),
            "star": (("content",), self._content),
            "repeat": (("min", "max", "content"), self._repeat),
            "tag": (("begin", "content", "end"), self._tag),
            "triggered_tags": (
                ("triggers", "tags", "at_least_one", "stop_after_first", "excludes"),
                self._triggered_tags,
            ),
            "tags_with_separator": (
                ("tags", "separator", "at_least_one", "stop_after_first"),
                self._tags_with_separator,
            ),
        }

    def rewrite(self, node: Any, path: str) -> dict[str, Any]:
        if not isinstance(node, dict):
            raise StructuredOutputError(f"structural_tag{path} must be an object with a type, got {node!r:.100}")
        kind = node.get("type")
        if not isinstance(kind, str) or kind not in self._kinds:
            raise _wrong(path, "type", kind, f"one of {', '.join(self._kinds)}")
        keys, rewrite = self._kinds[kind]
        _only(node, path, ("type", *keys))
        return rewrite(node, path)

    # Leaves

    def _const_string(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        return {"type": "const_string", "value": _text(node, "value", path)}

    def _json_schema(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        if node.get("style", "json") != "json":
            raise _wrong(path, "style", node["style"], '"json"')
        schema = node.get("json_schema")
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except (ValueError, RecursionError) as error:
                raise StructuredOutputError(f"structural_tag{path}/json_schema is not valid JSON: {error}") from None
        if not isinstance(schema, (dict, bool)):
            raise _wrong(path, "json_schema", schema, "a JSON schema")
        return self._ebnf(path, lambda: schema_to_ebnf(parse_schema(schema), self._space))

    def _regex(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        return self._ebnf(path, lambda: regex_source(_text(node, "pattern", path)))

    def _grammar(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        if node.get("syntax", "ebnf") != "ebnf":
            raise _wrong(path, "syntax", node["syntax"], '"ebnf"')
        return self._ebnf(path, lambda: user_grammar(_text(node, "grammar", path)))

    def _ebnf(self, path: str, source: Callable[[], str]) -> dict[str, Any]:
        try:
            return {"type": "grammar", "grammar": source()}
        except StructuredOutputError as error:
            raise StructuredOutputError(f"structural_tag{path}: {error}") from None

    def _any_text(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        return {"type": "any_text", "excludes": _texts(node, "excludes", path, may_be_absent=True)}

    # Combinations

    def _elements(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        elements = node.get("elements")
        if not isinstance(elements, list) or not elements:
            raise _wrong(path, "elements", elements, "a non-empty list of formats")
        rewritten = [self.rewrite(each, f"{path}/elements/{index}") for index, each in enumerate(elements)]
        return {"type": node["type"], "elements": rewritten}

    def _content(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        return {"type": node["type"], "content": self.rewrite(node.get("content"), f"{path}/content")}

    def _repeat(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        low, high = node.get("min"), node.get("max")
        if not isinstance(low, int) or isinstance(low, bool) or not 0 <= low <= 10_000:
            raise _wrong(path, "min", low, "an integer from 0 to 10000")
        if not isinstance(high, int) or isinstance(high, bool) or not (high == -1 or low <= high <= 10_000):
            raise _wrong(path, "max", high, "an integer from min to 10000, or -1 for no bound")
        return {**self._content(node, path), "min": low, "max": high}

    def _tag(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        self._num_tags += 1
        if self._num_tags > MAX_TAGS:
            raise StructuredOutputError(f"structural_tag: more than {MAX_TAGS} tags")
        end = node.get("end")
        ends = [end] if isinstance(end, str) else end
        if not isinstance(ends, list) or not ends or not all(isinstance(each, str) for each in ends):
            raise _wrong(path, "end", end, "a string or a non-empty list of strings")
        begin = _text(node, "begin", path)
        return {
            "type": "tag",
            "begin": begin,
            "content": self.rewrite(node.get("content"), f"{path}/content"),
            "end": end,
        }

    def _tags(self, node: dict[str, Any], path: str) -> list[dict[str, Any]]:
        tags = node.get("tags")
        if not isinstance(tags, list) or not tags or not all(isinstance(each, dict) for each in tags):
            raise _wrong(path, "tags", tags, "a non-empty list of tags")
        for index, each in enumerate(tags):
            if each.get("type", "tag") != "tag":
                raise _wrong(f"{path}/tags/{index}", "type", each["type"], '"tag"')
        return [self.rewrite({"type": "tag", **each}, f"{path}/tags/{index}") for index, each in enumerate(tags)]

    def _triggered_tags(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        triggers = _texts(node, "triggers", path)
        tags = self._tags(node, path)
        for index, tag in enumerate(tags):
            matching = [trigger for trigger in triggers if tag["begin"].startswith(trigger)]
            if len(matching) != 1:
                raise _wrong(f"{path}/tags/{index}", "begin", tag["begin"],
                             f"a text that exactly one of the triggers begins; {len(matching)} do")  # fmt: skip
        excludes = _texts(node, "excludes", path, may_be_absent=True)
        return {
            "type": "triggered_tags",
            "triggers": triggers,
            "tags": tags,
            "excludes": excludes,
            **_flags(node, path),
        }

    def _tags_with_separator(self, node: dict[str, Any], path: str) -> dict[str, Any]:
        separator = node.get("separator")
        if not isinstance(separator, str):
            raise _wrong(path, "separator", separator, "a string")
        return {"type": node["type"], "tags": self._tags(node, path), "separator": separator, **_flags(node, path)}


def regex_source(pattern: str) -> str:
    """EBNF of the texts that match as a whole."""
    writer = GrammarWriter()
    return writer.grammar(writer.regex(parse_full(pattern)))


def _text(node: dict[str, Any], key: str, path: str) -> str:
    value = node.get(key)
    if not isinstance(value, str) or not value:
        raise _wrong(path, key, value, "a non-empty string")
    return value


def _texts(node: dict[str, Any], key: str, path: str, may_be_absent: bool = False) -> list[str]:
    value = node.get(key, [])
    is_list = isinstance(value, list) and all(isinstance(each, str) and each for each in value)
    if not is_list or not (value or may_be_absent):
        raise _wrong(path, key, value, "a list of non-empty strings")
    return list(value)


def _flags(node: dict[str, Any], path: str) -> dict[str, bool]:
    flags = {}
    for key in ("at_least_one", "stop_after_first"):
        flags[key] = node.get(key, False)
        if not isinstance(flags[key], bool):
            raise _wrong(path, key, flags[key], "true or false")
    return flags
