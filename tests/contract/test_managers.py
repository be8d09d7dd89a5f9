"""What every reward manager promises, whoever calls the scorer and wherever it runs.

The same scoring as a function, a batch function, a class and a service: right and wrong by the
text, and by some texts a fault. Remote answers cross a real socket, before workers of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.processes import children
from tests.services import running

from winnow.config.reward import (
    BatchManager,
    CustomManager,
    DapoManager,
    NaiveManager,
    OverlongConfig,
    ParallelManager,
    RemoteManager,
    RewardConfig,
    RewardManager,
    UserFunction,
)
from winnow.http.service import listen, listener_url
from winnow.rewards.manager import Manager
from winnow.rewards.managers import make_manager
from winnow.rewards.serve import make_service
from winnow.rewards.task import Failure
from winnow.types import Prompt, Score

FILE = """
import asyncio, os, time

def one(text, truth):
    if text == "raise":
        raise ValueError("two\\nlines")
    if text == "cancel":
        raise asyncio.CancelledError("a library's own")
    if text == "exit":
        raise SystemExit(3)
    if text == "hang":
        time.sleep(1000)
    if text == "die":
        os._exit(3)
    if text in ("nan", "none", "text"):
        return {"nan": float("nan"), "none": None, "text": "much"}[text]
    return {"score": len(text), "acc": float(text == truth), "seen": text[::-1]}

def compute_score(data_source, solution_str, ground_truth, extra_info):
    assert (data_source, extra_info) == ("anything", {"index": 7})
    return one(solution_str, ground_truth)

def compute_scores(data_sources, solution_strs, ground_truths, extra_infos):
    assert set(data_sources) == {"anything"} and all(i == {"index": 7} for i in extra_infos)
    return [one(*each) for each in zip(solution_strs, ground_truths)]

class Own:
    def __init__(self, config):
        self.seen = 0

    async def score(self, prompt, text):
        await asyncio.sleep(0)
        if text == "hang":
            await asyncio.sleep(1000)
        return one(text, prompt.ground_truth)
