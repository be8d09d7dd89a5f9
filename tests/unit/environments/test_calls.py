"""Calls in the text of turns: formats, faults; tools' schemas and results."""

from __future__ import annotations

import asyncio

import pytest

from winnow.builders.environments import tool_schemas
from winnow.config.environment import CustomEnvironment
from winnow.environments import Step, ToolCall, Turn
from winnow.environments.calls import message_of, parse_turn, pattern_parser, split_calls
from winnow.environments.tools import ToolEnvironment, ToolResult, tool_schema
from winnow.errors import ConfigError

ADD = ToolCall("add", {"a": 1, "b": "x"})


def test_a_turn_is_a_message_again_with_its_reasoning_and_calls():
    call = '<tool_call>{"name": "add", "arguments": {"a": 1, "b": "x"}}</tool_call>'
    for text, content, calls in (
        (f"<think>so</think>Now {call}", "<think>so</think>Now", [ADD]),
        (f"{call}<tool_call>", f"{call}<tool_call>", []),  # malformed ones stay as they are
    ):
        message = message_of(text, parse_turn(text))
        functions = [each["function"] for each in message.get("tool_calls", ())]
        assert message["content"] == content
        assert [ToolCall(f["name"], f["arguments"]) for f in functions] == calls


@pytest.mark.parametrize(
    ("text", "turn"),
    [
        ("four", Turn("four")),
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x"}}\n</tool_call>',
         Turn("", (ADD,))),
        ('So <tool_call>{"name": "add", "arguments": "{\\"a\\": 1, \\"b\\": \\"x\\"}"}</tool_call>',
         Turn("So", (ADD,))),
        (
            "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\nx\n"
            "</parameter>\n</function>\n</tool_call>",
            Turn("", (ADD,)),
        ),
        ('{"name": "add", "parameters": {"a": 1, "b": "x"}}', Turn("", (ADD,))),
        ('<|python_tag|>{"name": "add", "parameters": {"a": 1, "b": "x"}}', Turn("", (ADD,))),
        ('<think><tool_call>{"name": "no"}</tool_call></think>four', Turn("four")),
        ('<tool_call>{"name": "f"}</tool_call><tool_call>{</tool_call>', None),
    ],
)  # fmt: skip
def test_each_format_is_parsed(text, turn):
    parsed = parse_turn(text)
    if turn is None:
        assert parsed.calls == (ToolCall("f"),)
        assert len(parsed.malformed) == 1
    else:
        assert parsed == turn


@pytest.mark.parametrize(
    ("text", "calls", "found"),
    [
        ("four", "auto", []),
        ("a<tool_call>{}</tool_call>b<tool_call>c", "auto",
         ["<tool_call>{}</tool_call>", "<tool_call>c"]),
        ("<think><tool_call></think>so</tool_call>", "auto", ["so</tool_call>"]),
        ('<think>a</think>{"name": 3}', "auto", ['{"name": 3}']),
        ("3+4=? 5+6=?", r"(?P<expression>\S+)=\?", ["3+4=?", "5+6=?"]),
    ],
)  # fmt: skip
def test_calls_are_found_in_a_text_that_stays_whole(text, calls, found):
    pieces = split_calls(text, calls)
    assert "".join(piece for piece, _ in pieces) == text
    assert [piece for piece, is_call in pieces if is_call] == found


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ('<tool_call>{"name": "add"', "without a </tool_call>"),
        ("</tool_call>", "without a <tool_call>"),
        ("<tool_call>[1]</tool_call>", "no JSON object with"),
        ('<tool_call>{"name": "f", "arguments": 3}</tool_call>', '"arguments" is no JSON object'),
        ('{"name": "f", "parameters"', "no JSON object"),
        ("<tool_call><function=f></tool_call>", "without a </function>"),
        ("<tool_call>" + "[" * 100_000 + "</tool_call>", "no JSON object"),
    ],
)
def test_a_malformed_call_has_a_line(text, fault):
    turn = parse_turn(text)
    assert not turn.calls
    assert fault in turn.malformed[0]
    assert len(turn.malformed[0]) <= 200


