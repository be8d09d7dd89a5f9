"""The sandbox server over a real socket: its answers, its limits, and requests made to hurt it."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from tests.sandboxes import need_bubblewrap, served

from winnow.config.reward import SandboxConfig
from winnow.http.service import Refusal, is_local_host_header, is_loopback
from winnow.sandbox.program import Result
from winnow.sandbox.server import make_response, parse_job

CONFIG = SandboxConfig(max_concurrent=2, time_s=20, output_kb=64)
TOKEN = "s3cret-token"
JSON = {"Content-Type": "application/json"}
ASLEEP = "import time; time.sleep(60)"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    need_bubblewrap()
    with served(CONFIG, max_body_bytes=200_000) as (address, _):
        yield address


def post(url: str, body: Any, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    options = {"headers": JSON, "timeout": 60, **options}
    return httpx.post(f"{url}/run_code", content=content, trust_env=False, **options)


def run(url: str, code: str, language: str = "python", **fields: Any) -> dict[str, Any]:
    response = post(url, {"code": code, "language": language, **fields})
    assert response.status_code == 200, response.text
    answer = response.json()
    assert isinstance(answer, dict)
    return answer


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


def test_a_program_that_ends_well_succeeds(url: str) -> None:
    answer = run(url, "import sys; print(input()); print('e', file=sys.stderr)", stdin="ä\n")
    seconds = answer["run_result"].pop("execution_time")
    assert seconds > 0
    assert answer == {
        "status": "Success",
        "message": "",
        "compile_result": None,
        "run_result": {"status": "Finished", "return_code": 0, "stdout": "ä\n", "stderr": "e\n"},
        "files": {},
    }


def test_a_program_that_ends_badly_fails(url: str) -> None:
    answer = run(url, "print(1); raise SystemExit(3)")
    assert (answer["status"], answer["run_result"]["return_code"]) == ("Failed", 3)
    assert answer["run_result"]["stdout"] == "1\n"
    late = run(url, ASLEEP, run_timeout=0.5)
    assert (late["status"], late["run_result"]["status"]) == ("Failed", "TimeLimitExceeded")
    loud = run(url, "while True: print('x' * 1000)")
    assert (loud["status"], loud["message"]) == ("Failed", "output_limit")
    greedy = run(url, "bytearray(100 << 20)", memory_limit_MB=64)
    assert "MemoryError" in greedy["run_result"]["stderr"]
    assert run(url, "bytearray(100 << 20)", memory_limit_MB=-1)["status"] == "Success"


@pytest.mark.parametrize(
    ("language", "code"),
    [
        ("python", "open('out', 'wb').write(bytes([0, 255])); print(input()); raise SystemExit(4)"),
        ("bash", "printf '\\x00\\xff' > out; read x; echo $x; exit 4"),
    ],
)
def test_files_are_fetched_that_a_program_leaves(url: str, language: str, code: str) -> None:
    names = ["out", "d/in", "nowhere"]
    answer = run(url, code, language, stdin="7\n", files={"d/in": b64(b"x")}, fetch_files=names)
    assert answer["files"] == {"out": b64(b"\x00\xff"), "d/in": b64(b"x")}
    assert answer["run_result"]["stdout"] == "7\n"
    assert answer["run_result"]["return_code"] == 4


def test_what_is_fetched_counts_as_output_and_a_death_as_such(url: str) -> None:
    loud = run(url, "open('out', 'w').write('x' * 100_000)", fetch_files=["out"])
    assert (loud["message"], loud["files"]) == ("output_limit", {})
    dead = run(url, "import ctypes; ctypes.string_at(0)", fetch_files=["out"])
    assert (dead["run_result"]["return_code"], dead["files"]) == (-11, {})


def test_a_forged_list_of_files_holds_names_asked_for_and_texts_alone() -> None:
    job = parse_job({"code": "", "fetch_files": ["a", "b"]}, CONFIG)
    assert job.mark is not None
    for said, files in (
        (b'{"a": "eA==", "c": "eA=="}', {"a": "eA=="}),
        (b'{"a": 1, "b": "\\ud800"}', {}),
        (b"[1]", {}),
        (b"[" * 100_000, {}),
        (b"\xff", {}),
    ):
        answer = make_response(Result("finished", 0, b"out" + job.mark + said, b"", 1.0), job)
        assert (answer["run_result"]["stdout"], answer["files"]) == ("out", files)
        json.dumps(answer, ensure_ascii=False).encode()


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("code", None, "code: Field required"),
        ("language", "cpp", "language: Input should be 'python' or 'bash', got 'cpp'"),
        ("language", "x" * 9999, "language: Input"),
        ("stdin", 3, "stdin: Input should be a valid string, got 3"),
        ("run_timeout", "3", "run_timeout: Input should be a valid number, got '3'"),
        ("run_timeout", 0, "run_timeout: must lie in (0, 20] seconds here (--max-time-s of the"),
        ("run_timeout", 21, "seconds here (--max-time-s of the server), got 21"),
        ("run_timeout", float("nan"), "run_timeout: must lie"),
        ("run_timeout", 10**400, "run_timeout: Input should be a valid number"),
        ("memory_limit_MB", 513, "memory_limit_MB: must lie in [64, 512] here (--memory-mb of"),
        ("memory_limit_MB", float("nan"), "memory_limit_MB: must lie"),
        ("files", {"a": 1}, "files.a: must be a text in base64, got 1"),
        ("files", {"a": "!!!!"}, "files.a: must be a text in base64"),
        ("files", {"../a": ""}, "files: '../a' is not a plain file name"),
        ("files", {"a": "", "a/b": ""}, "is not a plain file name"),
        ("files", {str(n): "" for n in range(33)}, "should have at most 32 items"),
        ("fetch_files", [1], "fetch_files.0: Input should be a valid string, got 1"),
        ("fetch_files", ["/etc/passwd"], "fetch_files: '/etc/passwd' is not a plain file name"),
    ],
    ids=str,
)
def test_a_field_that_is_wrong_is_named(field: str, value: Any, said: str) -> None:
    with pytest.raises(Refusal) as caught:
        parse_job({"code": "", field: value}, CONFIG)
    assert said in str(caught.value)
    assert len(str(caught.value)) < 300


def test_fields_are_read_as_the_protocol_has_them() -> None:
    with pytest.raises(Refusal, match="code: Field required"):
        parse_job({}, CONFIG)
    for body in ([], "x", None, 3):
        with pytest.raises(Refusal, match="must be a JSON object"):
            parse_job(body, CONFIG)
    with pytest.raises(Refusal, match=r"must not contain script\.sh"):
        parse_job({"code": "", "language": "bash", "files": {"script.sh": ""}}, CONFIG)
    job = parse_job({"code": "x", "new_field": 1, "stdin": None, "files": {"a": None}}, CONFIG)
    assert (job.program.code, job.program.stdin, job.program.files) == ("x", b"", {})
    assert job.limits == CONFIG.model_copy(update={"time_s": 10})
    short = CONFIG.model_copy(update={"time_s": 3})
    assert parse_job({"code": "x"}, short).limits == short


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"", 400, "the body (0 bytes) is not JSON"),
        (b"{", 400, "is not JSON"),
        (b"\xff\xfe", 400, "is not JSON"),
        (b"[" * 100_000, 400, "is not JSON"),
        (b'{"code": ' + b"9" * 10_000 + b"}", 400, "is not JSON"),
        (b"[]", 422, "the body: must be a JSON object"),
        (b" " * 200_001, 413, "at most 200,000 bytes, got 200001"),
        (b" " * 30_000_000, 413, "at most 200,000 bytes, got 30000000"),
    ],
    ids=["empty", "half", "no text", "deep", "long number", "list", "large", "gigantic"],
)
def test_a_body_that_is_none_is_refused(url: str, body: bytes, status: int, said: str) -> None:
    response = post(url, body)
    assert response.status_code == status
    assert said in response.json()["detail"]


def test_a_body_without_a_length_ends_at_the_limit(url: str) -> None:
    def endless() -> Iterator[bytes]:
        while True:
            yield b" " * 10_000

    response = httpx.post(f"{url}/run_code", content=endless(), headers=JSON, trust_env=False)
    assert (response.status_code, "at most" in response.text) == (413, True)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_a_page_in_a_browser_cannot_ask(url: str, kind: str) -> None:
    response = post(url, {"code": "print(1)"}, headers={"Content-Type": kind})
    assert response.status_code == 415


def test_a_page_whose_name_was_pointed_here_cannot_ask(url: str) -> None:
    headers = {**JSON, "Host": "evil.example:8080"}
    response = post(url, {"code": "print(1)"}, headers=headers)
    assert (response.status_code, "for localhost only" in response.text) == (421, True)
    assert httpx.get(f"{url}/health", headers=headers, trust_env=False).status_code == 421
    assert post(url, {"code": ""}, headers={**JSON, "Host": "localhost:8080"}).status_code == 200


def test_the_token_must_be_right() -> None:
    need_bubblewrap()
    with served(SandboxConfig(max_concurrent=1), TOKEN) as (url, _):
        for given in (None, "Bearer wrong", f"Basic {TOKEN}", "Bearer", "Bearer ä", TOKEN):
            headers = JSON if given is None else {**JSON, "Authorization": given.encode()}
            response = post(url, b"no JSON, and nobody looks", headers=headers)
            assert response.status_code == 401
            assert response.headers["WWW-Authenticate"] == "Bearer"
            assert TOKEN not in response.text
        headers = {**JSON, "Authorization": f"bearer {TOKEN}"}
        assert post(url, {"code": "print(1)"}, headers=headers).json()["status"] == "Success"
        assert health(url)["status"] == "ok"


def health(url: str) -> dict[str, Any]:
    answer = httpx.get(f"{url}/health", trust_env=False).json()
    assert isinstance(answer, dict)
    return answer


def test_the_queue_has_a_length() -> None:
    need_bubblewrap()
    slow = {"code": ASLEEP, "run_timeout": 90}
    with ThreadPoolExecutor(2) as threads:
        config = SandboxConfig(max_concurrent=1, time_s=100)
        with served(config, max_queued=1, max_wait_s=90) as (url, _):
            first, second = threads.submit(post, url, slow), threads.submit(post, url, slow)
            while health(url)["running"] + health(url)["waiting"] < 2:
                time.sleep(0.01)
            third = post(url, slow)
        assert (third.status_code, third.headers["Retry-After"]) == (503, "1")
        assert "2 requests are in progress, the limit" in third.text
        assert first.result().status_code == second.result().status_code == 503
        assert "closing" in first.result().text


def test_who_waits_too_long_is_told_to_come_back() -> None:
    need_bubblewrap()
    slow = {"code": ASLEEP, "run_timeout": 90}
    with ThreadPoolExecutor(1) as threads:
        with served(SandboxConfig(max_concurrent=1, time_s=100), max_wait_s=0.2) as (url, _):
            first = threads.submit(post, url, slow)
            while not health(url)["running"]:
                time.sleep(0.01)
            second = post(url, slow)
        assert (second.status_code, second.headers["Retry-After"]) == (503, "1")
        assert "no slot became free" in second.text
        assert first.result().status_code == 503


def test_what_is_of_this_machine_does_without_a_token_and_may_be_asked() -> None:
    ours, theirs = ["127.0.0.1", "127.8.8.8", "::1", "localhost"], ["0.0.0.0", "::", "10.0.0.1"]
    hosts = [*ours, *theirs, "example.com", ""]
    assert [host for host in hosts if is_loopback(host)] == ours
    ours = ["127.0.0.1:80", "localhost", "LOCALHOST:1", "[::1]:80"]
    theirs = ["127.0.0.1.evil.example", "evil.example:80", "localhost@evil.example"]
    hosts = [*ours, *theirs, "10.0.0.1:80", "[::1", ""]
    assert [host for host in hosts if is_local_host_header(host)] == ours


def test_landlock_serves_too_where_namespaces_are_blocked() -> None:
    config = SandboxConfig(backend="landlock", max_concurrent=1, time_s=20)
    with served(config) as (url, _):
        assert health(url)["sandbox"] == "landlock"
        files = {"d/a": b64(b"there")}
        there = run(url, "print(open('d/a').read())", files=files, fetch_files=["d/a", "b"])
        said = there["run_result"]
        assert (said["stdout"], said["stderr"], there["files"]) == ("there\n", "", files)
        assert run(url, "cat d/a; exit 3", "bash", files=files)["run_result"]["stdout"] == "there"
        assert run(url, "open('b', 'w')")["run_result"]["return_code"] == 1
