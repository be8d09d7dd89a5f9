"""Programs a second in the local sandbox, and what bounds it.

    python benchmarks/sandbox.py [--programs 100] [--repeats 3] [--at-once 2] [--out FILE]

A trivial program (`print(42)`) is run bare, under each part of the sandbox, and under the whole;
then whole answers are scored, by test lists of several sizes. The rows take turns, `--repeats`
times; each figure is the median. Seconds of processor are those of all processes, those that
outlive their parents included: this process adopts them. On a machine that others use, as the
column `others` says, trust the processor's time and what follows from it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import resource
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import winnow.sandbox
from winnow.config.reward import SandboxConfig
from winnow.rewards.scorers import code
from winnow.sandbox.process import ENVIRONMENT
from winnow.sandbox.program import Program

_SET_CHILD_SUBREAPER = 36
PYTHON = "/usr/bin/python3"
TRIVIAL = "print(42)"
NAMESPACES = [
    *("bwrap", "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session"),
    *("--ro-bind", "/usr", "/usr", "--symlink", "usr/lib", "/lib"),
    *("--symlink", "usr/lib64", "/lib64", "--dev", "/dev", "--tmpfs", "/tmp"),
]
GUARDIAN = "import _ctypes, _signal, marshal, os, resource, struct, sys"
"""What `confine.py` imports."""
ADD = "def add(a, b):\n    return a + b\n"
SUM = "print(sum(map(int, input().split())))\n"
Call = Callable[[], object]


@dataclass(frozen=True)
class Figures:
    """Of one row, once."""

    rate: float
    """Calls a second, by the clock."""
    cost_ms: float
    """Processor, all processes, a call."""
    own_ms: float
    """Of it, this process."""
    others: float
    """Share of the machine that something else used meanwhile."""


def adopt_orphans() -> None:
    """Have processes whose parents end first come to this one."""
    assert ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0


def reap_orphans() -> None:
    """Wait for those that have come."""
    while True:
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def processor_s(who: int) -> float:
    """Seconds of processor of this process, or of all its children that have ended."""
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def busy_s() -> float:
    """Seconds of processor that the machine has spent on anything."""
    user, nice, system, _, _, irq, softirq, *_ = map(
        int, Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    )
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def measured(call: Call, programs: int, at_once: int) -> Figures:
    """Make calls, some at once."""
    call()
    reap_orphans()
    own, all_ = processor_s(resource.RUSAGE_SELF), processor_s(resource.RUSAGE_CHILDREN)
    busy, began = busy_s(), time.perf_counter()
    with ThreadPoolExecutor(at_once) as threads:
        for done in [threads.submit(call) for _ in range(programs)]:
            done.result()
    wall = time.perf_counter() - began
    reap_orphans()
    own = processor_s(resource.RUSAGE_SELF) - own
    all_ = own + processor_s(resource.RUSAGE_CHILDREN) - all_
    others = max(0.0, busy_s() - busy - all_) / (wall * (os.cpu_count() or 1))
    return Figures(programs / wall, 1000 * all_ / programs, 1000 * own / programs, others)


def plain(*command: str) -> Call:
    """A command without any of our code."""

    def call() -> object:
        return subprocess.run(
            command, env=dict(ENVIRONMENT), cwd="/", check=True, capture_output=True
        )

    return call


def in_sandbox() -> object:
    """The trivial program in the sandbox that stands."""
    result = winnow.sandbox.current().run_for(Program(TRIVIAL), 60)
    assert result.stdout == b"42\n", result
    return result


def scored(answer: str, tests: Mapping[str, object]) -> Call:
    """An answer that passes all its tests."""

    def call() -> object:
        score = code.score("mbpp", answer, json.dumps(tests), {})
        assert score.accuracy == 1, score
        return score

    return call


def answers() -> Iterator[tuple[str, Call]]:
    """Whole answers, by test lists of several sizes."""
    for count in (1, 10, 100):
        cases = [f"assert add({n}, 1) == {n + 1}" for n in range(count)]
        yield f"{count} asserts" if count > 1 else "1 assert", scored(ADD, {"assert_case": cases})
    for count in (1, 10):
        pairs = {
            "inputs": [f"{n} 1" for n in range(count)],
            "outputs": [str(n + 1) for n in range(count)],
        }
        yield f"{count} pair{'s' * (count > 1)} of input and output", scored(SUM, pairs)


@contextmanager
def backend(name: str, at_once: int) -> Iterator[None]:
    """Have programs run in this kind of sandbox."""
    config = {"backend": name, "max_concurrent": at_once, "time_s": 60, "sample_s": 600}
    winnow.sandbox.start(SandboxConfig.model_validate(config))
    try:
        yield
    finally:
        winnow.sandbox.close()


def run_all(programs: int, at_once: int) -> dict[str, Figures]:
    """Every row once."""
    python = (PYTHON, "-s", "-c", TRIVIAL)
    rows: dict[str, Call] = {
        "`true`": plain("/usr/bin/true"),
        "Python": plain(*python),
        "Python as Landlock's guardian": plain(PYTHON, "-I", "-S", "-B", "-c", GUARDIAN),
        "`true` in bwrap's namespaces": plain(*NAMESPACES, "/usr/bin/true"),
        "Python in bwrap's namespaces": plain(*NAMESPACES, *python),
    }
    found = {name: measured(call, programs, at_once) for name, call in rows.items()}
    for name in ("bubblewrap", "landlock"):
        with backend(name, at_once):
            found[f"**the sandbox, {name}**"] = measured(in_sandbox, programs, at_once)
            for tests, call in answers():
                some = max(4, programs // (10 if tests.startswith("10 pairs") else 2))
                found[f"{name}, an answer with {tests}"] = measured(call, some, at_once)
    return found


def main() -> None:
    """Print a table, and write it where asked to."""
    options = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    options.add_argument("--programs", type=int, default=100)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--at-once", type=int, default=2)
    options.add_argument("--out", type=Path)
    args = options.parse_args()
    adopt_orphans()
    runs = [run_all(args.programs, args.at_once) for _ in range(args.repeats)]
    user = "root" if os.geteuid() == 0 else "an ordinary user"
    cores = os.cpu_count() or 1
    lines = [
        f"{args.programs} programs a row (answers: half as many), {args.at_once} at once, "
        f"{cores} cores, started as {user}; medians of {args.repeats} turns. `others` is the share "
        "of the machine that other work took meanwhile: the rate is what was left, and work beside "
        "it makes the processor's time longer, too, so compare with the bare Python.",
        "",
        "| | /s, seen | processor, ms each (least, most) | times a bare Python | of it our Python, "
        f"ms | at that price, /s on {cores} cores | others |",
        "|---|---|---|---|---|---|---|",
    ]
    bare = statistics.median(run["Python"].cost_ms for run in runs)
    for name in runs[0]:
        mine = [run[name] for run in runs]
        rate, cost, own, others = (
            statistics.median(getattr(each, field) for each in mine)
            for field in ("rate", "cost_ms", "own_ms", "others")
        )
        least, most = (pick(each.cost_ms for each in mine) for pick in (min, max))
        lines.append(
            f"| {name} | {rate:.0f} | {cost:.1f} ({least:.1f}, {most:.1f}) "
            f"| {cost / bare:.2f} | {own:.1f} | {cores * 1000 / cost:.0f} | {others:.0%} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if args.out:
        command = (
            f"python benchmarks/sandbox.py --programs {args.programs} --repeats {args.repeats}"
        )
        args.out.write_text(f"# The sandbox\n\n`{command}`\n\n{text}", encoding="utf-8")


if __name__ == "__main__":
    main()
