"""Families of algorithms, and the ladder of the DAPO paper, over seeds on the quickstart's task.

    python benchmarks/ladder.py [--families grpo dapo ...] [--seeds 1 2 3] [--steps 40]
        [--runs DIR] [--out benchmarks/results/ladder.md] [--plot docs/ladder.png]
        [--docs docs/algorithms.md] [--only-report]
    python benchmarks/ladder.py --parts digits smollm2 --runs DIR
        [--out benchmarks/results/ladder_parts.md] [--plot docs/ladder_parts.png] [--only-report]

Trains each shipped small recipe, and each rung of the ladder (GRPO, then cumulatively overlong
filtering, clip-higher, soft overlong penalty, token-level loss, dynamic sampling), in a process of
its own, one after another, seed by seed. All runs of a seed begin
from the same warm start, which is evaluated once; each is evaluated at its end, on 1,000 held-out
problems with 8 sampled answers and a greedy one each.

The table and the picture are written anew after each run, from what there is by then. With --runs
finished runs are kept there and not repeated, so that a benchmark that was stopped goes on. They
are known by their commands: after a change of a recipe or of the code take another folder.

With --parts it trains DAPO, and DAPO without each of its parts, by the plan of `ladder_report.py`,
seed by seed; a run that was stopped goes on from its checkpoint.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder_report import (
    PLANS,
    Plan,
    Results,
    draw,
    draw_parts,
    parts_report,
    put_between_marks,
    report,
    summary,
)

from winnow.observe.jsonl import read_metrics

AT_END = (
    *("data.task.eval_problems=1000", "evaluation.n=8", "evaluation.every=null"),
    *("evaluation.before=false", "trainer.save_every=null"),
)
"""How families and rungs are evaluated, and that they save at the end only."""
FAMILIES = ("grpo", "dapo", "drgrpo", "rloo", "ppo", "reinforce_pp", "gspo", "cispo", "remax")
RUNGS = (
    ("grpo", ()),
    ("+ overlong filtering", ("algorithm.overlong_filtering=true",)),
    ("+ clip-higher", ("algorithm.policy_loss.clip_high=0.28",)),
    ("+ soft overlong penalty", ("reward.overlong.enabled=true",)),
    ("+ token-level loss", ("algorithm.aggregation=token-mean",)),
    ("+ dynamic sampling", ("sampling/filter=variance",)),
)
"""What each adds to those before it; the first is the family of that name."""
START = "start"
KEPT = "ladder.json"
"""What is kept of a run in its folder."""


@dataclass(frozen=True)
class Job:
    """One run to be made."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()
    common: tuple[str, ...] = AT_END
    resumes: bool = False
    """Whether half a run goes on; else it is made again, as it says nothing of its CPU time."""

    def command(self, seed: int, steps: int, runs: Path) -> list[str]:
        """How it is started; of the start only the evaluation counts, so one step will do."""
        steps = 1 if self.name == START else steps
        return [
            *(str(Path(sys.executable).with_name("winnow")), "train", self.recipe),
            *(f"seed={seed}", "run.threads=1", f"run.dir={runs}", f"run.name={self.key(seed)}"),
            *(f"trainer.steps={steps}", "observe.console=off"),
            *("observe.rollout_text_groups=0", *self.common, *self.overrides),
        ]

    def key(self, seed: int) -> str:
        """The name of its folder."""
        return f"{self.name.replace('+ ', 'plus-').replace(' ', '-')}-seed-{seed}"


def jobs(families: Sequence[str], with_rungs: bool) -> Iterator[Job]:
    """Everything to run with one seed, in order; the start comes first and costs one step."""
    yield Job(START, "quickstart", ("optim.warmup_steps=0", "evaluation.before=true"))
    yield from (Job(family, family) for family in families if family != "remax")
    if with_rungs:
        overrides: tuple[str, ...] = ()
        for name, more in RUNGS:
            overrides += more
            if name not in families:
                yield Job(name, "grpo", overrides)
    yield from (Job(family, family) for family in families if family == "remax")


def part_jobs(plan: Plan) -> Iterator[Job]:
    """All arms of a plan."""
    for arm, override in plan.arms.items():
        overrides = (override,) if override else ()
        yield Job(arm, plan.recipe, overrides, common=plan.settings, resumes=True)


def finished(job: Job, seed: int, steps: int, runs: Path) -> dict[str, Any] | None:
    """What is known of a run from before, if it was started with this command."""
    kept = runs / job.key(seed) / KEPT
    known: dict[str, Any] | None = json.loads(kept.read_text()) if kept.is_file() else None
    return known if known and known["command"] == job.command(seed, steps, Path())[2:] else None


def measure(job: Job, seed: int, steps: int, runs: Path) -> dict[str, Any]:
    """One whole run, or what is known of it from before."""
    known = finished(job, seed, steps, runs)
    if known is not None:
        return known
    folder = runs / job.key(seed)
    if not job.resumes:
        shutil.rmtree(folder, ignore_errors=True)
    before = _cpu_s()
    environment = os.environ | {"WINNOW_CACHE": str(runs / "cache")}
    subprocess.run(job.command(seed, steps, runs), env=environment, check=True)
    cpu = _cpu_s() - before
    found = figures(read_metrics(folder / "metrics.jsonl"), at_start=job.name == START)
    found |= {"command": job.command(seed, steps, Path())[2:], "cpu_s": cpu}
    (folder / KEPT).write_text(json.dumps(found))
    return found


