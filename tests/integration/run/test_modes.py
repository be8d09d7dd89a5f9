"""The three scripts of `loop`, on a scripted engine and a learner that only takes its time.

Real sampler, ledger, state and checkpoints; nothing here learns, so that many random schedules can
be gone through: how long learning, scoring and publishing take is drawn anew for each.
"""

from __future__ import annotations

import asyncio
import random
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.engines import Prompts, ScriptedEngine, uniforms

from winnow.checkpoints.checkpoint import Checkpoint, Manifest, Snapshot, checkpoints_in, load_state
from winnow.checkpoints.run_state import RunState
from winnow.config.rollout import SamplingConfig
from winnow.config.trainer import TrainerConfig
from winnow.errors import ConfigError, NoSignalError, RewardError, TrainingError, WorkerError
from winnow.learning.canary import Canary, CanaryLimits, CanaryScores
from winnow.learning.learner import Learned
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import MetricsLog, read_metrics
from winnow.observe.sinks import Sinks
from winnow.rollout.engine import AnswerRequest, GroupRequest, MemoryPart, SamplingParams
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.weights import WeightUpdate
from winnow.run.loop import Mode, PendingSteps, PromptBudget, Run, WeightPublisher, train
from winnow.run.shutdown import ShutdownSignal, Stopped
from winnow.run.step_metrics import StepFlop, Throughput
from winnow.sampling.accounting import StepGroups
from winnow.sampling.stream import Sampler
from winnow.types import Group, Prompt, Score, Trajectory

N, ANSWERS, LIMIT, STEPS = 3, 2, 40, 6
MODES: tuple[Mode, ...] = ("sync", "one_step_off", "async")
BESIDE = MODES[1:]


def ragged(request: GroupRequest, answer: AnswerRequest) -> int:
    return 2 + int(50 * uniforms(answer.seed + 1, 0, 1)[0])


class Loader(Prompts):
    """Prompts with a state."""

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor = state["cursor"]


