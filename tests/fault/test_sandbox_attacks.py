"""Programs that attack the sandbox, each for real and with each backend.

Where it matters who started them, this is done as root and as an ordinary user.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from tests.processes import descendants, is_alive
from tests.sandboxes import BACKENDS, USERS, Host, host, keep_in, need_bubblewrap

from winnow.config.reward import SandboxConfig
from winnow.sandbox import harness

COMBINATIONS = [(backend, user) for backend in BACKENDS for user in USERS]
each_user = pytest.mark.parametrize("box", COMBINATIONS, indirect=True, ids="-".join)
MIB = 1 << 20


@pytest.fixture(scope="module")
def scratch() -> Iterator[Path]:
    """Where the sandbox keeps its files; open to every user, as are the folders above it."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o1777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture
def outside() -> Iterator[Path]:
    """A folder that every user may read and write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


@pytest.fixture(
    scope="module", params=[(BACKENDS[0], USERS[0]), (BACKENDS[1], USERS[-1])], ids="-".join
)
def box(request: pytest.FixtureRequest, scratch: Path) -> Iterator[Host]:
    backend, user = request.param
    if backend == "bubblewrap":
        need_bubblewrap()

    config = SandboxConfig(backend=backend, max_concurrent=1, time_s=60)
    with host(user, config, partial(keep_in, scratch)) as made:
        yield made


@pytest.fixture(autouse=True)
def nothing_is_left_and_all_works(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a program did, no process and no file is left, and the next one runs."""
    yield
    if "box" not in request.fixturenames:
        return
    box = request.getfixturevalue("box")
    assert in_time(lambda: not any(map(is_alive, descendants(box.pid))))
    assert list(request.getfixturevalue("scratch").iterdir()) == []
    after = box.run("print(6 * 7)")
    assert (after.stdout, after.exit_code) == (b"42\n", 0)


def in_time(condition: Callable[[], bool]) -> bool:
    """Whether something comes true within a minute."""
    give_up = time.monotonic() + 60
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.05)
    return True


PRELUDE = """
import json, os, sys
said = []
def attempt(name, call):
    try:
        call()
        said.append(name)
    except (OSError, ValueError):
        pass
"""
"""Notes under its name what a program may do."""


def told(box: Host, code: str, **limits: float) -> list[object]:
    """What a program prints as JSON."""
    result = box.run(f"{PRELUDE}{code}", **limits)
    assert result.is_clean, result
    value = json.loads(result.stdout)
    assert isinstance(value, list)
    return value


def memory_scores(box: Host) -> set[str]:
    """How soon the kernel would end what runs, where memory runs out: -1000 never to 1000 first."""
    found = set()
    for process, line in descendants(box.pid).items():
        if "/main.py" in line:
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                found.add(Path(f"/proc/{process}/oom_score_adj").read_text().strip())
    return found


def processes_with(mark: str) -> list[int]:
    """Processes of this machine that have a word in their command line."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if mark.encode() in line:
                found.append(int(entry.name))
    return found


def gone(mark: str) -> bool:
    """Whether no such process is left, a moment after the end."""
    return in_time(lambda: not processes_with(mark))


@each_user
def test_a_fork_bomb_meets_the_limit_of_processes(box: Host) -> None:
    (started, text) = told(
        box,
        "started = 0\n"
        "text = 'no limit'\n"
        "for _ in range(400):\n"
        "    try:\n"
        "        if os.fork() == 0:\n"
        "            import time; time.sleep(1000)\n"
        "    except BlockingIOError as error:\n"
        "        text = error.strerror\n"
        "        break\n"
        "    started += 1\n"
        "print(json.dumps([started, text]))",
    )
    assert text == "Resource temporarily unavailable"
    # Under Landlock an ordinary user's other processes count, and some may end meanwhile.
    assert isinstance(started, int)
    assert started <= 8 + 64


def test_an_endless_fork_bomb_is_ended_with_all_it_started(box: Host) -> None:
    mark = uuid.uuid4().hex
    code = f"""
import os, sys
if len(sys.argv) == 1:
    os.execv(sys.executable, [sys.executable, __file__, "{mark}"])
while True:
    try:
        os.fork()
    except OSError:
        pass