"""
PROMPT = Prompt("p:1", np.array([1]), "?", "anything", "right", {"extra_info": {"index": 7}})
LATE = "no score within reward.timeout_s=5"
FAULTS = {
    "raise": "ValueError: two lines",
    "exit": "SystemExit: 3",
    "cancel": "CancelledError: a library's own",
    "nan": "ValueError: the scorer returned nan as reward",
    "none": "TypeError: score must be a number, got NoneType",
    "text": "TypeError: score must be a number, got str",
}
# Only a process apart, or a wait that can be given up, survives these.
DEADLY = {"hang": LATE, "die": "the scorer's process ended with exit code 3"}
SURVIVES: dict[str, set[str]] = {
    "auto": {"hang", "die"},
    "dapo": {"hang", "die"},
    "naive": set(),
    "parallel": {"hang", "die"},
    "batch": {"hang", "die"},
    "remote": {"hang", "die"},
    "custom": {"hang"},
}
MANAGERS = [each.model_fields["name"].default for each in get_args(get_args(RewardManager)[0])]
MANAGERS.remove("environment")  # which reads no answer


def section(name: str, file: Path, url: str = "") -> RewardConfig:
    single = UserFunction(path=str(file))
    own: dict[str, dict[str, Any]] = {
        "auto": {"function": single},
        "dapo": {
            "function": single,
            "manager": DapoManager(),
            "overlong": OverlongConfig(enabled=True),
        },
        "naive": {"function": single, "manager": NaiveManager()},
        "parallel": {"function": single, "manager": ParallelManager()},
        "batch": {
            "function": UserFunction(path=str(file), name="compute_scores"),
            "manager": BatchManager(max_answers=8),
        },
        "remote": {"manager": RemoteManager(url=url or "http://127.0.0.1:1")},
        "custom": {"manager": CustomManager(path=f"{file}:Own")},
    }
    workers = {"parallel": {"workers": 2}, "auto": {"workers": 1}, "dapo": {"workers": 1}}
    workers["batch"] = {"workers": 1}
    # The service gives up first, and says so.
    timeout_s = 30.0 if name == "remote" else 5.0
    return RewardConfig(timeout_s=timeout_s, **own[name], **workers.get(name, {}))


def served(manager: Manager, stack: ExitStack, **how: Any) -> str:
    """The address of a service in a thread, before a manager."""
    listener = stack.enter_context(listen("127.0.0.1", 0, None))
    stack.enter_context(running(make_service(manager, **how), listener))
    return listener_url(listener)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward") / "reward.py"
    path.write_text(FILE)
    return path


@pytest.fixture(scope="module", params=MANAGERS)
def manager(request: pytest.FixtureRequest, file: Path) -> Iterator[Manager]:
    name = request.param
    with ExitStack() as stack:
        url = ""
        if name == "remote":
            url = served(make_manager(section("parallel", file)), stack)
        made = make_manager(section(name, file, url))
        stack.callback(made.close)
        made.prepare(["anything"])
        made.name = name  # type: ignore[attr-defined]
        yield made


def ask(manager: Manager, texts: list[str]) -> list[Score | Failure]:
    async def run() -> list[Score | Failure]:
        return list(await asyncio.gather(*(manager.score(PROMPT, text) for text in texts)))

    return asyncio.run(run())


def plain(results: list[Score | Failure]) -> list[Any]:
    return [
        result if isinstance(result, Failure) else (result.reward, result.accuracy, result.extra)
        for result in results
    ]


def test_an_answer_gets_its_score_accuracy_and_what_else_was_said(manager: Manager) -> None:
    right, wrong = ask(manager, ["right", "off"])
    assert plain([right]) == [(5.0, 1.0, {"seen": "thgir"})]
    assert plain([wrong]) == [(3.0, 0.0, {"seen": "ffo"})]
    assert isinstance(right, Score)
    assert right.parts == {"task": 5.0}


TEXTS = st.lists(st.text(max_size=6).filter(lambda t: t not in FAULTS | DEADLY), max_size=30)


@examples(5)
@given(TEXTS)
def test_neither_order_nor_company_changes_a_score(manager: Manager, texts: list[str]) -> None:
    expected = [(float(len(t)), float(t == "right"), {"seen": t[::-1]}) for t in texts]
    assert plain(ask(manager, texts)) == expected
    assert plain(ask(manager, texts[::-1])) == expected[::-1]


def test_a_fault_costs_its_own_answer_and_is_told_in_one_line(manager: Manager) -> None:
    texts = ["right", *FAULTS, "off", "right"]
    results = ask(manager, texts)
    for text, result in zip(texts, results, strict=True):
        if text in FAULTS:
            assert isinstance(result, Failure)
            assert result.line.startswith(FAULTS[text])
            assert "\n" not in result.line
        else:
            assert isinstance(result, Score)


def test_what_hangs_or_dies_costs_its_own_answer_where_the_manager_can_hold_it(
    manager: Manager,
) -> None:
    deadly = sorted(SURVIVES[manager.name])  # type: ignore[attr-defined]
    texts = ["right", "off", *deadly, *["right"] * 10]
    results = ask(manager, texts)
    assert [r.line for r in results if isinstance(r, Failure)] == [DEADLY[t] for t in deadly]
    assert sum(r.accuracy for r in results if isinstance(r, Score)) == 11
    assert plain(ask(manager, ["right"])) == [(5.0, 1.0, {"seen": "thgir"})]


def test_a_caller_that_gives_up_leaves_the_others_their_scores(manager: Manager) -> None:
    async def run() -> list[Score | Failure]:
        tasks = [asyncio.ensure_future(manager.score(PROMPT, "x" * i)) for i in range(20)]
        await asyncio.sleep(0)
        for task in tasks[::3]:
            task.cancel()
        kept = [task for i, task in enumerate(tasks) if i % 3]
        return list(await asyncio.gather(*kept))

    kept = [float(i) for i in range(20) if i % 3]
    assert [r.reward for r in asyncio.run(run()) if isinstance(r, Score)] == kept


def test_who_scores_apart_says_so_and_shows_that_it_gets_on(manager: Manager) -> None:
    before = manager.scored
    ask(manager, ["right"] * 3)
    late = manager.takes_time(["anything"])
    assert late is (manager.name != "naive")  # type: ignore[attr-defined]
    assert manager.scored - before == 3


@pytest.mark.parametrize("name", ["parallel", "batch", "custom"])
def test_closing_leaves_no_process_and_may_be_done_twice(name: str, file: Path) -> None:
    before = children()
    made = make_manager(section(name, file))
    ask(made, ["right"])
    made.close()
    made.close()
    assert children() == before
