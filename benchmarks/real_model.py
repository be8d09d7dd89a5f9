"""SmolLM2-135M-Instruct learns sums and products: the recipe smollm2 with seeds fixed beforehand.

    python benchmarks/real_model.py [--runs FOLDER] [--seeds 1 2 3] [KEY=VALUE ...]

Trains the seeds one after another, each in a process of its own, and writes
benchmarks/results/real_model.md and docs/real_model.png. A seed that has finished in FOLDER is
read, not trained again. Its weights are dequantised from Q4_1 and Q8_0.

Accuracy is over 200 held-out problems with an answer each, whose numbers never stand together in
training, of all answers and of those that ended before the limit. Intervals are of 95 %: of a share
as `winnow eval` gives them, of a gain by Student's t from the standard errors of start and end as
if these were independent, which is too wide where the same problems are easy both times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.evaluation.statistics import LEVEL, Estimate, two_sided_bound
from winnow.observe.jsonl import read_metrics
from winnow.observe.metrics import Record

ROOT = Path(__file__).resolve().parents[1]
RESULTS, CURVE = ROOT / "benchmarks/results/real_model.md", ROOT / "docs/real_model.png"
SOURCE = "eval/arithmetic/"
FIGURES = {"all answers": "avg@1", "those that ended": "avg_ended"}
COSTS = "wall_s", "cpu_s", "peak_gib"


def train(seed: int, folder: Path, extra: Sequence[str]) -> dict[str, Any]:
    """Train a seed, or read one that is finished; returns its records and its costs."""
    run, costs = folder / f"seed-{seed}", folder / f"seed-{seed}.json"
    if not costs.exists():
        shutil.rmtree(run, ignore_errors=True)
        words = [f"seed={seed}", f"run.dir={folder}", f"run.name={run.name}", *extra]
        winnow, began = str(Path(sys.executable).with_name("winnow")), time.perf_counter()
        process = subprocess.Popen([winnow, "train", "smollm2", "observe.console=plain", *words])
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"seed {seed} ended with {os.waitstatus_to_exitcode(status)}")
        cpu, peak = usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 2**20
        values = dict(zip(COSTS, (time.perf_counter() - began, cpu, peak), strict=True))
        costs.write_text(json.dumps(values))
    return {"records": read_metrics(run / "metrics.jsonl"), **json.loads(costs.read_text())}


def estimate(record: Record, name: str) -> Estimate:
    """The figure of an evaluation, with its standard error."""
    problems = int(record[f"{SOURCE}prompts"])
    return Estimate(record[f"{SOURCE}{name}"], record[f"{SOURCE}{name}_se"], problems)


def percent(value: float) -> str:
    """A share, to one tenth of a per cent."""
    return f"{100 * value:.1f}"


def gain(before: Estimate, after: Estimate) -> str:
    """The difference of two figures, with its interval."""
    error = math.hypot(before.standard_error, after.standard_error)
    half = two_sided_bound(1 - LEVEL, before.prompts - 1) * error
    difference = after.mean - before.mean
    interval = f"{percent(difference - half)}, {percent(difference + half)}"
    return f"{percent(difference)} [{interval}]"


def evaluated(records: Sequence[Record]) -> list[Record]:
    """The records with an evaluation, the first of which is of the start."""
    return [record for record in records if f"{SOURCE}avg@1" in record]


def tables(seeds: Mapping[int, dict[str, Any]]) -> str:
    """The results as Markdown: gains, the course of each seed, costs."""
    lines = ["| seed | accuracy of | start | end | gain |", "|---|---|---|---|---|"]
    for seed, run in seeds.items():
        first, *_, last = evaluated(run["records"])
        for label, name in FIGURES.items():
            before, after = estimate(first, name), estimate(last, name)
            cells = [
                f"{percent(each.mean)} [{', '.join(map(percent, each.interval))}]"
                for each in (before, after)
            ]
            lines.append(f"| {seed} | {label} | {' | '.join(cells)} | {gain(before, after)} |")
    lines += ["", "| seed | step | accuracy | of those that ended | cut off | tokens | entropy |"]
    lines.append("|---|---|---|---|---|---|---|")
    for seed, run in seeds.items():
        entropies = {r["step"]: r["actor/entropy"] for r in run["records"] if "actor/entropy" in r}
        for record in evaluated(run["records"]):
            shares = [percent(record[f"{SOURCE}{n}"]) for n in (*FIGURES.values(), "truncated")]
            entropy = entropies.get(max(record["step"], 1), math.nan)
            cells = [*shares, f"{record[f'{SOURCE}length']:.1f}", f"{entropy:.2f}"]
            lines.append(f"| {seed} | {record['step']:.0f} | {' | '.join(cells)} |")
    lines += ["", "| seed | minutes | CPU-minutes | peak GiB |", "|---|---|---|---|"]
    for seed, run in seeds.items():
        wall, cpu, peak = (run[name] for name in COSTS)
        lines.append(f"| {seed} | {wall / 60:.1f} | {cpu / 60:.1f} | {peak:.1f} |")
    return "\n".join(lines)


def draw(seeds: Mapping[int, dict[str, Any]], path: Path) -> None:
    """Draw accuracy, the share cut off and entropy of each seed over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    for number, (seed, run) in enumerate(seeds.items()):
        points, colour = evaluated(run["records"]), f"C{number}"
        steps = [record["step"] for record in points]
        for name, style in (("avg@1", "-"), ("avg_ended", "--"), ("truncated", ":")):
            values = [100 * record[f"{SOURCE}{name}"] for record in points]
            label = f"seed {seed}" if name == "avg@1" else None
            left.plot(steps, values, style, color=colour, label=label)
        course = [(r["step"], r["actor/entropy"]) for r in run["records"] if "actor/entropy" in r]
        right.plot(*zip(*course, strict=True), color=colour)
    left.set(xlabel="step", ylabel="%", ylim=(0, 100))
    left.set_title(
        "held out: all answers (line), those that ended (dashes), cut off (dots)", size=8
    )
    left.legend(frameon=False, fontsize=8)
    right.set(xlabel="step", ylabel="nats", ylim=(0, None))
    right.set_title("entropy of a token", size=8)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2)
    figure.savefig(path, dpi=130)


def main() -> None:
    """Train the seeds and write table and curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=ROOT / "runs" / "real_model")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--curve", type=Path, default=CURVE)
    parser.add_argument("overrides", nargs="*", help="More settings, KEY=VALUE.")
    args = parser.parse_args()
    folder = args.runs.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    seeds = {seed: train(seed, folder, args.overrides) for seed in args.seeds}
    text = tables(seeds)
    print(text)
    draw(seeds, args.curve)
    head = "# SmolLM2-135M-Instruct learns sums and products\n\n"
    about = (
        "Weights dequantised from Q4_1 and Q8_0. Held out: 200 problems, an answer each at "
        "temperature 1 of at most 128 tokens, whose numbers never stand together in training; "
        "shares in % with 95 % intervals. Entropy is that of the sampled tokens of the step, at "
        f"step 0 of step 1. {os.cpu_count()} cores.\n\n"
    )
    command = " ".join(["python", "benchmarks/real_model.py", *sys.argv[1:]])
    args.out.write_text(f"{head}Made by `{command}`.\n\n{about}{text}\n")


if __name__ == "__main__":
    main()
