"""Tool parsers on text cut anywhere: the same events' sum however it arrives, and odd texts lose nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine_actors.serve.tool_calls import CallStart, Content, ToolEvent
from engine_actors.serve.tool_parsers import HermesParser, JsonCallsParser, ToolParser, detect_style

NAMES = frozenset({"f", "g"})


def hermes() -> ToolParser:
    return HermesParser()


def llama() -> ToolParser:
    return JsonCallsParser(NAMES, prefix="<|python_tag|>")


def required() -> ToolParser:
    return JsonCallsParser(NAMES, opening="[")


def parsed(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content, and calls (name, arguments)."""
    events: list[ToolEvent] = []
    for piece in pieces:
        events += parser.feed(piece)
    events += parser.finish()
    content = "".join(event.text for event in events if isinstance(event, Content))
    calls: list[tuple[str, str]] = []
    for event in events:
        if isinstance(event, CallStart):
            assert event.index == len(calls)
            calls.append((event.name, ""))
        elif not isinstance(event, Content):
            name, arguments = calls[event.index]
            calls[event.index] = (name, arguments + event.text)
    assert parser.num_calls == len(calls)
    return content, calls


CASES = [
    (hermes, "plain <b>text</b> {}", ("plain <b>text</b> {}", [])),
    (hermes, 'a <tool_call>{"name":"f","arguments":{"x":"}{\\"<"}}</tool_call> ', ("a ", [("f", '{"x":"}{\\"<"}')])),
    (hermes, '<tool_call>{"arguments":{"x":1},"name":"f"}</tool_call>', ("", [("f", '{"x":1}')])),
    (hermes, '<tool_call>{"name":"f"}</tool_call>', ("", [("f", "{}")])),
    (hermes, '<tool_call>{"id":[1,{"a":null}],"name":"f","arguments":null}</tool_call>', ("", [("f", "{}")])),
    (hermes, '<tool_call>{"name":"f","arguments":"{\\"x\\":1}"}</tool_call>', ("", [("f", '{"x":1}')])),
    (hermes, '<tool_call>{"name":"f","arguments":{}}<tool_call>{"name":"g","arguments":{}}</tool_call>',
     ("", [("f", "{}"), ("g", "{}")])),
    (hermes, "<tool_call>no json</tool_call> b", ("<tool_call>no json</tool_call> b", [])),
    (hermes, '<tool_call>{"name":5}</tool_call>', ('<tool_call>{"name":5}</tool_call>', [])),
    (hermes, '<tool_call>{"name":"f","arguments":{"x":', ("", [("f", '{"x":')])),
    (hermes, '<tool_call>{"na', ('<tool_call>{"na', [])),
    (hermes, "a <tool_ca", ("a <tool_ca", [])),
    (hermes, '<tool_call>{"name":"f","arguments":{}}</tool_call>\n bye', ("\n bye", [("f", "{}")])),
    (llama, '{"name": "f", "parameters": {"x": 1}}', ("", [("f", '{"x": 1}')])),
    (llama, '<|python_tag|>{"name":"f","parameters":{}}; {"name":"g","parameters":{}}',
     ("", [("f", "{}"), ("g", "{}")])),
    (llama, '{"name": "Bob", "age": 3}', ('{"name": "Bob", "age": 3}', [])),
    (llama, '{"answer": 42} yes', ('{"answer": 42} yes', [])),
    (llama, " hello {", (" hello {", [])),
    (llama, '<|python_tag|>print("hi")', ('<|python_tag|>print("hi")', [])),
    (llama, "<|pyth", ("<|pyth", [])),
    (llama, "", ("", [])),
    (required, ' [ {"name":"f","parameters":{"x":[1,"]"]}} , {"name":"g","parameters":{}} ] ',
     ("", [("f", '{"x":[1,"]"]}'), ("g", "{}")])),
    (required, '[{"name":"f","parameters":{"x":', ("", [("f", '{"x":')])),
    (required, "[1, 2]", ("[1, 2]", [])),
]  # fmt: skip


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
def test_whole_text(make: type[ToolParser], text: str, expected: tuple[str, list[tuple[str, str]]]) -> None:
    assert parsed(make(), [text]) == expected


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
def test_character_by_character(make: type[ToolParser], text: str, expected: tuple[str, list[tuple[str, str]]]) -> None:
    assert parsed(make(), list(text)) == expected


PIECES = st.lists(
    st.sampled_from(
        ["<tool_call>", "</tool_call>", '{"name":', '"f"', '"g"', ',"arguments":', ',"parameters":', "{", "}", "[", "]",
         '"x":1', '"\\"', ",", ";", " ", "\n", "text", "<", "<|python_tag|>", "null"]
    ),
    max_size=20,
)  # fmt: skip


@given(PIECES, st.sampled_from([hermes, llama, required]), st.randoms(use_true_random=False))
def test_the_cuts_do_not_matter(parts: list[str], make: type[ToolParser], random: object) -> None:
    text = "".join(parts)
    cuts = sorted(random.randrange(len(text) + 1) for _ in range(random.randrange(6)))  # type: ignore[attr-defined]
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parsed(make(), pieces) == parsed(make(), [text])


@given(PIECES.map("".join).filter(lambda text: '"f"' not in text and '"g"' not in text))
def test_text_without_a_call_comes_out_as_it_went_in(text: str) -> None:
    for make in (hermes, llama, required):
        assert parsed(make(), [text]) == (text, [])


def test_style_follows_the_template() -> None:
    assert detect_style("... <tool_call> ...") == "hermes"
    assert detect_style("{{ '<|python_tag|>' }}") == "llama3_json"
    assert detect_style(None) == "hermes"
