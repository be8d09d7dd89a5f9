"""A run in four processes, two ranks and an engine: what becomes of it when one of them dies."""

from __future__ import annotations

import os
import re
import shutil
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from benchmarks.kill import (
    LONGEST_S,
    STEPS,
    VARIANTS,
    code_of,
    contents,
    differences,
    figures,
    leftovers,
)
from tests.fault import small_disk
from tests.fault.quick_lab import SPARES, QuickLab
from tests.fault.small_disk import why_not
from tests.fault.test_full_disk import FULL
from tests.forked import Forked, Server
from tests.pauses import go_on
from tests.processes import driver_of, gone, is_alive, workers_of
from tests.ray_nodes import RayWorkers

from winnow.checkpoints.checkpoint import checkpoints_in, verify

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ON_RANKS = (
    *("trainer/strategy=fsdp2", "rollout.engine.processes=1", "trainer.save_every=1"),
    "trainer.keep_last=3",
)
WITH_CRITIC = *VARIANTS["critic"], "trainer.save_every=1"
CRITIC_APART = ("critic/strategy=fsdp2",)
SPACE_KB = 5 << 10
"""A checkpoint takes 1.8 MB: the first one fits, of a later one some files."""


@pytest.fixture(scope="module")
def calm(lab: QuickLab) -> Path:
    """An undisturbed run on two ranks."""
    assert lab.start("calm-ranks", *ON_RANKS).wait(240) == 0
    return lab.run("calm-ranks")


@pytest.fixture(scope="module")
def alone(lab: QuickLab) -> Path:
    """An undisturbed run in one process, with a pass for all old log-probs, as ranks have it."""
    assert lab.start("alone", "algorithm.correction.mode=recompute").wait(240) == 0
    return lab.run("alone")


def test_reused_log_probs_learn_what_recomputed_ones_do(alone: Path, lab: QuickLab) -> None:
    passes = []
    for one, other in zip(figures(alone), figures(lab.run("undisturbed")), strict=True):
        assert one.keys() - other.keys() <= {f"mismatch/age_{age}/share" for age in range(9)}
        for name in other:
            if name == "actor/old_pass":
                passes.append((one[name], other[name]))
            elif not name.startswith("mismatch/"):  # that of the first update's answers
                assert other[name] == pytest.approx(one[name], rel=1e-4, abs=1e-5), name
        if other["step"]:
            assert other["mismatch/age_0/abs_delta"] < 1e-5
    assert [recomputed for recomputed, _ in passes] == [1] * STEPS
    assert all(0 <= share < 1 for _, share in passes)
    assert any(share > 0 for _, share in passes)


def test_two_ranks_learn_what_one_process_learns(alone: Path, calm: Path) -> None:
    lines, shared = figures(alone), figures(calm)
    assert len(lines) == len(shared) == STEPS + 1
    for one, two in zip(lines, shared, strict=True):
        new = {"ranks/spread", "ranks/lockstep", "ranks/idle", "publish/max_delta"}
        assert {name for name in two if name not in one} == (new if one["step"] else set())
        for name in one:
            # The largest difference of all tokens from the sampler's; a sum's rounding shows there.
            limit = 1e-4 if name == "mismatch/max_delta" else 1e-5
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=limit), name


def test_ranks_send_an_engine_the_adapter_alone(lab: QuickLab) -> None:
    run, adapter = lab.run("adapter"), ("model/adapter=lora", "model.adapter.publish=adapter")
    assert lab.start(run.name, *ON_RANKS, *adapter, "trainer.steps=2").wait(240) == 0
    deltas = [line["publish/max_delta"] for line in figures(run) if line["step"]]
    assert len(deltas) == 2
    assert max(deltas) < 1e-4


def after_a_step(
    lab: QuickLab, process: Forked, run: Path, step: int
) -> tuple[int, dict[str, int]]:
    """Wait until a supervised run stands still; its driver, and its engine and ranks."""
    driver = lab.stands_still(process, run.name, step)
    assert driver == driver_of(process.pid)
    workers = workers_of(run)
    assert workers.keys() == {"engine 0[0]", "learner[0]", "learner[1]"}
    assert all(map(is_alive, workers.values()))
    return driver, workers


