"""ledger.parquet of real samplers on the scripted engine: sound, and faults are found."""

from __future__ import annotations

import asyncio
import json
import shutil
import weakref
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.engines import Prompts, ScriptedEngine, uniforms
from tests.examples import examples
from tests.winnow_command import Outcome, in_this_process

from winnow.builders.run import save_ledger
from winnow.config.rollout import SamplingConfig
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import MetricsLog
from winnow.observe.ledger import read_ledger, write_ledger
from winnow.observe.metrics import Metrics
from winnow.observe.rollouts import RolloutGroup, write_rollouts
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.rollout.weights import WeightUpdate
from winnow.run.step_metrics import record_step
from winnow.sampling.accounting import StepGroups
from winnow.sampling.stream import Sampler
from winnow.types import (
    Answer,
    Group,
    Prompt,
    Score,
    Segment,
    SettledGroup,
    Trajectory,
    VersionSpan,
)
from winnow.views.ledger_diff import (
    ASPECTS,
    TIMES,
    LedgerReport,
    check_ledger,
    diff_ledgers,
    open_ledger,
)

Rows = list[dict[str, Any]]


def ragged(request: GroupRequest, answer: AnswerRequest) -> int:
    return 2 + int(30 * uniforms(answer.seed + 1, 0, 1)[0])


async def by_first_token(prompt: Prompt, trajectory: Trajectory) -> Score:
    # Late for some prompts: in free mode fates then depend on it.
    for _ in range(int(prompt.uid) % 3 * 4):
        await asyncio.sleep(0)
    right = float(trajectory.token_ids[0] < 32)
    return Score(2 * right - 1, right)


@dataclass
class Course:
    """A sampler whose steps are booked in a run's folder as the loop does it."""

    folder: Path
    deterministic: bool = True
    seed: int = 5
    fails: Callable[[int, int, int], int | None] = lambda group, answer, attempt: None
    sampling: dict[str, Any] = field(default_factory=dict)
    prompts: Prompts = field(default_factory=Prompts)
    slots: int = 16

    def __post_init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        weakref.finalize(self, self.loop.close)
        self.run = RunFolder(self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        mode = f"run: {{deterministic: {str(self.deterministic).lower()}}}\n"
        self.run.config.write_text(mode + f"sampling: {json.dumps(self.sampling)}\n")
        free = not self.deterministic
        self.engine = ScriptedEngine(ragged, slots=self.slots, fails=self.fails, live_updates=free)
        self.sampler = Sampler(
            SamplingConfig(**{"groups_per_step": 3, "max_attempts": 1, **self.sampling}),
            engine=self.engine,
            next_prompt=lambda: self.prompts.next(),
            give_back=lambda prompts: self.prompts.give_back(prompts),
            score=by_first_token,
            n=2,
            sampling=SamplingParams(max_tokens=24),
            run_seed=self.seed,
            deterministic=self.deterministic,
        )

    def steps(self, first: int, last: int) -> Course:
        self.loop.run_until_complete(self._steps(first, last))
        return self

    async def _steps(self, first: int, last: int) -> None:
        log = MetricsLog(self.run.metrics)
        for step in range(first, last + 1):
            await self.engine.load_weights(WeightUpdate(step - 1))
            sampled = await self.sampler.step(step - 1)
            save_ledger(self.run, step, sampled)
            log.log(step, self._figures(sampled))
        log.close()

    def _figures(self, sampled: StepGroups) -> dict[str, float]:
        metrics = Metrics()
        nothing = cast(Any, SimpleNamespace(prompt_lengths=[]))
        record_step(metrics, sampled, nothing)
        return metrics.record()

    def report(self) -> LedgerReport:
        return check_ledger(open_ledger(self.folder))

    def copy(self, name: str) -> Path:
        return Path(shutil.copytree(self.folder, self.folder.with_name(name)))


def ledger(*words: str, folder: Path) -> Outcome:
    return in_this_process("ledger", *words, folder=folder)


def changed(folder: Path, step: int, change: Callable[[Rows], Rows]) -> None:
    """Rewrite the part of a step."""
    path = folder / "ledger.parquet" / f"step-{step}.parquet"
    table = pq.ParquetFile(path).read()
    pq.write_table(pa.Table.from_pylist(change(table.to_pylist()), table.schema), path)


def test_each_group_has_a_row_and_the_folder_reads_as_one_table(tmp_path: Path) -> None:
    course = Course(tmp_path / "a", sampling={"max_staleness": 1, "lookahead": 1}).steps(1, 3)
    table = read_ledger(course.run)
    assert pq.read_table(course.run.ledger).sort_by("group").equals(table)
    assert not list(course.folder.rglob("*.partial"))
    rows = table.to_pylist()
    trained = [row for row in rows if row["fate"] == "trained"]
    assert [row["learnt_step"] for row in trained] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert all(row["learnt_step"] is None for row in rows if row["fate"] != "trained")
    across = next(row for row in trained if row["admitted_version"] < row["step"] - 1)
    assert across["staleness"] == across["step"] - 1 - across["versions"][0] == 1
    assert {row["answers"] for row in rows} == {2}
    # The loader of these tests names its prompts 0, 1, 2, …
    assert [row["prompt_uid"] for row in rows] == [str(row["group"]) for row in rows]
    assert course.report().open == course.sampler.ledger.next_id - len(rows) > 0


def settled(answers: Sequence[list[int]], reward: float) -> SettledGroup:
    parts = (
        Segment(np.array(ids), np.zeros(len(ids), np.float32), (VersionSpan(0, len(ids)),))
        for ids in answers
    )
    scored = tuple(Answer(Trajectory((p,), "stop"), Score(reward, 1.0)) for p in parts)
    group = Group(0, Prompt("0", np.arange(3), "0", "scripted", 0), scored)
    return SettledGroup(group, "trained", 0, 0, 3)


def test_the_digests_change_with_one_token_one_score_and_where_an_answer_ends(
    tmp_path: Path,
) -> None:
    run = RunFolder(tmp_path)

    def crc(*answers: list[int], reward: float = 1.0) -> tuple[int, int]:
        write_ledger(run, 1, [settled(answers, reward)], 0)
        row = read_ledger(run).to_pylist()[0]
        return row["token_crc"], row["score_crc"]

    first = crc([1, 2], [3])
    assert first == crc([1, 2], [3])
    assert first[0] != crc([1, 2], [4])[0]
    assert first[0] != crc([1], [2, 3])[0]
    assert first[1] != crc([1, 2], [3], reward=np.nextafter(1.0, 2))[1]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"token_crc": 1}, "token_crc"),
        ({"score_crc": 1}, "score_crc"),
        ({"answers": 2}, "answers 2 | 1"),
        ({"versions": [0, 1]}, "versions"),
        ({"tokens": 1}, "tokens"),
        ({}, ""),
    ],
    ids=str,
)
@pytest.mark.parametrize("has_text", [True, False])
def test_a_row_that_was_altered_is_found_by_its_answers(
    change: dict[str, Any], said: str, has_text: bool, tmp_path: Path
) -> None:
    folder = RunFolder(tmp_path)
    folder.config.write_text("run: {}\n")
    made = settled([[1, 2, 3]], 1.0)
    write_ledger(folder, 1, [made], 0)
    shown = {0} if has_text else set()
    answers = [RolloutGroup(made.group, "trained")]
    write_rollouts(folder.rollout_file(1), 1, answers, version=0, text_groups=shown, decode=str)
    changed(folder.path, 1, lambda rows: [rows[0] | change])
    is_seen = said and (has_text or said != "token_crc")  # ids are kept with the text
    told = check_ledger(open_ledger(folder.path)).faults
    assert [each.examples for each in told] == [(f"group 0 (step 1): {said}",)] * bool(is_seen)


