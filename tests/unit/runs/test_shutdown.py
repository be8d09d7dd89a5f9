"""Requests to stop, as real signals to this process."""

from __future__ import annotations

import asyncio
import gc
import math
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from winnow.config.trainer import TrainerConfig
from winnow.runs.process import MachineEnd, ShutdownSignal, Stopped

CAPACITY_BLOCK = "MLP_CURRENT_CAPACITY_BLOCK_EXPIRATION_TIMESTAMP"


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


def test_a_deferred_request_waits_for_a_check(stop: ShutdownSignal) -> None:
    with stop.deferring():
        stop.check()
        send(signal.SIGTERM)
        with pytest.raises(Stopped):
            stop.check()


def test_what_may_be_broken_off_is_broken_off_at_once(stop: ShutdownSignal) -> None:
    cleaned = []

    async def endless() -> None:
        try:
            for turn in range(10_000):
                if turn == 3:
                    send(signal.SIGINT)
                await asyncio.sleep(0.001)
        finally:
            cleaned.append(turn)

    async def go() -> None:
        await stop.interruptible(endless())

    with stop.deferring(), pytest.raises(Stopped):
        asyncio.run(go())
    assert cleaned[0] < 10


def test_a_request_from_before_breaks_off_the_next_one(stop: ShutdownSignal) -> None:
    async def go() -> None:
        await stop.interruptible(asyncio.sleep(100))

    with stop.deferring():
        send(signal.SIGTERM)
        with pytest.raises(Stopped):
            asyncio.run(go())


def test_an_error_of_the_work_is_not_taken_for_a_stop(stop: ShutdownSignal) -> None:
    async def fails() -> None:
        raise ValueError("mine")

    async def go() -> None:
        await stop.interruptible(fails())

    with pytest.raises(ValueError, match="mine"):
        asyncio.run(go())


def test_undisturbed_work_gives_its_result(stop: ShutdownSignal) -> None:
    async def go() -> int:
        return await stop.interruptible(asyncio.sleep(0, 7))

    assert asyncio.run(go()) == 7


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_stopping_ends_at_once(first: int, stop: ShutdownSignal) -> None:
    with stop.deferring():
        send(first)
        with pytest.raises(KeyboardInterrupt):
            send(signal.SIGINT)


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize(("first", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 75)])
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


def test_work_runs_to_its_value(stop: ShutdownSignal) -> None:
    assert stop.run(asyncio.sleep(0, 7)) == 7


def machine_end(now: list[float], **settings: Any) -> MachineEnd:
    """An end as the configuration has it, by a clock that stands still."""
    return MachineEnd(TrainerConfig(**settings), lambda: now[0])


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
    with stop.deferring(), stop.before(end):
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

    with stop.deferring(), stop.before(end), pytest.raises(Stopped, match="15"):
        asyncio.run(go())


@pytest.mark.parametrize(
    ("given", "announced", "at_s", "told"),
    [
        (None, {"SLURM_JOB_END_TIME": "500"}, 500.0, ["SLURM_JOB_END_TIME"]),
        ("never", {"SLURM_JOB_END_TIME": "500"}, math.inf, []),
        (900, {"SLURM_JOB_END_TIME": "500"}, 900.0, ["trainer.expires_at"]),
        (None, {"SLURM_JOB_END_TIME": "90"}, math.inf, ["SLURM_JOB_END_TIME=90 is past"]),
        (None, {"SLURM_JOB_END_TIME": "soon"}, math.inf, ["SLURM_JOB_END_TIME=soon is no time"]),
        (None, {}, math.inf, []),
        (
            None,
            {"SLURM_JOB_END_TIME": "900", CAPACITY_BLOCK: "700.5"},
            700.5,
            ["SLURM_JOB_END_TIME", CAPACITY_BLOCK],
        ),
        (
            None,
            {"SLURM_JOB_END_TIME": "500", CAPACITY_BLOCK: "700.5"},
            500.0,
            ["SLURM_JOB_END_TIME"],
        ),
    ],
)
def test_the_end_is_the_recipes_or_what_the_platform_announces(
    given: Any,
    announced: dict[str, str],
    at_s: float,
    told: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_JOB_END_TIME", CAPACITY_BLOCK):
        monkeypatch.delenv(name, raising=False)
    for name, value in announced.items():
        monkeypatch.setenv(name, value)
    end = machine_end([100.0], expires_at=given)
    assert end.at_s == at_s
    assert len(end.notes) == len(told)
    assert all(word in note for word, note in zip(told, end.notes, strict=True))
