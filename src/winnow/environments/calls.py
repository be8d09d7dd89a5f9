"""Calls of tools in the text of a turn.

One rule for all models. Reasoning (to the last `</think>`) is left out; then

1. each `<tool_call>…</tool_call>` is a call (Hermes, Qwen): inside is a JSON object with `name` and
   `arguments`, or `<function=NAME><parameter=KEY>VALUE</parameter>…</function>` (Qwen3-Coder);
2. else a turn that is nothing but a JSON object with `name` and `parameters` (or `arguments`),
   perhaps behind `<|python_tag|>`, is a call (Llama 3);
3. what opens a call in one of these ways and does not complete it is malformed.

It works on text, not on token ids, as a model may spell `<tool_call>` in pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from winnow.environments import Message, ToolCall, Turn

_TAGGED = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\s]+)>(.*)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\s]+)>(.*?)</parameter>", re.DOTALL)
_PYTHON_TAG = "<|python_tag|>"
_LONGEST_ERROR = 200


def parse_turn(text: str) -> Turn:
    """Parse a turn by the rule above."""
    text = text.rpartition("</think>")[2]
    if "<tool_call>" in text or "</tool_call>" in text:
        parsed = [_parse_tagged(match) for match in _TAGGED.finditer(text)]
        if not parsed:
            parsed = ["a </tool_call> without a <tool_call>"]
        return _turn_of(_TAGGED.sub("", text).strip(), parsed)
    bare = text.strip()
    body = bare.removeprefix(_PYTHON_TAG).strip()
    if bare.startswith(_PYTHON_TAG) or re.match(r'\{\s*"name"\s*:', body):
        return _turn_of("", [_parse_json(body, "parameters")])
    return Turn(bare)


def plain_message(text: str, turn: Turn) -> Message:
    """Return a turn as a message for a chat template, with its calls in the text."""
    return {"role": "assistant", "content": text}


def message_of(text: str, turn: Turn) -> Message:
    """Return a turn as a message for a chat template, with its calls where all were parsed.

    Args:
        text: of the whole turn, reasoning included.
        turn: what was parsed of it.
    """
    if not turn.calls or turn.malformed:
        return plain_message(text, turn)
    reasoning, end, _ = text.rpartition("</think>")
    functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in turn.calls]
    calls = [{"type": "function", "function": function} for function in functions]
    return {**plain_message(reasoning + end + turn.text, turn), "tool_calls": calls}


def pattern_parser(pattern: str) -> Callable[[str], Turn]:
    """Return a parser of calls that a regular expression describes.

    Args:
        pattern: its named groups are the arguments of the call; the group `name`, if there is one,
            is the tool's, else the call has an empty name.
    """
    expression = re.compile(pattern, re.DOTALL)

    def parse(text: str) -> Turn:
        calls = []
        for match in expression.finditer(text):
            arguments = {name: value for name, value in match.groupdict().items() if value}
            calls.append(ToolCall(arguments.pop("name", ""), arguments))
        return Turn(expression.sub("", text).strip(), tuple(calls))

    return parse


def split_calls(text: str, calls: str = "auto") -> list[tuple[str, bool]]:
    """Split the text of a turn into pieces, each with True if it is a call, malformed or not.

    Args:
        calls: as `environment.calls` in the recipe.
    """
    if calls == "auto":
        begin = len(text) - len(text.rpartition("</think>")[2])
        spans = [match.span() for match in _TAGGED.finditer(text, begin)]
        turn = parse_turn(text)
        if not spans and turn.calls + turn.malformed:
            spans = [(begin, len(text))]
    else:
        spans = [match.span() for match in re.finditer(calls, text, re.DOTALL)]
    pieces: list[tuple[str, bool]] = []
    at = 0
    for start, stop in spans:
        pieces += [(text[at:start], False), (text[start:stop], True)]
        at = stop
    return [piece for piece in [*pieces, (text[at:], False)] if piece[0]]


def _turn_of(text: str, parsed: list[ToolCall | str]) -> Turn:
    calls = tuple(each for each in parsed if isinstance(each, ToolCall))
    return Turn(text, calls, tuple(each for each in parsed if isinstance(each, str)))


def _parse_tagged(match: re.Match[str]) -> ToolCall | str:
    """Return the call between tags, or its fault."""
    body = match[1].strip()
    if not match[0].endswith("</tool_call>"):
        return "a <tool_call> without a </tool_call>"
    if body.startswith("<function="):
        function = _FUNCTION.fullmatch(body)
        if function is None:
            return "a <function=…> without a </function>"
        values = {key: _value_of(value) for key, value in _PARAMETER.findall(function[2])}
        return ToolCall(function[1], values)
    return _parse_json(body, "arguments")


def _parse_json(body: str, key: str) -> ToolCall | str:
    """Return the call in a JSON object, or its fault.

    Args:
        key: name of the arguments, for the fault.
    """
    try:
        call = json.loads(body)
    except (ValueError, RecursionError) as error:
        return f"no JSON object: {error}"[:_LONGEST_ERROR]
    if not isinstance(call, Mapping) or not isinstance(call.get("name"), str):
        return f'no JSON object with "name" and "{key}"'
    arguments: Any = call.get("arguments", call.get("parameters", {}))
    if isinstance(arguments, str):  # some models write the object as a text
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        return f'"{key}" is no JSON object'
    return ToolCall(call["name"], dict(arguments))


def _value_of(text: str) -> Any:
    """Return a parameter's value: JSON where it is some, else the text without its line breaks."""
    text = text.removeprefix("\n").removesuffix("\n")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
