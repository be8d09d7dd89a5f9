"""What each manager does in its own way; what all promise is in `tests/contract`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from tests.contract.test_managers import PROMPT, served
from tests.faulty_http import reply as answered
from tests.faulty_http import serving
from tests.sandboxes import need_bubblewrap
from tests.scoring import LIMIT, SIGNATURE, answer, rewards_of

import winnow.sandbox
from winnow.config.load import load_recipe
from winnow.config.reward import (
    BatchManager,
    CustomManager,
    RemoteManager,
    RewardConfig,
    UserFunction,
)
from winnow.errors import ConfigError, RewardError
from winnow.http.service import listen
from winnow.rewards.manager import Manager
from winnow.rewards.managers import make_manager
from winnow.rewards.task import Failure
from winnow.types import Prompt, Score

JSON = {"Content-Type": "application/json"}
BATCH = "data_sources, solution_strs, ground_truths, extra_infos"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def batch(
    path: Path, body: str, stack: ExitStack, *, most: int = 64, workers: int = 1, how: str = ""
) -> Manager:
    file = path / "reward.py"
    file.write_text(f"import asyncio, os, time\n{how}def compute_score({BATCH}):\n    {body}\n")
    section = RewardConfig(
        function=UserFunction(path=str(file)),
        manager=BatchManager(max_answers=most),
        workers=workers,
        timeout_s=2,
    )
    manager = make_manager(section)
    stack.callback(manager.close)
    return manager


def ask(manager: Manager, texts: list[str], prompt: Prompt = PROMPT) -> list[Any]:
    async def run() -> list[Score | Failure]:
        return list(await asyncio.gather(*(manager.score(prompt, text) for text in texts)))

    return asyncio.run(run())


SIZES = "return [{'score': 1, 'size': len(solution_strs), 'worker': os.getpid()} for _ in "
SIZES += "solution_strs]"


def test_what_waits_together_is_scored_in_one_call_up_to_the_recipes_most(
    tmp_path: Path, stack: ExitStack
) -> None:
    one = batch(tmp_path, SIZES, stack)
    assert [r.extra["size"] for r in ask(one, ["x"] * 5)] == [5] * 5
    assert [r.extra["size"] for r in ask(one, ["x"])] == [1]
    few = batch(tmp_path, SIZES, stack, most=4)
    assert [r.extra["size"] for r in ask(few, ["x"] * 10)] == [4] * 8 + [2] * 2


def test_workers_share_what_waits(tmp_path: Path, stack: ExitStack) -> None:
    one = batch(tmp_path, SIZES, stack, workers=2)
    while len({r.extra["worker"] for r in ask(one, ["x"] * 2)}) < 2:
        pass  # the second has not loaded the file
    results = ask(one, ["x"] * 7)
    assert [r.extra["size"] for r in results] == [4] * 4 + [3] * 3


def test_answers_that_come_while_all_workers_are_busy_go_together(
    tmp_path: Path, stack: ExitStack
) -> None:
    begun, go_on = tmp_path / "begun", tmp_path / "go_on"
    held = (
        f"import os; open({str(begun)!r}, 'w').close()\n"
        f"    while not os.path.exists({str(go_on)!r}): time.sleep(0.005)\n    {SIZES}"
    )
    one = batch(tmp_path, held, stack)

    async def run() -> list[Any]:
        first = asyncio.ensure_future(one.score(PROMPT, "first"))
        while not begun.exists():
            await asyncio.sleep(0.005)
        later = []
        for _ in range(6):
            later.append(asyncio.ensure_future(one.score(PROMPT, "later")))
            await asyncio.sleep(0)
        go_on.touch()
        return await asyncio.gather(first, *later)

    assert [r.extra["size"] for r in asyncio.run(run())] == [1] + [6] * 6


def test_what_is_no_list_of_scores_fails_in_one_line(tmp_path: Path, stack: ExitStack) -> None:
    one = batch(tmp_path, "return eval(solution_strs[0])", stack)
    for said, error in (
        ("[1.0] * 3", "ValueError: the function returned 3 scores for 1 answers"),
        ("1.0", "TypeError: the function must return a list of scores, got float"),
        ("None", "TypeError: the function must return a list of scores, got NoneType"),
        ("[[1]] * len(solution_strs)", "TypeError: score must be a number, got list"),
        ("[float('inf')] * len(solution_strs)", "ValueError: the scorer returned inf"),
    ):
        results = ask(one, [said, said])
        assert all(isinstance(r, Failure) and r.line.startswith(error) for r in results), said


def test_one_bad_part_of_a_list_spares_the_call_a_second_time(
    tmp_path: Path, stack: ExitStack
) -> None:
    body = "open('{}', 'a').write('call '); return [None if t == 'bad' else 1 for t in "
    noted = tmp_path / "calls"
    one = batch(tmp_path, body.format(noted) + "solution_strs]", stack)
    results = ask(one, ["x", "bad", "y"])
    assert [isinstance(r, Failure) for r in results] == [False, True, False]
    assert noted.read_text() == "call "


def test_arrays_and_generators_are_lists_too(tmp_path: Path, stack: ExitStack) -> None:
    body = "import numpy; n = len(solution_strs); return numpy.arange(n) if n == 3 else (i / 2 for"
    one = batch(tmp_path, f"{body} i in range(n))", stack)
    assert [r.reward for r in ask(one, ["x"] * 3)] == [0.0, 1.0, 2.0]
    assert [r.reward for r in ask(one, ["x"] * 2)] == [0.0, 0.5]


def test_a_batch_function_may_be_asynchronous(tmp_path: Path, stack: ExitStack) -> None:
    body = "await asyncio.sleep(0.01); return [len(t) for t in solution_strs]"
    one = batch(tmp_path, body, stack, how="async ")
    assert [r.reward for r in ask(one, ["x", "", "xyz"])] == [1.0, 0.0, 3.0]


# A class of the user's own.

OWN = """
class Own:
    def __init__(self, config, bonus=0.0):
        self.bonus, self.limit, self.closed = bonus, config.timeout_s, False
    def prepare(self, data_sources):
        if "bad" in data_sources:
            raise KeyError("no such source")
    def takes_time(self, data_sources):
        return "late" in data_sources
    def score(self, prompt, text):
        return {"score": len(text) + self.bonus, "limit": self.limit}
    def close(self):
        open(__file__ + ".closed", "w").close()

