"""The managers by name: who calls what scores, and where.

| name | calls | where |
|---|---|---|
| auto, dapo | a user's function, or the built-in scorers | function in workers, rules here |
| naive | the same, one by one | in the run's own process |
| parallel | the same | in workers |
| batch | a user's function, with what waits together | in workers |
| remote | a service, with a user's arguments | over HTTP |
| custom | a class of the user's | in the run's own process |

Code in answers runs in the sandbox in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from winnow.config.reward import NaiveManager, ParallelManager, RewardConfig
from winnow.rewards.managers.batch import Batches
from winnow.rewards.managers.custom import Custom
from winnow.rewards.managers.function import FunctionApart, FunctionHere
from winnow.rewards.managers.protocol import Manager
from winnow.rewards.managers.remote import Remote
from winnow.rewards.managers.rules import Place, Rules


def _function_or_rules(config: RewardConfig) -> Manager:
    """As the recipe's place for rules has it; a function is apart where nobody says otherwise."""
    place = rules_place(config)
    if config.function.path is None:
        return Rules(config, place)
    return FunctionHere(config) if place == "here" else FunctionApart(config)


MANAGERS: Mapping[str, Callable[[RewardConfig], Manager]] = {
    "auto": _function_or_rules,
    "naive": _function_or_rules,
    "parallel": _function_or_rules,
    "batch": Batches,
    "dapo": _function_or_rules,
    "remote": Remote,
    "custom": Custom,
}


def rules_place(config: RewardConfig) -> Place:
    """Where built-in scorers run, which may score parts beside a user's function, too."""
    if isinstance(config.manager, NaiveManager) or config.workers == 0:
        return "here"
    is_parallel = isinstance(config.manager, ParallelManager)
    return "apart" if is_parallel or config.workers is not None else "by_scorer"


def make_manager(config: RewardConfig) -> Manager:
    """Load what scores, and start the workers that a user's function needs.

    Raises:
        RewardError: a scorer's name, the user's file or class, or the service is wrong.
    """
    return MANAGERS[config.manager.name](config)
