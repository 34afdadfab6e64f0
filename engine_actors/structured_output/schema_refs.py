"""`$ref` inside one JSON schema document."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from engine_actors.structured_output.schema_merge import JsonSchema
from scheduler.structured_output import StructuredOutputError


class References:
    """Finds what a `$ref` names: `#`, `#/a/JSON/pointer`, or `#name` of a `$anchor`."""

    def __init__(self, root: JsonSchema) -> None:
        self._root = root
        self._anchors: dict[str, JsonSchema] | None = None

    def resolve(self, ref: str, path: str) -> JsonSchema:
        """The schema named.

        Raises:
            StructuredOutputError: It is in another document, or there is none.
        """
        if not ref.startswith("#"):
            base = self._root.get("$id") if isinstance(self._root, dict) else None
            if not isinstance(base, str) or not ref.startswith(base):
                raise StructuredOutputError(
                    f"json{path}/$ref must name a part of the same schema (#/…), got {ref!r:.200}"
                )
            ref = ref[len(base) :] or "#"
        fragment = unquote(ref[1:])
        found = self._root if not fragment else self._at(fragment) if fragment[0] == "/" else self._anchor(fragment)
        if not isinstance(found, (dict, bool)):
            raise StructuredOutputError(f"json{path}/$ref names {ref!r:.200}, where there is no schema")
        return found

    def _at(self, pointer: str) -> Any:
        """RFC 6901."""
        node: Any = self._root
        for part in pointer[1:].split("/"):
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(node, dict):
                node = node.get(key)
            elif isinstance(node, list) and key.isdecimal() and int(key) < len(node):
                node = node[int(key)]
            else:
                return None
        return node

    def _anchor(self, name: str) -> Any:
        if self._anchors is None:
            self._anchors = {}
            todo: list[Any] = [self._root]
            for node in todo:
                if isinstance(node, dict):
                    if isinstance(node.get("$anchor"), str):
                        self._anchors.setdefault(node["$anchor"], node)
                    todo.extend(node.values())
                elif isinstance(node, list):
                    todo.extend(node)
        return self._anchors.get(name)
