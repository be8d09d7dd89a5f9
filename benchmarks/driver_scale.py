"""What a step costs the driver when answers are long and everything else is in other processes.

    python -m benchmarks.driver_scale [--cluster ray] [--out benchmarks/results/driver_scale.md]

Real: sampler, ledger, worker groups (on Ray by default: a private instance), engines as the driver
sees them, remote scoring, the ranked learner, metrics.jsonl, rollouts with the text of 8 groups,
boundaries, the last checkpoint. Stand-ins, each in processes of its own: engines that write numbers
as fast as they can, scorers that read an answer's tokens and score by the first, ranks that read
all tokens and learn nothing. CPU time of the driver's process, Ray's own threads in it included,
mean of the steps after the first. `fetched` counts the token arrays that were brought into the
driver: those of the groups whose text is kept. All groups qualify.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from benchmarks.loop_scale import SavedPrompts
from tests.engines import ScriptedEngine, uniform

from winnow.checkpoints.checkpoint import FileEntry, Manifest
from winnow.checkpoints.run_state import RunState
from winnow.config.rollout import SamplingConfig
from winnow.config.root import ObserveConfig
from winnow.config.trainer import TrainerConfig
from winnow.evaluation.evaluator import Evaluator
from winnow.learning.learner import Learned
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import MetricsLog
from winnow.observe.metrics import Metrics
from winnow.observe.rollouts import RolloutGroup, choose_text_groups, write_rollouts
from winnow.observe.sinks import Sinks
from winnow.ranks.remote import RemoteLearner
from winnow.ranks.workers import RankFacts, StepReply
from winnow.rewards.pipeline import ScoredAnswer
from winnow.rewards.remote_pipeline import PipelineWorker, RemotePipeline
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.rollout.engine_group import EngineGroup, quantum_for
from winnow.rollout.remote_engine import EngineWorker, RemoteEngine
from winnow.run import loop
from winnow.run.loop import SharedWeightsPublisher, train
from winnow.run.shutdown import ShutdownSignal
from winnow.run.step_metrics import StepFlop, Throughput
from winnow.sampling.stream import Sampler
from winnow.types import Group, IntArray, Prompt, Score, Trajectory
from winnow.workers.array_refs import ArrayBlock, fetch_arrays
from winnow.workers.group import WorkerGroup, WorkerGroups, start_local
from winnow.workers.host import RankInfo
from winnow.workers.ray.actors import start_ray
from winnow.workers.ray.session import Pool, ray_session, reserve

ANSWERS = 16
"""A group."""
ENGINES, SCORERS, RANKS = 2, 1, 2
SLOTS = 512
"""An engine."""
KEEPS = ObserveConfig(rollout_text_groups=8)
"""So little that the driver reads no tokens to speak of."""
LAG_TICKS = 16
"""As `sampling.score_lag_ticks` is with scorers apart."""
SIZES = (
    (512, 4096),
    (2048, 4096),
    (8192, 4096),
    (32768, 4096),
    (65536, 4096),
    (512, 20480),
    (2048, 20480),
    (8192, 20480),
)
"""Samples a step, and the response limit; answers have half of it at least."""


def length(limit: int, request: GroupRequest, answer: AnswerRequest) -> int:
    """Between half of the limit and all of it."""
    return limit - int(uniform(answer.seed, 1 << 20) * limit / 2)


class Engine(EngineWorker):
    """Writes numbers."""

    def __init__(self, rank: RankInfo, limit: int) -> None:
        engine = Forgetful(partial(length, limit), slots=SLOTS)
        super().__init__(cast(Any, engine))


class Forgetful(ScriptedEngine):
    """Keeps no notes for a test, which would grow for ever."""

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        await super().submit(groups)
        for notes in (self.submitted, self.aborted_groups, self._attempts):
            notes.clear()


class FirstToken:
    """A panel that reads all tokens of an answer, and scores it by the first."""

    scored = 0

    async def score(
        self, prompt: Prompt, trajectory: Trajectory, text: str | None, training: bool
    ) -> ScoredAnswer:
        right = float(trajectory.token_ids[0] < 32)
        self.scored += 1
        return ScoredAnswer(Score(2 * right - 1, right, {"task": 2 * right - 1}, {"pred": right}))

    def prepare(self, data_sources: Sequence[str]) -> None:
        pass

    def check_prompt(self, prompt: Prompt) -> None:
        pass

    def figures(self) -> dict[str, int]:
        return {}

    def count_offloaded(self) -> int:
        return self.scored

    def close(self) -> None:
        pass


class Scorer(PipelineWorker):
    """Scores by the first token."""

    def __init__(self, rank: RankInfo) -> None:
        super().__init__(cast(Any, FirstToken()))


class Rank:
    """Reads a step's tokens, as packing would, and learns nothing."""

    def __init__(self, rank: RankInfo) -> None:
        self.progress = 0

    def facts(self) -> RankFacts:
        return RankFacts(StepFlop(8, 1), {}, {})

    def learn(
        self, groups: Sequence[Group], step: int
    ) -> tuple[dict[str, Any], StepReply, tuple[Any, ...]]:
        answers = [answer.trajectory for group in groups for answer in group.answers]
        fetch_arrays(answers)
        for answer in answers:
            assert len(answer.token_ids) == answer.generated_tokens
            assert answer.token_ids.max() < 64
            self.progress += 1
        lengths = [len(group.prompt.token_ids) for group in groups for _ in group.answers]
        tokens = sum(answer.generated_tokens for answer in answers)
        learned = Learned(np.zeros(len(answers), np.float32), np.array(lengths), tokens)
        return {}, StepReply(learned, Metrics(), {"update": 0.0}, {}), ()

    def copy(self) -> None:
        pass

    def write(self, checkpoint: str) -> dict[str, FileEntry]:
        (Path(checkpoint) / "model").mkdir(exist_ok=True)
        return {}


