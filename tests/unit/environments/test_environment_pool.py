"""Environments in real processes: replies, replays, crashes, hangs, memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from winnow.environments import ToolCall, Turn
from winnow.environments.pool import EnvironmentPool, start_pools
from winnow.errors import ConfigError, EnvironmentFault
from winnow.rewards.task import PoolLimits
from winnow.types import Prompt

GUESS = """
import os, time
from winnow.environments import Step

class Guess:
    def __init__(self, most=64):
        self.most = most

    def reset(self, row):
        self.secret, self.turns = int(row["ground_truth"]), 0
        return f"Guess a number from 1 to {self.most}."

    def step(self, turn):
        self.turns += 1
        if turn.text == "die": os._exit(7)
        if turn.text == "hang": time.sleep(600)
        if turn.text == "raise": raise KeyError("no such room")
        if turn.text == "eat": self.food = b"x" * (600 << 20); time.sleep(5)
        if turn.text == "nan": return Step("?", float("nan"))
        if turn.text == "nothing": return None
        guess = int(turn.text)
        if guess == self.secret:
            return Step(reward=1.0, done=True, metrics={"turns": self.turns})
        return Step("higher" if guess < self.secret else "lower", -0.1)

class Resumed(Guess):
    def state_dict(self):
        return {"turns": self.turns + 100}

    def load_state_dict(self, state):
        self.turns = state["turns"]

class Tuples(Resumed):
    def state_dict(self):
        return {"turns": (self.turns,)}

class Half(Guess):
    def state_dict(self):
        return {}

class Slow(Guess):
    async def reset(self, row):
        return super().reset(row)

    def step(self, turn):
        return Step("\\ud83d?") if turn.text == "odd" else super().step(turn)

    def close(self):
        print("closed", self.secret, file=open(__file__ + ".log", "a"))