def check_same(calm: Path, run: Path) -> None:
    """The bits of an undisturbed run, those of the ranks' shards included."""
    assert differences(calm, run) == []
    ours, theirs = (checkpoints_in(each / "checkpoints")[-1].path for each in (run, calm))
    shards = [
        {name: data for name, data in contents(each / "ranks").items() if name != ".metadata"}
        for each in (ours, theirs)  # the metadata has a name of its own for each save
    ]
    assert len(shards[0]) == 2
    assert shards[0] == shards[1]


def test_whoever_is_killed_costs_nothing_but_time(calm: Path, lab: QuickLab) -> None:
    run = lab.run("killed")
    victims = {1: "engine 0[0]", 2: "learner[1]", 3: "driver"}
    moments = dict.fromkeys(victims, 0.05)
    process = lab.start(run.name, *ON_RANKS, "trainer.max_restarts=4", pauses=moments)
    for step, victim in victims.items():
        driver, workers = after_a_step(lab, process, run, step)
        os.kill({**workers, "driver": driver}[victim], signal.SIGKILL)
        if victim != "driver":
            go_on(driver)
        assert gone({driver, *workers.values()}), victim
    assert code_of(process, 300) == 0
    check_same(calm, run)
    told = (run / "log.txt").read_text()
    assert re.search(r"engine 0\[0\] was killed by SIGKILL", told)
    assert re.search(r"learner\[1\] was killed by SIGKILL", told)


@pytest.fixture(scope="module")
def beside(lab: QuickLab) -> Path:
    """An undisturbed run on two ranks that hold policy and critic."""
    assert lab.start("critic-beside", *WITH_CRITIC, "trainer/strategy=fsdp2").wait(240) == 0
    return lab.run("critic-beside")


def test_a_critic_apart_that_is_killed_ends_as_the_one_beside(beside: Path, lab: QuickLab) -> None:
    run = lab.run("critic-apart")
    words = *WITH_CRITIC, *CRITIC_APART, "trainer/strategy=fsdp2", "trainer.max_restarts=1"
    process = lab.start(run.name, *words, pauses={2: 0.05})
    driver, workers = lab.stands_still(process, run.name, 2), workers_of(run)
    assert workers.keys() == {"learner[0]", "learner[1]", "critic[0]", "critic[1]"}
    os.kill(workers["critic[1]"], signal.SIGKILL)
    go_on(driver)
    assert gone({driver, *workers.values()})
    assert code_of(process, 300) == 0
    assert differences(beside, run) == []
    lines = [line for line in (run / "log.txt").read_text().splitlines() if "SIGKILL" in line]
    assert re.search(r"critic\[1\] was killed by SIGKILL", lines[0])
    saved = checkpoints_in(run / "checkpoints")[-1]
    assert [*verify(saved).files].count("critic/__1_0.distcp") == 1
    assert max(line["critic/value/max"] for line in figures(run) if line["step"]) > 0


def test_another_number_of_ranks_takes_a_run_and_its_critic_over_and_says_so(
    beside: Path, lab: QuickLab
) -> None:
    run = lab.run("fewer-ranks")
    two = *WITH_CRITIC, *CRITIC_APART, "trainer/strategy=fsdp2", "trainer.strategy.sequence=2"
    process = lab.start(run.name, *two, pauses={2: 0.0})
    driver = lab.stands_still(process, run.name, 2)
    process.send_signal(signal.SIGTERM)
    go_on(driver)
    assert code_of(process, LONGEST_S) == 75
    assert checkpoints_in(run / "checkpoints")[-1].step < STEPS
    assert code_of(lab.start(run.name, *WITH_CRITIC, "trainer/strategy=fsdp2"), 240) == 2
    fewer = "critic.strategy.ranks=1", "trainer.strategy.ranks=1", "trainer.strategy.sequence=1"
    assert lab.start(run.name, *two, *fewer).wait(240) == 0
    told = (run / "log.txt").read_text()
    for what in ("ranks", "ranks a sequence", "ranks of the critic"):
        assert f"Warning: {what} changed from 2 to 1" in told
    for one, two_ranks in zip(figures(beside), figures(run), strict=True):
        for name in ("actor/loss", "critic/value/mean", "critic/value_loss"):
            assert two_ranks.get(name) == pytest.approx(one.get(name), abs=1e-4), name


