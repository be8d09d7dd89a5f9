"""Families of algorithms, and the ladder of the DAPO paper, over seeds on the quickstart's task.

    python benchmarks/ladder.py [--families grpo dapo ...] [--seeds 1 2 3] [--steps 40]
        [--runs DIR] [--out benchmarks/results/ladder.md] [--plot docs/ladder.png]

Trains each shipped small recipe, and each rung of the ladder (GRPO, then cumulatively overlong
filtering, clip-higher, soft overlong penalty, token-level loss, dynamic sampling), in a process of
its own, one after another, seed by seed. All runs of a seed begin
from the same warm start, which is evaluated once; each is evaluated at its end, on 1,000 held-out
problems with 8 sampled answers and a greedy one each.

The table and the picture are written anew after each run, from what there is by then. With --runs
finished runs are kept there and not repeated, so that a benchmark that was stopped goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ladder_report import Results, draw, report

from winnow.config.load import load_recipe
from winnow.observe.jsonl import read_metrics

PROBLEMS, ANSWERS = 1000, 8
SOURCE = "eval/sort_digits"
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


@dataclass(frozen=True)
class Job:
    """One run to be made."""

    name: str
    recipe: str
    overrides: tuple[str, ...] = ()

    def command(self, seed: int, steps: int, runs: Path) -> list[str]:
        """How it is started."""
        return [
            *(str(Path(sys.executable).with_name("winnow")), "train", self.recipe),
            *(f"seed={seed}", "run.threads=1", f"run.dir={runs}", f"run.name={self.key(seed)}"),
            *(f"trainer.steps={steps}", "trainer.save_every=null", "observe.console=off"),
            *("observe.rollout_text_groups=0", f"data.task.eval_problems={PROBLEMS}"),
            *(f"evaluation.n={ANSWERS}", "evaluation.every=null", "evaluation.before=false"),
            *self.overrides,
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


def measure(job: Job, seed: int, steps: int, runs: Path) -> dict[str, Any]:
    """One whole run, or what is known of it from before."""
    steps = 1 if job.name == START else steps
    folder, command = runs / job.key(seed), job.command(seed, steps, runs)
    kept = folder / "ladder.json"
    names = {"run": {"description", "dir", "name"}}
    config = load_recipe(job.recipe, command[3:]).model_dump(mode="json", exclude=names)
    if kept.is_file():
        known: dict[str, Any] = json.loads(kept.read_text())
        if known["config"] == config:
            return known
    # Half a run says nothing of its CPU time: it is made again.
    shutil.rmtree(folder, ignore_errors=True)
    before = _cpu_s()
    subprocess.run(command, env=os.environ | {"WINNOW_CACHE": str(runs / "cache")}, check=True)
    cpu = _cpu_s() - before
    records = read_metrics(folder / "metrics.jsonl")
    found = {"config": config, "cpu_s": cpu, **figures(records, at_start=job.name == START)}
    kept.write_text(json.dumps(found))
    return found


def figures(records: Sequence[dict[str, float]], at_start: bool = False) -> dict[str, Any]:
    """What the tables and the picture show of a run."""
    evaluated = records[0] if at_start else records[-1]
    names = ("pass@1", "greedy", "length", "truncated")
    found: dict[str, Any] = {name: evaluated[f"{SOURCE}/{name}"] for name in names}
    if at_start:
        return found
    steps = [record for record in records if record["step"] > 0]
    for name in ("clip_low", "clip_high", "dual_clip"):
        shares = [r[f"actor/{name}"] for r in steps if f"actor/{name}" in r]
        found[name] = sum(shares) / len(shares) if shares else None
    found["accuracy_by_step"] = [r["sampling/accuracy"] for r in steps]
    found["tokens_by_step"] = [r["sampling/tokens/generated"] for r in steps]
    found["tokens"] = sum(found["tokens_by_step"])
    return found


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Make the runs, and write table and picture after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--no-ladder", action="store_true", help="Only the families.")
    parser.add_argument("--runs", type=Path, help="Keep the runs here, and go on with those there.")
    parser.add_argument("--out", type=Path, help="Write the tables to this Markdown file.")
    parser.add_argument("--plot", type=Path, help="Draw the ladder into this PNG.")
    args = parser.parse_args()
    command = " ".join(["python", "benchmarks/ladder.py", *sys.argv[1:]])
    rungs = [] if args.no_ladder else [name for name, _ in RUNGS]
    results: Results = {}
    with tempfile.TemporaryDirectory() as scratch:
        runs = (args.runs or Path(scratch)).resolve()
        for seed in args.seeds:
            for job in jobs(args.families, with_rungs=bool(rungs)):
                found = measure(job, seed, args.steps, runs)
                results.setdefault(job.name, {})[seed] = found
                print(job.key(seed), {k: v for k, v in found.items() if isinstance(v, float)})
                sys.stdout.flush()
                if args.out is not None:
                    text = report(results, args.families, rungs, args.steps, command)
                    args.out.write_text(text)
                if args.plot is not None and rungs and all(rung in results for rung in rungs):
                    draw(results, rungs, args.plot)
    print(report(results, args.families, rungs, args.steps, command))


if __name__ == "__main__":
    main()
