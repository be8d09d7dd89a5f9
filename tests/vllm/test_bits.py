"""Runs of vLLM engines in fp32 on a CPU: the torch engine's answers and weights, bit for bit.

Of all that is kept of a run only log-probs and what follows from them differ, by rounding.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from benchmarks.kill import (
    ASYNC,
    LONGEST_S,
    STEPS,
    code_of,
    differences,
    figures,
    lost_or_repeated,
)
from benchmarks.vllm_bits import SPLIT, TWO, VLLM, answers, gets_on, model_of
from tests.fault.quick_lab import QuickLab
from tests.fault.test_modes import BESIDE
from tests.processes import descendants, driver_of, gone, workers_of

from winnow.observe.files import RunFolder
from winnow.observe.ledger import read_ledger

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def trained(lab: QuickLab, name: str, *settings: str) -> Path:
    assert lab.start(name, *settings).wait(LONGEST_S) == 0
    return lab.run(name)


def test_one_engine_writes_and_teaches_what_the_torch_engine_does(
    lab: QuickLab, calm: Path
) -> None:
    wanted = lab.run("torch")
    assert [name for name, file in answers(calm).items() if any(file["token_ids"])]
    assert answers(calm) == answers(wanted)
    assert model_of(calm) == model_of(wanted)


def test_two_engines_one_step_off_write_and_teach_what_two_torch_engines_do(
    lab: QuickLab,
) -> None:
    wanted = trained(lab, "torch-2", TWO, *BESIDE)
    run = trained(lab, "two", VLLM, TWO, *BESIDE)
    assert workers_of(run).keys() >= {"engine 0[0]", "engine 1[0]"}
    assert answers(run) == answers(wanted)
    assert model_of(run) == model_of(wanted)
    staleness = [line["sampling/staleness/max"] for line in figures(run)[1:]]
    assert staleness[0] == 0
    assert min(staleness[1:]) >= 1


def test_async_swaps_weights_in_flight_and_loses_no_group(lab: QuickLab) -> None:
    run = trained(lab, "async", VLLM, *ASYNC)
    assert lost_or_repeated(run) == []
    assert any(len(row["versions"]) > 1 for row in read_ledger(RunFolder(run)).to_pylist())


def test_actors_on_ray_give_the_bits_of_processes(lab: QuickLab, calm: Path) -> None:
    # As a user's shell may have it; the scheduler stays in the actor all the same.
    variables = "cluster.environment={VLLM_ENABLE_V1_MULTIPROCESSING: '1'}"
    assert differences(calm, trained(lab, "ray", VLLM, "cluster=ray", variables)) == []


def test_an_engine_and_a_run_that_are_killed_cost_nothing_but_time(
    lab: QuickLab, calm: Path
) -> None:
    run = lab.run("killed")
    process = lab.start(run.name, VLLM, "trainer.max_restarts=2")
    for victim in ("engine 0[0]", "driver"):
        assert gets_on(process, run)
        everyone = {**workers_of(run), "driver": driver_of(process.pid)}
        os.kill(everyone[victim], signal.SIGKILL)
        assert gone({*everyone.values()}), victim
    assert code_of(process, LONGEST_S) == 0
    assert differences(calm, run) == []
    assert "engine 0[0] was killed by SIGKILL" in (run / "log.txt").read_text()


def test_in_free_mode_an_engine_that_is_killed_costs_no_answer(lab: QuickLab) -> None:
    run = lab.run("lost")
    process = lab.start(run.name, VLLM, TWO, "run.deterministic=false")
    assert gets_on(process, run)
    engines = workers_of(run)
    os.kill(engines["engine 0[0]"], signal.SIGKILL)
    assert code_of(process, LONGEST_S) == 0
    assert gone({*engines.values()})
    assert "engine 0 died, 1 of 2 engines remain" in (run / "log.txt").read_text()
    lines = figures(run)
    assert [line["step"] for line in lines] == list(range(STEPS + 1))
    assert sum(line.get("sampling/groups/failed", 0) for line in lines) == 0


def test_a_split_engine_gives_the_same_bits_and_leaves_no_process_when_it_is_killed(
    lab: QuickLab, calm: Path
) -> None:
    run = lab.run("split")
    process = lab.start(run.name, VLLM, SPLIT)
    assert gets_on(process, run)
    assert gets_on(process, run)  # the first is saved
    engine = workers_of(run)["engine 0[0]"]
    parts = {pid for pid, line in descendants(engine).items() if "Worker_TP" in line}
    assert len(parts) == 2
    # The run could end them, and must not have to: on Ray it cannot. Nor can those do it that hang.
    for pid in (process.pid, *parts):
        os.kill(pid, signal.SIGSTOP)
    os.kill(engine, signal.SIGKILL)
    assert gone(parts)
    process.send_signal(signal.SIGCONT)
    assert code_of(process, LONGEST_S) == 1
    first = "step-1.parquet"
    assert answers(run)[first] == answers(calm)[first]
    assert model_of(run, 1) == model_of(calm, 1)
