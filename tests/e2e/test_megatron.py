"""Runs with `trainer/strategy=megatron` in real processes, on CPUs: `tests.megatron_on_cpu`."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.kill import code_of, differences, figures
from tests.fault.quick_lab import QuickLab
from tests.forked import Server
from tests.megatron_ranks import megatron_environment
from tests.pauses import go_on
from tests.processes import driver_of, gone, workers_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CUT = "trainer/strategy=megatron", "trainer.strategy.tensor=2"
APART = "rollout.engine.processes=1", "trainer.save_every=1", "trainer.keep_last=3"
ROLES = "algorithm/advantage=gae", "algorithm/kl/loss=fixed", "algorithm.kl.loss.coef=0.1"
"""With a critic and a reference beside the policy."""
STEPS = 2


@pytest.fixture(scope="module")
def megatron_lab(home: Path) -> Iterator[QuickLab]:
    """A lab whose processes compute on the CPU what megatron-core is asked."""
    server = Server(environment=megatron_environment(), preloaded=("megatron.core",))
    settings = f"trainer.steps={STEPS}", "sampling.groups_per_step=4", *ROLES
    yield QuickLab(home, server=server, settings=settings)
    server.close()


@pytest.fixture(scope="module")
def calm(megatron_lab: QuickLab) -> Path:
    """An undisturbed run on two tensor-parallel ranks."""
    assert megatron_lab.start("calm", *CUT, *APART).wait(240) == 0
    return megatron_lab.run("calm")


@pytest.fixture(scope="module")
def alone(megatron_lab: QuickLab) -> Path:
    """The same recipe in one process, with a pass for all old log-probs, as ranks have it."""
    assert megatron_lab.start("alone", "algorithm.correction.mode=recompute").wait(240) == 0
    return megatron_lab.run("alone")


def check_learnt(wanted: Path, run: Path) -> None:
    """What two runs found and learnt is the same up to rounding."""
    for one, two in zip(figures(wanted), figures(run), strict=True):
        for name in {name for name in one.keys() & two.keys() if not name.startswith("ranks/")}:
            limit = 1e-4 if name == "mismatch/max_delta" else 1e-5
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=limit), name


def test_tensor_parallel_ranks_learn_what_one_process_learns(alone: Path, calm: Path) -> None:
    check_learnt(alone, calm)
    assert max(line["publish/max_delta"] for line in figures(calm) if line["step"]) < 1e-4
    assert all(line["ranks/lockstep"] == 1.0 for line in figures(calm) if line["step"])


def test_shares_learn_what_one_process_learns(alone: Path, megatron_lab: QuickLab) -> None:
    run = megatron_lab.run("shares")
    assert megatron_lab.start(run.name, "trainer/strategy=megatron").wait(240) == 0
    check_learnt(alone, run)


def test_a_rank_that_is_killed_costs_nothing_but_time(calm: Path, megatron_lab: QuickLab) -> None:
    run = megatron_lab.run("killed")
    words = *CUT, *APART, "trainer.max_restarts=1"
    process = megatron_lab.start(run.name, *words, pauses={2: 0.0})
    driver, workers = megatron_lab.stands_still(process, run.name, 2), workers_of(run)
    assert driver == driver_of(process.pid)
    assert workers.keys() == {"engine 0[0]", "learner[0]", "learner[1]"}
    os.kill(workers["learner[1]"], signal.SIGKILL)
    go_on(driver)
    assert gone({driver, *workers.values()})
    assert code_of(process, 300) == 0
    assert re.search(r"learner\[1\] was killed by SIGKILL", (run / "log.txt").read_text())
    assert differences(calm, run, steps=STEPS) == []


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_ranks_of_another_layout_take_a_run_over_and_say_so(
    calm: Path, megatron_lab: QuickLab, strategy: str
) -> None:
    run = megatron_lab.run(f"over-to-{strategy}")
    stages = ["trainer.strategy.pipeline=2"] if strategy == "megatron" else []
    layout = f"trainer/strategy={strategy}", *stages
    fork = f"run.fork={calm}@{STEPS - 1}"
    assert megatron_lab.start(run.name, *layout, *APART, fork).wait(240) == 0
    told = (run / "log.txt").read_text()
    assert ("Warning: strategy changed from megatron to fsdp2" in told) == (strategy == "fsdp2")
    assert ("Warning: stages changed from 1 to 2" in told) == (strategy == "megatron")
    check_learnt(calm, run)
