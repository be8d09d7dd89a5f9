"""The quickstarts over seeds: what they learn and cost. Each seed has its own warm start.

    python benchmarks/quickstart.py [--recipe quickstart-tools] [--seeds 1 2 3] [--threads 1]
                                    [--out FILE] [KEY=VALUE ...]

Runs `winnow train quickstart` for each seed in a process of its own, one after another, with a
fresh cache, and evaluates on 2,000 held-out problems with 16 answers each before and after;
quickstart-tools on 400 with 4, quickstart-images on 400 with 4. Seconds are those of this machine;
the evaluations are not among the seconds of a step.

With images the trained model is evaluated once more on the same problems, each with the picture of
the next one (`swapped`). All counts of a kind are equally likely, so a policy that does not look is
right in 1 of 5; `constant` is what always naming the most frequent count of the kind reaches on
these problems.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from winnow.config.data import ShapesTask
from winnow.data.shapes import ShapesRows
from winnow.observe.jsonl import read_metrics

RECIPES = {
    "quickstart": ("sort_digits", 2000, 16),
    "quickstart-tools": ("calc", 400, 4),
    "quickstart-images": ("shapes", 400, 4),
}
"""Data source, held-out problems and answers to each."""


def run_seed(
    recipe: str, seed: int, threads: int, folder: Path, extra: list[str]
) -> dict[str, float]:
    """One whole run; returns its figures."""
    source, problems, answers = RECIPES[recipe]
    command = [
        *("winnow", "train", recipe, f"seed={seed}", f"run.threads={threads}"),
        *(f"run.dir={folder}", f"run.name=seed-{seed}", f"data.task.eval_problems={problems}"),
        *(f"evaluation.n={answers}", "evaluation.every=null", "observe.console=off", *extra),
    ]
    command[0] = str(Path(sys.executable).with_name("winnow"))
    environment = os.environ | {"WINNOW_CACHE": str(folder / "cache")}
    cpu_before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.perf_counter()
    subprocess.run(command, env=environment, check=True)
    wall = time.perf_counter() - began
    cpu_after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = sum(
        getattr(cpu_after, key) - getattr(cpu_before, key) for key in ("ru_utime", "ru_stime")
    )
    records = read_metrics(folder / f"seed-{seed}" / "metrics.jsonl")
    steps = [record for record in records if record["step"] > 0]
    generated = sum(record["sampling/tokens/generated"] for record in steps)
    trained = sum(record["sampling/groups/trained"] for record in steps)
    busy = [record["time/step_s"] - record.get("time/evaluate_s", 0.0) for record in steps]
    figures = {"wall_s": wall, "cpu_s": cpu, "tokens": generated, "per_group": generated / trained}
    figures |= {"step_s": statistics.mean(busy), "rl_s": sum(busy)}
    for when, record in (("before", records[0]), ("after", records[-1])):
        for name in ("pass@1", "greedy", f"pass@{answers}", "truncated", "length"):
            figures[f"{name} {when}"] = record[f"eval/{source}/{name}"]
    if source == "shapes":
        figures |= swapped(command[0], folder / f"seed-{seed}", problems, answers)
    return figures


def swapped(winnow: str, run: Path, problems: int, answers: int) -> dict[str, float]:
    """Evaluate a trained model on held-out problems with the pictures of others."""
    held_out = ShapesRows(ShapesTask(side=2, eval_problems=problems), seed=0).held_out()
    rows = [
        {
            "data_source": "shapes",
            "prompt": list(row.messages),
            "images": [{"bytes": other.images[0]}],
            "reward_model": {"style": "rule", "ground_truth": row.ground_truth},
        }
        for row, other in zip(held_out, [*held_out[1:], held_out[0]], strict=True)
    ]
    pq.write_table(pa.Table.from_pylist(rows), file := run.with_suffix(".parquet"))
    out = run.with_suffix(".swapped")
    command = [winnow, "eval", str(run), "--data", str(file), "--out", str(out)]
    subprocess.run([*command, f"evaluation.n={answers}"], check=True)
    scores = json.loads((out / "report.json").read_text())["sources"]["shapes"]
    counts = Counter((row.text[-2], row.ground_truth) for row in held_out)
    most = sum(max(n for (kind, _), n in counts.items() if kind == asked) for asked in "sc")
    found = {name: scores[name]["mean"] for name in ("pass@1", "greedy")}
    figures = {f"{name} swapped": mean for name, mean in found.items()}
    return figures | {"constant": most / problems}


def table(rows: dict[str, dict[str, float]]) -> str:
    """The rows as Markdown, with their mean."""
    names = list(next(iter(rows.values())))
    mean = {name: statistics.mean(row[name] for row in rows.values()) for name in names}
    lines = ["| seed | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for seed, row in {**rows, "mean": mean}.items():
        cells = [f"{row[n]:,.0f}" if abs(row[n]) >= 100 else f"{row[n]:.3f}" for n in names]
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run the seeds and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", choices=RECIPES, default="quickstart")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=Path, help="Keep the runs here.")
    parser.add_argument("overrides", nargs="*", help="More settings, KEY=VALUE.")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (args.runs or Path(scratch)).resolve()
        rows = {}
        for seed in args.seeds:
            rows[str(seed)] = run_seed(args.recipe, seed, args.threads, folder, args.overrides)
            print(table({str(seed): rows[str(seed)]}), flush=True)
    text = table(rows)
    print(text)
    if args.out is not None:
        command = " ".join(["python", "benchmarks/quickstart.py", *sys.argv[1:]])
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(f"# {args.recipe} over seeds\n\nMade by `{command}`.\n\n{text}\n")


if __name__ == "__main__":
    main()
