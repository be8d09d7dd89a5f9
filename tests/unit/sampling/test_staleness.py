"""Random schedules of sampling, learning, publishing: the bound of admission, and what is trained.

A world without clock: at each moment one thing happens that may happen, drawn at random: a token is
written, an answer ends, a score is seen, weights are published. How long learning takes is thereby
random, too.
"""

from __future__ import annotations

import random
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines import Prompts, extended, written

from winnow.config.rollout import BandFilter, SamplingConfig
from winnow.rollout.engine import answer_seed
from winnow.sampling.accounting import StepGroups
from winnow.sampling.ledger import Ledger
from winnow.types import Score, Segment, Trajectory

Mode = Literal["sync", "one_step_off", "async"]
Key = tuple[int, int]
STEPS, ANSWERS, MOST = 7, 2, 20_000


class World:
    """A ledger, answers that are written for it, and a learner that publishes."""

    def __init__(self, config: SamplingConfig, mode: Mode, rng: random.Random) -> None:
        self.ledger = Ledger(config, ANSWERS)
        self.mode, self.rng = mode, rng
        self.published = 0
        self.prompts = Prompts()
        self.turns: dict[int, int] = {}
        self.running: dict[Key, Segment] = {}
        self.unscored: list[Key] = []
        self.steps: list[StepGroups] = []
        self.most_unlearnt = 0
        self.ledger.begin_step(0)

    def run(self) -> None:
        """Go on until enough steps are cut; there is always something that may happen."""
        for _ in range(MOST):
            if len(self.steps) == STEPS:
                return
            self.admit()
            if self.ledger.step_is_ready() and self.ledger.committable:
                self.cut()
            else:
                self.rng.choice(self.possible())()
            self.ledger.account.check()
        raise AssertionError("it does not get on")

    def admit(self) -> None:
        ledger = self.ledger
        while ledger.may_admit():
            ledger.admit(self.prompts.next())
        for ask in ledger.dispatch():
            assert str(ask.turn) == ask.prompt.uid  # as the loader counts
            self.turns[ask.group_id] = ask.turn
            for index, begun in ask.begun.items():
                key = ask.group_id, index
                self.running[key] = begun[-1] if begun else written(self.seed(key), 0, 0, 0)

    def possible(self) -> list[object]:
        found: list[object] = []
        if self.running:
            found += [self.write, self.finish, self.abort]
        if self.unscored:
            found += [self.score]
        if self.mode == "async" and self.published < len(self.steps):
            found += [self.publish]
        if self.ledger.step_is_ready():
            found += [self.ledger.extend_bound]
        return found

    def seed(self, key: Key) -> int:
        return self.turns[key[0]] * ANSWERS + key[1]

    def longer(self, key: Key) -> Segment:
        before = self.running[key]
        stop = len(before) + self.rng.randint(1, 3)
        tail = written(self.seed(key), len(before), stop, self.published)
        return extended(before, tail)

    def write(self) -> None:
        key = self.rng.choice(sorted(self.running))
        self.running[key] = self.longer(key)
        if self.rng.random() < 0.5:
            self.ledger.record_progress(*key, self.running[key])

    def finish(self) -> None:
        # The earliest answer is seldom the first to end.
        key = max(self.rng.choices(sorted(self.running), k=2))
        self.ledger.record_finished(*key, Trajectory((self.longer(key),), "stop"))
        del self.running[key]
        self.unscored.append(key)

    def abort(self) -> None:
        self.give_up(self.rng.choice(sorted(self.running)))

    def give_up(self, key: Key) -> None:
        self.ledger.record_aborted(*key, self.running.pop(key), stalled=False)

    def score(self) -> None:
        key = self.unscored.pop(self.rng.randrange(len(self.unscored)))
        right = float(self.is_right(key))
        self.ledger.record_score(*key, Score(right, right))

    def is_right(self, key: Key) -> bool:
        return self.rng.random() < 0.7

    def publish(self) -> None:
        self.published += 1
        self.ledger.version = self.published

    def cut(self) -> None:
        for key in [] if self.ledger.may_keep_running else sorted(self.running):
            self.give_up(key)
        self.steps.append(self.ledger.commit())
        self.prompts.give_back(self.steps[-1].returned)
        if self.mode != "async":
            late = {"sync": 0, "one_step_off": 1}[self.mode]
            self.published = max(len(self.steps) - late, 0)
        self.ledger.begin_step(self.published, len(self.steps))
        self.most_unlearnt = max(self.most_unlearnt, len(self.steps) - self.published)


