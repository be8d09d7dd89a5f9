"""Runs with `trainer/strategy=megatron` in real processes, on CPUs: `tests.megatron_on_cpu`."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from benchmarks.kill import STEPS, code_of, differences, figures
from tests.fault.quick_lab import QuickLab
from tests.forked import Server
from tests.megatron_ranks import megatron_environment
from tests.pauses import go_on
from tests.processes import driver_of, gone, workers_of
from transformers import AutoModelForCausalLM

from winnow.runs.checkpoint import checkpoints_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CUT = "trainer/strategy=megatron", "trainer.strategy.tensor=2"
APART = "rollout.engine.processes=1", "trainer.save_every=1", "trainer.keep_last=3"
ROLES = "algorithm/advantage=gae", "algorithm/kl/loss=fixed", "algorithm.kl.loss.coef=0.1"
"""With a critic and a reference beside the policy."""
SHORT = 3
"""Steps of runs that are compared with the first ones of longer runs."""


@pytest.fixture(scope="module")
def megatron_lab(tmp_path_factory: pytest.TempPathFactory, warm_starts: Path) -> Iterator[QuickLab]:
    """A lab whose processes compute on the CPU what megatron-core is asked."""
    folder = tmp_path_factory.mktemp("megatron")
    (folder / "cache").symlink_to(warm_starts)
    server = Server(environment=megatron_environment(), preloaded=("megatron.core",))
    # A schedule would follow the number of steps, which differs here.
    settings = "optim.schedule=constant", *ROLES
    yield QuickLab(folder, server=server, settings=settings)
    server.close()


@pytest.fixture(scope="module")
def calm(megatron_lab: QuickLab) -> Path:
    """An undisturbed run on two tensor-parallel ranks."""
    assert megatron_lab.start("calm", *CUT, *APART).wait(240) == 0
    return megatron_lab.run("calm")


@pytest.fixture(scope="module")
def alone(megatron_lab: QuickLab) -> Path:
    """The same recipe in one process."""
    assert megatron_lab.start("alone", f"trainer.steps={SHORT}").wait(240) == 0
    return megatron_lab.run("alone")


def check_learnt(wanted: Path, run: Path, steps: int = SHORT) -> None:
    """What two runs found and learnt is the same up to rounding."""
    ours, theirs = figures(run)[: steps + 1], figures(wanted)[: steps + 1]
    for one, two in zip(theirs, ours, strict=True):
        for name in {name for name in one.keys() & two.keys() if not name.startswith("ranks/")}:
            limit = 1e-4 if name == "mismatch/max_delta" else 1e-5
            assert two[name] == pytest.approx(one[name], rel=1e-4, abs=limit), name


def test_tensor_parallel_ranks_learn_what_one_process_learns(alone: Path, calm: Path) -> None:
    check_learnt(alone, calm)
    assert max(line["publish/max_delta"] for line in figures(calm) if line["step"]) < 1e-4
    assert all(line["ranks/lockstep"] == 1.0 for line in figures(calm) if line["step"])


@pytest.mark.parametrize(
    "layout", [("trainer.strategy.pipeline=2",), ()], ids=["two stages", "two shares"]
)
def test_stages_and_shares_learn_what_one_process_learns(
    alone: Path, megatron_lab: QuickLab, layout: tuple[str, ...]
) -> None:
    run = megatron_lab.run(f"layout{len(layout)}")
    words = "trainer/strategy=megatron", *layout, f"trainer.steps={SHORT}"
    assert megatron_lab.start(run.name, *words).wait(240) == 0
    check_learnt(alone, run)


def test_a_checkpoint_has_the_bits_of_the_model_under_its_own_names(calm: Path) -> None:
    checkpoint = checkpoints_in(calm / "checkpoints")[-1]
    model = AutoModelForCausalLM.from_pretrained(checkpoint.model, dtype=torch.float32)
    stored = dcp.FileSystemReader(checkpoint.path / "ranks")
    sizes = stored.read_metadata().state_dict_metadata
    weights = {name: torch.empty_like(p) for name, p in model.named_parameters()}
    ends = {f"policy.weights.{name}": name for name in weights}
    keys = {key: name for key in sizes for end, name in ends.items() if key.endswith(end)}
    assert sorted(keys.values()) == sorted(weights)
    dcp.load(
        {key: weights[name] for key, name in keys.items()}, storage_reader=stored, no_dist=True
    )
    for name, parameter in model.named_parameters():
        assert torch.equal(weights[name], parameter), name


def test_a_rank_that_is_killed_costs_nothing_but_time(calm: Path, megatron_lab: QuickLab) -> None:
    run = megatron_lab.run("killed")
    words = *CUT, *APART, "trainer.max_restarts=1"
    process = megatron_lab.start(run.name, *words, pauses={2: 0.05})
    driver, workers = megatron_lab.stands_still(process, run.name, 2), workers_of(run)
    assert driver == driver_of(process.pid)
    assert workers.keys() == {"engine 0[0]", "learner[0]", "learner[1]"}
    os.kill(workers["learner[1]"], signal.SIGKILL)
    go_on(driver)
    assert gone({driver, *workers.values()})
    assert code_of(process, 300) == 0
    assert re.search(r"learner\[1\] was killed by SIGKILL", (run / "log.txt").read_text())
    assert differences(calm, run) == []


@pytest.mark.parametrize("strategy", ["fsdp2", "megatron"])
def test_ranks_of_another_layout_take_a_run_over_and_say_so(
    calm: Path, megatron_lab: QuickLab, strategy: str
) -> None:
    run = megatron_lab.run(f"over-to-{strategy}")
    layout = (
        f"trainer/strategy={strategy}",
        *(["trainer.strategy.pipeline=2"] * (strategy[0] == "m")),
    )
    fork = f"run.fork={calm}@{STEPS - 1}"
    assert megatron_lab.start(run.name, *layout, *APART, fork).wait(240) == 0
    told = (run / "log.txt").read_text()
    assert ("Warning: strategy was megatron and is fsdp2" in told) == (strategy == "fsdp2")
    assert ("Warning: stages was 1 and is 2" in told) == (strategy == "megatron")
    check_learnt(calm, run, STEPS)
