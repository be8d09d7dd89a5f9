"""Pictures of several runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.axes import Axes
from tests.recipes import recipe

from winnow.config.load import dump_config
from winnow.errors import WinnowError
from winnow.evaluation.plot import PlotRequest, _crop_wide_bands, _curve_points, plot_runs
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import MetricsLog

REWARD, HELD_OUT = "score/reward/mean", "eval/a/avg@1"


def make_run(home: Path, name: str, values: list[float], *overrides: str) -> str:
    """A run with a reward of each step, 10 tokens and half an hour a step."""
    folder = RunFolder.create(home, name, "quickstart")
    folder.save_config(dump_config(recipe("quickstart", f"run.name={name}", *overrides)))
    log = MetricsLog(folder.metrics)
    for step, value in enumerate(values, start=1):
        record = {REWARD: value, "sampling/tokens/generated": 10, "time/step_s": 1800.0}
        log.log(step, record | ({HELD_OUT: 0.004} if step % 2 else {}))
    log.close()
    return str(folder.path)


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, list[float], list[float]]]:
    """Label, places and values of what is drawn; bands as their lower and upper edge."""
    found: list[tuple[str, list[float], list[float]]] = []
    real, band = Axes.plot, Axes.fill_between

    def plotted(self: Axes, x: Any, y: Any, *more: Any, **style: Any) -> Any:
        found.append((style["label"], [*map(float, x)], [*map(float, y)]))
        return real(self, x, y, *more, **style)

    def filled(self: Axes, x: Any, low: Any, high: Any, **style: Any) -> Any:
        found.append(("band", [*map(float, low)], [*map(float, high)]))
        return band(self, x, low, high, **style)

    monkeypatch.setattr(Axes, "plot", plotted)
    monkeypatch.setattr(Axes, "fill_between", filled)
    return found


def test_seeds_of_a_recipe_are_a_mean_with_its_interval(
    tmp_path: Path, lines: list[tuple[str, list[float], list[float]]]
) -> None:
    runs = [
        make_run(tmp_path, "dapo-1", [1, 4, 7], "run.seed=1"),
        make_run(tmp_path, "dapo-2", [2, 4], "run.seed=2"),
        make_run(tmp_path, "dapo-3", [3, 4, 9], "run.seed=3"),
        make_run(tmp_path, "other", [0, math.nan, 1], "optim.lr=1e-4"),
    ]
    plot_runs(PlotRequest(runs, [REWARD], tmp_path / "a.svg"))
    (mean, (_, low, high), other) = lines
    assert mean == ("dapo (3 runs)", [1, 2], [2, 4])
    half = 4.302653 / math.sqrt(3)  # Student's t for two degrees of freedom; the deviation is 1
    assert np.allclose([low, high], [[2 - half, 4], [2 + half, 4]])
    assert other == ("other", [1, 3], [0, 1])
    text = (tmp_path / "a.svg").read_text()
    for word in ("dapo (3 runs)", "other", REWARD, "step"):
        assert f">{word}</text>" in text
    plot_runs(PlotRequest(runs, [REWARD], tmp_path / "b.svg"))
    assert (tmp_path / "b.svg").read_text() == text


def test_the_wide_interval_of_two_runs_does_not_press_the_curves_flat() -> None:
    from matplotlib.figure import Figure

    axis = Figure().subplots()
    axis.plot([1, 2], [0.2, 0.4], label="a")
    axis.fill_between([1, 2], [-5, 0.1], [5, 0.5])
    _crop_wide_bands(axis)
    assert np.allclose(axis.get_ylim(), (0.1, 0.5))


@pytest.mark.parametrize(("by", "unit"), [("tokens", 10.0), ("time", 0.5)])
def test_tokens_and_hours_are_axes_as_well(
    by: Any, unit: float, tmp_path: Path, lines: list[tuple[str, list[float], list[float]]]
) -> None:
    runs = [make_run(tmp_path, f"a-{seed}", [1, 2, 3], f"run.seed={seed}") for seed in (1, 2)]
    plot_runs(PlotRequest(runs[:1], [REWARD], tmp_path / "a.png", by))
    assert lines.pop() == ("a-1", [unit, 2 * unit, 3 * unit], [1, 2, 3])
    plot_runs(PlotRequest(runs, [REWARD, HELD_OUT], tmp_path / "a.png", by))
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"
    label, at, values = lines[0]
    assert label == "a (2 runs)"
    assert np.allclose(np.array(at) / unit, values)
    assert lines[2][2] == [0.004] * len(lines[2][2])


def test_a_run_that_imitates_has_the_tokens_of_its_demonstrations() -> None:
    records = [{"step": step, "sft/tokens": 10.0, "sft/loss": 1.0 / step} for step in (1, 2, 4)]
    at, values = _curve_points(records, "sft/loss", PlotRequest([], [], Path("a.png"), "tokens"))
    assert at.tolist() == [10, 20, 30]
    assert values.tolist() == [1, 0.5, 0.25]


@pytest.mark.parametrize("by", ["steps", "tokens", "time"])
def test_seeds_without_a_place_in_common_have_no_curve(
    by: Any, tmp_path: Path, lines: list[tuple[str, list[float], list[float]]]
) -> None:
    runs = [
        make_run(tmp_path, "a-1", [1, math.nan], "run.seed=1"),
        make_run(tmp_path, "a-2", [math.nan, 2], "run.seed=2"),
        make_run(tmp_path, "b", [4, 5], "optim.lr=1e-4"),
    ]
    plot_runs(PlotRequest(runs, [REWARD], tmp_path / "a.png", by))
    assert [label for label, *_ in lines] == ["b"]


def test_what_is_not_there_is_named_before_anything_is_written(tmp_path: Path) -> None:
    run = make_run(tmp_path, "a", [1])
    empty = make_run(tmp_path, "empty", [])
    (Path(make_run(tmp_path, "torn", [1])) / "config.yaml").write_text("optim: {lr")
    for request, said in (
        (PlotRequest([run], ["score/reward/men"], tmp_path / "a.png"), f"did you mean {REWARD}"),
        (PlotRequest([run], [], tmp_path / "a.jpg"), "--out must end in .png or .svg, got"),
        (PlotRequest([empty], [], tmp_path / "a.png"), "no steps yet"),
        (PlotRequest([f"{tmp_path}/torn"], [], tmp_path / "a.png"), "cannot read .*config.yaml"),
        (PlotRequest([str(tmp_path)], [], tmp_path / "a.png"), "not a run's folder"),
    ):
        with pytest.raises(WinnowError, match=said):
            plot_runs(request)
    assert not (tmp_path / "a.png").exists()
