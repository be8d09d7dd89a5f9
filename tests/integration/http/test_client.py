"""JSON over HTTP against a real server that fails in every way: tries, kinds, limits, secrets."""

from __future__ import annotations

import asyncio
import gzip
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from email.utils import formatdate
from typing import Any

import pytest
from tests.faulty_http import (
    Served,
    Step,
    cut,
    dripping,
    flood,
    hang_up,
    noise,
    ok,
    reply,
    serving,
    together,
)

from winnow.errors import RewardError
from winnow.http.client import JsonClient, RemoteError, read_token

DEEP = b"[" * 200_000 + b"]" * 200_000


def asked(script: list[Step], timeout_s: float = 20, **options: Any) -> tuple[Any, Served]:
    """What a client gets from a server, an error included."""
    options = {"backoff_s": 0.01, **options}
    with serving(script) as served, closing(JsonClient(served.url, **options)) as client:
        try:
            return client.post_blocking("/do", {"x": "\ud800ä"}, timeout_s), served
        except RemoteError as error:
            return error, served


def test_json_goes_there_and_comes_back() -> None:
    found, served = asked([ok({"y": [1]})], token="t0ken")
    assert found == {"y": [1]}
    (request,) = served.requests
    assert request.line == "POST /do HTTP/1.1"
    assert request.body == {"x": "\ud800ä"}
    assert request.headers["authorization"] == "Bearer t0ken"
    assert request.headers["content-type"] == "application/json"


@pytest.mark.parametrize(
    "passing", [reply(429), reply(502), reply(503), reply(504), cut, hang_up, noise],
    ids=["429", "502", "503", "504", "cut", "hang up", "noise"],
)  # fmt: skip
def test_what_fails_in_passing_is_tried_again(passing: Step) -> None:
    found, served = asked([passing, passing, ok(7)])
    assert (found, len(served.requests)) == (7, 3)


@pytest.mark.parametrize(
    ("step", "status", "tries", "said"),
    [
        (reply(504, raw=b""), 504, 3, "answered 504 (3 attempts)"),
        (reply(400, {"error": "no x"}), 400, 1, 'answered 400: {"error": "no x"}'),
        (reply(500), 500, 1, "answered 500"),
        (reply(307, headers={"Location": "/other"}), 307, 1, "answered 307"),
        (cut, None, 3, "closed the connection early"),
        (hang_up, None, 3, "cannot be reached: Server disconnected"),
        (noise, None, 3, "cannot be reached: "),
        (reply(200, raw=b"<html>"), None, 1, "answered with 6 bytes that are not JSON"),
        (reply(200, raw=b""), None, 1, "0 bytes that are not JSON"),
        (reply(200, raw=b"\xff\xfe"), None, 1, "not JSON"),
        (reply(200, raw=DEEP), None, 1, "not JSON"),
        (reply(200, raw=b"{}", headers={"Content-Encoding": "gzip"}), None, 1, "cannot be decoded"),
        (reply(200, raw=gzip.compress(b" " * 9_000_000), headers={"Content-Encoding": "gzip"}),
         None, 1, "more than 1,000,000 bytes"),
        (flood, None, 1, "more than 1,000,000 bytes"),
    ],
)  # fmt: skip
def test_what_stays_is_an_error_that_says_so(
    step: Step, status: int | None, tries: int, said: str
) -> None:
    error, served = asked([step], max_bytes=1_000_000)
    assert isinstance(error, RemoteError)
    assert (error.status, len(served.requests)) == (status, tries)
    assert error.line.startswith(served.url)
    assert said in error.line
    assert "\n" not in error.line
    assert str(pickle.loads(pickle.dumps(error))) == str(error) == error.line


def test_an_answer_that_drips_beyond_the_time_is_given_up() -> None:
    error, served = asked([dripping(0.02)], timeout_s=0.3, tries=2)
    assert (error.status, len(served.requests)) == (None, 2)
    assert "did not answer within 0.3 s (2 attempts)" in error.line


@pytest.mark.parametrize("after", ["0.6", lambda: formatdate(time.time() + 2, usegmt=True)])
def test_a_server_may_say_when_to_come_back(after: str | Callable[[], str]) -> None:
    began = time.monotonic()
    value = after if isinstance(after, str) else after()
    found, _ = asked([reply(503, headers={"Retry-After": value}), ok(1)])
    assert found == 1
    assert time.monotonic() - began > 0.5  # without the header it is a hundredth


@pytest.mark.parametrize("after", ["0", "Thu, 01 Jan 2015 00:00:00 GMT", "soon", "-3", "nan"])
def test_a_server_cannot_switch_the_back_off_off(after: str) -> None:
    began = time.monotonic()
    found, _ = asked([reply(503, headers={"Retry-After": after}), ok(1)], backoff_s=0.4)
    assert found == 1
    assert time.monotonic() - began >= 0.4 / 2


def test_one_limit_holds_for_threads_and_loops_together() -> None:
    with (
        serving([together(3, 1)]) as served,
        closing(JsonClient(served.url, max_concurrent=3)) as c,
    ):

        async def many() -> list[Any]:
            return await asyncio.gather(*(c.post("a", n, 30) for n in range(6)))

        with ThreadPoolExecutor(8) as threads:
            plain = [threads.submit(c.post_blocking, "b", n, 30) for n in range(6)]
            loops = [threads.submit(asyncio.run, many()) for _ in range(2)]
            assert [each.result() for each in plain] == [1] * 6
            assert [each.result() for each in loops] == [[1] * 6] * 2
    assert served.most_at_once == 3
    assert len(served.requests) == 18


@pytest.mark.parametrize(
    ("token", "said"),
    [
        (None, "which is not set in the environment; export OUR_TOKEN"),
        ("  ", "which is not set in the environment; export OUR_TOKEN"),
        *((token, "whose value must be printable ASCII") for token in ("a\nb", "a b", "ä")),
    ],
)
def test_a_token_that_is_missing_or_no_header_holds_is_refused_without_showing_it(
    token: str | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OUR_TOKEN", raising=False)
    if token is not None:
        monkeypatch.setenv("OUR_TOKEN", token)
    with pytest.raises(RewardError) as caught:
        read_token("OUR_TOKEN", "reward.judge.api_key_env")
    assert str(caught.value).startswith(f"reward.judge.api_key_env is OUR_TOKEN, {said}")
    assert not token or token == "  " or token not in str(caught.value)


def test_closing_ends_what_is_under_way() -> None:
    before = set(threading.enumerate())  # a run in this process leaves its engine's to its end
    with serving([dripping(0.02)]) as served:
        client = JsonClient(served.url)
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(client.post_blocking, "do", {}, 60)
            while not served.requests:
                time.sleep(0.01)
            client.close()
            with pytest.raises(RemoteError, match="client is closed"):
                asking.result(10)
        client.close()
        with pytest.raises(RemoteError, match="client is closed"):
            client.post_blocking("do", {}, 60)
    new = set(threading.enumerate()) - before
    assert not [thread for thread in new if thread.name.startswith("http ")]


def test_who_stops_waiting_stops_the_request() -> None:
    async def give_up(client: JsonClient) -> None:
        await asyncio.wait_for(client.post("do", {}, 60), 0.2)

    with serving([dripping(0.02)]) as served, closing(JsonClient(served.url)) as client:
        with pytest.raises(TimeoutError):
            asyncio.run(give_up(client))
        until = time.monotonic() + 20
        while served.now and time.monotonic() < until:
            time.sleep(0.01)
        assert served.now == 0
