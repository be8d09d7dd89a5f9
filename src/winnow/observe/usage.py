"""usage.jsonl: what the processes of a run and its machine use, sampled by a thread of the driver.

A line is `{"time_s": SECONDS SINCE 1970, "over_s": 2.0, NAME: NUMBER, …}`, for the interval of
`over_s` seconds that ends at `time_s`; of memory it has the most of the samples, else their mean.

| name | of |
|---|---|
| `role/ROLE/{cores,gib,processes}` | busy cores, resident memory and number of its processes |
| `machine/{cpu,gib}` | busy share of all cores, memory in use |
| `network/{received,sent}_mib_per_s` | all interfaces but loopback |
| `gpu/N/{busy,gib}` | share of the time in which the GPU worked, memory in use (NVIDIA's) |

A role's processes are those that `label_process` names, with all that they start; the rest of the
driver's tree is `driver`. Resident memory counts a page that several processes share in each. Only
the driver's machine is sampled: of workers that Ray starts on other nodes nothing is known here.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import logging
import math
import os
import re
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from winnow.observe.files import AppendFile, one_line, write_atomic

INTERVAL_S = 2.0
"""Short enough for the phases of a step, and a sample takes some milliseconds."""
MOST_LINES = 2048
"""Lines, of some 300 bytes, at which neighbours become one and new ones come half as often."""
_CLOSE_S = 5.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_GIB = os.sysconf("SC_PAGE_SIZE") / 2**30

Usage = dict[str, float]

log = logging.getLogger(__name__)
_labels: dict[int, str] = {}


def label_process(pid: int, name: str) -> None:
    """Book a process of this machine, and all that it starts, under a role of the driver's run.

    Args:
        name: the role's, or that of one of its groups. Example: `engine 0`.
    """
    _labels[pid] = re.sub(r" \d+$", "", name)


class Process(NamedTuple):
    """A process as /proc/PID/stat shows it."""

    parent: int
    cpu_s: float
    """Its time, and that of its children that have ended."""
    gib: float


class Reading(NamedTuple):
    """Counters and gauges at one time."""

    time_s: float
    """By `time.monotonic`."""
    processes: Mapping[int, Process]
    roles: Mapping[int, str]
    """The role of each process."""
    ticks: Mapping[str, int]
    """Ticks of all cores: `busy` and `all`."""
    traffic: Mapping[str, int]
    """Bytes `received` and `sent`."""
    gauges: Usage
    """Figures that are no differences."""


class UsageReader:
    """Reads the counters of a tree of processes, and of their machine.

    Args:
        driver: the root of the tree.
    """

    def __init__(self, driver: int) -> None:
        self._driver, self._gpus = driver, _open_gpus()
        self._labelled: set[int] = set()
        self._strangers: set[int] = set()
        """Processes of others, which are read once: there may be thousands."""

    def read(self) -> Reading:
        """Read all counters.

        Raises:
            OSError, LookupError, ValueError: /proc is absent, or another system's.
        """
        labelled = set(_labels)
        if labelled != self._labelled:  # a stranger may belong to a process that has a label now
            self._strangers, self._labelled = set(), labelled
        present = {int(name) for name in os.listdir("/proc") if name.isdecimal()}
        for pid in labelled - present:
            del _labels[pid]  # another process may get the number
        self._strangers &= present
        table: dict[int, Process] = {}
        for pid in present - self._strangers | present & _labels.keys():
            # It has just ended, or /proc hides it (hidepid).
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                table[pid] = _parse_stat(Path(f"/proc/{pid}/stat").read_bytes())
        roles = {pid: role for pid in table if (role := self._find_role(pid, table))}
        self._strangers |= table.keys() - roles.keys()
        cores = [int(n) for n in _proc("stat")[0].split()[1:9]]
        rows = (line.split(":") for line in _proc("net/dev")[2:])
        links = [values.split() for name, values in rows if name.strip() != "lo"]
        kib = {row.split(":")[0]: int(row.split()[1]) for row in _proc("meminfo")}
        idle = sum(cores[3:5])  # the second while a disk is waited for
        gauges = {"machine/gib": (kib["MemTotal"] - kib["MemAvailable"]) / 2**20}
        for number, gpu in enumerate(self._gpus):
            gauges |= {f"gpu/{number}/{name}": value for name, value in _read_gpu(gpu).items()}
        return Reading(
            time.monotonic(),
            {pid: table[pid] for pid in roles},
            roles,
            {"busy": sum(cores) - idle, "all": sum(cores)},
            {"received": sum(int(v[0]) for v in links), "sent": sum(int(v[8]) for v in links)},
            gauges,
        )

    def _find_role(self, pid: int, table: Mapping[int, Process]) -> str | None:
        while pid in table:
            if pid in _labels or pid == self._driver:
                return _labels.get(pid, "driver")
            pid = table[pid].parent
        return None


def _proc(name: str) -> list[str]:
    return Path("/proc", name).read_text().splitlines()


def _parse_stat(content: bytes) -> Process:
    fields = content[content.rindex(b")") + 2 :].split()  # behind the name, which may hold anything
    ticks, pages = sum(map(int, fields[11:15])), int(fields[21])
    return Process(int(fields[1]), ticks / _TICKS_PER_S, pages * _PAGE_GIB)


def _open_gpus() -> list[Any]:
    """Return a handle of each NVIDIA GPU; without their driver, none."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return []
    count = ctypes.c_uint()
    nvml.nvmlInit_v2()
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    handles = [ctypes.c_void_p() for _ in range(count.value)]
    for number, handle in enumerate(handles):
        nvml.nvmlDeviceGetHandleByIndex_v2(number, ctypes.byref(handle))
    return [(nvml, handle) for handle in handles]


