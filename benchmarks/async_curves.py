"""Learning curves of the trainer's modes, at equal steps and at equal time.

    python -m benchmarks.async_curves [--seeds 1 2 3] [--modes sync one_step_off …] [--quickstart]
        [--runs DIR] [--out benchmarks/results/async_curves.md] [--plot docs/async.png]
        [--only-report] [KEY=VALUE …]

Trains the recipes dapo, dapo_one_step_off and dapo_async as they are shipped, for each seed, one
after another; with --quickstart the quickstart with trainer/mode as a user would set it. The runs
of a seed begin from one warm start, made before, and are asked the same held-out problems.
`drop-stale` is dapo_async with the rules of drop_stale.py. Time is that of training alone, without
evaluations; `wall` is that of the whole command.

Differences from sync are paired by seed, with Student's t over seeds, and by problem over all seeds
as `winnow compare` pairs them.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.async_modes import AHEAD, ASYNC, Variant, busy_s, children_s, interval

from winnow.evaluation.compare import paired_test, read_answers
from winnow.observe.jsonl import read_metrics

SYNC = "sync"


@dataclass(frozen=True)
class Mode:
    """A recipe as it is shipped, or as a user would change it."""

    recipe: str
    variant: Variant


SHIPPED = {
    SYNC: Mode("dapo", Variant(())),
    "one_step_off": Mode("dapo_one_step_off", Variant(())),
    "async": Mode("dapo_async", Variant(())),
    "drop-stale": Mode("dapo_async", Variant((), ())),
}
QUICKSTART = {
    SYNC: Mode("quickstart", Variant(())),
    "one_step_off": Mode("quickstart", Variant(("trainer/mode=one_step_off",))),
    "async": Mode("quickstart", Variant((*ASYNC, *AHEAD))),
}
COLORS = {SYNC: "#6b7280", "one_step_off": "#2a6fbb", "async": "#d9742b", "drop-stale": "#8a3ffc"}
EVALUATION = ("evaluation.every=5", "evaluation.greedy=false", "data.task.eval_problems=400")
FIGURE = "eval/sort_digits/pass@1"


@dataclass(frozen=True)
class Course:
    """What became of one run."""

    folder: Path
    wall_s: float
    others: float
    """Cores that other processes kept busy meanwhile."""
    steps: list[int]
    """At which it was evaluated."""
    seconds: list[float]
    """Of training until then."""
    accuracy: list[float]
    """Held-out, sampled."""
    stale: float
    """Share of the generated tokens that were thrown away for being late."""

    def at_time(self, seconds: float) -> float:
        """The accuracy after so much training, on the line between two evaluations."""
        return float(np.interp(seconds, self.seconds, self.accuracy))


def run(mode: Mode, seed: int, extra: Sequence[str], folder: Path) -> None:
    """Train, unless that was done before."""
    kept = folder / "wall.json"
    if kept.exists():
        return
    shutil.rmtree(folder, ignore_errors=True)
    words = [
        *(mode.recipe, f"seed={seed}", f"run.dir={folder.parent}", f"run.name={folder.name}"),
        *("observe.console=off", "trainer.save_every=null", *EVALUATION, *extra),
        *mode.variant.overrides,
    ]
    began, busy, own = time.perf_counter(), busy_s(), children_s()
    subprocess.run(mode.variant.command(words), check=True, stdout=subprocess.DEVNULL)
    wall_s = time.perf_counter() - began
    others = (busy_s() - busy - (children_s() - own)) / wall_s
    kept.write_text(json.dumps({"wall_s": wall_s, "others": others}))


def course_of(folder: Path) -> Course:
    """Read a run."""
    seconds, at = 0.0, list[tuple[int, float, float]]()
    records = read_metrics(folder / "metrics.jsonl")
    for record in records:
        if record["step"] > 0:
            seconds += record["time/step_s"] - record.get("time/evaluate_s", 0.0)
        if FIGURE in record:
            at.append((int(record["step"]), seconds, float(record[FIGURE])))
    steps, times, accuracy = (list(column) for column in zip(*at, strict=True))
    stale, generated = (
        sum(float(record.get(f"sampling/tokens/{name}", 0.0)) for record in records)
        for name in ("stale", "generated")
    )
    kept = json.loads((folder / "wall.json").read_text())
    return Course(folder, kept["wall_s"], kept["others"], steps, times, accuracy, stale / generated)


Courses = Mapping[str, Mapping[int, Course]]
"""Mode → seed → run."""


def table(courses: Courses) -> list[str]:
    """The figures as Markdown."""
    lines = [
        "| mode | whole command, s | training, s | s a step | accuracy at the end, % "
        "| less sync's, by seed | less sync's, by problem "
        "| accuracy when the first mode of the seed is done, % | tokens thrown away |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for mode, runs in courses.items():
        seeds = sorted(runs)
        base = courses.get(SYNC, {})
        shared = [seed for seed in seeds if seed in base and mode != SYNC]
        soonest = {
            seed: min(own[seed].seconds[-1] for own in courses.values() if seed in own)
            for seed in seeds
        }
        cells = [
            _cell([runs[s].wall_s for s in seeds], ".0f"),
            _cell([runs[s].seconds[-1] for s in seeds], ".0f"),
            _cell([runs[s].seconds[-1] / runs[s].steps[-1] for s in seeds], ".2f"),
            _cell([100 * runs[s].accuracy[-1] for s in seeds], ".1f"),
            _cell([100 * (runs[s].accuracy[-1] - base[s].accuracy[-1]) for s in shared], "+.1f"),
            _by_problem([(base[s].folder, runs[s].folder) for s in shared]),
            _cell([100 * runs[s].at_time(soonest[s]) for s in seeds], ".1f"),
            f"{100 * np.mean([runs[s].stale for s in seeds]):.1f} %",
        ]
        lines.append(f"| {mode} | {' | '.join(cells)} |")
    return lines


def _cell(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    mean, half = interval(values)
    return f"{mean:{form}} ± {half:{form.removeprefix('+')}}"


def _by_problem(pairs: Sequence[tuple[Path, Path]]) -> str:
    """Pair the last evaluations by seed and problem."""
    before, after = list[float](), list[float]()
    for a, b in pairs:
        one, other = read_answers(str(a)).means, read_answers(str(b)).means
        before += one.values()
        after += (other[problem] for problem in one)
    if not before:
        return "-"
    found = paired_test(before, after)
    return f"{100 * found.difference:+.1f} ({100 * found.low:+.1f} to {100 * found.high:+.1f})"


def draw(courses: Courses, path: Path) -> None:
    """Draw held-out accuracy over steps and over seconds: each run thin, the mean over seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.4), dpi=150, layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True)
    for mode, runs in courses.items():
        color, mean = COLORS[mode], _mean_course(runs)
        for course in runs.values():
            _line(left, course.steps, course.accuracy, color, linewidth=0.8, alpha=0.35)
            _line(right, course.seconds, course.accuracy, color, linewidth=0.8, alpha=0.35)
        style: dict[str, Any] = {"linewidth": 2.2, "marker": "o", "markersize": 4}
        _line(left, mean[0], mean[2], color, label=mode, **style)
        _line(right, mean[1], mean[2], color, label=mode, **style)
        right.axvline(mean[1][-1], color=color, linewidth=1, linestyle=":")
    left.set_xlabel("step")
    left.set_ylabel("right answers, held out, sampled")
    right.set_xlabel("seconds of training (two cores)")
    seeds = max(len(runs) for runs in courses.values())
    left.set_title(f"at equal steps ({seeds} seeds)", loc="left", fontsize=11)
    right.set_title("at equal time (dotted: done)", loc="left", fontsize=11)
    for axis in (left, right):
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(color="#e5e7eb")
        axis.set_axisbelow(True)
        axis.set_xlim(left=0)
        axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    left.set_ylim(0.3, 1)
    left.legend(loc="lower right", frameon=False)
    figure.savefig(path)


