"""The rollout engine of a recipe: in the run's process, over worker processes, or over HTTP."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from winnow.config.base import Section
from winnow.config.judge import SequenceClassifier, engines_of, rename_for_judge, sharding_of
from winnow.config.model import LoraAdapter
from winnow.config.roles import Roles
from winnow.config.rollout import (
    CustomEngine,
    HttpEngineConfig,
    TorchEngineConfig,
    VllmEngineConfig,
)
from winnow.config.root import Config
from winnow.config.rules import longest_tokens
from winnow.config.trainer import LocalCluster
from winnow.data.tokenizer import decoder
from winnow.errors import ConfigError, ModelError
from winnow.models.fetch import local_folder
from winnow.ranks.models import LoadedPolicy
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import Engine, load_custom_engine

if TYPE_CHECKING:
    from winnow.learning.canary import Canary
    from winnow.rollout.http.engine import HttpEngine
    from winnow.workers.group import WorkerGroup

_POSITIONS = 1024
"""The number of positions of a model that does not say how many it has."""


def check_engine(config: Config) -> None:
    """Refuse an engine that is not installed, before anything begins; nodes of Ray may differ.

    Raises:
        ConfigError: vLLM is absent, or too old.
    """
    if not isinstance(config.cluster, LocalCluster):
        return
    from winnow.rollout.vllm.refusals import check_installed

    if isinstance(config.rollout.engine, VllmEngineConfig):
        check_installed()
    if isinstance(engines_of(config.reward.judge), VllmEngineConfig):
        with name_judge():
            check_installed()


@contextlib.contextmanager
def name_judge() -> Iterator[None]:
    """Name the judge's settings in errors of the engines, not the policy's."""
    try:
        yield
    except (ConfigError, ModelError) as error:
        raise type(error)(rename_for_judge(str(error))) from error


def adapter_alone(config: Config) -> LoraAdapter | None:
    """Return the adapter that engines apart get alone; None where they get whole weights."""
    adapter = config.model.adapter
    if not isinstance(adapter, LoraAdapter) or adapter.publish == "merged":
        return None
    return adapter


def _sleeps(config: Config) -> bool:
    engine = config.rollout.engine
    return isinstance(engine, VllmEngineConfig) and engine.sleep


def canary_of(config: Config, policy: LoadedPolicy) -> Canary:
    """Draw the sequences that publications are checked with."""
    from winnow.learning.canary import Canary

    return Canary.random(
        policy.vocabulary,
        getattr(policy.model.config, "max_position_embeddings", None) or _POSITIONS,
        policy.model.dtype,
        config.rollout.temperature,
    )


def make_engine(config: Config, policy: LoadedPolicy) -> Engine:
    """Make the engine of this process: the embedded one over the policy's weights, or a user's.

    Raises:
        ConfigError: a user's engine cannot be made.
    """
    section = config.rollout.engine
    # A stop string may be a special token, such as a chat template's end of a turn.
    decode = decoder(policy.tokenizer, special_tokens=True)
    if isinstance(section, CustomEngine):
        live = not config.run.deterministic
        options = {"vocab_size": policy.vocabulary, "decode": decode, "live_updates": live}
        return load_custom_engine(section.path, section.options, model=policy.model, **options)
    return TorchEngine(policy.model, decode=decode, **_engine_options(config, policy))


def http_engine(config: Config, policy: LoadedPolicy) -> HttpEngine:
    """Make the engine over a recipe's servers.

    Raises:
        ConfigError: one of them does not answer, or does not offer what is needed.
    """
    from winnow.http.client import token_of
    from winnow.rollout.http.engine import make_http_engine

    section = config.rollout.engine
    assert isinstance(section, HttpEngineConfig)
    folder = section.weights_folder
    return make_http_engine(
        section.url,
        token_of(section.token_env, "rollout.engine.token_env"),
        section.timeout_s,
        policy.vocabulary,
        policy.model.config.vocab_size,
        max(longest_tokens(config), *map(len, canary_of(config, policy).sequences)),
        exact_draws=section.exact_draws,
        slots=section.slots,
        decode=decoder(policy.tokenizer, special_tokens=True),
        live_updates=not config.run.deterministic,
        folder=None if folder is None else Path(folder).expanduser().absolute(),
        reload_timeout_s=section.reload_timeout_s,
        restart_timeout_s=section.restart_timeout_s,
    )


def _engine_options(config: Config, policy: LoadedPolicy) -> dict[str, Any]:
    engine = config.rollout.engine
    if not isinstance(engine, TorchEngineConfig | VllmEngineConfig):
        engine = TorchEngineConfig()
    return {
        **engine_options(engine, policy.vocabulary, longest_tokens(config)),
        "live_updates": not config.run.deterministic,
        "fp32_head": config.model.fp32_head,
        **({"routes": True} if config.rollout.routing_replay else {}),
    }


def engine_options(engine: Section, vocabulary: int, longest: int) -> dict[str, Any]:
    """Return the arguments that torch's and vLLM's engines have alike, of their section.

    Args:
        vocabulary: ids at or beyond it are never drawn.
        longest: most tokens of a prompt and its answer.
    """
    options = engine.model_dump(include={"slots", "prefill_tokens", "cache_gib"})
    return options | {"vocab_size": vocabulary, "longest": longest}


def vllm_options(engine: Section) -> dict[str, Any]:
    """Return the arguments that vLLM's worker has beyond those; none for another engine."""
    if not isinstance(engine, VllmEngineConfig):
        return {}
    names = {"tensor_parallel", "prefix_caching", "chunked_prefill", "sleep", "extra"}
    return engine.model_dump(include=names)


