"""Whoever finishes first is short: lengths of trained answers against all that qualify.

    python benchmarks/length_bias.py [--steps 12] [--out benchmarks/results/length_bias.md]

The sampler runs on the embedded engine with the quickstart's warm start, whose answers are
guesses (9 tokens), workings (about 40) and ramblings (128). The weights stand still, so that every
group admitted has one true ending: those that no step trained are written to their end when the
steps are over. The yardstick is the mean over all admitted groups that qualify then.
`tests/integration/sampling/test_length_bias.py` asserts the same on a scripted engine.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from winnow.builders.engines import make_local_engine
from winnow.builders.run import prepare_device, rollout_sampling
from winnow.builders.warm_start import make_warm_start
from winnow.config.load import load_recipe
from winnow.config.root import Config
from winnow.data.loader import PromptLoader, training_prompts
from winnow.observe.console import make_console
from winnow.ranks.models import LoadedPolicy, load_policy
from winnow.rewards.pipeline import RewardPipeline
from winnow.rewards.rewards import Rewards
from winnow.rollout.engine import generate, group_request
from winnow.rollout.weights import WeightUpdate
from winnow.sampling.stream import Sampler
from winnow.types import Prompt, Score, Trajectory

RULES = {
    "admission order, surplus carried over": [],
    "admission order, one step ahead": ["sampling.lookahead=1"],
    "admission order, surplus dropped": ["sampling.max_staleness=0"],
    "completion order, surplus dropped": [
        "sampling.commit=completion_order",
        "sampling.max_staleness=0",
    ],
    "completion order, one step ahead": [
        "sampling.commit=completion_order",
        "sampling.lookahead=1",
    ],
}
SETTINGS = ["run.threads=1", "sampling.groups_per_step=32", "rollout.engine.slots=256"]


@dataclass(frozen=True)
class Lengths:
    """Tokens an answer, over the groups of a run."""

    trained: list[float]
    """Means of the trained groups."""
    qualifying: list[float]
    """Means of all groups admitted that qualify at their end."""
    generated: int

    @property
    def ratio(self) -> float:
        return float(np.mean(self.trained) / np.mean(self.qualifying))

    def row(self, rule: str) -> str:
        per_group = self.generated / len(self.trained)
        return (
            f"| {rule} | {np.mean(self.trained):.1f} | {np.mean(self.qualifying):.1f} "
            f"| {self.ratio - 1:+.1%} | {len(self.trained)} of {len(self.qualifying)} "
            f"| {per_group:.0f} |"
        )


async def measure(config: Config, policy: LoadedPolicy, steps: int) -> Lengths:
    """Sample `steps` steps under a rule, then write what no step trained to its end."""
    rewards = Rewards(
        config.reward, RewardPipeline(config.reward, config.rollout.max_response_tokens)
    )
    loader = PromptLoader(training_prompts(config.data, policy.tokenizer, 0), 0)
    engine, sampling = make_local_engine(config, policy), rollout_sampling(config.rollout, policy)
    admitted: list[Prompt] = []

    def next_prompt() -> Prompt:
        admitted.append(loader.next())
        return admitted[-1]

    async def score(prompt: Prompt, trajectory: Trajectory) -> Score:
        text = policy.decode(trajectory.token_ids)
        return await rewards.score(prompt, trajectory, text, training=True)

    sampler = Sampler(
        config.sampling,
        engine=engine,
        next_prompt=next_prompt,
        give_back=loader.give_back,
        score=score,
        n=config.rollout.n,
        sampling=sampling,
        run_seed=0,
    )
    trained: dict[int, float] = {}
    for version in range(steps):
        await engine.load_weights(WeightUpdate(version))
        for group in (await sampler.step(version)).groups:
            lengths = [answer.trajectory.generated_tokens for answer in group.answers]
            trained[group.id] = float(np.mean(lengths))
    generated = engine.status().generated_tokens

    rest = [i for i in range(len(admitted)) if i not in trained]
    fresh = dict.fromkeys(range(config.rollout.n))
    requests = [group_request(i, admitted[i], fresh, sampling, 0) for i in rest]
    ends = await generate(engine, requests)
    qualifying = list(trained.values())
    for i in rest:
        answers = [ends[i, index] for index in fresh]
        right = {(await score(admitted[i], answer)).accuracy for answer in answers}
        if len(right) > 1:
            qualifying.append(float(np.mean([answer.generated_tokens for answer in answers])))
    return Lengths(list(trained.values()), qualifying, generated)


def table(steps: int) -> list[str]:
    """The figures of every rule as Markdown."""
    lines = [
        "| which groups a step takes | trained | all that qualify | bias | groups "
        "| tokens a trained group |",
        "|---|---|---|---|---|---|",
    ]
    for rule, settings in RULES.items():
        config = load_recipe("quickstart", [*SETTINGS, *settings])
        device = prepare_device(config.run, config.model.cache_dir)
        start = make_warm_start(config, False, make_console("off", Console()))
        policy = load_policy(config, str(start), device)
        lines.append(asyncio.run(measure(config, policy, steps)).row(rule))
        print(lines[-1], flush=True)
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and keep it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(arguments)
    lines = table(given.steps)
    text = "\n".join(
        [
            "# Length bias of the rules by which a step takes its groups",
            "",
            f"`python benchmarks/length_bias.py --steps {given.steps}`: the quickstart's warm "
            "start, 32 groups of 8 answers",
            f"a step, 256 slots, {given.steps} steps at standing weights; lengths in tokens an "
            "answer. Bias: how much shorter",
            "or longer the trained answers are than those of all admitted groups that qualify "
            "once written to their end.",
            "",
            *lines,
            "",
        ]
    )
    if given.out:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
