"""/v1/completions through the unmodified openai client."""

from __future__ import annotations

import openai

from tests.engine_actors.serve.fake_llm import DEFAULT_REPLY
from tests.engine_actors.serve.server import MODEL, RunningServer


def test_whole_answer(client: openai.OpenAI, server: RunningServer) -> None:
    answer = client.completions.create(model=MODEL, prompt="Tell me", max_tokens=64)
    assert answer.choices[0].text == DEFAULT_REPLY
    assert answer.choices[0].finish_reason == "stop"
