"""A run's process: requests to stop, as real signals to this one, and its heartbeat."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from winnow.config.trainer import TrainerConfig
from winnow.observe.sinks import RunInfo
from winnow.run.shutdown import MachineDeadline, ShutdownSignal, Stopped
from winnow.run.supervisor import Heartbeat

JOB_END, BLOCK = "SLURM_JOB_END_TIME", "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"


@pytest.fixture
def stop() -> Iterator[ShutdownSignal]:
    stop = ShutdownSignal()
    with stop.listening():
        yield stop


def send(number: int) -> None:
    os.kill(os.getpid(), number)
    time.sleep(0)  # a bytecode boundary, at which the handler runs


@pytest.mark.parametrize(
    ("number", "code", "reason"),
    [
        (signal.SIGINT, 130, "Ctrl-C"),
        (signal.SIGTERM, 75, "SIGTERM"),
        (signal.SIGHUP, 75, "SIGHUP"),
    ],
)
def test_outside_of_training_a_request_ends_at_once(
    number: int, code: int, reason: str, stop: ShutdownSignal
) -> None:
    with pytest.raises(Stopped) as caught:
        send(number)
    assert (caught.value.exit_code, caught.value.reason) == (code, reason)


def test_a_deferred_request_waits_for_a_check_and_says_for_what(
    stop: ShutdownSignal, capfd: pytest.CaptureFixture[str]
) -> None:
    with stop.deferring():
        stop.check()
        send(signal.SIGTERM)
        with pytest.raises(Stopped):
            stop.check()
    said = "\nwinnow: SIGTERM: finishing the step, then saving\n"
    assert capfd.readouterr().err == said


def test_a_request_during_updates_says_how_many_are_left(
    stop: ShutdownSignal, capfd: pytest.CaptureFixture[str]
) -> None:
    stop.updates_left = lambda: (3, 16)
    with stop.deferring():
        send(signal.SIGTERM)
    said = "\nwinnow: SIGTERM: stopping: 3 of 16 updates of this step left, then saving\n"
    assert capfd.readouterr().err == said


def test_a_request_from_before_breaks_off_the_next_one(stop: ShutdownSignal) -> None:
    async def go() -> None:
        await stop.interruptible(asyncio.sleep(100))

    with stop.deferring():
        send(signal.SIGTERM)
        with pytest.raises(Stopped):
            asyncio.run(go())


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_stopping_ends_at_once(first: int, stop: ShutdownSignal) -> None:
    with stop.deferring():
        send(first)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


@pytest.mark.parametrize(
    ("first", "code", "second"),
    [(signal.SIGINT, 130, signal.SIGTERM), (signal.SIGTERM, 75, signal.SIGHUP)],
)
def test_a_second_request_but_ctrl_c_changes_nothing(
    first: int, code: int, second: int, stop: ShutdownSignal
) -> None:
    with stop.deferring():
        send(first)
        send(second)  # neither ends the saving that is under way, nor takes the place of the first
        with pytest.raises(Stopped) as caught:
            stop.check()
    assert caught.value.exit_code == code
    assert caught.value.args == (first,)
    send(second)  # nor when the run is past deferring: it is on its way out


def test_a_second_sigterm_does_not_break_off_what_cleans_up(stop: ShutdownSignal) -> None:
    cleaned = []

    async def endless() -> None:
        try:
            send(signal.SIGTERM)
            await asyncio.sleep(100)
        finally:
            send(signal.SIGTERM)
            await asyncio.sleep(0.01)
            cleaned.append("all")

    async def go() -> None:
        await stop.interruptible(endless())

    with stop.deferring(), pytest.raises(Stopped):
        asyncio.run(go())
    assert cleaned == ["all"]


def test_ignored_signals_stay_ignored_and_handlers_come_back() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ShutdownSignal().listening():
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
            assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    finally:
        signal.signal(signal.SIGHUP, before)


async def _never() -> None:
    raise AssertionError("a stop that came before must keep it from beginning")


def test_a_stop_while_the_loop_is_made_leaves_no_torn_one(
    stop: ShutdownSignal, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = asyncio.SelectorEventLoop

    class Interrupted(make):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            send(signal.SIGTERM)  # before the loop has what its `close` needs
            super().__init__()

    monkeypatch.setattr(asyncio.DefaultEventLoopPolicy, "_loop_factory", Interrupted)
    torn: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", torn.append)
    with pytest.raises(Stopped) as caught:
        stop.run(_never())
    assert caught.value.reason == "SIGTERM"
    del caught  # its traceback would keep a torn loop
    gc.collect()
    assert torn == []


def test_what_ran_to_its_end_before_a_stop_was_seen_is_not_returned(stop: ShutdownSignal) -> None:
    async def ends_as_asked() -> int:
        send(signal.SIGINT)
        return 1

    with pytest.raises(Stopped) as caught:
        stop.run(ends_as_asked())
    assert caught.value.reason == "Ctrl-C"


def machine_end(now: list[float], **settings: Any) -> MachineDeadline:
    """An end as the configuration has it, by a clock that stands still."""
    return MachineDeadline(TrainerConfig(**settings), lambda: now[0])


def test_a_run_ends_before_a_step_that_the_machine_would_not_see_the_end_of(
    stop: ShutdownSignal,
) -> None:
    now = [0.0]
    end = machine_end(now, expires_at=1000)
    end.save_s = lambda: 40.0
    end.log(1, {"time/step_s": 150.0, "time/evaluate_s": 50.0, "time/rollout_s": 70.0})
    end.log(2, {"time/step_s": 90.0, "time/rollout_s": 70.0})
    # The longest step of 100 s without evaluation, 40 s to save it, and a minute.
    now[0] = 799.0
    with stop.deferring(), stop.stop_before(end):
        stop.check()
        now[0] = 801.0
        with pytest.raises(Stopped) as caught:
            stop.check()
    assert caught.value.exit_code == 75
    when = "1970-01-01 00:16:40 UTC (trainer.expires_at)"
    assert caught.value.reason == f"the machine's end at {when}"
    assert end.notes == [f"The run saves and ends before the machine's end at {when}"]
    # Within a step sampling is broken off: 30 s are needed for the rest.
    assert not end.is_near()
    now[0] = 871.0
    assert end.is_near()


def test_sampling_is_broken_off_where_the_machine_is_about_to_end(stop: ShutdownSignal) -> None:
    now = [0.0]
    end = machine_end(now, expires_at="1970-01-01T00:02:00Z", expiry_margin_s=20)

    async def go() -> None:
        sampling = stop.interruptible(asyncio.sleep(600))
        now[0] = 101.0
        await sampling

    with stop.deferring(), stop.stop_before(end), pytest.raises(Stopped, match="15"):
        asyncio.run(go())


@pytest.mark.parametrize(
    ("given", "announced", "at_s", "told"),
    [
        (None, {JOB_END: "500"}, 500.0, [JOB_END]),
        ("never", {JOB_END: "500"}, math.inf, []),
        (900, {JOB_END: "500"}, 900.0, ["trainer.expires_at"]),
        (None, {JOB_END: "90"}, math.inf, [f"{JOB_END}=90 is past"]),
        (None, {JOB_END: "soon"}, math.inf, [f"{JOB_END}=soon is not a time and is ignored"]),
        (None, {JOB_END: "900", BLOCK: "700.5"}, 700.5, [JOB_END, BLOCK]),
        (None, {JOB_END: "500", BLOCK: "700.5"}, 500.0, [JOB_END]),
    ],
)
def test_the_end_is_the_recipes_or_what_the_platform_announces(
    given: Any,
    announced: dict[str, str],
    at_s: float,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in (JOB_END, BLOCK):
        monkeypatch.delenv(name, raising=False)
    for name, value in announced.items():
        monkeypatch.setenv(name, value)
    end = machine_end([100.0], expires_at=given)
    assert end.at_s == at_s
    assert len(end.notes) == len(told)
    assert all(word in note for word, note in zip(told, end.notes, strict=True))


# What a run tells its supervisor


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    yield reader, writer
    os.close(reader)


def lines(reader: int) -> list[str]:
    try:
        return os.read(reader, 65536).decode().splitlines()
    except BlockingIOError:
        return []


def test_it_beats_while_something_moves_and_only_then(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnow.run.shutdown._HEARTBEAT_S", 0.001)
    reader, writer = pipe
    looks, count = threading.Semaphore(0), 0

    def reading() -> int:
        looks.release()
        return count

    def looked() -> None:
        while looks.acquire(blocking=False):
            pass
        for _ in range(2):  # when the second begins, what the first saw has been told
            looks.acquire()

    heartbeat = Heartbeat(writer)
    heartbeat.watch_counters(reading)
    looked()
    lines(reader)
    looked()
    assert lines(reader) == []
    count = 1
    looked()
    assert lines(reader) == ["beat"]
    heartbeat.beat()
    looked()
    assert lines(reader) == ["beat"]
    heartbeat.watch_counters(lambda: 0)  # from now on, in the place of the count
    time.sleep(0.2)
    lines(reader)
    count = 2
    time.sleep(0.2)
    assert lines(reader) == []


def test_it_names_the_folder_and_each_step(pipe: tuple[int, int], tmp_path: Path) -> None:
    reader, writer = pipe
    heartbeat = Heartbeat(writer)
    heartbeat.send_folder(tmp_path)
    heartbeat.start(RunInfo("a", 9, first_step=4))
    heartbeat.log(4, {})
    told = [line for line in lines(reader) if line != "beat"]
    assert told == [f"folder {tmp_path}", "step 3", "step 4"]
    assert not os.get_inheritable(writer)