def test_a_differences_examples_are_printed_without_escape_codes(tmp_path: Path) -> None:
    a = Course(tmp_path / "a").steps(1, 1)
    changed(b := a.copy("b"), 1, lambda rows: [rows[0] | {"prompt_uid": "\x1b[2J"}, *rows[1:]])
    said = ledger("diff", "a", "b", folder=b.parent)
    assert "\\x1b[2J" in said.out
    assert "\x1b" not in said.out


WAYS = st.fixed_dictionaries(
    {
        "deterministic": st.booleans(),
        "seed": st.integers(0, 50),
        "sampling": st.sampled_from(
            [
                {"max_staleness": 0},
                {"max_staleness": 1, "lookahead": 0.5},
                {"max_staleness": 3, "lookahead": 2},
                {"commit": "completion_order", "max_staleness": 0},
                {"commit": "completion_order", "max_staleness": 1, "lookahead": 1},
                {"max_groups_per_step": 5, "max_empty_steps": 100},
            ]
        ),
    }
)


@given(way=WAYS, failing=st.sampled_from([0, 7, 3]))
@examples(10)
def test_no_schedule_loses_a_group_or_changes_the_loaders_order(
    way: dict[str, Any], failing: int
) -> None:
    def fails(group: int, answer: int, attempt: int) -> int | None:
        return 1 if failing and group % failing == 1 and answer == 0 else None

    with TemporaryDirectory() as scratch:
        course = Course(Path(scratch) / "a", fails=fails, **way).steps(1, 4)
        report = course.report()
        assert report.faults == ()
        account = course.sampler.ledger.account
        assert report.tokens == account.booked
        assert bool(report.fates["failed"]) == bool(failing)
        again = Course(Path(scratch) / "b", fails=fails, **way).steps(1, 4)
        assert diff_ledgers(open_ledger(course.folder), open_ledger(again.folder)).same


