"""Sinks of records: several as one, and a user's own, which can stop no run."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from winnow.config.root import CustomSink
from winnow.errors import ConfigError
from winnow.observe import sinks as module
from winnow.observe.sinks import RunInfo, Sinks, UserSink

# The example of the module's docstring.
EXAMPLE = textwrap.dedent(str(module.__doc__).partition("Example:\n")[2])
FAILING = """
class Sink:
    def __init__(self, where):
        self.where = where
        self.fail("init")

    def start(self, info):
        self.fail("start")

    def log(self, step, record):
        record.clear()  # its own copy
        self.fail("log")

    def close(self):
        self.fail("close")

    def fail(self, here):
        if here == self.where:
            raise OSError(f"no network\\nin {here}")
"""


class Ear:
    """Keeps what it hears."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self.name, self.heard = name, heard

    def start(self, info: RunInfo) -> None:
        self.heard.append(f"{self.name} start {info.name}")

    def log(self, step: int, record: object) -> None:
        self.heard.append(f"{self.name} {step} {record}")

    def close(self) -> None:
        self.heard.append(f"{self.name} close")
        if self.name == "b":
            raise OSError("disk gone")


def run(sinks: Sinks) -> None:
    sinks.start(RunInfo("run", 2))
    for step in (1, 2):
        sinks.log(step, {"score/reward/mean": step / 2})
    sinks.close()


def section(tmp_path: Path, code: str, name: str, **options: str) -> CustomSink:
    file = tmp_path / f"sink{len(list(tmp_path.iterdir()))}.py"
    file.write_text(code)
    return CustomSink(path=f"{file}:{name}", options={**options})


def test_several_sinks_hear_the_same_and_all_close_in_reverse_even_if_one_fails() -> None:
    heard: list[str] = []
    sinks = Sinks([Ear("a", heard), Ear("b", heard)], first={"sft/time_s": 3})
    with pytest.raises(OSError, match="disk gone"):
        run(sinks)
    assert heard == [
        "a start run",
        "b start run",
        "a 1 {'score/reward/mean': 0.5, 'sft/time_s': 3}",
        "b 1 {'score/reward/mean': 0.5, 'sft/time_s': 3}",
        "a 2 {'score/reward/mean': 1.0}",
        "b 2 {'score/reward/mean': 1.0}",
        "b close",
        "a close",
    ]


def test_a_sink_of_ones_own_gets_every_record(tmp_path: Path) -> None:
    own = section(tmp_path, EXAMPLE, "Table", file=str(tmp_path / "table.txt"))
    warnings: list[str] = []
    run(Sinks([UserSink(own, 0, warnings.append)]))
    assert (tmp_path / "table.txt").read_text() == "run 2\n1 0.5\n2 1.0\n"
    assert warnings == []


@pytest.mark.parametrize("where", ["init", "start", "log", "close"])
def test_a_sink_that_raises_is_dropped_with_one_warning_and_the_others_go_on(
    tmp_path: Path, where: str
) -> None:
    bad = section(tmp_path, FAILING, "Sink", where=where)
    good = section(tmp_path, EXAMPLE, "Table", file=str(tmp_path / "table.txt"))
    warnings: list[str] = []
    run(Sinks([UserSink(each, i, warnings.append) for i, each in enumerate([bad, good])]))
    assert (tmp_path / "table.txt").read_text() == "run 2\n1 0.5\n2 1.0\n"
    assert warnings == [
        f"Warning: observe.sinks[0].path {bad.path} fails with OSError: no network in {where}; it "
        "gets no more records, and the run goes on"
    ]


def test_a_sink_that_cannot_be_one_is_refused_before_the_run(tmp_path: Path) -> None:
    for code, message in (
        (
            "class Sink:\n def start(self, info): ...",
            r"\[0\]\.path .*:Sink has no method log; a",
        ),
        ("other = 1", "has no callable Sink; define Sink in it"),
        ("import nothing_of_this_name", "importing it fails with ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=message):
            UserSink(section(tmp_path, code, "Sink"), 0, print)
