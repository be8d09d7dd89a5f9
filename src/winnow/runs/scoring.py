"""Scoring of training answers, with a watch on how many scorings fail."""

from __future__ import annotations

import logging

from winnow.errors import RewardError
from winnow.rewards.pipeline import Rewards
from winnow.types import Prompt, Score, Trajectory

log = logging.getLogger(__name__)


class TrainingScores:
    """The scorer of training answers, which the sampler calls for each finished one.

    Args:
        patience: answers after which failures are held against the limit before the step ends,
            so that a broken scorer is found even when no group qualifies.
    """

    def __init__(self, rewards: Rewards, patience: int) -> None:
        self._rewards, self._patience = rewards, patience
        self._scored = 0

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Score one answer.

        Raises:
            RewardError: too many of this step's scorings failed.
        """
        score = await self._rewards.score(prompt, trajectory, None, training=True)
        self._scored += 1
        if self._scored >= self._patience:
            self._check()
        return score

    def end_step(self) -> None:
        """Hold the step's failures against the limit, and start anew.

        Raises:
            RewardError: their share is above `reward.max_failure_share`.
        """
        report = self._rewards.failure_report
        if report.count:
            log.warning(
                "scoring failed for %d of %d answers; the first failure: %s",
                report.count,
                self._scored,
                report.first_error,
            )
        try:
            self._check()
        finally:
            self._rewards.reset_failures()
            self._scored = 0

    def _check(self) -> None:
        try:
            self._rewards.check_failures(self._scored)
        except RewardError:
            report = self._rewards.failure_report
            log.error("%s", report.first_traceback or report.first_error)
            raise
