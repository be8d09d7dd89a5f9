"""The environments of a recipe, and the engine that runs conversations with them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from winnow.config.data import DataConfig
from winnow.config.environment import (
    CustomEnvironment,
    Environment,
    NoEnvironment,
    ToolsEnvironment,
    host_arguments,
)
from winnow.config.root import Config
from winnow.environments import Turn
from winnow.errors import ConfigError, DataError, EnvironmentFault, ModelError
from winnow.ranks.models import LoadedPolicy
from winnow.rollout.engine import Engine
from winnow.types import Prompt
from winnow.user_code import load_user_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from winnow.data.prompts import FirstMessages
    from winnow.data.sources import Row
    from winnow.environments import Message
    from winnow.environments.pool import EnvironmentPool

_PROGRESS_S = 10.0
"""Seconds between lines on the first messages of many rows."""
_ATTEMPTS = 3
"""At the first messages of a row whose environment fails."""


def tool_schemas(config: Environment) -> list[Mapping[str, Any]]:
    """Return the JSON schemas of a recipe's tools, which chat templates show to the policy.

    Raises:
        ConfigError: a tool cannot be imported, or has no schema.
    """
    from winnow.environments.tools import tool_schema

    if isinstance(config, CustomEnvironment):
        tools = getattr(load_user_object(config.path, "environment.path", ConfigError), "tools", ())
        if not isinstance(tools, list | tuple):
            raise ConfigError(
                f"environment.path {config.path}: tools is a {type(tools).__name__}; make it an "
                "attribute of the class, a list of functions"
            )
        return [tool_schema(tool) for tool in tools]
    if not isinstance(config, ToolsEnvironment) or config.calls != "auto":
        return []
    field = "environment.tools"
    return [tool_schema(load_user_object(path, field, ConfigError)) for path in config.tools]


def _check_template(
    config: Environment, data: DataConfig, tokenizer: PreTrainedTokenizerBase
) -> int | None:
    """Refuse a chat template with which the policy cannot play its part.

    Returns:
        The most tool calls of a turn that the template can show, if there is a limit.

    Raises:
        ConfigError: there is none, or it shows no tools.
        ModelError: it cannot show a reply.
    """
    from winnow.data.chat_template import ChatTemplate, opening_of

    schemas = tool_schemas(config)
    bare, shown = ChatTemplate(tokenizer, data), ChatTemplate(tokenizer, data, schemas)
    if not bare.text:
        raise ConfigError(
            f"environment={config.name} needs a chat template, and there is none; set "
            "data.chat_template=FILE, or use a model whose tokenizer has one"
        )
    question = [{"role": "user", "content": "q"}]
    texts = {template.render(question, "environment.tools") for template in (bare, shown)}
    if schemas and len(texts) == 1:
        raise ConfigError(
            f"environment={config.name}: the chat template shows no tools; set data.chat_template "
            "to one that does, or describe the calls in the prompts and set environment.calls"
        )
    role = "tool" if isinstance(config, ToolsEnvironment) else "user"
    reply = [{"role": role, "name": "f", "content": "r"}]
    shown.render([*opening_of(reply), *reply], f"environment={config.name}, a reply")
    try:
        shown.render([*opening_of(reply * 2), *reply * 2], "two replies")
    except ModelError:
        return 1
    return None


@contextlib.contextmanager
def environment_processes(
    config: Config, tokenizer: PreTrainedTokenizerBase | None
) -> Iterator[EnvironmentPool | None]:
    """Start the processes of a recipe's environments, which end with the block.

    Args:
        tokenizer: has the chat template; None where turns are replayed without a policy.

    Raises:
        ConfigError: the user's code or the chat template cannot be used, or there is no sandbox.
    """
    section = config.environment
    if isinstance(section, NoEnvironment):
        yield None
        return
    most_calls = None if tokenizer is None else _check_template(section, config.data, tokenizer)
    from winnow.environments.pool import EnvironmentPool
    from winnow.rewards.pool import default_workers
    from winnow.rewards.task import PoolLimits

    workers = section.workers or default_workers()
    names = "environment", "environment", "reply"
    limits = PoolLimits(workers, section.timeout_s, section.memory_mb, *names)
    arguments = host_arguments(section, config.reward.sandbox, workers)
    if isinstance(section, ToolsEnvironment):
        arguments[2]["most_calls"] = most_calls
    with contextlib.closing(EnvironmentPool(limits, arguments)) as pool:
        yield pool


def first_messages_of(
    config: Environment, environments: EnvironmentPool | None, tell: Callable[[str], None]
) -> FirstMessages | None:
    """Return the function that begins the conversations of rows; None where rows do that.

    Args:
        tell: gets a line of progress where it takes long.
    """
    if environments is None or isinstance(config, ToolsEnvironment):
        return None
    numbers, done = itertools.count(), 0

    async def begin(row: Row) -> Sequence[Message]:
        nonlocal done
        columns = row.text, row.data_source, row.ground_truth, row.extra, row.messages
        prompt, number = Prompt(row.uid, np.zeros(0, np.int64), *columns), next(numbers)
        for _ in range(_ATTEMPTS):
            try:
                messages = await environments.first_messages(number, prompt)
            except EnvironmentFault as error:
                fault = error
            else:
                done += 1
                return messages
        raise DataError(f"{row.origin}: the environment's reset fails: {fault}") from fault

    async def begin_together(rows: Sequence[Row]) -> Sequence[Sequence[Message]]:
        return await asyncio.gather(*map(begin, rows))

    def begin_all(rows: Sequence[Row]) -> Sequence[Sequence[Message]]:
        nonlocal done
        done = 0
        # An endless source is asked by the sampler, whose thread runs an event loop already.
        thread = ThreadPoolExecutor(1)
        try:
            gathered = thread.submit(asyncio.run, begin_together(rows))
            while wait([gathered], _PROGRESS_S).not_done:
                tell(f"Environments: first messages of {done:,} of {len(rows):,} rows")
            return gathered.result()
        finally:  # after Ctrl-C it ends with the pool that it asks
            thread.shutdown(wait=False)

    return begin_all


def history_notes(config: Config, policy: LoadedPolicy) -> list[str]:
    """Return a line if the chat template rewrites what conversations keep as it was sampled.

    Raises:
        ModelError: the chat template fails.
    """
    section = config.environment
    if isinstance(section, NoEnvironment) or section.history != "append":
        return []
    from winnow.data.chat_template import ChatTemplate, TurnTokenizer

    template = ChatTemplate(policy.tokenizer, config.data, tool_schemas(section))
    tokenizer = TurnTokenizer(template, policy.tokenizer, policy.stop_ids)
    role = "tool" if isinstance(section, ToolsEnvironment) else "user"
    history = tokenizer.history([{"role": role, "name": "f", "content": "r"}])
    if history == "exact":
        return []
    what = "" if history == "rewritten" else " (it drops their reasoning)"
    return [
        f"The chat template rewrites earlier turns{what}; conversations keep them as sampled "
        "(environment.history=append). Set environment.history=fork to train on what the template "
        "renders."
    ]


def turn_parser(config: Environment) -> Callable[[str], Turn]:
    """Return the parser of a recipe's turns, of their texts without a stop token."""
    from winnow.environments.calls import parse_turn, pattern_parser

    if isinstance(config, ToolsEnvironment) and config.calls != "auto":
        return pattern_parser(config.calls)
    return parse_turn


