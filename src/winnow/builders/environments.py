"""The environments of a recipe, and the engine that runs conversations with them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from winnow.builders.topology import RunModels
from winnow.config.data import DataConfig
from winnow.config.environment import (
    Environment,
    HostedEnvironment,
    NoEnvironment,
    ToolsEnvironment,
    host_arguments,
)
from winnow.config.root import Config
from winnow.environments import Turn
from winnow.errors import ConfigError
from winnow.ranks.models import LoadedPolicy
from winnow.rollout.engine import Engine
from winnow.user_code import load_user_object

if TYPE_CHECKING:
    from winnow.environments.conversation import Environments


def tool_schemas(config: Environment) -> list[Mapping[str, Any]]:
    """Return the JSON schemas of a recipe's tools, which chat templates show to the policy.

    Raises:
        ConfigError: a tool cannot be imported, or has no schema.
    """
    if not isinstance(config, ToolsEnvironment) or config.calls != "auto":
        return []
    from winnow.environments.tools import tool_schema

    field = "environment.tools"
    return [tool_schema(load_user_object(path, field, ConfigError)) for path in config.tools]


@contextlib.contextmanager
def environment_processes(config: Environment) -> Iterator[Environments | None]:
    """Start the processes of a recipe's environments, which end with the block.

    Raises:
        ConfigError: the user's code cannot be used.
    """
    if isinstance(config, NoEnvironment):
        yield None
        return
    from winnow.environments.pool import EnvironmentPool
    from winnow.rewards.pool import default_workers
    from winnow.rewards.task import PoolLimits

    workers = config.workers or default_workers()
    names = "environment", "environment", "reply"
    limits = PoolLimits(workers, config.timeout_s, config.memory_mb, *names)
    with contextlib.closing(EnvironmentPool(limits, host_arguments(config))) as pool:
        yield pool


def with_conversations(
    config: Config, policy: LoadedPolicy, placed: RunModels, environments: Environments | None
) -> RunModels:
    """Return a run's models with an engine for conversations over theirs, if the recipe has any.

    Raises:
        ConfigError: prompts are rendered without a chat template.
    """
    if isinstance(config.environment, NoEnvironment):
        return placed
    engine = make_conversation_engine(
        config.environment,
        config.data,
        policy,
        placed.engine,
        environments,
        deterministic=config.run.deterministic,
    )
    return replace(placed, engine=engine)


def make_conversation_engine(
    config: HostedEnvironment,
    data: DataConfig,
    policy: LoadedPolicy,
    engine: Engine,
    environments: Environments | None,
    *,
    deterministic: bool,
) -> Engine:
    """Make an engine for conversations over one that writes turns.

    Raises:
        ConfigError: prompts are rendered without a chat template.
    """
    from winnow.data.chat_template import ChatTemplate, TurnTokenizer
    from winnow.environments.calls import parse_turn, pattern_parser
    from winnow.environments.conversation import ConversationEngine, ConversationLimits

    assert environments is not None
    template = ChatTemplate(policy.tokenizer, data, tool_schemas(config))
    if not template.text:
        raise ConfigError(
            f"environment={config.name} needs a chat template, and there is none; set "
            "data.chat_template=FILE, or use a model whose tokenizer has one"
        )
    parse: Callable[[str], Turn] = parse_turn
    if isinstance(config, ToolsEnvironment) and config.calls != "auto":
        parse = pattern_parser(config.calls)
    return cast(
        Engine,
        ConversationEngine(
            engine,
            TurnTokenizer(template, policy.tokenizer, policy.stop_ids),
            parse,
            policy.decode,
            environments,
            ConversationLimits(config.max_turns, config.max_turn_tokens),
            deterministic=deterministic,
            lag_ticks=config.reply_lag_ticks,
            look_ticks=getattr(engine, "quantum_ticks", 1),  # of an `EngineGroup`
        ),
    )
