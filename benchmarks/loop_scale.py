"""What the driver costs as a step grows: the whole loop, with an engine and a model that only act.

    python -m benchmarks.loop_scale [--out benchmarks/results/loop_scale.md]

Real: sampler, ledger, scores as tasks, packing, advantages, mini- and micro-batches, the policy's
role, metrics.jsonl, rollouts, boundaries and checkpoints. Stand-ins: the engine of
`tests/engines.py` (short answers of random length), and a strategy that computes nothing. The
engine's own time is taken off. Slots and mini-batch stay the same while the step grows, so that
turns and updates grow with it, as they do in a real run. CPU time of the process, mean of the
steps after the first; memory is the growth of the process's peak, each size in its own process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import resource
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
from tests.engines import Prompts, ScriptedEngine, uniform
from torch import Tensor

from winnow.algorithms.advantages import ESTIMATORS
from winnow.algorithms.losses import POLICY_LOSSES
from winnow.builders.run import save_ledger
from winnow.checkpoints.checkpoint import Manifest
from winnow.checkpoints.run_state import LocalModelStates, RunState
from winnow.config.rollout import SamplingConfig
from winnow.config.root import ObserveConfig
from winnow.config.trainer import TrainerConfig
from winnow.evaluation.evaluator import Evaluator
from winnow.learning.advantage import AdvantageStage
from winnow.learning.batch import NO_SHARDING, MicroBatch
from winnow.learning.learner import Learner, LearnerSettings
from winnow.learning.policy import Policy, PolicyObjective
from winnow.learning.runner import Output
from winnow.learning.strategy import LossFn, Stats
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import MetricsLog
from winnow.observe.rollouts import RolloutGroup, choose_text_groups, write_rollouts
from winnow.observe.sinks import Sinks
from winnow.rollout.engine import AnswerRequest, CompletionEvent, GroupRequest, SamplingParams
from winnow.run import loop
from winnow.run.loop import SharedWeightsPublisher, train
from winnow.run.shutdown import ShutdownSignal
from winnow.run.step_metrics import StepFlop, Throughput
from winnow.sampling.stream import Sampler
from winnow.types import IntArray, Prompt, Score, Trajectory

ANSWERS = 16
"""A group."""
SLOTS = 1024
UPDATE_GROUPS = 32
MICROBATCH_TOKENS = 8192
MOST_TOKENS = 24
SIZES = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
"""Samples a step."""


@dataclass(frozen=True)
class Cost:
    """Of one size."""

    samples: int
    driver_s: float
    """CPU seconds a step, without the engine's."""
    engine_s: float
    peak_mb: float

    @property
    def us_per_sample(self) -> float:
        """Driver."""
        return self.driver_s / self.samples * 1e6


class ClockedEngine(ScriptedEngine):
    """Knows what CPU time it took itself."""

    seconds = 0.0

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        began = time.process_time()
        await super().submit(groups)
        for notes in (self.submitted, self.aborted_groups, self._attempts):
            notes.clear()  # a test's, which would grow for ever
        self.seconds += time.process_time() - began

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        began = time.process_time()
        found = await super().events(until)
        self.seconds += time.process_time() - began
        return found

    async def abort(self, group_ids: Collection[int]) -> None:
        began = time.process_time()
        await super().abort(group_ids)
        self.seconds += time.process_time() - began


class IdleStrategy:
    """Implements as much of a strategy as the loop asks for, and computes nothing."""

    sharder = NO_SHARDING
    has_adapter = False
    replayed = None

    def __init__(self) -> None:
        self._weight = torch.zeros(8)

    def forward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output]
    ) -> list[dict[Output, Tensor]]:
        return [dict.fromkeys(outputs, micro.behav) for micro in microbatches]

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output], loss_fn: LossFn
    ) -> Stats:
        return {"loss": 0.0, "policy_loss": 0.0}

    def expert_load(self) -> None:
        return None

    def optimizer_step(self, lr: float) -> Stats:
        return {"grad_norm": 1.0, "skipped": 0}

    def weights_are_finite(self) -> bool:
        return True

    def export_weights(self, adapter_only: bool = False) -> Iterator[tuple[str, Tensor]]:
        yield "weight", self._weight

    def state_dict(self) -> dict[str, Any]:
        return {"weights": {"weight": self._weight}, "optimizer": {}}


class SavedPrompts(Prompts):
    """With the state that a checkpoint asks for."""

    def state_dict(self) -> dict[str, Any]:
        return {"cursor": self.cursor}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.cursor = state["cursor"]


def short(request: GroupRequest, answer: AnswerRequest) -> int:
    """Between 1 and MOST_TOKENS tokens."""
    return 1 + int(uniform(answer.seed, 1 << 20) * MOST_TOKENS)


async def judged(prompt: Prompt, trajectory: Trajectory) -> Score:
    """Half of the prompts are never answered right."""
    right = float(int(prompt.uid) % 2 == 0 and trajectory.token_ids[0] < 32)
    return Score(2 * right - 1, right, {"task": 2 * right - 1}, {"pred": right})


def words(token_ids: IntArray) -> str:
    """A decoder's stand-in."""
    return bytes(token_ids.astype("uint8") + 32).decode()


