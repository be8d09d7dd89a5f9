"""CPU seconds a step of the quickstart takes, by phase, and of one source tree against another.

    OMP_NUM_THREADS=1 python benchmarks/speed.py [--steps 16] [--rounds 3] [--src SRC ...]

Each round runs the quickstart's first steps (rollout, old log-probs, updates, publication; nothing
is written, nothing evaluated) from its cached warm start, in a process of its own for each source
tree (`--src OTHER/src`, default this one) in an order that turns round. CPU time of the process is
counted, not wall time, and not the first two steps. Trees that make other bits may write other
answers, so rollouts are given per thousand tokens, too. The least of the rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from winnow.builders.engines import make_local_engine
from winnow.builders.rewards import make_rewards
from winnow.builders.run import rollout_sampling
from winnow.builders.warm_start import make_warm_start
from winnow.config.load import load_recipe
from winnow.config.roles import Roles
from winnow.data.loader import PromptLoader, training_prompts
from winnow.observe.console import make_console
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.ranks.learner import make_learner
from winnow.ranks.models import load_policy
from winnow.rollout.weights import WeightUpdate
from winnow.sampling.stream import Sampler

PHASES = ("rollout", "batch", "old_logprobs", "update", "publish", "step")
OWN = Path(__file__).parents[1] / "src"
WARM_UP_STEPS = 2


class Quickstart:
    """The quickstart's loop from its cached warm start, without anything that writes."""

    def __init__(
        self, scratch: str, overrides: Sequence[str] = (), recipe: str = "quickstart"
    ) -> None:
        given = ["run.threads=1", f"run.dir={scratch}", *overrides]
        config = load_recipe(recipe, given)
        path = config.model.path
        if path is None:
            path = str(make_warm_start(config, False, make_console("off", Console())))
        policy = load_policy(config, path, torch.device("cpu"))
        rewards = make_rewards(config, policy.device, policy.decode)
        source = training_prompts(config.data, policy.tokenizer, config.run.seed)
        loader = PromptLoader(source, config.run.seed, config.data.shuffle)
        self.config, self.policy, self.start = config, policy, path
        self.engine = make_local_engine(config, policy)
        self._sampler = Sampler(
            config.sampling,
            engine=self.engine,
            next_prompt=loader.next,
            give_back=loader.give_back,
            score=rewards.score,
            n=config.rollout.n,
            sampling=rollout_sampling(config.rollout, policy),
            run_seed=config.run.seed,
        )
        self._learner = make_learner(
            config, Roles(config), policy.model, policy.vocabulary, None
        ).learner

    async def step(self, step: int, watch: Stopwatch) -> int:
        """One step; returns the tokens written."""
        with watch.phase("rollout"):
            sampled = await self._sampler.step(step - 1)
        self._learner.learn(sampled.groups, step, Metrics(), watch)
        with watch.phase("publish"):
            await self.engine.load_weights(WeightUpdate(version=step))
        return sampled.counts.tokens.generated


async def measure(
    steps: int, quickstart: Quickstart, warm_up: int = WARM_UP_STEPS
) -> dict[str, float]:
    """CPU seconds a step by phase, and thousands of tokens written a step; not of the first."""
    sums: dict[str, float] = defaultdict(float)
    watch = Stopwatch(time.process_time)
    for step in range(1, steps + 1):
        tokens = await quickstart.step(step, watch)
        times = watch.lap()
        if step > warm_up:
            for phase in PHASES:
                sums[phase] += float(times.get(f"time/{phase}_s", 0.0))
            sums["kilotokens"] += tokens / 1000
    return {name: total / (steps - warm_up) for name, total in sums.items()}


def in_turn(trees: list[Path], steps: int, rounds: int) -> list[list[dict[str, float]]]:
    """Of each tree what its rounds took."""
    found: list[list[dict[str, float]]] = [[] for _ in trees]
    for turn in range(rounds):
        order = range(len(trees)) if turn % 2 == 0 else reversed(range(len(trees)))
        for place in order:
            command = [sys.executable, __file__, "--once", "--steps", str(steps)]
            environment = {**os.environ, "PYTHONPATH": str(trees[place])}
            made = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE)
            found[place].append(json.loads(made.stdout.splitlines()[-1]))
            print(trees[place], turn, found[place][-1], file=sys.stderr)
    return found


def table(names: list[str], found: list[list[dict[str, float]]]) -> str:
    """Markdown, one line a tree."""
    lines = [
        f"| source | {' | '.join(f'{phase} s' for phase in PHASES)} | rollout s per 1,000 tokens |",
        "|---|" + "---|" * (len(PHASES) + 1),
    ]
    for name, rounds in zip(names, found, strict=True):
        least = [min(each[phase] for each in rounds) for phase in PHASES]
        per_token = min(each["rollout"] / each["kilotokens"] for each in rounds)
        figures = " | ".join(f"{value:.3f}" for value in least)
        lines.append(f"| {name} | {figures} | {per_token:.4f} |")
    return "\n".join(lines)


def main() -> None:
    """Measure once, or let each tree measure in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--src", type=Path, nargs="+", default=[OWN])
    parser.add_argument("--names", nargs="+", help="What the table calls the trees.")
    parser.add_argument("--once", action="store_true", help="Measure in this process, print JSON.")
    args = parser.parse_args()
    if args.once:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(asyncio.run(measure(args.steps, Quickstart(scratch)))))
        return
    found = in_turn([tree.resolve() for tree in args.src], args.steps, args.rounds)
    print(table(args.names or [str(tree) for tree in args.src], found))


if __name__ == "__main__":
    main()
