"""Environments in a process of a pool: what `EnvironmentPool` sends there, and what answers it."""

from __future__ import annotations

import contextlib
import inspect
import json
import math
import time
import traceback
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from winnow.config.reward import FusionConfig, SandboxConfig
from winnow.environments import Environment, Message, Step, Turn, messages_of
from winnow.environments.tools import ToolEnvironment, is_async_tool
from winnow.errors import ConfigError
from winnow.rewards.task import Failure, make_failure
from winnow.sandbox import start as start_sandbox
from winnow.user_code import load_user_object

_MOST = 10_000
"""Environments that a process keeps; the one that was used longest ago is closed."""


class StepRequest(NamedTuple):
    """The replies to a conversation's last turns are wanted, or its first messages."""

    conversation: int
    row: Mapping[str, Any]
    turns: tuple[Turn, ...]
    """All of the policy's; none: the observation of `reset` is wanted."""
    first: tuple[Mapping[str, Any], ...] = ()
    """The messages that `reset` returned for the prompt; none: it left those of the row."""
    state: str = ""
    """`Step.state` of the reply before the last turn."""
    closed: tuple[int, ...] = ()
    """Conversations that have ended."""


class TurnReplies(NamedTuple):
    """Replies to turns."""

    steps: list[Step]
    seconds: float
    """Between the request's arrival at the environment and the last reply."""


class EnvironmentHost:
    """Runs the environments of many conversations; a `PoolRuntime`.

    Its process is not replaced before the limit of memory: replays would fill it again.

    Args:
        field: key of the recipe that names the user's code, for errors.
        paths: of a class of environments; or, with `tools`, of functions and classes.
        options: keyword arguments of the class, or of `ToolEnvironment`.
        tools: True if the paths are tools.
        sandbox: for the programs of tools that run some.

    Raises:
        ConfigError: the code cannot be imported, or is none of these.
        RewardError: there is no sandbox.
    """

    is_stateful = True

    def __init__(
        self,
        field: str,
        paths: Sequence[str],
        options: Mapping[str, Any],
        tools: bool,
        sandbox: SandboxConfig | FusionConfig | None = None,
    ) -> None:
        if sandbox is not None:
            start_sandbox(sandbox)
        loaded = [load_user_object(path, field, ConfigError) for path in paths]
        self._file = None
        with contextlib.suppress(OSError, TypeError):  # a notebook's, or an object with __call__
            self._file = inspect.getsourcefile(loaded[0]) if loaded else None
        if tools:
            self._make = partial(ToolEnvironment, loaded, **options)
            self.is_async = any(map(is_async_tool, loaded))
        else:
            kind: Any = loaded[0]
            names = ["reset", "step", *(["load_state_dict"] if hasattr(kind, "state_dict") else [])]
            missing = [name for name in names if not callable(getattr(kind, name, None))]
            if missing:
                raise ConfigError(
                    f"{field} {paths[0]}: it has no method {', '.join(missing)}; an environment is "
                    "a class with reset(row) and step(turn)"
                )
            self._make = partial(kind, **options)
            self.is_async = any(map(inspect.iscoroutinefunction, (kind.reset, kind.step)))
        self._environments: OrderedDict[int, tuple[Environment, int]] = OrderedDict()
        """By conversation, the environment and the turns that it has replied to."""

    def call_without_loop(self, items: Sequence[StepRequest]) -> list[TurnReplies] | Failure:
        """Reply to the turns of one request; no method of these environments waits."""
        coroutine = self.call(items)
        try:
            coroutine.send(None)
        except StopIteration as end:
            outcome: list[TurnReplies] | Failure = end.value
            return outcome
        coroutine.close()
        return Failure("the environment returned an awaitable; define reset and step by async def")

    async def call(self, items: Sequence[StepRequest]) -> list[TurnReplies] | Failure:
        """Reply to the turns of one request, while other requests wait."""
        (request,) = items
        began, environment = time.perf_counter(), None
        try:
            for conversation in request.closed:
                self._close(conversation)
            # Out of the table while it works: a step that fails or is cancelled leaves none.
            environment, seen = self._environments.pop(request.conversation, (None, 0))
            steps: list[Step] = []
            if environment is None or seen >= len(request.turns):
                _dispose(environment)
                environment = self._make()
                seen, steps = await self._reset(environment, request)
            for turn in request.turns[seen:]:
                reply: Any = environment.step(turn)
                steps.append(_check_step(await reply if inspect.isawaitable(reply) else reply))
            return self._end(request, environment, steps, began)
        except BaseException as error:
            _dispose(environment)
            return make_failure(error, self._file)

    async def _reset(self, environment: Any, request: StepRequest) -> tuple[int, list[Step]]:
        """Begin a conversation; return the turns that need no replay, and its first messages where
        they are all that is asked for."""
        observation: Any = environment.reset(request.row)
        if inspect.isawaitable(observation):
            observation = await observation
        first = _encodable(messages_of(observation)) if observation else ()
        if any(not isinstance(message["content"], str) for message in first):
            raise ValueError("reset returned parts; give texts, with <image> for each of the row's")
        if not request.turns:
            return 0, [Step(first)]
        if first != request.first:
            raise ValueError(
                "reset returned other messages than those of the prompt; let them depend on "
                "the row alone"
            )
        if request.state:
            environment.load_state_dict(json.loads(request.state))
        return len(request.turns) - 1 if request.state else 0, []

    def close(self) -> None:
        """Close all environments, at the end of the process."""
        for conversation in [*self._environments]:
            self._close(conversation)

    def _end(
        self, request: StepRequest, environment: Environment, steps: list[Step], began: float
    ) -> list[TurnReplies]:
        seconds = time.perf_counter() - began
        save = getattr(environment, "state_dict", None)
        if callable(save) and request.turns and not steps[-1].done:
            steps[-1] = replace(steps[-1], state=_dump(save()))
        self._environments[request.conversation] = environment, len(request.turns)
        if not request.turns:
            self._close(request.conversation)
        elif len(self._environments) > _MOST:
            self._close(next(iter(self._environments)))
        return [TurnReplies(steps, seconds)]

    def _close(self, conversation: int) -> None:
        _dispose(self._environments.pop(conversation, (None, 0))[0])