"""
    assert box.run(code, time_s=1.0).ending == "time_limit"
    assert gone(mark)


def test_a_memory_bomb_meets_the_limit_of_memory(box: Host) -> None:
    code = "eaten = []\nwhile True:\n    eaten.append(bytearray(16 << 20))"
    result = box.run(code, memory_mb=256)
    assert result.exit_code == 1
    assert b"MemoryError" in result.stderr
    caught = code.replace("while", "try:\n  while").replace("\n    ", "\n      ")
    caught += "\nexcept MemoryError:\n  print(json.dumps([len(eaten)]))"
    (blocks,) = told(box, caught, memory_mb=256)
    assert isinstance(blocks, int)
    assert 4 <= blocks < 16


def test_memory_that_no_limit_of_a_process_counts_cannot_be_had(box: Host) -> None:
    code = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def tried(result): return errno.errorcode[ctypes.get_errno()] if result < 0 else "had"
memfd = tried(libc.memfd_create(b"x", 0))
shared = tried(libc.shmget(0, 1 << 30, 0o1600))
queue = tried(libc.msgget(0, 0o1600))
print(json.dumps([memfd, shared, queue]))
"""
    assert told(box, code) == ["EPERM", "EPERM", "EPERM"]


@pytest.mark.parametrize("loop", ["while True: pass", "import time; time.sleep(1000)",
                                  "import os; os.close(1); os.close(2)\nwhile True: pass",
                                  "import signal\nfor n in range(1, 32):\n"
                                  "    try: signal.signal(n, signal.SIG_IGN)\n"
                                  "    except OSError: pass\nwhile True: pass"])  # fmt: skip
def test_an_endless_loop_is_ended_at_its_time(box: Host, loop: str) -> None:
    result = box.run(loop, time_s=1)
    assert (result.ending, result.is_clean) == ("time_limit", False)


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output_is_cut_off_and_its_program_ended(box: Host, stream: str) -> None:
    result = box.run(f"import sys\nwhile True: sys.{stream}.write('x' * 5000)")
    assert result.ending == "output_limit"
    assert len(result.stdout) + len(result.stderr) == 1 << 20


@each_user
def test_nothing_outside_can_be_written(box: Host, outside: Path) -> None:
    target = outside / "target"
    target.write_text("mine")
    target.chmod(0o666)
    owner = Path(f"/proc/{box.pid}").stat().st_uid  # an ordinary user's programs are that user
    os.chown(target, owner, -1)
    mark = uuid.uuid4().hex
    folders = ["/usr", "/etc", "/", "/dev", "/var/tmp", "/tmp/..", "/home", "/dev/shm"]
    folders.append(str(outside))
    code = f"""
for path in {[f"{folder}/{mark}" for folder in folders]!r} + [{str(target)!r}]:
    attempt(path, lambda: open(path, "w").close())
for change in [lambda p: os.truncate(p, 0), os.remove, lambda p: os.rename(p, p + "2"),
               lambda p: os.chmod(p, 0), lambda p: os.symlink("/", p + "3"),
               lambda p: os.mkdir(p + "4"), lambda p: os.utime(p, (0, 0))]:
    attempt("changed", lambda: change({str(target)!r}))
print(json.dumps(said))
"""
    try:
        assert told(box, code) == []
        assert target.read_text() == "mine"
        assert target.stat().st_mode & 0o777 == 0o666
        assert os.listdir(outside) == ["target"]
    finally:
        for folder in folders:
            Path(folder, mark).unlink(missing_ok=True)


def test_the_folder_in_memory_is_small_and_new_for_each_program(
    box: Host, request: pytest.FixtureRequest
) -> None:
    code = """
written = 0
try:
    for number in range(1000):
        with open(f"file{number}", "wb") as file:
            written += file.write(bytes(1 << 20))
except OSError:
    pass
print(json.dumps([written]))
"""
    (written,) = told(box, code)
    assert written == 0 if "landlock" in request.node.name else 8 * MIB <= written <= 16 * MIB
    assert told(box, "print(json.dumps(os.listdir('.')))") == ["main.py"]


def test_a_program_that_makes_files_without_end_is_ended(
    box: Host, request: pytest.FixtureRequest
) -> None:
    """Empty files take no room of the folder, but memory of the kernel."""
    code = """
made = 0
try:
    while made < 3_000_000:
        os.close(os.open(f"file{made}", os.O_CREAT))
        made += 1
except OSError:
    pass
print(json.dumps([made]))
"""
    result = box.run(f"import json, os\n{code}")
    if "landlock" in request.node.name:
        assert json.loads(result.stdout) == [0]
    else:
        assert (result.ending, result.stdout) == ("output_limit", b"")