class Bare:
    def __init__(self, config): ...

class Broken:
    def __init__(self, config):
        raise OSError("two\\nlines")
"""


@pytest.fixture
def own_file(tmp_path: Path) -> Path:
    file = tmp_path / "own_manager.py"
    file.write_text(OWN)
    return file


def custom(path: str, **kwargs: Any) -> Manager:
    return make_manager(RewardConfig(manager=CustomManager(path=path, kwargs=kwargs)))


def test_a_class_of_ones_own_scores_by_its_rules(own_file: Path) -> None:
    own = custom(f"{own_file}:Own", bonus=0.5)
    (score,) = ask(own, ["xyz"])
    assert (score.reward, score.accuracy, score.extra) == (3.5, 1.0, {"limit": 10.0})
    assert (own.takes_time(["late"]), own.takes_time(["x"])) == (True, False)
    with pytest.raises(RewardError, match=r"prepare\(\) fails with KeyError: 'no such source'"):
        own.prepare(["bad"])
    own.close()
    assert Path(f"{own_file}.closed").exists()


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        ("{file}:Bare", {}, "has no method score; add `async def score(self, prompt, text)`"),
        ("{file}:Broken", {}, "the constructor fails with OSError: two lines; fix the class"),
        ("{file}:Own", {"bonsu": 1}, "the constructor fails with TypeError: "),
    ],
)
def test_a_class_that_cannot_be_used_is_refused_in_one_line(
    name: str, kwargs: dict[str, Any], says: str, own_file: Path
) -> None:
    with pytest.raises(RewardError) as caught:
        custom(name.format(file=own_file), **kwargs)
    assert str(caught.value).startswith("reward.manager.path ")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


SCORES = """
from winnow.types import Score
class Own:
    def __init__(self, config): ...
    def score(self, prompt, text):
        return eval(text, {"Score": Score, "nan": float("nan")})
