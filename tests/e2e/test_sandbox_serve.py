"""`winnow sandbox serve` as a process: asked over a socket, ended by signals, refused in words."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.processes import descendants, gone
from tests.sandboxes import need_bubblewrap
from tests.winnow_command import WINNOW, in_this_process

TOKEN = "s3cret-token"
ASLEEP = {"code": "import time; time.sleep(90)", "run_timeout": 100}


@contextmanager
def server(
    folder: Path, *words: str, token: str = ""
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process of its own, and the address that it prints."""
    need_bubblewrap()
    command = [str(WINNOW), "sandbox", "serve", "--port", "0", "--max-concurrent", "1", *words]
    process = subprocess.Popen(
        command,
        cwd=folder,
        env={**os.environ, "OUR_TOKEN": token},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"sandbox at (http://\S+) \((bubblewrap|landlock), 1 at once as ", line)
        assert found, line + (process.communicate()[1] if process.poll() is not None else "")
        yield process, found[1]
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)], ids=["SIGTERM", "Ctrl-C"]
)
def test_a_signal_ends_the_server_and_all_that_runs_in_it(
    number: signal.Signals, code: int, tmp_path: Path
) -> None:
    with ThreadPoolExecutor(1) as threads, server(tmp_path) as (process, url):
        answer = threads.submit(
            httpx.post, f"{url}/run_code", json=ASLEEP, timeout=120, trust_env=False
        )
        while not httpx.get(f"{url}/health", trust_env=False).json()["running"]:
            time.sleep(0.02)
        while not (running := {*descendants(process.pid)}):
            pass
        process.send_signal(number)
        out, err = process.communicate(timeout=60)
        assert answer.result().status_code == 503
    assert (process.returncode, out, err) == (code, "", f"winnow: stopped by {number.name}\n")
    assert gone(running)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health", trust_env=False)


def test_a_server_with_a_token_may_be_reached_from_outside(tmp_path: Path) -> None:
    words = ("--host", "0.0.0.0", "--token-env", "OUR_TOKEN", "--max-time-s", "9")
    with server(tmp_path, *words, token=TOKEN) as (process, url):
        here = url.replace("0.0.0.0", "127.0.0.1") + "/run_code"
        body = {"code": "print(6 * 7)", "language": "python", "run_timeout": 9}
        refused = httpx.post(here, json=body, trust_env=False)
        assert (refused.status_code, refused.json()) == (
            401,
            {"detail": "the token is missing or wrong"},
        )
        headers = {"Authorization": f"Bearer {TOKEN}"}
        done = httpx.post(here, json=body, headers=headers, trust_env=False)
        assert done.json()["run_result"]["stdout"] == "42\n"
        late = httpx.post(here, json={**body, "run_timeout": 10}, headers=headers, trust_env=False)
        assert (
            "must lie in (0, 9] seconds here (--max-time-s of the server), got 10"
            in late.json()["detail"]
        )
        process.terminate()
        out, err = process.communicate(timeout=60)
        assert TOKEN not in out + err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ["--host", "0.0.0.0"],
            "--host is 0.0.0.0, which other machines can reach, but there is no token",
        ),
        (["--token-env", "NOT_THERE_X"], "not set in the environment; export NOT_THERE_X"),
        (
            ["--host", "no.such.host.invalid", "--token-env", "PATH"],
            "--port is 0, but cannot listen on no.such.host.invalid:0 (",
        ),
        (["--port", "65536"], "'--port'"),
        (["--python", "/nowhere/python3"], "/nowhere/python3"),
        (["--backend", "docker"], "'--backend'"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(
    words: list[str], said: str, tmp_path: Path
) -> None:
    done = in_this_process("sandbox", "serve", "--port", "0", *words, folder=tmp_path)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert done.err.startswith("winnow: ")
    assert said in done.err
    assert [t.name for t in threading.enumerate() if t.name == "service"] == []