def test_a_pattern_describes_calls():
    parse = pattern_parser(r"<call>(?P<expression>[^<]*)</call>")
    assert parse("<call>1+2</call>") == Turn("", (ToolCall("", {"expression": "1+2"}),))
    assert parse("<call>1+2") == Turn("<call>1+2")


def calc(expression: str) -> str:
    """Work out a sum.

    Args:
        expression: such as 1+2.
    """
    a, b = expression.split("+")
    return str(int(a) + int(b))


class Counter:
    """Counts."""

    def __init__(self, start: int = 0) -> None:
        self.at = start

    async def __call__(self, by: int) -> ToolResult:
        """Count on.

        Args:
            by: how far.
        """
        await asyncio.sleep(0 if by < 9 else 60)
        self.at += by
        return ToolResult(str(self.at), reward=0.25)


class Door:
    tools = (calc,)

    def reset(self, row):
        return ""

    def step(self, turn):
        return Step(done=True)


class Closed(Door):
    tools = property(lambda self: ())


def test_a_class_of_environments_may_have_tools():
    names = [f"{__file__}:{each.__name__}" for each in (Door, Closed)]
    (schema,) = tool_schemas(CustomEnvironment(path=names[0]))
    assert schema["function"]["name"] == "calc"
    with pytest.raises(ConfigError, match="tools is a property; make it an attribute of the class"):
        tool_schemas(CustomEnvironment(path=names[1]))


def test_schemas_come_from_signature_and_docstring():
    schema = tool_schema(Counter)["function"]
    assert schema["name"] == "Counter"
    assert schema["parameters"]["properties"] == {
        "by": {"type": "integer", "description": "how far."}
    }
    with pytest.raises(ConfigError, match=r"environment.tools: <lambda>: .*give each argument"):
        tool_schema(lambda x: x)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (ToolCall("calc", {"expression": "37+48"}), "85"),
        (ToolCall("calc", {"expression": "37"}), "error: ValueError: not enough values"),
        (ToolCall("calc", {"sum": "37"}), "error: missing a required argument: 'expression'"),
        (ToolCall("calk", {}), "error: no tool has the name 'calk'; there are calc, Counter"),
        (ToolCall("Counter", {"by": 2}), "7"),
        (ToolCall("Counter", {"by": 9}), "error: Counter did not finish within 0.05 s"),
    ],
)
def test_calls_are_answered(call, text):
    tools = ToolEnvironment([calc, Counter], 0.05, 100)
    tools.reset({"extra_info": {"tools_kwargs": {"Counter": {"create_kwargs": {"start": 5}}}}})
    step = asyncio.run(tools.step(Turn("", (call,))))
    (message,) = step.observation
    assert message["role"] == "tool"
    assert message["content"].startswith(text)
    assert step.reward == (0.25 if text == "7" else 0)
    assert step.metrics == ({"Counter": 0.25} if text == "7" else {})
    assert not step.done


def test_a_turn_without_calls_ends_and_faults_and_long_results_are_told():
    def long() -> str:
        """Return much."""
        return "x" * 50

    tools = ToolEnvironment([long], 1, 10)
    tools.reset({})
    assert asyncio.run(tools.step(Turn("done"))).done
    step = asyncio.run(tools.step(Turn("", (ToolCall("long"),), ("no JSON",))))
    assert [m["content"] for m in step.observation] == [
        "x" * 5 + "\n… (cut) …\n" + "x" * 5,
        "error: no JSON",
    ]
    single = ToolEnvironment([long], 1, 10, most_calls=1)
    single.reset({})
    step = asyncio.run(single.step(Turn("", (ToolCall("long"), ToolCall("long")))))
    (message,) = step.observation
    assert message["content"].endswith("error: only the first call of a turn is answered")