def test_a_program_is_the_first_to_go_where_memory_runs_out(box: Host) -> None:
    with ThreadPoolExecutor(1) as thread:
        ending = thread.submit(box.run, "import time; time.sleep(3)")
        # The command that raises the score has the program's line before it has done so.
        assert in_time(lambda: memory_scores(box) == {"1000"})
        assert ending.result().is_clean


@each_user
def test_the_users_home_and_environment_cannot_be_read(box: Host, outside: Path) -> None:
    secret = outside / "secret"
    secret.write_text("my key")
    secret.chmod(0o644)
    code = f"""
for path in [{str(secret)!r}, "/etc/passwd", "/etc/hostname", "/proc/self/environ",
             "/proc/1/environ", "/proc/{box.pid}/environ", {__file__!r},
             os.path.expanduser("~root/.bashrc")]:
    attempt(path, lambda: open(path).read())
names = set()
for folder in [{str(outside)!r}, "/root", "/home", "/proc", "/etc"]:
    attempt("list", lambda: names.update(os.listdir(folder)))
names -= {{"ld.so.cache", "alternatives"}}
print(json.dumps([name for name in said if name != "list"] + sorted(names)))
"""
    assert told(box, code) == []
    names = told(box, "print(json.dumps(sorted(os.environ)))")
    assert set(names) <= {
        "PATH", "HOME", "LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "PYTHONHASHSEED",
        "PYTHONDONTWRITEBYTECODE", "PWD", "LC_CTYPE",
    }  # fmt: skip


def test_there_is_no_network(box: Host) -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server, \
            socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as mailbox:  # fmt: skip
        server.settimeout(0.2)
        mailbox.bind(f"\0{uuid.uuid4().hex}")
        mailbox.settimeout(0.2)
        code = f"""
import socket
said = []
for family, kind, address in [
    (socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", {server.getsockname()[1]})),
    (socket.AF_INET, socket.SOCK_DGRAM, ("8.8.8.8", 53)),
    (socket.AF_UNIX, socket.SOCK_DGRAM, {mailbox.getsockname()!r}),
]:
    try:
        with socket.socket(family, kind) as s:
            s.connect(address)
            said.append("connected")
    except OSError as error:
        said.append(type(error).__name__)
try:
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
    pair[0].sendto(b"hello", {mailbox.getsockname()!r})
    said.append("sent")
except OSError as error:
    said.append(type(error).__name__)
print(json.dumps(said))
"""
        assert told(box, code) == ["PermissionError"] * 4
        with pytest.raises(TimeoutError):
            server.accept()
        with pytest.raises(TimeoutError):
            mailbox.recv(10)


@each_user
def test_no_other_process_can_be_signalled_or_held(box: Host) -> None:
    code = f"""
import ctypes, resource, signal
libc = ctypes.CDLL(None, use_errno=True)
for whom in (os.getppid(), 1, {box.pid}, {os.getpid()}, -1, 0):
    attempt(whom, lambda: os.kill(whom, signal.SIGTERM))
for name, call in [
    ("pidfd", lambda: os.pidfd_open({box.pid})),
    ("limits", lambda: resource.prlimit({box.pid}, resource.RLIMIT_NOFILE, (1, 1))),
    ("priority", lambda: os.setpriority(os.PRIO_PROCESS, {box.pid}, 19)),
    ("affinity", lambda: os.sched_setaffinity({box.pid}, [0])),
]:
    attempt(name, call)
import fcntl
reader, writer = os.pipe()
# Then input raises a signal there.
attempt("owner", lambda: fcntl.fcntl(reader, fcntl.F_SETOWN, {box.pid}))
for name, arguments in [("ptrace", (16, {box.pid}, 0, 0)), ("unshare", (0x10000000,)),
                        ("mount", (b"none", b"/tmp", b"tmpfs", 0, 0)), ("setns", (0, 0))]:
    if getattr(libc, name)(*arguments) != -1:
        said.append(name)
print(json.dumps(said))
"""
    assert told(box, code) == []
    os.kill(box.pid, 0)


def escaping(mark: str) -> str:
    """A program's line that starts a process which leaves session and group, where it may."""
    child = f"""
import os, time
for leave in (os.setsid, lambda: os.setpgid(0, 0)):
    try:
        leave()
    except OSError:
        pass
os.fork()
time.sleep(1000)  # {mark}
"""
    return (
        "import subprocess, sys; quiet = subprocess.DEVNULL; subprocess.Popen("
        f"[sys.executable, '-c', {child!r}], stdin=quiet, stdout=quiet, stderr=quiet)\n"
    )


