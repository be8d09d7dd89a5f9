"""Runs in free mode: to their end, and killed with SIGKILL and continued.

Nothing here is promised bit for bit. A continued run goes on from the same prompts, groups and
counters: what the checkpoint holds of an answer is the beginning of what the run keeps of it.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks.kill import STEPS, leftovers
from tests.fault.quick_lab import QuickLab

from winnow.checkpoints.checkpoint import Checkpoint, checkpoints_in, load_state
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts
from winnow.sampling.groups import AnswerState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
SETTINGS = (
    *("run.deterministic=false", "sampling.lookahead=1", "trainer.save_every=1"),
    *("trainer.keep_last=null", "observe.rollout_text_groups=1000"),
)


@dataclass(frozen=True)
class Killed:
    """A run that was killed, what its newest checkpoint held then, and the run's end."""

    run: Path
    step: int
    state: dict[str, Any]


@pytest.fixture(scope="module")
def killed(lab: QuickLab) -> Killed:
    run = lab.run("free")
    process = lab.start("free", *SETTINGS, pauses={3: 0.0})
    lab.stands_still(process, "free", 3)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    newest = checkpoints_in(run / "checkpoints")[-1]
    assert 1 <= newest.step < STEPS
    state = load_state(newest)
    assert lab.start("free", *SETTINGS).wait(300) == 0
    return Killed(run, newest.step, state)


def written(answer: AnswerState) -> list[int]:
    """The tokens that a checkpoint holds of an answer."""
    if answer.trajectory is not None:
        return [int(i) for i in answer.trajectory.token_ids]
    return [] if answer.prefix is None else [int(i) for i in answer.prefix.token_ids]


def test_a_killed_run_goes_on_to_its_end_and_leaves_nothing_behind(killed: Killed) -> None:
    records = read_metrics(killed.run / "metrics.jsonl")
    assert [record["step"] for record in records] == list(range(STEPS + 1))
    assert all(np.isfinite(record["actor/loss"]) for record in records[1:])
    assert checkpoints_in(killed.run / "checkpoints")[-1].step == STEPS
    assert list(leftovers(killed.run)) == []
    assert f"after step {killed.step} of {STEPS}" in (killed.run / "log.txt").read_text()


def test_every_token_that_the_checkpoint_holds_begins_an_answer_of_the_run(killed: Killed) -> None:
    groups = killed.state["sampler"]["ledger"]["groups"]
    carried = [*groups.open.values(), *groups.qualified.values()]
    unfinished = [a for group in carried for a in group.answers if a.trajectory is None]
    assert any(map(written, unfinished)), "nothing was under way: the test is empty"
    state = load_state(Checkpoint(killed.run / f"checkpoints/step-{STEPS}", STEPS))
    last = state["sampler"]["ledger"]["groups"]
    still = last.open | last.qualified
    rows = read_rollouts(killed.run / "rollouts").to_pylist()
    assert any(row["newest_version"] > row["oldest_version"] for row in rows)
    ended = {(row["group"], row["answer"]): row for row in rows}
    for group in carried:
        for place, answer in enumerate(group.answers):
            row = ended.get((group.id, place))
            if row is None:
                later, uid = written(still[group.id].answers[place]), None
            else:
                later, uid = row["token_ids"], row["prompt_uid"]
                assert row["step"] > killed.step
            known = written(answer)
            assert later[: len(known)] == known
            assert uid in (None, group.prompt.uid)
