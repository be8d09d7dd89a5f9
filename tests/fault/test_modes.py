"""Modes that sample beside learning: killed, stopped, with failing scorers, in real processes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from benchmarks.kill import (
    ASYNC,
    CONVERSATIONS,
    LONGEST_S,
    STEPS,
    Lab,
    code_of,
    differences,
    lost_or_repeated,
    write_user_files,
)
from tests.fault.quick_lab import QuickLab
from tests.fault.test_ranks import check_same
from tests.pauses import go_on
from tests.processes import gone, workers_of
from tests.ray_nodes import RayWorkers

from winnow.checkpoints.checkpoint import checkpoints_in, load_state
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics
from winnow.observe.ledger import read_ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
BESIDE = ("trainer/mode=one_step_off", "sampling.max_staleness=2", "evaluation.every=3")


@pytest.fixture(scope="module")
def calm(lab: Lab) -> Path:
    """An undisturbed run of one_step_off."""
    assert lab.start("calm-beside", *BESIDE, "trainer.save_every=1").wait(240) == 0
    return lab.run("calm-beside")


def test_groups_are_one_step_off_and_a_boundary_holds_the_step_that_is_cut(calm: Path) -> None:
    records = read_metrics(calm / "metrics.jsonl")[1:]
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    assert records[0]["sampling/staleness/max"] == 0
    assert all(1 <= record["sampling/staleness/max"] <= 2 for record in records[1:])
    for checkpoint in checkpoints_in(calm / "checkpoints"):
        state = load_state(checkpoint)
        steps = [step.version + 1 for step in state["pending"]["steps"]]
        assert steps == ([checkpoint.step + 1] if checkpoint.step < STEPS else [])
        assert state["sampler"]["ledger"]["version"] == checkpoint.step


def killed(lab: QuickLab, name: str, settings: Sequence[str], rng: random.Random) -> Path:
    """Kill a run at a random moment of its third step; finish it."""
    moments = {2: rng.random() * lab.seconds / STEPS}
    process = lab.start(name, *settings, pauses=moments)
    lab.stands_still(process, name, 2)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert lab.start(name, *settings).wait(LONGEST_S) == 0
    return lab.run(name)


def test_killed_at_a_random_moment_it_ends_with_the_same_bits(calm: Path, lab: QuickLab) -> None:
    run = killed(lab, "killed-beside", (*BESIDE, "trainer.save_every=1"), random.Random(3))
    assert differences(calm, run) == []


def test_two_engines_and_two_ranks_end_with_the_same_bits_though_a_rank_is_killed(
    lab: QuickLab,
) -> None:
    shared = *BESIDE, "trainer/strategy=fsdp2", "rollout.engine.processes=2", "trainer.save_every=1"
    assert lab.start("calm-shared", *shared).wait(240) == 0
    run = lab.run("killed-shared")
    process = lab.start(run.name, *shared, "trainer.max_restarts=1", pauses={2: 0.05})
    driver = lab.stands_still(process, run.name, 2)
    os.kill(workers_of(run)["learner[1]"], signal.SIGKILL)
    go_on(driver)
    assert code_of(process, LONGEST_S) == 0
    check_same(lab.run("calm-shared"), run)
    assert "learner[1] was killed by SIGKILL" in (run / "log.txt").read_text()


@pytest.mark.parametrize(
    "more",
    [
        (),
        (*CONVERSATIONS, "rollout.engine.processes=2", "rollout.n=2", "sampling/filter=none"),
    ],
)
def test_async_killed_at_a_random_moment_loses_no_group_and_learns_none_twice(
    lab: QuickLab, more: Sequence[str]
) -> None:
    write_user_files(lab.folder)
    more = [each.replace("FOLDER", str(lab.folder)) for each in more]
    run = killed(lab, f"killed-async-{len(more)}", (*ASYNC, *more), random.Random(4))
    assert lost_or_repeated(run) == []


TWO_ENGINES = "run.deterministic=false", "rollout.engine.processes=2", "trainer.steps=6"
HELD_SCORER = """
import os, time


