"""Sensitivity and false alarms of `winnow doctor RUN`: runs made sick on purpose, and healthy ones.

    python -m benchmarks.doctor [--runs DIR] [--seeds 1 2 3 4 5] [--healthy 20] [--only NAME …]
        [--out benchmarks/results/doctor.md] [--only-report]

Each run is the quickstart's task and warm start, smaller: 30 steps of 16 prompts x 8 answers, sick
ones 20, in a process of its own forked from this one, one after another. What differs between
seeds is the run's seed, and with it the prompts, every token and each shuffle. With --runs the
records are kept, and are not made again: rules can be changed and held against the same runs.
Mild diseases have the first three seeds.

A sick run counts as found where one of the findings that its disease is to have is there. A false
alarm is any finding of severity warning or higher in a healthy run.
"""

from __future__ import annotations

import argparse
import math
import os
import resource
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from winnow.observe.files import RunFolder
from winnow.views.doctor import diagnose_run

SICK = Path(__file__).parent / "sick"
COMMON = (
    *("warm_start.seed=0", "run.threads=1", "observe.console=off", "trainer.save_every=null"),
    *("sampling.groups_per_step=16", "trainer.mini_batch_groups=4", "trainer.steps=30"),
    *("optim.warmup_steps=3", "evaluation.every=5", "evaluation.n=2", "evaluation.greedy=false"),
    "data.task.eval_problems=100",
)


SICK_STEPS = "trainer.steps=20"


class Disease(NamedTuple):
    """A way to make a run sick, and the findings any of which tells of it."""

    findings: tuple[str, ...]
    overrides: tuple[str, ...]
    recipe: str = "grpo"
    seen: int = 0
    """Seeds that its rule was chosen by: those given are counted from behind them."""


def _scored_by(name: str) -> tuple[str, ...]:
    return f"reward.function.path={SICK / 'rewards.py'}", f"reward.function.name={name}"


_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
)


def _with_tools(calls: str) -> tuple[str, ...]:
    tools = f"environment.tools=[{SICK / 'environments.py'}:rest]", f"environment.calls='{calls}'"
    return "environment=tools", *tools, f'data.chat_template="{_TEMPLATE}"'


DISEASES = {
    "a scorer that wants another format": Disease(
        ("reward_flat_wrong",), _scored_by("demands_another_format")
    ),
    "a scorer that finds all right": Disease(("reward_flat_right",), _scored_by("always_right")),
    "labels of one row in twenty right": Disease(
        ("filtered",),
        (*_scored_by("rarely_right"), "sampling.max_groups_per_step=80", "trainer.steps=12"),
        "quickstart",
    ),
    "a limit of 24 tokens": Disease(("cut_off",), ("rollout.max_response_tokens=24",)),
    "an entropy bonus of -2": Disease(
        ("entropy_collapse",), ("algorithm.entropy_coef=-2",), seen=5
    ),
    "an entropy bonus of 1": Disease(("entropy_blow_up",), ("algorithm.entropy_coef=1",)),
    "an engine that drifts": Disease(
        ("mismatch",),
        ("rollout/engine=custom", f"rollout.engine.path={SICK / 'engines.py'}:Drifting"),
    ),
    "a learning rate of 1e-8": Disease(("clip_never",), ("optim.lr=1e-8",)),
    "a learning rate of 5e-3": Disease(("clip_often",), ("optim.lr=5e-3",)),
    "rewards with outliers": Disease(("gradient_spikes",), _scored_by("has_outliers"), "drgrpo"),
    "a reward for length": Disease(
        ("length_hacking",), (*_scored_by("pays_for_length"), "algorithm.aggregation=token-mean")
    ),
    "a reward for a phrase": Disease(("reward_hacking",), _scored_by("pays_for_a_phrase")),
    "a scorer that fails at times": Disease(("scoring_fails",), _scored_by("fails_at_times")),
    "a slow scorer beside async learning": Disease(
        ("learner_starves", "slow_scoring"),
        (*_scored_by("is_slow"), "trainer.steps=10", "sampling/filter=none"),
        "dapo_async",
    ),
    "calls that are read in another form": Disease(
        ("no_calls",), (*_with_tools("(?P<digits>[0-9]+)=[?]"), "trainer.steps=10")
    ),
    "an environment that fails at times": Disease(
        ("environment_faults",),
        (
            *("environment=custom", f"environment.path={SICK / 'environments.py'}:Fragile"),
            *(f'data.chat_template="{_TEMPLATE}"', "trainer.steps=10"),
        ),
    ),
    "a lookahead of eight steps": Disease(
        ("stale",), ("sampling.max_staleness=8", "sampling.lookahead=8"), "dapo_async"
    ),
}
MILD = {
    "a limit of 48 tokens": Disease(("cut_off",), ("rollout.max_response_tokens=48",)),
    "an entropy bonus of -0.5": Disease(("entropy_collapse",), ("algorithm.entropy_coef=-0.5",)),
    "an entropy bonus of 0.2": Disease(("entropy_blow_up",), ("algorithm.entropy_coef=0.2",)),
    "a learning rate of 1.2e-3": Disease(("clip_often",), ("optim.lr=1.2e-3",)),
    "a scorer that fails for one answer in 200": Disease(
        ("scoring_fails",), _scored_by("fails_rarely")
    ),
}
"""The same, weaker: the learning rate is three times that of a healthy run, not twelve times."""
HEALTHY = (
    *("quickstart", "grpo", "dapo", "drgrpo", "rloo", "ppo", "gspo", "cispo"),
    *("reinforce_pp", "dapo_one_step_off"),
)


