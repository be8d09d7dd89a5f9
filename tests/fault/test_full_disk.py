"""A disk that takes no more: one line says which file, and the run goes on when it can.

Each case runs on a tmpfs of 1 MB in a mount namespace of its own (`small_disk`), where the disk
really is full, or read-only, while one certain file is being written. How many pages are left is
reckoned from the files of an undisturbed run. Every case looks at each file that is left; a few
go on from there to the end, and compare with the undisturbed run.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import pytest
from benchmarks.kill import STEPS, differences, leftovers
from tests.fault import small_disk
from tests.fault.small_disk import DISK, Job, page_count, why_not
from tests.forked import Server
from tests.small_models import digits_folder
from tests.winnow_command import Outcome, in_forked_process, in_own_process

from winnow.checkpoints.checkpoint import checkpoints_in, verify
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import list_step_files, read_rollouts

COMMAND = [
    *("train", "mine.yaml", "run.threads=1", "run.dir={dir}", "run.name={name}"),
    *("model.path=model", "data.train_files=[rows.jsonl]", "data.eval_files=[rows.jsonl]"),
    *(f"reward.function.path={small_disk.__file__}", "reward.workers=0", "rollout.n=4"),
    *("rollout.max_response_tokens=8", "sampling.groups_per_step=4", "evaluation.max_prompts=8"),
    *("evaluation.n=2", f"evaluation.every={STEPS}", f"trainer.steps={STEPS}"),
    *("trainer.save_every=1", "trainer.keep_last=null"),
    "observe.trace=false",  # its size is not the same twice
]
FULL = (
    "No space left on device; free some space, or put the run on another disk with run.dir=FOLDER"
)
ONLINE = {"HF_HUB_OFFLINE": "0"}
"""As in the server: a tokenizer's folder tells which."""
READ_ONLY = "Read-only file system; choose a writable folder with run.dir=FOLDER"


pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(why_not() is not None, reason=str(why_not())),
]