"""


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EnvironmentPool]:
    made = make(tmp_path_factory.mktemp("environment"), workers=2)
    yield made
    made.close()


def make(
    folder: Path, name: str = "Guess", timeout_s: float = 60.0, workers: int = 1
) -> EnvironmentPool:
    (folder / "guess.py").write_text(GUESS)
    limits = PoolLimits(workers, timeout_s, 512, "environment", "environment", "reply")
    arguments = "environment.path", [f"{folder}/guess.py:{name}"], {"most": 50}, False
    return EnvironmentPool(start_pools(limits, arguments))


FIRST = ({"role": "user", "content": "Guess a number from 1 to 50."},)
ROW = ({"role": "user", "content": "?"},)


def prompt(secret: int) -> Prompt:
    return Prompt("0", np.array([1]), "", "guess", secret, {}, FIRST, ROW)


def turns(*texts: str) -> tuple[Turn, ...]:
    return tuple(map(Turn, texts))


def test_replies_come_in_turn_and_are_replayed_where_the_environment_is_gone(pool):
    async def play():
        first = await pool.first_messages(1, prompt(7))
        assert first == FIRST
        (one,) = await pool.step(2, prompt(7), turns("3"))
        (two,) = await pool.step(2, prompt(7), turns("3", "9"))
        pool.close_conversation(2)
        again = await pool.step(2, prompt(7), turns("3", "9"))
        (last,) = await pool.step(2, prompt(7), turns("3", "9", "7"))
        return one, two, again, last

    one, two, again, last = asyncio.run(play())
    assert [one.observation[0]["content"], two.observation[0]["content"]] == ["higher", "lower"]
    assert again == [one, two]
    assert (last.done, last.reward, last.metrics) == (True, 1.0, {"turns": 3.0})


def test_an_environment_with_a_state_goes_on_from_it_without_a_replay(tmp_path):
    with contextlib.closing(make(tmp_path, "Resumed")) as pool:
        (step,) = asyncio.run(pool.step(1, prompt(7), turns("3")))
    with contextlib.closing(make(tmp_path, "Resumed")) as pool:
        (last,) = asyncio.run(pool.step(1, prompt(7), turns("3", "7"), step.state))
    assert last.metrics == {"turns": 102.0}
    assert not last.state


@pytest.mark.parametrize(
    ("word", "fault"),
    [
        ("die", "the environment's process ended with exit code 7"),
        ("hang", "no reply within environment.timeout_s=1"),
        ("raise", "KeyError: 'no such room' at .*guess.py"),
        ("eat", "the environment used .* environment.memory_mb is 512"),
        ("nan", "ValueError: step returned nan as reward"),
        ("nothing", "TypeError: step must return a Step, got NoneType"),
    ],
)
def test_a_fault_is_that_conversations_and_the_others_go_on(pool, word, fault, tmp_path):
    if word == "hang":
        with contextlib.closing(make(tmp_path, timeout_s=1.0, workers=2)) as hasty:
            check_fault(hasty, word, fault)
    else:
        check_fault(pool, word, fault)


def check_fault(pool, word, fault):
    async def play():
        others = [await pool.step(k, prompt(7), turns("3")) for k in (10, 11)]
        with pytest.raises(EnvironmentFault, match=fault):
            await pool.step(12, prompt(7), turns("3", word))
        return others, [await pool.step(k, prompt(7), turns("3", "9")) for k in (10, 11)]

    _before, after = asyncio.run(play())
    assert [steps[-1].observation[0]["content"] for steps in after] == ["lower", "lower"]
    # One of the two had its environment in the process that was lost, and got its turns replayed.
    assert all(len(steps) in (1, 2) for steps in after)
    asyncio.run(pool.step(12, prompt(7), turns("3")))


def test_a_state_that_json_would_change_is_a_fault(tmp_path):
    fault = pytest.raises(EnvironmentFault, match="what JSON can hold: lists, no tuples")
    with contextlib.closing(make(tmp_path, "Tuples")) as pool, fault:
        asyncio.run(pool.step(1, prompt(7), turns("3")))
    with pytest.raises(ConfigError, match="it has no method load_state_dict"):
        make(tmp_path, "Half")


def test_environments_are_closed_after_a_fault_and_at_the_end(tmp_path):
    with contextlib.closing(make(tmp_path, "Slow")) as pool:
        (step,) = asyncio.run(pool.step(1, prompt(7), turns("odd")))
        assert step.observation[0]["content"] == "??"  # no text that cannot be encoded
        with pytest.raises(EnvironmentFault):
            asyncio.run(pool.step(2, prompt(8), turns("raise")))
        assert (tmp_path / "guess.py.log").read_text() == "closed 8\n"
    assert "closed 7\n" in (tmp_path / "guess.py.log").read_text()


def test_code_that_is_no_environment_is_refused_in_one_line(tmp_path):
    with pytest.raises(
        ConfigError, match=r"environment.path .*guess.py:Step: it has no method reset"
    ):
        make(tmp_path, "Step")


SLOW = """
import time
from collections import deque
from itertools import count

def wait(how: str) -> str:
    '''Wait for ever.

    Args:
        how: in which way.
    '''
    if how == "asleep": time.sleep(600)
    if how == "in C": deque(count(), maxlen=0)
    while how == "busy":
        try: count()
        except Exception: pass
    return how
"""


def test_a_synchronous_tool_is_interrupted_and_one_that_hangs_in_c_is_a_fault(tmp_path):
    (tmp_path / "slow.py").write_text(SLOW)
    limits = PoolLimits(1, 2.0, 512, "environment", "environment", "reply")
    options = {"timeout_s": 0.2, "output_chars": 100}
    arguments = "environment.tools", [f"{tmp_path}/slow.py:wait"], options, True

    async def ask(how):
        turn = Turn("", (ToolCall("wait", {"how": how}),))
        (step,) = await pool.step(1, Prompt("0", np.array([1]), "", "wait", 0), [turn])
        return step.observation[0]["content"]

    with closing(EnvironmentPool(start_pools(limits, arguments))) as pool:
        late = "error: wait did not finish within 0.2 s"
        assert [asyncio.run(ask(how)) for how in ("asleep", "busy", "")] == [late, late, ""]
        with pytest.raises(EnvironmentFault, match=r"no reply within environment.timeout_s=2"):
            asyncio.run(ask("in C"))
        assert asyncio.run(ask("again")) == "again"
