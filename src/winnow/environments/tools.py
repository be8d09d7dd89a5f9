"""Python functions as tools of the policy: schemas, calls with limits, the environment of them.

A function with type hints and a docstring is a tool:

    def calc(expression: str) -> str:
        \"\"\"Work out a sum or a product.

        Args:
            expression: such as 37*48.
        \"\"\"

A class is one, too: an object of it is made for each conversation, with the row's
`tools_kwargs.NAME.create_kwargs`, and its `__call__` has the hints and the docstring.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from winnow.environments import Message, Step, ToolCall, Turn
from winnow.errors import ConfigError, EnvironmentFault

Tool = Callable[..., Any]
_FIELD = "environment.tools"
_CUT = "\n… (cut) …\n"


class _TimeoutInterrupt(BaseException):
    """Ends a synchronous tool whose time is up; `except Exception` in it does not catch this."""


@dataclass(frozen=True)
class ToolResult:
    """A tool's result with a reward for the turn, which a tool may return in place of a text."""

    text: str
    reward: float = 0.0


def tool_schema(tool: Tool) -> dict[str, Any]:
    """Return the JSON schema of a tool, from its signature and docstring.

    Raises:
        ConfigError: a hint, the docstring, or an argument in it is missing.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
    )

    name = tool.__name__
    function: Any = tool.__call__ if inspect.isclass(tool) else tool
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"{_FIELD}: {name}: {reason}; give each argument a type hint, and a line under Args: "
            "in the docstring"
        ) from error
    schema["function"]["name"] = name
    schema["function"]["parameters"]["properties"].pop("self", None)
    return schema


def is_async_tool(tool: Tool) -> bool:
    """Return whether calls of a tool may wait side by side."""
    called = getattr(tool, "__call__", None)  # noqa: B004  an object's own
    return any(map(inspect.iscoroutinefunction, (tool, called)))


class ToolEnvironment:
    """Answers a turn's calls by tools; a turn without calls ends the conversation.

    Whatever a tool raises is a text to the policy, but for an `EnvironmentFault`. The reward comes
    from the reward function, and from tools that return a `ToolResult`.

    A call whose time is up is a text to the policy, too: an asynchronous tool is cancelled, and a
    synchronous one is interrupted by a signal, which reaches Python code and waits. A call that
    hangs in C code ends with its process, at the limit of the environment's reply.

    Args:
        timeout_s: limit of a call; a tool with a true `limits_its_time` has none.
        output_chars: longest result; the middle of a longer one is cut out.
        most_calls: answered calls of a turn, if the chat template cannot show more.
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        timeout_s: float,
        output_chars: int,
        most_calls: int | None = None,
    ) -> None:
        self._makers = {tool.__name__: tool for tool in tools}
        self._timeout_s, self._output_chars = timeout_s, output_chars
        self._most_calls = most_calls
        self._tools: dict[str, Tool] = {}
        self._rewards: dict[str, float] = {}

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        """Make the tools of a conversation; its first messages are the row's."""
        info = row.get("extra_info")
        kwargs = (info or {}).get("tools_kwargs") if isinstance(info, Mapping) else None
        for name, maker in self._makers.items():
            tool: Any = maker
            if inspect.isclass(maker):
                tool = maker(**((kwargs or {}).get(name) or {}).get("create_kwargs") or {})
            self._tools[name] = tool
        return ()

    async def step(self, turn: Turn) -> Step:
        """Call the tools, in the order of the calls."""
        if not turn.calls and not turn.malformed:
            return Step(done=True)
        messages: list[Message] = []
        reward = 0.0
        for call in turn.calls[: self._most_calls]:
            result = await self._call(call)
            reward += result.reward
            text = self._shorten(result.text)
            messages.append({"role": "tool", "name": call.name, "content": text})
        messages += [
            {"role": "tool", "name": "error", "content": f"error: {fault}"}
            for fault in turn.malformed
        ]
        if self._most_calls is not None and len(turn.calls + turn.malformed) > self._most_calls:
            text = f"{messages[0]['content']}\nerror: only the first call of a turn is answered"
            messages = [{**messages[0], "content": text}]
        return Step(messages, reward, metrics=dict(self._rewards))

    async def _call(self, call: ToolCall) -> ToolResult:
        name = call.name
        if not name and len(self._tools) == 1:  # a pattern without a group for it
            (name,) = self._tools
        tool = self._tools.get(name)
        if tool is None:
            names = ", ".join(self._tools)
            return ToolResult(f"error: no tool has the name {name!r}; there are {names}")
        try:
            inspect.signature(tool).bind(**call.arguments)
        except TypeError as error:
            return ToolResult(f"error: {error}")
        limit_s = None if getattr(tool, "limits_its_time", False) else self._timeout_s
        limit = None
        try:
            with _interrupted_after(limit_s):
                result = tool(**call.arguments)
            if inspect.isawaitable(result):
                async with asyncio.timeout(limit_s) as limit:
                    result = await result
        except EnvironmentFault:
            raise
        except (Exception, SystemExit, _TimeoutInterrupt) as error:
            if (limit and limit.expired()) or isinstance(error, _TimeoutInterrupt):
                return ToolResult(f"error: {name} did not finish within {self._timeout_s:g} s")
            return ToolResult(f"error: {type(error).__name__}: {error}")
        if not isinstance(result, ToolResult):
            return ToolResult(str(result))
        if result.reward:
            self._rewards[name] = self._rewards.get(name, 0.0) + result.reward
        return result

    def _shorten(self, text: str) -> str:
        most = self._output_chars
        if len(text) <= most:
            return text
        return text[: most - most // 2] + _CUT + text[len(text) - most // 2 :]


@contextlib.contextmanager
def _interrupted_after(limit_s: float | None) -> Iterator[None]:
    """Raise `_TimeoutInterrupt` in the block after a time; the block runs in the main thread."""
    if limit_s is None:
        yield
        return

    def interrupt(*_: object) -> None:
        raise _TimeoutInterrupt

    previous = signal.signal(signal.SIGALRM, interrupt)
    remaining = signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *remaining)
        signal.signal(signal.SIGALRM, previous)