def with_conversations(
    config: Config, policy: LoadedPolicy, engine: Engine, environments: EnvironmentPool | None
) -> Engine:
    """Return an engine for conversations over one that writes turns, if the recipe has any."""
    environment = config.environment
    if environments is None or isinstance(environment, NoEnvironment):
        return engine
    from winnow.data.chat_template import ChatTemplate, TurnTokenizer
    from winnow.environments.calls import message_of, parse_turn, plain_message
    from winnow.environments.conversation import (
        ConversationEngine,
        ConversationLimits,
        ReplySchedule,
        TurnFormat,
    )

    template = ChatTemplate(policy.tokenizer, config.data, tool_schemas(environment))
    tokenizer = TurnTokenizer(template, policy.tokenizer, policy.stop_ids, policy.vision)
    parse = turn_parser(environment)
    as_message = message_of if parse is parse_turn else plain_message
    shown = None if environment.history == "append" else as_message
    look_ticks = getattr(engine, "quantum_ticks", 1)  # of an `EngineGroup`
    return cast(
        Engine,
        ConversationEngine(
            engine,
            TurnFormat(tokenizer, policy.decode, parse, shown),
            environments,
            ConversationLimits(environment.max_turns, environment.max_turn_tokens),
            ReplySchedule(config.run.deterministic, environment.reply_lag_ticks, look_ticks),
        ),
    )
