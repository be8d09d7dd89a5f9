"""Scorers in worker processes: each sample's own fault is its own, and nothing is left behind."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from pathlib import Path

import pytest
from tests.processes import children, gone, is_alive
from tests.scoring import PROMPT, SIGNATURE, UserRewards, answer, ask, rewards_of

from winnow.config.reward import RewardConfig, UserFunction
from winnow.errors import RewardError
from winnow.rewards import pool
from winnow.rewards.rewards import Rewards

MIXED = """
import asyncio, os, re, signal, subprocess, sys, time

def act(what):
    if what == "hang":
        time.sleep(1000)
    if what == "hang in C":
        re.match("(a+)+$", "a" * 40 + "b")
    if what == "exit":
        os._exit(3)
    if what == "sys.exit":
        sys.exit(4)
    if what == "interrupt":
        raise KeyboardInterrupt
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "abort":
        os.abort()
    if what == "memory":
        eaten = []
        while True:
            eaten.append(bytearray(10_000_000))
    if what == "flood":
        while True:
            print("x" * 1000)
    if what == "cut":
        os.closerange(3, 10000)
        time.sleep(1000)
    if what == "forked":
        if os.fork() == 0:
            time.sleep(1000)
        os._exit(5)
    if what == "bytes":
        sys.stdout.buffer.write(b"\\xff" * 100000); sys.stdout.flush(); os.write(2, b"more")
    return 1.0 if what == "right" else -1.0
"""
DEFINED = f"def compute_score({SIGNATURE}):\n"
SYNC = f"{MIXED}\n{DEFINED}    return act(solution_str)\n"
ASYNC = f"{MIXED}\nasync {DEFINED}    await asyncio.sleep(0.01)\n"
ASYNC += "    if solution_str == 'late': await asyncio.sleep(99)\n    return act(solution_str)\n"
LATE = "no score within reward.timeout_s=1"
FATES = [
    ("exit", "the scorer's process ended with exit code 3"),
    ("sys.exit", "SystemExit: 4 at "),
    ("interrupt", "KeyboardInterrupt at "),
    ("kill", "the scorer's process was killed by SIGKILL"),
    ("abort", "the scorer's process was killed by SIGABRT"),
    ("cut", "the scorer's process closed its connection"),
    ("forked", "the scorer's process ended with exit code 5"),
    ("bytes", ""),
    ("memory", "the scorer used "),
]
LATE_FATES = [("hang", LATE), ("hang in C", LATE), ("flood", LATE)]
SUSPECTS = [each for each in FATES if each[0] in ("exit", "sys.exit", "interrupt", "memory")]
"""Of an async function's answers each that was under way may be at fault."""


@pytest.mark.parametrize(
    ("file", "fates", "timeout_s"),
    [(SYNC, FATES, 60), (SYNC, LATE_FATES, 1), (ASYNC, SUSPECTS, 60), (ASYNC, LATE_FATES[:1], 1)],
    ids=["sync-ends", "sync-late", "async-ends", "async-late"],
)
def test_what_a_scorer_does_costs_its_own_sample_alone(
    file: str,
    fates: list[tuple[str, str]],
    timeout_s: float,
    user_service: UserRewards,
    capfd: pytest.CaptureFixture[str],
) -> None:
    before = children()
    service = user_service(file, workers=2, timeout_s=timeout_s, memory_mb=400)
    for what, error in fates:
        costs_itself_alone(service, what, error)
    service.close()
    assert children() == before
    assert capfd.readouterr() == ("", "")


def costs_itself_alone(service: Rewards, what: str, error: str) -> None:
    texts = ["right"] * 4 + [what] + ["right"] * 20
    scores = ask(service, texts)
    assert [text for text, score in zip(texts, scores, strict=True) if score.error] == (
        [what] if error else []
    )
    assert scores[4].error.startswith(error)
    assert sum(score.accuracy for score in scores) == 24, what
    assert [s.accuracy for s in ask(service, ["right", "wrong"])] == [1.0, 0.0], what


def test_an_async_scorer_that_waits_too_long_costs_its_own_sample_alone(
    user_service: UserRewards,
) -> None:
    service = user_service(ASYNC, workers=1, timeout_s=1)
    scores = ask(service, ["right", "late", "right", "late", *["right"] * 40])
    assert [score.error for score in scores[:4]] == ["", LATE, "", LATE]
    assert sum(score.accuracy for score in scores) == 42


def test_async_calls_wait_side_by_side(user_service: UserRewards) -> None:
    body = (
        f"import asyncio\nnow = most = 0\nasync {DEFINED}    global now, most\n    now += 1\n"
        "    most = max(most, now)\n    await asyncio.sleep(0.05)\n    now -= 1\n    return most\n"
    )
    scores = ask(user_service(body, workers=1), ["x"] * 100)
    assert 30 <= max(score.reward for score in scores) <= 64