def held_out(record: Mapping[str, float], figure: str) -> float | None:
    """Mean of a figure over the held-out problems of all sources, None where it is absent."""
    sources = [key.removesuffix("/prompts") for key in record if key.endswith("/prompts")]
    parts = [(record[f"{s}/prompts"], record.get(f"{s}/{figure}")) for s in sources]
    known = [(problems, value) for problems, value in parts if value is not None]
    total = sum(problems for problems, _ in known)
    return sum(problems * value for problems, value in known) / total if known else None


def figures(records: Sequence[dict[str, float]], at_start: bool = False) -> dict[str, Any]:
    """What the tables and the picture show of a run."""
    evaluated = records[0] if at_start else records[-1]
    names = ("pass@1", "greedy", "length", "truncated")
    found: dict[str, Any] = {name: held_out(evaluated, name) for name in names}
    if at_start:
        return found
    steps = [record for record in records if record["step"] > 0]
    for name in ("clip_low", "clip_high", "dual_clip"):
        shares = [r[f"actor/{name}"] for r in steps if f"actor/{name}" in r]
        found[name] = sum(shares) / len(shares) if shares else None
    found["accuracy_by_step"] = [r.get("sampling/accuracy", math.nan) for r in steps]
    found["tokens_by_step"] = [r["sampling/tokens/generated"] for r in steps]
    found["tokens"] = sum(found["tokens_by_step"])
    curve = [(int(r["step"]), held_out(r, "pass@1")) for r in records]
    found["curve"] = [(step, value) for step, value in curve if value is not None]
    return found


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Make the runs, and write table and picture after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--seeds", type=int, nargs="+", help="1 2 3; of --parts all of the plan.")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--no-ladder", action="store_true", help="Only the families.")
    parser.add_argument("--runs", type=Path, help="Keep the runs here, and go on with those there.")
    parser.add_argument("--out", type=Path, help="Write the tables to this Markdown file.")
    parser.add_argument("--plot", type=Path, help="Draw the ladder, or parts, into a PNG.")
    parser.add_argument("--docs", type=Path, help="Put the short tables into this page.")
    parser.add_argument("--only-report", action="store_true", help="Of what is in --runs already.")
    parser.add_argument("--parts", nargs="+", choices=PLANS, help="DAPO without each part.")
    args = parser.parse_args()
    results: Results = {}
    with tempfile.TemporaryDirectory() as scratch:
        runs = (args.runs or Path(scratch)).resolve()
        if args.parts:
            train_parts(args, runs)
            return
        args.seeds = args.seeds or [1, 2, 3]
        for seed in args.seeds:
            for job in jobs(args.families, with_rungs=not args.no_ladder):
                found = None if args.only_report else measure(job, seed, args.steps, runs)
                found = found or finished(job, seed, args.steps, runs)
                if found is not None:
                    results.setdefault(job.name, {})[seed] = found
                    print(job.key(seed), {k: v for k, v in found.items() if isinstance(v, float)})
                    sys.stdout.flush()
                    if not args.only_report:
                        write(results, args)
    write(results, args)


def train_parts(args: argparse.Namespace, runs: Path) -> None:
    """Make the runs of the plans, each plan's in its folder, and write the page after each.

    What finished runs gave is written beside the page, and counts where their folders are gone.
    """
    if args.out is not None and (records := args.out.with_suffix(".json")).is_file():
        for key, found in json.loads(records.read_text()).items():
            (runs / key).mkdir(parents=True, exist_ok=True)
            (runs / key / KEPT).write_text(json.dumps(found))
    for task in args.parts:
        plan = PLANS[task]
        for seed in args.seeds or plan.seeds:
            for job in () if args.only_report else part_jobs(plan):
                measure(job, seed, plan.steps, runs / task)
                write_parts(args, runs)
    write_parts(args, runs)


def write_parts(args: argparse.Namespace, runs: Path) -> None:
    """The plans and what their runs show so far."""
    pages: dict[str, Results] = {task: {} for task in args.parts}
    for task in args.parts:
        plan = PLANS[task]
        for job in part_jobs(plan):
            known = {seed: finished(job, seed, plan.steps, runs / task) for seed in plan.seeds}
            pages[task][job.name] = {seed: run for seed, run in known.items() if run is not None}
    if args.out is not None:
        args.out.write_text(parts_report(pages))
        runs_made = {
            f"{task}/{Job(arm, '').key(seed)}": run
            for task, results in pages.items()
            for arm, seeds in results.items()
            for seed, run in seeds.items()
        }
        lines = [f"{json.dumps(key)}: {json.dumps(run)}" for key, run in runs_made.items()]
        args.out.with_suffix(".json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if args.plot is not None:
        draw_parts(pages, args.plot)


def write(results: Results, args: argparse.Namespace) -> None:
    """Tables and picture of what there is."""
    rungs = [] if args.no_ladder else [name for name, _ in RUNGS]
    options = ["--seeds", *map(str, args.seeds), "--steps", str(args.steps)]
    command = " ".join(["python benchmarks/ladder.py", *options])
    text = report(results, args.families, rungs, args.steps, command)
    if args.out is not None:
        args.out.write_text(text)
    if args.docs is not None:
        short = summary(results, args.families, rungs, args.steps)
        args.docs.write_text(put_between_marks(short, args.docs.read_text()))
    if args.plot is not None and rungs and all(rung in results for rung in rungs):
        draw(text, args.plot)


if __name__ == "__main__":
    main()
