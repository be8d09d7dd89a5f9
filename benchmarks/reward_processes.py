"""What an answer costs the driver that is scored in a process apart (`reward.processes`).

    python -m benchmarks.reward_processes [--answers 4096] [--cluster local ray] [--out FILE]

CPU time of the driver's process, the threads of its worker groups included, for each answer, less
what the same loop takes where a panel in this process says the same at once. The workers read and
score for real, by the quickstart's rule. Groups of 16 share a prompt. `turn` is how many answers
end in one turn of the loop, `tokens` how long they are; `far` tokens are elsewhere, as those of
engines on a cluster are: only their lengths travel. The garbage collector is kept from what was
imported (`gc.freeze`). Each figure is the best of `--repeat`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from winnow.builders.processes import worker_processes
from winnow.builders.topology import build_rewards
from winnow.config.load import load_recipe
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.data.sort_digits import build_tokenizer
from winnow.data.tokenizer import make_decoder
from winnow.ranks.models import LoadedPolicy
from winnow.rewards.pipeline import ScoredAnswer
from winnow.rewards.rewards import Rewards
from winnow.types import Prompt, Score, Segment, Trajectory, VersionSpan

GROUP = 16
CASES = (
    (4096, 128, False),
    (16, 128, False),
    (4096, 128, True),
    (16, 128, True),
    (64, 4096, False),
)
"""Turn, tokens, far."""


class Far:
    """An array that is made where it is read."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __reduce__(self) -> tuple[Any, ...]:
        return np.full, (self._length, 5)


class AtOnce:
    """A panel that has looked at everything before."""

    def __init__(self) -> None:
        self._judged = ScoredAnswer(Score(1.0, 1.0, {"task": 1.0}))

    async def score(self, *_: Any) -> ScoredAnswer:
        return self._judged

    def close(self) -> None: ...

    check_prompt = takes_time = count_offloaded = close


def answers(count: int, tokens: int, far: bool) -> list[tuple[Prompt, Trajectory]]:
    """Of groups that share a prompt."""
    found = []
    for number in range(count):
        if number % GROUP == 0:
            ids = np.arange(8)
            prompt = Prompt(f"p:{number}", ids, "5391:", "sort_digits", "1359", {"index": number})
        ids = cast(Any, Far(tokens)) if far else np.full(tokens, 5)
        logprobs = cast(Any, Far(tokens)) if far else np.zeros(tokens, np.float32)
        segment = Segment(ids, logprobs, (VersionSpan(0, tokens),))
        found.append((prompt, Trajectory((segment,), "stop")))
    return found


async def ask(rewards: Rewards, asked: Iterable[tuple[Prompt, Trajectory]], turn: int) -> None:
    """Begin the scorings turn by turn, as fast as they come."""
    tasks = []
    for number, pair in enumerate(asked):
        tasks.append(asyncio.ensure_future(rewards.score(*pair)))
        if number % turn == turn - 1:
            await asyncio.sleep(0)
    await asyncio.gather(*tasks)


def cpu_us(rewards: Rewards, count: int, case: tuple[int, int, bool], repeat: int) -> float:
    """For each answer, of this whole process."""
    turn, tokens, far = case
    found = []
    for _ in range(repeat):
        asked = answers(count, tokens, far)
        began = time.process_time()
        asyncio.run(ask(rewards, asked, turn))
        found.append((time.process_time() - began) / count * 1e6)
    return min(found)


def measured(config: Config, count: int, repeat: int) -> list[float]:
    """Beyond the loop itself, for each case."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = build_tokenizer()
        tokenizer.save_pretrained(folder)
        none, cpu = cast(Any, None), torch.device("cpu")
        policy = LoadedPolicy(
            folder, cpu, none, tokenizer, make_decoder(tokenizer), 20, (1,), folder
        )
        alone = Rewards(config.reward, cast(Any, AtOnce()), [])
        roles = Roles(config)
        with (
            worker_processes(config, roles, policy, None) as others,
            contextlib.closing(build_rewards(config, roles, policy, others)) as rewards,
        ):
            rewards.check_sources(["sort_digits"])
            gc.collect()
            gc.freeze()
            return [
                cpu_us(rewards, count, case, repeat) - cpu_us(alone, count, case, repeat)
                for case in CASES
            ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--answers", type=int, default=4096)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--cluster", nargs="+", default=["local"], choices=["local", "ray"])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    lines = [
        f"`python -m benchmarks.reward_processes --cluster {' '.join(given.cluster)}` on "
        f"{os.cpu_count()} cores, {given.processes} processes; microseconds of the driver's CPU "
        "for each answer, beyond the loop:",
        "",
        f"| turn | tokens | {' | '.join(given.cluster)} |",
        f"|---|---|{'---|' * len(given.cluster)}",
    ]
    columns = []
    for cluster in given.cluster:
        settings = [f"cluster={cluster}", f"reward.processes={given.processes}", "run.threads=1"]
        settings += ["cluster.cpus=0.5"] if cluster == "ray" else []
        columns.append(measured(load_recipe("quickstart", settings), given.answers, given.repeat))
    for (turn, tokens, far), *values in zip(CASES, *columns, strict=True):
        shown = " | ".join(f"{value:.0f}" for value in values)
        lines.append(f"| {turn:,} | {tokens:,}{', far' if far else ''} | {shown} |")
    text = "\n".join(lines) + "\n"
    print(text)
    if given.out is not None:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