def _engine_arguments(config: Config, policy: LoadedPolicy, start: str | None) -> dict[str, Any]:
    """Return the arguments of an engine in a process of its own."""
    from winnow.models.lora import adapter_base, saved_adapter

    base, alone = None, adapter_alone(config)
    if isinstance(config.model.adapter, LoraAdapter):
        folder = Path(local_folder(policy.path))
        base = adapter_base(folder, start or config.model.source)
        alone = alone and saved_adapter(folder, alone)
    return {
        "model": base or policy.path,
        "dtype": config.model.dtype,
        "tokenizer": policy.tokenizer_folder if config.rollout.stop else None,
        "trust_remote_code": config.model.trust_remote_code,
        **({} if alone is None else {"adapter": alone}),
        **_engine_options(config, policy),
        **vllm_options(config.rollout.engine),
    }


def engine_of(
    config: Config, policy: LoadedPolicy, groups: Mapping[str, Sequence[WorkerGroup]]
) -> Engine:
    """Make the engine over a recipe's processes or servers, or in this process.

    Args:
        groups: by role, as `StartWorkers` returns them.

    Raises:
        ConfigError: as `make_engine` and `http_engine` raise it.
    """
    if isinstance(config.rollout.engine, HttpEngineConfig):
        return http_engine(config, policy)
    if "rollout" not in groups:
        return make_engine(config, policy)
    from winnow.rollout.engine_group import EngineGroup, quantum_for
    from winnow.rollout.remote_engine import RemoteEngine

    engines = [RemoteEngine(group, group.ask("ask", "")[0]) for group in groups["rollout"]]
    if len(engines) == 1:
        return engines[0]
    quantum = quantum_for(config.rollout.max_response_tokens)
    return EngineGroup(engines, config.run.deterministic, quantum)


def has_own_weights(config: Config, roles: Roles | Mapping[str, Any]) -> bool:
    """Return whether answers are written with other weights than those of the run's process.

    Args:
        roles: of which one is `rollout` where an engine has processes.
    """
    return isinstance(config.rollout.engine, HttpEngineConfig) or "rollout" in roles


def holds_no_weights(config: Config, roles: Roles | Mapping[str, Any]) -> bool:
    """Return whether other processes train the policy and write its answers."""
    return "policy" in roles and has_own_weights(config, roles)


def uses_device(config: Config, roles: Roles | Mapping[str, Any]) -> bool:
    """Return whether the run's own process computes with a model where there is a GPU.

    A reward model in it does so on this machine; on Ray, GPUs belong to actors.
    """
    judges = isinstance(config.reward.model, SequenceClassifier) and not config.reward.processes
    judges = judges and sharding_of(config.reward.model) is None
    is_local = isinstance(config.cluster, LocalCluster)
    return not holds_no_weights(config, roles) or (judges and is_local)
