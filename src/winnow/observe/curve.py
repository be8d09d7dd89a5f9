"""The learning curve of a run as a picture, drawn from its metrics.jsonl."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from winnow.errors import WinnowError
from winnow.observe import metrics
from winnow.observe.files import write_atomic
from winnow.observe.jsonl import (
    METRICS_FILE,
    evaluations,
    read_metrics,
    series,
    tokens_by_step,
)
from winnow.observe.metrics import Record

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


def draw_curve(folder: Path) -> Path:
    """Draw a run: accuracy above, length and truncation below; returns the path of curve.png.

    Raises:
        WinnowError: the run has no figures yet, or the picture cannot be written.
    """
    # Without pyplot: no global state, no display, any thread.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    records = read_metrics(folder / METRICS_FILE)
    if not records:
        raise WinnowError(f"{folder / METRICS_FILE} holds no step yet; wait for the run's first")
    target = folder / "curve.png"
    with rc_context(_STYLE):
        figure = Figure(figsize=SIZE_INCHES, dpi=DPI, layout="constrained", facecolor="white")
        above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
        _paint_accuracy(above, records)
        _paint_length(below, records)
        _finish(figure, above, below, folder.name, records)
        picture = io.BytesIO()
        figure.savefig(picture, format="png", dpi=DPI)
    write_atomic(target, picture.getvalue())
    return target


def _paint_accuracy(axis: Any, records: Sequence[Record]) -> None:
    training = series(records, metrics.ACCURACY, metrics.TRAINED_ACCURACY)
    _paint_line(axis, training, _BLUE, "while training")
    sources = list(dict.fromkeys(source for record in records for source in evaluations(record)))
    is_alone = len(sources) == 1
    for index, source in enumerate(sources):
        of = "" if is_alone else f" ({source})"
        for figure, style, own_color, words in (
            ("greedy", "s--", _PURPLE, "greedy"),
            ("accuracy", "o-", _ORANGE, "sampled"),
        ):
            color = own_color if is_alone else f"C{index}"
            points = _held_out(records, source, figure)
            _paint_points(axis, points, style, color, f"held out, {words}{of}", is_alone)
    axis.set_ylim(0, 1.04)
    axis.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.0f} %")
    axis.set_ylabel("right answers")
    if axis.get_legend_handles_labels()[0]:
        axis.legend(loc="lower right")


def _paint_length(axis: Any, records: Sequence[Record]) -> None:
    _paint_line(axis, series(records, metrics.LENGTH), _GREEN, "length")
    axis.set_ylabel("tokens an answer", color=_GREEN)
    axis.set_ylim(0, axis.get_ylim()[1] * 1.1)
    cut = axis.twinx()
    cut.grid(False)
    cut.spines["right"].set_visible(True)
    truncated = series(records, metrics.TRUNCATED)
    _paint_line(cut, truncated, _GREY, "cut off")
    cut.fill_between(*truncated, color=_GREY, alpha=0.15, linewidth=0)
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


def _paint_line(axis: Any, points: Series, color: str, label: str) -> None:
    """Draw the values thin, and smoothed thick."""
    steps, values = points
    axis.plot(steps, values, color=color, alpha=0.3, linewidth=1)
    if steps:
        axis.plot(steps, _smooth(values), color=color, linewidth=2.2, label=label)


def _paint_points(
    axis: Any, points: Series, style: str, color: str, label: str, is_labelled: bool
) -> None:
    """Draw held-out evaluations, few and far between: nothing is smoothed."""
    steps, values = points
    if not steps:
        return
    axis.plot(steps, values, style, color=color, markersize=5, linewidth=1.5, label=label)
    if is_labelled:
        for index, place in ((0, (8, -11)), (-1, (8, -3))):
            axis.annotate(
                f"{100 * values[index]:.1f} %", (steps[index], values[index]), place,
                textcoords="offset points", color=color, fontsize=9,
            )  # fmt: skip


def _held_out(records: Sequence[Record], source: str, figure: str) -> Series:
    found = [(r["step"], evaluations(r).get(source)) for r in records]
    points = [(int(step), getattr(e, figure)) for step, e in found if e]
    kept = [(step, value) for step, value in points if value is not None]
    return [step for step, _ in kept], [value for _, value in kept]


def _smooth(values: Sequence[float], reach: int = 2) -> list[float]:
    """Take a moving mean over the neighbours; gaps (NaN) are left out."""
    array = np.asarray(values, dtype=np.float64)
    smooth = []
    for i in range(len(array)):
        window = array[max(i - reach, 0) : i + reach + 1]
        finite = window[np.isfinite(window)]
        smooth.append(float(finite.mean()) if finite.size else float("nan"))
    return smooth