@each_user
def test_what_a_parent_prints_cannot_be_opened_anew(box: Host) -> None:
    opened = told(
        box,
        "parent = os.getpid()\n"
        "ours, theirs = os.pipe()\n"
        "if os.fork() == 0:\n"
        "    for number in (1, 2):\n"
        "        for mode in (os.O_RDONLY, os.O_WRONLY):\n"
        "            path = f'/proc/{parent}/fd/{number}'\n"
        "            attempt([number, mode], lambda: os.open(path, mode))\n"
        "    os.write(theirs, json.dumps(said).encode())\n"
        "    os._exit(0)\n"
        "print(os.read(ours, 999).decode())",
    )
    assert opened == []


def test_a_solution_cannot_open_its_tests(box: Host) -> None:
    code = (
        "import os\n"
        "def f(x):\n"
        "    try:\n"
        "        return os.read(os.open('/proc/%d/fd/0' % os.getppid(), 0), 9999).decode()\n"
        "    except OSError:\n"
        "        return ''\n"
    )
    solution = json.dumps({"prompt": "", "code": code, "entry_point": "f"}).encode()
    tests = {"kind": "calls", "cases": [[[1], ""]], "entry_point": "f", "prompt": ""}
    tests |= {"call_s": 60, "stop_early": True}
    files, stdin = {harness.SOLUTION: solution}, json.dumps(tests).encode()
    result = box.run(Path(harness.__file__).read_text(), stdin, files)
    assert harness.decode(json.loads(result.stdout))["outcome"] == "pass", result


@pytest.mark.parametrize(
    ("then", "time_s", "ending"),
    [("import time; time.sleep(0.5)", 60.0, "finished"), ("while True: pass", 1.0, "time_limit")],
)
def test_no_process_is_left_behind(box: Host, then: str, time_s: float, ending: str) -> None:
    mark = uuid.uuid4().hex
    assert box.run(f"{escaping(mark) * 2}{then}", time_s=time_s).ending == ending
    assert gone(mark)


def test_deep_recursion_ends_its_own_program_only(box: Host) -> None:
    result = box.run("def f(): return f()\nf()")
    assert result.exit_code == 1
    assert b"RecursionError" in result.stderr
    code = "import sys; sys.setrecursionlimit(10**9)\ndef f(x): return f([x])\nf(1)"
    assert box.run(code, memory_mb=64).exit_code in (1, -signal.SIGSEGV)
    deep = (
        "import sys\nsys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**5): x = [x]\nrepr(x)"
    )
    assert box.run(deep).exit_code in (1, -signal.SIGSEGV)


@each_user
def test_the_limits_hold_and_cannot_be_raised(box: Host) -> None:
    names = {
        "RLIMIT_AS": 512 * MIB, "RLIMIT_CPU": 62, "RLIMIT_NOFILE": 64, "RLIMIT_FSIZE": 16 * MIB,
        "RLIMIT_CORE": 0, "RLIMIT_MEMLOCK": 0,
    }  # fmt: skip
    code = (
        "import resource\nprint(json.dumps([resource.getrlimit(getattr(resource, n))[1] for n in "
    )
    assert told(box, f"{code}{list(names)!r}]))") == list(names.values())
    code = """
import resource
for name in ("RLIMIT_AS", "RLIMIT_CPU", "RLIMIT_NPROC", "RLIMIT_NOFILE", "RLIMIT_FSIZE"):
    kind = getattr(resource, name)
    soft, hard = resource.getrlimit(kind)
    attempt(name, lambda: resource.setrlimit(kind, (hard + 1, hard + 1)))
files = []
try:
    while len(files) < 1000:
        files.append(os.dup(0))
except OSError:
    pass
said += [len(files) < 64, os.getuid() != 0, os.geteuid() == os.getuid(), os.getgroups()]
print(json.dumps(said))
"""
    assert told(box, code) == [True, True, True, []]


@pytest.mark.parametrize(("backend", "user"), COMBINATIONS)
def test_a_killed_host_takes_its_programs_along(backend: str, user: str, outside: Path) -> None:
    if backend == "bubblewrap":
        need_bubblewrap()
    mark = uuid.uuid4().hex
    code = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)", "{mark}"])
time.sleep(1000)
"""
    config = SandboxConfig(backend=backend, max_concurrent=1)
    with host(user, config, partial(keep_in, outside)) as doomed:
        doomed.ask(code, time_s=1000)
        assert in_time(lambda: bool(processes_with(mark))), doomed.answer()
        os.kill(doomed.pid, signal.SIGKILL)
    assert gone(mark)
    assert in_time(lambda: not list(outside.iterdir()))