def compute_score(data_source, solution_str, ground_truth, extra_info=None, hold=""):
    while os.path.exists(hold):
        time.sleep(0.01)
    return 1.0 if solution_str.rpartition("#")[2] == ground_truth else -1.0
"""
SHARED = "trainer/strategy=fsdp2", "cluster.share_devices=true"


@pytest.mark.parametrize(
    "settings",
    [
        ASYNC,
        ("trainer/mode=sync", "trainer/strategy=fsdp2"),
        ("trainer/mode=sync", *SHARED),
        (*ASYNC, "cluster=ray"),
    ],
    ids=["async", "sync", "shared", "ray"],
)
def test_an_engine_that_is_killed_is_replaced_while_the_run_goes_on(
    lab: QuickLab, settings: Sequence[str], ray_workers: RayWorkers
) -> None:
    run = lab.run(f"replaced-{abs(hash(settings))}")
    hold, scorer = lab.folder / f"{run.name}.hold", lab.folder / "held.py"
    scorer.write_text(HELD_SCORER)
    scoring = f"reward.function.path={scorer}", f"+reward.function.kwargs={{hold: {hold}}}"
    words = *TWO_ENGINES, *settings, *scoring, "reward.workers=1", "reward.timeout_s=240"
    with contextlib.ExitStack() as stack:
        if "cluster=ray" in settings:
            address = stack.enter_context(ray_workers.nodes({"num_cpus": 4}))
            words = *words, f"cluster.address={address}"
        process = lab.start(run.name, *words, pauses={2: 0.0})
        driver, engines = lab.stands_still(process, run.name, 2), workers_of(run)
        os.kill(engines["engine 1[0]"], signal.SIGKILL)
        if settings[-2:] != SHARED:  # there it starts with the next publication
            hold.touch()
        go_on(driver)
        while hold.exists():
            if "engine 1 is started again" in (run / "log.txt").read_text():
                hold.unlink()
            assert process.poll() is None
            time.sleep(0.01)
        assert process.wait(LONGEST_S) == 0
    told = (run / "log.txt").read_text()
    assert told.count("engine 1 died, 1 of 2 engines remain") == 1
    assert told.count("engine 1 is replaced, with weights of version") == 1
    newest = workers_of(run)
    assert newest["engine 0[0]"] == engines["engine 0[0]"]
    assert gone({*engines.values(), *newest.values()})
    records = read_metrics(run / "metrics.jsonl")[1:]
    assert [record["step"] for record in records] == list(range(1, 7))
    (step,) = (r["step"] for r in records if r["publish/replaced_engines"] == 1)
    assert 3 <= step < 6
    # By the timeline, it generated after that step.
    events = json.loads(RunFolder(run).trace.read_text())
    tracks = {e["args"].get("name"): e.get("tid") for e in events if e["ph"] == "M"}
    (ended,) = (e["ts"] for e in events if e["name"] == f"step {step}")
    assert any(
        e["name"] == "write" and e["ts"] > ended for e in events if e["tid"] == tracks["engine 1"]
    )
    if ASYNC[0] in settings:
        assert lost_or_repeated(run, 6) == []
    # Each answer of every group that is told of was finished: none failed with its engine.
    rows = read_ledger(RunFolder(run)).to_pylist()
    bad = [r for r in rows if r["fate"] == "failed" or r["answers"] != 4]
    assert not bad, (bad, (run / "log.txt").read_text()[-6000:])


def test_a_run_of_which_all_engines_are_killed_ends_in_one_line(lab: QuickLab) -> None:
    run = lab.run("all-engines-killed")
    process = lab.start(run.name, *ASYNC, *TWO_ENGINES, pauses={2: 0.05})
    driver, engines = lab.stands_still(process, run.name, 2), workers_of(run)
    for engine in engines.values():
        os.kill(engine, signal.SIGKILL)
    go_on(driver)
    assert process.wait(LONGEST_S) == 1
    assert "was killed by SIGKILL" in (run / "log.txt").read_text().splitlines()[-1]
    assert gone({*engines.values(), *workers_of(run).values()})
