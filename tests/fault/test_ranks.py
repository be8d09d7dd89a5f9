"""A run in four processes, two ranks and an engine: what becomes of it when one of them dies."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.kill import (
    SETTINGS,
    STEPS,
    Lab,
    code_of,
    contents,
    differences,
    figures,
    leftovers,
    wait_for,
)
from tests.fault.test_full_disk import FULL, namespace, why_not
from tests.processes import gone
from tests.ray_nodes import parent_of, ray_nodes

from winnow.checkpoint import checkpoints_in, verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ON_RANKS = "trainer/strategy=fsdp2", "rollout.engine.processes=1", "trainer.save_every=1"


def descendants(pid: int) -> dict[int, str]:
    """Processes that a process has started, and those that they have: their command lines."""
    found: dict[int, str] = {}
    parents = [pid]
    while parents:
        parent = parents.pop()
        for task in Path(f"/proc/{parent}/task").glob("*/children"):
            try:
                children = [int(word) for word in task.read_text().split()]
                lines = {c: Path(f"/proc/{c}/cmdline").read_text() for c in children}
            except (FileNotFoundError, ProcessLookupError):
                continue
            found |= lines
            parents += children
    return found


def workers_of(pid: int) -> list[int]:
    """Process ids of a run's engine and ranks, in the order of their start."""
    signs = "worker_main", "ray::RayWorker"
    found = descendants(pid).items()
    return sorted(child for child, line in found if any(sign in line for sign in signs))


def logged(run: Path) -> int:
    """Steps with a line of metrics."""
    path = run / "metrics.jsonl"
    return max(0, path.read_bytes().count(b"\n") - 1) if path.exists() else 0


@pytest.fixture(scope="module")
def calm(lab: Lab) -> Path:
    """An undisturbed run on two ranks."""
    assert lab.start("calm-ranks", *ON_RANKS).wait(240) == 0
    return lab.run("calm-ranks")


def test_two_ranks_learn_what_one_process_learns(calm: Path, lab: Lab) -> None:
    alone, shared = figures(lab.run("undisturbed")), figures(calm)
    assert len(alone) == len(shared) == STEPS + 1
    for one, two in zip(alone, shared, strict=True):
        new = {"ranks/spread", "ranks/idle", "publish/max_delta"}
        assert {name for name in two if name not in one} == (new if one["step"] else set())
        for name in one:
            # The largest difference of all tokens from the sampler's; a sum's rounding shows there.
            limit = 1e-4 if name == "mismatch/max_delta" else 1e-5
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=limit), name


@pytest.mark.parametrize(
    ("cluster", "victims"),
    [
        (("cluster=local",), ("engine", "rank", "driver")),
        (("cluster=ray", "cluster.cpus=0.5"), ("rank", "driver")),
    ],
    ids=["local", "ray"],
)
def test_whoever_is_killed_costs_nothing_but_time(
    cluster: tuple[str, ...], victims: tuple[str, ...], calm: Path, lab: Lab
) -> None:
    run = lab.run(f"killed-{len(cluster)}")
    process = lab.start(run.name, *ON_RANKS, *cluster, "trainer.max_restarts=4")
    for victim in victims:
        before = logged(run)
        assert wait_for(process, lambda least=before + 1: logged(run) >= least)  # type: ignore[misc]
        found = descendants(process.pid)
        engine, *ranks = workers_of(process.pid)
        assert len(ranks) == 2
        (driver,) = (child for child, line in found.items() if "--heartbeat" in line)
        killed = {"engine": engine, "rank": ranks[1], "driver": driver}
        os.kill(killed[victim], signal.SIGKILL)
        assert gone({driver, engine, *ranks}), victim
    assert code_of(process, 300) == 0
    assert differences(calm, run) == []
    ours, theirs = (checkpoints_in(each / "checkpoints")[-1].path for each in (run, calm))
    shards = [
        {name: data for name, data in contents(each / "ranks").items() if name != ".metadata"}
        for each in (ours, theirs)  # the metadata has a name of its own for each save
    ]
    assert len(shards[0]) == 2
    assert shards[0] == shards[1]
    told = (run / "log.txt").read_text()
    assert re.search(r"learner\[\d\] (was killed by SIGKILL|died)", told)