def _read_gpu(gpu: tuple[Any, Any]) -> Usage:
    """Read what the driver tells of a GPU; a figure that it lacks, as where it is split, is absent.

    The arrays are `nvmlUtilization_t` (gpu, memory) and `nvmlMemory_t` (total, free, used).
    """
    (nvml, handle), usage = gpu, {}
    rates, memory = (ctypes.c_uint * 2)(), (ctypes.c_ulonglong * 3)()
    if not nvml.nvmlDeviceGetUtilizationRates(handle, rates):
        usage["busy"] = rates[0] / 100
    if not nvml.nvmlDeviceGetMemoryInfo(handle, memory):
        usage["gib"] = memory[2] / 2**30
    return usage


def usage_between(before: Reading, now: Reading) -> Usage:
    """Return what was used between two readings."""
    seconds, usage = max(now.time_s - before.time_s, 1e-9), dict(now.gauges)
    cpu_s: defaultdict[str, float] = defaultdict(float)
    for pid, process in before.processes.items():
        while pid not in now.roles and pid in before.processes:
            pid = before.processes[pid].parent  # has the time of its children that have ended
        cpu_s[now.roles.get(pid, "")] -= process.cpu_s
    for pid, role in now.roles.items():
        cpu_s[role] += now.processes[pid].cpu_s
        for name, value in (("gib", now.processes[pid].gib), ("processes", 1)):
            usage[f"role/{role}/{name}"] = usage.get(f"role/{role}/{name}", 0) + value
    usage |= {f"role/{role}/cores": max(cpu_s[role], 0) / seconds for role in now.roles.values()}
    busy, ticks = (now.ticks[name] - before.ticks[name] for name in ("busy", "all"))
    usage |= {"machine/cpu": busy / ticks} if ticks > 0 else {}
    for name, count in now.traffic.items():
        rate = max(count - before.traffic[name], 0) / seconds
        usage[f"network/{name}_mib_per_s"] = rate / 2**20
    return usage


