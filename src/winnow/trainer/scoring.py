"""Scoring of training answers: text for the scorer, and a watch on how many scorings fail."""

from __future__ import annotations

import logging

from winnow.observe.rollouts import Decode
from winnow.rewards.service import RewardService
from winnow.types import Prompt, Score, Trajectory

log = logging.getLogger(__name__)


class TrainingScores:
    """What the sampler calls for each finished answer.

    Args:
        check_every: answers after which failures are held against the limit, so that a broken
            scorer is found within a step's worth of answers even when no group qualifies.
    """

    def __init__(self, rewards: RewardService, decode: Decode, check_every: int) -> None:
        self._rewards, self._decode, self._check_every = rewards, decode, check_every
        self._scored = 0

    async def __call__(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        """Score one answer.

        Raises:
            RewardError: too many failed.
        """
        if self._scored >= self._check_every:
            self.check()
        self._scored += 1
        text = self._decode(trajectory.token_ids)
        return await self._rewards.score(prompt, trajectory, text, training=True)

    def check(self) -> None:
        """Hold the failures since the last check against the limit, and start anew.

        Raises:
            RewardError: their share is above `reward.max_failure_share`.
        """
        report = self._rewards.failure_report
        if report.count:
            log.warning(
                "scoring failed for %d of %d answers; the first failure:\n%s",
                report.count,
                self._scored,
                report.first_traceback or report.first_error,
            )
        try:
            self._rewards.check_failures(self._scored)
        finally:
            self._rewards.reset_failures()
            self._scored = 0
