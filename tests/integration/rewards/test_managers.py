"""What each manager does in its own way; what all promise is in `tests/contract`."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
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
from winnow.rewards.managers import Manager, make_manager
from winnow.rewards.task import Failure
from winnow.types import Prompt, Score

JSON = {"Content-Type": "application/json"}
BATCH = "data_sources, solution_strs, ground_truths, extra_infos"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def batch(path: Path, body: str, stack: ExitStack, *, most: int = 64, **config: Any) -> Manager:
    file = path / "reward.py"
    file.write_text(f"import os, random, time\ndef compute_score({BATCH}, **kwargs):\n    {body}\n")
    kwargs = config.pop("kwargs", {})
    section = RewardConfig(
        function=UserFunction(path=str(file), kwargs=kwargs),
        manager=BatchManager(max_answers=most),
        **{"workers": 1, "timeout_s": 2, **config},
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


def test_what_waits_together_is_scored_in_one_call(tmp_path: Path, stack: ExitStack) -> None:
    one = batch(tmp_path, SIZES, stack)
    assert [r.extra["size"] for r in ask(one, ["x"] * 5)] == [5] * 5
    assert [r.extra["size"] for r in ask(one, ["x"])] == [1]


def test_a_call_has_no_more_answers_than_the_recipe_says(tmp_path: Path, stack: ExitStack) -> None:
    one = batch(tmp_path, SIZES, stack, most=4)
    assert [r.extra["size"] for r in ask(one, ["x"] * 10)] == [4] * 8 + [2] * 2


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


def test_kwargs_reach_the_batch_function(tmp_path: Path, stack: ExitStack) -> None:
    one = batch(tmp_path, "return [kwargs['bonus']] * len(solution_strs)", stack,
                kwargs={"bonus": 0.5})  # fmt: skip
    assert [r.reward for r in ask(one, ["x"] * 3)] == [0.5] * 3


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("return [1.0] * (len(solution_strs) + 1)", "ValueError: the function returned 2 scores "
         "for 1 answers"),
        ("return 1.0", "TypeError: the function must return a list of scores, got float"),
        ("return {'score': 1}", "TypeError: the function must return a list of scores, got dict"),
        ("return 'much'", "TypeError: the function must return a list of scores, got str"),
        ("return None", "TypeError: the function must return a list of scores, got NoneType"),
        ("return [[1]] * len(solution_strs)", "TypeError: score must be a number, got list"),
        ("return [float('inf')] * len(solution_strs)", "ValueError: the scorer returned inf"),
    ],
)  # fmt: skip
def test_what_is_no_list_of_scores_fails_in_one_line(
    body: str, error: str, tmp_path: Path, stack: ExitStack
) -> None:
    results = ask(batch(tmp_path, body, stack), ["x", "y"])
    assert all(isinstance(r, Failure) and r.line.startswith(error) for r in results)


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


def test_objects_of_the_users_file_come_back_as_text(tmp_path: Path, stack: ExitStack) -> None:
    body = "T = type('T', (), {'__str__': lambda self: 'thing'}); return [{'score': 1, 'odd': T(),"
    one = batch(tmp_path, f"{body} 'even': [1.5, 'x']}} for _ in solution_strs]", stack)
    assert [r.extra for r in ask(one, ["x"] * 2)] == [{"odd": "thing", "even": [1.5, "x"]}] * 2


def test_a_batch_function_may_be_asynchronous(tmp_path: Path, stack: ExitStack) -> None:
    file = tmp_path / "reward.py"
    body = "    await asyncio.sleep(0.01)\n    return [len(t) for t in solution_strs]\n"
    file.write_text(f"import asyncio\nasync def compute_score({BATCH}):\n{body}")
    config = RewardConfig(function=UserFunction(path=str(file)), manager=BatchManager(), workers=1)
    one = make_manager(config)
    stack.callback(one.close)
    assert [r.reward for r in ask(one, ["x", "", "xyz"])] == [1.0, 0.0, 3.0]


def test_a_function_for_single_answers_is_no_batch_function(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(f"def compute_score({SIGNATURE}):\n    return 1\n")
    config = RewardConfig(function=UserFunction(path=str(file)), manager=BatchManager(), workers=1)
    with pytest.raises(RewardError) as caught:
        make_manager(config)
    said = str(caught.value)
    assert "cannot be called with data_sources, solution_strs, ground_truths, extra_infos" in said
    assert "\n" not in said


def test_a_worker_that_cannot_load_the_file_any_more_ends_all_that_wait(
    tmp_path: Path, stack: ExitStack
) -> None:
    one = batch(tmp_path, "os._exit(3)", stack)
    (tmp_path / "reward.py").write_text("broken(")

    async def run() -> list[Any]:
        asked = (one.score(PROMPT, text) for text in ("x", "y"))
        return await asyncio.wait_for(asyncio.gather(*asked, return_exceptions=True), 60)

    results = asyncio.run(run())
    assert any(isinstance(r, RewardError) for r in results)
    assert all(isinstance(r, RewardError | Failure) for r in results)


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
    with pytest.raises(RewardError, match="its prepare fails with KeyError: 'no such source'"):
        own.prepare(["bad"])
    own.close()
    assert Path(f"{own_file}.closed").exists()


def test_a_class_is_found_by_its_module(own_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(own_file.parent)
    assert ask(custom("own_manager:Own"), ["xyz"])[0].reward == 3.0


@pytest.mark.parametrize(
    ("name", "kwargs", "says"),
    [
        ("{file}:Nobody", {}, "has no callable Nobody; give one of Own, Bare, Broken"),
        ("{file}:Bare", {}, "has no method score; give it `async def score(self, prompt, text)`"),
        ("{file}:Broken", {}, "making it fails with OSError: two lines; mend the class"),
        ("{file}:Own", {"bonsu": 1}, "making it fails with TypeError: "),
        ("no.such.module:Own", {}, "importing it fails with ModuleNotFoundError: "),
        ("/no/such/file.py:Own", {}, "no such file; give the Python file"),
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
    with pytest.raises(RewardError, match=f"its {method} is asynchronous, and only score may be"):
        custom(f"{tmp_path}/own.py:Own")


def test_a_class_that_fails_to_close_is_told_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "own.py").write_text(f"{SCORES}    def close(self): raise OSError('two\\nlines')\n")
    own = custom(f"{tmp_path}/own.py:Own")
    own.close()
    own.close()
    (line,) = caplog.messages
    assert "own.py:Own: its close fails with OSError: two lines; mend" in line


def test_an_asynchronous_function_here_shows_that_it_gets_on(tmp_path: Path) -> None:
    file = tmp_path / "reward.py"
    file.write_text(f"async def compute_score({SIGNATURE}):\n    return 1\n")
    here = make_manager(RewardConfig(function=UserFunction(path=str(file)), workers=0))
    ask(here, ["x"] * 3)
    assert (here.takes_time(["s"]), here.scored) == (True, 3)


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
    ["http://127.0.0.1:99999/x", "http://a..b/x", "http:///x", "h:8", "http://h:x", "http://[::1"],
)
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must begin with http:// or https:// and name a host"):
        RemoteManager(url=url)


def test_an_address_without_a_path_has_no_query() -> None:
    with pytest.raises(ValueError, match="must have a path"):
        RemoteManager(url="http://h:8?key=1")


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


def test_a_token_is_asked_for_and_given(
    tmp_path: Path, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SCORER_TOKEN", "s3cret")
    monkeypatch.setenv("OTHER_TOKEN", "0ther")
    url = served(echo(tmp_path, stack), stack, token="s3cret")
    assert ask(remote(url, stack, token_env="SCORER_TOKEN"), ["xy"])[0].reward == 2.0
    for section in ({}, {"token_env": "OTHER_TOKEN"}):
        (failed,) = ask(remote(url, stack, **section), ["xy"])
        assert "answered 401" in failed.line
        assert "the token is missing or wrong" in failed.line
        assert "0ther" not in failed.line


def test_a_variable_without_token_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_TOKEN", raising=False)
    with pytest.raises(RewardError) as caught:
        make_manager(RewardConfig(manager=RemoteManager(url="http://h:1", token_env="NO_TOKEN")))
    assert str(caught.value) == (
        "reward.manager.token_env is NO_TOKEN, but there is no such environment variable; export "
        "NO_TOKEN"
    )


@pytest.mark.parametrize(
    ("content", "status", "says"),
    [
        (b"{", 400, "the body's 1 bytes are no JSON"),
        (b"[" * 100_000, 400, "the body's 100,000 bytes are no JSON"),
        (b"[]", 400, "the body must be an object, got list"),
        (b'{"data_source": 1}', 400, "data_source must be a text"),
        (b'{"data_source": "a"}', 400, "solution_str must be a text"),
        (b'{"data_source": "a", "solution_str": "", "extra_info": [1]}', 400, "extra_info must be"),
        (b" " * 2000, 413, "the body must be at most 1,000 bytes"),
        (b" " * 30_000_000, 413, "the body must be at most 1,000 bytes"),
    ],
)
def test_the_service_refuses_what_is_no_question(
    content: bytes, status: int, says: str, tmp_path: Path, stack: ExitStack
) -> None:
    most = 1_000 if status == 413 else 1 << 20
    url = served(echo(tmp_path, stack), stack, max_body_bytes=most)
    reply = httpx.post(url, content=content, headers=JSON)
    assert (reply.status_code, reply.json()["error"][: len(says)]) == (status, says)
    assert httpx.get(f"{url}/health").json() == {"status": "ok", "scored": 0}


def test_the_service_takes_in_so_many_and_sends_others_away_for_a_while(
    tmp_path: Path, stack: ExitStack
) -> None:
    file, go_on = tmp_path / "slow.py", tmp_path / "go_on"
    file.write_text("import asyncio, os\nat_once = most = 0\n"
                    f"async def compute_score({SIGNATURE}):\n"
                    "    global at_once, most\n    at_once += 1; most = max(most, at_once)\n"
                    f"    while not os.path.exists({str(go_on)!r}): await asyncio.sleep(0.005)\n"
                    "    await asyncio.sleep(0.02); at_once -= 1\n"
                    "    return {'score': 1, 'most': most}\n")  # fmt: skip
    slow = make_manager(RewardConfig(function=UserFunction(path=str(file)), workers=0))
    url = served(slow, stack, max_waiting=2)
    question = {"data_source": "s", "solution_str": "x"}

    async def five() -> list[httpx.Response]:
        async with httpx.AsyncClient(timeout=60) as client:
            asked = [asyncio.ensure_future(client.post(url, json=question)) for _ in range(5)]
            while sum(each.done() for each in asked) < 3:  # these are sent away at once
                await asyncio.wait(asked, return_when="FIRST_COMPLETED", timeout=0.05)
            go_on.touch()
            return await asyncio.gather(*asked)

    replies = asyncio.run(five())
    assert sorted(r.status_code for r in replies) == [200, 200, 503, 503, 503]
    assert {r.headers.get("Retry-After") for r in replies if r.status_code == 503} == {"1"}
    # The client obeys, and bounds itself.
    results = ask(remote(url, stack, max_concurrent=2), ["x"] * 6)
    assert [r.reward for r in results] == [1.0] * 6
    assert max(r.extra["most"] for r in results) == 2


def counting(tmp_path: Path, stack: ExitStack, sleep_s: float) -> tuple[Manager, Path]:
    """A function in one worker, and the file with a line for each of its calls."""
    file, calls = tmp_path / "counting.py", tmp_path / "calls"
    file.write_text(f"import time\ndef compute_score({SIGNATURE}):\n"
                    f"    open({str(calls)!r}, 'a').write(solution_str + '\\n')\n"
                    f"    time.sleep({sleep_s})\n    return 1.0\n")  # fmt: skip
    calls.touch()
    section = RewardConfig(function=UserFunction(path=str(file)), workers=1, timeout_s=5)
    manager = make_manager(section)
    stack.callback(manager.close)
    return manager, calls


def test_the_wait_for_a_worker_is_not_the_answers_time(tmp_path: Path, stack: ExitStack) -> None:
    manager, calls = counting(tmp_path, stack, 0.15)
    config = RewardConfig(manager=RemoteManager(url=served(manager, stack)), timeout_s=2)
    client = make_manager(config)
    stack.callback(client.close)
    results = ask(client, [str(number) for number in range(20)])
    assert [getattr(r, "reward", r) for r in results] == [1.0] * 20
    assert sorted(map(int, calls.read_text().split())) == list(range(20))


def test_who_hangs_up_is_not_scored_and_who_waits_too_long_is_told(
    tmp_path: Path, stack: ExitStack
) -> None:
    manager, calls = counting(tmp_path, stack, 1.0)
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
        ("1", "no worker came free in time")
    }
    assert calls.read_text().count("gone") < 8


def test_no_page_in_a_browser_can_ask(tmp_path: Path, stack: ExitStack) -> None:
    url = served(echo(tmp_path, stack), stack)
    question = {"data_source": "s", "solution_str": "x"}
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        plain = httpx.post(url, content=json.dumps(question), headers={"Content-Type": kind})
        assert plain.status_code == 415
    moved = {"Host": "evil.example"}
    assert httpx.post(url, json=question, headers=moved).status_code == 421
    assert httpx.get(f"{url}/health", headers=moved).status_code == 421
    assert httpx.post(url, json=question, headers={"Host": "localhost:1"}).json()["score"] == 1.0


def test_a_token_is_a_bearers_and_serves_under_any_name(tmp_path: Path, stack: ExitStack) -> None:
    url = served(echo(tmp_path, stack), stack, token="s3cret")
    question = {"data_source": "s", "solution_str": "x"}
    for given, status in (("bearer s3cret", 200), ("Basic s3cret", 401), ("s3cret", 401)):
        headers = {"Authorization": given, "Host": "rewards.example"}
        assert httpx.post(url, json=question, headers=headers).status_code == status


def test_a_body_that_is_cut_off_leaves_no_trace(
    tmp_path: Path, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.getLogger("uvicorn.error")
    with ExitStack() as service:
        url = served(echo(tmp_path, stack), service)
        log.addHandler(caplog.handler)  # uvicorn takes away what was there
        stack.callback(log.removeHandler, caplog.handler)
        head = "POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2]))) as connection:
            connection.sendall(f'{head}Content-Length: 900\r\n\r\n{{"data'.encode())
        assert httpx.get(f"{url}/health").status_code == 200
    assert caplog.text == ""


def test_no_service_that_others_can_reach_goes_without_token() -> None:
    with pytest.raises(RewardError, match=r"^--host is 0\.0\.0\.0, which others can reach, and "):
        listen("0.0.0.0", 0, None)
    listen("0.0.0.0", 0, "token").close()


def test_a_port_that_is_taken_is_told_in_one_line() -> None:
    with listen("127.0.0.1", 0, None) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RewardError, match=rf"^--port is {port}, but 127\.0\.0\.1:{port} "):
            listen("127.0.0.1", port, None)
