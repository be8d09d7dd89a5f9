"""Sinks of records: several as one, and a user's own, which can stop no run."""

from __future__ import annotations

import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from winnow.config.root import CustomSink, TrackingConfig
from winnow.errors import ConfigError
from winnow.observe import sinks as module
from winnow.observe.sinks import BackgroundSink, RunInfo, Sinks, load_user_sink

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
    sinks = Sinks([Ear("a", heard), Ear("b", heard)])
    sinks.add_to_first_record({"sft/time_s": 3})
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


@pytest.mark.parametrize(
    ("where", "error"),
    [*((where, "OSError") for where in ("init", "start", "log", "close")), ("log", "SystemExit")],
)
def test_a_sink_that_raises_is_dropped_with_one_warning_and_the_others_go_on(
    tmp_path: Path, where: str, error: str
) -> None:
    bad = section(tmp_path, FAILING.replace("OSError", error), "Sink", where=where)
    good = section(tmp_path, EXAMPLE, "Table", file=str(tmp_path / "table.txt"))
    warnings: list[str] = []
    sinks = enumerate([bad, good])
    run(Sinks([load_user_sink(each, i, warnings.append, TrackingConfig()) for i, each in sinks]))
    assert (tmp_path / "table.txt").read_text() == "run 2\n1 0.5\n2 1.0\n"
    assert warnings == [
        f"Warning: observe.sinks[0].path {bad.path} is disabled: {error}: no network in {where} "
        "(training continues)"
    ]


def test_a_sink_that_cannot_be_one_is_refused_before_the_run(tmp_path: Path) -> None:
    for code, message in (
        ("class Sink:\n def start(self, info): ...", r"\[0\]\.path .*:Sink has no method log; a"),
        ("other = 1", "has no callable Sink; define Sink in it"),
        ("import nothing_of_this_name", "importing it fails with ModuleNotFoundError"),
    ):
        with pytest.raises(ConfigError, match=message):
            load_user_sink(section(tmp_path, code, "Sink"), 0, print, TrackingConfig())


class Stuck:
    """Takes the first record only when it is let go."""

    def __init__(self) -> None:
        self.may_go, self.began = threading.Event(), threading.Event()
        self.steps: list[int] = []
        self.ended = False

    def start(self, info: RunInfo) -> None: ...

    def log(self, step: int, record: object) -> None:
        self.began.set()
        self.may_go.wait(60)
        self.steps.append(step)

    def close(self) -> None:
        self.ended = True


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    sink = Stuck()
    yield sink
    sink.may_go.set()


def background(sink: Stuck, said: list[str], **limits: float) -> BackgroundSink:
    """The sink in its thread, which is at the first record."""
    made = BackgroundSink("mine", lambda: sink, TrackingConfig(**limits), said.append)
    made.start(RunInfo("run", 9))
    made.log(1, {"a": 1.0})
    assert sink.began.wait(60)
    return made


def test_a_sink_that_hangs_is_dropped_and_neither_a_step_nor_the_end_waits_for_it(
    stuck: Stuck,
) -> None:
    said: list[str] = []
    sink = background(stuck, said, timeout_s=0.05)
    stuck.may_go.wait(0.1)
    for step in range(2, 5):
        sink.log(step, {"a": 2.0})
    sink.close()
    assert module.has_hanging_sink()
    assert stuck.steps == []
    assert said == [
        "Warning: mine is disabled: no response within 0.05 s (observe.tracking.timeout_s) "
        "(training continues)"
    ]
    stuck.may_go.set()
    for thread in module._abandoned:
        thread.join(60)
    assert (stuck.steps, stuck.ended, module.has_hanging_sink()) == ([1], True, False)
    assert len(said) == 1


def test_the_start_waits_for_sinks_to_be_ready_but_no_longer_than_it_may(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = threading.Event()

    def slow(info: RunInfo) -> None:
        stuck.may_go.wait(0.05)
        ready.set()

    monkeypatch.setattr(stuck, "start", slow)
    Sinks([BackgroundSink("mine", lambda: stuck, TrackingConfig(), print)]).start(RunInfo("a", 1))
    assert ready.is_set()
    monkeypatch.setattr(module, "BEGIN_S", 0.05)
    monkeypatch.setattr(stuck, "start", lambda info: stuck.may_go.wait(60))
    late = BackgroundSink("mine", lambda: stuck, TrackingConfig(), print)
    Sinks([late]).start(RunInfo("a", 1))
    assert not late._is_ready.is_set()


def test_a_sink_that_is_behind_misses_records_until_it_has_caught_up(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    said: list[str] = []
    sink = background(stuck, said)
    for step in range(2, 7):
        sink.log(step, {"a": 2.0})
    stuck.may_go.set()
    while not sink._calls.empty():
        stuck.may_go.wait(0.01)
    sink.log(7, {"a": 2.0})
    sink.close()
    assert stuck.steps == [1, 2, 3, 7]
    assert said == [
        "Warning: mine is 2 records behind; new records are dropped until it catches up, and "
        "metrics.jsonl is complete",
        "Warning: mine was too slow and lost 3 records",
    ]


def test_sinks_that_hang_may_take_the_time_for_the_end_together(
    stuck: Stuck, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    said: list[str] = []
    made = [background(stuck, said, close_s=0.01) for _ in range(3)]
    patience: list[float] = []
    for sink in made:
        monkeypatch.setattr(sink._thread, "join", patience.append)
    original = made[-1].close

    def close() -> None:
        original()
        now[0] = 200.0  # all of the time is used up by the first that is waited for

    monkeypatch.setattr(made[-1], "close", close)
    Sinks(made).close()
    assert patience == pytest.approx([0.01, 0, 0])
    assert len(said) == 3
