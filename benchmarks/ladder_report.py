"""What `ladder.py` writes: tables with the spread over seeds, what of it is noise, the picture.

Every comparison is paired by seed: two runs of a seed begin from the same weights, meet prompts in
the same order and are asked the same held-out problems. A difference counts as clear where the
95 % interval of its mean over seeds (Student's t) leaves out zero; else it is called noise.

`PLANS` are comparisons of DAPO with DAPO less one of its parts: arms, seeds, metric and window
stood in the repository before the first of their runs.
"""

from __future__ import annotations

import re
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from winnow.evaluation.statistics import two_sided_bound

Results = dict[str, dict[int, dict[str, Any]]]
"""Configuration → seed → figures."""

Show = Callable[[float], str]
BY_STEP = "accuracy_by_step"
MARKS = ("<!-- made by benchmarks/ladder.py -->", "<!-- until here -->")
"""Around what `--docs` replaces."""


def _percent(value: float) -> str:
    return f"{100 * value:.1f}"


def _fine_percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _plain(value: float) -> str:
    return f"{value:.1f}"


def _millions(value: float) -> str:
    return f"{value / 1e6:.2f}"


def _whole(value: float) -> str:
    return f"{value:.0f}"


COLUMNS: Mapping[str, tuple[str, Show]] = {
    "pass@1": ("pass@1, %", _percent),
    "greedy": ("greedy, %", _percent),
    "length": ("length", _plain),
    "truncated": ("cut off, %", _fine_percent),
    "clip_low": ("clipped below, %", _fine_percent),
    "clip_high": ("clipped above, %", _fine_percent),
    "dual_clip": ("dual clip, %", _fine_percent),
    "tokens": ("tokens, M", _millions),
    "cpu_s": ("CPU s", _whole),
}
"""Figure → heading and form of its cells."""


def report(
    results: Results,
    families: Sequence[str],
    rungs: Sequence[str],
    steps: int,
    command: str,
) -> str:
    """The results as Markdown; configurations without a finished run are named as missing."""
    parts = [
        "# Families of algorithms, and the DAPO paper's ladder, on the quickstart's task",
        f"Made by `{command}`.",
        f"{steps} steps of 64 prompts x 8 answers and four updates. pass@1, greedy, length and "
        "cut off: at the end, on 1,000 held-out problems, 8 sampled answers and a greedy one each. "
        "Clipped: share of the tokens, mean over the steps. Tokens: all that were generated for "
        "training. CPU s: the whole command with its evaluation, without the warm start; on a "
        "shared machine an upper bound. A cell is the mean over the seeds, and least to greatest.",
        table(results, ["start", *families]),
        _reading(results, families, {family: "grpo" for family in families if family != "grpo"}),
    ]
    if rungs:
        parts += [
            "## The ladder",
            "Each rung keeps what those above it added. The first is the recipe grpo.",
            table(results, rungs),
            _reading(results, rungs, dict(zip(rungs[1:], rungs, strict=False))),
            at_equal_tokens(results, rungs),
        ]
    return "\n\n".join(parts) + "\n"


