"""Held-out accuracy by step here and in TRL's GRPOTrainer: same start, prompts, rewards, settings.

    OMP_NUM_THREADS=1 python benchmarks/trl_curves.py --runs FOLDER [--seeds 1 2 3] [--arms ARM ...]

In the environment of `trl_step.py`. Both sides train plain GRPO from the quickstart's warm start of
seed 1; seeds are those of prompts and draws. A step has 64 prompts x 8 answers, in one order,
rewards +1 and -1, no filter, no length penalty, no KL, clip 0.2, advantages by the group's standard
deviation, loss over tokens, AdamW at a constant 8e-4, clipped to norm 1. Arms: `winnow` and `TRL`
with four updates of 128 answers a step; the same with one update of 512; and `winnow, single
answers`, which deals a step's answers out to its four updates one by one, as TRL does, where Winnow
deals out whole groups; `winnow, recompute` makes a pass for old log-probs, where Winnow reuses the
engine's. All are evaluated by Winnow's engine at temperature 1 on the same held-out
problems. Results that FOLDER holds already are not measured again. The last lines of the table are
means over seeds of paired differences, with 95 % intervals.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import multiprocessing
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from speed import Quickstart
from trl_step import Setup, quickstart_rows, trl_trainer

from winnow.config.data import SortDigitsTask
from winnow.data.sort_digits import SortDigitsRows
from winnow.learning.batch import Batch
from winnow.learning.learner import Learner, LearnerSettings
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.rewards.scorers.markers import score_sort_digits
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.rollout.weights import WeightUpdate
from winnow.types import Group

STEPS, EVERY = 12, 6
PROBLEMS, ANSWERS = 400, 4
PLAIN = (
    *("sampling/filter=none", "reward.overlong.enabled=false", "optim.warmup_steps=0"),
    *("optim.schedule=constant", "algorithm.policy_loss.clip_high=0.2"),
    *("algorithm.policy_loss.dual_clip=null", f"trainer.steps={STEPS}"),
    *(f"data.task.eval_problems={PROBLEMS}", "warm_start.seed=1"),
)
SETTINGS = {
    "one update": "trainer.mini_batch_groups=null",
    "recompute": "algorithm.correction.mode=recompute",
}
"""Settings besides, by the end of an arm's name."""
PAIRS = {
    "winnow": "TRL",
    "winnow, recompute": "winnow",
    "winnow, single answers": "winnow",
    "winnow, one update": "TRL, one update",
}
ARMS = (
    *("winnow", "winnow, recompute", "TRL", "winnow, single answers"),
    *("winnow, one update", "TRL, one update"),
)
fork = multiprocessing.get_context("fork")
T_975 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's quantile by the number of seeds."""


async def accuracy(bench: Quickstart) -> float:
    """Return pass@1 of a policy on held-out problems, sampled by its engine."""
    task = bench.config.data.task
    assert isinstance(task, SortDigitsTask)
    rows = SortDigitsRows(task, 1).held_out()
    sampling = SamplingParams(Setup.tokens, stop_token_ids=bench.policy.stop_ids)
    requests = []
    for number, row in enumerate(rows):
        seeds = (AnswerRequest(i, 7919 * number + i) for i in range(ANSWERS))
        ids = torch.tensor(bench.policy.tokenizer(row.text)["input_ids"]).numpy()
        requests.append(GroupRequest(number, ids, tuple(seeds), sampling, number))
    await bench.engine.submit(requests)
    right = left = PROBLEMS * ANSWERS
    while left:
        for event in await bench.engine.events():
            assert event.kind == "finished"
            text = bench.policy.tokenizer.decode(event.segment.token_ids, skip_special_tokens=True)
            truth = rows[event.group_id].ground_truth
            right -= score_sort_digits("", text, truth, {}).accuracy < 1
            left -= 1
    return right / (PROBLEMS * ANSWERS)


def deal_single_answers() -> None:
    """Let learners deal a step's answers out to its updates one by one."""
    updates = Learner._updates

    def dealt(
        self: Learner, groups: Sequence[Group], batch: Batch, step: int, metrics: Metrics
    ) -> None:
        settings: LearnerSettings = self._settings
        per_update = settings.groups_per_update * batch.n_samples // batch.n_groups
        self._settings = replace(settings, groups_per_update=per_update)
        updates(self, groups, replace(batch, groups=torch.arange(batch.n_samples)), step, metrics)
        self._settings = settings

    Learner._updates = dealt  # type: ignore[method-assign]


