"""The ledger under random orders of events, against a model that is slow and plain."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.engines import prompt, written
from tests.examples import examples
from tests.states import read_back, same

from winnow.checkpoints.checkpoint import STATE_CLASSES
from winnow.checkpoints.state_file import read_state, write_state
from winnow.config.rollout import NoFilter, SamplingConfig
from winnow.sampling.accounting import StepGroups
from winnow.sampling.ledger import Ledger
from winnow.types import Score, Segment, SettledGroup, Trajectory

CLASSES = ("trained", "all_right", "all_wrong", "surplus", "stale", "failed")


def segment(group: int, answer: int, length: int, version: int = 0) -> Segment:
    return written(1000 * group + answer, 0, length, version)


def whole(group: int, answer: int, length: int, version: int = 0) -> Trajectory:
    reason = "length" if length >= 12 else "stop"
    return Trajectory((segment(group, answer, length, version),), reason)


def copy_of(ledger: Ledger, n: int, drop_failed_scores: bool, baseline: bool) -> Ledger:
    state = ledger.state_dict()
    copy = Ledger(ledger.config, n, with_baseline=baseline, drop_failed_scores=drop_failed_scores)
    copy.load_state_dict(read_back(state))
    assert same(copy.state_dict(), state)
    return copy


@st.composite
def configs(draw: st.DrawFn) -> SamplingConfig:
    staleness = draw(st.integers(0, 2), "max_staleness")
    return SamplingConfig(
        groups_per_step=draw(st.integers(1, 4), "N"),
        max_staleness=staleness,
        lookahead=draw(st.sampled_from([x for x in (0, 0.5, 1, 1.5, 2) if x <= staleness])),
        max_groups_per_step=draw(st.sampled_from([None, 1, 6, 12])),
        commit=draw(st.sampled_from(["admission_order", "admission_order", "completion_order"])),
        max_attempts=draw(st.integers(1, 2)),
        rate_decay=draw(st.sampled_from([0.5, 0.98])),
    )


class World:
    """Engine, scorers and trainer that do what they like, and a model beside the ledger.

    The model is dictionaries by group id and looks at every group at every event.
    """

    def __init__(
        self,
        config: SamplingConfig,
        n: int,
        drop_failed_scores: bool,
        seed: int,
        live: bool = False,
        baseline: bool = False,
    ) -> None:
        """`live`: the engine goes on writing across a cut, where the rule allows it."""
        self.baseline = baseline
        self.live = live and config.max_staleness > 0 and config.commit == "admission_order"
        self.config = config
        self.n = n
        self.drop_failed_scores = drop_failed_scores
        self.chance = Random(seed)
        self.p_right = 0.5
        self.in_order = config.commit == "admission_order"
        self.ledger = Ledger(
            config, n, with_baseline=baseline, drop_failed_scores=drop_failed_scores
        )
        self.version = 0
        self.steps = 0
        self.generated = 0
        self.admitted: list[int] = []  # version at admission, by id
        self.running: dict[tuple[int, int], int] = {}  # answer -> length sent to the engine
        self.unscored: set[tuple[int, int]] = set()
        self.lengths: dict[tuple[int, int], int] = {}
        self.failures: dict[tuple[int, int], int] = {}
        self.accuracy: dict[int, list[float]] = {}  # of the sampled answers
        self.scored: dict[int, int] = {}
        self.whole: set[tuple[int, int]] = set()  # finished answers
        self.judged: list[int] = []  # groups with a verdict since the last commit
        self.verdicts: dict[int, str] = {}  # closed groups, in the order in which they closed
        self.fates: dict[int, str] = {}
        self.cut_after = -1
        self.ledger.begin_step(0)

    def run(self, events: int) -> None:
        for _ in range(events):
            self.happen()
            self.check()

    def happen(self) -> None:
        """One event, of those that can be."""
        if self.chance.random() < 0.01:  # luck that deceives the estimate
            self.p_right = self.chance.choice([0.02, 0.1, 0.5, 0.8])
        possible = {
            self.admit: 4 * self.ledger.may_admit(),
            self.dispatch: 4 * bool(self.ledger.groups.waiting),
            self.engine_event: 10 * bool(self.running),
            self.engine_forgets: 0.05 * bool(self.running),
            self.engine_tells: 2 * self.live * bool(self.running),
            self.score: 10 * bool(self.unscored),
            self.cut: 4 * self.ledger.step_is_ready(),
            self.go_on_from_a_checkpoint: 0.2,
        }
        (event,) = self.chance.choices(list(possible), list(possible.values()))
        event()

    # Events

    def admit(self) -> None:
        for _ in range(self.chance.randint(1, 4)):
            if self.ledger.may_admit():
                group_id = self.ledger.admit(prompt(len(self.admitted) % 5))
                assert group_id == len(self.admitted)
                self.admitted.append(self.version)
                self.accuracy[group_id] = []
                self.scored[group_id] = 0

    def dispatch(self) -> None:
        batch = self.ledger.dispatch()
        assert [ask.group_id for ask in batch] == sorted(ask.group_id for ask in batch)
        for ask in batch:
            assert ask.group_id not in self.verdicts
            assert ask.greedy == (self.n if self.baseline else None)
            for index, begun in ask.begun.items():
                key = (ask.group_id, index)
                assert key not in self.running
                self.running[key] = len(begun[-1]) if begun else 0
                assert self.running[key] == self.lengths.get(key, 0)

    def engine_event(self) -> None:
        key = self.chance.choice(sorted(self.running))
        kind = self.chance.choices("fax", [20, 1, 1])[0]
        more = self.chance.randint(1, 6)
        if kind == "f":
            self.finish(key, more)
        elif kind == "a":
            self.return_answer(key, more)
            self.ledger.record_aborted(*key, segment(*key, self.lengths[key]), stalled=True)
            self.count_failure(key)
        else:
            self.return_answer(key, more - 1)
            self.ledger.record_failed(*key, segment(*key, self.lengths[key]), "broken")
            self.count_failure(key)

    def engine_tells(self) -> None:
        """How far the answers are that it goes on with."""
        for key in sorted(self.running):
            more = self.chance.randint(0, 3)
            self.generated += more
            self.running[key] = self.lengths[key] = self.running[key] + more
            self.ledger.record_progress(*key, segment(*key, self.lengths[key]))

    def engine_forgets(self) -> None:
        lost = sorted(self.running)
        self.running.clear()
        self.ledger.requeue_running("lost")
        for key in lost:
            self.count_failure(key)

    def score(self) -> None:
        key = self.chance.choice(sorted(self.unscored))
        self.give_score(key, self.chance.random() < self.p_right, self.chance.random() < 0.03)

    def cut(self) -> None:
        finish = self.chance.random() < 0.3
        for key in sorted(self.running):
            if self.chance.random() < 0.3:
                self.finish(key, 1)
            elif not self.live:
                self.return_answer(key, 1)
                self.ledger.record_aborted(*key, segment(*key, self.lengths[key]), stalled=False)
        if finish:
            for key in sorted(self.unscored):
                self.give_score(key, self.chance.random() < 0.5, False)
        self.engine_tells()
        if self.ledger.committable == 0:
            self.ledger.extend_bound()
            assert not self.ledger.in_flight
            assert not self.ledger.qualified
            return
        self.commit()

    def go_on_from_a_checkpoint(self) -> None:
        self.ledger = copy_of(self.ledger, self.n, self.drop_failed_scores, self.baseline)

    # The model's side of events

    def return_answer(self, key: tuple[int, int], more: int) -> None:
        length = self.running.pop(key) + more
        self.generated += more
        self.lengths[key] = length

    def finish(self, key: tuple[int, int], more: int) -> None:
        self.return_answer(key, more)
        length = self.lengths[key]
        self.ledger.record_finished(*key, whole(*key, length, self.admitted[key[0]]))
        self.whole.add(key)
        if key[0] not in self.verdicts:
            self.unscored.add(key)

    def count_failure(self, key: tuple[int, int]) -> None:
        self.failures[key] = self.failures.get(key, 0) + 1
        if self.failures[key] > self.config.max_attempts and key[0] not in self.verdicts:
            self.close(key[0], "failed")

    def give_score(self, key: tuple[int, int], right: bool, failed: bool) -> None:
        self.unscored.discard(key)
        score = Score(0.0, float(right and not failed), error="no" if failed else "")
        self.ledger.record_score(*key, score)
        group = key[0]
        if group in self.verdicts:
            return
        self.scored[group] += 1
        if key[1] < self.n:
            self.accuracy[group].append(score.accuracy)
        if failed and self.drop_failed_scores:
            self.close(group, "failed")
        elif self.scored[group] == self.n + self.baseline:
            self.judged.append(group)
            mixed = len(set(self.accuracy[group])) == 2 or self.n == 1
            alike = "all_right" if self.accuracy[group][0] else "all_wrong"
            self.close(group, "qualified" if mixed else alike)

    def close(self, group: int, verdict: str) -> None:
        self.verdicts[group] = verdict
        self.unscored = {key for key in self.unscored if key[0] != group}

    def commit(self) -> None:
        expected = self.groups_to_train()
        live = [g for g in range(len(self.admitted)) if self.is_live(g)]
        looked = [g for g in range(len(self.admitted)) if g > self.cut_after]
        step = self.ledger.commit()
        assert [group.id for group in step.groups] == sorted(expected)
        self.check_trained(step)
        self.enter(step)
        self.steps += 1
        short = len(expected) < self.config.groups_per_step
        assert step.is_short == short
        if self.config.max_staleness == 0:
            kept: list[int] = []
            dropped = [g for g in live if g not in expected]
            if self.in_order:
                last = len(self.admitted) - 1 if short else max(expected)
                dropped = [g for g in looked if g > last]
            assert [int(p.uid) for p in step.returned] == [g % 5 for g in dropped]
            assert all(self.fates[g] == "surplus" for g in dropped if g in live)
            for g in dropped:
                self.verdicts.setdefault(g, "dropped")
        else:
            kept = [g for g in live if g not in expected]
            assert step.returned == ()
        assert [g for g in range(len(self.admitted)) if self.is_live(g)] == kept
        assert step.counts.carried_open + step.counts.carried_qualified == len(kept)
        if self.in_order:
            whole_prefix = short or self.config.max_staleness == 0
            self.cut_after = len(self.admitted) - 1 if whole_prefix else max(expected)
        self.forget_dropped()
        self.version += 1
        assert len(self.ledger.begin_step(self.version)) == 0 or not self.in_order
        self.note_stale()

    def groups_to_train(self) -> list[int]:
        waiting = [g for g, v in self.verdicts.items() if v == "qualified" and g not in self.fates]
        n = self.config.groups_per_step
        if not self.in_order:
            return waiting[:n]
        # The earliest admitted that qualify, provided that every earlier group is closed.
        first_open = next(
            (g for g in range(len(self.admitted)) if g not in self.verdicts), math.inf
        )
        ready = sorted(g for g in waiting if g < first_open)
        return ready[:n]

    def check_trained(self, step: StepGroups) -> None:
        for settled in step.trained:
            assert len(settled.group.answers) == self.n
            assert settled.admitted_version == self.admitted[settled.group.id]
            assert settled.staleness == self.version - self.admitted[settled.group.id]
            assert settled.staleness <= self.config.max_staleness
            assert all(a.score is not None for a in settled.group.answers)

    def enter(self, step: StepGroups) -> None:
        for settled in (*step.trained, *step.discarded):
            assert settled.group.id not in self.fates or self.fates[settled.group.id] == "?"
            self.fates[settled.group.id] = settled.fate
            self.check_tokens(settled)
            self.check_baseline(settled)
        delta = asdict(step.counts.tokens)
        assert delta["generated"] == sum(delta[c] for c in CLASSES) + delta["in_progress"]
        ended = {settled.group.id for settled in (*step.trained, *step.discarded)}
        baselines = [self.lengths.get((group, self.n), 0) for group in ended]
        assert delta["baseline_tokens"] == sum(baselines)
        cut_off = [
            self.lengths[key]
            for key in self.whole
            if key[0] in ended and key[1] < self.n and self.lengths[key] >= 12
        ]
        truncated = delta["truncated_tokens"], delta["truncated_answers"]
        assert truncated == (sum(cut_off), len(cut_off))
        said = [accuracy for group in self.judged for accuracy in self.accuracy[group]]
        mean = sum(said) / len(said) if said else math.nan
        assert step.counts.tally.mean_accuracy == pytest.approx(mean, nan_ok=True)
        self.judged = []

    def check_tokens(self, settled: SettledGroup) -> None:
        group = settled.group.id
        lengths = [length for key, length in self.lengths.items() if key[0] == group]
        assert settled.tokens == sum(lengths)
        verdict = self.verdicts.get(group)
        if settled.fate == "trained":
            assert verdict == "qualified"
        elif settled.fate in ("all_right", "all_wrong", "failed"):
            assert verdict == settled.fate
        else:
            assert verdict in (None, "qualified", "dropped")

    def check_baseline(self, settled: SettledGroup) -> None:
        baseline = settled.group.baseline
        if not self.baseline:
            assert baseline is None
        elif settled.fate in ("trained", "all_right", "all_wrong"):
            key = settled.group.id, self.n
            assert baseline is not None
            token_ids = whole(*key, self.lengths[key]).token_ids
            assert np.array_equal(baseline.trajectory.token_ids, token_ids)

    def forget_dropped(self) -> None:
        self.unscored = {key for key in self.unscored if self.is_live(key[0])}

    def note_stale(self) -> None:
        for settled in self.ledger.accounting.settled:
            group = settled.group.id
            assert settled.fate == "stale"
            assert not self.in_order
            assert self.version - self.admitted[group] > self.config.max_staleness
            self.fates[group] = "?"
            self.verdicts.setdefault(group, "dropped")
        self.forget_dropped()

    def is_live(self, group: int) -> bool:
        return self.verdicts.get(group) in (None, "qualified") and group not in self.fates

    # What always holds

    def check(self) -> None:
        self.every_token_is_booked_once_or_in_progress()
        self.no_group_is_lost()
        self.the_engine_has_what_the_ledger_thinks()
        self.a_cut_is_due_exactly_when_the_model_says()
        self.something_can_always_happen()
        self.no_more_groups_live_than_the_rule_allows()

    def every_token_is_booked_once_or_in_progress(self) -> None:
        account = self.ledger.account.totals()
        assert account.generated == self.generated == sum(self.lengths.values())
        assert account.generated == account.in_progress + sum(
            getattr(account, fate) for fate in CLASSES
        )
        lives = self.ledger.groups
        pools = (lives.open, lives.qualified, lives.failing)
        recount = sum(
            len(answer.prefix or ())
            + (answer.trajectory.generated_tokens if answer.trajectory else 0)
            for pool in pools
            for life in pool.values()
            for answer in life.answers
        )
        assert account.in_progress == recount

    def no_group_is_lost(self) -> None:
        lives = self.ledger.groups
        alive = {*lives.open, *lives.qualified}
        assert alive == {g for g in range(len(self.admitted)) if self.is_live(g)}
        ended = {s.group.id for s in self.ledger.accounting.settled} | set(self.fates)
        assert alive | ended | set(lives.failing) == set(range(len(self.admitted)))
        assert not ended & set(lives.failing)

    def the_engine_has_what_the_ledger_thinks(self) -> None:
        lives = self.ledger.groups
        assert lives.running_keys() == sorted(self.running)
        assert lives.running == len(self.running)
        assert lives.unscored() == sorted(self.unscored)

    def a_cut_is_due_exactly_when_the_model_says(self) -> None:
        opened = [g for g in range(len(self.admitted)) if g not in self.verdicts]
        full = len(self.groups_to_train()) == self.config.groups_per_step
        at_bound = self.ledger.looked_at >= self.ledger.bound and not opened
        assert self.ledger.step_is_ready() == (full or at_bound)

    def something_can_always_happen(self) -> None:
        assert (
            self.running
            or self.unscored
            or self.ledger.groups.waiting
            or self.ledger.may_admit()
            or self.ledger.step_is_ready()
        )

    def no_more_groups_live_than_the_rule_allows(self) -> None:
        assert self.ledger.looked_at <= self.ledger.bound
        staleness = self.config.max_staleness
        if staleness:
            live = self.ledger.qualified + self.ledger.in_flight
            assert live <= self.config.groups_per_step * (1 + staleness)


SEEDS = st.integers(0, 2**32)


@examples(20)
@example(SamplingConfig(groups_per_step=1, max_staleness=0), 2, False, 0, False, False)
@given(configs(), st.integers(1, 3), st.booleans(), SEEDS, st.booleans(), st.booleans())
def test_in_any_order_of_events_the_ledger_does_what_the_model_says(
    config: SamplingConfig, n: int, drop_failed_scores: bool, seed: int, live: bool, baseline: bool
) -> None:
    World(config, n, drop_failed_scores, seed, live, baseline).run(events=250)


@examples(8)
@given(
    *(configs(), st.integers(1, 3), st.booleans(), SEEDS),
    *(st.integers(4, 20), st.booleans(), st.booleans()),
)
def test_a_ledger_restored_at_any_event_goes_on_as_if_nothing_had_been(
    config: SamplingConfig,
    n: int,
    drop_failed_scores: bool,
    seed: int,
    every: int,
    live: bool,
    baseline: bool,
) -> None:
    undisturbed = World(config, n, drop_failed_scores, seed, live, baseline)
    restored = World(config, n, drop_failed_scores, seed, live, baseline)
    for event in range(120):
        undisturbed.happen()
        restored.happen()
        if event % every == 0:
            restored.ledger = copy_of(restored.ledger, n, drop_failed_scores, baseline)
    assert same(restored.ledger.state_dict(), undisturbed.ledger.state_dict())


def without_turns(entries: dict[str, Any]) -> dict[str, Any]:
    """As a winnow without turns wrote it."""
    return {key: value for key, value in entries.items() if not key.startswith(("turn", "next_t"))}


def test_in_a_state_without_turns_they_are_the_admission_indices(tmp_path: Path) -> None:
    ledger = start(groups_per_step=1, max_staleness=0)
    admit_all(ledger)
    halt(ledger)
    finished = ledger.admit(prompt(2))
    ledger.dispatch()
    finish(ledger, finished, (0, 0))
    write_state(tmp_path, ledger.state_dict())
    state = tmp_path / "state.json"
    told = json.loads(state.read_text(), object_hook=without_turns)
    state.write_text(json.dumps(told))
    copy = Ledger(ledger.config, 2)
    copy.load_state_dict(read_state(tmp_path, STATE_CLASSES))
    assert same(copy.state_dict(), ledger.state_dict())
    copy.admit(prompt(3))
    turns = [(group.id, group.turn) for group in copy.groups.open.values()]
    assert turns == [(0, 0), (1, 1), (3, 3)]


def start(**settings: Any) -> Ledger:
    ledger = Ledger(SamplingConfig(**settings), n=2)
    ledger.begin_step(0)
    return ledger


def admit_all(ledger: Ledger) -> list[int]:
    ids = []
    while ledger.may_admit():
        ids.append(ledger.admit(prompt(ledger.looked_at)))
    ledger.dispatch()
    return ids


def finish(ledger: Ledger, group: int, accuracies: tuple[float, float], length: int = 5) -> None:
    for index, accuracy in enumerate(accuracies):
        ledger.record_finished(group, index, whole(group, index, length, ledger.version))
        ledger.record_score(group, index, Score(accuracy, accuracy))


def halt(ledger: Ledger, length: int = 3) -> None:
    for group, index in ledger.groups.running_keys():
        ledger.record_aborted(
            group, index, segment(group, index, length, ledger.version), stalled=False
        )


def test_a_step_waits_for_every_group_before_its_last() -> None:
    ledger = start(groups_per_step=2)
    assert admit_all(ledger) == [0, 1, 2, 3]
    finish(ledger, 1, (0, 1))
    finish(ledger, 3, (0, 1))
    finish(ledger, 2, (1, 1))
    assert not ledger.step_is_ready()
    finish(ledger, 0, (1, 0))
    assert ledger.step_is_ready()
    halt(ledger)
    assert [g.id for g in ledger.commit().groups] == [0, 1]


def test_without_a_filter_no_group_opens_that_the_step_does_not_need() -> None:
    ledger = start(groups_per_step=3, filter=NoFilter())
    for step in range(3):
        assert len(admit_all(ledger)) == 3
        for group in range(3 * step, 3 * step + 3):
            finish(ledger, group, (1, 1))
        assert [g.id for g in ledger.commit().groups] == [3 * step, 3 * step + 1, 3 * step + 2]
        ledger.begin_step(step + 1)


def test_a_sandbox_that_failed_is_never_the_answers_fault() -> None:
    ledger = start(groups_per_step=1)
    admit_all(ledger)
    for index, outside in enumerate((True, False)):
        ledger.record_finished(0, index, whole(0, index, 4))
        ledger.record_score(0, index, Score(0, 0, error="timed out", outside=outside))
    assert ledger.accounting.count_fates()["failed"] == 1


def test_a_truncated_baseline_is_not_among_the_truncated_answers() -> None:
    ledger = Ledger(SamplingConfig(groups_per_step=1), n=2, with_baseline=True)
    ledger.begin_step(0)
    admit_all(ledger)
    for index, length in enumerate((5, 12, 12)):
        ledger.record_finished(0, index, whole(0, index, length))
        ledger.record_score(0, index, Score(index % 2, index % 2))
    halt(ledger, length=0)
    ledger.commit()
    counts = ledger.account
    assert (counts.truncated_answers, counts.truncated_tokens) == (1, 12)


@pytest.mark.parametrize(("faults", "failed"), [([1, 1, 3, 3], 0), ([1, 1, 1], 1)])
def test_faults_of_a_conversation_are_counted_by_turn(faults: list[int], failed: int) -> None:
    ledger = start(groups_per_step=1, max_attempts=2)
    admit_all(ledger)
    for turns in faults:
        earlier = tuple(segment(0, place, 4) for place in range(turns))
        ledger.record_failed(0, 0, segment(0, 0, 0), "it crashed", earlier)
        ledger.dispatch()
    assert ledger.tally.failed == failed


def test_carried_groups_count_towards_the_next_bound() -> None:
    ledger = start(groups_per_step=1, max_groups_per_step=3, max_staleness=2)
    assert admit_all(ledger) == [0, 1]
    finish(ledger, 0, (0, 1))
    halt(ledger)
    assert ledger.commit().counts.looked_at == 1
    assert ledger.looked_at == 1


def test_completion_order_drops_what_was_overtaken_for_too_long() -> None:
    ledger = start(groups_per_step=1, commit="completion_order", max_staleness=1)
    admit_all(ledger)
    for version in (1, 2):
        group = ledger.admit(prompt(10 + version))
        ledger.dispatch()
        finish(ledger, group, (0, 1))
        halt(ledger, length=2)
        ledger.commit()
        returned = ledger.begin_step(version)
    assert [p.uid for p in returned] == ["0", "1"]
    assert ledger.account.booked["stale"] == 8


def test_staleness_counts_a_baselines_oldest_token() -> None:
    ledger = Ledger(SamplingConfig(groups_per_step=1), n=2, with_baseline=True)
    ledger.begin_step(0)
    admit_all(ledger)
    ledger.record_finished(1, 2, whole(1, 2, 3))
    for index, right in enumerate((0, 1, 1)):
        ledger.record_finished(0, index, whole(0, index, 5))
        ledger.record_score(0, index, Score(right, right))
    halt(ledger, length=0)
    ledger.commit()
    ledger.begin_step(1)
    ledger.dispatch()
    finish(ledger, 1, (0, 1))
    ledger.record_score(1, 2, Score(0, 0))
    (settled,) = ledger.commit().trained
    assert settled.staleness == 1
