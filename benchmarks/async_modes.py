"""Step time of the trainer's modes, of a baseline that drops stale groups, and who waits for whom.

    python -m benchmarks.async_modes [--repetitions 5] [--steps 26] [--variants sync async …]
        [--runs DIR] [--out benchmarks/results/async_modes.md] [--only-report] [KEY=VALUE …]

Trains the quickstart from its warm start at a learning rate of 1e-30: all of the learning is done,
and the weights stand still in fp32, so that every variant samples from one distribution and every
group admitted has one true ending. Each run is a process of its own; the engine is in another, and
each of both has one thread. Variants run one after another in an order that alternates; a
repetition is a seed, which they share. Nothing is evaluated.

The first steps fill the pipeline and the last ones drain it; neither is counted. Intervals are
those of Student's t over repetitions, of ratios by pairs. Shares of idle time are from trace.json:
the engine idles where it serves no call, the learner where no phase of learning runs.

What was thrown away is written to its end by the embedded engine, at the same seeds: these are the
answers that the group would have had. The bias compares trained groups with all that qualify, up to
the first group that was still open when the run ended.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
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
from rich.console import Console

from winnow.builders.engines import make_local_engine
from winnow.builders.run import prepare_device, rollout_sampling
from winnow.builders.warm_start import make_warm_start
from winnow.config.load import load_recipe
from winnow.config.root import Config
from winnow.data.loader import PromptLoader, training_prompts
from winnow.evaluation.statistics import LEVEL, two_sided_bound
from winnow.observe.console import make_console
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics
from winnow.observe.ledger import read_ledger
from winnow.ranks.models import load_policy
from winnow.rewards.pipeline import RewardPipeline
from winnow.rewards.rewards import Rewards
from winnow.rollout.engine import generate, group_request

WARM_UP, DRAIN = 5, 3
"""Steps at the beginning and at the end that are not counted."""
STANDING = ("optim.lr=1e-30", "evaluation.before=false", "evaluation.max_prompts=1")
QUIET = ("observe.console=off", "trainer.save_every=null")
LEARNING = {"batch", "old_logprobs", "reference", "values", "update", "learn"}
SYNC = "sync"
OTHERS = 0.3
"""Cores that other processes may keep busy while a run is timed; else it is repeated."""
TRIES = 1
Figures = dict[str, float]


@dataclass(frozen=True)
class Variant:
    """A way to train, as words of a command line."""

    overrides: tuple[str, ...]
    baseline: tuple[str, ...] | None = None
    """Options of the baseline in `drop_stale.py`; None is Winnow."""

    def command(self, words: Sequence[str]) -> list[str]:
        if self.baseline is None:
            return [str(Path(sys.executable).with_name("winnow")), "train", *words]
        return [sys.executable, "-m", "benchmarks.drop_stale", *self.baseline, *words]


ASYNC = ("trainer/mode=async", "run.deterministic=false")
TWO = ("sampling.max_staleness=2",)
AHEAD = (*TWO, "sampling.lookahead=1")
VARIANTS = {
    SYNC: Variant(("rollout.engine.processes=1",)),
    "sync, engine in the run's process, 2 threads": Variant(("run.threads=2",)),
    "one_step_off": Variant(("trainer/mode=one_step_off",)),
    "one_step_off, staleness 2": Variant(("trainer/mode=one_step_off", *TWO)),
    "async": Variant(ASYNC),
    "async, staleness 2": Variant((*ASYNC, *TWO)),
    "async, staleness 2, one step ahead": Variant((*ASYNC, *AHEAD)),
    "drop-stale": Variant(ASYNC, ()),
    "drop-stale, staleness 2": Variant((*ASYNC, *TWO), ()),
    "drop-stale, staleness 2, 16 groups begin together": Variant((*ASYNC, *TWO), ("--refill=16",)),
    "drop-stale, staleness 2, 1.5 steps under way": Variant((*ASYNC, *TWO), ("--pool=1.5",)),
}
RATIOS = (
    *(("one_step_off", SYNC), ("async", SYNC), ("drop-stale", SYNC)),
    ("sync, engine in the run's process, 2 threads", SYNC),
    *(("one_step_off, staleness 2", SYNC), ("async, staleness 2", SYNC)),
    *(("async, staleness 2, one step ahead", SYNC), ("drop-stale, staleness 2", SYNC)),
    *(("async", "drop-stale"), ("async, staleness 2", "drop-stale, staleness 2")),
    ("async, staleness 2, one step ahead", "drop-stale, staleness 2"),
)
"""Variant and the one that it is compared with."""


def folder_name(variant: str) -> str:
    """Return the name of a variant's runs, less the seed."""
    return "".join(c if c.isalnum() else "_" for c in variant)


