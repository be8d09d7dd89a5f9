"""The groups that live, and which of their answers the engine has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from winnow.sampling.admission import Expectation
from winnow.sampling.states import AnswerState, GroupState
from winnow.types import Prompt, Segment, Trajectory


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Answers of one group that the engine must write, with what is written already."""

    group_id: int
    prompt: Prompt
    prefixes: dict[int, Segment | None]
    greedy: int | None = None
    """The index that the group's greedy answer has, whether it is among these or not."""


class LiveGroups:
    """Open groups, qualified ones that wait for a cut, and failed ones still written for.

    Dictionaries run in admission order, except that of qualified groups.
    """

    def __init__(self) -> None:
        self.open: dict[int, GroupState] = {}
        self.qualified: dict[int, GroupState] = {}
        self.doomed: dict[int, GroupState] = {}
        self.waiting: set[int] = set()
        """Open groups with answers to dispatch."""
        self.running = 0
        """Answers that the engine has."""
        self.expected = Expectation()

    def enter(self, life: GroupState) -> None:
        """A group opened."""
        self.open[life.id] = life
        self.waiting.add(life.id)
        self.expected.add(life.history)

    def leave(self, life: GroupState) -> None:
        """A group is open no longer."""
        del self.open[life.id]
        self.waiting.discard(life.id)
        self.expected.remove(life.history)

    def dispatch(self) -> list[Dispatch]:
        """All that waits, in admission order; from now on it runs."""
        batch: list[Dispatch] = []
        for group_id in sorted(self.waiting):
            life = self.open[group_id]
            prefixes: dict[int, Segment | None] = {}
            for index, answer in enumerate(life.answers):
                if answer.trajectory is None and not answer.running:
                    answer.running = True
                    prefixes[index] = answer.prefix
            life.running += len(prefixes)
            self.running += len(prefixes)
            batch.append(Dispatch(group_id, life.prompt, prefixes, life.greedy))
        self.waiting.clear()
        return batch

    def come_back(self, group_id: int, index: int) -> tuple[GroupState, AnswerState]:
        """The engine has an answer no longer."""
        life = self.open.get(group_id) or self.doomed[group_id]
        answer = self.at_engine(group_id, index)
        answer.running = False
        life.running -= 1
        self.running -= 1
        return life, answer

    def at_engine(self, group_id: int, index: int) -> AnswerState:
        """An answer that the engine has."""
        life = self.open.get(group_id) or self.doomed[group_id]
        answer = life.answers[index]
        assert answer.running, f"answer {index} of group {group_id} was not with the engine"
        return answer

    def waiting_for_cut(self) -> list[GroupState]:
        """Open and qualified groups, in admission order."""
        return sorted([*self.open.values(), *self.qualified.values()], key=lambda life: life.id)

    def unscored(self) -> list[tuple[int, int]]:
        """Finished answers of open groups that lack a score: (group, answer)."""
        return [
            (life.id, index)
            for life in self.open.values()
            for index, answer in enumerate(life.answers)
            if answer.trajectory is not None and answer.score is None
        ]

    def finished_answer(self, group_id: int, index: int) -> tuple[Prompt, Trajectory]:
        """What a scorer needs of a finished answer."""
        life = self.open[group_id]
        trajectory = life.answers[index].trajectory
        assert trajectory is not None
        return life.prompt, trajectory

    def with_engine(self) -> list[tuple[int, int]]:
        """Answers that the engine has: (group, answer), in admission order."""
        lives = sorted([*self.doomed.values(), *self.open.values()], key=lambda life: life.id)
        return [
            (life.id, index)
            for life in lives
            if life.running
            for index, answer in enumerate(life.answers)
            if answer.running
        ]

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain Python and numpy."""
        return {
            "open": [life.plain() for life in self.open.values()],
            "qualified": [life.plain() for life in self.qualified.values()],
            "doomed": [life.plain() for life in self.doomed.values()],
            "waiting": sorted(self.waiting),
            "running": self.running,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        self.open = _lives_from(state["open"])
        self.qualified = _lives_from(state["qualified"])
        self.doomed = _lives_from(state["doomed"])
        self.waiting = set(state["waiting"])
        self.running = state["running"]
        self.expected = Expectation()
        for life in self.open.values():
            self.expected.add(life.history)


def _lives_from(states: list[dict[str, Any]]) -> dict[int, GroupState]:
    return {life.id: life for life in map(GroupState.from_plain, states)}
