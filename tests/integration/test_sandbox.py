"""The local sandbox: chosen, refused, shared. What attacks it is in tests/fault."""

from __future__ import annotations

import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
from tests.sandboxes import (
    BACKENDS,
    ORDINARY_UID,
    USERS,
    Host,
    block_all,
    block_namespaces,
    block_nothing,
    host,
    need_bubblewrap,
)
from tests.scoring import rewards_of

from winnow.config.reward import RewardConfig, SandboxConfig
from winnow.errors import RewardError
from winnow.sandbox import seccomp
from winnow.sandbox.local import LocalSandbox, trial_program
from winnow.sandbox.program import Program, SandboxError

ROOT = os.geteuid() == 0


@pytest.mark.parametrize("user", USERS)
def test_bubblewrap_is_chosen_where_it_works_and_landlock_without_namespaces(user: str) -> None:
    need_bubblewrap()
    for block, backend in ((block_nothing, "bubblewrap"), (block_namespaces, "landlock")):
        with host(user, SandboxConfig(max_concurrent=1), block) as box:
            assert box.description.startswith(f"{backend}, 1 at once")
            assert box.run("print(6 * 7)").stdout == b"42\n"


@pytest.mark.parametrize("user", USERS)
def test_where_neither_holds_no_program_is_run(user: str) -> None:
    need_bubblewrap()
    config = SandboxConfig(max_concurrent=1)
    with pytest.raises(RewardError) as caught, host(user, config, block_all):
        pass
    said = str(caught.value)
    assert re.fullmatch(
        r"no sandbox works on this machine: bubblewrap: bwrap could not set the sandbox up .*; "
        r"landlock: Landlock is off; version 3 \(Linux 6\.2\) is needed; "
        r"install bubblewrap \(apt-get install bubblewrap\).*",
        said,
    ), said
    assert "\n" not in said


def test_root_that_cannot_become_another_user_runs_no_program() -> None:
    if not ROOT:  # an ordinary user's programs run as that user
        return

    only_root = partial(block_namespaces, 0, 1)
    with pytest.raises(RewardError, match="no sandbox works on this machine"):
        Host("root", SandboxConfig(max_concurrent=1), only_root)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_python_of_ones_own_serves_if_the_programs_user_may_read_it(backend: str) -> None:
    if backend == "bubblewrap":
        need_bubblewrap()
    home = Path(tempfile.mkdtemp())
    try:
        command = ["/usr/bin/python3", "-m", "venv", "--without-pip", str(home / "own")]
        subprocess.run(command, check=True)
        library = next((home / "own").glob("lib/python3*/site-packages"))
        (library / "of_its_own.py").write_text("ANSWER = 42")
        config = SandboxConfig(
            backend=backend, python=str(home / "own/bin/python"), max_concurrent=1
        )
        home.chmod(0o755)
        with closing(LocalSandbox(config)) as sandbox:
            result = sandbox.run(Program("import of_its_own; print(of_its_own.ANSWER)"))
            assert (result.stdout, result.exit_code) == (b"42\n", 0), result
        home.chmod(0o700)
        if ROOT:  # a folder of root's own, as a home is
            with pytest.raises(RewardError) as caught:
                LocalSandbox(config)
            assert backend in str(caught.value)
            assert "\n" not in str(caught.value)
    finally:
        shutil.rmtree(home)


@pytest.mark.parametrize(
    ("python", "said"),
    [
        ("/nowhere/python3", "no such program; give the absolute path of a Python"),
        ("python3", "no such program; give the absolute path of a Python"),
        ("/usr/bin", "no such program; give the absolute path of a Python"),
        ("/usr/bin/true", r"not a Python \(JSONDecodeError\)"),
        ("/usr/bin/false", r"not a Python \(CalledProcessError\)"),
    ],
)
def test_an_interpreter_that_is_none_is_refused(python: str, said: str) -> None:
    expected = f"no program can be run: reward.sandbox.python is {python}: {said}"
    with pytest.raises(RewardError, match=expected):
        LocalSandbox(SandboxConfig(python=python))


def test_elsewhere_than_on_linux_code_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(RewardError, match="needs Linux, and this is darwin; run on Linux"):
        LocalSandbox(SandboxConfig())


@pytest.fixture(scope="module", params=BACKENDS)
def sandbox(request: pytest.FixtureRequest) -> Iterator[LocalSandbox]:
    if request.param == "bubblewrap":
        need_bubblewrap()
    config = SandboxConfig(backend=request.param, max_concurrent=1, time_s=60)
    with closing(LocalSandbox(config)) as made:
        yield made


def test_a_program_gets_input_and_files_and_gives_output_and_code(sandbox: LocalSandbox) -> None:
    code = (
        "import sys\nprint(sys.stdin.read(), open('a/b/data.txt').read())\n"
        "print('bad', file=sys.stderr)\nsys.exit(7)"
    )
    stdin = b"x" * 300_000
    result = sandbox.run(Program(code, stdin, {"a/b/data.txt": b"y" * 300_000, "ä b": b""}))
    assert result.stdout == b"x" * 300_000 + b" " + b"y" * 300_000 + b"\n"
    assert (result.stderr, result.exit_code, result.ending) == (b"bad\n", 7, "finished")
    killed = sandbox.run(Program("import ctypes; ctypes.string_at(0)"))
    assert killed.exit_code == -11  # by the signal


