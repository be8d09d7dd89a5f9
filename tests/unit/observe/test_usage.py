"""usage.jsonl: what processes used by role, in a file that stays small and never stops a run."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from winnow.observe import usage
from winnow.observe.usage import Process, Reading, UsageLog, UsageReader

NVML = """
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *n) { *n = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned n, void **h) { *h = (void *)(n + 1L); return 0; }
int nvmlDeviceGetUtilizationRates(void *h, unsigned *r)
{ r[0] = 75; r[1] = 9; return h == (void *)1; }
int nvmlDeviceGetMemoryInfo(void *h, unsigned long long *m)
{ m[0] = 80ULL << 30; m[1] = 50ULL << 30; m[2] = 30ULL << 30; return 0; }
"""
"""The functions of NVIDIA's library that are called, of a GPU without rates and one with them."""


def reading(time_s: float, processes: dict[int, Process], roles: dict[int, str]) -> Reading:
    ticks, traffic = (
        {"busy": int(150 * time_s), "all": int(200 * time_s)},
        {"received": 0, "sent": 0},
    )
    return Reading(time_s, processes, roles, ticks, traffic, {"machine/gib": 3.0})


@pytest.fixture
def child() -> Iterator[int]:
    work = "pid = os.fork(); pid or sum(range(3 * 10**6)); print(pid); sys.stdin.read()"
    code = f"import os, sys; {work}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.stdout.readline()
        yield process.pid
        process.communicate()


def test_processes_are_booked_under_the_role_of_their_nearest_labelled_ancestor(child: int) -> None:
    reader = UsageReader(os.getpid())
    assert reader.read().roles[child] == "driver"
    usage.label_process(child, "engine 3")
    seen = reader.read()
    grandchild = next(pid for pid, each in seen.processes.items() if each.parent == child)
    assert (seen.roles[child], seen.roles[grandchild]) == ("engine", "engine")
    assert seen.roles[os.getpid()] == "driver"
    assert seen.processes[grandchild].cpu_s > 0.01  # it has counted
    assert os.getppid() not in seen.roles
    assert UsageReader(child).read().roles.keys() == {child, grandchild}


def test_time_and_memory_add_up_by_role_and_none_is_counted_twice() -> None:
    before = {1: Process(0, 10.0, 1.0), 2: Process(1, 4.0, 2.0), 3: Process(2, 6.0, 1.0)}
    # Process 3 has ended after another second, which its parent 2 now has among its children's.
    now = {1: Process(0, 10.5, 1.0), 2: Process(1, 4.5 + 7.0, 2.5), 4: Process(2, 0.25, 0.5)}
    roles = {1: "driver", 2: "engine", 3: "engine", 4: "engine"}
    of_now = {pid: roles[pid] for pid in now}
    used = usage.usage_between(reading(0.0, before, roles), reading(2.0, now, of_now))
    assert used["role/driver/cores"] == pytest.approx(0.25)
    assert used["role/engine/cores"] == pytest.approx((0.5 + 1.0 + 0.25) / 2)
    assert (used["role/engine/gib"], used["role/engine/processes"]) == (3.0, 2)
    assert (used["machine/cpu"], used["machine/gib"]) == (0.75, 3.0)


def test_a_worker_that_ends_is_no_burst_of_the_driver() -> None:
    before = {1: Process(0, 10.0, 1.0), 2: Process(1, 400.0, 2.0)}
    after = {1: Process(0, 10.5 + 400.5, 1.0)}
    used = usage.usage_between(
        reading(0.0, before, {1: "driver", 2: "engine"}), reading(1.0, after, {1: "driver"})
    )
    assert used["role/driver/cores"] == pytest.approx(1.0)  # its own half, and the end of the other


def test_the_file_stays_short_and_means_and_maxima_survive(tmp_path: Path) -> None:
    path, count = tmp_path / "usage.jsonl", 1000
    lines = UsageLog(path, most_lines=16)
    for n in range(count):
        lines.add({"time_s": 100.0 + n, "over_s": 1.0, "machine/cpu": n % 2, "machine/gib": n})
        assert path.read_bytes().count(b"\n") <= 16
    lines.close()
    kept = usage.parse_usage(path.read_bytes())
    assert 8 <= len(kept) <= 16
    assert sum(line["over_s"] for line in kept) == count
    mean = sum(line["over_s"] * line["machine/cpu"] for line in kept) / count
    assert mean == pytest.approx(0.5, abs=1e-3)
    assert [kept[-1][name] for name in ("time_s", "machine/gib")] == [1099.0, 999.0]
    length, count = max(line["over_s"] for line in kept), len(kept)
    resumed = UsageLog(path)
    for n in range(round(length / usage.INTERVAL_S)):  # for a line as long as before
        assert len(usage.parse_usage(path.read_bytes())) == count
        resumed.add({"time_s": 2000.0 + n, "over_s": usage.INTERVAL_S})
    assert len(usage.parse_usage(path.read_bytes())) == count + 1
    resumed.close()


def test_a_resumed_run_continues_the_file_behind_half_a_line(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    path.write_text('{"time_s": 1.0, "over_s": 1.0}\n{"time_s": 2.0, "ov')
    with usage.sampling_usage(path, 0.01):
        while len(kept := usage.parse_usage(path.read_bytes())) < 3:
            time.sleep(0.01)
    assert kept[0] == {"time_s": 1.0, "over_s": 1.0}
    assert kept[1].keys() >= {"role/driver/cores", "machine/cpu", "network/sent_mib_per_s"}
    assert usage.parse_usage(b'{"time_s": NaN, "over_s": 1}\n[]\n{"time_s": "1"}\n{"a": 1}\n') == []
    assert usage.parse_usage(b'{"time_s": 1%s, "over_s": 1}' % (b"0" * 400)) == []


def test_a_sampler_that_fails_says_so_once_and_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), usage.sampling_usage(tmp_path, 0.01):
        pass  # the path is a folder
    (line,) = caplog.messages
    assert line.startswith(f"{tmp_path} ends here: ")


def test_gpus_are_read_from_nvidias_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "nvml.c").write_text(NVML)
    library = tmp_path / "nvml.so"
    subprocess.run(["cc", "-shared", "-o", library, tmp_path / "nvml.c"], check=True)
    made = ctypes.CDLL(str(library))
    monkeypatch.setattr(ctypes, "CDLL", lambda name: made)
    gauges = UsageReader(os.getpid()).read().gauges
    gpus = {name: value for name, value in gauges.items() if name.startswith("gpu/")}
    assert gpus == {
        "gpu/0/gib": 30.0,
        "gpu/1/busy": 0.75,
        "gpu/1/gib": 30.0,
    }
