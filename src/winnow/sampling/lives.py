"""What the ledger knows of an answer and of a group while it lives, and when it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from winnow.sampling.account import Fate
from winnow.sampling.admission import History
from winnow.sampling.plain import (
    Plain,
    plain_prompt,
    plain_score,
    plain_segment,
    plain_trajectory,
    prompt_from,
    score_from,
    segment_from,
    trajectory_from,
)
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory


@dataclass(slots=True)
class AnswerLife:
    """One answer: waiting or running (with a prefix, perhaps), finished, scored."""

    prefix: Segment | None = None
    """What is written of an unfinished answer."""
    trajectory: Trajectory | None = None
    """The finished answer."""
    score: Score | None = None
    running: bool = False
    """Whether the engine has it."""
    attempts: int = 0
    """Times it was retried."""
    tokens: int = 0
    """Booked so far for it."""

    def plain(self) -> Plain:
        """Itself as plain values."""
        return {
            "prefix": plain_segment(self.prefix),
            "trajectory": plain_trajectory(self.trajectory),
            "score": plain_score(self.score),
            "running": self.running,
            "attempts": self.attempts,
            "tokens": self.tokens,
        }

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> AnswerLife:
        """The inverse of `plain`."""
        return cls(
            segment_from(state["prefix"]),
            trajectory_from(state["trajectory"]),
            score_from(state["score"]),
            state["running"],
            state["attempts"],
            state["tokens"],
        )


@dataclass(slots=True)
class GroupLife:
    """An admitted prompt and its answers, until its tokens have a fate."""

    id: int
    prompt: Prompt
    version: int
    """Weight version at admission."""
    history: History
    """The prompt's history at admission, by which it counts in Σ p̂."""
    answers: list[AnswerLife]
    unscored: int
    running: int = 0

    @property
    def tokens(self) -> int:
        """Tokens the policy wrote for it so far."""
        return sum(answer.tokens for answer in self.answers)

    @property
    def finished(self) -> int:
        """Answers that are complete, scored or not."""
        return sum(answer.trajectory is not None for answer in self.answers)

    def group(self) -> Group:
        """Its finished and scored answers as the rest of Winnow sees them."""
        answers = tuple(
            Answer(answer.trajectory, answer.score)
            for answer in self.answers
            if answer.trajectory is not None and answer.score is not None
        )
        return Group(self.id, self.prompt, answers)

    def plain(self) -> Plain:
        """Itself as plain values."""
        return {
            "id": self.id,
            "prompt": plain_prompt(self.prompt),
            "version": self.version,
            "history": self.history,
            "answers": [answer.plain() for answer in self.answers],
            "unscored": self.unscored,
            "running": self.running,
        }

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> GroupLife:
        """The inverse of `plain`."""
        visits, qualified = state["history"]
        return cls(
            state["id"],
            prompt_from(state["prompt"]),
            state["version"],
            (visits, qualified),
            [AnswerLife.from_plain(answer) for answer in state["answers"]],
            state["unscored"],
            state["running"],
        )


@dataclass(frozen=True, eq=False)
class Settled:
    """A group whose life ended, and how."""

    group: Group
    """A failed or dropped group holds only those answers that were finished and scored."""
    fate: Fate
    admitted_version: int
    staleness: int
    """Steps between the version of its oldest token and the step that settled it."""
    tokens: int
    """Generated for it, unfinished answers included."""

    @classmethod
    def of(cls, life: GroupLife, fate: Fate, version: int) -> Settled:
        """The end of `life` in the step of weight version `version`."""
        group = life.group()
        versions = (answer.trajectory.versions for answer in group.answers)
        oldest = min((each[0] for each in versions if each), default=version)
        return cls(group, fate, life.version, version - oldest, life.tokens)

    def plain(self) -> Plain:
        """Itself as plain values."""
        return {
            "id": self.group.id,
            "prompt": plain_prompt(self.group.prompt),
            "answers": [
                [plain_trajectory(answer.trajectory), plain_score(answer.score)]
                for answer in self.group.answers
            ],
            "fate": self.fate,
            "admitted_version": self.admitted_version,
            "staleness": self.staleness,
            "tokens": self.tokens,
        }

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> Settled:
        """The inverse of `plain`."""
        answers = []
        for trajectory_state, score_state in state["answers"]:
            trajectory, score = trajectory_from(trajectory_state), score_from(score_state)
            assert trajectory is not None
            assert score is not None
            answers.append(Answer(trajectory, score))
        return cls(
            Group(state["id"], prompt_from(state["prompt"]), tuple(answers)),
            state["fate"],
            state["admitted_version"],
            state["staleness"],
            state["tokens"],
        )
