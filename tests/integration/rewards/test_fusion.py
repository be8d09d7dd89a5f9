"""SandboxFusion's client: each outcome, each fault of the service, and whose fault it is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.faulty_http import Served, Step, hang_up, ok, reply, serving
from tests.sandboxes import need_bubblewrap, served
from tests.winnow_command import in_this_process

import winnow.sandbox
from winnow.config.load import load_recipe
from winnow.config.reward import FusionConfig, RewardConfig, SandboxConfig
from winnow.errors import ConfigError, RewardError
from winnow.rewards.managers import RuleManager
from winnow.rewards.scorers import code as scorer
from winnow.rewards.task import Failure
from winnow.sandbox.fusion import FusionSandbox, parse_answer
from winnow.sandbox.program import Program, SandboxError
from winnow.types import Prompt

TOKEN = "s3cret-token"
DOUBLE = {"inputs": ["2\n", "5\n"], "outputs": ["4\n", "10"]}


def answer(
    stdout: str = "",
    *,
    status: str = "Success",
    message: str = "",
    compiled: Any = None,
    **run: Any,
) -> dict[str, Any]:
    """What SandboxFusion answers."""
    usual = {"status": "Finished", "execution_time": 0.5, "return_code": 0, "stderr": ""}
    return {
        "status": status,
        "message": message,
        "compile_result": compiled,
        "run_result": {**usual, "stdout": stdout, **run},
        "executor_pod_name": None,
        "files": {},
    }


def tried(output_kb: int = 1024) -> str:
    """What the trial writes."""
    return "True 42\n" + "x" * ((output_kb << 10) - 512) + "\n"


TRIED = ok(answer(tried()))


def scored(script: Sequence[Step], **settings: Any) -> tuple[Any, Served]:
    """The outcome of a program against two cases, or the error; behind the trial."""
    trial = ok(answer(tried(settings.get("output_kb", 1024))))
    with serving([trial, *script]) as service:
        winnow.sandbox.start(FusionConfig(url=service.url, **settings))
        try:
            return scorer.score("any", "print(1)", DOUBLE, {}).extra["pred"], service
        except SandboxError as error:
            return error, service
        finally:
            winnow.sandbox.close()


CASES: list[tuple[Step, str]] = [
    (ok(answer("4", return_code=0)), "wrong"),
    (ok(answer(status="Failed", return_code=1, stderr="x\nValueError: x")), "runtime_error"),
    (ok(answer(status="Failed", return_code=-9)), "runtime_error"),
    (ok(answer(status="Failed", return_code=1, stderr="SyntaxError: x")), "compile_error"),
    (ok(answer(compiled={"status": "Finished", "return_code": 1, "stderr": "x"})), "compile_error"),
    (ok(answer(compiled={"status": "TimeLimitExceeded"})), "compile_error"),
    (ok(answer(status="Failed", **{"return_code": None}) | {
        "run_result": {"status": "TimeLimitExceeded", "return_code": None, "stdout": None}}),
     "time_limit"),
    (ok(answer("x" * 1025)), "output_limit"),
    (ok(answer(status="Failed", message="output_limit", return_code=-9)), "output_limit"),
]  # fmt: skip


@pytest.mark.parametrize(("step", "outcome"), CASES)
def test_what_is_the_programs_doing_is_its_outcome(step: Step, outcome: str) -> None:
    assert scored([ok(answer("4")), step], output_kb=1)[0] == outcome


def test_cases_that_are_right_pass_one_by_one() -> None:
    outcome, service = scored([ok(answer("4")), ok(answer("10\n"))], time_s=3, memory_mb=256)
    assert outcome == "pass"
    _, first, second = service.requests
    assert first.line == "POST /run_code HTTP/1.1"
    assert first.body == {
        "code": "print(1)", "language": "python", "stdin": "2\n", "compile_timeout": 10.0,
        "run_timeout": 3.0, "memory_limit_MB": 256, "files": {}, "fetch_files": [],
    }  # fmt: skip
    assert second.body["stdin"] == "5\n"
    assert "authorization" not in first.headers


FAULTS: list[tuple[Step, str]] = [
    (reply(504), "answered 504"),
    (hang_up, "cannot be reached"),
    (ok(None), "the body: Input should be a valid dict"),
    (ok({}), "status: Field required"),
    (ok({"status": "Success"}), "response has no run_result"),
    (ok(answer(status="SandboxError", message="no disk")), "the service says: no disk"),
    (ok(answer(compiled={"status": "Error", "stderr": "no gcc"})), "not run the program: no gcc"),
    (ok(answer() | {"run_result": {"status": "Error"}}), "no reason given"),
    (ok(answer(return_code="0")), "return_code: Input should be a valid integer, got '0'"),
    (ok(answer(return_code=None)), "response has no return code"),
]


@pytest.mark.parametrize(("step", "said"), FAULTS)
def test_what_the_service_does_wrong_is_no_outcome(step: Step, said: str) -> None:
    error, service = scored([ok(answer("4")), step])
    assert isinstance(error, SandboxError)
    assert said in str(error)
    assert "\n" not in str(error)
    assert len(service.requests) in (3, 5)  # the trial, the first case, and one or three tries


VERDICT = '{"d":[["passed",2],["of",2],["outcome","pass"],["text",""]]}\n'


@pytest.mark.parametrize(
    ("said", "code", "outcome"),
    [
        (VERDICT, 0, "pass"),
        (VERDICT, -9, "runtime_error"),
        (VERDICT + VERDICT, 0, "runtime_error"),
        ("x" + VERDICT, 0, "runtime_error"),
        ("", 0, "runtime_error"),
    ],
)
def test_a_verdict_is_whole_and_alone_and_its_process_ended_well(
    said: str, code: int, outcome: str
) -> None:
    truth = {"fn_name": "add", "inputs": [[1, 2], [1, 1]], "outputs": [3, 2]}
    with serving([TRIED, ok(answer(said, return_code=code))]) as service:
        winnow.sandbox.start(FusionConfig(url=service.url))
        found = scorer.score("any", "def add(a, b): return a + b", truth, {})
        winnow.sandbox.close()
    assert (found.extra["pred"], found.accuracy) == (outcome, outcome == "pass")


def test_times_that_are_none_count_as_nothing() -> None:
    for time_s in (None, "1", -1, float("nan"), float("inf"), 10**400):
        result = parse_answer(answer("x", execution_time=time_s))
        assert 0 <= result.seconds <= 1e6


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ([reply(401, raw=b'{"detail":"the token is missing or wrong"}')],
         "answered 401: .*or wrong"),
        ([ok(answer("True 43"))], "trial program ended there with exit code 0.*: 'True 43'"),
        ([ok(answer("False 42\nxxx"))], "'False 42'; it must run Python 3.8 or newer"),
        ([ok(answer(tried(1023)))], "output limit is below reward.sandbox.output_kb=1024; start"),
        ([ok(answer(status="Failed", return_code=1, stderr="no such"))], "exit code 1 .*no such"),
        ([ok({"status": "SandboxError", "message": "full"})], "the service says: full"),
        ([reply(404)], "answered 404.*start `winnow sandbox serve` there"),
    ],
)  # fmt: skip
def test_a_service_that_does_not_serve_is_refused_before_training(
    script: list[Step], said: str
) -> None:
    with serving(script) as service:
        with pytest.raises(RewardError, match=said) as caught:
            FusionSandbox(FusionConfig(url=service.url))
        assert str(caught.value).startswith(f"reward.sandbox.url is {service.url}, ")
        assert "\n" not in str(caught.value)


def test_a_slow_service_is_given_up_after_compile_run_and_ten_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = []

    def post(_: Any, path: str, body: Any, timeout_s: float) -> Any:
        seen.append((path, body["run_timeout"], timeout_s))
        return answer(tried())

    monkeypatch.setattr("winnow.http.client.JsonClient.post_blocking", post)
    with closing(FusionSandbox(FusionConfig(url="http://a", compile_s=3, sample_s=7))) as sandbox:
        sandbox.run_for(Program(""), 2.5)
    assert seen == [("run_code", 7, 20), ("run_code", 2.5, 15.5)]


def test_a_token_is_named_in_the_recipe_and_stays_in_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    need_bubblewrap()
    with served(SandboxConfig(max_concurrent=1, memory_mb=1024, time_s=30), TOKEN) as (url, _):
        config = FusionConfig(url=f"{url}/run_code", token_env="OUR_TOKEN")
        assert config.url == url
        with pytest.raises(RewardError, match="not set in the environment; export OUR_TOKEN"):
            FusionSandbox(config)
        monkeypatch.setenv("OUR_TOKEN", "other")
        with pytest.raises(RewardError, match="the token is missing or wrong") as caught:
            FusionSandbox(config)
        assert "other" not in str(caught.value).replace("another", "")
        monkeypatch.setenv("OUR_TOKEN", f"{TOKEN}\n")
        with closing(FusionSandbox(config)) as sandbox:
            assert sandbox.run_for(Program("print(7)"), 5).stdout == b"7\n"
            assert TOKEN not in sandbox.description
        with pytest.raises(RewardError, match="the token is missing"):
            FusionSandbox(config.model_copy(update={"token_env": None}))


def test_a_fault_of_the_service_is_a_failed_scoring_and_no_wrong_answer() -> None:
    empty = np.zeros(0, np.int64)
    prompt = Prompt("p", empty, "", "apps", json.dumps(DOUBLE))
    with serving([TRIED, ok(answer("4")), ok({"status": "SandboxError", "message": "full"})]) as s:
        config = RewardConfig(sandbox=FusionConfig(url=s.url), scorers={"apps": "code"})
        with closing(RuleManager(config)) as rules:
            rules.prepare({"apps"})
            result = asyncio.run(rules.score(prompt, "print(4)"))
    assert isinstance(result, Failure)
    assert result.outside
    assert result.line.startswith("SandboxError: the service says: full at ")


def test_a_whole_command_scores_by_a_service_and_says_so(tmp_path: Path) -> None:
    need_bubblewrap()
    said = ["reward", "try", "--scorer", "code", "--truth", json.dumps(DOUBLE),
            "--answer", "print(2 * int(input()))", "reward/sandbox=fusion"]  # fmt: skip
    with served(SandboxConfig(max_concurrent=1, memory_mb=1024, time_s=30)) as (url, _):
        done = in_this_process(*said, f"reward.sandbox.url={url}", folder=tmp_path).check()
    assert f"SandboxFusion at {url}, 64 requests at once" in done.out
    gone = in_this_process(*said, f"reward.sandbox.url={url}", folder=tmp_path)
    assert (gone.code, gone.err.count("\n")) == (2, 1)
    assert f"reward.sandbox.url is {url}, which runs no program: {url} cannot be" in gone.err


@pytest.mark.parametrize("url", ["ftp://a", "'http://a/?x=1'"])
def test_a_wrong_url_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(ConfigError, match=r"must (begin with http|end before)") as caught:
        load_recipe("quickstart", ["reward/sandbox=fusion", f"reward.sandbox.url={url}"])
    assert "\n" not in str(caught.value)
