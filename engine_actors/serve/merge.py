"""One answer from those of several models, path by path. Used by model_router.py."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from engine_actors.serve.asgi_call import Answer

DROPPED_HEADERS = (b"content-length", b"x-request-id")


def merged_answer(path: str, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
    """ASGI messages. The first answer that is an error is passed on as it is."""
    bad = next((answer for answer in answers if answer[0] != 200), None)
    status, headers, body = bad or (200, answers[0][1], _merge(path, [answer[2] for answer in answers]))
    kept = [pair for pair in headers if pair[0].lower() not in DROPPED_HEADERS]
    kept.append((b"content-length", str(len(body)).encode()))
    yield {"type": "http.response.start", "status": status, "headers": kept}
    yield {"type": "http.response.body", "body": body}


def _merge(path: str, bodies: Sequence[bytes]) -> bytes:
    if path in ("/health", "/ping"):
        return b""
    if path.rstrip("/") == "/metrics":
        return merge_metrics([body.decode() for body in bodies]).encode()
    return msgspec.json.encode(_merge_json(path, [msgspec.json.decode(body) for body in bodies]))


def _merge_json(path: str, parts: Sequence[dict[str, Any]]) -> dict[str, Any]:
    if path == "/v1/models":
        return {**parts[0], "data": [card for part in parts for card in part["data"]]}
    if path == "/load":
        return {"server_load": sum(part["server_load"] for part in parts)}
    if path == "/reset_prefix_cache":
        return {"success": all(part["success"] for part in parts)}
    if path == "/abort_requests":
        return {"aborted": [request_id for part in parts for request_id in part["aborted"]]}
    if path == "/status":
        lists = {name: [row for part in parts for row in part[name]] for name in ("models", "requests")}
        return {**parts[0], **lists}
    raise ValueError(f"answers of {path} cannot be merged")


def merge_metrics(texts: Sequence[str]) -> str:
    """Prometheus texts as one: each family once, with the samples of all.

    Families that have no label telling models apart (the process's, HTTP's) are taken from the first text.
    """
    families: dict[str, list[str]] = {}
    for index, text in enumerate(texts):
        name = ""
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
            lines = families.setdefault(name, [])
            if line.startswith("#"):
                if line not in lines:
                    lines.append(line)
            elif index == 0 or 'model_name="' in line:
                lines.append(line)
    return "\n".join(line for lines in families.values() for line in lines) + "\n"