@dataclass(frozen=True)
class Cost:
    """Of one size."""

    samples: int
    limit: int
    tokens: int
    """Trained, a step."""
    driver_s: float
    wall_s: float
    fetched: int
    """Shelves of token arrays that the driver read, a step."""

    @property
    def us_per_sample(self) -> float:
        """Driver."""
        return self.driver_s / self.samples * 1e6


def words(token_ids: IntArray) -> str:
    """A decoder's stand-in."""
    return bytes(token_ids.astype("uint8") + 32).decode()


@contextlib.contextmanager
def workers(cluster: str, limit: int) -> Iterator[list[WorkerGroup]]:
    """Engines, scorers and ranks, each a group, the ranks last."""
    here = "benchmarks.driver_scale"
    roles = [f"engine {i}" for i in range(ENGINES)]
    kinds = dict.fromkeys(roles, (f"{here}:Engine", {"limit": limit}, 1))
    kinds |= {"reward": (f"{here}:Scorer", {}, SCORERS), "learner": (f"{here}:Rank", {}, RANKS)}
    with contextlib.ExitStack() as stack:
        if cluster == "ray":
            cores = 0.25
            pools = [
                Pool(role, {role: 1}, per_node=count, cpus=cores)
                for role, (_, _, count) in kinds.items()
            ]
            total = int(sum(pool.per_node for pool in pools) * cores + 1)
            stack.enter_context(ray_session(None, cpus=total, devices=0, store_bytes=8 << 30))
            crew = stack.enter_context(contextlib.closing(WorkerGroups()))
            reserved = crew.wait(reserve(pools))
            stack.callback(reserved.release)
            stack.callback(crew.close)
            starts = [
                partial(start_ray, role, path, made, reserved.placement(role))
                for role, (path, made, _) in kinds.items()
            ]
        else:
            crew = stack.enter_context(contextlib.closing(WorkerGroups()))
            starts = [
                partial(start_local, role, path, made, count)
                for role, (path, made, count) in kinds.items()
            ]
        yield crew.start(*starts)