@pytest.mark.parametrize(
    ("deterministic", "kept"),
    [(True, {"max_staleness": 0}), (False, {"max_staleness": 2, "lookahead": 1})],
)
def test_a_resume_that_skips_prompts_is_found(
    tmp_path: Path, deterministic: bool, kept: dict[str, Any]
) -> None:
    whole, faulty = (Course(tmp_path / name, deterministic, sampling=kept) for name in "ab")
    whole.steps(1, 5)
    faulty.steps(1, 2)
    faulty.prompts.cursor += 2
    faulty.steps(3, 5)
    found = ledger("diff", "a", "b", folder=tmp_path)
    assert found.code == 1
    assert "prompts: " in found.out
    assert found.out.splitlines()[-1] == "Different"


def test_a_resume_that_forgets_what_was_given_back_is_found_in_one_run(tmp_path: Path) -> None:
    course = Course(tmp_path / "a", sampling={"max_staleness": 0}).steps(1, 3)
    course.prompts.returned.pop(0)
    course.steps(4, 5)
    found = ledger("check", "a", folder=tmp_path)
    assert found.code == 1
    assert "returned prompts that were not served next" in found.out


def test_another_number_of_slots_consumes_the_same_where_nothing_is_carried(tmp_path: Path) -> None:
    for name, slots in (("a", 16), ("b", 4)):
        Course(tmp_path / name, sampling={"max_staleness": 0}, slots=slots).steps(1, 5)
        course = Course(tmp_path / f"{name}-carried", sampling={"max_staleness": 1}, slots=slots)
        course.steps(1, 5)
    found = ledger("diff", "a", "b", folder=tmp_path)
    assert found.code == 0
    assert "Returned groups differ: " in found.out
    again = ledger("diff", "a", "a", folder=tmp_path)
    assert "given back" not in again.out
    assert ledger("diff", "a-carried", "b-carried", folder=tmp_path).code == 1
    assert ledger("diff", "a-carried", "b-carried", "--no-order", folder=tmp_path).code == 0


def test_a_ledger_without_turns_can_be_read_and_its_turns_are_the_admission_indices(
    tmp_path: Path,
) -> None:
    older = Course(tmp_path / "a").steps(1, 3).copy("b")
    giving_back = Course(tmp_path / "c", sampling={"max_staleness": 0}).steps(1, 3).folder
    for folder in (older, giving_back):
        for path in (folder / "ledger.parquet").iterdir():
            pq.write_table(pq.ParquetFile(path).read().drop_columns("turn"), path)
        assert ledger("check", folder.name, folder=tmp_path).code == 0
    assert ledger("diff", "a", "b", folder=tmp_path).code == 0
    changed(older, 2, lambda rows: [rows[0] | {"tokens": 0}, *rows[1:]])
    (older / "metrics.jsonl").unlink()
    found = ledger("diff", "a", "b", folder=tmp_path)
    assert f"turn {read_ledger(RunFolder(older)).filter(pc.field('step') == 2)['group'][0]}" in (
        found.out
    )


def learn_late(rows: Rows) -> Rows:
    return [row | {"learnt_step": row["learnt_step"] and 3, "step": 3} for row in rows]


def repeat_prompt(rows: Rows) -> Rows:
    repeated = {key: rows[0][key] for key in ("turn", "prompt_uid")}
    return [rows[0], rows[1] | repeated]


@pytest.mark.parametrize(
    ("change", "faults"),
    [
        (lambda rows: rows[1:], ["groups lost: 1", "groups without a fate: 1"]),
        (lambda rows: [rows[0], *rows], ["groups with more than one row: 1"]),
        (lambda rows: [rows[0] | {"turn": -1}, *rows[1:]], ["prompts lost: 1"]),
        (repeat_prompt, ["prompts in more than one group: 1"]),
        (learn_late, ["groups learnt out of order: 1"]),
        (
            lambda rows: [rows[0] | {"tokens": rows[0]["tokens"] - 1}, *rows[1:]],
            ["sums that differ from metrics.jsonl: 1"],
        ),
    ],
)
def test_a_ledger_that_does_not_add_up_is_found(
    tmp_path: Path, change: Callable[[Rows], Rows], faults: list[str]
) -> None:
    course = Course(tmp_path / "a", sampling={"max_staleness": 1, "lookahead": 1}).steps(1, 3)
    assert ledger("check", "a", folder=tmp_path).code == 0
    changed(course.folder, 1, change)
    found = ledger("check", "a", folder=tmp_path)
    assert found.code == 1
    assert all(fault in found.out for fault in faults)


