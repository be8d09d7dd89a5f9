"""What holds for every run that these tests make."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from winnow.observe.metric_names import find_metric


@pytest.fixture(scope="module", autouse=True)
def figures_are_listed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Every figure that a run of the file's tests has written stands in docs/metrics.md."""
    began = time.time()
    yield
    unknown = {
        name
        for file in tmp_path_factory.getbasetemp().rglob("metrics.jsonl")
        if file.stat().st_mtime >= began and file.with_name("config.yaml").is_file()
        for name in names_in(file)
        if find_metric(name) is None
    }
    assert not unknown, "add them to winnow.observe.metric_names"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, warm_starts: Path) -> Path:
    """A folder to type commands in; its cache has the warm starts of all tests, and no more."""
    home = tmp_path_factory.mktemp("home")
    (home / "cache").mkdir()
    (warm_starts / "warm-starts").mkdir(exist_ok=True)
    (home / "cache/warm-starts").symlink_to(warm_starts / "warm-starts")
    return home


def names_in(file: Path) -> set[str]:
    """The names of a run's figures, without those of a loss of its own."""
    lines = [
        json.loads(line) for line in file.read_text().splitlines() if line[:1] + line[-1:] == "{}"
    ]
    own = "path: losses.py" in file.with_name("config.yaml").read_text()
    names = {name for line in lines for name in line} - {"step", "non_finite"}
    return {name for name in names if not (own and name.startswith("actor/"))}
