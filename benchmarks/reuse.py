"""What the quickstart learns with reused log-probs of the sampler, and with a pass for all of them.

    python -m benchmarks.reuse --runs FOLDER [--seeds 1 2 3] [--out benchmarks/results/reuse.md]

Trains 40 steps of the quickstart for each seed with `algorithm.correction.mode=auto`, which reuses,
and `recompute`, in turns, both from the seed's warm start, which is made before. Runs that FOLDER
holds already are not trained again. The two differ by the rounding of log-probs, after which
answers fall apart; so their held-out accuracies agree as two seeds of the sampler do, not by the
bit. CPU seconds are those of the whole command, evaluations included.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console

from winnow.builders.warm_start import make_warm_start
from winnow.config.load import load_recipe
from winnow.observe.console import make_console
from winnow.observe.jsonl import read_metrics

MODES = ("auto", "recompute")
METRIC = "eval/sort_digits/pass@1"
STEPS, PROBLEMS, ANSWERS = 40, 500, 4
T_975 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}
"""Student's quantile by the number of seeds."""


def train(folder: Path, seed: int, mode: str) -> Path:
    """Train a run unless it is there; returns its folder, with its CPU seconds in a file."""
    run = folder / f"{mode}-{seed}"
    if (run / "cpu_s.json").exists():
        return run
    command = [
        *(str(Path(sys.executable).with_name("winnow")), "train", "quickstart", f"seed={seed}"),
        *(f"algorithm.correction.mode={mode}", f"run.dir={folder}", f"run.name={run.name}"),
        *(f"data.task.eval_problems={PROBLEMS}", f"evaluation.n={ANSWERS}"),
        *(f"trainer.steps={STEPS}", "trainer.save_every=null", "observe.console=off"),
    ]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    (run / "cpu_s.json").write_text(json.dumps(spent))
    return run


def row(run: Path) -> dict[str, float]:
    """Return accuracy by step of evaluation, means over steps, and the cost of a run."""
    records = read_metrics(run / "metrics.jsonl")
    steps = [record for record in records if record["step"]]
    figures = {f"step {r['step']}": float(r[METRIC]) for r in records if METRIC in r}
    figures["share in a pass"] = statistics.mean(s["actor/old_pass"] for s in steps)
    figures["pass, s a step"] = statistics.mean(s["time/old_logprobs_s"] for s in steps)
    figures["CPU-s"] = json.loads((run / "cpu_s.json").read_text())
    return figures


def table(rows: dict[tuple[int, str], dict[str, float]], seeds: list[int]) -> str:
    """Return the runs as Markdown, and the mean difference of the modes with its interval."""
    names = list(rows[seeds[0], MODES[0]])
    lines = [f"| seed | mode | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for (seed, mode), figures in rows.items():
        texts = (f"{figures[n]:.0f}" if n == "CPU-s" else f"{figures[n]:.3f}" for n in names)
        lines.append(f"| {seed} | {mode} | {' | '.join(texts)} |")
    cells = []
    for name in names:
        gaps = [rows[s, MODES[0]][name] - rows[s, MODES[1]][name] for s in seeds]
        text = f"{statistics.mean(gaps):+.3f}"
        if len(gaps) in T_975:
            half = T_975[len(gaps)] * statistics.stdev(gaps) / math.sqrt(len(gaps))
            text += f" ± {half:.3f}"
        cells.append(text)
    return "\n".join([*lines, f"| mean | difference | {' | '.join(cells)} |"])


def main() -> None:
    """Train what is absent, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, required=True)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder, rows = args.runs.resolve(), {}
    for seed in args.seeds:
        config = load_recipe("quickstart", [f"seed={seed}"])
        make_warm_start(config, False, make_console("off", Console()))
        for mode in MODES:
            rows[seed, mode] = row(train(folder, seed, mode))
            print(seed, mode, rows[seed, mode], flush=True)
    text = table(rows, args.seeds)
    print(text)
    if args.out is not None:
        command = f"python -m benchmarks.reuse {' '.join(sys.argv[1:])}"
        args.out.write_text(f"# Reused log-probs of the sampler\n\n`{command}`\n\n{text}\n")


if __name__ == "__main__":
    main()