def _dispose(environment: Environment | None) -> None:
    """Close an environment, if it can be."""
    close = getattr(environment, "close", None)
    if callable(close):
        try:
            close()
        except Exception:  # no fault of the conversation whose request is being served
            traceback.print_exc()


def _encodable(messages: Sequence[Message]) -> tuple[dict[str, Any], ...]:
    """Return messages whose texts a tokenizer can read: without lone surrogates."""

    def encodable(value: Any) -> Any:
        if isinstance(value, list):
            return [encodable(each) for each in value]
        if isinstance(value, Mapping):
            return {key: encodable(each) for key, each in value.items()}
        return value.encode("utf-8", "replace").decode() if isinstance(value, str) else value

    return tuple(encodable(message) for message in messages)


def _dump(state: object) -> str:
    """Return a state as JSON.

    Raises:
        TypeError: it cannot be.
    """
    text = json.dumps(state)
    if json.loads(text) != state:
        raise TypeError(
            "state_dict must return what JSON can hold: lists, no tuples; texts as keys"
        )
    return text


def _check_step(step: Any) -> Step:
    """Return a step as plain values, which any process can read.

    Raises:
        TypeError, ValueError: it is none, or a number in it is not finite.
    """
    if not isinstance(step, Step):
        raise TypeError(f"step must return a Step, got {type(step).__name__}")
    reward = float(step.reward)
    metrics = {str(name): float(value) for name, value in step.metrics.items()}
    for name, value in {"reward": reward, **metrics}.items():
        if not math.isfinite(value):
            raise ValueError(f"step returned {value} as {name}")
    messages = _encodable(step.messages)
    if not messages and not step.done:
        raise ValueError("step returned no observation and done=False; return a text, or done=True")
    return Step(messages, reward, bool(step.done), metrics)
