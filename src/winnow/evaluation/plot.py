"""Pictures of figures of several runs, drawn from their metrics.jsonl: what `winnow plot` does.

Runs whose recipes differ in the seed alone are one curve: the mean, and the 95 % interval of the
mean by Student's t, where all of them have a value. Each figure has its own scale.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from os.path import commonprefix
from pathlib import Path
from typing import Any, Literal

import numpy as np

from winnow.errors import ConfigError
from winnow.evaluation.statistics import two_sided_bound
from winnow.observe import metrics
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics, running_total, series
from winnow.observe.metric_names import find_metric
from winnow.observe.metrics import Record, grouped
from winnow.views.curve import COLORS, LINES, saved_figure, smooth, use_percent_ticks

Axis = Literal["steps", "tokens", "time"]
DEFAULT_METRICS = (metrics.REWARD, metrics.ACCURACY, metrics.LENGTH, metrics.ENTROPY)
_FEW = 30
"""Points of a curve up to which each is marked."""
_GRID = 200
_OF_SEEDS = {"run", "observe"}
_SPENT = {
    "tokens": ((metrics.GENERATED_TOKENS, metrics.SFT_TOKENS), 1.0),
    "time": ((metrics.STEP_S,), 3600.0),
}
"""Figures whose sum an axis counts, and how much of it is one unit there."""


@dataclass(frozen=True)
class PlotRequest:
    """Runs, figures and form of a picture."""

    runs: Sequence[str]
    metrics: Sequence[str]
    out: Path
    by: Axis = "steps"
    smooth: int = 0
    """Neighbours on either side that a moving mean takes in."""


@dataclass(frozen=True)
class _Curve:
    """The runs of one recipe."""

    label: str
    records: Sequence[Sequence[Record]]


def plot_runs(request: PlotRequest) -> None:
    """Draw figures of runs into a PNG or SVG file, a panel each.

    Raises:
        ConfigError: a run or a figure that is not there, or a file of another kind.
        WinnowError: metrics.jsonl cannot be read, or the picture not be written.
    """
    if request.out.suffix.lower() not in (".png", ".svg"):
        raise ConfigError(f"--out must end in .png or .svg, got {str(request.out)!r}")
    curves = _read_curves(request.runs)
    names = _choose_metrics(request.metrics, curves)
    columns = 1 if len(names) == 1 else 2
    rows = -(-len(names) // columns)
    size = (5.2 * columns if columns > 1 else 7.6, 2.7 * rows + 0.9)
    with saved_figure(request.out, size) as figure:
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for axis, name in zip(axes, names, strict=False):
            _paint_panel(axis, name, curves, request)
        for axis in axes[len(names) :]:
            axis.remove()
        handles = {
            label: handle
            for axis in axes[: len(names)]
            for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)
        }
        figure.legend([*handles.values()], [*handles], loc="outside lower center", ncols=2)


def _read_curves(runs: Sequence[str]) -> list[_Curve]:
    """Read the runs, and put those of one recipe together."""
    folders = (RunFolder.open(run) for run in runs)
    by_recipe = grouped((recipe_key(folder.read_recipe()), folder) for folder in folders)
    return [
        _Curve(_curve_label(alike), [read_metrics(folder.metrics) for folder in alike])
        for alike in by_recipe.values()
    ]


def recipe_key(recipe: Mapping[str, Any]) -> str:
    """Return a text that runs have in common whose recipes differ in the seed alone.

    Args:
        recipe: as a tree.
    """
    rest = {name: keys for name, keys in recipe.items() if name not in _OF_SEEDS}
    return json.dumps(rest, sort_keys=True, default=str)


def _curve_label(folders: Sequence[RunFolder]) -> str:
    if len(folders) == 1:
        return folders[0].name
    names = [folder.name for folder in folders]
    shared = commonprefix(names).rstrip("-_.0123456789")  # noqa: RUF071 (no paths)
    return f"{shared or folders[0].name} ({len(folders)} runs)"


def _choose_metrics(requested: Sequence[str], curves: Sequence[_Curve]) -> list[str]:
    """Return the figures to draw: those asked for, or those of `DEFAULT_METRICS` that are there."""
    available = dict.fromkeys(name for c in curves for run in c.records for r in run for name in r)
    for name in requested:
        if name not in available:
            near = get_close_matches(name, available, n=3, cutoff=0.4)
            hint = f"did you mean {' or '.join(near)}?" if near else "`winnow metrics` lists all"
            raise ConfigError(f"--metrics: no run has the figure {name!r}; {hint}")
    chosen = [*dict.fromkeys(requested or (name for name in DEFAULT_METRICS if name in available))]
    if not chosen:
        raise ConfigError("the runs have no steps yet; name figures with --metrics, or wait")
    return chosen


def _paint_panel(axis: Any, name: str, curves: Sequence[_Curve], request: PlotRequest) -> None:
    from matplotlib.ticker import MaxNLocator

    for index, curve in enumerate(curves):
        traces = [_curve_points(records, name, request) for records in curve.records]
        traces = [points for points in traces if len(points[0])]
        if not traces:
            continue
        at, values = _align_runs(traces, request.by)
        if not at.size:
            continue
        color, line = COLORS[index % len(COLORS)], LINES[index // len(COLORS) % len(LINES)]
        is_marked = len(traces[0][0]) <= _FEW and (request.by == "steps" or len(traces) == 1)
        marker, mean = "o" if is_marked else "", values.mean(0)
        axis.plot(at, mean, line, color=color, marker=marker, markersize=3.5, label=curve.label)
        if (runs := len(values)) > 1:
            half = two_sided_bound(0.05, runs - 1) * values.std(0, ddof=1) / np.sqrt(runs)
            axis.fill_between(at, mean - half, mean + half, color=color, alpha=0.18, lw=0)
    _crop_wide_bands(axis)
    about = find_metric(name)
    unit = about.unit if about else ""
    axis.set_title(name, loc="left", fontsize=10, fontweight="bold")
    if unit == "share":
        use_percent_ticks(axis)
    elif unit:
        axis.set_ylabel(unit)
    axis.set_xlabel({"steps": "step", "tokens": "tokens", "time": "hours"}[request.by])
    axis.xaxis.set_major_locator(MaxNLocator(6, integer=request.by == "steps"))


def _crop_wide_bands(axis: Any) -> None:
    """Cut the scale where the interval of few runs would leave no room for the curves."""
    drawn = np.concatenate([np.ravel(line.get_ydata()) for line in axis.lines] or [np.zeros(1)])
    room = (drawn.max() - drawn.min()) / 2 or np.inf
    low, high = axis.get_ylim()
    axis.set_ylim(max(low, drawn.min() - room), min(high, drawn.max() + room))


def _curve_points(records: Sequence[Record], name: str, request: PlotRequest) -> tuple[Any, Any]:
    """Return where a run has a figure, in units of the axis, and the finite values."""
    steps, raw = series(records, name)
    at, values = np.asarray(steps, dtype=np.float64), np.asarray(smooth(raw, request.smooth))
    if request.by != "steps" and len(at):
        figures, unit = _SPENT[request.by]
        all_steps, spent = running_total(records, *figures)
        at = np.interp(at, all_steps, spent / unit)
    finite = np.isfinite(values)
    return at[finite], values[finite]


def _align_runs(traces: Sequence[tuple[Any, Any]], by: Axis) -> tuple[Any, Any]:
    """Return the places that all runs have, and the values there `[R, N]`."""
    if len(traces) == 1:
        return traces[0][0], traces[0][1][None]
    if by == "steps":
        at = np.array(sorted(set.intersection(*(set(points[0]) for points in traces))))
    else:
        first, last = max(p[0][0] for p in traces), min(p[0][-1] for p in traces)
        at = np.linspace(first, last, _GRID if first <= last else 0)
    return at, np.stack([np.interp(at, *points) for points in traces])