def overrides_of(variant: Variant, seed: int, steps: int, extra: Sequence[str]) -> list[str]:
    """Everything that a run has over the quickstart, its name and folder aside."""
    course = (f"seed={seed}", f"trainer.steps={steps}", "run.threads=1")
    return [*course, *STANDING, *QUIET, *extra, *variant.overrides]


def train(variant: Variant, overrides: Sequence[str], folder: Path) -> Figures:
    """Do one whole run, again where others took more than `OTHERS` of the machine meanwhile.

    Returns:
        Cores that others kept busy.
    """
    words = ["quickstart", *overrides, f"run.dir={folder.parent}", f"run.name={folder.name}"]
    for _ in range(TRIES):
        shutil.rmtree(folder, ignore_errors=True)
        began, busy, own = time.perf_counter(), busy_s(), children_s()
        subprocess.run(variant.command(words), check=True, stdout=subprocess.DEVNULL)
        wall_s = time.perf_counter() - began
        others = (busy_s() - busy - (children_s() - own)) / wall_s
        if others < OTHERS:
            break
        print(f"{folder.name}: others took {others:.2f} cores", flush=True)
    return {"others": others}


def busy_s() -> float:
    """Return the seconds that this machine's cores have worked, or were taken from it."""
    names = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
    ticks = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    known = dict(zip(names, map(int, ticks), strict=False))
    return (sum(known.values()) - known["idle"] - known["iowait"]) / os.sysconf("SC_CLK_TCK")


def children_s() -> float:
    """Return the CPU seconds of all processes that this one has started and seen the end of."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figures_of(folder: Path) -> Figures:
    """Times and counts of a run's counted steps."""
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["step"] > 0]
    counted = records[WARM_UP:-DRAIN]

    def total(name: str) -> float:
        return sum(float(record.get(name, 0.0)) for record in counted)

    seconds = total("time/step_s") - total("time/evaluate_s")
    tokens = {fate: total(f"sampling/tokens/{fate}") for fate in ("generated", "trained", "stale")}
    found = {
        "step_s": seconds / len(counted),
        "groups_per_s": total("sampling/groups/trained") / seconds,
        "tokens_per_s": tokens["trained"] / seconds,
        "generated_per_s": tokens["generated"] / seconds,
        "stale": tokens["stale"] / tokens["generated"],
        "staleness": total("sampling/staleness/mean") / len(counted),
        "staleness_max": max(float(record["sampling/staleness/max"]) for record in counted),
    }
    trace = folder / "trace.json"
    if not trace.exists():  # observe.trace=false
        return found | {"engine_idle": float("nan"), "learner_idle": float("nan")}
    return found | idle_of(trace, counted[0]["step"] - 1, counted[-1]["step"])


def idle_of(trace: Path, first: float, last: float) -> Figures:
    """Shares of the time between the ends of two steps in which engine and learner had no work."""
    events: list[dict[str, Any]] = json.loads(trace.read_text())
    marks = {e["name"]: e["ts"] for e in events if e["ph"] == "i"}
    began, ended = marks[f"step {first:.0f}"], marks[f"step {last:.0f}"]
    actors = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    busy: dict[str, list[tuple[int, int]]] = {"engine": [], "learner": []}
    for event in events:
        if event["ph"] != "X":
            continue
        actor, slice_ = actors[event["tid"]], (event["ts"], event["ts"] + event["dur"])
        if actor.startswith("engine"):
            busy["engine"].append(slice_)
        elif actor == "learner" or (actor == "trainer" and event["name"] in LEARNING):
            busy["learner"].append(slice_)
    length = ended - began
    return {
        f"{name}_idle": 1 - covered(slices, began, ended) / length if slices else float("nan")
        for name, slices in busy.items()
    }