def table(
    results: Results, names: Sequence[str], columns: Mapping[str, tuple[str, Show]] = COLUMNS
) -> str:
    """A row for each configuration that has a finished run."""
    lines = ["| | seeds | " + " | ".join(heading for heading, _ in columns.values()) + " |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    for name in (name for name in names if results.get(name)):
        seeds = results[name]
        cells = [
            _cell([run.get(key) for run in seeds.values()], show)
            for key, (_, show) in columns.items()
        ]
        if name == "start":
            cells[-1] = "-"
        lines.append(f"| {name} | {len(seeds)} | " + " | ".join(cells) + " |")
    missing = [name for name in names if not results.get(name)]
    if missing:
        lines += ["", f"Not run: {', '.join(missing)}."]
    return "\n".join(lines)


def summary(results: Results, families: Sequence[str], rungs: Sequence[str], steps: int) -> str:
    """The few columns that the docs show, each row with its verdict."""
    parts = [
        f"After {steps} steps, pass@1 and greedy in % of 1,000 held-out problems; mean over seeds, "
        "and least to greatest. The last column is the difference in pass@1, in points.",
        _short_table(results, ["start", *families], dict.fromkeys(families, "grpo")),
    ]
    if rungs:
        bases = dict(zip(rungs[1:], rungs, strict=False))
        parts += ["The ladder, each rung on top of those above it:"]
        parts += [_short_table(results, rungs, bases), at_equal_tokens(results, rungs)]
    return "\n\n".join(parts)


def _short_table(results: Results, names: Sequence[str], bases: Mapping[str, str]) -> str:
    columns = {key: COLUMNS[key] for key in ("pass@1", "greedy", "truncated", "tokens")}
    headings = " | ".join(heading for heading, _ in columns.values())
    base = "grpo" if set(bases.values()) == {"grpo"} else "the rung above"
    lines = [f"| | seeds | {headings} | against {base} |", "|---" * (len(columns) + 3) + "|"]
    for name in (name for name in names if results.get(name)):
        runs = results[name].values()
        cells = [_cell([run.get(key) for run in runs], show) for key, (_, show) in columns.items()]
        has_base = name in bases and bases[name] != name
        cells.append(verdict(results, name, bases[name]) if has_base else "")
        lines.append(f"| {name} | {len(runs)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def at_equal_tokens(results: Results, rungs: Sequence[str]) -> str:
    """How often each rung is right while sampling, at what the cheapest run spent in all."""
    made = {rung: list(results[rung].values()) for rung in rungs if results.get(rung)}
    spent = min(run["tokens"] for runs in made.values() for run in runs)
    lines = [
        f"Right answers while sampling, in %, when {_millions(spent)} M tokens were generated, the "
        "least that a run spent (mean of three steps):",
        "",
    ]
    for rung, runs in made.items():
        values = [
            float(np.interp(spent, np.cumsum(run["tokens_by_step"]), _smooth(run[BY_STEP])))
            for run in runs
        ]
        lines.append(f"- {rung}: {_cell(values, _percent)}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Plan:
    """DAPO and DAPO less one part each, as fixed before the first run."""

    recipe: str
    about: str
    seeds: tuple[int, ...]
    steps: int
    settings: tuple[str, ...]
    """Of all arms."""
    arms: Mapping[str, str]
    """Arm → the setting that removes its part; the first arm, with all parts, has none."""


DIGITS = Plan(
    recipe="dapo",
    about="A model of 0.1 M weights sorts 4-8 digits; 88 % of the answers that it is first taught "
    "are guesses, 4 % ramble, 8 % are worked. 24 groups of 8 answers a step; two epochs of six "
    "updates each. In a pilot with seed 101, which does not count, the clip bound 4.9 % of the "
    "tokens below and 0.9 % above. All runs are of the sources at commit 51130ee5 (`git worktree "
    "add --detach FOLDER 51130ee5`).",
    seeds=(1, 2, 3, 4, 5, 6, 7, 8),
    steps=60,
    settings=(
        *("warm_start.demonstrations.guess_share=0.88", "optim.lr=1e-3"),
        *("warm_start.demonstrations.working_share=0.08", "trainer.mini_batch_groups=4"),
        *("sampling.groups_per_step=24", "trainer.epochs=2"),
        *("trainer.save_every=20", "trainer.keep_last=1"),
        *("data.task.eval_problems=500", "evaluation.n=4", "evaluation.greedy=false"),
        *("evaluation.every=5", "evaluation.before=true"),
    ),
    arms={
        "DAPO": "",
        "without clip-higher": "algorithm.policy_loss.clip_high=0.2",
        "without dynamic sampling": "sampling/filter=none",
        "without token-level loss": "algorithm.aggregation=seq-mean-token-mean",
        "without overlong shaping": "reward.overlong.enabled=false",
    },
)
SMOLLM2 = Plan(
    recipe="smollm2",
    about="SmolLM2-135M-Instruct, dequantised from Q4_1, answers sums and products. Sources: "
    "commit ffe05fab. Made on an H100 in fp32, but for DAPO and the run without overlong shaping "
    "of seed 3, which found no room beside the others there and were made on a CPU.",
    seeds=(1, 2, 3),
    steps=12,
    settings=(
        *("sampling/filter=variance", "reward.overlong.enabled=true"),
        *("rollout.max_response_tokens=64", "reward.overlong.buffer_tokens=32"),
        *("trainer.save_every=3", "trainer.keep_last=1", "evaluation.n=2"),
        *("evaluation.greedy=false", "evaluation.every=3", "evaluation.before=true"),
    ),
    arms={
        name: DIGITS.arms[name]
        for name in ("DAPO", "without dynamic sampling", "without overlong shaping")
    },
)
PLANS = {"digits": DIGITS, "smollm2": SMOLLM2}
RULES = """\
Written before the first run. Runs of a seed share the warm start, the order of the prompts and the
held-out problems, so all comparisons are paired by seed.

- Metric: pass@1 on held-out problems. **At equal steps**: mean of the last three evaluations.
- **At equal tokens**: of two runs of a seed, the one that generated more tokens in training is cut
  where the other ended. Its pass@1 is read between evaluations, on a straight line over generated
  tokens, at those shares of that budget that the last three evaluations are of the steps; so is
  the other's.
- What a part adds is pass@1 of DAPO minus that without the part, in points, with the 95 % interval
  of the mean over seeds (Student's t). The part **separates** if the interval excludes zero, and
  firmly if the wider interval in brackets does: Bonferroni's for all comparisons of the task.
- Tables are over the seeds that are complete in all arms, and final when all seeds are.
- Clipped: share of the tokens whose gradient the clip removed, mean over the steps. Length and cut
  off: at the last evaluation. A cell is the mean over the seeds, and least to greatest."""
WINDOW = 3
"""Evaluations that pass@1 is the mean of."""


def parts_report(pages: Mapping[str, Results]) -> str:
    """The plans and what their finished runs show, as Markdown."""
    command = f"python benchmarks/ladder.py --parts {' '.join(pages)}"
    parts = ["# What each of DAPO's parts adds", f"Made by `{command} --runs DIR`.", RULES]
    for task, results in pages.items():
        plan = PLANS[task]
        base, *others = plan.arms
        settings = " ".join([plan.recipe, *plan.settings, f"trainer.steps={plan.steps}"])
        lines = [f"- {base}: `winnow train {settings}`"]
        lines += [f"- {arm}: `{plan.arms[arm]}`" for arm in others]
        paired = complete(plan, results)
        seeds = list(paired[base])
        runs = sum(len(results.get(arm, {})) for arm in plan.arms)
        parts += [
            f"## {task}",
            plan.about,
            "\n".join(lines),
            f"{runs} of {len(plan.arms) * len(plan.seeds)} runs are finished. Complete in all "
            f"arms: {len(seeds)} of {len(plan.seeds)} seeds ({', '.join(map(str, seeds)) or '-'}).",
        ]
        if seeds:
            parts += _results_of_parts(paired)
    return "\n\n".join(parts) + "\n"


def complete(plan: Plan, results: Results) -> Results:
    """The runs of those seeds that all arms of a plan have."""
    seeds = [n for n in plan.seeds if all(n in results.get(arm, {}) for arm in plan.arms)]
    return {arm: {seed: results[arm][seed] for seed in seeds} for arm in plan.arms}


def _results_of_parts(results: Results) -> list[str]:
    """Tables over complete seeds: the arms, what each part adds, pass@1 of each run."""
    base, *others = results
    columns = {key: COLUMNS[key] for key in COLUMNS if key not in ("greedy", "dual_clip", "cpu_s")}
    shown = {
        arm: {seed: run | {"pass@1": at_equal_steps(run)} for seed, run in runs.items()}
        for arm, runs in results.items()
    }
    added = [
        "| part | at equal steps, points | | at equal tokens, points | |",
        "|---|---|---|---|---|",
    ]
    for arm in others:
        pairs = [(results[base][seed], run) for seed, run in results[arm].items()]
        steps = [at_equal_steps(a) - at_equal_steps(b) for a, b in pairs]
        tokens = [at_equal_tokens_of(a, b) - at_equal_tokens_of(b, a) for a, b in pairs]
        cells = [_separates(gaps, 2 * len(others)) for gaps in (steps, tokens)]
        added.append(f"| {arm.removeprefix('without ')} | {' | '.join(cells)} |")
    by_seed = [f"| seed | start | {' | '.join(results)} |", "|---" * (len(results) + 2) + "|"]
    for seed, run in results[base].items():
        row = [run["curve"][0][1], *(shown[arm][seed]["pass@1"] for arm in results)]
        by_seed.append(f"| {seed} | {' | '.join(map(_percent, row))} |")
    return [
        table(shown, list(results), columns),
        "What each part adds. At equal tokens the longer run is cut before its learning rate, "
        "which falls over all steps, has come down; that counts against it.",
        "\n".join(added),
        "pass@1 at equal steps by seed, %:",
        "\n".join(by_seed),
    ]


def at_equal_steps(run: Mapping[str, Any]) -> float:
    """Mean pass@1 of a run's last evaluations."""
    return float(statistics.mean(value for _, value in run["curve"][-WINDOW:]))


def at_equal_tokens_of(run: Mapping[str, Any], other: Mapping[str, Any]) -> float:
    """Mean pass@1 of a run as if both runs had ended with the tokens of the shorter one."""
    end, last = min(run["tokens"], other["tokens"]), run["curve"][-1][0]
    places = [end * step / last for step, _ in run["curve"][-WINDOW:]]
    return float(_by_tokens(run, places).mean())


def _by_tokens(run: Mapping[str, Any], tokens: Any) -> Any:
    """A run's pass@1 where so many tokens were generated, on straight lines."""
    steps, values = zip(*run["curve"], strict=True)
    return np.interp(tokens, np.cumsum([0.0, *run["tokens_by_step"]])[list(steps)], values)


def _separates(gaps: Sequence[float], comparisons: int) -> str:
    """Two cells of the table: the gain with its intervals, and what follows from it."""
    (mean, half), (_, wide) = interval(gaps), interval(gaps, comparisons)
    if half is None or wide is None:
        return f"{100 * mean:+.1f} | of one seed"
    said = "separates" if abs(mean) > half else "does not separate"
    firmly = " firmly" if abs(mean) > wide else ""
    return f"{100 * mean:+.1f} ± {100 * half:.1f} (± {100 * wide:.1f}) | {said}{firmly}"


def put_between_marks(text: str, page: str) -> str:
    """A page with what stands between its two marks replaced.

    Raises:
        ValueError: the page lacks a mark.
    """
    before, opening, rest = page.partition(MARKS[0])
    _, closing, after = rest.partition(MARKS[1])
    if not opening or not closing:
        raise ValueError(f"the page lacks {MARKS[0]} or, after it, {MARKS[1]}")
    return f"{before}{opening}\n\n{text}\n\n{closing}{after}"


def _cell(values: Sequence[float | None], show: Show) -> str:
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    mean, low, high = show(statistics.mean(known)), show(min(known)), show(max(known))
    return mean if low == high else f"{mean} ({low} to {high})"


def interval(gaps: Sequence[float], comparisons: int = 1) -> tuple[float, float | None]:
    """Mean of paired differences, and half its 95 % interval (None for fewer than two of them).

    With several comparisons it is Bonferroni's, which holds for all of them at once.
    """
    if len(gaps) < 2:
        return (gaps[0] if gaps else float("nan")), None
    bound = two_sided_bound(0.05 / comparisons, len(gaps) - 1)
    return statistics.mean(gaps), bound * statistics.stdev(gaps) / len(gaps) ** 0.5


def _reading(results: Results, names: Sequence[str], bases: Mapping[str, str]) -> str:
    """What differs clearly, and what is noise, in words made from the figures."""
    lines = ["pass@1 against its base, in points, paired by seed (95 % interval):", ""]
    for name in names:
        if name not in bases or not results.get(name):
            continue
        lines.append(f"- {name} against {bases[name]}: {verdict(results, name, bases[name])}.")
    return "\n".join(lines)


def verdict(results: Results, name: str, base: str) -> str:
    """The difference in pass@1 in points, and whether it is noise."""
    runs, others = results.get(name, {}), results.get(base, {})
    gaps = [runs[seed]["pass@1"] - others[seed]["pass@1"] for seed in runs if seed in others]
    mean, half = interval(gaps)
    if not gaps:
        return "no seed in common"
    if half is None:
        return f"{100 * mean:+.1f}, of one seed: may be noise"
    said = "clear" if abs(mean) > half else "within noise"
    return f"{100 * mean:+.1f} ± {100 * half:.1f} over {len(gaps)} seeds: {said}"


_CLEAR, _NOISE = "#0072b2", "#6b7280"
_RANGE = r"([\d.]+)(?: \(([\d.]+) to ([\d.]+)\))?"
_ROW = re.compile(rf"^\| ([^|]+?) \| \d+ \| {_RANGE} \|", re.MULTILINE)
_GAP = re.compile(r"^- (.+?) against .+?: ([+-][\d.]+) ± ([\d.]+) over .*: (\w+)", re.MULTILINE)
_EQUAL = re.compile(rf"^- ([^:]+): {_RANGE}$", re.MULTILINE)
Ranges = dict[str, tuple[float, float, float]]
"""Mean, least and greatest by rung."""


def ladder_of(text: str) -> tuple[Ranges, dict[str, tuple[float, float, str]], Ranges]:
    """Read pass@1, what each rung added (mean, half of the interval, verdict) and equal tokens."""
    ladder = text.partition("## The ladder")[2]
    gaps = {name: (float(m), float(h), said) for name, m, h, said in _GAP.findall(ladder)}
    ends, equal = (
        {
            name: (float(mean), float(low or mean), float(high or mean))
            for name, mean, low, high in pattern.findall(ladder)
        }
        for pattern in (_ROW, _EQUAL)
    )
    return ends, gaps, equal


def draw(text: str, target: Path) -> None:
    """Draw the ladder of a report: a line for each rung, and what it added to the one above."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    rows, gaps, equal = ladder_of(text)
    places = {name: -index for index, name in enumerate(rows)}
    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure = Figure(figsize=(10.5, 3.7), dpi=150, layout="constrained", facecolor="white")
        end, added, spent = figure.subplots(1, 3, sharey=True)
        for axis, found in ((end, rows), (spent, equal)):
            for name, (mean, low, high) in found.items():
                axis.plot([low, high], [places[name]] * 2, color=_NOISE, linewidth=3, alpha=0.6)
                axis.plot(mean, places[name], "o", color="#111827")
                axis.annotate(f"{mean:.1f}", (mean, places[name]), (0, 6), fontsize=8,
                              textcoords="offset points", ha="center")  # fmt: skip
        added.axvline(0, color="#111827", linewidth=0.8)
        for name, (mean, half, said) in gaps.items():
            color = _CLEAR if said == "clear" else _NOISE
            added.errorbar(mean, places[name], xerr=half, fmt="o", color=color, capsize=3)
            added.annotate(f"{mean:+.1f}", (mean, places[name]), (0, 6), color=color, fontsize=8,
                           bbox={"fc": "white", "ec": "none", "pad": 0.5},
                           textcoords="offset points", ha="center")  # fmt: skip
        end.set_yticks([*places.values()], [*places])
        for axis, title in (
            (end, "pass@1 at the end, %:\nmean, and range of seeds"),
            (added, "added to the rung above, points:\n95 % interval; blue is clear, grey noise"),
            (spent, "right while sampling at equal tokens, %:\nmean, and range of seeds"),
        ):
            axis.set_title(title, fontsize=9, loc="left")
        for axis in (end, added, spent):
            axis.grid(axis="x", color="#e5e7eb")
            axis.set_axisbelow(True)
            axis.set_ylim(-len(places) + 0.5, 0.6)
        target.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(target)


def draw_parts(pages: Mapping[str, Results], target: Path) -> None:
    """Draw each task's mean curves over its complete seeds, by step and by generated tokens."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    tasks = {task: complete(PLANS[task], results) for task, results in pages.items()}
    tasks = {task: arms for task, arms in tasks.items() if arms["DAPO"]}
    if not tasks:
        return
    with rc_context({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9}):
        figure = Figure((10.5, 3.5 * len(tasks)), dpi=150, layout="constrained", facecolor="white")
        rows = figure.subplots(len(tasks), 2, squeeze=False, sharey="row")
        for (task, arms), (by_step, by_tokens) in zip(tasks.items(), rows, strict=True):
            least = min(run["tokens"] for runs in arms.values() for run in runs.values())
            grid = np.linspace(0, least, 61)
            for arm, runs in arms.items():
                steps = [step for step, _ in next(iter(runs.values()))["curve"]]
                curves = [[value for _, value in run["curve"]] for run in runs.values()]
                by_step.plot(steps, 100 * np.mean(curves, axis=0), label=arm)
                spent = np.mean([_by_tokens(run, grid) for run in runs.values()], axis=0)
                by_tokens.plot(grid / 1e6, 100 * spent)
            seeds = f"{len(arms['DAPO'])} of {len(PLANS[task].seeds)} seeds"
            by_step.set_title(
                f"{task}: held-out pass@1, %, mean of {seeds}", fontsize=9, loc="left"
            )
            by_step.set_xlabel("steps")
            by_step.legend(frameon=False)
            by_tokens.set_xlabel("million tokens generated, up to the cheapest run's end")
            for axis in (by_step, by_tokens):
                axis.grid(color="#e5e7eb")
        figure.savefig(target)


def _smooth(values: Sequence[float], reach: int = 1) -> Any:
    """A moving mean over the neighbours."""
    array = np.asarray(values, dtype=np.float64)
    windows = (array[max(i - reach, 0) : i + reach + 1] for i in range(len(array)))
    return np.array([window.mean() for window in windows])


if __name__ == "__main__":  # python benchmarks/ladder_report.py benchmarks/results/ladder.md PNG
    draw(Path(sys.argv[1]).read_text(), Path(sys.argv[2]))
