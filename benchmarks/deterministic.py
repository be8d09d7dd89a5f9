"""What deterministic mode costs against the free mode, on the quickstart's warm start.

    OMP_NUM_THREADS=1 python benchmarks/deterministic.py [--steps 28] [--lags 0 8 16] [--out FILE]

All variants run in one process, a rollout of each in turn, in an order that rotates; each has its
own model, engine and sampler and is timed apart. A new version is published after each rollout,
but the weights stay, so that all variants write from one distribution. Three scorers: the
quickstart's own, which answers at once; the same behind a sleep of 0 to 20 ms (uniform, seeded)
that holds up nobody else; the same in a worker process (`reward.workers=1`). `lag` is
`sampling.score_lag_ticks`. The first steps warm up and are not counted. Ratios are deterministic
over free, per generated token; their spread is the jackknife's standard error over steps, paired
as they ran. Decode ticks do not depend on how busy the machine is where scorers answer at once,
CPU seconds (the run's own process) hardly, wall seconds do.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from winnow.builders.engines import make_local_engine
from winnow.builders.rewards import make_rewards
from winnow.builders.run import rollout_sampling
from winnow.builders.warm_start import make_warm_start
from winnow.config.load import load_recipe
from winnow.config.root import Config
from winnow.data.loader import PromptLoader, training_prompts
from winnow.observe.console import make_console
from winnow.ranks.models import load_policy
from winnow.rollout.weights import WeightUpdate
from winnow.sampling.stream import Sampler
from winnow.types import Prompt, Score, Trajectory

Row = tuple[float, float, int, int]
"""Wall seconds, CPU seconds, tokens and decode ticks of a rollout."""
SLEEP_S = 0.02
SCORERS = {
    "at once": "at once",
    "sleep": f"sleeps 0 to {SLEEP_S * 1000:.0f} ms",
    "worker": "in a worker",
}
WARM_UP_STEPS = 4


@dataclass
class Variant:
    """One way to run, and what its steps took."""

    name: str
    overrides: tuple[str, ...]
    scorer: str
    """A key of `SCORERS`."""
    rows: list[Row] = field(default_factory=list)


def variants(lags: Sequence[int], scorers: Sequence[str]) -> list[Variant]:
    """Free and deterministic, with each lag, under each scorer."""
    made = []
    for scorer in scorers:
        workers = f"reward.workers={int(scorer == 'worker')}"
        made.append(Variant("free", (workers, "run.deterministic=false"), scorer))
        for lag in lags:
            overrides = (workers, f"sampling.score_lag_ticks={lag}")
            made.append(Variant(f"lag {lag}", overrides, scorer))
    return made


class Runner:
    """The quickstart's loop without learning and without anything that writes."""

    def __init__(self, config: Config, path: str, sleeps: bool) -> None:
        policy = load_policy(config, path, torch.device("cpu"))
        self.rewards = make_rewards(config, policy.device, policy.decode)
        rng = random.Random(config.run.seed)

        async def slow(prompt: Prompt, trajectory: Trajectory) -> Score:
            await asyncio.sleep(rng.uniform(0, SLEEP_S))
            return await self.rewards.score(prompt, trajectory)

        source = training_prompts(config.data, policy.tokenizer, config.run.seed)
        self.rewards.check_sources(source.data_sources)
        loader = PromptLoader(source, config.run.seed, config.data.shuffle)
        self.engine = make_local_engine(config, policy)
        self.sampler = Sampler(
            config.sampling,
            engine=self.engine,
            next_prompt=loader.next,
            give_back=loader.give_back,
            score=slow if sleeps else self.rewards.score,
            n=config.rollout.n,
            sampling=rollout_sampling(config.rollout, policy),
            run_seed=config.run.seed,
            deterministic=config.run.deterministic,
        )

    async def step(self, step: int) -> Row:
        """One rollout."""
        await self.engine.load_weights(WeightUpdate(version=step - 1))
        wall, cpu, tick = time.perf_counter(), time.process_time(), self.engine.status().tick
        sampled = await self.sampler.step(step - 1)
        seconds = time.perf_counter() - wall, time.process_time() - cpu
        ticks = self.engine.status().tick - tick
        return *seconds, sampled.counts.tokens.generated, ticks


async def run(
    seed: int,
    steps: int,
    cases: Sequence[Variant],
    scratch: str,
    closing: contextlib.ExitStack,
) -> None:
    """All cases with one seed, step by step in turn."""
    runners = []
    for case in cases:
        config = load_recipe(
            "quickstart",
            [f"seed={seed}", "run.threads=1", f"run.dir={scratch}", *case.overrides],
        )
        warm = make_warm_start(config, False, make_console("off", Console()))
        runners.append(Runner(config, str(warm), case.scorer == "sleep"))
        closing.callback(runners[-1].rewards.close)
    for step in range(1, steps + 1):
        turn = [(step + i) % len(cases) for i in range(len(cases))]
        for place in turn if step % 2 else reversed(turn):
            row = await runners[place].step(step)
            if step > WARM_UP_STEPS:
                cases[place].rows.append(row)


def table(cases: Sequence[Variant]) -> str:
    """Markdown, with the ratios to the free mode under the same scorer."""
    lines = [
        "| scorer | mode | tokens a step | ticks | tokens/s | s/step | CPU s/step "
        "| wall per token, to free | CPU per token, to free | tokens a tick, free to it |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        free = next(c for c in cases if c.name == "free" and c.scorer == case.scorer)
        rows, base = np.array(case.rows), np.array(free.rows)
        wall, cpu, tokens, ticks = rows.mean(0)
        ratios = ["1"] * 3
        if case is not free:
            ratios = [_ratio(rows[:, [k, 2]], base[:, [k, 2]]) for k in (0, 1, 3)]
        mode = case.name if case is free else f"deterministic, {case.name}"
        lines.append(
            f"| {SCORERS[case.scorer]} | {mode} | {tokens:,.0f} | {ticks:.0f} "
            f"| {tokens / wall:,.0f} | {wall:.3f} | {cpu:.3f} | {' | '.join(ratios)} |"
        )
    return "\n".join(lines)


def _ratio(rows: np.ndarray, base: np.ndarray) -> str:
    """Cost per token over that of the base; [steps, (cost, tokens)] each, jackknife error."""

    def of(keep: np.ndarray) -> float:
        ours, theirs = rows[keep].sum(0), base[keep].sum(0)
        return float(ours[0] / ours[1] / (theirs[0] / theirs[1]))

    count = len(rows)
    without = np.array([of(np.arange(count) != i) for i in range(count)])
    error = np.sqrt((count - 1) * without.var())
    return f"{of(np.ones(count, bool)):.3f} ± {error:.3f}"


def main() -> None:
    """Run the cases and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=28)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 8, 16])
    parser.add_argument("--scorers", choices=SCORERS, nargs="+", default=list(SCORERS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    cases = variants(args.lags, args.scorers)
    with tempfile.TemporaryDirectory() as scratch:
        for seed in args.seeds:
            with contextlib.ExitStack() as closing:
                asyncio.run(run(seed, args.steps, cases, scratch, closing))
    text = table(cases)
    print(text)
    if args.out is not None:
        command = " ".join(["python", "benchmarks/deterministic.py", *sys.argv[1:]])
        counted = (args.steps - WARM_UP_STEPS) * len(args.seeds)
        args.out.write_text(
            f"# What deterministic mode costs\n\nMade by `{command}`: {counted} steps a row, one "
            f"thread.\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
