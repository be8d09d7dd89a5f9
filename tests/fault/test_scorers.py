"""Scorers that misbehave, in runs of their own: what the user is told, what stays the same."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest
from benchmarks.kill import (
    LATE_SCORER,
    LONGEST_S,
    SETTINGS,
    Lab,
    code_of,
    differences,
    size,
    wait_for,
)
from tests.fault.quick_lab import QuickLab
from tests.processes import gone, is_alive
from tests.winnow_command import Outcome, in_this_process

from winnow.runs.checkpoint import checkpoints_in

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

HEAD = "import os, signal, time\n\n\ndef compute_score({}):\n    ".format(
    "data_source, solution_str, ground_truth, extra_info=None"
)
LATE_ASYNC = LATE_SCORER.replace("def compute", "async def compute").replace(
    "time.sleep", "await sleep"
)
LATE_ASYNC = "from asyncio import sleep\n" + LATE_ASYNC
STUCK = """
import os, re, time


def compute_score(data_source, solution_str, ground_truth, extra_info=None, folder=""):
    open(f"{folder}/{os.getpid()}", "w").close()
    print("stuck", flush=True)
    time.sleep(1000)
"""


def reward(scorer: Path, **kwargs: object) -> list[str]:
    given = ", ".join(f"{key}: {value}" for key, value in kwargs.items())
    return [f"reward.function.path={scorer}", f"+reward.function.kwargs={{{given}}}"]


def said(lab: Lab, name: str, *settings: str) -> Outcome:
    """What a run says that ends with an error; the scorer is in a process of its own."""
    where = f"run.dir={lab.folder / 'runs'}", f"run.name={name}", "evaluation.before=false"
    return in_this_process(
        *("train", "quickstart", *SETTINGS, *settings, *where),
        folder=lab.folder,
        environment={"WINNOW_CACHE": str(lab.folder / "cache")},
    )


@pytest.mark.parametrize(
    ("name", "body", "error"),
    [
        ("hangs", "time.sleep(1000)", r"no score within reward\.timeout_s=0\.3"),
        ("exits", "os._exit(3)", "the scorer's process ended with exit code 3"),
        ("killed", "os.kill(os.getpid(), signal.SIGKILL)",
         "the scorer's process was killed by SIGKILL"),
        ("wrong-type", "return [1.0]",
         "TypeError: score must be a number, got list; return a float, or a dict with the key "
         "score"),
        ("eats-memory", "eaten = []\n    while True: eaten.append(bytearray(10_000_000))",
         r"the scorer used \d+ MiB of memory, reward\.memory_mb is 300"),
        ("floods", "while True: print('x' * 1000)", r"no score within reward\.timeout_s=0\.3"),
    ],
)  # fmt: skip
def test_a_scorer_that_does_this_each_time_ends_the_run_with_one_line(
    name: str, body: str, error: str, lab: Lab, tmp_path: Path
) -> None:
    scorer = tmp_path / f"{name}.py"
    scorer.write_text(f"{HEAD}{body}\n")
    limits = ["reward.timeout_s=0.3", "reward.memory_mb=300", "reward.workers=2"]
    # Each failure ends a worker and starts another, so few answers.
    limits += ["sampling.groups_per_step=2", "trainer.mini_batch_groups=2", "rollout.n=2"]
    if name == "eats-memory":
        limits[0] = "reward.timeout_s=20"
    done = said(lab, f"each-time-{name}", *reward(scorer), *limits)
    line = (
        r"winnow: scoring failed for 4 of 4 answers \(100%\), reward\.max_failure_share is 0\.2; "
        rf"the first failure: {error} \(prompt sort_digits:\S+\); mend the scorer \(its traceback "
        r"is in the log\)\n"
    )
    assert (done.code, done.out) == (2, "")
    assert re.fullmatch(line, done.err), done.err


@pytest.mark.parametrize(
    ("body", "how"),
    [("os._exit(3)", "ended with exit code 3"), ("os.abort()", "was killed by SIGABRT")],
)
def test_a_file_that_ends_the_process_when_imported_is_refused(
    body: str, how: str, lab: Lab, tmp_path: Path
) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text(f"import os\nprint('before')\n{body}\ndef compute_score(*a): return 1.0\n")
    done = said(lab, f"import-{body[3:7]}", *reward(scorer))
    assert (done.code, done.out) == (2, "")
    assert done.err == (
        f"winnow: reward.function.path {scorer}: the process that imports it {how}; "
        "mend the file, or raise the limit\n"
    )


def test_where_and_when_answers_are_scored_changes_no_bit(lab: QuickLab, tmp_path: Path) -> None:
    scorer, waiting = tmp_path / "scorer.py", tmp_path / "waiting.py"
    scorer.write_text(LATE_SCORER)
    waiting.write_text(LATE_ASYNC)
    # Without the number of ticks the lag would depend on where answers are scored.
    common = ["trainer.save_every=1", "sampling.score_lag_ticks=16"]
    prompt = [*reward(scorer, longest=0.0), *common]
    late = [*reward(scorer, longest=0.05), *common, "reward.workers=2"]
    late_async = [*reward(waiting, longest=0.05), *common, "reward.workers=2"]
    assert lab.start("here", *prompt, "reward.workers=0").wait(120) == 0
    calm = lab.run("here")
    assert lab.start("apart", *late).wait(240) == 0
    assert differences(calm, lab.run("apart")) == []
    assert lab.start("apart-async", *late_async).wait(240) == 0
    assert differences(calm, lab.run("apart-async")) == []

    run = lab.run("apart-killed")
    for step in (1, 3):
        process = lab.start(run.name, *late, pauses={step: 0.05})
        lab.stands_still(process, run.name, step)
        process.kill()
        process.wait()
    assert checkpoints_in(run / "checkpoints")
    assert lab.start(run.name, *late).wait(240) == 0
    assert differences(calm, run) == []


@pytest.mark.parametrize(
    ("number", "code", "supervised"),
    [
        (signal.SIGKILL, -9, False),
        (signal.SIGINT, 130, False),
        (signal.SIGTERM, 75, False),
        (signal.SIGTERM, 75, True),
        (signal.SIGKILL, -9, True),
    ],
)
def test_no_worker_outlives_its_run(
    number: int, code: int, supervised: bool, lab: Lab, tmp_path: Path
) -> None:
    scorer = tmp_path / "scorer.py"
    scorer.write_text(STUCK)
    notes = tmp_path / "workers"
    notes.mkdir()
    name = f"orphans-{number}-{supervised}"
    process = lab.start(
        name,
        *reward(scorer, folder=f"'{notes}'"),
        *("reward.workers=2", "reward.timeout_s=1000", "evaluation.before=false"),
        *(["trainer.max_restarts=2"] if supervised else []),
    )
    assert wait_for(process, lambda: len(list(notes.iterdir())) == 2)
    workers = {int(path.name) for path in notes.iterdir()}
    assert all(map(is_alive, workers))
    process.send_signal(number)
    assert code_of(process, LONGEST_S) == code
    assert gone(workers)
    assert size(lab.run(name) / "log.txt") > 0
