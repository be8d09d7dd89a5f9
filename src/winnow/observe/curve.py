"""The learning curve as a picture, drawn from the metrics.jsonl of one run or several."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from winnow.errors import WinnowError
from winnow.observe import names
from winnow.observe.files import write_atomic
from winnow.observe.history import evaluations, series, tokens_by_step
from winnow.observe.jsonl import METRICS_FILE, read_metrics
from winnow.observe.names import Record

SIZE_INCHES = (8.6, 5.4)
DPI = 150
_BLUE, _ORANGE, _PURPLE = "#2a6fbb", "#d9742b", "#8a3ffc"
_GREEN, _GREY = "#3a8f5c", "#6b7280"
Series = tuple[list[int], list[float]]
"""Steps and values."""
_STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9ca3af",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e5e7eb",
    "grid.linewidth": 0.8,
    "xtick.color": "#4b5563",
    "ytick.color": "#4b5563",
    "axes.labelcolor": "#374151",
    "legend.frameon": False,
}


def draw_curve(folder: Path, target: Path | None = None, title: str | None = None) -> Path:
    """Draw one run: accuracy above, length and truncation below; returns the PNG's path.

    Raises:
        WinnowError: the run has no figures yet, or the picture cannot be written.
    """
    return draw_overlay([folder], target or folder / "curve.png", title or folder.name)


def draw_overlay(folders: Sequence[Path], target: Path, title: str) -> Path:
    """Draw several runs over one another, thin, and their mean, thick; returns the PNG's path.

    Raises:
        WinnowError: a run has no figures yet, or the picture cannot be written.
    """
    runs = [_records(folder) for folder in folders]

    def paint(figure: Any) -> None:
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _paint_accuracy(above, runs)
        _paint_length(below, runs)
        _finish(figure, above, below, title, max(runs, key=lambda records: records[-1]["step"]))

    return _save(target, paint)


def _records(folder: Path) -> list[dict[str, float]]:
    records = read_metrics(folder / METRICS_FILE)
    if not records:
        raise WinnowError(f"{folder / METRICS_FILE} holds no step yet; wait for the run's first")
    return records


def _paint_accuracy(axis: Any, runs: Sequence[Sequence[Record]]) -> None:
    training = [series(records, names.ACCURACY, names.TRAINED_ACCURACY) for records in runs]
    label = "while training" if len(runs) == 1 else f"while training, mean of {len(runs)} runs"
    _paint_runs(axis, training, _BLUE, label)
    sources = list(dict.fromkeys(s for run in runs for r in run for s in evaluations(r)))
    for index, source in enumerate(sources):
        of = "" if len(sources) == 1 else f" ({source})"
        for figure, style, color, words in (
            ("greedy", "s--", _PURPLE, "greedy"),
            ("accuracy", "o-", _ORANGE, "sampled"),
        ):
            points = [_held_out(records, source, figure) for records in runs]
            color = color if len(sources) == 1 else f"C{index}"
            is_labelled = len(sources) == 1
            _paint_points(axis, points, style, color, f"held out, {words}{of}", is_labelled)
    axis.set_ylim(0, 1.04)
    axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axis.set_ylabel("right answers")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="lower right")


def _paint_length(axis: Any, runs: Sequence[Sequence[Record]]) -> None:
    _paint_runs(axis, [series(records, names.LENGTH) for records in runs], _GREEN, "length")
    axis.set_ylabel("tokens an answer", color=_GREEN)
    axis.set_ylim(0, axis.get_ylim()[1] * 1.1)
    cut = axis.twinx()
    cut.grid(False)
    cut.spines["right"].set_visible(True)
    truncated = [series(records, names.TRUNCATED) for records in runs]
    _paint_runs(cut, truncated, _GREY, "cut off")
    cut.fill_between(*_mean_of(truncated), color=_GREY, alpha=0.15, linewidth=0)
    cut.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    cut.set_ylabel("cut off at the limit", color=_GREY)
    cut.set_ylim(0, max(cut.get_ylim()[1], 0.05))


def _finish(figure: Any, above: Any, below: Any, title: str, records: Sequence[Record]) -> None:
    from matplotlib.ticker import MaxNLocator

    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color="#111827")
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    last = max(int(records[-1]["step"]), 1)
    below.set_xlim(-0.015 * last, 1.085 * last)
    steps, tokens = tokens_by_step(records)
    if not steps or tokens[-1] <= 0:
        return
    unit, name = (1e6, "million ") if tokens[-1] >= 1e6 else (1.0, "")
    at, total = np.array([0, *steps]), np.array([0.0, *tokens]) / unit
    top = above.twiny()
    top.grid(False)
    top.spines["top"].set_visible(True)
    top.set_xlim(below.get_xlim())
    # Round amounts of tokens, put where they were reached: the axis need not be even.
    amounts = [a for a in MaxNLocator(6).tick_values(0, total[-1]) if 0 <= a <= total[-1]]
    top.set_xticks(np.interp(amounts, total, at), [f"{a:,g}" for a in amounts])
    top.set_xlabel(f"{name}tokens generated")


def _paint_runs(axis: Any, runs: Sequence[Series], color: str, label: str) -> None:
    """One run: its values thin, smoothed thick. Several: each smoothed thin, the mean thick."""
    for steps, values in runs:
        thin = values if len(runs) == 1 else _smooth(values)
        axis.plot(steps, thin, color=color, alpha=0.3, linewidth=1)
    steps, mean = _mean_of(runs)
    if steps:
        axis.plot(steps, _smooth(mean), color=color, linewidth=2.2, label=label)


def _paint_points(
    axis: Any, runs: Sequence[Series], style: str, color: str, label: str, is_labelled: bool
) -> None:
    """Held-out evaluations, few and far between: nothing is smoothed."""
    for steps, values in runs if len(runs) > 1 else ():
        axis.plot(steps, values, style[0], color=color, alpha=0.35, markersize=3.5)
    steps, mean = _mean_of(runs)
    if not steps:
        return
    axis.plot(steps, mean, style, color=color, markersize=5, linewidth=1.5, label=label)
    if is_labelled:
        for index, place in ((0, (8, -11)), (-1, (8, -3))):
            axis.annotate(
                f"{100 * mean[index]:.1f} %",
                (steps[index], mean[index]),
                xytext=place,
                textcoords="offset points",
                color=color,
                fontsize=9,
            )


def _mean_of(runs: Sequence[Series]) -> Series:
    """The mean at the steps that every run has."""
    tables = [dict(zip(steps, values, strict=True)) for steps, values in runs]
    shared = sorted(set.intersection(*(set(table) for table in tables)))
    return shared, [float(np.mean([table[step] for table in tables])) for step in shared]


def _held_out(records: Sequence[Record], source: str, figure: str) -> Series:
    found = [(r["step"], evaluations(r).get(source)) for r in records]
    points = [(int(step), getattr(e, figure)) for step, e in found if e]
    kept = [(step, value) for step, value in points if value is not None]
    return [step for step, _ in kept], [value for _, value in kept]


def _smooth(values: Sequence[float], reach: int = 2) -> list[float]:
    """A moving mean over the neighbours; gaps (NaN) are left out."""
    array = np.asarray(values, dtype=np.float64)
    smooth = []
    for i in range(len(array)):
        window = array[max(i - reach, 0) : i + reach + 1]
        finite = window[np.isfinite(window)]
        smooth.append(float(finite.mean()) if finite.size else float("nan"))
    return smooth


def _save(target: Path, paint: Callable[[Any], None]) -> Path:
    # Without pyplot: no global state, no display, any thread.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(_STYLE):
        figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained", facecolor="white")
        paint(figure)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=DPI)
    write_atomic(target, picture.getvalue())
    return target