async def winnow_curve(bench: Quickstart) -> dict[int, float]:
    """Return accuracy by step of training here."""
    curve = {0: await accuracy(bench)}
    for step in range(1, STEPS + 1):
        await bench.step(step, Stopwatch())
        if step % EVERY == 0:
            curve[step] = await accuracy(bench)
    return curve


def trl_curve(bench: Quickstart, seed: int, setup: Setup, scratch: str) -> dict[int, float]:
    """Return accuracy by step of TRL's trainer, whose weights go into the engine of `bench`."""
    from transformers import TrainerCallback

    weights: dict[int, dict[str, torch.Tensor]] = {}

    class Keep(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any, **_: Any) -> None:
            step, rest = divmod(state.global_step, setup.updates)
            if not rest and step % EVERY == 0:
                weights[step] = {n: t.detach().clone() for n, t in model.state_dict().items()}

    rows = quickstart_rows(setup.prompts * STEPS, seed)
    more = {"lr_scheduler_type": "constant", "epsilon_high": 0.2, "seed": seed}
    trl_trainer(bench.start, rows, setup, scratch, Keep(), **more).train()
    curve = {0: asyncio.run(accuracy(bench))}
    for step, values in weights.items():
        bench.policy.model.load_state_dict(values)
        asyncio.run(bench.engine.load_weights(WeightUpdate(version=step)))
        curve[step] = asyncio.run(accuracy(bench))
    return curve


def measure(arm: str, seed: int, file: Path) -> None:
    """Write accuracy by step of an arm."""
    more = [setting for end, setting in SETTINGS.items() if arm.endswith(end)]
    with tempfile.TemporaryDirectory() as scratch:
        bench = Quickstart(scratch, [*PLAIN, *more, f"seed={seed}"])
        if arm.startswith("TRL"):
            setup = Setup(updates=1, micro_batch=512) if more else Setup()
            curve = trl_curve(bench, seed, setup, scratch)
        else:
            if "single" in arm:
                deal_single_answers()
            curve = asyncio.run(winnow_curve(bench))
    file.write_text(json.dumps(curve))


def table(curves: dict[tuple[str, int], dict[str, float]], seeds: Sequence[int]) -> str:
    """Return the curves as Markdown, and paired differences of their last points and means."""
    steps = list(next(iter(curves.values())))
    lines = [f"| arm | seed | {' | '.join(f'step {step}' for step in steps)} |"]
    lines.append("|---" * (len(steps) + 2) + "|")
    for (arm, seed), curve in curves.items():
        texts = (f"{curve[step]:.3f}" for step in steps)
        lines.append(f"| {arm} | {seed} | {' | '.join(texts)} |")
    for arm, other in PAIRS.items():
        if not all((each, seed) in curves for each in (arm, other) for seed in seeds):
            continue
        cells = []
        for step in steps:
            gaps = [curves[arm, seed][step] - curves[other, seed][step] for seed in seeds]
            half = math.nan
            if len(gaps) in T_975:
                half = T_975[len(gaps)] * statistics.stdev(gaps) / math.sqrt(len(gaps))
            cells.append(f"{statistics.mean(gaps):+.3f} ± {half:.3f}")
        lines.append(f"| {arm} less {other} | mean | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Measure what is absent, each arm in a process of its own, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=ARMS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    args.runs.mkdir(parents=True, exist_ok=True)
    curves = {}
    for seed in args.seeds:
        for arm in args.arms:
            file = args.runs / f"{arm}-{seed}.json"
            if not file.exists():
                child = fork.Process(target=measure, args=(arm, seed, file))
                child.start()
                child.join()
                assert child.exitcode == 0, f"{arm}, seed {seed}"
            curves[arm, seed] = json.loads(file.read_text())
            print(arm, seed, curves[arm, seed], flush=True)
    print(table(curves, args.seeds))


if __name__ == "__main__":
    main()
