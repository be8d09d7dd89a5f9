"""The environments of a recipe, and the engine that runs conversations with them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from winnow.types import Prompt
from winnow.user_code import load_user_object

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from winnow.builders.processes import StartWorkers
    from winnow.data.prompts import FirstMessages
    from winnow.data.sources import Row
    from winnow.environments import Message
    from winnow.environments.pool import EnvironmentPool
    from winnow.ranks.models import LoadedPolicy
    from winnow.rollout.engine import Engine
    from winnow.workers.host import RankInfo

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
    config: Config,
    tokenizer: PreTrainedTokenizerBase | None,
    start_workers: StartWorkers | None = None,
) -> Iterator[EnvironmentPool | None]:
    """Start the processes of a recipe's environments, which end with the block.

    Args:
        tokenizer: has the chat template; None where turns are replayed without a policy.
        start_workers: starts `environment.processes`; None: the pool is in this process.

    Raises:
        ConfigError: the user's code or the chat template cannot be used, or there is no sandbox.
        WinnowError: a process cannot be started.
    """
    section = config.environment
    if isinstance(section, NoEnvironment):
        yield None
        return
    most_calls = None if tokenizer is None else _check_template(section, config.data, tokenizer)
    if start_workers is None:
        pool = make_environment_pool(config, most_calls)
    else:
        from winnow.environments.pool import EnvironmentPool, RemotePool

        groups = start_workers(only="environment", most_calls=most_calls)["environment"]
        pool = EnvironmentPool([*map(RemotePool, groups)])
    with contextlib.closing(pool):
        yield pool


def make_environment_pool(
    config: Config, most_calls: int | None, rank: RankInfo | None = None
) -> EnvironmentPool:
    """Make the pool of a recipe's environments, or the part of one of `environment.processes`.

    Args:
        most_calls: as `ToolEnvironment` has them.
        rank: of that process; None: there is one pool, in the run's.

    Raises:
        ConfigError: the user's code cannot be used, or there is no sandbox.
    """
    from winnow.environments.pool import EnvironmentPool, start_pools
    from winnow.rewards.pool import default_workers
    from winnow.rewards.task import PoolLimits

    section = config.environment
    assert not isinstance(section, NoEnvironment)
    workers = section.workers or default_workers()
    names = "environment", "environment", "reply"
    limits = PoolLimits(workers, section.timeout_s, section.memory_mb, *names)
    processes = 1 if rank is None else section.processes
    arguments = host_arguments(section, config.reward.sandbox, workers * processes)
    if isinstance(section, ToolsEnvironment):
        arguments[2]["most_calls"] = most_calls
    return EnvironmentPool(start_pools(limits, arguments))


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


def agent_notes(environment: Environment, rows: Iterable[Prompt | Row]) -> Iterator[str]:
    """Yield warnings about rows for agents or tools of verl that the recipe does not have."""
    tools = {path.rpartition(":")[2] for path in getattr(environment, "tools", ())}
    for row in rows if environment.name in ("none", "tools") else ():
        info, agent = row.extra.get("extra_info"), row.extra.get("agent_name")
        kwargs = info.get("tools_kwargs") if isinstance(info, Mapping) else None
        named = kwargs.items() if isinstance(kwargs, Mapping) else ()
        # A Parquet file gives each row the keys of all, with nulls.
        missing = [name for name, value in named if value is not None and name not in tools]
        if tools and missing:
            yield (
                f"Warning: row {row.uid} has extra_info.tools_kwargs.{missing[0]}, and "
                f"environment.tools has no {missing[0]}; add FILE.py:{missing[0]} to it, or remove "
                "the key from the rows"
            )
        elif not tools and (agent != "single_turn_agent" if agent else missing):
            yield (
                f"Warning: row {row.uid} is for {agent or 'tool_agent'}, and environment=none "
                "answers it in one turn without tools; set environment=tools and "
                "environment.tools=[FILE.py:NAME], or agent_name=single_turn_agent in the rows"
            )


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
        "Engine",
        ConversationEngine(
            engine,
            TurnFormat(tokenizer, policy.decode, parse, shown),
            environments,
            ConversationLimits(environment.max_turns, environment.max_turn_tokens),
            ReplySchedule(config.run.deterministic, environment.reply_lag_ticks, look_ticks),
        ),
    )
