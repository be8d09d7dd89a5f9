"""JSON services against clients that send half of what they should, more than one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request
from tests.services import running
from tests.winnow_command import WINNOW

from winnow.http import service
from winnow.http.service import JsonService, listen, listener_url

FILES = 256
"""A limit of open files that so many half-open connections exceed."""
HALF_HEAD = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Ty"
HALF_BODY = (
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 900\r\n\r\n{"data'
)
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info): return 1.0\n"
QUESTION = {"data_source": "s", "solution_str": "x"}
COMMANDS: dict[str, tuple[list[str], str, dict[str, Any]]] = {
    "reward": (["--function", "own.py", "--workers", "1"], "", QUESTION),
    "sandbox": (["--max-concurrent", "1"], "run_code", {"code": "print(1)"}),
}
NO_PROXY: dict[str, Any] = {"trust_env": False, "timeout": 30}
EARLY_SIGNAL = """
import signal
from winnow.http import service

class Late(service.Server):
    def run(self, sockets):
        signal.raise_signal(signal.SIGTERM)
        super().run(sockets)

service.Server = Late
made = service.JsonService("/", None, dict, 1, 1, None, "error")
raise SystemExit(service.serve(made, service.listen("127.0.0.1", 0, None), ""))
"""


@contextlib.contextmanager
def half_sent(port: int, data: bytes, count: int) -> Iterator[list[socket.socket]]:
    """Connections that have sent this much, and stay."""
    with contextlib.ExitStack() as stack:
        held = []
        for _ in range(count):
            one = stack.enter_context(socket.create_connection(("127.0.0.1", port), 30))
            with contextlib.suppress(OSError):  # it may have been closed already
                one.sendall(data)
            held.append(one)
        yield held


def few_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, FILES))


@pytest.mark.parametrize(("command", "token"), [("reward", ""), ("sandbox", "s3cret")])
def test_half_sent_requests_keep_no_client_from_its_answer(
    command: str, token: str, tmp_path: Path
) -> None:
    words, path, body = COMMANDS[command]
    (tmp_path / "own.py").write_text(REWARD)
    process = subprocess.Popen(
        [str(WINNOW), command, "serve", "--port", "0", *words,
         *(["--token-env", "OUR_TOKEN"] if token else [])],
        cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "OUR_TOKEN": token}, preexec_fn=few_files,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:(\d+)", process.stdout.readline())
        assert found is not None
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        # With a token a body is not waited for; without one the bodies hold places, not clients.
        sent = [HALF_HEAD, HALF_BODY.replace(b"POST /", f"POST /{path}".encode())][
            : 1 + bool(token)
        ]
        for data in sent:
            with half_sent(int(found[1]), data, FILES + 20):
                for _ in range(3):
                    answer = httpx.post(
                        f"{found[0]}/{path}", json=body, headers=headers, **NO_PROXY
                    )
                    assert answer.status_code == 200, answer.text
        process.terminate()
        _, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert err == "winnow: stopped by SIGTERM\n"


async def echo(body: Any, _: Request) -> dict[str, Any]:
    await asyncio.sleep(0)
    return {"said": body}


@contextlib.contextmanager
def echoing(max_requests: int = 8, token: str | None = None) -> Iterator[tuple[JsonService, str]]:
    made = JsonService("/", echo, lambda: {}, max_requests, 1000, token, "error")
    with listen("127.0.0.1", 0, token) as listener, running(made, listener):
        yield made, listener_url(listener)


def is_closed(connection: socket.socket, within_s: float) -> bool:
    connection.settimeout(within_s)
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True
    except TimeoutError:
        return False


@pytest.mark.parametrize("before", [b"", b"P", HALF_HEAD], ids=["nothing", "a byte", "half"])
def test_a_head_that_is_late_ends_its_connection(
    before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_HEAD_S", 0.3)
    with echoing() as (_, url), half_sent(int(url.rpartition(":")[2]), before, 1) as (one,):
        assert is_closed(one, 10)


def test_a_second_head_that_drips_ends_its_connection_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_HEAD_S", 0.3)
    whole = HALF_BODY.replace(b"900", b"2").replace(b'{"data', b"{}")
    with echoing() as (_, url), half_sent(int(url.rpartition(":")[2]), whole, 1) as (one,):
        said = b""
        while b'{"said": {}}' not in said:
            said += one.recv(4096)
        sent = 0
        with contextlib.suppress(ConnectionError):
            for byte in HALF_HEAD:
                one.sendall(bytes([byte]))
                sent += 1
                time.sleep(0.05)
        assert sent < len(HALF_HEAD)


def test_a_body_that_is_late_is_told_and_gives_its_place_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_DRAIN_S", 0.2)
    with (
        echoing(max_requests=2) as (made, url),
        half_sent(int(url.rpartition(":")[2]), HALF_BODY, 2),
    ):
        while made.active_requests < 2:
            time.sleep(0.01)
        full = httpx.post(url, json={}, **NO_PROXY)
        assert (full.status_code, full.headers["Retry-After"]) == (503, "1")
        assert "2 requests are in progress" in full.json()["error"]
    monkeypatch.setattr(service, "_BODY_S", 0.3)
    with echoing(max_requests=2) as (_, url):
        with half_sent(int(url.rpartition(":")[2]), HALF_BODY, 2) as held:
            assert all(one.recv(4096).startswith(b"HTTP/1.1 408 ") for one in held)
        assert httpx.post(url, json={}, **NO_PROXY).json() == {"said": {}}


def test_without_a_token_every_connection_that_is_refused_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "_DRAIN_S", 30.0)
    headers = {"Authorization": "Bearer s3cret"}
    with (
        echoing(token="s3cret") as (_, url),
        half_sent(int(url.rpartition(":")[2]), HALF_BODY, 50) as held,
    ):
        for one in held[service._MOST_DRAINED :]:  # those before it may end what they send
            one.settimeout(20)
            assert one.recv(4096).startswith(b"HTTP/1.1 401 ")
        assert httpx.post(url, json=1, headers=headers, **NO_PROXY).json() == {"said": 1}


def test_a_signal_before_the_server_runs_ends_it() -> None:
    told = subprocess.run([sys.executable, "-c", EARLY_SIGNAL], timeout=60, capture_output=True)
    assert (told.returncode, told.stderr) == (0, b"winnow: stopped by SIGTERM\n")


def test_a_reply_does_not_wait_for_its_head_to_be_acknowledged() -> None:
    with (
        listen("127.0.0.1", 0, None) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as taken,
    ):
        assert taken.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