def command(folder: str, name: str) -> list[str]:
    return [word.format(dir=folder, name=name) for word in COMMAND]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model, data and an undisturbed run, `runs/calm`."""
    place = tmp_path_factory.mktemp("place")
    digits_folder(place / "model")
    (place / "mine.yaml").write_text("rollout: {engine: {slots: 16}}\n")
    row = {"data_source": "digits", "prompt": "12:", "reward_model": {"ground_truth": "12"}}
    (place / "rows.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    in_own_process(*command("runs", "calm"), folder=place, environment=ONLINE).check()
    return place


@dataclass(frozen=True)
class Ended:
    """A run that was refused something, then maybe continued."""

    refused: Outcome
    failed: Path
    """What lay on the disk after the first command."""
    continued: Outcome | None
    resumed: Path
    """And after the second."""


def carry_out(place: Path, job: Job, mounting: Server) -> Ended:
    """The job, in a namespace of its own; `place` is as before afterwards."""
    for name in ("failed", "resumed", DISK.name):
        shutil.rmtree(place / name, ignore_errors=True)
    (place / DISK).mkdir()
    stage("begin", job, place, mounting)
    refused = said(place, mounting)
    stage("mend", job, place, mounting)
    continued = said(place, mounting) if job.goes_on else None
    stage("end", job, place, mounting)
    assert list((place / DISK).iterdir()) == []
    return Ended(refused, place / "failed" / "full", continued, place / "resumed" / "full")


def stage(name: str, job: Job, place: Path, mounting: Server) -> None:
    words = [name, json.dumps(asdict(job))]
    assert mounting.start(small_disk.__name__, words, folder=place).wait() == 0


def said(place: Path, mounting: Server) -> Outcome:
    """What the command says on the small disk."""
    return in_forked_process(
        mounting, *command(DISK.name, "full"), folder=place, environment=ONLINE
    )


def pages(run: Path, *names: str) -> int:
    """What files of a run take, those below folders included."""
    paths = [path for name in names for path in (run / name, *(run / name).rglob("*"))]
    return sum(page_count(path.stat().st_size) for path in paths if path.is_file())


def check(ended: Ended, place: Path, line: str, saved: int) -> None:
    """One line and nothing spoilt; of a run that went on, the bits of the undisturbed one."""
    assert ended.refused.code == 2, ended.refused
    assert ended.refused.err == f"winnow: {line}\n"
    assert "Traceback" not in ended.refused.out
    check_folder(ended.failed, saved)
    if ended.continued is None:
        return
    assert ended.continued.code == 0, ended.continued
    assert ended.continued.err == ""
    assert differences(place / "runs" / "calm", ended.resumed) == []


def check_folder(run: Path, saved: int) -> None:
    """Every file is whole, and the checkpoints up to step `saved` can be used."""
    if not run.exists():
        return
    assert list(leftovers(run)) == []
    for path in (run / "metrics.jsonl", run / "log.txt"):
        assert not path.exists() or path.read_bytes()[-1:] in (b"", b"\n")
    if (run / "metrics.jsonl").exists():
        read_metrics(run / "metrics.jsonl")
    for folder in (run / "rollouts", run / "eval"):
        if list_step_files(folder):
            read_rollouts(folder)
    found = checkpoints_in(run / "checkpoints")
    assert [checkpoint.step for checkpoint in found] == list(range(1, saved + 1))
    for checkpoint in found:
        verify(checkpoint)


@dataclass(frozen=True)
class Full:
    """When the disk fills, and what it still takes."""

    refused: str
    """The file that is named."""
    after: str = ""
    """It fills once this is there; before the run when empty."""
    takes: tuple[str, ...] = ()
    """Files of the undisturbed run that still fit."""
    more: int = 0
    """Pages beside them, of which the refused file gets the first."""
    saved: int = 0
    """Step of the newest checkpoint then."""
    until: str | None = None
    """There is space again once this is there."""
    goes_on: bool = False
    """Whether the run is continued, which takes as long again."""


LINE = 1
"""Pages that a line of metrics needs at most, when it does not fit into the last one."""
START = (
    *(".begun-here", "config.yaml", ".lock", "log.txt", "tokenizer.json", "model.json"),
    "eval/step-0.parquet",
)
MODEL = "checkpoints/step-2/model"
SMALL = f"{MODEL}/config.json", f"{MODEL}/generation_config.json"
STATE = (MODEL, "checkpoints/step-2/state.safetensors", "checkpoints/step-2/config.yaml")
CASES = {
    "the first file of all": Full(".begun-here"),
    "the middle of an evaluation": Full("eval/step-0.parquet", takes=START, more=-1, goes_on=True),
    "the middle of a step's rollouts": Full(
        "rollouts/step-2.parquet", "rollouts/step-1.parquet", more=1, saved=1, goes_on=True
    ),
    "the middle of a line of metrics": Full(
        "metrics.jsonl",
        "rollouts/step-1.parquet",
        ("rollouts/step-2.parquet", "ledger.parquet/step-2.parquet"),
        saved=1,
        goes_on=True,
    ),
    "the evaluation of the last step": Full(
        f"eval/step-{STEPS}.parquet",
        f"rollouts/step-{STEPS - 1}.parquet",
        (f"rollouts/step-{STEPS}.parquet", f"ledger.parquet/step-{STEPS}.parquet"),
        more=1,
        saved=STEPS - 1,
    ),
}


def full_disk(case: Full, place: Path) -> Job:
    free = pages(place / "runs" / "calm", *case.takes) + case.more
    return Job(case.after, free, case.until, goes_on=case.goes_on)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_full_disk_is_named_and_spoils_nothing(case: Full, place: Path, mounting: Server) -> None:
    ended = carry_out(place, full_disk(case, place), mounting)
    check(ended, place, f"cannot write disk/full/{case.refused}: {FULL}", case.saved)


STEP_2 = Full(
    "checkpoints/step-2",
    "rollouts/step-1.parquet",
    ("rollouts/step-2.parquet", "ledger.parquet/step-2.parquet"),
    more=LINE,
    saved=1,
    until="rollouts/step-2.parquet",
)
"""The thread that saves is refused; when training learns of it there is space again."""


CHECKPOINTS = {
    "the weights": replace(STEP_2, takes=(*STEP_2.takes, *SMALL)),
    "the manifest": replace(STEP_2, takes=(*STEP_2.takes, *STATE), goes_on=True),
}


@pytest.mark.parametrize("case", CHECKPOINTS.values(), ids=CHECKPOINTS)
def test_a_checkpoint_that_does_not_fit_spoils_nothing(
    case: Full, place: Path, mounting: Server
) -> None:
    ended = carry_out(place, full_disk(case, place), mounting)
    line = f"cannot save the checkpoint disk/full/{STEP_2.refused}: {FULL}"
    check(ended, place, line, STEP_2.saved)


def cut_off(place: Path, step: int) -> str:
    """A copy of the undisturbed run as it was after a step, its metrics aside."""
    run = place / "cut"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(place / "runs" / "calm", run)
    for checkpoint in checkpoints_in(run / "checkpoints"):
        if checkpoint.step > step:
            shutil.rmtree(checkpoint.path)
    for folder in (run / "rollouts", run / "eval"):
        for number, path in list_step_files(folder):
            if number > step:
                path.unlink()
    return run.name


@pytest.mark.parametrize(
    ("folder", "said"),
    [
        (".", "write disk/full"),
        ("full", "write disk/full/.lock"),
        ("full/checkpoints", "save the checkpoint disk/full/checkpoints/step-3"),
    ],
)
def test_a_folder_that_cannot_be_written_to_is_not_called_full(
    folder: str, said: str, place: Path, mounting: Server
) -> None:
    job = Job(
        start_from=None if folder == "." else cut_off(place, 2),
        read_only=folder,
        goes_on=folder == "full/checkpoints",
    )
    ended = carry_out(place, job, mounting)
    check(ended, place, f"cannot {said}: {READ_ONLY}", 0 if folder == "." else 2)
