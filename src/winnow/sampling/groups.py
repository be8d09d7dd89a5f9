"""States of groups and answers while they are written and scored."""

from __future__ import annotations

from dataclasses import dataclass, field

from winnow.rollout.engine import EMPTY
from winnow.sampling.admission import History
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory


@dataclass(slots=True)
class AnswerState:
    """One answer: waiting or running (with a prefix, perhaps), finished, scored."""

    prefix: Segment | None = None
    """Tokens that are written of an unfinished answer, or of the turn of it under way."""
    earlier: tuple[Segment, ...] = ()
    """Complete turns of an unfinished conversation."""
    trajectory: Trajectory | None = None
    """The finished answer."""
    score: Score | None = None
    running: bool = False
    """True while the engine has it."""
    attempts: int = 0
    """Times it was retried."""
    tokens: int = 0
    """Tokens booked for it so far."""

    @property
    def begun(self) -> tuple[Segment, ...] | None:
        """Its complete turns and the one under way; None if nothing is written."""
        if self.prefix is None and not self.earlier:
            return None
        return *self.earlier, self.prefix or EMPTY

    @property
    def environment_tokens(self) -> int:
        """Tokens that an environment wrote in it so far."""
        segments = self.earlier if self.trajectory is None else self.trajectory.segments
        return sum(len(each) for each in segments if each.source == "environment")

    @property
    def answer(self) -> Answer | None:
        """The answer as the rest of Winnow sees it; None until it is finished and scored."""
        if self.trajectory is None or self.score is None:
            return None
        return Answer(self.trajectory, self.score)


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
    """Number of sampled answers."""
    unscored: int
    running: int = 0
    turn: int = -1
    """Its prompt's turn; by default the group's id, as in older states."""

    def __post_init__(self) -> None:
        if self.turn < 0:
            self.turn = self.id

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
    def environment_tokens(self) -> int:
        """Tokens that environments wrote in it so far."""
        return sum(answer.environment_tokens for answer in self.answers)

    @property
    def finished_answers(self) -> int:
        """Number of complete answers, scored or not."""
        return sum(answer.trajectory is not None for answer in self.answers)

    def group(self) -> Group:
        """Return its finished and scored answers as the rest of Winnow sees them."""
        answers = (each.answer for each in self.sampled)
        baseline = None if self.baseline is None else self.baseline.answer
        return Group(self.id, self.prompt, tuple(a for a in answers if a is not None), baseline)


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Answers of one group to submit to the engine, with what is written of them."""

    group_id: int
    prompt: Prompt
    begun: dict[int, tuple[Segment, ...] | None]
    turn: int
    greedy: int | None = None
    """The index that the group's greedy answer has, whether it is among these or not."""


@dataclass
class LiveGroups:
    """Open groups, qualified ones that wait for a cut, and failing ones still written for.

    Dictionaries run in admission order, except that of qualified groups.
    """

    open: dict[int, GroupState] = field(default_factory=dict)
    qualified: dict[int, GroupState] = field(default_factory=dict)
    failing: dict[int, GroupState] = field(default_factory=dict)
    """Failed groups with running answers."""
    waiting: set[int] = field(default_factory=set)
    """Open groups with answers to dispatch."""
    running: int = 0
    """Number of running answers."""
    histories: dict[History, int] = field(default_factory=dict)
    """Number of open groups by their prompts' histories: counts, so that in Σ p̂ no rounding
    accumulates."""

    def add(self, group: GroupState) -> None:
        """Add an open group."""
        self.open[group.id] = group
        self.waiting.add(group.id)
        self.histories[group.history] = self.histories.get(group.history, 0) + 1

    def remove(self, group: GroupState) -> None:
        """Remove a group from the open ones."""
        del self.open[group.id]
        self.waiting.discard(group.id)
        self.histories[group.history] -= 1

    def dispatch(self) -> list[Dispatch]:
        """Return all waiting answers in admission order, and mark them as running."""
        batch: list[Dispatch] = []
        for group_id in sorted(self.waiting):
            group = self.open[group_id]
            begun: dict[int, tuple[Segment, ...] | None] = {}
            for index, answer in enumerate(group.answers):
                if answer.trajectory is None and not answer.running:
                    answer.running = True
                    begun[index] = answer.begun
            group.running += len(begun)
            self.running += len(begun)
            batch.append(Dispatch(group_id, group.prompt, begun, group.turn, group.greedy))
        self.waiting.clear()
        return batch

    def return_answer(self, group_id: int, index: int) -> tuple[GroupState, AnswerState]:
        """Mark a running answer as returned by the engine; return it and its group."""
        group, answer = self.running_answer(group_id, index)
        answer.running = False
        group.running -= 1
        self.running -= 1
        return group, answer

    def running_answer(self, group_id: int, index: int) -> tuple[GroupState, AnswerState]:
        """Return a running answer and its group."""
        group = self.open.get(group_id) or self.failing[group_id]
        answer = group.answers[index]
        assert answer.running, f"answer {index} of group {group_id} was not with the engine"
        return group, answer

    def uncommitted_groups(self) -> list[GroupState]:
        """Return open and qualified groups, in admission order."""
        return sorted([*self.open.values(), *self.qualified.values()], key=lambda group: group.id)

    def unscored(self) -> list[tuple[int, int]]:
        """Return finished answers of open groups that lack a score: (group, answer)."""
        return [
            (group.id, index)
            for group in self.open.values()
            for index, answer in enumerate(group.answers)
            if answer.trajectory is not None and answer.score is None
        ]

    def finished_answer(self, group_id: int, index: int) -> tuple[Prompt, Trajectory]:
        """Return a finished answer and its prompt, for a scorer."""
        group = self.open[group_id]
        trajectory = group.answers[index].trajectory
        assert trajectory is not None
        return group.prompt, trajectory

    def running_keys(self) -> list[tuple[int, int]]:
        """Return the running answers as (group, answer), in admission order."""
        groups = sorted([*self.failing.values(), *self.open.values()], key=lambda group: group.id)
        return [
            (group.id, index)
            for group in groups
            if group.running
            for index, answer in enumerate(group.answers)
            if answer.running
        ]