def _mean_course(runs: Mapping[int, Course]) -> tuple[list[int], list[float], list[float]]:
    """Steps, and the means over seeds of seconds and accuracy at these."""
    every = list(runs.values())
    seconds = np.mean([course.seconds for course in every], axis=0)
    accuracy = np.mean([course.accuracy for course in every], axis=0)
    return every[0].steps, seconds.tolist(), accuracy.tolist()


def _line(axis: Any, x: Sequence[float], y: Sequence[float], color: str, **style: Any) -> None:
    axis.plot(x, y, color=color, **style)


def main() -> None:
    """Train what is missing, print the table, and keep table and picture if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument(
        "--modes", nargs="+", choices=SHIPPED, default=[SYNC, "one_step_off", "async"]
    )
    parser.add_argument("--quickstart", action="store_true")
    parser.add_argument("--runs", type=Path, help="Keep the runs here, and do not repeat them.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--only-report", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        modes = QUICKSTART if given.quickstart else SHIPPED
        folder = (given.runs or Path(scratch)).resolve()
        courses: dict[str, dict[int, Course]] = {mode: {} for mode in given.modes}
        for number, seed in enumerate(given.seeds):
            order = given.modes if number % 2 == 0 else given.modes[::-1]
            for mode in order:
                own = folder / f"{mode}-{seed}"
                if not given.only_report:
                    run(modes[mode], seed, given.overrides, own)
                if (own / "wall.json").exists():
                    course = courses[mode][seed] = course_of(own)
                    took = f"{course.wall_s:.0f} s, training {course.seconds[-1]:.0f} s"
                    print(mode, seed, took, f"{course.accuracy[-1]:.3f}", flush=True)
        report(given, {mode: runs for mode, runs in courses.items() if runs})


def report(given: argparse.Namespace, courses: Courses) -> None:
    """Print the table, and write what was asked for."""
    others = [course.others for runs in courses.values() for course in runs.values()]
    command = shlex.join(["python", "-m", "benchmarks.async_curves", *sys.argv[1:]])
    text = "\n".join(
        [
            "# Learning curves of the modes",
            "",
            f"Made by `{command}` on two cores; mean ± half of the 95 % interval "
            f"(Student's t over seeds). Other processes kept {min(others):.2f} to "
            f"{max(others):.2f} cores busy meanwhile.",
            "",
            *table(courses),
            "",
        ]
    )
    print(text)
    if given.out:
        given.out.write_text(text)
    if given.plot:
        draw(courses, given.plot)


if __name__ == "__main__":
    main()