class Run:
    """The loop over `samples` a step, in a folder."""

    def __init__(self, samples: int, limit: int, folder: Path) -> None:
        self.samples, self.limit, self.folder = samples, limit, folder
        self.clocks: list[tuple[float, float, int]] = []
        self.tokens: list[int] = []
        self.fetched = 0

    def train(self, groups: Sequence[WorkerGroup], steps: int) -> Cost:
        """Run it."""
        log = MetricsLog(self.folder / "metrics.jsonl")
        run = self._run(groups, log, steps)
        with run.state:
            gc.freeze()  # as a run does
            asyncio.run(train(run))
        log.close()
        (cpu_0, wall_0, read_0), (cpu_1, wall_1, read_1) = self.clocks[0], self.clocks[-1]
        n = steps - 1
        cost = (cpu_1 - cpu_0) / n, (wall_1 - wall_0) / n, (read_1 - read_0) // n
        return Cost(self.samples, self.limit, self.tokens[-1], *cost)

    def _run(
        self,
        groups: Sequence[WorkerGroup],
        log: MetricsLog,
        steps: int,
    ) -> loop.Run:
        *writing, scoring, learning = groups
        engines = [RemoteEngine(each, each.call_blocking("call", "")[0]) for each in writing]
        engine = EngineGroup(engines, True, quantum_for(self.limit))
        panel = RemotePipeline(scoring)
        learner = RemoteLearner(learning)
        prompts = SavedPrompts()

        async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
            return (await panel.score(prompt, trajectory, None, True)).score

        count = self.samples // ANSWERS
        sampler = Sampler(
            SamplingConfig(groups_per_step=count, score_lag_ticks=LAG_TICKS),
            engine=engine,
            next_prompt=prompts.next,
            give_back=prompts.give_back,
            score=score,
            n=ANSWERS,
            sampling=SamplingParams(max_tokens=self.limit),
            run_seed=1,
            look_ticks=engine.quantum_ticks,
        )
        states: Mapping[str, Any] = {"sampler": sampler, "loader": prompts, "learner": learner}
        return loop.Run(
            sampler=sampler,
            learner=learner,
            publish=SharedWeightsPublisher(engine, None),
            engine=engine,
            evaluator=cast(Evaluator, SimpleNamespace(evaluate=_no_figures)),
            sinks=Sinks([log, cast(Any, self)]),
            throughput=Throughput(StepFlop(8, 1), torch.device("cpu"), None),
            state=RunState(
                learner,
                states,
                RunFolder(self.folder),
                log,
                TrainerConfig(keep_last=1),
                Manifest(),
            ),
            stop=ShutdownSignal(),
            save_rollouts=self._save_rollouts,
            save_ledger=lambda step, sampled: None,
            check_scoring=lambda: None,
            scoring_figures=dict,
            evaluate_every=None,
            save_every=None,
            steps=steps,
        )

    def _save_rollouts(self, step: int, closed: Sequence[RolloutGroup]) -> None:
        shown = choose_text_groups(closed, KEEPS, 1, step)
        path = self.folder / "rollouts" / f"step-{step}.parquet"
        write_rollouts(path, step, closed, version=step - 1, text_groups=shown, decode=words)
        trained = [entry.group for entry in closed if entry.outcome == "trained"]
        self.tokens.append(sum(group.generated_tokens for group in trained))

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """As a sink, it is called once a step."""
        self.clocks.append((time.process_time(), time.perf_counter(), self.fetched))


async def _no_figures(step: int) -> dict[str, float]:
    return {}


@contextlib.contextmanager
def counting(run: Run) -> Iterator[None]:
    """Count the blocks of arrays that this process fetches."""
    original = ArrayBlock.array

    def array(block: ArrayBlock, index: int) -> Any:
        run.fetched += not block.is_fetched
        return original(block, index)

    ArrayBlock.array = array  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        ArrayBlock.array = original  # type: ignore[method-assign]


def measure(cluster: str, samples: int, limit: int, steps: int) -> Cost:
    """One size, in this process."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, workers(cluster, limit) as groups:
        run = Run(samples, limit, Path(folder))
        with counting(run):
            return run.train(groups, steps)


def table(costs: Sequence[Cost]) -> str:
    """Markdown."""
    head = (
        "| samples a step | limit | tokens a step | driver s | µs a sample | read | (wall s) |\n"
        "|---:|---:|---:|---:|---:|---:|---:|\n"
    )
    rows = (
        f"| {c.samples:,} | {c.limit:,} | {c.tokens / 1e6:.0f} M | {c.driver_s:.3f} "
        f"| {c.us_per_sample:.0f} | {c.fetched} | {c.wall_s:.1f} |"
        for c in costs
    )
    return head + "\n".join(rows) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--cluster", choices=["ray", "local"], default="ray")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one", type=int, nargs=2, help="samples and limit: in this process")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(asdict(measure(given.cluster, given.one[0], given.one[1], given.steps))))
        return
    costs = []
    for samples, limit in SIZES:
        command = [sys.executable, "-m", "benchmarks.driver_scale", "--cluster", given.cluster]
        command += ["--one", str(samples), str(limit), "--steps", str(given.steps)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        costs.append(Cost(**json.loads(done.stdout.splitlines()[-1])))
        print(table(costs[-1:]).splitlines()[-1], flush=True)
    text = (
        "# The driver's cost with everything else in other processes\n\n"
        f"`python -m benchmarks.driver_scale --cluster {given.cluster}`: "
        f"{platform.processor() or platform.machine()}, groups of {ANSWERS}, {ENGINES} engines of "
        f"{SLOTS} slots, {SCORERS} scorer, {RANKS} ranks, answers of half the limit to all of it, "
        f"text kept of {KEEPS.rollout_text_groups} groups a step.\n\n"
    )
    if given.out:
        given.out.write_text(text + table(costs), encoding="utf-8")


if __name__ == "__main__":
    main()