def test_damage_that_a_rank_finds_costs_one_step_and_no_bit(calm: Path, lab: QuickLab) -> None:
    run, name = lab.run("damaged"), "ranks/__1_0.distcp"
    shutil.copytree(calm, run)
    *_, older, damaged, newest = checkpoints_in(run / "checkpoints")
    shutil.rmtree(newest.path)
    path = damaged.path / name
    whole = path.read_bytes()
    path.write_bytes(whole[:-64] + b"\xff" * 64)  # the last weights are no numbers
    words = *ON_RANKS, f"run.resume={damaged.path}"
    assert code_of(lab.start(run.name, *words), 240) == 2
    assert lab.start(run.name, *ON_RANKS).wait(240) == 0
    told = (run / "log.txt").read_text()
    assert (
        f"Warning: {path} is damaged (checksum differs); continuing from step {older.step}" in told
    )
    check_same(calm, run)


def test_a_rank_that_hangs_is_named_after_the_limit(lab: QuickLab) -> None:
    run = lab.run("hung-rank")
    process = lab.start(run.name, *ON_RANKS, "trainer.stall_timeout_s=8", pauses={1: 0.0})
    driver = lab.stands_still(process, run.name, 1)
    workers = workers_of(run)
    assert len(workers) == 3
    os.kill(workers["learner[1]"], signal.SIGSTOP)
    go_on(driver)
    assert code_of(process, LONGEST_S) == 1
    assert gone({*workers.values()})
    assert "learner[" in (run / "log.txt").read_text().splitlines()[-1]


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
def test_a_disk_that_is_full_for_the_ranks_costs_no_older_checkpoint(
    lab: QuickLab, mounting: Server, tmp_path: Path
) -> None:
    disk, left = tmp_path / "disk", tmp_path / "left"
    disk.mkdir()
    words = lab.words("full", *ON_RANKS, "trainer.keep_last=null", runs=disk)
    here = {"folder": tmp_path, "environment": {"WINNOW_CACHE": str(lab.folder / "cache")}}
    stage = partial(mounting.start, small_disk.__name__, **here)
    assert stage(["mount", str(disk), str(SPACE_KB)]).wait(60) == 0
    said = tmp_path / "said"
    code = mounting.start("winnow.cli.main", words, **here, err=said, spares=SPARES).wait(300)
    assert stage(["unmount", str(disk), str(left)]).wait(60) == 0
    assert code == 2, said.read_text()
    (line,) = said.read_text().splitlines()
    assert line.startswith(f"winnow: cannot save the checkpoint {disk}/full/checkpoints/step-")
    assert line.endswith("No space left on device; " + FULL.partition("; ")[2])
    assert list(leftovers(left / "full")) == []
    found = checkpoints_in(left / "full" / "checkpoints")
    assert 1 <= len(found) < STEPS
    for checkpoint in found:
        verify(checkpoint)


@pytest.fixture
def two_nodes(ray_workers: RayWorkers) -> Iterator[str]:
    """The address of a Ray cluster of a head without cores and two nodes of three."""
    head, node = {"num_cpus": 0}, {"num_cpus": 3}
    with ray_workers.nodes(head, node, node) as address:
        yield address


def test_on_ray_whoever_is_killed_costs_nothing_but_time(
    calm: Path, lab: QuickLab, two_nodes: str, ray_workers: RayWorkers
) -> None:
    """A node is one of the two that there are; its actors, a rank and an engine, die with it."""
    run = lab.run("killed-on-ray")
    there = "cluster=ray", f"cluster.address={two_nodes}", "trainer.max_restarts=4"
    victims = {1: "driver", 2: "node"}
    process = lab.start(run.name, *ON_RANKS, *there, pauses=dict.fromkeys(victims, 0.05))
    for step, victim in victims.items():
        driver, workers = after_a_step(lab, process, run, step)
        (raylet,) = {ray_workers.node_of(worker) for worker in workers.values()}
        os.kill({**workers, "driver": driver, "node": raylet}[victim], signal.SIGKILL)
        if victim != "driver":
            go_on(driver)
        assert gone({driver, *workers.values()}), victim
    assert code_of(process, 300) == 0
    check_same(calm, run)
    told = (run / "log.txt").read_text()
    found = re.findall(r"ERROR winnow\.workers\.group: (?:learner|engine 0)\[\d\] died", told)
    assert found