@pytest.mark.parametrize(
    "files",
    ["../x", "/x", "", ".", "a/", "a/../b", "a//b", "./a", "main.py", "main.py/a", "a\nb", "a\0",
     "\ud800", "x" * 201, ("a", "a/b")],
)  # fmt: skip
def test_files_have_plain_names(files: str | tuple[str, ...]) -> None:
    names = (files,) if isinstance(files, str) else files
    with pytest.raises(ValueError, match="not a plain file name"):
        Program("", files=dict.fromkeys(names, b""))


def test_programs_wait_for_a_slot(sandbox: LocalSandbox) -> None:
    code = "import time; print(time.time()); time.sleep(0.05); print(time.time())"
    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(lambda _: sandbox.run(Program(code)), range(4)))
    spans = sorted(tuple(map(float, result.stdout.split())) for result in results)
    assert all(earlier[1] <= later[0] for earlier, later in pairwise(spans))


def test_no_two_slots_have_the_same_user() -> None:
    config = SandboxConfig(backend="landlock", max_concurrent=2)
    with closing(LocalSandbox(config)) as one, closing(LocalSandbox(config)) as other:
        uids = [*one.uids, *other.uids]
        if not ROOT:  # programs run as this user
            assert set(uids) == {None}
            return
        assert None not in uids
        assert len(set(uids)) == 4
        own = one.run(Program("import os; print(os.getuid())")).stdout
        assert int(own) in one.uids


@pytest.mark.parametrize("machine", seccomp.MACHINES)
def test_the_filter_only_jumps_within_itself_and_always_returns(machine: str) -> None:
    program = seccomp.filter_instructions(machine)
    assert len(program) < 4096
    for at, (code, yes, no, _) in enumerate(program):
        if code in (0x15, 0x35, 0x45):
            assert at + 1 + max(yes, no) < len(program)
    assert program[-1][0] == 0x06
    assert len(seccomp.filter_bytes(machine)) == 8 * len(program)


@pytest.mark.skipif(not ROOT, reason="an ordinary user has one user for all programs")
def test_a_user_whose_processes_are_still_there_is_not_taken() -> None:
    config = SandboxConfig(backend="landlock", max_concurrent=1)
    with closing(LocalSandbox(config)) as box:
        (before,) = box.uids
    assert before is not None
    with subprocess.Popen(["/bin/sleep", "600"], user=before) as left:
        try:
            with closing(LocalSandbox(config)) as box:
                assert before not in box.uids
        finally:
            left.kill()


def test_the_trial_names_all_that_a_program_without_a_sandbox_can_do() -> None:
    limits = SandboxConfig(processes=4)
    uid = ORDINARY_UID if ROOT else os.geteuid()
    program = trial_program(limits, uid)
    run = subprocess.Popen(
        ["/usr/bin/python3", "-c", program.code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={"SECRET": "1"},
        start_new_session=True,
        **({"user": uid, "group": uid, "extra_groups": []} if ROOT else {}),
    )
    assert run.stdin is not None
    assert run.stdout is not None
    try:
        run.stdin.write(program.stdin)
        run.stdin.close()
        escapes = json.loads(run.stdout.readline())
    finally:
        os.killpg(run.pid, signal.SIGKILL)  # the processes that it started
        run.wait()
        run.stdout.close()
    made = [f"{kind} can be made in {place}" for place in ("/var/tmp", "/dev/shm")
            for kind in ("folders", "files")]  # fmt: skip
    unset = [f"RLIMIT_{name} is not set" for name in ("AS", "CPU", "NOFILE", "FSIZE", "CORE")
             if resource.getrlimit(getattr(resource, f"RLIMIT_{name}"))[1] == -1]  # fmt: skip
    assert set(escapes) >= {
        "files outside can be read", "other processes can be seen", *made,
        "the network can be used", "memory has no limit", "the environment holds SECRET", *unset,
        "processes have no limit",
    }  # fmt: skip


def test_an_unknown_machine_has_no_filter() -> None:
    with pytest.raises(SandboxError, match="no system call filter for sparc"):
        seccomp.filter_bytes("sparc")


@pytest.mark.parametrize(
    ("machine", "header"),
    [("x86_64", "x86_64-linux-gnu/asm/unistd_64.h"), ("aarch64", "asm-generic/unistd.h")],
)
def test_the_numbers_are_those_of_the_kernels_headers_where_these_are_installed(
    machine: str, header: str
) -> None:
    own = seccomp.syscall_numbers(machine)
    assert len(set(own.values())) == len(own) > 90
    file = Path("/usr/include", header)
    text = file.read_text() if file.exists() else ""
    found = dict(re.findall(r"#define __NR(?:3264)?_(\w+)\s+(\d+)\s*$", text, re.MULTILINE))
    for name, other in {"newfstatat": "fstatat"}.items():
        found.setdefault(name, found.get(other, ""))
    assert {n: v for n, v in own.items() if found and int(found[n]) != v} == {}


def test_a_sandbox_that_cannot_be_had_is_told_before_training() -> None:
    config = RewardConfig(sandbox=SandboxConfig(python="/nowhere/python3"))
    with closing(rewards_of(config, 8)) as service:
        service.check_sources(["gsm8k"])
        with pytest.raises(RewardError, match="no program can be run: reward"):
            service.check_sources(["gsm8k", "mbpp"])