@st.composite
def configs(draw: st.DrawFn) -> SamplingConfig:
    staleness = draw(st.integers(1, 3))
    return SamplingConfig(
        groups_per_step=draw(st.integers(1, 4)),
        filter=BandFilter(low=0.5),
        max_staleness=staleness,
        lookahead=draw(st.sampled_from([0.0, 0.5, 1.0, 2.0, 3.0]).filter(lambda x: x <= staleness)),
        max_groups_per_step=draw(st.sampled_from([None, None, 5])),
    )


MODES = st.sampled_from(["sync", "one_step_off", "async"])


@given(configs(), MODES, st.integers(0, 2**32))
def test_no_group_is_learnt_too_late_and_none_is_lost_dropped_or_learnt_twice(
    config: SamplingConfig, mode: Mode, seed: int
) -> None:
    world = World(config, mode, random.Random(seed))
    world.run()
    order: list[int] = []
    ended: list[int] = []
    for learns, step in enumerate(world.steps):
        assert step.version == learns
        for settled in step.trained:
            oldest = min(v for a in settled.group.scored for v in a.trajectory.versions)
            assert settled.staleness == learns - oldest <= config.max_staleness
        order += [settled.group.id for settled in step.trained]
        ended += [settled.group.id for settled in (*step.trained, *step.discarded)]
        assert step.counts.fates["stale"] == step.counts.fates["surplus"] == 0
        assert not step.returned
        assert step.is_short or len(step.trained) == config.groups_per_step
    assert order == sorted(set(order))
    ledger = world.ledger
    alive = {group.id for group in ledger.groups.uncommitted_groups()}
    alive |= {settled.group.id for settled in ledger.accounting.settled}
    assert sorted([*ended, *alive]) == list(range(ledger.next_id))
    assert (
        world.most_unlearnt
        <= {"sync": 0, "one_step_off": 1, "async": 1 + config.max_staleness}[mode]
    )


@pytest.mark.parametrize("staleness", [1, 2, 3])
def test_the_bound_is_reached(staleness: int) -> None:
    config = SamplingConfig(groups_per_step=2, filter=BandFilter(low=0.5), max_staleness=staleness)
    oldest = 0
    for seed in range(60):
        world = World(config, "async", random.Random(seed))
        world.run()
        oldest = max(oldest, *(step.counts.staleness_max for step in world.steps))
        if oldest == staleness:
            break
    assert oldest == staleness


class Destined(World):
    """Whether an answer is right depends on its turn, its index and the weights that wrote it."""

    def is_right(self, key: Key) -> bool:
        group, index = key
        if group not in self.ledger.groups.open:
            return False
        trajectory = self.ledger.groups.finished_answer(*key)[1]
        mark = sum(100**place * version for place, version in enumerate(trajectory.versions))
        return answer_seed(mark, self.turns[group], index) % 10 < 6

    def trained(self) -> list[list[object]]:
        """Turns and weight versions of what each step learnt."""
        self.run()
        return [
            [(s.turn, [a.trajectory.versions for a in s.group.scored]) for s in step.trained]
            for step in self.steps
        ]


@given(
    st.sampled_from([("sync", 0), ("one_step_off", 1)]),
    st.builds(
        SamplingConfig,
        groups_per_step=st.integers(1, 4),
        filter=st.just(BandFilter(low=0.5)),
        lookahead=st.sampled_from([0.0, 0.5, 1.0]),
        max_groups_per_step=st.sampled_from([None, None, 5]),
    ),
    st.integers(0, 2**32),
)
def test_where_no_answer_goes_on_under_other_weights_schedules_do_not_change_what_is_trained(
    mode: tuple[Mode, int], given: SamplingConfig, seed: int
) -> None:
    name, staleness = mode
    lookahead = min(given.lookahead, staleness)
    config = given.model_copy(update={"max_staleness": staleness, "lookahead": lookahead})
    one, other = (Destined(config, name, random.Random(seed + more)) for more in (0, 1))
    assert one.trained() == other.trained()
    turns = [settled.turn for step in one.steps for settled in step.trained]
    assert turns == sorted(set(turns))
