"""The scheduler on the scripted engine, each test in both modes unless it says otherwise."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from tests.states import read_back

from engines import Prompts, ScriptedEngine, greedy_seed, uniforms, written
from winnow.config.rollout import NoFilter, SamplingConfig, VarianceFilter
from winnow.errors import NoSignalError, RewardError, TrainingError
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    GroupRequest,
    SamplingParams,
    WeightUpdate,
    answer_seed,
)
from winnow.rollout.engine_group import EngineGroup
from winnow.sampling import stream
from winnow.sampling.accounting import FATES, StepGroups
from winnow.sampling.ledger import Ledger
from winnow.sampling.stream import Sampler
from winnow.types import Prompt, Score, Trajectory

LIMIT = 60


def ragged(request: GroupRequest, answer: AnswerRequest) -> int:
    """Between 5 and 84 tokens, whatever the prompt."""
    return 5 + int(80 * uniforms(answer.seed + 1, 0, 1)[0])


def by_first_token(prompt: Prompt, trajectory: Trajectory) -> Score:
    right = float(trajectory.token_ids[0] < 32)
    return Score(2 * right - 1, right)


def always(accuracy: float) -> Callable[[Prompt, Trajectory], Score]:
    return lambda prompt, trajectory: Score(accuracy, accuracy)


class Run:
    """A sampler with everything it needs, and a trainer that only publishes."""

    deterministic = True
    """Set by the fixture `mode`."""

    def __init__(
        self,
        engine: ScriptedEngine | None = None,
        score: Any = by_first_token,
        n: int = 2,
        on_progress: Callable[[Ledger], None] = lambda ledger: None,
        drop_failed_scores: bool = False,
        with_baseline: bool = False,
        **settings: Any,
    ) -> None:
        self.engine = engine or ScriptedEngine(ragged, slots=16)
        if isinstance(self.engine, ScriptedEngine):
            self.engine.live_updates = not self.deterministic
        self.prompts = Prompts()
        self.version = 0
        self.sampler = Sampler(
            SamplingConfig(**{"groups_per_step": 4, **settings}),
            engine=self.engine,
            next_prompt=self.prompts.next,
            give_back=self.prompts.give_back,
            score=score,
            n=n,
            sampling=SamplingParams(max_tokens=LIMIT),
            run_seed=5,
            with_baseline=with_baseline,
            drop_failed_scores=drop_failed_scores,
            deterministic=self.deterministic,
            on_progress=on_progress,
        )

    async def step(self) -> StepGroups:
        await self.engine.load_weights(WeightUpdate(self.version))
        step = await self.sampler.step(self.version)
        self.version += 1
        return step

    def steps(self, count: int) -> list[StepGroups]:
        async def go() -> list[StepGroups]:
            return [await self.step() for _ in range(count)]

        return asyncio.run(go())


@pytest.fixture(autouse=True, params=["deterministic", "free"])
def mode(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(Run, "deterministic", request.param == "deterministic")
    return str(request.param)


only_deterministic = pytest.mark.parametrize("mode", ["deterministic"], indirect=True)
only_free = pytest.mark.parametrize("mode", ["free"], indirect=True)


def test_a_step_gives_n_whole_groups_that_qualify_in_admission_order() -> None:
    ids: list[int] = []
    for step in Run().steps(10):
        assert len(step.groups) == 4
        assert not step.short
        for group in step.groups:
            assert len(group.answers) == 2
            assert {a.score.accuracy for a in group.answers} == {0, 1}
        ids += [group.id for group in step.groups]
    assert ids == sorted(ids)


def test_the_account_agrees_with_the_engine() -> None:
    run = Run()
    steps = run.steps(10)
    account = run.sampler.ledger.account.read()
    assert account.generated == run.engine.status().generated_tokens
    assert account.generated == account.in_progress + sum(getattr(account, f) for f in FATES)
    assert sum(step.counts.tokens.generated for step in steps) == account.generated
    assert account.trained == sum(g.generated_tokens for step in steps for g in step.groups)
    assert account.truncated_tokens == LIMIT * account.truncated_answers > 0
    assert account.failed == account.stale == account.surplus == 0


def test_slots_are_refilled_while_a_step_runs() -> None:
    run = Run(ScriptedEngine(ragged, slots=4), groups_per_step=8)
    run.steps(3)
    assert run.engine.most_running == 4
    first = [r.group_id for r in run.engine.submitted]
    assert len(set(first)) > 3 * 8


def test_groups_go_to_the_engine_in_batches_by_admission_index() -> None:
    run = Run()
    run.steps(5)
    assert all(r.priority == r.group_id for r in run.engine.submitted)


@only_deterministic
def test_at_the_target_everything_is_aborted_and_resumed_first_in_the_next_step() -> None:
    async def go() -> None:
        run = Run()
        carried = 0
        for _ in range(8):
            step = await run.step()
            status = run.engine.status()
            assert status.running == status.queued == 0
            carried += step.counts.carried_open
            waiting = sorted(run.sampler.ledger.groups.open)
            run.engine.submitted.clear()
            following = await run.step()
            resumed = [r.group_id for r in run.engine.submitted][: len(waiting)]
            assert resumed == waiting
            assert following.counts.tally.resumed_answers <= step.counts.tally.aborted_answers
        assert carried > 5

    asyncio.run(go())


def test_a_resumed_answer_is_token_for_token_the_undisturbed_one() -> None:
    versions = set()
    for step in Run().steps(12):
        for group in step.groups:
            for index, answer in enumerate(group.answers):
                (segment,) = answer.trajectory.segments
                alone = written(answer_seed(5, group.id, index), 0, len(segment), 0)
                assert np.array_equal(segment.token_ids, alone.token_ids)
                assert np.array_equal(segment.logprobs, alone.logprobs)
                assert segment.spans[-1].stop == len(segment)
                versions.add(len(segment.spans))
    assert versions >= {1, 2}


def test_every_prompt_is_used_once_and_none_is_skipped() -> None:
    run = Run()
    steps = run.steps(10)
    ended = [s.group for step in steps for s in (*step.trained, *step.discarded)]
    left = [*run.sampler.ledger.groups.open.values(), *run.sampler.ledger.groups.qualified.values()]
    uids = sorted([int(g.prompt.uid) for g in ended] + [int(life.prompt.uid) for life in left])
    assert uids == list(range(run.prompts.cursor))


@pytest.mark.parametrize(("staleness", "lookahead"), [(1, 0), (1, 1), (2, 0), (3, 1.5)])
def test_staleness_stays_within_its_bound(staleness: int, lookahead: float) -> None:
    run = Run(max_staleness=staleness, lookahead=lookahead)
    steps = run.steps(15)
    oldest = max(step.counts.staleness_max for step in steps)
    assert 0 < oldest <= staleness
    for step in steps:
        for settled in step.trained:
            oldest = min(a.trajectory.versions[0] for a in settled.group.scored)
            assert settled.staleness == step.version - oldest


def test_lookahead_keeps_more_groups_in_flight() -> None:
    mean = {}
    for lookahead in (0, 2):
        seen: list[int] = []

        def look(ledger: Ledger, seen: list[int] = seen) -> None:
            seen.append(ledger.in_flight)

        Run(lookahead=lookahead, max_staleness=2, on_progress=look).steps(12)
        mean[lookahead] = sum(seen) / len(seen)
    assert mean[2] > 1.5 * mean[0]


def test_with_no_staleness_nothing_is_carried_and_prompts_return_in_order() -> None:
    run = Run(max_staleness=0)
    returned = 0
    for _ in range(10):
        (step,) = run.steps(1)
        assert step.counts.carried_open == step.counts.carried_qualified == 0
        assert step.counts.staleness_max == 0
        assert all(
            set(a.trajectory.versions) == {step.version} for g in step.groups for a in g.answers
        )
        last = step.groups[-1].prompt.uid
        uids = [int(p.uid) for p in step.returned]
        assert uids == sorted(uids)
        assert all(uid > int(last) for uid in uids)
        assert run.prompts.given_back[returned:] == list(step.returned)
        returned += len(uids)
    assert returned > 5
    account = run.sampler.ledger.account
    assert account.booked["surplus"] > 0
    assert account.in_progress == 0


def test_a_returned_prompt_comes_again_as_a_new_group() -> None:
    run = Run(max_staleness=0)
    steps = run.steps(10)
    trained = [int(g.prompt.uid) for step in steps for g in step.groups]
    assert trained == sorted(trained)
    ids = [g.id for step in steps for g in step.groups]
    assert len(set(ids)) == len(ids)


def engines(slots: int, deterministic: bool) -> list[Any]:
    """One engine with so many slots, one with a few, and the first as two."""
    alone = [ScriptedEngine(ragged, slots=count) for count in (slots, 5)]
    halves = [ScriptedEngine(ragged, slots=slots // 2) for _ in range(2)]
    return [*alone, EngineGroup(halves, True, 3)] if deterministic else alone


def learnt(run: Run, beside_learning: bool) -> list[object]:
    """Turns, tokens and versions of what six steps train."""

    async def go() -> list[object]:
        found = []
        for learns in range(6):
            version = max(0, learns - beside_learning)
            await run.engine.load_weights(WeightUpdate(version))
            run.sampler.published(version)
            step = await run.sampler.step(version, learns)
            found += [
                (learns, s.turn, s.group.prompt.uid, a.trajectory.token_ids.tolist(), a.trajectory)
                for s in step.trained
                for a in s.group.answers
            ]
        return [(*first, answer.versions) for *first, answer in found]

    return asyncio.run(go())


@pytest.mark.parametrize(("staleness", "beside_learning"), [(0, False), (1, True)])
def test_any_number_of_slots_and_engines_learns_the_same_tokens(
    staleness: int, beside_learning: bool
) -> None:
    runs = [
        Run(engine, max_staleness=staleness, score_lag_ticks=2)
        for engine in engines(16, Run.deterministic)
    ]
    first, *others = (learnt(run, beside_learning) for run in runs)
    for other in others:
        assert other == first
    groups = {run.sampler.ledger.next_id for run in runs}
    assert (len(groups) == 1) == beside_learning  # other surplus where it is given back


def test_the_same_seed_gives_the_same_steps() -> None:
    def fingerprint() -> list[object]:
        return [
            (step.counts, [a.trajectory.token_ids.tolist() for g in step.groups for a in g.answers])
            for step in Run().steps(6)
        ]

    assert repr(fingerprint()) == repr(fingerprint())


@pytest.mark.parametrize("with_baseline", [False, True])
def test_a_run_goes_on_exactly_from_its_state(with_baseline: bool) -> None:
    def told(steps: list[StepGroups]) -> list[object]:
        return [
            (
                # What goes on in the engine without a stop is resumed after one.
                repr(replace(step.counts, tally=replace(step.counts.tally, resumed_answers=0))),
                [
                    (g.id, g.prompt.uid, a.trajectory.token_ids.tolist(), a.score.accuracy)
                    for g in step.groups
                    for a in g.scored
                ],
            )
            for step in steps
        ]

    undisturbed = Run(lookahead=1, with_baseline=with_baseline).steps(8)
    first = Run(lookahead=1, with_baseline=with_baseline)
    before = first.steps(3)
    saved = read_back(first.sampler.state_dict())
    second = Run(lookahead=1, with_baseline=with_baseline)
    second.sampler.load_state_dict(saved)
    second.prompts.cursor = first.prompts.cursor
    second.version = first.version
    assert told(before + second.steps(5)) == told(undisturbed)


@only_free
def test_answers_under_way_at_a_cut_go_on_under_the_new_weights() -> None:
    run = Run(lookahead=1)
    steps = run.steps(12)
    assert (
        sum(step.counts.tally.aborted_answers + step.counts.tally.resumed_answers for step in steps)
        == 0
    )
    assert run.engine.aborted_groups == []
    spans = set()
    for step in steps:
        for group in step.groups:
            for index, answer in enumerate(group.answers):
                (segment,) = answer.trajectory.segments
                alone = written(answer_seed(5, group.id, index), 0, len(segment), 0)
                assert np.array_equal(segment.token_ids, alone.token_ids)
                assert segment.spans[-1].stop == len(segment)
                assert step.version >= segment.spans[-1].version
                spans.add(len(segment.spans))
    assert spans >= {1, 2}


@only_free
def test_a_state_between_two_steps_has_every_token_of_answers_under_way() -> None:
    run = Run(lookahead=1)
    run.steps(4)
    assert run.engine.status().running > 0
    lives = run.sampler.ledger.groups
    kept = {
        key: len(prefix) if (prefix := lives.at_engine(*key)[1].prefix) else 0
        for key in lives.with_engine()
    }
    assert sum(kept.values()) > 0
    other = Run(lookahead=1)
    other.sampler.load_state_dict(read_back(run.sampler.state_dict()))
    assert other.sampler.ledger.account.read() == run.sampler.ledger.account.read()
    assert run.sampler.ledger.account.generated == run.engine.status().generated_tokens
    asked = {
        (ask.group_id, index): len(prefix) if prefix else 0
        for ask in other.sampler.ledger.dispatch()
        for index, prefix in ask.prefixes.items()
    }
    assert asked == kept


@only_free
@pytest.mark.parametrize(
    "settings", [{"max_staleness": 0}, {"commit": "completion_order"}], ids=str
)
def test_where_a_cut_drops_groups_nothing_runs_across_it(settings: dict[str, Any]) -> None:
    async def go() -> None:
        run = Run(**settings)
        for _ in range(6):
            await run.step()
            assert run.engine.status().running == 0
        assert run.engine.aborted_groups

    asyncio.run(go())


@only_free
def test_an_engine_that_does_not_take_weights_live_is_emptied_at_each_cut() -> None:
    run = Run(lookahead=1)
    run.engine.live_updates = False
    assert sum(step.counts.tally.aborted_answers for step in run.steps(8)) > 0


@only_free
def test_all_that_runs_is_given_back_for_an_evaluation_and_goes_on_after_it() -> None:
    async def go() -> None:
        run, undisturbed = Run(lookahead=1), Run(lookahead=1)
        for _ in range(6):
            step, other = await run.step(), await undisturbed.step()
            assert [g.id for g in step.groups] == [g.id for g in other.groups]
            await run.sampler.halt()
            status = run.engine.status()
            assert status.running == status.queued == 0
            generated = run.sampler.ledger.account.generated
            assert generated == status.generated_tokens
        assert run.engine.aborted_groups

    asyncio.run(go())


@only_free
def test_the_engine_does_not_wait_for_a_slow_score() -> None:
    engine = ScriptedEngine(ragged, slots=16)
    ticks: list[int] = []

    async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        # This prompt is scored when the others are 30 ticks on: with a barrier, never.
        if prompt.uid == "0":
            begun = engine.tick
            while engine.tick < begun + 30:
                await asyncio.sleep(0)
            ticks.append(engine.tick - begun)
        return by_first_token(prompt, trajectory)

    (step,) = Run(engine, score=score, lookahead=1).steps(1)
    assert len(step.groups) == 4
    assert len(ticks) == 2
    assert min(ticks) >= 30


@only_free
def test_a_step_ends_by_the_last_score_though_the_engine_goes_on() -> None:
    async def go() -> None:
        released = asyncio.Event()

        async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
            if prompt.uid == "3":
                await released.wait()
            return Score(0.0, float(trajectory.token_ids[0] < 32))

        run = Run(ScriptedEngine(lambda r, a: 10 if r.group_id < 8 else 60, slots=64), score=score)
        step = asyncio.create_task(run.step())
        await asyncio.sleep(0.05)
        assert not step.done()
        released.set()
        assert len((await step).groups) == 4

    asyncio.run(go())


@only_deterministic
def test_scores_are_taken_side_by_side_and_entered_in_event_order() -> None:
    running = peak = 0

    async def slow(prompt: Prompt, trajectory: Trajectory) -> Score:
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        # The later the answer in the batch, the earlier its score.
        await asyncio.sleep(0.002 / running)
        running -= 1
        return by_first_token(prompt, trajectory)

    lengths = ScriptedEngine(lambda request, answer: 10, slots=16)
    steps = Run(lengths, score=slow).steps(2)
    assert peak == 16
    plain = Run(ScriptedEngine(lambda request, answer: 10, slots=16)).steps(2)
    assert [repr(s.counts) for s in steps] == [repr(s.counts) for s in plain]


def test_a_scorers_error_ends_the_step_and_the_other_scorings() -> None:
    cancelled = 0

    async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        nonlocal cancelled
        if prompt.uid == "1":
            raise RewardError("the scorer is broken")
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            cancelled += 1
            raise
        raise AssertionError("not reached")

    run = Run(ScriptedEngine(lambda request, answer: 10, slots=16), score=score)
    with pytest.raises(RewardError, match="the scorer is broken"):
        run.steps(1)
    assert cancelled > 5


def test_answers_finished_but_unscored_at_a_crash_are_scored_after_it() -> None:
    def broken(prompt: Prompt, trajectory: Trajectory) -> Score:
        if prompt.uid == "3":
            raise RewardError("down")
        return by_first_token(prompt, trajectory)

    crashed = Run(score=broken)
    with pytest.raises(RewardError):
        crashed.steps(1)
    healthy = Run()
    healthy.sampler.load_state_dict(crashed.sampler.state_dict())
    healthy.prompts.cursor = crashed.prompts.cursor
    (step,) = healthy.steps(1)
    assert len(step.groups) == 4


def test_a_missing_metric_stops_the_run() -> None:
    run = Run(filter=VarianceFilter(metric="style"))
    with pytest.raises(RewardError, match="'style'"):
        run.steps(1)


# Bounds


def test_at_the_bound_a_step_is_short_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(max_groups_per_step=6)
    with caplog.at_level(logging.WARNING):
        steps = run.steps(6)
    short = [step for step in steps if step.short]
    assert short
    assert all(0 < len(step.groups) < 4 for step in short)
    assert run.sampler.ledger.short_steps == len(short)
    line = f"step {short[0].version} is short: {len(short[0].groups)} of 4 groups qualified"
    assert line in caplog.text


def test_bounds_without_a_qualified_group_are_no_step_and_three_in_a_row_stop() -> None:
    run = Run(score=always(0.0), max_groups_per_step=6)
    with pytest.raises(NoSignalError) as caught:
        run.steps(1)
    message = str(caught.value)
    assert "met its bound 3 times in a row" in message
    assert (
        "of 18 groups looked at, 0 qualified, 18 were all wrong, 0 all right, 0 failed" in message
    )
    assert "mean accuracy 0.000" in message
    assert "nearly all counts as wrong: ask `winnow reward try FILE --row 0" in message
    assert "\n" not in message
    assert run.sampler.ledger.account.booked["all_wrong"] > 0


def test_what_to_do_follows_from_what_the_filter_saw() -> None:
    long = ScriptedEngine(lambda request, answer: 1000)
    broken = ScriptedEngine(ragged, fails=lambda group, answer, attempt: 3)
    for run, remedy in [
        (Run(score=always(1.0)), "nearly all counts as right: .*reward.function.path"),
        (Run(long, score=always(0.0)), "raise rollout.max_response_tokens"),
        (Run(broken), r"last error: .*a scripted failure.*failed in the engine or in scoring"),
        (Run(score=always(0.3)), "nearly all counts as wrong: .* easier prompts"),
    ]:
        with pytest.raises(NoSignalError, match=remedy):
            run.steps(1)


def test_an_empty_bound_followed_by_signal_is_one_step_with_both_on_its_books() -> None:
    def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        return (
            always(0.0)(prompt, trajectory)
            if int(prompt.uid) < 12
            else by_first_token(prompt, trajectory)
        )

    run = Run(score=score, max_groups_per_step=12)
    (step,) = run.steps(1)
    assert step.counts.tally.empty_bounds == 1
    assert {s.group.prompt.uid for s in step.discarded} >= {str(uid) for uid in range(12)}
    assert run.sampler.ledger.tally.empty_bounds == 0


def test_a_run_that_stops_at_the_bound_keeps_what_it_accepted() -> None:
    run = Run(max_groups_per_step=5, on_bound="stop")
    with pytest.raises(NoSignalError) as caught:
        run.steps(20)
    accepted = run.sampler.ledger.qualified
    assert 0 < accepted < 4
    message = str(caught.value)
    assert message.startswith(f"sampling.on_bound is stop and {accepted} qualified groups do not")
    assert "raise sampling.max_groups_per_step" in message
    ids = sorted(run.sampler.ledger.groups.qualified)
    wider = Run(max_groups_per_step=40, on_bound="stop")
    wider.sampler.load_state_dict(read_back(run.sampler.state_dict()))
    wider.version = run.version
    (step,) = wider.steps(1)
    assert [g.id for g in step.groups][:accepted] == ids


# Liveness


def test_a_failed_answer_is_retried_behind_its_prefix_and_ends_the_same() -> None:
    def fails(group: int, answer: int, attempt: int) -> int | None:
        return 3 + attempt if answer == 0 and attempt < 3 else None

    run = Run(ScriptedEngine(ragged, slots=16, fails=fails))
    steps = run.steps(3)
    plain = Run().steps(3)
    assert [[g.id for g in s.groups] for s in steps] == [[g.id for g in s.groups] for s in plain]
    for step in steps:
        assert step.counts.tally.retried_answers > 0
        assert step.counts.fates["failed"] == 0
        for group in step.groups:
            tokens = group.answers[0].trajectory.token_ids
            alone = written(answer_seed(5, group.id, 0), 0, len(tokens), 0)
            assert np.array_equal(tokens, alone.token_ids)


def test_a_group_whose_answer_fails_too_often_is_failed_and_the_step_goes_on() -> None:
    def fails(group: int, answer: int, attempt: int) -> int | None:
        return 4 if group % 5 == 0 and answer == 0 else None

    run = Run(ScriptedEngine(ragged, slots=16, fails=fails))
    steps = run.steps(5)
    failed = {s.group.id for step in steps for s in step.discarded if s.fate == "failed"}
    assert failed
    assert all(group % 5 == 0 for group in failed)
    assert all(len(step.groups) == 4 for step in steps)
    account = run.sampler.ledger.account
    assert account.booked["failed"] > 0


def test_the_other_answers_of_a_failed_group_do_not_go_on_in_vain() -> None:
    def fails(group: int, answer: int, attempt: int) -> int | None:
        return 4 if (group, answer) == (1, 0) else None

    run = Run(ScriptedEngine(lambda request, answer: 50, fails=fails))
    (step,) = run.steps(1)
    (failed,) = [settled for settled in step.discarded if settled.fate == "failed"]
    assert (failed.group.id, failed.tokens) == (1, 4 + 4)


class WritesOn(ScriptedEngine):
    """An engine that goes on to its next end while it is asked for progress."""

    async def progress(self) -> Sequence[CompletionEvent]:
        self._run_to_next_end(None)
        return await super().progress()


@only_free
def test_a_group_that_fails_at_a_cut_is_not_without_a_fate() -> None:
    def length(request: GroupRequest, answer: AnswerRequest) -> int:
        return LIMIT if (request.group_id, answer.index) == (4, 1) else 3

    def fails(group: int, answer: int, attempt: int) -> int | None:
        return (2, 5)[attempt] if (group, answer) == (4, 0) else None

    settings = {"lookahead": 1, "max_attempts": 1, "filter": NoFilter()}
    run = Run(WritesOn(length, slots=16, fails=fails), always(1.0), **settings)
    (step,) = run.steps(1)
    counts = step.counts
    assert counts.fates["failed"] == 1
    ended = len(step.trained) + len(step.discarded)
    assert counts.carried_qualified + counts.carried_open == counts.tally.admitted - ended


@only_free
def test_progress_may_be_asked_for_while_a_cut_asks_for_it() -> None:
    """As at a boundary of trainer/mode=async; one engine answers later than the other."""

    class Late(ScriptedEngine):
        late = 0

        async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
            for _ in range(3):
                await asyncio.sleep(0)
            return await super().events(until)

        async def progress(self) -> Sequence[CompletionEvent]:
            late, self.late = self.late, 0
            for _ in range(late):
                await asyncio.sleep(0)
            return await super().progress()

    engines = [Late(ragged, slots=6, live_updates=True) for _ in range(2)]
    group = EngineGroup(cast("Any", engines), deterministic=False)
    run = Run(cast("Any", group), lookahead=2)
    asked = group.progress
    boundaries: list[asyncio.Task[None]] = []

    async def boundary() -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        await run.sampler.enter_progress()

    async def progress() -> Sequence[CompletionEvent]:
        if not boundaries:
            engines[1].late = 40
            boundaries.append(asyncio.create_task(boundary()))
        return await asked()

    group.progress = progress  # type: ignore[method-assign]

    async def go() -> None:
        for _ in range(30):
            await run.step()
            await boundaries.pop()

    asyncio.run(go())
    assert not boundaries


def test_a_failure_without_a_prefix_costs_what_was_written_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = ScriptedEngine(
        ragged, fails=lambda g, a, attempt: 4 if attempt == 0 else None, keeps_prefix=False
    )
    with caplog.at_level(logging.WARNING):
        (step,) = Run(engine).steps(1)
    assert len(step.groups) == 4
    assert "tokens that never came back" in caplog.text


def test_an_engine_that_forgot_its_answers_gets_them_again() -> None:
    async def go() -> StepGroups:
        run = Run()
        events = run.engine.events

        async def forgetful(until: int | None = None) -> Any:
            if run.engine.tick > 10 and not done:
                done.append(True)
                run.engine.forget()
            return await events(until)

        done: list[bool] = []
        run.engine.events = forgetful  # type: ignore[method-assign]
        return await run.step()

    step = asyncio.run(go())
    assert len(step.groups) == 4
    assert step.counts.tally.retried_answers > 0


def test_a_stalled_engine_is_asked_again_behind_the_prefixes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(ScriptedEngine(ragged, slots=16, stalls=[8]), stall_timeout_s=0.05)
    with caplog.at_level(logging.WARNING):
        steps = run.steps(3)
    assert steps[0].counts.tally.retried_answers > 0
    assert "sending answers again. sampling waits for the engine" in caplog.text
    for step in steps:
        for group in step.groups:
            for index, answer in enumerate(group.answers):
                tokens = answer.trajectory.token_ids
                alone = written(answer_seed(5, group.id, index), 0, len(tokens), 0)
                assert np.array_equal(tokens, alone.token_ids)


def test_a_line_says_now_and_then_who_waits_for_whom(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "REPORT_S", 0.02)
    engine = ScriptedEngine(ragged, slots=16, stalls=[8])
    with caplog.at_level(logging.INFO):
        Run(engine, stall_timeout_s=0.2).steps(1)
    assert "sampling waits for the engine: 0 of 4 groups can be trained, 8 are open" in caplog.text
    assert "the oldest open group is 0, " in caplog.text


def test_an_engine_that_never_writes_again_ends_the_run_with_its_name_on_it() -> None:
    class Dead(ScriptedEngine):
        async def abort(self, group_ids: Any) -> None:
            return None

    run = Run(Dead(ragged, stalls=[8]), stall_timeout_s=0.02)
    with pytest.raises(TrainingError, match=r"wrote no token for 0.02 s, 4 times in a row .*the e"):
        run.steps(1)


def test_a_slow_scorer_is_no_stalled_engine() -> None:
    async def slow(prompt: Prompt, trajectory: Trajectory) -> Score:
        await asyncio.sleep(0.1)
        return by_first_token(prompt, trajectory)

    run = Run(ScriptedEngine(lambda r, a: 10, slots=64), score=slow, stall_timeout_s=0.02)
    (step,) = run.steps(1)
    assert step.counts.tally.retried_answers == 0


def test_cancelling_a_step_cancels_it() -> None:
    async def go() -> None:
        run = Run(ScriptedEngine(ragged, stalls=[8]))
        step = asyncio.create_task(run.step())
        await asyncio.sleep(0.01)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(go())


def test_progress_is_told_once_a_turn() -> None:
    seen: list[tuple[int, int, int]] = []

    def look(ledger: Ledger) -> None:
        seen.append((ledger.qualified, ledger.looked_at, ledger.account.generated))

    Run(on_progress=look).steps(1)
    qualified, looked, tokens = zip(*seen, strict=True)
    assert qualified[-1] >= 4
    assert list(looked) == sorted(looked)
    assert list(tokens) == sorted(tokens)


def test_a_failed_scoring_drops_its_group_when_asked() -> None:
    def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        if int(prompt.uid) % 3 == 0:
            return Score(0.0, 0.0, error="timed out")
        return by_first_token(prompt, trajectory)

    run = Run(score=score, drop_failed_scores=True)
    steps = run.steps(4)
    assert all(int(g.prompt.uid) % 3 for step in steps for g in step.groups)
    assert sum(step.counts.fates["failed"] for step in steps) > 0


# The greedy baseline


def test_each_group_has_the_greedy_answer_to_its_prompt_beside_the_sampled_ones() -> None:
    run = Run(with_baseline=True, lookahead=1)
    steps = run.steps(12)
    spans = set()
    for step in steps:
        for group in step.groups:
            assert len(group.answers) == 2
            assert {answer.score.accuracy for answer in group.answers} == {0, 1}
            assert group.baseline is not None
            (segment,) = group.baseline.trajectory.segments
            alone = written(greedy_seed(group.prompt.token_ids), 0, len(segment), 0)
            assert np.array_equal(segment.token_ids, alone.token_ids)
            assert np.array_equal(segment.logprobs, alone.logprobs)
            score = by_first_token(group.prompt, group.baseline.trajectory)
            assert group.baseline.score.reward == score.reward
            spans.add(len(segment.spans))
            for index, answer in enumerate(group.answers):
                tokens = answer.trajectory.token_ids
                alone = written(answer_seed(5, group.id, index), 0, len(tokens), 0)
                assert np.array_equal(tokens, alone.token_ids)
    assert spans >= {1, 2}  # some were interrupted by new weights
    first: dict[int, GroupRequest] = {}
    for request in run.engine.submitted:
        first.setdefault(request.group_id, request)
    # Asked for at once, so that a prompt is prefilled once.
    for request in first.values():
        assert [(a.index, a.greedy) for a in request.answers] == [(0, 0), (1, 0), (2, 1)]


def test_a_baselines_tokens_are_in_the_account_under_its_groups_fate() -> None:
    run = Run(with_baseline=True)
    steps = run.steps(10)
    account = run.sampler.ledger.account.read()
    assert account.generated == run.engine.status().generated_tokens
    assert account.generated == account.in_progress + sum(getattr(account, f) for f in FATES)
    trained = [group for step in steps for group in step.groups]
    baselines = [g.baseline.trajectory.generated_tokens for g in trained if g.baseline]
    assert len(baselines) == 40
    assert account.trained == sum(g.generated_tokens for g in trained) + sum(baselines)
    ended = [s for step in steps for s in (*step.trained, *step.discarded)]
    lengths = [s.group.baseline.trajectory.generated_tokens for s in ended if s.group.baseline]
    assert account.baseline_tokens == sum(lengths) > sum(baselines)
    assert sum(step.counts.tokens.baseline_tokens for step in steps) == account.baseline_tokens


def test_the_same_groups_are_trained_with_and_without_baselines() -> None:
    with_them, without = (Run(with_baseline=w).steps(4) for w in (True, False))
    for one, other in zip(with_them, without, strict=True):
        assert [g.prompt.uid for g in one.groups] == [g.prompt.uid for g in other.groups]
        assert [
            [(a.trajectory.token_ids.tolist(), a.score.reward) for a in g.answers]
            for g in one.groups
        ] == [
            [(a.trajectory.token_ids.tolist(), a.score.reward) for a in g.answers]
            for g in other.groups
        ]


def test_a_baseline_that_could_not_be_scored_counts_as_the_scorer_said_or_fails_its_group() -> None:
    def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        if trajectory.token_ids[0] == written(greedy_seed(prompt.token_ids), 0, 1, 0).token_ids[0]:
            return Score(-1.0, 0.0, error="timed out")
        return by_first_token(prompt, trajectory)

    for step in Run(score=score, with_baseline=True).steps(3):
        for group in step.groups:
            assert group.baseline is not None
            assert (group.baseline.score.reward, group.baseline.score.error) == (-1, "timed out")
    run = Run(score=score, with_baseline=True, drop_failed_scores=True)
    with pytest.raises(NoSignalError, match=r"0 qualified.*120 failed.*timed out"):
        run.steps(1)
