"""The program that a sandbox must hold before any other is run in it.

It tries what is forbidden and prints what it managed, as a JSON list.
"""

from __future__ import annotations

import json

from winnow.sandbox.process import ENVIRONMENT
from winnow.sandbox.program import Limits, Program

_SLACK = 64
"""Where the limit is over all processes of a user, others of his may end in the meantime."""

_CODE = """
import json, os, resource, socket, sys, time
expected = json.loads(sys.stdin.read())
escaped = []


def forbidden(what, attempt, *errors):
    try:
        attempt()
    except errors:
        return
    escaped.append(what)


def make_folder(folder):
    path = f"{folder}/winnow-trial-{os.getpid()}"
    os.mkdir(path)
    os.rmdir(path)


def make_file(folder):
    path = f"{folder}/winnow-trial-{os.getpid()}"
    open(path, "w").close()
    os.remove(path)


if os.getuid() != expected["uid"] or os.getuid() == 0 or os.getgid() == 0:
    escaped.append(f"programs run as user {os.getuid()}, group {os.getgid()}")
forbidden("files outside can be read", lambda: open("/etc/passwd"), OSError)
forbidden("other processes can be seen", lambda: os.listdir("/proc"), OSError)
forbidden("/usr can be written", lambda: open("/usr/escaped", "w"), OSError)
for folder in ("/var/tmp", "/dev/shm"):
    forbidden("folders can be made in " + folder, lambda: make_folder(folder), OSError)
    forbidden("files can be made in " + folder, lambda: make_file(folder), OSError)
forbidden("the network can be used", lambda: socket.socket(), OSError)
forbidden("processes can be signalled", lambda: os.kill(os.getppid(), 0), OSError)
forbidden("memory has no limit", lambda: bytearray(expected["memory"]), MemoryError)
strange = set(os.environ) - set(expected["environment"])
if strange:
    escaped.append("the environment holds " + ", ".join(sorted(strange)))
for name, most in expected["limits"].items():
    hard = resource.getrlimit(getattr(resource, name))[1]
    if hard == resource.RLIM_INFINITY or hard > most:
        escaped.append(name + " is not set")
for started in range(expected["processes"] + 1):
    try:
        if os.fork() == 0:
            time.sleep(600)
            os._exit(0)
    except BlockingIOError:
        break
else:
    escaped.append("processes have no limit")
print(json.dumps(escaped))
"""


def trial(limits: Limits, uid: int) -> Program:
    """The program, and what it holds the sandbox against.

    Args:
        uid: whom it should find itself to be.
    """
    expected = {
        "uid": uid,
        "memory": limits.memory_bytes,
        "processes": limits.processes + _SLACK,
        "environment": [*ENVIRONMENT, "PWD", "LC_CTYPE"],
        "limits": {
            "RLIMIT_AS": limits.memory_bytes,
            "RLIMIT_CPU": limits.cpu_s,
            "RLIMIT_NOFILE": limits.open_files,
            "RLIMIT_FSIZE": limits.scratch_bytes,
            "RLIMIT_CORE": 0,
        },
    }
    return Program(_CODE, json.dumps(expected).encode())
