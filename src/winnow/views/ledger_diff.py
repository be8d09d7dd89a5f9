"""Check a run's ledger, and compare two runs by what they consumed.

Where a run repeats bit for bit (`run.deterministic=true`, any trainer.mode but async), two ledgers
are compared group by group, each by the turn of its prompt; groups that were given back are left
out, because they come again. Elsewhere fates depend on how long things took, and the promise is
another: no admission index is lost or repeated, groups learn in the order of their admission, and
prompts come in the loader's order, given back ones first.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np

from winnow.config.load import flatten
from winnow.errors import WinnowError
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics
from winnow.observe.ledger import read_ledger, score_crc, token_crc
from winnow.observe.metrics import grouped
from winnow.observe.rollouts import read_rollouts
from winnow.types import FATES

Row = Mapping[str, Any]
"""A group, by the columns of `winnow.observe.ledger`; its turn is its index where it has none."""
Rows = Mapping[int, Row]
"""Groups by their turns."""
ASPECTS: Mapping[str, tuple[str, ...]] = {
    "prompts": ("prompt_uid", "problem"),
    "fates": ("fate",),
    "learning steps": ("learnt_step",),
    "tokens": ("answers", "tokens", "token_crc"),
    "scores": ("score_crc",),
    "weight versions": ("versions",),
}
"""Columns that are compared, by what a person asks for."""
TIMES = ("step", "admitted_version", "staleness")
"""Columns of what may happen at another time and change nothing that is learnt: admission, and the
end of a group that is not trained. They are reported, and make no difference."""
_ANSWERS = [
    *("group", "reward", "accuracy", "response_tokens"),
    *("oldest_version", "newest_version", "token_ids", "versions"),
]
_WAITING = ("qualified", "open")
SHOWN = 3
"""Examples kept of each kind of difference."""


@dataclass(frozen=True)
class Difference:
    """One kind of difference between two ledgers, or of fault in one."""

    what: str
    count: int
    examples: tuple[str, ...]
    """The first few, by turn or admission index."""


@dataclass(frozen=True)
class LedgerRun:
    """A run's ledger and what it is judged by."""

    folder: Path
    rows: Sequence[Row]
    """In the order of admission."""
    has_turns: bool
    """False for ledgers of an older winnow."""
    metrics: Sequence[Mapping[str, float]]
    """Records of the steps that the ledger has; a step being finished may lack its own."""
    is_exact: bool
    """True if the run promises the same bits whenever it is repeated."""
    in_order: bool
    """True if groups are committed in admission order."""

    @property
    def steps(self) -> int:
        """The last step of the ledger."""
        return max((row["step"] for row in self.rows), default=0)

    @property
    def consumed(self) -> list[Row]:
        """The groups that were not given back: one for each turn."""
        return [row for row in self.rows if not row["returned"]]


@dataclass(frozen=True)
class LedgerReport:
    """The contents of a ledger in numbers, and its faults."""

    run: str
    steps: int
    groups: int
    open: int
    """Groups admitted up to the last step that have no fate yet; -1 without metrics.jsonl."""
    fates: Mapping[str, int]
    tokens: Mapping[str, int]
    """Generated tokens by fate."""
    faults: tuple[Difference, ...]


@dataclass(frozen=True)
class LedgerDiff:
    """Two ledgers compared."""

    a: LedgerReport
    b: LedgerReport
    exact: bool
    """Compared group by group; else by what runs promise that depend on time."""
    differences: tuple[Difference, ...]
    times: Difference
    """Groups that differ in `TIMES`."""
    given_back: Difference
    """Groups that one of the runs alone gave back, or at another step."""
    not_compared: int = 0
    """Groups whose token ids one of the runs did not have at hand."""

    @property
    def same(self) -> bool:
        """Return whether the runs consumed the same, and neither ledger has a fault."""
        return not (self.differences or self.a.faults or self.b.faults)

    def as_json(self) -> dict[str, Any]:
        """Return it as plain values."""
        return {"same": self.same, **asdict(self)}


def open_ledger(path: str | Path, until: int | None = None) -> LedgerRun:
    """Read the ledger of a run, during it, after it, or in a copy of its folder.

    Args:
        until: leave out later steps.

    Raises:
        WinnowError: it is no run's folder, has no ledger, or a damaged one.
    """
    folder = RunFolder.open(path)
    table = read_ledger(folder)
    rows = table.to_pylist()
    for row in rows:
        row["turn"] = row["group"] if row["turn"] is None else row["turn"]
    last = max((row["step"] for row in rows), default=0)
    if until is not None and until > last:
        raise WinnowError(f"{folder.path} has no step {until} yet; the last step is {last}")
    last = last if until is None else until
    records = read_metrics(folder.metrics) if folder.metrics.is_file() else []
    settings = flatten(folder.read_recipe())
    exact = settings.get("run.deterministic") is not False
    return LedgerRun(
        folder.path,
        [row for row in rows if row["step"] <= last],
        not table["turn"].null_count,
        [record for record in records if 1 <= record["step"] <= last],
        exact and settings.get("trainer.mode.name") != "async",
        settings.get("sampling.commit") != "completion_order",
    )


