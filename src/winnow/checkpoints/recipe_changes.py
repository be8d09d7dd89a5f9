"""Settings that may change where a run goes on, and where another run is forked from it.

| | on resuming | in a fork |
|---|---|---|
| steps, evaluation, saving, records, processes, paths of the rows | may change | may change |
| rewards, losses, optimizer's numbers, engines, filters | refused | may change |
| model, warm start, seed, rows and their form, ranks or none, commit order | refused | refused |

Settings that groups under way depend on may change in a fork whose checkpoint holds none.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.config.algorithm import GaeAdvantage, NoKl
from winnow.config.judge import ShardedScorer
from winnow.config.load import ABSENT, differing_keys, without_secrets
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.schema import show
from winnow.config.trainer import Fsdp2, Megatron, ProfileConfig, Sharded
from winnow.errors import CheckpointError, ConfigError

_SILENT = {"run.name", "run.description", "run.dir", "run.resume", "run.threads", "run.device"}
"""Settings of a start, not of a run; threads and device are told with the machine."""
_STRATEGY = "trainer.strategy.name"
_MAY_CHANGE: dict[str, set[str]] = {
    "model": {"cache_dir"},
    "warm_start": {"cache_dir"},
    # The loader refuses other rows, and files in another order.
    "data": {"train_files", "eval_files"},
    "data.task": {"eval_problems"},
    "reward": {"workers", "processes", "memory_mb", "timeout_s"},
    "reward.model.strategy": {*ShardedScorer.model_fields},
    "reference.strategy": {*Sharded.model_fields},
    "critic.strategy": {*Sharded.model_fields} - {"name"},  # checkpoints have it elsewhere
    # Who asks the judge, where, how fast, and where replies are kept.
    "reward.judge": {
        *("base_url", "api_key_env", "cache", "max_concurrent", "retries", "timeout_s"),
        *("requests_per_minute", "tokens_per_minute"),
    },
    "reward.judge.engine": {"processes"},
    "rollout.engine": {
        *("url", "token_env", "weights_folder"),
        *("timeout_s", "reload_timeout_s", "restart_timeout_s"),
    },
    # A run that stopped at its bound asks for it.
    "sampling": {"stall_timeout_s", "max_groups_per_step", "on_bound"},
    "trainer": {
        *(
            "steps",
            "data_epochs",
            "save_every",
            "keep_last",
            "keep_every",
            "keep_best",
            "checkpoint_url",
        ),
        *("max_restarts", "stall_timeout_s", "expires_at", "expiry_margin_s"),
    },
    "trainer.profile": {*ProfileConfig.model_fields},
    # A difference in ranks, as in threads, warns: `OpenedRun.differences`.
    "trainer.strategy": {*Fsdp2.model_fields, *Megatron.model_fields} - {"name"},
}
"""Keys by section, beside those of `_FREE`, on which no figure of a step depends but times."""
_FREE = {"cluster", "evaluation", "observe"}
"""Sections whose keys may all change."""
_FORK_KEEPS = (
    *("model.", "warm_start.", "data.", "critic.dtype", "run.seed"),
    *(_STRATEGY, "critic.strategy.name", "sampling.commit"),
)
"""Beginnings of the keys that a fork takes over, but for what may always change and these."""
_OF_NO_WEIGHT = {"model.trust_remote_code", "model.gradient_checkpointing", "model.fp32_head"}
_OF_OPEN_GROUPS = {
    *("rollout.n", "rollout.max_response_tokens", "rollout.stop", "trainer.mode.name"),
    *("algorithm.advantage.name", "data.max_prompt_tokens", "rollout.routing_replay"),
}
_SHOWN = 4


def check_same(config: Config, saved: Config, what: str, remedy: str) -> list[str]:
    """Refuse to go on with a recipe that gives other figures; return a line for each change.

    Args:
        saved: the recipe so far.
        what: was trained with that, for the message.

    Raises:
        ConfigError: names the keys.
    """
    differing = list(_differing(config, saved))
    both = config, saved
    _refuse([line for key, line in differing if not _may_change(key, both)], what, remedy)
    lines = [f"{line} from here on" for key, line in differing if key not in _SILENT]
    length = {"trainer.steps", "trainer.data_epochs"}
    if length & {key for key, _ in differing} and config.optim.schedule != "constant":
        lines.append(
            f"Warning: optim.schedule={config.optim.schedule} follows trainer.steps: the learning "
            "rate goes on by its new course"
        )
    return lines


def check_fork(config: Config, made_with: Config, what: str) -> list[str]:
    """Refuse a fork whose recipe the state of a checkpoint cannot hold; return the changes.

    Args:
        made_with: the recipe of the checkpoint.

    Raises:
        ConfigError: names the keys.
    """
    differing = [(k, line) for k, line in _differing(config, made_with) if k != "run.fork"]
    _refuse(
        [line for key, line in differing if _is_kept(key, (config, made_with))],
        what,
        "a fork takes over model, optimizer, data and groups: set that back, or start a new run",
    )
    if _has_critic(config) and not _has_critic(made_with):
        raise ConfigError(
            f"algorithm/advantage=gae learns a critic, and {what} holds none; choose another "
            "advantage, or start a new run"
        )
    return [line for key, line in differing if key not in _SILENT]


def forked_state(
    config: Config, made_with: Config, state: Mapping[str, Any], what: str
) -> dict[str, Any]:
    """Return the state of a checkpoint as a fork goes on from it.

    Raises:
        CheckpointError: groups are under way in it that were sampled by other settings.
    """
    groups = state["sampler"]["ledger"]["groups"]
    pending = len(state.get("pending", {}).get("steps", ()))
    number = len(groups.open) + len(groups.qualified) + len(groups.failing)
    changed = [line for key, line in _differing(config, made_with) if key in _OF_OPEN_GROUPS]
    if changed and (number or pending):
        held = f"{number} groups under way" if number else f"{pending} steps not learnt yet"
        raise CheckpointError(
            f"{what} holds {held}, sampled by other settings: {', '.join(changed)}; set that "
            "back, or fork another step"
        )
    kl = config.algorithm.kl.reward
    if kl == made_with.algorithm.kl.reward:
        return dict(state)
    # The KL's weight is part of the state, as it may adapt: another rule begins with its own.
    advantage = {} if isinstance(kl, NoKl) else {"penalty": {"coef": kl.coef}}
    return {**state, "learner": {**state["learner"], "advantage": advantage}}


def _has_critic(config: Config) -> bool:
    return isinstance(config.algorithm.advantage, GaeAdvantage)


def _differing(config: Config, saved: Config) -> Iterator[tuple[str, str]]:
    """Yield the keys that differ, each with a line that says how."""
    same_engines = Roles(saved)["rollout"].count == Roles(config)["rollout"].count
    for key, was, now in differing_keys(saved, config):
        if key == "rollout.engine.processes" and same_engines:
            continue  # null, and the number that it stands for
        if key.startswith("data.hub_files"):
            continue  # follows from the files; the loader refuses other rows
        if key == "run.fork" and _is_same_origin(was, now):
            continue
        if key.startswith("trainer.strategy.") and ABSENT in (was, now):
            continue  # of another strategy, whose name differs
        line = f"{key} was {show(was)} and is {show(now)}"
        yield key.replace("/", "."), without_secrets(line, config, saved)


def _is_same_origin(was: str | None, now: str | None) -> bool:
    """Return whether a recipe names the checkpoint that a fork has kept as RUN@STEP: by its run,
    which may have others by now, by its folder, or by a path from elsewhere."""
    if was is None or now is None:
        return False
    run, _, step = was.rpartition("@")
    origin, given = (
        os.path.abspath(Path(place).expanduser()) for place in (run, now.removesuffix(f"@{step}"))
    )
    return given in (origin, os.path.join(origin, "checkpoints", f"step-{step}"))


def _may_change(key: str, both: Sequence[Config]) -> bool:
    section, _, name = key.rpartition(".")
    is_free = key.partition(".")[0] in _FREE
    # Ranks of any strategy write the same tensors, and read their own parts of them.
    is_free |= key == _STRATEGY and all("policy" in Roles(config) for config in both)
    return is_free or key in _SILENT or name in _MAY_CHANGE.get(section, ())


def _is_kept(key: str, both: Sequence[Config]) -> bool:
    return key.startswith(_FORK_KEEPS) and not _may_change(key, both) and key not in _OF_NO_WEIGHT


def _refuse(changed: list[str], what: str, remedy: str) -> None:
    if not changed:
        return
    more = f", and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    raise ConfigError(
        f"{what} was trained with another recipe: {', '.join(changed[:_SHOWN])}{more}; {remedy}"
    )
