"""Environments: what replies to the policy's turns in a conversation."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from winnow.config.base import CODE, Change, ImportPath, Options, Section, check_import_path
from winnow.config.reward import FusionConfig, SandboxConfig


class NoEnvironment(Section):
    """Answers are single turns."""

    name: Literal["none"] = "none"


class _Conversation(Section):
    max_turns: int = Field(8, ge=1)
    """Maximum number of turns of the policy in a conversation."""
    max_turn_tokens: int | None = Field(None, ge=1)
    """Maximum number of tokens of a turn; null: no limit but rollout.max_response_tokens, which
    counts all tokens after the prompt."""
    history: Literal["append", "fork"] = "append"
    """append: a conversation grows by tokens, and turns stay as they were sampled; fork: with each
    reply the chat template renders it anew, and where that changes earlier tokens the next turn
    begins with the rendered ones, in a context of its own. rollout.max_response_tokens then bounds
    each context, behind as many tokens as the prompt has, and the sampled tokens in all."""
    processes: Annotated[int, Change.ON_RESUME] = Field(0, ge=0)
    """Number of processes that hold the environments, each with its workers, on any node of a Ray
    cluster; 0 holds them in the run's process, as winnow eval and winnow reward always do."""
    workers: Annotated[int | None, Change.ON_RESUME] = Field(None, ge=1)
    """Worker processes of the environments, per environment process; null: half of the cores."""
    timeout_s: Annotated[float, Change.ON_RESUME] = Field(60.0, gt=0)
    """Seconds that an environment has for a reply."""
    memory_mb: Annotated[int, Change.ON_RESUME] = Field(2048, ge=64)
    """Resident memory that a process of environments may use, in MiB."""
    reply_lag_ticks: int = Field(16, ge=0)
    """Deterministic mode: decode ticks between the end of a turn and its reply taking effect."""


def _check_calls(value: str) -> str:
    if value != "auto":
        try:
            groups = re.compile(value, re.DOTALL).groupindex
        except re.error as error:
            raise ValueError(f"is no regular expression: {error}") from error
        if not groups:
            raise ValueError("has no named group, such as (?P<expression>…), for an argument")
    return value


_PYTHON_TOOLS = {
    name: f"winnow.environments.python_tool:{name}" for name in ("python", "python_session")
}


def _check_tool(value: str) -> str:
    if ":" not in value and value not in _PYTHON_TOOLS:
        names = " or ".join(_PYTHON_TOOLS)
        raise ValueError(f"must be FILE.py:NAME, package.module:NAME, {names}")
    return _PYTHON_TOOLS.get(value) or check_import_path(value)


ToolPath = Annotated[str, AfterValidator(_check_tool)]


class ToolsEnvironment(_Conversation):
    """Python functions as tools; a turn without a call ends the conversation."""

    name: Literal["tools"] = "tools"
    tools: Annotated[tuple[ToolPath, ...], CODE] = ()
    """Functions, or classes of which each conversation has an object: FILE.py:NAME or
    package.module:NAME; python and python_session run programs in reward.sandbox."""
    calls: Annotated[str, AfterValidator(_check_calls)] = "auto"
    """auto reads calls as Qwen, Hermes and Llama write them; a regular expression reads others,
    with a named group for each argument, and `name` for that of the tool."""
    tool_timeout_s: Annotated[float, Change.ON_RESUME] = Field(10.0, gt=0)
    """Seconds of a call, after which it is ended and the policy is told so."""
    output_chars: int = Field(4096, ge=1)
    """Longest text of a tool's result; the middle of a longer one is cut out."""

    def conflicts(self) -> Iterator[str]:
        if not self.tools:
            yield "environment.tools is empty; set environment.tools=[FILE.py:NAME]"
        names = [path.rpartition(":")[2] for path in self.tools]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            yield f"environment.tools has {twice} twice; rename one of the functions"


class CustomEnvironment(_Conversation):
    """A class of environments, given by its import path."""

    name: Literal["custom"] = "custom"
    path: ImportPath
    """Place of the class: FILE.py:NAME or package.module:NAME."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the class."""


class TextArenaEnvironment(_Conversation):
    """Games of TextArena for one player (`pip install 'winnow-rl[textarena]'`)."""

    name: Literal["textarena"] = "textarena"
    id: str = Field(min_length=1)
    """Name of the game, such as GuessTheNumber-v0."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of textarena.make, such as {max_number: 50}."""
    max_turns: int = Field(64, ge=1)
    """Maximum number of turns of the policy; most games have a lower one."""


class GymnasiumEnvironment(_Conversation):
    """Environments of Gymnasium with discrete actions (`pip install 'winnow-rl[gymnasium]'`)."""

    name: Literal["gymnasium"] = "gymnasium"
    id: str = Field(min_length=1)
    """Name of the environment, such as FrozenLake-v1."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Further arguments of gymnasium.make, such as {is_slippery: false}."""
    actions: tuple[str, ...] = ()
    """Names of the actions, in their order; empty: left, down, … for the known ones, else numbers
    alone."""
    max_turns: int = Field(64, ge=1)
    """Maximum number of turns of the policy."""

    def conflicts(self) -> Iterator[str]:
        if ":" in self.id:
            yield (
                f"environment.id={self.id} names a module that Gymnasium would import; use "
                "environment=custom with a class that makes it"
            )


HostedEnvironment = (
    ToolsEnvironment | CustomEnvironment | TextArenaEnvironment | GymnasiumEnvironment
)
Environment = Annotated[NoEnvironment | HostedEnvironment, Field(discriminator="name")]


def host_arguments(
    config: HostedEnvironment, sandbox: SandboxConfig | FusionConfig, workers: int
) -> tuple[Any, ...]:
    """Return the arguments of `EnvironmentHost`.

    Args:
        sandbox: of the recipe, which its processes share.
        workers: number of these, on all nodes.
    """
    if isinstance(config, CustomEnvironment):
        return "environment.path", (config.path,), config.options, False
    if isinstance(config, TextArenaEnvironment):
        path = "winnow.environments.textarena:TextArenaGame"
        return "environment.id", (path,), {"id": config.id, "options": config.options}, False
    if isinstance(config, GymnasiumEnvironment):
        path = "winnow.environments.gymnasium:GymnasiumEpisode"
        episode = {"id": config.id, "options": config.options, "actions": config.actions}
        return "environment.id", (path,), episode, False
    options = {"timeout_s": config.tool_timeout_s, "output_chars": config.output_chars}
    arguments = "environment.tools", config.tools, options, True
    if not set(_PYTHON_TOOLS.values()) & set(config.tools):
        return arguments
    if sandbox.max_concurrent is not None:
        most = max(1, sandbox.max_concurrent // workers)
        sandbox = sandbox.model_copy(update={"max_concurrent": most})
    return *arguments, sandbox
