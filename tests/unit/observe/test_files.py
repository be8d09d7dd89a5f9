"""The folder of a run and its log."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from tests.unprivileged import permissions_apply

from winnow.errors import ConfigError, WinnowError
from winnow.observe import files as module
from winnow.observe.files import RunFolder


def test_a_run_without_a_name_is_called_after_recipe_date_and_time_and_a_number_where_it_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Noon(module.datetime.datetime):
        @classmethod
        def now(cls, tz: object = None) -> Noon:
            return cls(2026, 1, 2, 12)

    monkeypatch.setattr(module.datetime, "datetime", Noon)
    recipes = "recipes/quickstart.yaml", "quickstart", "quickstart", "mine/qwen3-0.6b.yaml"
    names = [RunFolder.create(tmp_path / "runs", None, recipe).name for recipe in recipes]
    at = "20260102-120000"
    first = f"quickstart-{at}"
    assert names == [first, f"{first}-2", f"{first}-3", f"qwen3-0.6b-{at}"]


def test_a_name_that_holds_a_run_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "mine", "quickstart")
    folder.save_config("seed: 1\n")
    with pytest.raises(
        ConfigError, match=r"run\.name=mine: .*already contains a run; choose another"
    ):
        RunFolder.create(tmp_path, "mine", "quickstart")
    assert folder.config.read_text() == "seed: 1\n"


def test_a_file_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    with pytest.raises(WinnowError, match=r"cannot write .*/runs/mine: Not a directory; check the"):
        RunFolder.create(tmp_path / "runs", "mine", "quickstart")
    with pytest.raises(WinnowError, match=r"cannot write .*/runs: File exists; check the path, or"):
        RunFolder.create(tmp_path, "runs", "quickstart")


def test_a_run_that_may_not_be_looked_at_is_no_missing_one(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, "mine", "quickstart")
    folder.save_config("seed: 1\n")
    folder.path.chmod(0)
    try:
        with permissions_apply(), pytest.raises(WinnowError) as caught:
            RunFolder.open(folder.path)
    finally:
        folder.path.chmod(0o700)
    assert str(caught.value) == (
        f"cannot use {folder.config}: Permission denied; "
        "choose a writable folder with run.dir=FOLDER"
    )


def test_what_is_logged_and_warned_goes_to_the_log_while_the_block_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest keeps what reaches the root logger, and xdist cannot send half a character on.
    monkeypatch.setattr(logging.getLogger("winnow"), "propagate", False)
    folder = RunFolder.create(tmp_path, "mine", "quickstart")
    logger = logging.getLogger("winnow.sampling")
    with folder.logging_to_file():
        logger.info("group %d closed: \ud83d", 7)
        logger.debug("too fine")
        warnings.warn("careful", stacklevel=1)
    logger.warning("too late")
    text = folder.log.read_text()
    assert re.match(r"\d{4}-\d\d-\d\d .* INFO winnow\.sampling: group 7 closed: \\ud83d\n", text)
    assert "careful" in text
    assert "too" not in text
    assert logging.getLogger("winnow").handlers == []


def test_a_full_disk_silences_the_log_with_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    disk_full_after: Callable[[int], AbstractContextManager[None]],
) -> None:
    folder = RunFolder.create(tmp_path, "mine", "quickstart")
    with folder.logging_to_file(), disk_full_after(100):
        for _ in range(5):
            logging.getLogger("winnow").info("x" * 60)
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert re.search(
        r"cannot write .*log\.txt: File too large; free some space.* \(no log\)", message
    )
    assert re.fullmatch(r"[^\n]* INFO winnow: x{60}\n", folder.log.read_text())


def test_a_run_that_fails_is_not_asked_about_its_log(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    disk_full_after: Callable[[int], AbstractContextManager[None]],
) -> None:
    folder = RunFolder.create(tmp_path, "mine", "quickstart")

    def fail() -> None:
        with folder.logging_to_file(), disk_full_after(10):
            logging.getLogger("winnow").info("hello")
            raise WinnowError("metrics")

    with pytest.raises(WinnowError, match="metrics"):
        fail()
    assert capsys.readouterr().err == ""
    assert folder.log.read_bytes() == b""
