"""Scores a second: a plain loop, the run's own process, and the pool of workers.

    python benchmarks/scoring.py [--answers 10000] [--workers 1] [--out FILE]

DAPO maths and sorting are built-in rules on made-up answers of the quickstart's and of usual
length, half of them right; `math-verify` is a user's function that parses and verifies. The plain
loop calls the same function in this process, nothing else. The service is awaited as the sampler
awaits it, `--turn` answers at a time. Each figure is the best of `--repeat`.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from winnow.config.reward import RewardConfig, UserFunction
from winnow.rewards.pipeline import RewardPipeline
from winnow.rewards.rewards import Rewards
from winnow.rewards.scorers import SCORERS
from winnow.types import Prompt, Segment, Trajectory

VERIFY = """
from math_verify import parse, verify


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    gold, said = parse(f"${ground_truth}$"), parse(solution_str)
    return 1.0 if verify(gold, said) else -1.0
"""
IGNORED = Trajectory((Segment(np.zeros(1, np.int64), np.zeros(1, np.float32), ()),), "stop")
Case = list[tuple[Prompt, str]]


@dataclass(frozen=True)
class Kind:
    """What is scored, by which rule, and how a loop without Winnow does it."""

    name: str
    cases: Case
    plain: Callable[[Prompt, str], object]
    function: UserFunction


def kinds(answers: int, folder: Path) -> list[Kind]:
    """The three kinds, from a fixed seed."""
    rng = random.Random(0)
    sort: Case = []
    maths: Case = []
    for number in range(answers):
        digits = "".join(rng.choices("0123456789", k=6))
        gold = "".join(sorted(digits))
        said = gold if number % 2 else gold[::-1]
        sort.append((prompt(number, "sort_digits", gold), f"{digits}>{said}#{said}"))
        a, b = rng.randrange(1, 90), rng.randrange(2, 90)
        work = " ".join(rng.choices(["thus", "we", "add", "$x^2$", "and", "so", "get"], k=150))
        right = rf"\frac{{{a}}}{{{b}}}" if number % 2 else str(a)
        said = f"{work}\nAnswer: ${right}$"
        maths.append((prompt(number, "math_dapo", rf"\frac{{{a}}}{{{b}}}"), said))
    file = folder / "verify.py"
    file.write_text(VERIFY)
    names: dict[str, object] = {}
    exec(VERIFY, names)
    verify = names["compute_score"]
    assert callable(verify)
    return [
        Kind("sort_digits", sort, rule("sort_digits"), UserFunction()),
        Kind("dapo_math", maths, rule("dapo_math"), UserFunction()),
        Kind(
            "math-verify",
            maths,
            lambda p, text: verify(p.data_source, text, p.ground_truth),
            UserFunction(path=str(file)),
        ),
    ]


def prompt(number: int, source: str, gold: str) -> Prompt:
    """A row of data."""
    info = {"extra_info": {"index": number, "split": "train"}}
    return Prompt(f"{source}:{number}", np.zeros(1, np.int64), "", source, gold, info)


def rule(name: str) -> Callable[[Prompt, str], object]:
    """A built-in scorer as a loop calls it."""
    return lambda p, text: SCORERS[name].score(p.data_source, text, p.ground_truth, p.extra)


def plain_rate(kind: Kind) -> float:
    """Scores a second of a loop."""
    began = time.perf_counter()
    for each, text in kind.cases:
        kind.plain(each, text)
    return len(kind.cases) / (time.perf_counter() - began)


def service_rate(kind: Kind, workers: int, turn: int, repeat: int) -> float:
    """Scores a second of the service; starting workers is not counted."""

    async def score() -> float:
        began = time.perf_counter()
        for start in range(0, len(kind.cases), turn):
            part = kind.cases[start : start + turn]
            scores = await asyncio.gather(*(service.score(p, IGNORED, t, True) for p, t in part))
            assert not any(each.error for each in scores)
        return len(kind.cases) / (time.perf_counter() - began)

    config = RewardConfig(function=kind.function, workers=workers)
    with contextlib.closing(Rewards(config, RewardPipeline(config, 8))) as service:
        p, text = kind.cases[0]
        asyncio.run(service.score(p, IGNORED, text, training=True))  # imports of the first call
        return max(asyncio.run(score()) for _ in range(repeat))


def main() -> None:
    """Print a table, and write it where asked to."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--answers", type=int, default=10_000)
    options.add_argument("--workers", type=int, default=1)
    options.add_argument("--turn", type=int, default=256)
    options.add_argument("--repeat", type=int, default=3)
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    lines = [
        f"{args.answers:,} answers a kind, {args.turn} at a time, best of {args.repeat}; "
        f"{os.cpu_count()} cores.",
        "",
        f"| scores/s | plain loop | in process (ratio) | pool of {args.workers} (ratio) |",
        "|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        for kind in kinds(args.answers, Path(folder)):
            repeat = 1 if kind.name == "math-verify" else args.repeat
            plain = max(plain_rate(kind) for _ in range(repeat))
            rates = [service_rate(kind, w, args.turn, repeat) for w in (0, args.workers)]
            cells = " | ".join(f"{rate:,.0f} ({rate / plain:.2f})" for rate in rates)
            lines.append(f"| {kind.name} | {plain:,.0f} | {cells} |")
            print(lines[-1], flush=True)
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        args.out.write_text(f"# Scoring\n\n`python benchmarks/scoring.py`\n\n{text}")


if __name__ == "__main__":
    main()
