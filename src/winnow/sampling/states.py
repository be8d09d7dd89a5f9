"""What the ledger knows of an answer and of a group while it lives, and when it ended."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from winnow.sampling.account import Fate
from winnow.sampling.admission import History
from winnow.sampling.serialization import (
    Plain,
    answer_from,
    plain_answer,
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
class AnswerState:
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

    @property
    def answer(self) -> Answer | None:
        """As the rest of Winnow sees it; None until it is finished and scored."""
        if self.trajectory is None or self.score is None:
            return None
        return Answer(self.trajectory, self.score)

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
    def from_plain(cls, state: Mapping[str, Any]) -> AnswerState:
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
class GroupState:
    """An admitted prompt and its answers, until its tokens have a fate."""

    id: int
    prompt: Prompt
    version: int
    """Weight version at admission."""
    history: History
    """The prompt's history at admission, by which it counts in Σ p̂."""
    answers: list[AnswerState]
    """The sampled ones, then the greedy one where the group has a baseline."""
    n: int
    """How many are sampled."""
    unscored: int
    running: int = 0

    @classmethod
    def opened(
        cls,
        group_id: int,
        prompt: Prompt,
        version: int,
        history: History,
        n: int,
        *,
        with_baseline: bool,
    ) -> GroupState:
        """A group of which nothing is written."""
        answers = [AnswerState() for _ in range(n + with_baseline)]
        return cls(group_id, prompt, version, history, answers, n, len(answers))

    @property
    def sampled(self) -> list[AnswerState]:
        """The answers that a filter judges and a step trains on."""
        return self.answers[: self.n]

    @property
    def greedy(self) -> int | None:
        """The place of the greedy answer; None in a group without."""
        return self.n if len(self.answers) > self.n else None

    @property
    def baseline(self) -> AnswerState | None:
        """The greedy answer."""
        return None if self.greedy is None else self.answers[self.greedy]

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
        answers = (each.answer for each in self.sampled)
        baseline = None if self.baseline is None else self.baseline.answer
        return Group(self.id, self.prompt, tuple(a for a in answers if a is not None), baseline)

    def plain(self) -> Plain:
        """Itself as plain values."""
        return {
            "id": self.id,
            "prompt": plain_prompt(self.prompt),
            "version": self.version,
            "history": self.history,
            "answers": [answer.plain() for answer in self.answers],
            "n": self.n,
            "unscored": self.unscored,
            "running": self.running,
        }

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> GroupState:
        """The inverse of `plain`."""
        visits, qualified = state["history"]
        return cls(
            state["id"],
            prompt_from(state["prompt"]),
            state["version"],
            (visits, qualified),
            [AnswerState.from_plain(answer) for answer in state["answers"]],
            state["n"],
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
    def of(cls, life: GroupState, fate: Fate, version: int) -> Settled:
        """The end of `life` in the step of weight version `version`."""
        group = life.group()
        versions = (answer.trajectory.versions for answer in group.scored)
        oldest = min((each[0] for each in versions if each), default=version)
        return cls(group, fate, life.version, version - oldest, life.tokens)

    def plain(self) -> Plain:
        """Itself as plain values."""
        return {
            "id": self.group.id,
            "prompt": plain_prompt(self.group.prompt),
            "answers": [plain_answer(answer) for answer in self.group.answers],
            "baseline": plain_answer(self.group.baseline),
            "fate": self.fate,
            "admitted_version": self.admitted_version,
            "staleness": self.staleness,
            "tokens": self.tokens,
        }

    @classmethod
    def from_plain(cls, state: Mapping[str, Any]) -> Settled:
        """The inverse of `plain`."""
        answers = tuple(a for a in map(answer_from, state["answers"]) if a is not None)
        baseline = answer_from(state["baseline"])
        return cls(
            Group(state["id"], prompt_from(state["prompt"]), answers, baseline),
            state["fate"],
            state["admitted_version"],
            state["staleness"],
            state["tokens"],
        )