class Job(NamedTuple):
    """One run."""

    name: str
    disease: str
    """Empty for a healthy run."""
    recipe: str
    seed: int
    overrides: tuple[str, ...]


def jobs(seeds: Sequence[int], healthy: int, only: Sequence[str]) -> Iterator[Job]:
    """Yield the runs, the healthy ones first."""
    for number in range(healthy):
        recipe = HEALTHY[number % len(HEALTHY)]
        seed = seeds[0] + 10 + number
        yield Job(f"healthy-{recipe}-{seed}", "", recipe, seed, ())
    for which, chosen in ((DISEASES, seeds), (MILD, seeds[:3])):
        for name, disease in which.items():
            for seed in chosen if not only or name in only else ():
                number = seed + disease.seen
                slug = f"{name.replace(' ', '-')}-{number}"
                yield Job(slug, name, disease.recipe, number, (SICK_STEPS, *disease.overrides))


def train(job: Job, runs: Path) -> float:
    """Make a run in a forked process; return its seconds of CPU. A run may end with an error."""
    words = [
        *("winnow", "train", job.recipe, *COMMON, *job.overrides),
        *(f"run.seed={job.seed}", f"run.dir={runs}", f"run.name={job.name}", "run.resume=never"),
    ]
    if job.recipe == "ppo":
        words += ["critic.warmup_steps=2", "critic.optim.warmup_steps=2"]
    shutil.rmtree(runs / job.name, ignore_errors=True)  # one that was broken off
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child = os.fork()
    if not child:
        output = os.open(runs / f"{job.name}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = words
        from winnow.cli.main import main as command

        try:
            command()
        except SystemExit as end:
            os._exit(int(end.code or 0))
        finally:
            os._exit(1)
    os.waitpid(child, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def found_in(job: Job, runs: Path) -> set[str]:
    """Name what doctor finds in a run, notes left out."""
    _, findings, _ = diagnose_run(RunFolder.open(runs / job.name))
    return {finding.name for finding in findings if finding.severity != "note"}


def wilson(found: int, of: int) -> str:
    """Write a share with its 95 % interval (Wilson)."""
    z, share = 1.96, found / of
    middle = (share + z**2 / (2 * of)) / (1 + z**2 / of)
    half = z / (1 + z**2 / of) * math.sqrt(share * (1 - share) / of + z**2 / (4 * of**2))
    low, high = max(middle - half, 0.0), min(middle + half, 1.0)
    return f"{share:.0%} ({low:.0%} to {high:.0%})"


def _table(
    found: Mapping[Job, set[str]], diseases: Mapping[str, Disease], title: str
) -> Iterator[str]:
    """Yield the rows of diseases, and one of all."""
    yield f"| {title} | expected | runs | found | also found |"
    yield "|---|---|---|---|---|"
    hits = runs = 0
    for name, disease in diseases.items():
        ill = [job for job in found if job.disease == name]
        if not ill:
            continue
        right = sum(bool(found[job] & {*disease.findings}) for job in ill)
        others = Counter(n for job in ill for n in found[job] - {*disease.findings})
        also = ", ".join(f"{n} {count}" for n, count in others.most_common())
        expected = " or ".join(disease.findings)
        yield f"| {name} | {expected} | {len(ill)} | {wilson(right, len(ill))} | {also} |"
        hits, runs = hits + right, runs + len(ill)
    if runs:
        yield f"| all | | {runs} | {wilson(hits, runs)} | |"


def report(made: Sequence[Job], runs: Path, cpu_s: float) -> str:
    """Write the tables."""
    found = {job: found_in(job, runs) for job in made if (runs / f"{job.name}.cpu").is_file()}
    well = [job for job in found if not job.disease]
    lines = [
        "# What `winnow doctor RUN` finds",
        "",
        f"`python -m benchmarks.doctor`: {len(found)} runs of the quickstart's task, {cpu_s:,.0f}",
        "seconds of CPU in all. A healthy run has 30 steps of 16 prompts x 8 answers, a sick one",
        "20; one thread. Seeds: of healthy runs 11 to 30, of sick ones 1 to 5, with an entropy",
        "bonus of -2 6 to 10, of mild ones 1 to 3. Intervals are Wilson's, 95 %.",
        "",
        "Bounds of the rules were chosen by hand and tried on 16 runs of other seeds (101, 111,",
        "112), which are not in the table. Two rules have changed since. With four of the five",
        "seeds seen, the one for updates left out was merged into gradient_spikes. That for the",
        "collapse of entropy asked for a fall to a third of the start, and found 2 of the seeds 1",
        "to 5: entropy fell to 0.31 to 0.36 there (mean of five steps), in the healthy runs 11 to",
        "20 to 0.53 to 0.65. It now asks for a fall below a half that is also larger than that of",
        "the share of wrong answers. Seeds 6 to 10, the healthy runs 21 to 30 and the mild ones",
        "were made after that, and the rules have not changed since.",
        "",
        "The model is tiny and the diseases of the first table are strong: it says that the rules",
        "work and stay quiet. The second shows how weaker ones escape them in 20 steps.",
        "",
        *_table(found, DISEASES, "made sick by"),
        "",
        *_table(found, MILD, "made somewhat sick by"),
    ]
    if well:
        alarms = [job for job in well if found[job]]
        lines += [
            *("", f"Of {len(well)} healthy runs ({', '.join({job.recipe: 0 for job in well})}),"),
            f"{len(alarms)} had a finding: {wilson(len(alarms), len(well))}"
            + "".join(f"; {job.name}: {', '.join(sorted(found[job]))}" for job in alarms)
            + ".",
        ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the runs that are not there, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, default=None, help="folder that keeps the records")
    parser.add_argument("--seeds", type=int, nargs="*", default=[1, 2, 3, 4, 5])
    parser.add_argument("--healthy", type=int, default=20)
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--only-report", action="store_true", help="of the runs that are there")
    asked = parser.parse_args()
    import winnow.commands.train  # noqa: F401  imported once, for all runs

    with tempfile.TemporaryDirectory() as scratch:
        runs = asked.runs or Path(scratch)
        runs.mkdir(parents=True, exist_ok=True)
        made = list(jobs(asked.seeds, asked.healthy, asked.only))
        for job in made:
            seconds = runs / f"{job.name}.cpu"
            if not seconds.is_file() and not asked.only_report:
                began = time.monotonic()
                seconds.write_text(f"{train(job, runs):.1f}")
                taken = time.monotonic() - began
                print(f"{job.name}: {seconds.read_text()} s CPU, {taken:.0f} s", flush=True)
        known = [runs / f"{job.name}.cpu" for job in made]
        cpu_s = sum(float(file.read_text()) for file in known if file.is_file())
        text = report(made, runs, cpu_s)
        if asked.out is not None:
            asked.out.write_text(text)
        print(text)


if __name__ == "__main__":
    main()