def test_each_column_is_compared_under_its_own_name(tmp_path: Path) -> None:
    course = Course(tmp_path / "a").steps(1, 2)
    for column, aspect in [(c, aspect) for aspect, columns in ASPECTS.items() for c in columns]:

        def other(rows: Rows, column: str = column) -> Rows:
            was = rows[0][column]
            if type(was) is int:
                now: Any = was + 1
            elif isinstance(was, list):
                now = [*was, 9]
            else:
                now = "x" if isinstance(was, str) else not was
            return [rows[0] | {column: now}, *rows[1:]]

        changed(course.copy(f"b-{column}"), 1, other)
        found = diff_ledgers(open_ledger(course.folder), open_ledger(tmp_path / f"b-{column}"))
        assert [(each.what, each.count) for each in found.differences] == [(aspect, 1)], column
        assert found.differences[0].examples[0].startswith("turn 0: ")
        assert not found.same


@pytest.mark.parametrize("column", TIMES)
def test_when_a_group_was_settled_is_told_and_makes_no_difference(
    tmp_path: Path, column: str
) -> None:
    course = Course(tmp_path / "a").steps(1, 2)

    def late(rows: Rows) -> Rows:
        at = next(i for i, row in enumerate(rows) if row["fate"] != "trained")
        rows[at][column] -= 1
        return rows

    changed(course.copy("b"), 2, late)
    (tmp_path / "b" / "metrics.jsonl").unlink()  # of which its sums are no longer those
    found = ledger("diff", "a", "b", folder=tmp_path)
    assert (found.code, found.out.splitlines()[-1][:6]) == (0, "Same: ")
    assert "Admission or end times differ for 1 groups:" in found.out
    assert f"{column} " in found.out


def test_token_ids_that_lie_elsewhere_are_left_out_and_that_is_said(tmp_path: Path) -> None:
    course = Course(tmp_path / "a").steps(1, 2)
    changed(course.copy("b"), 1, lambda rows: [row | {"token_crc": None} for row in rows])
    found = ledger("diff", "a", "b", folder=tmp_path)
    assert found.code == 0
    rows = read_ledger(RunFolder(tmp_path / "a")).filter(pc.field("step") == 1).num_rows
    assert f"Token ids of {rows} groups were not recorded and are not compared" in found.out


def test_runs_of_unlike_length_differ_and_can_be_compared_as_far_as_both_go(tmp_path: Path) -> None:
    Course(tmp_path / "a").steps(1, 4)
    Course(tmp_path / "b").steps(1, 3)
    found = ledger("diff", "a", "b", folder=tmp_path)
    assert found.code == 1
    assert "last step: 1\n      4 | 3" in found.out
    assert ledger("diff", "a", "b", "--until", "3", folder=tmp_path).code == 0
    a, b = (str(tmp_path / name) for name in "ab")
    as_json = json.loads(ledger("diff", a, b, "--json", folder=tmp_path).out)
    expected = diff_ledgers(open_ledger(a), open_ledger(b))
    assert as_json == json.loads(json.dumps({"same": False, **asdict(expected)}))


def test_free_runs_may_differ_in_their_fates_and_not_in_their_prompts(tmp_path: Path) -> None:
    one = Course(tmp_path / "a", False, sampling={"max_staleness": 2, "lookahead": 1}).steps(1, 3)
    two = Course(tmp_path / "b", False, 6, sampling={"max_staleness": 2, "lookahead": 1})
    two.steps(1, 3)
    assert one.report().fates != two.report().fates
    assert ledger("diff", "a", "b", folder=tmp_path).code == 0
    assert ledger("diff", "a", "b", "--order", folder=tmp_path).code == 1


BAD = {
    "no run": (lambda run: (run / "config.yaml").unlink(), "is not a run's folder"),
    "no ledger": (
        lambda run: shutil.rmtree(run / "ledger.parquet"),
        "a has no ledger.parquet: no step has finished yet, or an older winnow wrote the run",
    ),
    "a step missing": (
        lambda run: (run / "ledger.parquet" / "step-1.parquet").unlink(),
        "ledger.parquet has no file for step 1 of 2",
    ),
    "a damaged part": (
        lambda run: (run / "ledger.parquet" / "step-2.parquet").write_bytes(b"PAR1"),
        "ledger.parquet/step-2.parquet: ",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_compared_is_told_in_one_line(tmp_path: Path, case: str) -> None:
    course = Course(tmp_path / "a").steps(1, 2)
    course.copy("b")
    damage, line = BAD[case]
    damage(course.folder)
    for words in (["check", "a"], ["diff", "b", "a"]):
        found = ledger(*words, folder=tmp_path)
        assert found.code == 2
        assert line in found.err
        assert found.err.count("\n") == 1
        assert not found.out
