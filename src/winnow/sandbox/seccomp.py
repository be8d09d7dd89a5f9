"""The system calls that a program in the sandbox may make, as a seccomp filter.

A list of what is allowed: reading, memory, threads, files, pipes, time, starting processes.
All else fails with EPERM: sockets, signals to others, namespaces, mounts, tracing, memory that no
limit counts (memfd, System V), keys, io_uring, changes of modes and owners. `clone3` and unknown
calls fail with ENOSYS, so that libc takes an older way. The two tables are those of the kernel's
headers.
"""

from __future__ import annotations

import platform
import struct
from collections.abc import Iterable
from errno import ENOSYS, ENOTTY, EPERM

from winnow.sandbox.program import SandboxError

MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
"""AUDIT_ARCH of the kernel's headers by processor."""

# Name, number on x86_64, number on aarch64; "-" where there is none.
_TABLE = """
read 0 63 write 1 64 open 2 - openat 257 56 close 3 57 stat 4 - fstat 5 80 lstat 6 -
newfstatat 262 79 statx 332 291 poll 7 - ppoll 271 73 lseek 8 62 mmap 9 222 mprotect 10 226
munmap 11 215 mremap 25 216 brk 12 214 madvise 28 233 rt_sigaction 13 134 rt_sigprocmask 14 135
rt_sigreturn 15 139 sigaltstack 131 132 rt_sigpending 127 136 rt_sigsuspend 130 133
rt_sigtimedwait 128 137 pread64 17 67 pwrite64 18 68 readv 19 65 writev 20 66 preadv 295 69
pwritev 296 70 preadv2 327 286 pwritev2 328 287 access 21 - faccessat 269 48 faccessat2 439 439
pipe 22 - pipe2 293 59 select 23 - pselect6 270 72 sched_yield 24 124 mincore 27 232 msync 26 227
dup 32 23 dup2 33 - dup3 292 24 pause 34 - nanosleep 35 101 clock_nanosleep 230 115
clock_gettime 228 113 clock_getres 229 114 gettimeofday 96 169 time 201 - times 100 153
getitimer 36 102 setitimer 38 103 alarm 37 - getpid 39 172 gettid 186 178 getppid 110 173
getpgrp 111 - getpgid 121 155 getsid 124 156 getuid 102 174 geteuid 107 175 getgid 104 176
getegid 108 177 getresuid 118 148 getresgid 120 150 getgroups 115 158 fork 57 - vfork 58 -
execve 59 221 exit 60 93 exit_group 231 94 wait4 61 260 waitid 247 95 uname 63 160 fsync 74 82
fdatasync 75 83 ftruncate 77 46 getdents 78 - getdents64 217 61 getcwd 79 17
chdir 80 49 fchdir 81 50 rename 82 - renameat 264 38 renameat2 316 276 mkdir 83 - mkdirat 258 34
rmdir 84 - link 86 - linkat 265 37 unlink 87 - unlinkat 263 35 symlink 88 - symlinkat 266 36
readlink 89 - readlinkat 267 78 umask 95 166 getrlimit 97 163 setrlimit 160 164 getrusage 98 165
sysinfo 99 179 futex 202 98 set_tid_address 218 96 set_robust_list 273 99 get_robust_list 274 100
rseq 334 293 membarrier 324 283 arch_prctl 158 - sched_getaffinity 204 123 sched_getparam 143 121
sched_getscheduler 145 120 sched_get_priority_max 146 125 sched_get_priority_min 147 126
getcpu 309 168 getpriority 140 141 epoll_create 213 - epoll_create1 291 20 epoll_ctl 233 21
epoll_wait 232 - epoll_pwait 281 22 eventfd 284 - eventfd2 290 19
shutdown 48 210 sendto 44 206 recvfrom 45 207 getsockname 51 204 getpeername 52 205
getsockopt 55 209 getrandom 318 278 fadvise64 221 223 sendfile 40 71 copy_file_range 326 285
restart_syscall 219 128 close_range 436 436 statfs 137 43 fstatfs 138 44 flock 73 32
clone 56 220 clone3 435 435 prlimit64 302 261 fcntl 72 25 ioctl 16 29
socketpair 53 199
"""
_NEW_NAMESPACES = 0x7E020080  # CLONE_NEW{USER,PID,NET,IPC,UTS,CGROUP,NS,TIME}
_FCNTL_ALLOWED = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
"""Descriptors, flags, locks, the size of a pipe; not F_SETOWN, which aims signals at others."""
_IOCTL_ALLOWED = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""TCGETS, TIOCGWINSZ, FIONREAD, FIONBIO, FIONCLEX, FIOCLEX."""

_UNIX = 1
_STREAMS = (0x1, 0x801, 0x80001, 0x80801)
"""Plain, non-blocking, close-on-exec: a datagram socket could write to a socket of the host."""

_LOAD, _EQUAL, _AT_LEAST, _ANY_BIT, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_ALLOW, _ERRNO, _KILL = 0x7FFF0000, 0x00050000, 0x80000000
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16
"""Offsets in `struct seccomp_data`; an argument's low half, eight bytes apart."""