class SlowToTell(ScriptedEngine):
    """An engine that takes its time to say what is written."""

    def __init__(self, rng: random.Random, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rng = rng

    async def progress(self) -> Any:
        for _ in range(self._rng.choice([0, 40, 150])):
            await asyncio.sleep(0)
        return await super().progress()


class World:
    """A run in a folder; begin another one in the same folder to resume."""

    def __init__(
        self,
        folder: Path,
        mode: Mode,
        rng: random.Random,
        engines: int = 1,
        engine: type[ScriptedEngine] = ScriptedEngine,
        budget: PromptBudget | None = None,
        **sampling: Any,
    ) -> None:
        budget = budget or PromptBudget()
        self.rng, self.folder = rng, folder
        is_free = mode == "async"
        options: Any = {"slots": 10, "live_updates": is_free}
        self.engine: Any = engine(ragged, **options)
        if engines > 1:
            members = [SlowToTell(rng, ragged, **options) for _ in range(engines)]
            self.engine = EngineGroup(cast(Any, members), not is_free, 4)
        self.loader, self.learnt = Loader(), list[StepGroups]()
        self.stop, self.stop_at = ShutdownSignal(announces=False), -1
        self.learning = self.begun = 0
        config = {"groups_per_step": N, "max_staleness": 2, **sampling}
        self.sampler = Sampler(
            SamplingConfig(**config),
            engine=self.engine,
            next_prompt=self.loader.next,
            give_back=self.loader.give_back,
            score=self.score,
            n=ANSWERS,
            sampling=SamplingParams(max_tokens=LIMIT),
            run_seed=7,
            deterministic=not is_free,
            look_ticks=getattr(self.engine, "quantum_ticks", 1),
        )
        self.log_file = MetricsLog(folder / "metrics.jsonl")
        parts: dict[str, Any] = {"pending": PendingSteps(), "passes": budget}
        parts |= {"sampler": self.sampler, "loader": self.loader}
        state = RunState(
            cast(Any, self),
            parts,
            RunFolder(folder),
            self.log_file,
            TrainerConfig(keep_last=None),
            Manifest(),
        )
        self.run = Run(
            sampler=self.sampler,
            learner=cast(Any, self),
            publish=self.publish,
            engine=self.engine,
            evaluator=cast(Any, SimpleNamespace(evaluate=self.evaluate)),
            sinks=Sinks([self.log_file]),
            throughput=Throughput(StepFlop(8, 1), torch.device("cpu"), None),
            state=state,
            stop=self.stop,
            save_rollouts=lambda step, groups: None,
            save_ledger=lambda step, sampled: self.learnt.append(sampled),
            check_scoring=lambda: None,
            scoring_figures=dict,
            evaluate_every=3,
            save_every=1,
            steps=STEPS,
            mode=mode,
            pending=parts["pending"],
            prompt_budget=budget,
        )

    def resume(self, checkpoint: Checkpoint) -> World:
        self.run.unfinished = self.run.state.restore(checkpoint, load_state(checkpoint))
        self.run.first_step = checkpoint.step + 1
        return self

    def train(self) -> World:
        async def go() -> None:
            try:
                await train(self.run)
            finally:
                others = asyncio.all_tasks() - {asyncio.current_task()}
                self.left = [t for t in others if "score" not in repr(t)]

        try:
            with self.stop.deferring(), self.run.state:
                try:
                    asyncio.run(go())
                except (Stopped, NoSignalError, RewardError):
                    self.run.state.save()
                    raise
        finally:
            self.log_file.close()
        return self

    # What the loop asks

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Score:
        for _ in range(self.rng.choice([0, 0, 1, 5])):
            await asyncio.sleep(0)
        right = float(trajectory.token_ids[0] < 32)
        return Score(2 * right - 1, right)

    def learn(self, groups: Sequence[Group], step: int, metrics: Any, watch: Any) -> Learned:
        if step == self.stop_at:
            self.stop._handle(signal.SIGTERM, None)
        self.learning = step
        self.begun += 1
        time.sleep(self.rng.choice([0, 0, 0.001, 0.004]))
        self.learning = 0
        count = sum(len(group.answers) for group in groups)
        return Learned(np.zeros(count, np.float32), np.ones(count, np.int64), 10 * count)

    async def publish(self, version: int) -> dict[str, float]:
        assert not self.learning, "weights are published while they change"
        for _ in range(self.rng.choice([0, 3, 20])):
            await asyncio.sleep(0)
        await self.engine.load_weights(WeightUpdate(version))
        return {}

    async def evaluate(self, step: int) -> dict[str, float]:
        status = self.engine.status()
        assert not status.running + status.queued, "the engine is not free for an evaluation"
        assert status.weight_version == step
        await asyncio.sleep(0)
        return {"eval/x/avg@1": 0.5}

    # As the `ModelStates` of a run

    def copy(self) -> Snapshot:
        return Snapshot({}, lambda folder: folder.mkdir())

    def restore(self, checkpoint: Path, state: Mapping[str, Any]) -> None:
        pass


def ids_of(steps: Sequence[StepGroups]) -> list[list[int]]:
    return [[group.id for group in step.groups] for step in steps]


def check_course(steps: Sequence[StepGroups], last: Sampler, staleness: int) -> None:
    """Each group is settled once, in admission order, in time; those that have no fate are open."""
    trained = [i for ids in ids_of(steps) for i in ids]
    assert trained == sorted(set(trained))
    assert len(steps) == STEPS
    assert all(len(step.groups) == N or step.is_short for step in steps)
    ended = [s.group.id for step in steps for s in (*step.trained, *step.discarded)]
    ledger = last.ledger
    alive = [group.id for group in ledger.groups.uncommitted_groups()]
    alive += [settled.group.id for settled in ledger.accounting.settled]
    assert sorted(ended + alive) == list(range(ledger.next_id))
    for number, step in enumerate(steps):
        assert step.version == number
        assert step.counts.staleness_max <= staleness
        assert step.counts.tally.retried_answers == 0, "an event of the engine was lost"
        assert step.counts.fates["stale"] == step.counts.fates["surplus"] == 0
        tokens = step.counts.tokens
        fates = sum(getattr(tokens, fate) for fate in step.counts.fates)
        assert tokens.generated == fates + tokens.in_progress
    assert sum(step.counts.tokens.in_progress for step in steps) == steps[-1].counts.in_progress


@settings(max_examples=10)
@given(
    st.sampled_from(MODES),
    st.integers(1, 2),
    st.integers(1, 3),
    st.booleans(),
    st.integers(1, STEPS - 1),
    st.integers(0, 2**32),
)
def test_every_group_is_learnt_once_in_order_and_in_time_and_so_from_any_boundary(
    mode: Mode, engines: int, staleness: int, looks_ahead: bool, step: int, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        more = {"max_staleness": staleness, "lookahead": float(looks_ahead)}
        rng = random.Random(seed)
        first = World(Path(folder) / "a", mode, rng, engines, **more).train()
        check_course(first.learnt, first.sampler, staleness)
        assert not first.left
        lines = read_metrics(first.folder / "metrics.jsonl")
        assert [line["step"] for line in lines] == [*range(1, STEPS + 1)]
        (checkpoint,) = (c for c in saved(first) if c.step == step)
        second = World(Path(folder) / "b", mode, rng, engines, **more).resume(checkpoint).train()
        learnt = first.learnt[:step] + second.learnt
        check_course(learnt, second.sampler, staleness)
        if mode != "async":
            assert repr(learnt) == repr(first.learnt)


@settings(max_examples=8)
@given(
    st.sampled_from(MODES), st.integers(N, 5 * N), st.booleans(), st.data(), st.integers(0, 2**32)
)
def test_a_run_ends_with_the_passes_over_its_data_and_resumed_at_the_same_step(
    mode: Mode, prompts: int, filters: bool, data: st.DataObject, seed: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rng = random.Random(seed)

        def world(name: str) -> World:
            rule: dict[str, Any] = {"name": "variance"} if filters else {"name": "none"}
            budget = PromptBudget(prompts, N)
            return World(Path(folder) / name, mode, rng, budget=budget, lookahead=1.0, filter=rule)

        first = world("a").train()
        used = np.cumsum([len(s.trained) + len(s.discarded) for s in first.learnt])
        last = len(used)
        assert [prompts - n < N for n in used] == [False] * (last - 1) + [last < STEPS]
        if not filters:
            assert last == prompts // N
        assert first.run.prompt_budget.used == used[-1]
        assert mode == "async" or not first.run.pending.steps  # nothing sampled in vain
        assert [c.step for c in saved(first)] == list(range(1, last + 1))
        assert "eval/x/avg@1" in read_metrics(first.folder / "metrics.jsonl")[-1]
        at = data.draw(st.sampled_from(saved(first)))
        second = world("b").resume(at).train()
        assert len(second.learnt) == last - at.step
        if mode != "async":
            assert repr(second.learnt) == repr(first.learnt[at.step :])


def saved(world: World) -> list[Checkpoint]:
    return checkpoints_in(world.folder / "checkpoints")


@settings(max_examples=8)
@given(st.sampled_from(MODES), st.integers(1, STEPS - 1), st.integers(0, 2**32))
def test_a_request_to_stop_leaves_a_state_that_goes_on(mode: Mode, step: int, seed: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        rng = random.Random(seed)
        first = World(Path(folder) / "a", mode, rng, lookahead=1.0)
        first.stop_at = step
        with pytest.raises(Stopped):
            first.train()
        assert not first.left
        newest = saved(first)[-1]
        assert newest.step == step == len(first.learnt)
        second = World(Path(folder) / "b", mode, rng, lookahead=1.0).resume(newest).train()
        check_course(first.learnt + second.learnt, second.sampler, 2)


def test_a_stop_keeps_what_is_written_by_then_where_sampling_runs_on(tmp_path: Path) -> None:
    first = World(tmp_path / "a", "async", random.Random(1), lookahead=2.0)
    scored, later = first.score, list[Prompt]()

    async def stopping(prompt: Prompt, trajectory: Trajectory) -> Score:
        if len(first.learnt) >= 2:
            later.append(prompt)
        if len(later) == 4:
            first.stop._handle(signal.SIGTERM, None)
        return await scored(prompt, trajectory)

    first.sampler._scores._score = stopping
    with pytest.raises(Stopped):
        first.train()
    state = load_state(saved(first)[-1])["sampler"]["ledger"]
    assert state["accounting"].account.generated == first.engine.status().generated_tokens
    assert not state["groups"].running


Spoil = Callable[[World], None]


def no_signal(world: World) -> None:
    async def wrong(prompt: Prompt, trajectory: Trajectory) -> Score:
        return (
            Score(-1, 0) if int(prompt.uid) >= 12 else await World.score(world, prompt, trajectory)
        )

    world.sampler._scores._score = wrong


def failing_scores(world: World) -> None:
    def check() -> None:
        if world.sampler.ledger.learns == 3:
            raise RewardError("too many scorings failed")

    world.run.check_scoring = check


def broken_learner(world: World) -> None:
    learn = world.learn

    def broken(groups: Any, step: int, *rest: Any) -> Learned:
        if step == 3:
            raise TrainingError("not finite")
        return learn(groups, step, *rest)

    world.learn = broken  # type: ignore[method-assign]


def dead_engine(world: World) -> None:
    events = world.engine.events

    async def dying(until: int | None = None) -> Any:
        if world.sampler.ledger.learns == 3:
            raise WorkerError("engine 0 was killed", "engine 0", 0)
        return await events(until)

    world.engine.events = dying  # type: ignore[method-assign]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("spoil", "error", "is_saved"),
    [
        (no_signal, NoSignalError, True),
        (failing_scores, RewardError, True),
        (broken_learner, TrainingError, False),
        (dead_engine, WorkerError, False),
    ],
)
def test_what_goes_wrong_is_raised_in_each_mode_and_no_task_is_left(
    spoil: Spoil, error: type[Exception], is_saved: bool, mode: Mode, tmp_path: Path
) -> None:
    world = World(tmp_path / "a", mode, random.Random(2), max_groups_per_step=8)
    spoil(world)
    with pytest.raises(error):
        world.train()
    assert not world.left
    newest = saved(world)[-1]
    # What was cut before is learnt, in the modes that sample beside learning, too.
    assert newest.step == len(world.learnt) if is_saved else newest.step <= len(world.learnt)
    whole = World(tmp_path / "b", mode, random.Random(2)).resume(newest).train()
    check_course(world.learnt[: newest.step] + whole.learnt, whole.sampler, 2)


def test_an_evaluation_does_not_hide_that_sampling_has_failed(tmp_path: Path) -> None:
    world = World(tmp_path, "async", random.Random(2))
    events, learn, has_failed = world.engine.events, world.learn, threading.Event()

    async def failing_once(until: int | None = None) -> Any:
        if world.sampler.ledger.learns == 3 and not has_failed.is_set():
            has_failed.set()
            raise TrainingError("the engine wrote no token")
        return await events(until)

    def late(groups: Any, step: int, *rest: Any) -> Learned:
        assert step < 3 or has_failed.wait(20)
        return learn(groups, step, *rest)

    world.engine.events, world.learn = failing_once, late  # type: ignore[method-assign]
    with pytest.raises(TrainingError):
        world.train()


class Sleeper(ScriptedEngine):
    """An engine that gives its memory back, and can do nothing until it has it again."""

    has_cache = True

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.turns: list[str] = []

    async def sleep(self) -> None:
        assert not self.status().running + self.status().queued
        self.has_cache = False
        self.turns.append("sleep")

    async def wake(self, part: MemoryPart) -> None:
        self.has_cache = part == "cache"
        self.turns.append(part)

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        assert self.has_cache
        await super().submit(groups)

    async def load_weights(self, update: WeightUpdate) -> None:
        self.turns.append("load")
        await super().load_weights(update)

    async def logprobs_of(self, sequences: Any, temperature: float, last: int) -> Any:
        assert self.has_cache
        return [np.zeros(1, np.float32)]


def test_engines_that_share_gpus_sleep_while_a_step_is_learnt(tmp_path: Path) -> None:
    """In free mode, where answers would run on; they go on behind their prefixes."""
    world = World(tmp_path, "async", random.Random(3), engine=Sleeper)
    scores = CanaryScores((np.zeros(1, np.float32),), CanaryLimits(1.0, 1.0))
    canary = Canary((np.array([1, 2]),), 1.0, torch.float32)
    turns = world.engine.turns
    publish = WeightPublisher(
        world.engine, WeightUpdate, canary, lambda canary: scores, lambda: turns.append("release")
    )
    world.run.mode, world.run.publish, world.run.sleep_engines = (
        "sync",
        publish,
        publish.sleep_engines,
    )
    learn = world.learn

    def learn_alone(*args: Any) -> Learned:
        assert not world.engine.has_cache
        turns.append("learn")
        return learn(*args)

    world.learn = learn_alone  # type: ignore[method-assign]
    world.train()
    step = ["sleep", "learn", "release", "weights", "load", "release", "cache"]
    assert turns == ["load", *STEPS * step]
    assert any(len(a.prefix or ()) for g in world.engine.submitted for a in g.answers)
    check_course(world.learnt, world.sampler, 2)


def test_an_engine_that_cannot_take_weights_live_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path, "async", random.Random(1))
    world.engine.live_updates = False
    with pytest.raises(
        ConfigError, match=r"trainer/mode=async .* choose trainer/mode=one_step_off"
    ):
        world.train()


@pytest.mark.parametrize("mode", BESIDE)
def test_sampling_goes_on_while_a_step_is_learnt(mode: Mode, tmp_path: Path) -> None:
    world = World(tmp_path, mode, random.Random(1))
    spans: list[tuple[str, str, float, float]] = []
    world.run.timeline = lambda *span: spans.append(span)
    world.train()
    learning = [(a, b) for actor, phase, a, b in spans if phase == "learn"]
    sampling = [(a, b) for actor, _, a, b in spans if actor == "sampler"]
    assert any(a < d and c < b for a, b in learning for c, d in sampling)
    for record in read_metrics(tmp_path / "metrics.jsonl"):
        overlapped = record["overlap/sampling_s"] + record["overlap/engines_wait_s"]
        # The clock is read twice at the step's end, and a process may be interrupted between.
        assert overlapped <= record["time/step_s"] + 0.5
