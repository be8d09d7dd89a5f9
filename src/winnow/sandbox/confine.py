"""The guardian of one program under Landlock; `DESCRIPTOR` of its plan is its argument.

Reads a plan (marshal), starts the program confined, waits, and ends whatever of it is left. The
program cannot leave its process group, because the filter knows no setsid and no setpgid; so one
signal reaches all. This text is compiled once and handed over, so that it starts at once, and as
any user. What it imports is most of its cost: no json, no typing, and of ctypes and signal only
the cores in C. With a Python that lacks one of these, the sandbox is refused at its trial.
"""

from __future__ import annotations

import _ctypes
import _signal as signal  # type: ignore[import-not-found]
import marshal
import os
import resource
import struct
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_SET_PDEATHSIG, _SET_SECCOMP, _SET_CHILD_SUBREAPER, _SET_NO_NEW_PRIVS = 1, 22, 36, 38
_SECCOMP_FILTER = 2
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_RIGHTS_BY_ABI = {3: 15, 4: 15, 5: 16}
"""Number of rights on files by version; newer ones know as many as the newest here."""


class _Int(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "i"


class _Short(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "H"


class _Bytes(_ctypes._SimpleCData):  # type: ignore[type-arg]
    _type_ = "z"


class _Filter(_ctypes.Structure):
    _fields_ = (("length", _Short), ("instructions", _Bytes))


class _Function(_ctypes.CFuncPtr):
    _flags_ = _ctypes.FUNCFLAG_CDECL | _ctypes.FUNCFLAG_USE_ERRNO
    _restype_ = _Int


class _Libc:
    _handle = _ctypes.dlopen(None, 0)  # type: ignore[arg-type]


_prctl: Any = _Function(("prctl", _Libc))  # type: ignore[arg-type]
_syscall: Any = _Function(("syscall", _Libc))  # type: ignore[arg-type]


def main() -> None:
    """Run the plan; the exit code is the program's, or 128 + the number of a signal."""
    with open(int(sys.argv[1]), "rb") as file:
        plan = marshal.load(file)
    status = plan["status"]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGCHLD})
    _check_call(_prctl(_SET_PDEATHSIG, signal.SIGTERM))
    if os.getppid() != plan["parent"]:
        sys.exit(1)
    # Orphans come to this process: one that nobody waits for still counts against the limit.
    _check_call(_prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
    child = os.fork()
    if child == 0:
        try:
            _confine(plan)
            os.write(status, b"confined")
            os.execve(plan["command"][0], plan["command"], dict(os.environ))
        except BaseException as error:
            os.write(status, f"{type(error).__name__}: {error}".encode())
        os._exit(127)
    for descriptor in (0, 1, 2, status):
        os.close(descriptor)
    code = _wait_and_kill(child)
    _remove_folder(plan["folder"])
    os._exit(code)


def _wait_and_kill(child: int) -> int:
    """Wait for the program, or for the order to end it; then end its group."""
    while True:
        came = signal.sigwait({signal.SIGTERM, signal.SIGCHLD})
        ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is not None or came == signal.SIGTERM:
            break
    # Not reaped yet, so its number is still its own.
    for kill, whom in ((os.killpg, child), (os.kill, child)):
        try:
            kill(whom, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # it has ended, or had no group yet
    code = 0
    while True:
        try:
            reaped, status = os.waitpid(-1, 0)
        except ChildProcessError:
            return 128 - code if code < 0 else code
        if reaped == child:
            code = os.waitstatus_to_exitcode(status)


def _remove_folder(folder: str) -> None:
    """Remove the program's files, because the parent may have been killed."""
    try:
        for place, folders, names in os.walk(folder, topdown=False):
            for name in names:
                os.remove(os.path.join(place, name))
            for name in folders:
                os.rmdir(os.path.join(place, name))
        os.rmdir(folder)
    except OSError:
        return  # he lives, and has been quicker


def _confine(plan: dict[str, Any]) -> None:
    """Drop every permission that the program must not have, irreversibly."""
    os.setpgid(0, 0)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM, signal.SIGCHLD})
    os.chdir(plan["folder"])
    # Where memory runs out, the kernel is to end a program and not the trainer.
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
    limits = plan["limits"]
    uid = plan["uid"]
    if uid is None:  # others of this user count as well
        limits["nproc"] += _count_tasks(os.getuid())
    else:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _check_call(_prctl(_SET_PDEATHSIG, signal.SIGKILL))  # changing the user undid it
    for name, most in limits.items():
        is_named = name != "msgqueue"
        number = getattr(resource, f"RLIMIT_{name.upper()}") if is_named else _MSGQUEUE
        resource.setrlimit(number, (most, most))
    _check_call(_prctl(_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _restrict_files(plan)
    os.closerange(3, plan["status"])
    os.closerange(plan["status"] + 1, 1024)
    os.set_inheritable(plan["status"], False)
    code = plan["seccomp"]
    program = _Filter(len(code) // 8, code)
    _check_call(_prctl(_SET_SECCOMP, _SECCOMP_FILTER, _ctypes.byref(program), 0, 0))


_MSGQUEUE = 12
"""RLIMIT_MSGQUEUE, which the module resource does not have in every version."""


def _restrict_files(plan: dict[str, Any]) -> None:
    """Landlock: read here, use the devices, nothing else."""
    abi = plan["abi"]
    supported = (1 << _RIGHTS_BY_ABI.get(abi, 16)) - 1
    # Files; from version 4 TCP; from version 6 signals and abstract sockets.
    handled = struct.pack("=QQQ", supported, 3 if abi >= 4 else 0, 3 if abi >= 6 else 0)
    size = 24 if abi >= 6 else 16 if abi >= 4 else 8
    rules = _check_call(_syscall(_CREATE_RULESET, handled, size, 0))
    for paths, rights in (
        (plan["readable"], _EXECUTE | _READ_FILE | _READ_DIR),
        (plan["devices"], _READ_FILE | _WRITE_FILE),
    ):
        for path in paths:
            descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
            allowed = rights if os.path.isdir(path) else rights & ~_READ_DIR
            rule = struct.pack("=Qi", allowed, descriptor)
            _check_call(_syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0))
            os.close(descriptor)
    _check_call(_syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


def _count_tasks(uid: int) -> int:
    """Processes and threads of a user, as the process limit counts them."""
    count = 0
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        try:
            if entry.stat().st_uid == uid:
                count += len(os.listdir(f"/proc/{entry.name}/task"))
        except OSError:
            continue  # it has just ended
    return count


def _check_call(result: int) -> int:
    if result < 0:
        number = _ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


if __name__ == "__main__":
    main()
