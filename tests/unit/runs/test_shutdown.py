"""Requests to stop, as real signals to this process."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator

import pytest

from winnow.runs.process import ShutdownSignal, Stopped


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