def merge_usage(first: Usage, second: Usage) -> Usage:
    """Merge two lines that follow each other to one; a figure that one of them lacks is 0 there."""
    over_s = first["over_s"] + second["over_s"]
    merged = {"time_s": second["time_s"], "over_s": over_s}
    for name in dict.fromkeys([*first, *second]):
        pair = [(line.get(name, 0), line["over_s"] / over_s) for line in (first, second)]
        is_most = name.endswith("gib")
        value = max(n for n, _ in pair) if is_most else math.fsum(n * share for n, share in pair)
        merged.setdefault(name, value)
    return merged


def parse_usage(content: bytes) -> list[Usage]:
    """Read the lines of usage.jsonl; one that is damaged or half-written is skipped."""
    lines = []
    for text in content.splitlines():
        with contextlib.suppress(ValueError, RecursionError, OverflowError):
            line = json.loads(text)
            numbers = line.values() if isinstance(line, dict) else [None]
            is_valid = all(isinstance(n, int | float) and math.isfinite(n) for n in numbers)
            if is_valid and line.get("time_s", 0) > 0 and line.get("over_s", 0) > 0:
                lines.append(line)
    return lines


class UsageLog:
    """The file usage.jsonl, which stays below a number of lines however long a run goes on."""

    def __init__(self, path: Path, most_lines: int = MOST_LINES) -> None:
        self._path, self._most = path, most_lines
        self._waiting: list[Usage] = []
        content = path.read_bytes() if path.exists() else b""
        self._count = content.count(b"\n")
        # A resumed run goes on with lines as long; the last of a start is shorter.
        longest_s = max((line["over_s"] for line in parse_usage(content)[-8:]), default=0.0)
        self._samples_per_line = max(round(longest_s / INTERVAL_S), 1)
        self._file = AppendFile(path)
        if not content.endswith(b"\n") and content:  # half a line, of a process that was killed
            self._file.append(b"\n")

    def add(self, usage: Usage) -> None:
        """Take a sample, and write a line as soon as there are enough for one.

        Raises:
            WinnowError: the file cannot be written.
        """
        self._waiting.append(usage)
        if len(self._waiting) >= self._samples_per_line:
            self.flush()
        if self._count >= self._most:
            lines = parse_usage(self._path.read_bytes())
            pairs = zip_longest(lines[::2], lines[1::2])
            halved = [merge_usage(a, b) if b else a for a, b in pairs]
            self._file.close()
            write_atomic(self._path, b"".join(map(_line, halved)))
            self._file = AppendFile(self._path)
            self._count, self._samples_per_line = len(halved), 2 * self._samples_per_line

    def flush(self) -> None:
        """Write the samples that wait."""
        if self._waiting:
            self._file.append(_line(functools.reduce(merge_usage, self._waiting)))
            self._waiting, self._count = [], self._count + 1

    def close(self) -> None:
        """Write what waits, and close the file."""
        try:
            self.flush()
        finally:
            self._file.close()


def _line(usage: Usage) -> bytes:
    rounded = {name: round(value, 4) for name, value in usage.items()}
    return json.dumps(rounded, separators=(",", ":")).encode() + b"\n"


@contextlib.contextmanager
def sampling_usage(path: Path, interval_s: float = INTERVAL_S) -> Iterator[None]:
    """Write usage.jsonl while the block runs, from a thread that the run never waits for.

    Whatever goes wrong in it is a warning in the log, and the end of the file.
    """
    is_over = threading.Event()

    def sample() -> None:
        reader = UsageReader(os.getpid())
        before, is_last = reader.read(), False
        with contextlib.closing(UsageLog(path)) as lines:
            while not is_last:
                is_last = is_over.wait(interval_s)
                now = reader.read()
                span = {"time_s": time.time(), "over_s": now.time_s - before.time_s}
                if span["over_s"] > interval_s / 4:  # of less, counters are too coarse
                    lines.add(span | usage_between(before, now))
                before = now

    def run() -> None:
        try:
            sample()
        except Exception as error:  # of a system unlike those that we know, or a full disk
            log.warning("%s ends here: %s", path, one_line(error))

    thread = threading.Thread(target=run, name="usage", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(_CLOSE_S)