def check_ledger(run: LedgerRun) -> LedgerReport:
    """Check a ledger against itself, metrics.jsonl and rollouts/: nothing lost, nothing twice."""
    groups = [row["group"] for row in run.rows]
    faults = [_numbered("groups with more than one row", _duplicates(groups))]
    faults += [*_check_order(run, groups), *_check_turns(run)]
    waiting = -1
    if run.metrics and (last := run.metrics[-1])["step"] == run.steps:
        admitted = sum(int(record["sampling/groups/admitted"]) for record in run.metrics)
        waiting = admitted - len(set(groups))
        carried = sum(int(last[f"sampling/groups/carried_{kind}"]) for kind in _WAITING)
        if waiting != carried:
            detail = f"{admitted} admitted, {waiting} have no row, and {carried} wait for a cut"
            faults.append(_difference("groups without a fate", [detail]))
    faults += [
        _check_totals(run),
        _difference("groups that differ from rollouts/", [*_rollout_mismatches(run)]),
    ]
    tokens = {fate: [row["tokens"] for row in run.rows if row["fate"] == fate] for fate in FATES}
    return LedgerReport(
        str(run.folder),
        run.steps,
        len(groups),
        waiting,
        {fate: len(each) for fate, each in tokens.items()},
        {fate: sum(each) for fate, each in tokens.items()},
        tuple(fault for fault in faults if fault.count),
    )


def diff_ledgers(a: LedgerRun, b: LedgerRun, exact: bool | None = None) -> LedgerDiff:
    """Compare two runs' ledgers.

    Args:
        exact: group by group; None: if both runs promise that.
    """
    exact = (a.is_exact and b.is_exact) if exact is None else exact
    diffs: list[Difference] = []
    blind, times = 0, _difference("times", [])
    if a.steps != b.steps:
        diffs.append(Difference("last step", abs(a.steps - b.steps), (f"{a.steps} | {b.steps}",)))
    if exact:
        (*compared, times), blind = _compare_groups(a, b)
        diffs += compared
    else:
        rows_a, rows_b = ({row["turn"]: row for row in run.rows} for run in (a, b))
        diffs.append(_compare_turns("prompts", (rows_a, rows_b), ["prompt_uid"], set()))
    diffs = [difference for difference in diffs if difference.count]
    reports, returned = (check_ledger(a), check_ledger(b)), _compare_returned(a, b)
    return LedgerDiff(*reports, exact, tuple(diffs), times, returned, blind)


def _compare_groups(a: LedgerRun, b: LedgerRun) -> tuple[list[Difference], int]:
    """Compare each aspect of the groups that both have, their times last.

    Returns:
        The differences, and how many groups lack token ids.
    """
    # Of a turn that comes twice, which is a fault, the first group counts.
    rows_a, rows_b = ({row["turn"]: row for row in reversed(run.consumed)} for run in (a, b))
    shared = rows_a.keys() & rows_b.keys()
    blind = {t for t in shared if None in (rows_a[t]["token_crc"], rows_b[t]["token_crc"])}
    differences = [
        _numbered(f"groups only in {name}", sorted(mine.keys() - other.keys()), "turn")
        for name, mine, other in (("A", rows_a, rows_b), ("B", rows_b, rows_a))
    ]
    for aspect, columns in {**ASPECTS, "times": TIMES}.items():
        differences.append(_compare_turns(aspect, (rows_a, rows_b), columns, blind))
    return differences, len(blind)


def _compare_turns(
    what: str, rows: tuple[Rows, Rows], columns: Sequence[str], blind: set[int]
) -> Difference:
    """Compare columns of the turns that both have; of `blind` ones not the token ids."""
    unlike = []
    for turn in sorted(rows[0].keys() & rows[1].keys()):
        pair = [each[turn] for each in rows]
        compared = [name for name in columns if name != "token_crc" or turn not in blind]
        if any(pair[0][name] != pair[1][name] for name in compared):
            texts = (", ".join(f"{name} {row[name]}" for name in columns) for row in pair)
            unlike.append(f"turn {turn}: {' | '.join(texts)}")
    return _difference(what, unlike)