def covered(slices: Sequence[tuple[int, int]], began: int, ended: int) -> int:
    """Length of the union of slices, within a window."""
    total, until = 0, began
    for start, stop in sorted(slices):
        start, stop = max(start, until), min(stop, ended)
        if stop > start:
            total, until = total + stop - start, stop
    return total


def bias_of(folder: Path, config: Config) -> Figures:
    """Mean lengths of trained groups and of all that qualify, in tokens an answer."""
    rows = read_ledger(RunFolder(folder)).to_pylist()
    settled = {row["group"]: row for row in rows}
    first_open = next(i for i in range(len(rows) + 1) if i not in settled)
    within = [row for row in rows if row["group"] < first_open]
    trained = {row["group"]: row["tokens"] for row in within if row["fate"] == "trained"}
    lost = [row["group"] for row in within if row["fate"] in ("stale", "surplus", "failed")]
    witnesses = list(trained)[:: max(len(trained) // 20, 1)]
    ends = asyncio.run(ends_of(config, [*witnesses, *lost], first_open))
    assert all(ends[i][0] == trained[i] for i in witnesses), "the weights did not stand still"
    mean = np.mean([tokens / config.rollout.n for tokens in trained.values()])
    lengths = [ends[i][0] / config.rollout.n for i in lost if ends[i][1]]
    all_of = np.mean([*(tokens / config.rollout.n for tokens in trained.values()), *lengths])
    lost_share = len(lengths) / (len(lengths) + len(trained))
    return {
        "length": float(mean),
        "length_all": float(all_of),
        "bias": float(mean / all_of) - 1,
    } | {
        "groups": float(len(trained)),
        "lost_groups": float(lost_share),
    }


async def ends_of(
    config: Config, groups: Sequence[int], admitted: int
) -> dict[int, tuple[int, bool]]:
    """Write groups to their end with the start's weights: tokens, and whether each qualifies."""
    device = prepare_device(config.run, config.model.cache_dir)
    start = make_warm_start(config, False, make_console("off", Console()))
    policy = load_policy(config, str(start), device)
    source = training_prompts(config.data, policy.tokenizer, config.run.seed)
    loader = PromptLoader(source, config.run.seed, config.data.shuffle)
    prompts = [loader.next() for _ in range(admitted)]
    longest = config.rollout.max_response_tokens
    rewards = Rewards(config.reward, RewardPipeline(config.reward, longest))
    engine, sampling = make_local_engine(config, policy), rollout_sampling(config.rollout, policy)
    fresh = dict.fromkeys(range(config.rollout.n))
    seed = config.run.seed
    requests = [group_request(i, prompts[i], fresh, sampling, seed) for i in groups]
    ends = await generate(engine, requests)
    found = {}
    for i in groups:
        answers = [ends[i, index] for index in fresh]
        texts = [policy.decode(answer.token_ids) for answer in answers]
        scores = [
            await rewards.score(prompts[i], answer, text, training=True)
            for answer, text in zip(answers, texts, strict=True)
        ]
        tokens = sum(answer.generated_tokens for answer in answers)
        found[i] = tokens, len({score.accuracy for score in scores}) > 1
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the width of its 95 % interval by Student's t."""
    array = np.asarray(values)
    if len(array) < 2:
        return float(array.mean()), float("nan")
    error = array.std(ddof=1) / np.sqrt(len(array))
    return float(array.mean()), float(error * two_sided_bound(1 - LEVEL, len(array) - 1))


Results = Mapping[str, Mapping[int, Figures]]
"""Variant → seed → figures."""


def report(results: Results) -> list[str]:
    """The tables as Markdown."""
    lines = [
        "| variant | s a step | trained groups/s | trained tokens/s | generated tokens/s "
        "| engine idle | learner idle | staleness, mean (largest) |",
        "|---|---|---|---|---|---|---|---|",
    ]

    def cell(runs: Mapping[int, Figures], name: str, form: str, scale: float = 1.0) -> str:
        mean, half = interval([scale * run[name] for run in runs.values()])
        return "-" if np.isnan(mean) else f"{mean:{form}} ± {half:{form}}"

    for name, runs in results.items():
        largest = max(run["staleness_max"] for run in runs.values())
        cells = [
            cell(runs, "step_s", ".3f"),
            cell(runs, "groups_per_s", ".1f"),
            cell(runs, "tokens_per_s", ",.0f"),
            cell(runs, "generated_per_s", ",.0f"),
            cell(runs, "engine_idle", ".0f", 100) + " %",
            cell(runs, "learner_idle", ".0f", 100) + " %",
            f"{np.mean([run['staleness'] for run in runs.values()]):.2f} ({largest:.0f})",
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        "| compared | step time | trained groups/s | trained tokens/s |",
        "|---|---|---|---|",
    ]
    for name, base in RATIOS:
        if name not in results or base not in results:
            continue
        seeds = sorted(results[name].keys() & results[base].keys())
        ratios = []
        for figure in ("step_s", "groups_per_s", "tokens_per_s"):
            pairs = [results[name][s][figure] / results[base][s][figure] for s in seeds]
            mean, half = interval(pairs)
            ratios.append(f"{np.median(pairs):.3f} ({mean:.3f} ± {half:.3f})")
        lines.append(f"| {name} / {base} | {' | '.join(ratios)} |")
    lines += [
        "",
        "| variant | trained | all that qualify | bias | groups | qualified groups thrown away "
        "| generated tokens thrown away |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        if not all("bias" in run for run in runs.values()):
            continue
        bias, half = interval([100 * run["bias"] for run in runs.values()])
        lines.append(
            f"| {name} | {np.mean([r['length'] for r in runs.values()]):.2f} "
            f"| {np.mean([r['length_all'] for r in runs.values()]):.2f} "
            f"| {bias:+.2f} ± {half:.2f} % | {sum(r['groups'] for r in runs.values()):.0f} "
            f"| {cell(runs, 'lost_groups', '.1f', 100)} % | {cell(runs, 'stale', '.1f', 100)} % |"
        )
    return lines


def measure(given: argparse.Namespace, folder: Path) -> Results:
    """Run what has not been run yet; a run's figures are kept in its folder."""
    results: dict[str, dict[int, Figures]] = {name: {} for name in given.variants}
    for repetition in range(given.repetitions):
        order = given.variants if repetition % 2 == 0 else given.variants[::-1]
        for name in order:
            seed, variant = 1 + repetition, VARIANTS[name]
            run = folder / f"{folder_name(name)}-{seed}"
            kept = run / "figures.json"
            overrides = overrides_of(variant, seed, given.steps, given.overrides)
            if not kept.exists():
                if given.only_report:
                    continue
                figures = train(variant, overrides, run)
                kept.write_text(json.dumps(figures | figures_of(run)))
            results[name][seed] = json.loads(kept.read_text())
            print(name, seed, {k: round(v, 3) for k, v in results[name][seed].items()}, flush=True)
    for name in given.variants:  # when nothing is timed any more
        for seed, figures in results[name].items():
            run = folder / f"{folder_name(name)}-{seed}"
            if "bias" not in figures and VARIANTS[name].overrides != ("run.threads=2",):
                overrides = overrides_of(VARIANTS[name], seed, given.steps, given.overrides)
                in_process = [o for o in overrides if "mode=" not in o and "processes" not in o]
                figures |= bias_of(run, load_recipe("quickstart", in_process))
                (run / "figures.json").write_text(json.dumps(figures))
    return {name: runs for name, runs in results.items() if runs}


def main() -> None:
    """Measure, print the tables, and keep them if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--runs", type=Path, help="Keep the runs here, and do not repeat them.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only-report", action="store_true")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as scratch:
        results = measure(given, (given.runs or Path(scratch)).resolve())
    others = [run["others"] for runs in results.values() for run in runs.values()]
    command = shlex.join(["python", "-m", "benchmarks.async_modes", *sys.argv[1:]])
    text = "\n".join(
        [
            "# Step time of the modes, and of a baseline that drops stale groups",
            "",
            f"Made by `{command}`: two cores, one thread for the learner and one for the engine. "
            f"Other processes kept {min(others):.2f} to {max(others):.2f} cores busy meanwhile.",
            "",
            *report(results),
            "",
        ]
    )
    print(text)
    if given.out:
        given.out.write_text(text)


if __name__ == "__main__":
    main()