def test_an_async_function_that_blocks_makes_no_neighbour_late(user_service: UserRewards) -> None:
    body = f"import asyncio, time\nasync {DEFINED}    for _ in range(10):\n"
    body += "        await asyncio.sleep(0)\n        time.sleep(0.04)\n    return 1.0\n"
    # Side by side they take 6 s in all, and each of them more than its limit.
    scores = ask(user_service(body, workers=1, timeout_s=2), ["x"] * 15)
    assert [score.error for score in scores] == [""] * 15


def test_a_plain_function_may_return_something_to_await(user_service: UserRewards) -> None:
    body = (
        "import asyncio\ncalls = 0\nasync def later():\n    await asyncio.sleep(0.001)\n"
        f"    return calls\n{DEFINED}    global calls\n    calls += 1\n    return later()\n"
    )
    assert [s.reward for s in ask(user_service(body, workers=1), ["x"] * 3)] == [1, 2, 3]


def test_what_is_printed_is_kept_for_the_log(
    user_service: UserRewards, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level(logging.INFO):
        service = user_service("print('seen', solution_str, 'y' * 9000); return 1", workers=1)
        ask(service, ["this"])
        service.close()
    assert "printed 9011 bytes, beginning with: seen this yyy" in caplog.text
    assert max(map(len, caplog.messages)) < 5000
    assert capfd.readouterr() == ("", "")


def test_a_leak_ends_in_a_new_process_before_it_costs_anything(user_service: UserRewards) -> None:
    body = f"import os\nkept = []\n{DEFINED}    kept.append(b'y' * 30_000_000)\n"
    body += "    return {'score': 1, 'pid': os.getpid(), 'kept': len(kept)}\n"
    service = user_service(body, workers=1, memory_mb=400)
    scores = ask(service, ["x"] * 20)
    assert [score.error for score in scores] == [""] * 20
    assert len({score.extra["pid"] for score in scores}) >= 3
    assert max(score.extra["kept"] for score in scores) >= 3


def test_what_a_scorer_draws_depends_on_the_answer_alone(user_service: UserRewards) -> None:
    body = "import random, numpy; return {'score': random.random(), 'n': numpy.random.rand()}"
    first = ask(user_service(body, workers=2), ["a", "b", "a", "c"])
    again = ask(user_service(body, workers=1), ["c", "b", "a"])
    assert first[0].reward == first[2].reward == again[2].reward != first[1].reward
    assert (first[3].reward, first[3].extra) == (again[0].reward, again[0].extra)


def test_objects_of_the_users_own_come_back_as_text(user_service: UserRewards) -> None:
    body = (
        "import numpy\nclass Own:\n    def __str__(self): return 'own'\n"
        f"{DEFINED}    ring = {{}}\n    ring['ring'] = ring\n"
        "    return dict(score=1, own=Own(), ring=ring, row=[1, {'a': None}], "
        "n=numpy.float32(0.5), v=numpy.arange(2), "
        "rows=numpy.array([(Own(),)], [('own', object)]))\n"
    )
    (score,) = ask(user_service(body, workers=1), ["x"])
    assert (score.extra["own"], score.extra["ring"]) == ("own", "{'ring': {...}}")
    assert (score.extra["row"], score.extra["n"]) == ([1, {"a": None}], 0.5)
    assert score.extra["v"].tolist() == [0, 1]
    assert type(score.extra["rows"]) is str


def test_a_score_that_cannot_be_read_here_costs_its_own_sample_alone(
    user_service: UserRewards,
) -> None:
    body = (
        "class Text(str): pass\nclass Own:\n    def __str__(self): return Text('own')\n"
        f"{DEFINED}    return dict(score=1, own=Own() if solution_str == 'own' else '')\n"
    )
    service = user_service(body, workers=1)
    ask(service, ["x"] * 100)  # so that several answers go in a message
    scores = ask(service, ["x", "x", "own", *["x"] * 20])
    assert [place for place, score in enumerate(scores) if score.error] == [2]
    assert scores[2].error.startswith("ModuleNotFoundError: ")


def test_an_answer_asked_for_as_the_pool_is_closed_is_refused(user_service: UserRewards) -> None:
    service = user_service("return 1.0", workers=1)

    async def run() -> None:
        asked = asyncio.ensure_future(service.score(PROMPT, answer(3), "x", training=True))
        await asyncio.sleep(0)  # it has asked, and the pool does not know of it yet
        service.close()
        await asyncio.wait_for(asked, 5)

    with pytest.raises(RuntimeError, match="the scorer pool is closed"):
        asyncio.run(run())


def test_workers_load_neither_torch_nor_transformers(user_service: UserRewards) -> None:
    body = "import sys; return {'score': 1, 'loaded': sorted(sys.modules)}"
    loaded = ask(user_service(body, workers=1), ["x"])[0].extra["loaded"]
    assert "numpy" in loaded
    assert not {"torch", "transformers"} & set(loaded)


def test_by_default_built_in_rules_stay_here_and_a_users_function_goes_apart(
    user_service: UserRewards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "default_workers", lambda: 2)
    before = children()
    here = rewards_of(RewardConfig(), 8)
    here.check_sources(["sort_digits", "gsm8k"])
    assert ask(here, ["#1359"])[0].reward == 1.0
    assert (children(), here.count_offloaded()) == (before, 0)
    service = user_service("return 1")
    ask(service, ["x"] * 4)
    assert (len(children() - before), service.count_offloaded()) == (2, 4)


def test_twins_share_workers_and_count_failures_apart(user_service: UserRewards) -> None:
    service = user_service("import os; return {'score': 1 / len(solution_str), 'pid': os.getpid()}",
                           workers=1)  # fmt: skip
    twin = service.copy()
    ask(service, [""])
    assert (service.failure_report.count, twin.failure_report.count) == (1, 0)
    assert ask(service, ["x"])[0].extra == ask(twin, ["x"])[0].extra


def test_answers_that_callers_gave_up_on_hold_up_no_later_one(user_service: UserRewards) -> None:
    service = user_service("import time; time.sleep(0.3); return 1", workers=1)

    async def patient(patience_s: float) -> float:
        asked = service.score(PROMPT, answer(3), "x", training=True)
        return (await asyncio.wait_for(asked, patience_s)).reward

    async def run() -> tuple[list[object], float]:
        given_up = await asyncio.gather(*(patient(0.1) for _ in range(12)), return_exceptions=True)
        await asyncio.sleep(0.5)
        return given_up, await patient(5)

    given_up, reward = asyncio.run(run())
    assert [type(each) for each in given_up] == [TimeoutError] * 12
    assert reward == 1.0


def test_closing_ends_a_worker_that_hangs_and_all_it_started(user_service: UserRewards) -> None:
    body = (
        f"import subprocess, time, pathlib\n{DEFINED}"
        "    child = subprocess.Popen(['sleep', '1000'])\n"
        "    pathlib.Path(solution_str).write_text(str(child.pid))\n    time.sleep(1000)\n"
    )
    before = children()
    service = user_service(body, workers=1, timeout_s=100)
    noted = Path(service._config.function.path or "").with_name("pid")

    async def run() -> None:
        task = asyncio.ensure_future(service.score(PROMPT, answer(3), str(noted), training=True))
        while not noted.exists() or not noted.read_text():
            await asyncio.sleep(0.01)
        task.cancel()

    asyncio.run(run())
    sleeper = int(noted.read_text())
    assert is_alive(sleeper)
    workers = children() - before
    assert workers
    service.close()
    assert children() == before
    assert gone({sleeper, *workers})


def test_a_ctrl_c_of_the_terminal_reaches_no_worker(user_service: UserRewards) -> None:
    service = user_service("import os; return {'score': 1, 'group': os.getpgid(0)}", workers=1)
    (score,) = ask(service, ["x"])
    assert score.extra["group"] != os.getpgid(0)
    assert os.getsid(score.extra["group"]) == score.extra["group"]


@pytest.mark.parametrize(
    ("code", "says"),
    [
        ("import os\nos._exit(3)\n", "the process that imports it ended with exit code 3; fix"),
        ("x = b'y' * 500_000_000\nimport time\ntime.sleep(99)\n", "the process that imports it "
         "used "),
        ("def other(): ...\n", " has no callable compute_score; give one of other"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_refused_at_the_start(
    code: str, says: str, tmp_path: Path
) -> None:
    file = tmp_path / "reward.py"
    file.write_text(code)
    before = children()
    config = RewardConfig(function=UserFunction(path=str(file)), workers=1, memory_mb=300)
    with pytest.raises(RewardError) as caught:
        rewards_of(config, 8)
    assert str(caught.value).startswith(f"reward.function.path {file}")
    assert says in str(caught.value)
    assert children() == before


def test_a_file_that_is_spoilt_during_the_run_ends_it_with_one_line(
    user_service: UserRewards,
) -> None:
    service = user_service(SYNC, workers=1)
    Path(service._config.function.path or "").write_text("def compute_score(:\n")
    with pytest.raises(RewardError, match="importing it fails with SyntaxError"):
        ask(service, ["kill", "right"])
    with pytest.raises(RewardError, match="importing it fails with SyntaxError"):
        ask(service, ["right"])


def test_an_idle_worker_that_is_killed_is_replaced(user_service: UserRewards) -> None:
    service = user_service("import os; return {'score': 1, 'pid': os.getpid()}", workers=1)
    first = ask(service, ["x"])[0].extra["pid"]
    os.kill(first, signal.SIGKILL)
    assert gone({first})
    (score,) = ask(service, ["x"])
    assert (score.error, score.extra["pid"] != first) == ("", True)