"""


def test_a_score_without_parts_counts_as_the_task(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCORES)
    section = RewardConfig(manager=CustomManager(path=f"{tmp_path}/own.py:Own"))
    service = rewards_of(section, LIMIT)
    score = asyncio.run(service.score(PROMPT, answer(1), "Score(0.75, 1.0)", True))
    assert (score.reward, score.accuracy, score.parts) == (0.75, 1.0, {"task": 0.75})


@pytest.mark.parametrize(
    ("score", "says"),
    [
        ("Score(1.0, 1.0, {'task': nan})", "ValueError: the scorer returned nan as task"),
        ("Score(1.0, 1.0, {'style': float('inf')})", "ValueError: the scorer returned inf as sty"),
        ("Score(1.0, 1.5)", "ValueError: the accuracy must lie in [0, 1], got 1.5"),
        ("Score(1.0, -0.1)", "ValueError: the accuracy must lie in [0, 1], got -0.1"),
        ("Score(1.0, 1.0, {'task': 'x'})", "TypeError: "),
        ("Score(None, 1.0)", "TypeError: "),
        ("Score(10 ** 400, 1.0)", "OverflowError: "),
    ],
)
def test_a_score_that_cannot_be_learned_from_is_a_failure(
    score: str, says: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(SCORES)
    (failed,) = ask(custom(f"{tmp_path}/own.py:Own"), [score])
    assert isinstance(failed, Failure)
    assert failed.line.startswith(says)


@pytest.mark.parametrize("method", ["prepare", "takes_time", "close"])
def test_a_method_that_nobody_waits_for_may_not_be_asynchronous(
    method: str, tmp_path: Path
) -> None:
    (tmp_path / "own.py").write_text(f"{SCORES}    async def {method}(self, *a): ...\n")
    with pytest.raises(
        RewardError, match=f"its {method} is a coroutine function, which only score may be"
    ):
        custom(f"{tmp_path}/own.py:Own")


def test_a_class_that_fails_to_close_is_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text(f"{SCORES}    def close(self): raise OSError('two\\nlines')\n")
    own = custom(f"{tmp_path}/own.py:Own")
    own.close()
    own.close()
    (line,) = caplog.messages
    assert "own.py:Own: close() fails with OSError: two lines; fix" in line


def test_a_sandbox_that_ran_no_program_is_closed_too() -> None:
    need_bubblewrap()
    rules = make_manager(RewardConfig(scorers={"apps": "code"}))
    rules.prepare({"apps"})
    assert winnow.sandbox._sandbox is not None
    rules.close()
    assert winnow.sandbox._sandbox is None


# A service.


def echo(tmp_path: Path, stack: ExitStack, body: str = "return len(solution_str)") -> Manager:
    file = tmp_path / "service.py"
    file.write_text(f"import threading, time\ndef compute_score({SIGNATURE}):\n    {body}\n")
    manager = make_manager(RewardConfig(function=UserFunction(path=str(file)), workers=0))
    stack.callback(manager.close)
    return manager


def remote(url: str, stack: ExitStack, **section: Any) -> Manager:
    manager = make_manager(RewardConfig(manager=RemoteManager(url=url, **section), timeout_s=5))
    stack.callback(manager.close)
    return manager


def test_all_that_verl_passes_crosses_the_wire(tmp_path: Path, stack: ExitStack) -> None:
    body = "return {'score': 1, 'said': [data_source, solution_str, ground_truth, extra_info]}"
    url = served(echo(tmp_path, stack, body), stack)
    extra = {"index": np.int64(3), "list": np.array([1.5]), "text": "ä\ud800"}
    prompt = Prompt("u", np.array([1]), "?", "my/set", {"a": [1, None]}, {"extra_info": extra})
    (score,) = ask(remote(url, stack), ["“answer”"], prompt)
    assert score.extra["said"] == [
        *("my/set", "“answer”", {"a": [1, None]}),
        {"index": 3, "list": [1.5], "text": "ä\ud800"},
    ]


def test_a_ground_truth_that_json_cannot_hold_fails_alone(tmp_path: Path, stack: ExitStack) -> None:
    one = remote(served(echo(tmp_path, stack), stack), stack)
    prompt = Prompt("u", np.array([1]), "?", "s", float("nan"), {})
    (failed,), (fine,) = ask(one, ["x"], prompt), ask(one, ["x"])
    assert failed.line.startswith("ValueError: Out of range float values are not JSON compliant")
    assert fine.reward == 1.0


def test_numbers_that_json_cannot_hold_come_back_as_text(tmp_path: Path, stack: ExitStack) -> None:
    body = "return {'score': 1, 'odd': [float('inf')], 'thing': threading.Lock}"
    (score,) = ask(remote(served(echo(tmp_path, stack, body), stack), stack), ["x"])
    assert score.extra == {"odd": ["inf"], "thing": "<built-in function allocate_lock>"}


def test_nobody_at_the_address_is_found_before_training(stack: ExitStack) -> None:
    listener = listen("127.0.0.1", 0, None)
    port = listener.getsockname()[1]
    listener.close()
    one = remote(f"http://127.0.0.1:{port}/score", stack, tries=1)
    with pytest.raises(RewardError) as caught:
        one.prepare(["x"])
    assert str(caught.value).startswith(f"reward.manager.url: 127.0.0.1:{port} cannot be reached (")
    (failed,) = ask(one, ["x"])
    assert f"http://127.0.0.1:{port} cannot be reached" in failed.line


@pytest.mark.parametrize("reply", [b"1" * 401, b'{"score": ' + b"9" * 401 + b"}"])
def test_a_number_that_is_too_large_is_a_failure(reply: bytes, stack: ExitStack) -> None:
    with serving([answered(200, raw=reply)]) as there:
        (failed,) = ask(remote(f"{there.url}/score", stack), ["x"])
    assert isinstance(failed, Failure)
    assert failed.line.startswith("OverflowError: ")


@pytest.mark.parametrize(
    "url",
    ["http://127.0.0.1:99999/x", "http://a..b/x", "http:///x", "h:8", "http://h:x", "http://[::1",
     "http://h:8?key=1"],
)  # fmt: skip
def test_what_is_no_address_is_refused(url: str) -> None:
    said = "have a path" if "?" in url else "begin with http:// or https:// and name a host"
    with pytest.raises(ValueError, match=f"must {said}"):
        RemoteManager(url=url)


@pytest.mark.parametrize(
    "setting",
    [
        "reward.manager.url=http://me:pa55word@h/x",
        "reward.manager.url=http://me:pa55word@h:99999/x",
        "reward.manager.token_env=pa55word",
        "reward.manager.token_env=sk-pa55word",
        "reward.sandbox.url=http://me:pa55word@h:x",
        "reward.sandbox.token_env=pa55word",
    ],
)
def test_a_secret_in_the_recipe_is_refused_and_not_shown(setting: str) -> None:
    with pytest.raises(ConfigError) as told:
        load_recipe(
            "quickstart",
            ["reward/manager=remote", "reward.manager.url=http://h/x",
             "reward/sandbox=fusion", "reward.sandbox.url=http://h", setting],
        )  # fmt: skip
    assert setting.partition("=")[0] in str(told.value)
    assert "pa55word" not in str(told.value)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"[]", "the body must be an object, got list"),
        (b'{"data_source": 1}', "data_source must be a string"),
        (b'{"data_source": "a"}', "solution_str must be a string"),
        (b'{"data_source": "a", "solution_str": "", "extra_info": [1]}', "extra_info must be"),
    ],
)
def test_the_service_refuses_what_is_no_question(
    content: bytes, says: str, tmp_path: Path, stack: ExitStack
) -> None:
    url = served(echo(tmp_path, stack), stack)
    reply = httpx.post(url, content=content, headers=JSON)
    assert (reply.status_code, reply.json()["error"][: len(says)]) == (400, says)
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "scored": 0}


def test_who_hangs_up_is_not_scored_and_who_waits_too_long_is_told(
    tmp_path: Path, stack: ExitStack
) -> None:
    file, calls = tmp_path / "counting.py", tmp_path / "calls"
    file.write_text(f"import time\ndef compute_score({SIGNATURE}):\n"
                    f"    open({str(calls)!r}, 'a').write(solution_str + '\\n')\n"
                    f"    time.sleep(1)\n    return 1.0\n")  # fmt: skip
    calls.touch()
    function = UserFunction(path=str(file))
    manager = make_manager(RewardConfig(function=function, workers=1, timeout_s=5))
    stack.callback(manager.close)
    url = served(manager, stack, max_answer_s=1.5)

    async def gone() -> list[Any]:
        async with httpx.AsyncClient(timeout=0.5) as client:
            bodies = [{"data_source": "s", "solution_str": f"gone{n}"} for n in range(8)]
            work = (client.post(url, json=body) for body in bodies)
            return await asyncio.gather(*work, return_exceptions=True)

    async def patient() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            bodies = [{"data_source": "s", "solution_str": f"here{n}"} for n in range(4)]
            return await asyncio.gather(*(client.post(url, json=body) for body in bodies))

    assert {type(each) for each in asyncio.run(gone())} == {httpx.ReadTimeout}
    replies = asyncio.run(patient())
    late = [reply for reply in replies if reply.status_code == 503]
    assert late
    assert {(r.headers["Retry-After"], r.json()["error"]) for r in late} == {
        ("1", "no worker free in time")
    }
    assert calls.read_text().count("gone") < 8


def test_a_token_is_a_bearers_and_serves_under_any_name(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = served(echo(tmp_path, stack), stack, token="s3cret")
    question = {"data_source": "s", "solution_str": "x"}
    monkeypatch.setenv("SCORER_TOKEN", "s3cret")
    assert ask(remote(url, stack, token_env="SCORER_TOKEN"), ["xy"])[0].reward == 2.0
    (failed,) = ask(remote(url, stack), ["xy"])
    assert "answered 401: " in failed.line
    for given, status in (("bearer s3cret", 200), ("Basic s3cret", 401), ("s3cret", 401)):
        headers = {"Authorization": given, "Host": "rewards.example"}
        assert httpx.post(url, json=question, headers=headers).status_code == status