def _compare_returned(a: LedgerRun, b: LedgerRun) -> Difference:
    """Compare the groups that were given back: which these are depends on how many were open."""
    names = ("group", "turn", "step", "fate", "tokens", "score_crc")
    groups_a, groups_b = (
        {tuple(row[name] for name in names) for row in run.rows if row["returned"]}
        for run in (a, b)
    )
    return _numbered("given back", [row[0] for row in sorted(groups_a ^ groups_b)])


def _check_turns(run: LedgerRun) -> Iterator[Difference]:
    """Look for prompts that were lost, came twice, or not in their turn when given back."""
    if not run.has_turns:
        return
    first = dict[int, str]()
    wrong = list[str]()
    for row in run.rows:
        if (due := first.setdefault(row["turn"], row["prompt_uid"])) != (uid := row["prompt_uid"]):
            wrong.append(f"group {row['group']} has {uid}, but the returned prompt {due} was due")
    yield _difference("returned prompts that were not served next", wrong)
    turns = [row["turn"] for row in run.consumed]
    yield _numbered("prompts in more than one group", _duplicates(turns), "turn")
    if run.in_order:
        reached = max((row["turn"] for row in run.rows if row["fate"] == "trained"), default=0)
        yield _numbered("prompts lost", sorted({*range(reached)}.difference(turns)), "turn")


def _check_order(run: LedgerRun, groups: Sequence[int]) -> Iterator[Difference]:
    """Look for groups that were passed over, or learnt out of order, where commits are in order."""
    if not run.in_order:
        return
    learnt = [(row["learnt_step"], row["group"]) for row in run.rows if row["fate"] == "trained"]
    back = [group for (before, _), (step, group) in pairwise(learnt) if step < before]
    yield _numbered("groups learnt out of order", back)
    reached = max((group for _, group in learnt), default=0)
    yield _numbered("groups lost", sorted({*range(reached)}.difference(groups)))


def _check_totals(run: LedgerRun) -> Difference:
    """Compare groups and tokens by step and fate with metrics.jsonl."""
    groups, tokens, unlike = Counter[Any](), Counter[Any](), []
    for row in run.rows:
        groups[row["step"], row["fate"]] += 1
        tokens[row["step"], row["fate"]] += row["tokens"]
    for fate, record in product(FATES, run.metrics):
        step = int(record["step"])
        for what, booked in (("groups", groups[step, fate]), ("tokens", tokens[step, fate])):
            noted = int(record.get(f"sampling/{what}/{fate}", booked))
            if noted != booked:
                unlike.append(f"step {step}: {booked} {what} {fate}, {noted} in metrics.jsonl")
    return _difference("sums that differ from metrics.jsonl", unlike)


def _rollout_mismatches(run: LedgerRun) -> Iterator[str]:
    """Compare each group with its answers in rollouts/, as far as these keep what it sums up."""
    for step, rows in grouped((row["step"], row) for row in run.rows).items():
        file = RunFolder(run.folder).rollout_file(step)
        if not file.is_file():
            continue
        answers = read_rollouts(file).select(_ANSWERS).to_pylist()
        by_group = grouped((answer["group"], answer) for answer in answers)
        for row in rows:
            unlike = [*_answer_mismatches(row, by_group.get(row["group"], []))]
            if unlike:
                yield f"group {row['group']} (step {step}): {', '.join(unlike)}"


def _answer_mismatches(row: Row, answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if row["answers"] != len(answers):
        yield f"answers {row['answers']} | {len(answers)}"
        return
    if row["score_crc"] != score_crc((each["reward"], each["accuracy"]) for each in answers):
        yield "score_crc"
    if row["tokens"] < sum(each["response_tokens"] for each in answers):
        yield "tokens"
    if any(each["token_ids"] is None for each in answers):
        wrote = {each[end] for each in answers for end in ("oldest_version", "newest_version")}
        versions = {min(row["versions"], default=None), max(row["versions"], default=None)}
        wrote = {min(wrote - {None}, default=None), max(wrote - {None}, default=None)}
    else:
        ids = [[np.array(each["token_ids"], np.int64)] for each in answers]
        if row["token_crc"] not in (None, token_crc(ids)):
            yield "token_crc"
        versions = {*row["versions"]}
        wrote = {version for each in answers for version in each["versions"]} - {-1}
    if versions != wrote:
        yield "versions"


def _duplicates(numbers: Iterable[int]) -> list[int]:
    return sorted(number for number, count in Counter(numbers).items() if count > 1)


def _numbered(what: str, numbers: Sequence[int], name: str = "group") -> Difference:
    return _difference(what, [f"{name} {number}" for number in numbers])


def _difference(what: str, items: Sequence[str]) -> Difference:
    return Difference(what, len(items), tuple(items[:SHOWN]))
