"""Changes of a recipe where a run goes on, and where another run is forked from it.

Each field of the configuration says by its mark (`config.base.Change`) where it may change.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.config.algorithm import GaeAdvantage, NoKl
from winnow.config.base import Change
from winnow.config.load import ABSENT, differing_keys, redact_secrets
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.schema import all_keys, quote
from winnow.errors import CheckpointError, ConfigError

_MARKS = {".".join(key.path): key.change for key in all_keys()}
_SHOWN = 4


def with_settings(config: Config, **sections: Mapping[str, Any]) -> Config:
    """Return a copy of a recipe with some fields of its sections replaced, without a check."""
    changed = {
        name: getattr(config, name).model_copy(update=fields) for name, fields in sections.items()
    }
    return config.model_copy(update=changed)


def check_same(config: Config, saved: Config, subject: str, remedy: str) -> list[str]:
    """Refuse to resume with a recipe that would change metrics; return a line for each change.

    Args:
        saved: the recipe so far.
        subject: what was trained with `saved`, for the message.

    Raises:
        ConfigError: names the keys.
    """
    differing = list(_config_changes(config, saved))
    _refuse_changes(
        [line for _, change, line in differing if change > Change.ON_RESUME], subject, remedy
    )
    lines = [f"{line} from now on" for _, change, line in differing if change > Change.SILENTLY]
    length = {"trainer.steps", "trainer.data_epochs"}
    if length & {key for key, *_ in differing} and config.optim.schedule != "constant":
        lines.append(
            f"Warning: optim.schedule={config.optim.schedule} depends on trainer.steps: the "
            "learning rate follows the new schedule from now on"
        )
    return lines


def check_fork(config: Config, source: Config, subject: str) -> list[str]:
    """Refuse a fork whose recipe does not fit the checkpoint's state; return the changes.

    Args:
        source: the recipe of the checkpoint.

    Raises:
        ConfigError: names the keys.
    """
    differing = [each for each in _config_changes(config, source) if each[0] != "run.fork"]
    remedy = "a fork inherits model, optimizer, data and groups: revert it, or start a new run"
    _refuse_changes(
        [line for _, change, line in differing if change is Change.NEVER], subject, remedy
    )
    critics = [isinstance(c.algorithm.advantage, GaeAdvantage) for c in (config, source)]
    if critics == [True, False]:
        raise ConfigError(
            f"algorithm/advantage=gae needs a critic, and {subject} has none; choose another "
            "advantage, or start a new run"
        )
    return [line for _, change, line in differing if change > Change.SILENTLY]


def forked_state(
    config: Config, source: Config, state: Mapping[str, Any], subject: str
) -> dict[str, Any]:
    """Adapt the state of a checkpoint to the recipe of a fork.

    Raises:
        CheckpointError: groups are under way in it that were sampled by other settings.
    """
    groups = state["sampler"]["ledger"]["groups"]
    pending = len(state.get("pending", {}).get("steps", ()))
    number = len(groups.open) + len(groups.qualified) + len(groups.failing)
    differing = _config_changes(config, source)
    changed = [line for _, change, line in differing if change is Change.BETWEEN_GROUPS]
    if changed and (number or pending):
        open_work = f"{number} groups in flight" if number else f"{pending} untrained steps"
        raise CheckpointError(
            f"{subject} holds {open_work}, sampled with other settings: {', '.join(changed)}; "
            "revert them, or fork another step"
        )
    kl = config.algorithm.kl.reward
    if kl == source.algorithm.kl.reward:
        return dict(state)
    # The KL's weight is part of the state, as it may adapt: another rule begins with its own.
    advantage = {} if isinstance(kl, NoKl) else {"penalty": {"coef": kl.coef}}
    return {**state, "learner": {**state["learner"], "advantage": advantage}}


def _config_changes(config: Config, saved: Config) -> Iterator[tuple[str, Change, str]]:
    """Yield the keys that differ, each with its mark and a line that says how."""
    same_engines = Roles(saved)["rollout"].count == Roles(config)["rollout"].count
    for key, was, now in differing_keys(saved, config):
        if key == "rollout.engine.processes" and same_engines:
            continue  # null, and the number that it stands for
        if key.startswith("data.hub_files"):
            continue  # follows from the files; the loader refuses other rows
        if key == "run.fork" and _is_same_fork(was, now):
            continue
        if key.startswith("trainer.strategy.") and ABSENT in (was, now):
            continue  # of another strategy, whose name differs
        line = f"{key} was {quote(was)} and is {quote(now)}"
        yield key, _allowed_change(key, (config, saved)), redact_secrets(line, config, saved)


def _allowed_change(key: str, configs: Sequence[Config]) -> Change:
    """Return the mark of a key; an entry of a table has that of the table."""
    # Ranks of any strategy write the same tensors, and read their own parts of them.
    if key == "trainer.strategy.name" and all("policy" in Roles(config) for config in configs):
        return Change.ON_RESUME
    while key and key not in _MARKS:
        key = key.rpartition(".")[0]
    return _MARKS.get(key, Change.IN_FORK)


def _is_same_fork(was: str | None, now: str | None) -> bool:
    """Return whether a recipe names the checkpoint that a fork has kept as RUN@STEP: by its run,
    which may have others by now, by its folder, or by a path from elsewhere."""
    if was is None or now is None:
        return False
    run, _, step = was.rpartition("@")
    origin, place = (
        os.path.abspath(Path(place).expanduser()) for place in (run, now.removesuffix(f"@{step}"))
    )
    return place in (origin, os.path.join(origin, "checkpoints", f"step-{step}"))


def _refuse_changes(changed: list[str], subject: str, remedy: str) -> None:
    if not changed:
        return
    rest = f", and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
    raise ConfigError(
        f"{subject} was trained with another recipe: {', '.join(changed[:_SHOWN])}{rest}; {remedy}"
    )
