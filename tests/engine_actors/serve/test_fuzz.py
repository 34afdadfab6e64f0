"""Whatever a body holds, the answer is 200 or a 400-class envelope: never a 5xx, never a hang."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from engine_actors.serve.protocol import (
    REFUSED_FIELDS,
    ChatCompletionRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from tests.engine_actors.serve.test_errors import error_of

KINDS = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 40)
    | st.sampled_from([2**31, 2**63, -(2**64), 1e30, 0.5, -0.0])
    | st.sampled_from(
        ["", "a", "auto", "user", "function", "text", "json_object", "left", "0.5", "\x00", "é\U0001f680"]
    )
)
KEYS = st.sampled_from(
    ["role", "content", "type", "text", "function", "name", "parameters", "arguments", "tool_calls", "json", "regex",
     "choice", "grammar", "json_schema", "schema", "include_usage", "$defs", "5", "messages"]
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=8
)


def bodies(path: str) -> st.SearchStrategy[dict[str, Any]]:
    names = [*KINDS[path].__struct_fields__, *REFUSED_FIELDS]
    names.remove("model") if path.startswith("/v1") else None
    good = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "tokens": [1], "max_tokens": 2}
    base = {name: good[name] for name in good if name in names}
    if path == "/tokenize":
        del base["messages"]
    changes = st.dictionaries(st.sampled_from(names), VALUES, max_size=3)
    return changes.map(lambda changed: {**base, **changed})


@pytest.mark.parametrize("path", KINDS)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_makes_the_server_fail(http: httpx.Client, path: str, data: st.DataObject) -> None:
    body = data.draw(bodies(path))
    response = http.post(path, content=msgspec.json.encode(body), headers={"Content-Type": "application/json"})
    if response.status_code != 200:
        assert response.status_code in (400, 404), (body, response.text)
        error_of(response, response.status_code)
    elif body.get("stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        assert '"error"' not in response.text
