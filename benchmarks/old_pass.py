"""What a pass of its own for the old log-probs costs a step that needs none.

    python -m benchmarks.old_pass [--steps 6] [--rounds 3] [--out benchmarks/results/old_pass.md]

The quickstart's first step is sampled once (64 groups of 8 answers of its warm start); then the
learner takes steps on these groups, one update each: with `old` from the update's own forward
pass, as a recipe with `trainer.mini_batch_groups: null` has it, and with the pass forced, in
turns. Seconds are CPU time of the process, one thread. Both learn the same: the weights after all
steps are compared.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from tests.fixtures.record import arrays, rollouts
from tests.recorded import groups_of
from torch import Tensor

from winnow.algorithms.advantages import ESTIMATORS
from winnow.builders.run import prepare_device
from winnow.builders.warm_start import make_warm_start
from winnow.config.load import load_recipe
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.learning.advantage import AdvantageStage
from winnow.learning.learner import Learner, LearnerSettings
from winnow.learning.policy import OldSource, Policy
from winnow.observe.console import make_console
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.ranks.learner import make_learner, make_objective
from winnow.ranks.models import load_policy
from winnow.types import Group

SOURCES: tuple[OldSource, ...] = ("current", "pass")


def learner_of(config: Config, path: str, old: OldSource) -> tuple[Learner, dict[str, Tensor]]:
    """A learner of the recipe from a start, with `old` from there; and its weights."""
    policy = load_policy(config, path, torch.device("cpu"))
    strategy = make_learner(config, Roles(config), policy.model, policy.vocabulary, None).policy
    objective = make_objective(config)
    assert objective.old == "current", "a step of one update needs no pass"
    settings = LearnerSettings(
        groups_per_update=config.sampling.groups_per_step,
        epochs=config.trainer.epochs,
        microbatch_tokens=config.trainer.token_budget,
        overlong_filtering=config.algorithm.overlong_filtering,
        max_skipped_updates=config.optim.max_skipped_updates,
        seed=config.run.seed,
        lr=lambda step: config.optim.lr,
    )
    learner = Learner(
        Policy(strategy, replace(objective, old=old)),
        AdvantageStage(ESTIMATORS["grpo"], {"std_normalization": "group"}),
        settings,
    )
    return learner, dict(policy.model.named_parameters())


def step_seconds(learner: Learner, groups: Sequence[Group], step: int) -> tuple[float, int]:
    """CPU seconds of a step, and whether it made the pass."""
    metrics = Metrics()
    began = time.process_time()
    learner.learn(groups, step, metrics, Stopwatch())
    return time.process_time() - began, int(metrics.record()["actor/old_pass"])


def measure(steps: int, rounds: int) -> str:
    """Markdown."""
    config = load_recipe("quickstart", ["trainer.mini_batch_groups=null"])
    prepare_device(config.run, config.model.cache_dir)
    console = make_console("plain", Console(stderr=True))
    path = str(make_warm_start(config, False, console))
    with tempfile.TemporaryDirectory() as scratch:
        sampled = rollouts(config.sampling.groups_per_step, Path(scratch))
    groups = groups_of(arrays(sampled))
    seconds: dict[OldSource, list[float]] = {source: [] for source in SOURCES}
    apart = 0.0
    for _ in range(rounds):
        learners = {source: learner_of(config, path, source) for source in SOURCES}
        for step in range(1, steps + 1):
            for source, (learner, _) in learners.items():
                spent, made = step_seconds(learner, groups, step)
                assert made == int(source == "pass")
                if step > 1:  # the first one warms up
                    seconds[source].append(spent)
        ours, theirs = (learners[source][1] for source in SOURCES)
        apart = max(float((ours[name] - theirs[name]).detach().abs().max()) for name in ours)
    without, with_pass = (statistics.median(seconds[source]) for source in SOURCES)
    rows = [
        f"| {name} | {statistics.median(seconds[source]):.2f} | {min(seconds[source]):.2f} "
        f"| {max(seconds[source]):.2f} |"
        for source, name in zip(SOURCES, ("the update itself", "a pass of its own"), strict=True)
    ]
    return "\n".join(
        [
            f"{len(groups)} groups, {sum(len(g.answers) for g in groups)} answers, "
            f"{sum(g.generated_tokens for g in groups):,} tokens written; "
            f"{len(seconds['pass'])} steps of each kind, one thread, {platform.machine()}.",
            "",
            "| `old` from | CPU s a step, median | least | most |",
            "|---|---:|---:|---:|",
            *rows,
            "",
            f"The pass takes {with_pass - without:.2f} s, {1 - without / with_pass:.0%} of the "
            f"time of learning with it. After {steps} steps from the same start the largest "
            f"difference between two weights of the two is {apart:g}.",
        ]
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    text = measure(given.steps, given.rounds)
    print(text)
    if given.out is not None:
        command = " ".join(["python -m benchmarks.old_pass", *sys.argv[1:]])
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(f"# The pass for the old log-probs\n\n`{command}`\n\n{text}\n")


if __name__ == "__main__":
    main()
