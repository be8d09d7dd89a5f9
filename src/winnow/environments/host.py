"""Environments in a process of a pool: what `EnvironmentPool` sends there, and what answers it."""

from __future__ import annotations

import inspect
import math
import pickle
import time
import traceback
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

from winnow.config.reward import FusionConfig, SandboxConfig
from winnow.environments import Environment, Step, Turn, messages_of
from winnow.environments.tools import ToolEnvironment, is_async_tool
from winnow.errors import ConfigError
from winnow.rewards.task import Failure, make_failure, run_awaitable
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
    state: bytes = b""
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
        self._file = inspect.getsourcefile(loaded[0]) if loaded else None
        if tools:
            self._make = partial(ToolEnvironment, loaded, **options)
            self.is_async = any(map(is_async_tool, loaded))
        else:
            kind: Any = loaded[0]
            missing = [
                name for name in ("reset", "step") if not callable(getattr(kind, name, None))
            ]
            if missing:
                raise ConfigError(
                    f"{field} {paths[0]}: it has no method {', '.join(missing)}; an environment is "
                    "a class with reset(row) and step(turn)"
                )
            self._make = partial(kind, **options)
            self.is_async = inspect.iscoroutinefunction(kind.step)
        self._environments: OrderedDict[int, tuple[Environment, int]] = OrderedDict()
        """By conversation, the environment and the turns that it has replied to."""

    def call_without_loop(self, items: Sequence[StepRequest]) -> list[TurnReplies] | Failure:
        """Reply to the turns of one request."""
        (request,) = items
        began = time.perf_counter()
        try:
            environment, turns, steps = self._begin(request)
            for turn in turns:
                reply: Any = environment.step(turn)
                steps.append(_check_step(run_awaitable(reply)))
            return self._end(request, environment, steps, began)
        except BaseException as error:
            return make_failure(error, self._file)

    async def call(self, items: Sequence[StepRequest]) -> list[TurnReplies] | Failure:
        """Reply to the turns of one request, while other requests wait."""
        (request,) = items
        began = time.perf_counter()
        try:
            environment, turns, steps = self._begin(request)
            for turn in turns:
                reply: Any = environment.step(turn)
                steps.append(_check_step(await reply if inspect.isawaitable(reply) else reply))
            return self._end(request, environment, steps, began)
        except BaseException as error:
            return make_failure(error, self._file)

    def _begin(self, request: StepRequest) -> tuple[Any, Sequence[Turn], list[Step]]:
        """Return the environment of a conversation, and the turns that it has not seen."""
        for conversation in request.closed:
            self._close(conversation)
        # Out of the table while it works: a step that fails or is cancelled leaves none.
        environment, seen = self._environments.pop(request.conversation, (None, 0))
        if environment is None or seen >= len(request.turns):
            environment, seen = self._make(), 0
            observation = environment.reset(request.row)
            first = messages_of(observation) if observation else ()
            if not request.turns:
                return environment, (), [Step(first)]
            if first != request.first:
                raise ValueError(
                    "reset returned other messages than those of the prompt; let them depend on "
                    "the row alone"
                )
            if request.state:
                cast(Any, environment).load_state_dict(pickle.loads(request.state))
                seen = len(request.turns) - 1
        return environment, request.turns[seen:], []

    def _end(
        self, request: StepRequest, environment: Environment, steps: list[Step], began: float
    ) -> list[TurnReplies]:
        seconds = time.perf_counter() - began
        save = getattr(environment, "state_dict", None)
        if callable(save) and request.turns and not steps[-1].done:
            steps[-1] = replace(steps[-1], state=pickle.dumps(save()))
        self._environments[request.conversation] = environment, len(request.turns)
        if not request.turns:
            self._close(request.conversation)
        elif len(self._environments) > _MOST:
            self._close(next(iter(self._environments)))
        return [TurnReplies(steps, seconds)]

    def _close(self, conversation: int) -> None:
        environment, _ = self._environments.pop(conversation, (None, 0))
        close = getattr(environment, "close", None)
        if callable(close):
            try:
                close()
            except Exception:  # no fault of the conversation whose request is being served
                traceback.print_exc()


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
    messages = () if step.done else tuple(dict(each) for each in messages_of(step.observation))
    if not messages and not step.done:
        raise ValueError("step returned no observation and done=False; return a text, or done=True")
    return Step(messages, reward, bool(step.done), metrics)
