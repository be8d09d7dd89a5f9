"""`winnow reward serve` as a process: the address that it prints, and how a signal ends it."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from pathlib import Path

import httpx
import pytest
from tests.winnow_command import WINNOW

QUESTION = {"data_source": "s", "solution_str": "xyz"}
HALF = (
    b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b'Content-Length: 900\r\n\r\n{"data'
)


@pytest.mark.parametrize(
    ("number", "code", "host"), [(signal.SIGTERM, 0, "127.0.0.1"), (signal.SIGINT, 130, "::1")]
)
def test_a_signal_ends_the_service_though_a_client_dawdles(
    number: signal.Signals, code: int, host: str, tmp_path: Path
) -> None:
    try:
        socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        pytest.skip(f"this machine has no {host}")
    (tmp_path / "own.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return float(len(solution_str))\n"
    )
    words = ["--function", "own.py", "--workers", "1", "--port", "0", "--host", host]
    process = subprocess.Popen(
        [str(WINNOW), "reward", "serve", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.fullmatch(r"compute_score of own\.py scores at (http://.*:(\d+)/)\n", line)
        assert found, line
        answer = httpx.post(found[1], json=QUESTION, trust_env=False, timeout=60).json()
        assert answer["score"] == 3.0
        with socket.create_connection((host, int(found[2]))) as dawdler:
            dawdler.sendall(HALF)
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
    assert (process.returncode, out) == (code, "")
    assert err.endswith(f"winnow: stopped by {number.name}\n")
    assert "Traceback" not in err
