"""The learning curve of a run as a picture, drawn from its metrics.jsonl."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from winnow.errors import WinnowError
from winnow.observe import metrics
from winnow.observe.files import write_atomic
from winnow.observe.jsonl import METRICS_FILE, evaluations, read_metrics, running_total, series
from winnow.observe.metrics import Record
from winnow.observe.sinks import Sink

SIZE_INCHES = (8.6, 7.2)
DPI = 150
COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#8c6d1f", "#56b4e9", "#111827")
"""Told apart by colour-blind readers as well (Okabe and Ito)."""
LINES = ("-", "--", ":", "-.")
_TRAINING, _SAMPLED, _GREEDY, _REWARD, _LENGTH = COLORS[:5]
_GREY = "#6b7280"
_EVERY_S = 60.0
Series = tuple[list[int], list[float]]
"""Steps and values."""
STYLE = {
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
    "svg.fonttype": "none",
    "svg.hashsalt": "winnow",
}


class CurveSink(Sink):
    """Draws a run's curve.png again each minute, and at most a fiftieth of the time; the end of a
    run draws it once more."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._next = folder, time.monotonic() + _EVERY_S

    def log(self, step: int, record: Record) -> None:
        began = time.monotonic()
        if began >= self._next:
            draw_curve(self._folder)
            took = time.monotonic() - began
            self._next = began + max(_EVERY_S, 50 * took)


@contextmanager
def saved_figure(target: Path, inches: tuple[float, float]) -> Iterator[Any]:
    """Yield a figure of matplotlib, whose picture becomes `target` when the block is done.

    Raises:
        WinnowError: the picture cannot be written.
    """
    # Without pyplot: no global state, no display, any thread.
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    kind = target.suffix.lower().removeprefix(".")
    # Without the date that an SVG would hold: the same runs make the same file.
    about = {"Date": None} if kind == "svg" else None
    picture = io.BytesIO()
    with rc_context(STYLE):
        figure = Figure(figsize=inches, dpi=DPI, layout="constrained", facecolor="white")
        yield figure
        figure.savefig(picture, format=kind, dpi=DPI, metadata=about)
    write_atomic(target, picture.getvalue())


def draw_curve(folder: Path) -> Path:
    """Draw a run's accuracy, reward, length and truncation; returns the path of curve.png.

    Raises:
        WinnowError: the run has no figures yet, or the picture cannot be written.
    """
    records = read_metrics(folder / METRICS_FILE)
    if not records:
        raise WinnowError(f"{folder / METRICS_FILE} has no steps yet; wait for the first one")
    target = folder / "curve.png"
    with saved_figure(target, SIZE_INCHES) as figure:
        axes = figure.subplots(3, 1, sharex=True, height_ratios=(4, 3, 3))
        _paint_accuracy(axes[0], records)
        _paint_line(axes[1], series(records, metrics.REWARD), _REWARD, "reward")
        axes[1].set_ylabel("mean reward", color=_REWARD)
        _paint_length(axes[2], records)
        _label_axes(figure, axes[0], axes[2], folder.name, records)
    return target


def _paint_accuracy(axis: Any, records: Sequence[Record]) -> None:
    training = series(records, metrics.ACCURACY, metrics.TRAINED_ACCURACY)
    _paint_line(axis, training, _TRAINING, "while training")
    evaluated = [(int(record["step"]), evaluations(record)) for record in records]
    sources = list(dict.fromkeys(source for _, by_source in evaluated for source in by_source))
    is_alone = len(sources) == 1
    for index, source in enumerate(sources):
        of = "" if is_alone else f" ({source})"
        for figure, style, color_alone, kind in (
            ("greedy", "s--", _GREEDY, "greedy"),
            ("accuracy", "o-", _SAMPLED, "sampled"),
        ):
            color = color_alone if is_alone else COLORS[1 + index % (len(COLORS) - 1)]
            points = [
                (step, value)
                for step, by_source in evaluated
                if (value := getattr(by_source.get(source), figure, None)) is not None
            ]
            if not points:
                continue
            steps, values = zip(*points, strict=True)  # few and far between: nothing is smoothed
            label = f"held out, {kind}{of}"
            if is_alone:  # where they can hide no line
                label += f": {100 * values[0]:.1f} → {100 * values[-1]:.1f} %"
            axis.plot(steps, values, style, color=color, markersize=5, linewidth=1.5, label=label)
    use_percent_ticks(axis)
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, -0.02), min(high, 1.02))
    axis.set_ylabel("right answers")
    if axis.get_legend_handles_labels()[0]:
        axis.figure.legend(loc="outside lower center", ncols=3, fontsize=9)


def use_percent_ticks(axis: Any) -> None:
    """Show shares as percent, with as many digits as the scale needs."""
    from matplotlib.ticker import PercentFormatter

    axis.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=" %"))


def _paint_length(axis: Any, records: Sequence[Record]) -> None:
    _paint_line(axis, series(records, metrics.LENGTH), _LENGTH, "length")
    axis.set_ylabel("tokens an answer", color=_LENGTH)
    axis.set_ylim(0, axis.get_ylim()[1] * 1.1)
    cut = axis.twinx()
    cut.grid(False)
    cut.spines["right"].set_visible(True)
    truncated = series(records, metrics.TRUNCATED)
    _paint_line(cut, truncated, _GREY, "cut off")
    cut.fill_between(*truncated, color=_GREY, alpha=0.15, linewidth=0)
    use_percent_ticks(cut)
    cut.set_ylabel("cut off at the limit", color=_GREY)
    cut.set_ylim(0, max(cut.get_ylim()[1], 0.05))


def _label_axes(figure: Any, above: Any, below: Any, title: str, records: Sequence[Record]) -> None:
    from matplotlib.ticker import MaxNLocator

    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold", color="#111827")
    below.set_xlabel("step")
    below.xaxis.set_major_locator(MaxNLocator(integer=True))
    last = max(int(records[-1]["step"]), 1)
    below.set_xlim(-0.015 * last, 1.015 * last)
    at, total = running_total(records, metrics.GENERATED_TOKENS, metrics.SFT_TOKENS)
    if total[-1] <= 0:
        return
    unit, name = (1e6, "million ") if total[-1] >= 1e6 else (1.0, "")
    total = total / unit
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
        axis.plot(steps, smooth(values), color=color, linewidth=2.2, label=label)


def smooth(values: Sequence[float], reach: int = 2) -> list[float]:
    """Take a moving mean over the neighbours; gaps (NaN) are left out."""
    array = np.asarray(values, dtype=np.float64)
    windows = (array[max(i - reach, 0) : i + reach + 1] for i in range(len(array)))
    finite = (window[np.isfinite(window)] for window in windows)
    return [float(window.mean()) if window.size else math.nan for window in finite]