def test_another_number_of_ranks_takes_a_run_over_and_says_so(calm: Path, lab: Lab) -> None:
    run = lab.run("fewer-ranks")
    process = lab.start(run.name, *ON_RANKS)
    assert wait_for(process, lambda: logged(run) >= 2)
    process.send_signal(signal.SIGTERM)
    assert code_of(process, 60) == 75
    at = checkpoints_in(run / "checkpoints")[-1].step
    assert at < STEPS
    assert lab.start(run.name, *ON_RANKS, "trainer.strategy.ranks=1").wait(240) == 0
    assert "ranks was 2 and is 1" in (run / "log.txt").read_text()
    for one, two in zip(figures(calm), figures(run), strict=True):
        assert two["step"] == one["step"]
        if "actor/loss" in one:
            assert two["actor/loss"] == pytest.approx(one["actor/loss"], abs=1e-4)


def test_a_rank_that_hangs_is_named_after_the_limit(lab: Lab) -> None:
    run = lab.run("hung-rank")
    process = lab.start(run.name, *ON_RANKS, "trainer.stall_timeout_s=8")
    assert wait_for(process, lambda: logged(run) >= 1)
    workers = workers_of(process.pid)
    os.kill(workers[2], signal.SIGSTOP)
    assert code_of(process, 60) == 1
    assert gone({*workers})
    assert "learner[" in (run / "log.txt").read_text().splitlines()[-1]


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_disk_that_is_full_for_the_ranks_costs_no_older_checkpoint(
    lab: Lab, tmp_path: Path
) -> None:
    disk, left = tmp_path / "disk", tmp_path / "left"
    disk.mkdir()
    run = ["-m", "winnow.cli", "train", "quickstart", *SETTINGS, *ON_RANKS, f"run.dir={disk}"]
    run += ["run.name=full", "trainer.keep_last=null"]
    # A checkpoint takes 1.8 MB: the first one fits, of a later one some files.
    script = f'mount -t tmpfs -o size=5m tmpfs {disk} && "$@"; code=$?; cp -a {disk} {left}; exit '
    done = subprocess.run(
        [*namespace(), "sh", "-c", f"{script}$code", "sh", sys.executable, *run],
        env=os.environ | {"OMP_NUM_THREADS": "1", "WINNOW_CACHE": str(lab.folder / "cache")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"winnow: cannot save the checkpoint {disk}/full/checkpoints/step-")
    assert line.endswith("No space left on device; " + FULL.partition("; ")[2])
    assert list(leftovers(left / "full")) == []
    found = checkpoints_in(left / "full" / "checkpoints")
    assert 1 <= len(found) < STEPS
    for checkpoint in found:
        verify(checkpoint)


@pytest.fixture
def two_nodes() -> Iterator[str]:
    """The address of a Ray cluster of a head without cores and two nodes of three."""
    with ray_nodes({"num_cpus": 3}, {"num_cpus": 3}) as address:
        yield address


def test_a_node_that_is_gone_costs_nothing_but_time(calm: Path, lab: Lab, two_nodes: str) -> None:
    run = lab.run("lost-node")
    there = "cluster=ray", f"cluster.address={two_nodes}", "trainer.max_restarts=3"
    process = lab.start(run.name, *ON_RANKS, *there)
    assert wait_for(process, lambda: logged(run) >= 2)
    (raylet,) = {parent_of(worker) for worker in workers_of(os.getpid())}
    os.kill(raylet, signal.SIGKILL)
    assert code_of(process, 300) == 0
    assert differences(calm, run) == []
    assert re.search(r"(learner|engine 0)\[\d\] died", (run / "log.txt").read_text())


def test_in_free_mode_an_engine_that_dies_is_done_without(lab: Lab) -> None:
    run = lab.run("lost-engine")
    two = "run.deterministic=false", "rollout.engine.processes=2"
    process = lab.start(run.name, *two)
    assert wait_for(process, lambda: logged(run) >= 1)
    engines = workers_of(process.pid)
    assert len(engines) == 2
    os.kill(engines[0], signal.SIGKILL)
    assert code_of(process, 240) == 0
    assert gone({*engines})
    assert "engine 0 died, 1 of 2 are left" in (run / "log.txt").read_text()
    assert [line["step"] for line in figures(run)] == list(range(STEPS + 1))


def test_a_run_that_cannot_go_on_keeps_what_it_had(lab: Lab) -> None:
    run = lab.run("no-signal")
    bound = "sampling.max_groups_per_step=8", "sampling.on_bound=stop"
    assert code_of(lab.start(run.name, *ON_RANKS, *bound, "trainer.save_every=100"), 120) == 2
    (saved,) = checkpoints_in(run / "checkpoints")
    verify(saved)
    assert (saved.path / "ranks/.metadata").is_file()
    assert (saved.model / "model.safetensors").is_file()
    assert list(leftovers(run)) == []
