"""Scorers that a recipe puts beside the one of the data source (`reward.parts`)."""

from __future__ import annotations

from dataclasses import dataclass

from winnow.config.reward import PartConfig, RewardConfig
from winnow.errors import RewardError
from winnow.rewards.managers.rules import Rules
from winnow.rewards.routing import check_package
from winnow.rewards.scorers import SCORERS, Scorer
from winnow.rewards.task import Failure
from winnow.types import Prompt


@dataclass(frozen=True)
class _Part:
    section: PartConfig
    scorer: Scorer


class ScoredParts:
    """Scores answers by the further scorers of a recipe.

    Args:
        rules: where they run; the manager's own where that has built-in scorers.
    """

    def __init__(self, config: RewardConfig, rules: Rules) -> None:
        """Look the scorers up.

        Raises:
            RewardError: there is none of such a name.
        """
        self._rules = rules
        self._parts = {name: _part(name, section) for name, section in config.parts.items()}

    def prepare(self) -> None:
        """Start what the scorers need.

        Raises:
            RewardError: one cannot run here.
        """
        for name, part in self._parts.items():
            check_package(part.scorer, f"reward.parts.{name}", f"reward.parts.{name}.scorer")
        self._rules.prepare_scorers(part.scorer for part in self._parts.values())

    @property
    def take_time(self) -> bool:
        """Whether one of them is scored beside the event loop."""
        return any(self._rules.is_late(part.scorer) for part in self._parts.values())

    async def score(self, prompt: Prompt, text: str, training: bool) -> dict[str, float] | Failure:
        """The score of each part, or why the first that failed has none."""
        scores: dict[str, float] = {}
        for name, part in self._asked(training).items():
            said = await self._rules.score_by(part.scorer, prompt, text)
            if isinstance(said, Failure):
                return Failure(f"the part {name}: {said.line}", said.trace, said.outside)
            scores[name] = said.reward
        return scores

    def wrong(self, training: bool) -> dict[str, float]:
        """The parts of an answer whose scoring failed."""
        return {name: part.scorer.wrong_reward for name, part in self._asked(training).items()}

    def _asked(self, training: bool) -> dict[str, _Part]:
        return {
            name: part
            for name, part in self._parts.items()
            if training or part.section.in_evaluation
        }


def _part(name: str, section: PartConfig) -> _Part:
    if section.scorer not in SCORERS:
        raise RewardError(
            f"reward.parts.{name}.scorer is {section.scorer}, which is no scorer; "
            f"there are {', '.join(SCORERS)}"
        )
    return _Part(section, SCORERS[section.scorer])
