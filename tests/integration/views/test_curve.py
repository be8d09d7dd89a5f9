"""The learning curve is a real picture of the size a README needs."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread

from winnow.errors import WinnowError
from winnow.observe.jsonl import MetricsLog
from winnow.views import curve
from winnow.views.curve import DPI, SIZE_INCHES, CurveSink, draw_curve

Records = list[dict[str, float]]


def make_run(folder: Path, records: Records) -> Path:
    sink = MetricsLog(folder / "metrics.jsonl")
    for record in records:
        sink.log(int(record["step"]), {k: v for k, v in record.items() if k != "step"})
    sink.close()
    return folder


def size_of(png: Path) -> tuple[int, int]:
    head = png.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", head[16:])  # type: ignore[return-value]


def is_drawn(png: Path) -> bool:
    """Whether a fair part of the picture is not white."""
    return float(np.mean(imread(png)[..., :3].min(axis=-1) < 0.9)) > 0.01


def test_a_run_is_drawn_at_its_size_beside_its_metrics(
    tmp_path: Path, quickstart_records: Records
) -> None:
    target = draw_curve(make_run(tmp_path / "run", quickstart_records))
    assert target == tmp_path / "run" / "curve.png"
    assert size_of(target) == tuple(round(side * DPI) for side in SIZE_INCHES)
    assert is_drawn(target)
    assert sorted(file.name for file in target.parent.iterdir()) == ["curve.png", "metrics.jsonl"]


@pytest.mark.parametrize(
    "records",
    [
        [{"step": 1}],
        [{"step": 0, "eval/a/pass@1": 0.5}, {"step": 0, "eval/b/pass@1": 0.1}],
        [{"step": 1, "sampling/accuracy": float("nan"), "length/response/mean": float("nan")}],
        [{"step": s, "score/accuracy/mean": 0.5, "sampling/tokens/generated": 9} for s in (1, 2)],
        [{"step": 1, "sampling/tokens/generated": 0, "length/truncated": 0.0}],
    ],
)
def test_a_run_with_few_figures_is_drawn_all_the_same(tmp_path: Path, records: Records) -> None:
    folder = make_run(tmp_path, records)
    assert size_of(draw_curve(folder)) == (1290, 1080)


def test_while_a_run_lasts_it_is_drawn_now_and_then(
    tmp_path: Path, quickstart_records: Records, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, now = make_run(tmp_path, quickstart_records), [1000.0]
    monkeypatch.setattr(curve.time, "monotonic", lambda: now[0])
    sink = CurveSink(folder)
    drawn = []
    for seconds in (59, 2, 1, 58, 1):
        now[0] += seconds
        sink.log(1, {})
        drawn.append((folder / "curve.png").exists())
        (folder / "curve.png").unlink(missing_ok=True)
    assert drawn == [False, True, False, False, True]


def test_low_accuracies_fill_the_scale(tmp_path: Path) -> None:
    from matplotlib.figure import Figure

    axis = Figure(layout="constrained").subplots()
    curve._paint_accuracy(axis, [{"step": s, "sampling/accuracy": s / 1000} for s in range(9)])
    assert axis.get_ylim()[1] < 0.01
    assert axis.yaxis.get_major_formatter()(0.004) == "0.40 %"


def test_a_run_without_a_step_is_named(tmp_path: Path) -> None:
    MetricsLog(tmp_path / "metrics.jsonl").close()
    with pytest.raises(WinnowError, match="has no steps yet"):
        draw_curve(tmp_path)
