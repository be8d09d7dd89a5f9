"""The scheduler on the scripted engine, each test in both modes unless it says otherwise."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import pytest
from tests.engines import Prompts, ScriptedEngine, greedy_seed, uniforms, written
from tests.states import read_back

from winnow.config.rollout import NoFilter, SamplingConfig
from winnow.errors import NoSignalError, RewardError, TrainingError
from winnow.rollout.engine import (
    AnswerRequest,
    CompletionEvent,
    GroupRequest,
    SamplingParams,
    answer_seed,
)
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.weights import WeightUpdate
from winnow.sampling import stream
from winnow.sampling.accounting import StepGroups
from winnow.sampling.ledger import Ledger
from winnow.sampling.stream import Sampler
from winnow.types import Prompt, Score, Trajectory
from winnow.views.diagnosis import remedy_of

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


class OneByOne(ScriptedEngine):
    """Tells of each answer in a call of its own, as engines in several processes do."""

    waiting: tuple[CompletionEvent, ...] = ()

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        first, *rest = self.waiting or await super().events(until)
        self.waiting = tuple(rest)
        return [first]


@only_free
async def test_what_runs_becomes_prefixes_though_the_engine_tells_of_them_one_by_one() -> None:
    run = Run(OneByOne(ragged, slots=16))
    await run.step()
    assert run.sampler.ledger.groups.running > 1
    await run.sampler.abort_running()
    assert not run.sampler.ledger.groups.running
    assert run.sampler.ledger.account.generated == run.engine.status().generated_tokens


@only_deterministic
async def test_at_the_target_everything_is_aborted_and_resumed_first_in_the_next_step() -> None:
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


def writers(step: StepGroups) -> set[int]:
    """How many versions wrote an answer, each of which has the tokens of an undisturbed one."""
    counts = set()
    for group in step.groups:
        for index, answer in enumerate(group.answers):
            (segment,) = answer.trajectory.segments
            alone = written(answer_seed(5, group.id, index), 0, len(segment), 0)
            assert np.array_equal(segment.token_ids, alone.token_ids)
            assert np.array_equal(segment.logprobs, alone.logprobs)
            assert segment.spans[-1].stop == len(segment)
            assert step.version >= segment.spans[-1].version
            counts.add(len(segment.spans))
    return counts


def test_an_answer_across_a_cut_is_token_for_token_the_undisturbed_one(mode: str) -> None:
    run = Run(lookahead=1)
    steps = run.steps(12)
    assert {1, 2} <= set().union(*map(writers, steps))
    stopped = sum(s.counts.tally.aborted_answers + s.counts.tally.resumed_answers for s in steps)
    # In free mode they go on under the new weights.
    assert bool(stopped) == bool(run.engine.aborted_groups) == (mode == "deterministic")


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
            run.sampler.set_engine_version(version)
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


@only_free
def test_a_state_between_two_steps_has_every_token_of_answers_under_way() -> None:
    run = Run(lookahead=1)
    run.steps(4)
    assert run.engine.status().running > 0
    lives = run.sampler.ledger.groups
    kept = {
        key: len(prefix) if (prefix := lives.running_answer(*key)[1].prefix) else 0
        for key in lives.running_keys()
    }
    assert sum(kept.values()) > 0
    other = Run(lookahead=1)
    other.sampler.load_state_dict(read_back(run.sampler.state_dict()))
    assert other.sampler.ledger.account.totals() == run.sampler.ledger.account.totals()
    assert run.sampler.ledger.account.generated == run.engine.status().generated_tokens
    asked = {
        (ask.group_id, index): len(begun[-1]) if begun else 0
        for ask in other.sampler.ledger.dispatch()
        for index, begun in ask.begun.items()
    }
    assert asked == kept


@only_free
@pytest.mark.parametrize(
    "settings", [{"max_staleness": 0}, {"commit": "completion_order"}], ids=str
)
async def test_where_a_cut_drops_groups_nothing_runs_across_it(settings: dict[str, Any]) -> None:
    run = Run(**settings)
    for _ in range(6):
        await run.step()
        assert run.engine.status().running == 0
    assert run.engine.aborted_groups


@only_free
def test_an_engine_that_does_not_take_weights_live_is_emptied_at_each_cut() -> None:
    run = Run(lookahead=1)
    run.engine.live_updates = False
    assert sum(step.counts.tally.aborted_answers for step in run.steps(8)) > 0


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


# Bounds


def test_at_the_bound_a_step_is_short_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    run = Run(max_groups_per_step=6)
    with caplog.at_level(logging.WARNING):
        steps = run.steps(6)
    short = [step for step in steps if step.is_short]
    assert short
    assert all(0 < len(step.groups) < 4 for step in short)
    line = f"step {short[0].version} is short: {len(short[0].groups)} of 4 groups qualified"
    assert line in caplog.text


def test_bounds_without_a_qualified_group_are_no_step_and_three_in_a_row_stop() -> None:
    run = Run(score=always(0.0), max_groups_per_step=6)
    with pytest.raises(NoSignalError) as caught:
        run.steps(1)
    message = str(caught.value)
    assert "reached its bound 3 times in a row" in message
    assert "of 18 groups, 0 qualified, 18 were all wrong, 0 all right, 0 failed" in message
    assert "mean accuracy 0.000" in message
    assert message.endswith("nearly all answers count as wrong")
    assert "\n" not in message
    assert run.sampler.ledger.account.booked["all_wrong"] > 0


def test_cause_and_remedy_follow_from_what_the_filter_saw() -> None:
    long = ScriptedEngine(lambda request, answer: 1000)
    broken = ScriptedEngine(ragged, fails=lambda group, answer, attempt: 3)
    for run, cause, rule, remedy in [
        (
            Run(score=always(1.0)),
            "nearly all answers count as right",
            "reward_flat_right",
            "winnow reward",
        ),
        (Run(long, score=always(0.0)), "are truncated", "cut_off", "raise rollout.max_response"),
        (Run(broken), r"last error: .*a scripted failure.*", "scoring_fails", "reward.timeout_s"),
        (
            Run(score=always(0.3)),
            "nearly all answers count as wrong",
            "reward_flat_wrong",
            "easier",
        ),
    ]:
        with pytest.raises(NoSignalError, match=cause) as caught:
            run.steps(1)
        assert caught.value.rule == rule
        assert remedy in remedy_of(rule)


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
    assert message.startswith(f"sampling.on_bound=stop: {accepted} of 4 groups qualified within")
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
        assert writers(step)


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
        await run.sampler.record_progress()

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
    assert re.search(r"step 0: the engine lost [1-9]\d* generated tokens", caplog.text)


async def test_an_engine_that_forgot_its_answers_gets_them_again() -> None:
    run, done = Run(), list[bool]()
    events = run.engine.events

    async def forgetful(until: int | None = None) -> Any:
        if run.engine.tick > 10 and not done:
            done.append(True)
            run.engine.forget()
        return await events(until)

    run.engine.events = forgetful  # type: ignore[method-assign]
    step = await run.step()
    assert len(step.groups) == 4
    assert step.counts.tally.retried_answers > 0


def test_a_stalled_engine_is_asked_again_behind_the_prefixes(
    caplog: pytest.LogCaptureFixture,
) -> None:
    run = Run(ScriptedEngine(ragged, slots=16, stalls=[8]), stall_timeout_s=0.05)
    with caplog.at_level(logging.WARNING):
        steps = run.steps(3)
    assert steps[0].counts.tally.retried_answers > 0
    assert "resubmitting answers; sampling waits for the engine" in caplog.text
    assert all(map(writers, steps))


def test_a_line_says_now_and_then_who_waits_for_whom(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "REPORT_S", 0.02)
    engine = ScriptedEngine(ragged, slots=16, stalls=[8])
    with caplog.at_level(logging.INFO):
        Run(engine, stall_timeout_s=0.2).steps(1)
    assert "sampling waits for the engine: 0 of 4 groups are ready, 8 open" in caplog.text
    assert "the oldest open group is 0, " in caplog.text


def test_an_engine_that_never_writes_again_ends_the_run_with_its_name_on_it() -> None:
    class Dead(ScriptedEngine):
        async def abort(self, group_ids: Any) -> None:
            return None

    run = Run(Dead(ragged, stalls=[8]), stall_timeout_s=0.02)
    with pytest.raises(
        TrainingError, match=r"generated no token for 0.02 s, 4 times in a row .*the e"
    ):
        run.steps(1)


def test_a_slow_scorer_is_no_stalled_engine() -> None:
    async def slow(prompt: Prompt, trajectory: Trajectory) -> Score:
        await asyncio.sleep(0.1)
        return by_first_token(prompt, trajectory)

    run = Run(ScriptedEngine(lambda r, a: 10, slots=64), score=slow, stall_timeout_s=0.02)
    (step,) = run.steps(1)
    assert step.counts.tally.retried_answers == 0


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
        assert writers(step)
    assert spans >= {1, 2}  # some were interrupted by new weights
    account = run.sampler.ledger.account.totals()
    assert account.generated == run.engine.status().generated_tokens
    ended = [s.group.baseline for step in steps for s in (*step.trained, *step.discarded)]
    lengths = sum(each.trajectory.generated_tokens for each in ended if each)
    assert account.baseline_tokens == lengths > 0
    first: dict[int, GroupRequest] = {}
    for request in run.engine.submitted:
        first.setdefault(request.group_id, request)
    # Asked for at once, so that a prompt is prefilled once.
    for request in first.values():
        assert request.priority == request.group_id
        assert [(a.index, a.greedy) for a in request.answers] == [(0, 0), (1, 0), (2, 1)]


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