@dataclass
class Run:
    """The loop over `samples` a step, in a folder."""

    samples: int
    folder: Path

    def __post_init__(self) -> None:
        self.engine = ClockedEngine(short, slots=SLOTS)
        self.clocks: list[tuple[float, float]] = []
        self.peaks: list[int] = []
        """Bytes at each step's worst moment, while tracemalloc traces."""

    def train(self, steps: int) -> Run:
        """Run it; notes the clocks at each step's end."""
        log = MetricsLog(self.folder / "metrics.jsonl")
        run = self._run(log, steps)
        with run.state:
            asyncio.run(train(run))
        log.close()
        return self

    def step_seconds(self) -> tuple[float, float]:
        """Driver's and engine's mean CPU seconds a step after the first."""
        (all_0, engine_0), (all_1, engine_1) = self.clocks[0], self.clocks[-1]
        steps = len(self.clocks) - 1
        engine = (engine_1 - engine_0) / steps
        return (all_1 - all_0) / steps - engine, engine

    def _run(self, log: MetricsLog, steps: int) -> loop.Run:
        groups = self.samples // ANSWERS
        prompts, strategy = SavedPrompts(), cast(Any, IdleStrategy())
        sampler = Sampler(
            SamplingConfig(groups_per_step=groups),
            engine=self.engine,
            next_prompt=prompts.next,
            give_back=prompts.give_back,
            score=judged,
            n=ANSWERS,
            sampling=SamplingParams(max_tokens=MOST_TOKENS),
            run_seed=1,
        )
        settings = LearnerSettings(
            min(UPDATE_GROUPS, groups), 1, MICROBATCH_TOKENS, False, 3, 1, _rate
        )
        learner = Learner(
            Policy(strategy, PolicyObjective(POLICY_LOSSES["ppo_clip"], {}, "token-mean")),
            AdvantageStage(ESTIMATORS["grpo"], {"std_normalization": "group"}),
            settings,
        )
        states: Mapping[str, Any] = {"sampler": sampler, "loader": prompts, "learner": learner}
        nobody = cast(Evaluator, SimpleNamespace(evaluate=_no_figures))
        return loop.Run(
            sampler=sampler,
            learner=learner,
            publish=SharedWeightsPublisher(self.engine, None),
            engine=self.engine,
            evaluator=nobody,
            sinks=Sinks([log, cast(Any, self)]),
            throughput=Throughput(StepFlop(8, 1), torch.device("cpu"), None),
            state=RunState(
                LocalModelStates(strategy, {}, _save_model),
                states,
                RunFolder(self.folder),
                log,
                TrainerConfig(keep_last=1),
                Manifest(),
            ),
            stop=ShutdownSignal(),
            save_rollouts=self._save_rollouts,
            save_ledger=partial(save_ledger, RunFolder(self.folder)),
            check_scoring=lambda: None,
            scoring_figures=dict,
            evaluate_every=None,
            save_every=1,
            steps=steps,
        )

    def _save_rollouts(self, step: int, closed: Sequence[RolloutGroup]) -> None:
        shown = choose_text_groups(closed, ObserveConfig(rollout_text_groups=64), 1, step)
        path = self.folder / "rollouts" / f"step-{step}.parquet"
        write_rollouts(path, step, closed, version=step - 1, text_groups=shown, decode=words)

    def log(self, step: int, record: Mapping[str, Any]) -> None:
        """As a sink, it is called once a step."""
        self.clocks.append((time.process_time(), self.engine.seconds))
        if tracemalloc.is_tracing():
            self.peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.reset_peak()


def _rate(step: int) -> float:
    return 1e-3


async def _no_figures(step: int) -> dict[str, float]:
    return {}


def _save_model(weights: dict[str, Tensor], folder: Path) -> None:
    folder.mkdir()
    torch.save(weights, folder / "weights.pt")


def _peak_mb() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(samples: int, steps: int) -> Cost:
    """One size, in this process, which should have run nothing before."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        Run(64, Path(folder) / "small").train(2)
        before = _peak_mb()
        driver, engine = Run(samples, Path(folder) / "run").train(steps).step_seconds()
    return Cost(samples, driver, engine, _peak_mb() - before)


def table(costs: Sequence[Cost]) -> str:
    """Markdown."""
    head = (
        "| samples a step | driver s | µs a sample | peak MB | KB a sample | (engine s) |\n"
        "|---:|---:|---:|---:|---:|---:|\n"
    )
    rows = (
        f"| {c.samples:,} | {c.driver_s:.3f} | {c.us_per_sample:.0f} | {c.peak_mb:.0f} "
        f"| {c.peak_mb * 1024 / c.samples:.1f} | {c.engine_s:.3f} |"
        for c in costs
    )
    return head + "\n".join(rows) + "\n"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--one", type=int, help="samples a step: measure in this process")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(asdict(measure(given.one, given.steps))))
        return
    costs = []
    for samples in SIZES:
        command = [sys.executable, "-m", "benchmarks.loop_scale", "--one", str(samples)]
        done = subprocess.run(
            [*command, "--steps", str(given.steps)], check=True, capture_output=True, text=True
        )
        costs.append(Cost(**json.loads(done.stdout)))
        print(table(costs[-1:]).splitlines()[-1], flush=True)
    text = (
        "# The driver's cost as a step grows\n\n"
        "`python -m benchmarks.loop_scale --out benchmarks/results/loop_scale.md`: "
        f"{platform.processor() or platform.machine()}, one thread, groups of {ANSWERS}, answers "
        f"of 1 to {MOST_TOKENS} tokens, {SLOTS:,} slots, mini-batches of {UPDATE_GROUPS} groups, "
        "half of the groups discarded, a checkpoint each step.\n\n"
    )
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text + table(costs), encoding="utf-8")


if __name__ == "__main__":
    main()