Instruction = tuple[int, int, int, int]
"""Code, jump if true, jump if false, constant: `struct sock_filter`."""


def syscall_numbers(machine: str) -> dict[str, int]:
    """Allowed system calls of a processor by name."""
    fields = _TABLE.split()
    column = 1 if machine == "x86_64" else 2
    rows = (fields[i : i + 3] for i in range(0, len(fields), 3))
    return {row[0]: int(row[column]) for row in rows if row[column] != "-"}


def filter_instructions(machine: str) -> list[Instruction]:
    """Return the filter as instructions; the arguments of some calls decide."""
    number = syscall_numbers(machine)
    program: list[Instruction] = [
        (_LOAD, 0, 0, _ARCH),
        (_EQUAL, 1, 0, MACHINES[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER),
    ]
    if machine == "x86_64":  # the x32 interface has the same arch and other numbers
        program += [(_AT_LEAST, 0, 1, 0x40000000), (_RETURN, 0, 0, _KILL)]
    rules = {
        "clone3": [(_RETURN, 0, 0, _ERRNO | ENOSYS)],
        "clone": [
            (_LOAD, 0, 0, _ARGUMENT),
            (_ANY_BIT, 0, 1, _NEW_NAMESPACES),
            (_RETURN, 0, 0, _ERRNO | EPERM),
            (_RETURN, 0, 0, _ALLOW),
        ],
        "prlimit64": _allow_values(0, (0,), EPERM),
        "fcntl": _allow_values(1, _FCNTL_ALLOWED, EPERM),
        "ioctl": _allow_values(1, _IOCTL_ALLOWED, ENOTTY),
        "socketpair": [
            (_LOAD, 0, 0, _ARGUMENT),
            (_EQUAL, 1, 0, _UNIX),
            (_RETURN, 0, 0, _ERRNO | EPERM),
            *_allow_values(1, _STREAMS, EPERM),
        ],
    }
    for name, value in number.items():
        then = rules.get(name, [(_RETURN, 0, 0, _ALLOW)])  # which returns in any case
        program += [(_EQUAL, 0, len(then), value), *then]
    newest = max(number.values())
    program += [(_AT_LEAST, 0, 1, newest + 1), (_RETURN, 0, 0, _ERRNO | ENOSYS)]
    return [*program, (_RETURN, 0, 0, _ERRNO | EPERM)]


def filter_bytes(machine: str | None = None) -> bytes:
    """Return the filter as the kernel takes it.

    Raises:
        SandboxError: the processor is not known here.
    """
    name = machine or platform.machine()
    if name not in MACHINES:
        raise SandboxError(f"no system call filter for {name} processors")
    return b"".join(struct.pack("=HBBI", *each) for each in filter_instructions(name))


def _allow_values(argument: int, allowed: Iterable[int], error: int) -> list[Instruction]:
    program: list[Instruction] = [(_LOAD, 0, 0, _ARGUMENT + 8 * argument)]
    for value in allowed:
        program += [(_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ALLOW)]
    return [*program, (_RETURN, 0, 0, _ERRNO | error)]
