"""Check a run's ledger, and compare two runs by what they consumed.

Where a run repeats bit for bit (`run.deterministic=true`, any trainer.mode but async), two ledgers
are compared group by group, each by the turn of its prompt; groups that were given back are left
out, because they come again. Elsewhere fates depend on how long things took, and the promise is
another: no admission index is lost or told twice, groups learn in the order of their admission, and
prompts come in the loader's order, given back ones first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from winnow.errors import WinnowError
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics
from winnow.observe.ledger import read_ledger, score_crc, token_crc
from winnow.observe.metrics import OUTCOMES
from winnow.observe.rollouts import read_rollouts
from winnow.types import BoolArray, IntArray

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
end of a group that is not trained. They are told, and make no difference."""
_SUMMED = ["step", "group", "answers", "tokens", "versions", "token_crc", "score_crc"]
_ANSWERS = [
    *("group", "reward", "accuracy", "response_tokens"),
    *("oldest_version", "newest_version", "token_ids", "versions"),
]
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
    table: pa.Table
    """In the order of admission."""
    metrics: Sequence[Mapping[str, float]]
    """Records of the steps that the ledger has; a step being finished may lack its own."""
    is_exact: bool
    """True if the run promises the same bits whenever it is repeated."""
    in_order: bool
    """True if groups are committed in admission order."""

    @property
    def steps(self) -> int:
        """The last step of the ledger."""
        return int(pc.max(self.table["step"]).as_py() or 0)

    def until(self, step: int) -> LedgerRun:
        """Return the run as it was after a step."""
        table = self.table.filter(pc.field("step") <= step)
        metrics = [record for record in self.metrics if record["step"] <= step]
        return LedgerRun(self.folder, table, metrics, self.is_exact, self.in_order)


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
    last = int(pc.max(table["step"]).as_py() or 0)
    if until is not None and until > last:
        raise WinnowError(f"{folder.path} has no step {until} yet: its last is {last}")
    records = read_metrics(folder.metrics) if folder.metrics.is_file() else []
    settings = _settings(folder)
    exact = settings("run", "deterministic") is not False
    run = LedgerRun(
        folder.path,
        table,
        [record for record in records if 1 <= record["step"] <= last],
        exact and settings("trainer", "mode", "name") != "async",
        settings("sampling", "commit") != "completion_order",
    )
    return run if until is None else run.until(until)


def check(run: LedgerRun) -> LedgerReport:
    """Check a ledger against itself, metrics.jsonl and rollouts/: nothing lost, nothing twice."""
    table = run.table
    groups = _ints(table, "group")
    fates, tokens = np.array(table["fate"].to_pylist()), _ints(table, "tokens")
    faults = [*_twice(groups), *_order(run, groups), *_turns(run)]
    waiting = -1
    if run.metrics and run.metrics[-1]["step"] == run.steps:
        admitted = sum(int(record["sampling/groups/admitted"]) for record in run.metrics)
        waiting = admitted - len(np.unique(groups))
        last = run.metrics[-1]
        carried = sum(
            int(last[f"sampling/groups/carried_{kind}"]) for kind in ("qualified", "open")
        )
        if waiting != carried:
            faults.append(
                _fault(
                    "groups without a fate",
                    [f"{admitted} admitted, {waiting} have no row, and {carried} wait for a cut"],
                )
            )
    faults += [
        *_accounts(run, fates, tokens),
        _fault("groups unlike rollouts/", [*_unlike_rollouts(run)]),
    ]
    return LedgerReport(
        str(run.folder),
        run.steps,
        len(groups),
        waiting,
        {fate: int((fates == fate).sum()) for fate in OUTCOMES},
        {fate: int(tokens[fates == fate].sum()) for fate in OUTCOMES},
        tuple(fault for fault in faults if fault.count),
    )


def diff(a: LedgerRun, b: LedgerRun, exact: bool | None = None) -> LedgerDiff:
    """Compare two runs' ledgers.

    Args:
        exact: group by group; None: if both runs promise that.
    """
    exact = (a.is_exact and b.is_exact) if exact is None else exact
    found: list[Difference] = []
    blind, times = 0, _fault("times", [])
    if a.steps != b.steps:
        found.append(Difference("last step", abs(a.steps - b.steps), (f"{a.steps} | {b.steps}",)))
    if exact:
        (*compared, times), blind = _group_by_group(_kept(a.table), _kept(b.table))
        found += compared
    else:
        found.append(_prompt_order(a, b))
    found = [difference for difference in found if difference.count]
    return LedgerDiff(check(a), check(b), exact, tuple(found), times, _given_back(a, b), blind)


def _group_by_group(a: pa.Table, b: pa.Table) -> tuple[list[Difference], int]:
    """Compare each aspect of the groups that both have, their times last.

    Returns:
        The differences, and how many groups lack token ids.
    """
    (left, at_a), (right, at_b) = (np.unique(_ints(t, "turn"), return_index=True) for t in (a, b))
    found = [
        _listed(f"groups of {name} alone", np.setdiff1d(mine, other), "turn")
        for name, mine, other in (("A", left, right), ("B", right, left))
    ]
    shared, in_a, in_b = np.intersect1d(left, right, return_indices=True)
    a, b = a.take(at_a[in_a]), b.take(at_b[in_b])
    blind = pc.or_(pc.is_null(a["token_crc"]), pc.is_null(b["token_crc"]))
    blind = blind.to_numpy(zero_copy_only=False).astype(bool)
    for aspect, columns in {**ASPECTS, "times": TIMES}.items():
        unlike = np.zeros(len(shared), dtype=bool)
        for name in columns:
            differs = _unlike(a[name], b[name])
            unlike |= differs & ~blind if name == "token_crc" else differs
        examples = [
            f"turn {shared[at]}: {_shown(a, columns, at)} | {_shown(b, columns, at)}"
            for at in np.flatnonzero(unlike)[:SHOWN].tolist()
        ]
        found.append(Difference(aspect, int(unlike.sum()), tuple(examples)))
    return found, int(blind.sum())


def _unlike(a: pa.ChunkedArray, b: pa.ChunkedArray) -> BoolArray:
    if pa.types.is_list(a.type):
        pairs = zip(a.to_pylist(), b.to_pylist(), strict=True)
        return np.array([mine != other for mine, other in pairs], dtype=bool)
    same = pc.or_kleene(pc.equal(a, b), pc.and_(pc.is_null(a), pc.is_null(b)))
    return np.asarray(~pc.fill_null(same, False).to_numpy(zero_copy_only=False).astype(bool))


def _shown(table: pa.Table, columns: Iterable[str], at: int) -> str:
    return ", ".join(f"{name} {table[name][at].as_py()}" for name in columns)


def _prompt_order(a: LedgerRun, b: LedgerRun) -> Difference:
    """Compare the prompts that the loaders gave out, as far as both runs have a row of them."""
    left, right = (dict(zip(*_columns(run, "turn", "prompt_uid"), strict=True)) for run in (a, b))
    unlike = [
        f"turn {turn}: {left[turn]} | {right[turn]}"
        for turn in sorted(left.keys() & right.keys())
        if left[turn] != right[turn]
    ]
    return _fault("prompts", unlike)


def _given_back(a: LedgerRun, b: LedgerRun) -> Difference:
    """Compare the groups that were given back: which these are depends on how many were open."""
    names = ("group", "turn", "step", "fate", "tokens", "score_crc", "returned")
    found = [{row for row in zip(*_columns(run, *names), strict=True) if row[-1]} for run in (a, b)]
    return _fault("given back", [f"group {row[0]}" for row in sorted(found[0] ^ found[1])])


def _turns(run: LedgerRun) -> Iterator[Difference]:
    """Look for prompts that were lost, came twice, or not in their turn when given back."""
    if run.table["turn"].null_count:  # an older winnow's
        return
    first = dict[int, str]()
    wrong = list[str]()
    for group, turn, uid in zip(*_columns(run, "group", "turn", "prompt_uid"), strict=True):
        if (due := first.setdefault(turn, uid)) != uid:
            wrong.append(f"group {group} has {uid}, but {due} was given back and is due")
    yield _fault("prompts given back that did not come next", wrong)
    kept, counts = np.unique(_ints(_kept(run.table), "turn"), return_counts=True)
    yield _listed("prompts in more than one group", kept[counts > 1], "turn")
    if run.in_order:
        trained = run.table.filter(pc.field("fate") == "trained")
        reached = max(_ints(trained, "turn"), default=0)
        yield _listed("prompts lost", np.setdiff1d(np.arange(reached), kept), "turn")


def _twice(groups: IntArray) -> Iterator[Difference]:
    found, counts = np.unique(groups, return_counts=True)
    yield _listed("groups with more than one row", found[counts > 1])


def _order(run: LedgerRun, groups: IntArray) -> Iterator[Difference]:
    """Look for groups that were passed over, or learnt out of order, where commits are in order."""
    if not run.in_order:
        return
    trained = run.table.filter(pc.equal(run.table["fate"], "trained"))
    learnt, steps = _ints(trained, "group"), _ints(trained, "learnt_step")
    back = np.flatnonzero(np.diff(steps) < 0) + 1
    yield _listed("groups learnt before an earlier one", learnt[back])
    reached = int(learnt.max()) if len(learnt) else 0
    yield _listed("groups lost", np.setdiff1d(np.arange(reached), groups))


def _accounts(
    run: LedgerRun,
    fates: NDArray[np.str_],
    tokens: IntArray,
) -> Iterator[Difference]:
    """Compare groups and tokens by step and fate with metrics.jsonl."""
    steps, unlike = _ints(run.table, "step"), []
    size = run.steps + 1
    for fate in OUTCOMES:
        of_fate = fates == fate
        groups_by_step = np.bincount(steps[of_fate], minlength=size)
        tokens_by_step = np.zeros(size, dtype=np.int64)
        np.add.at(tokens_by_step, steps[of_fate], tokens[of_fate])
        for record in run.metrics:
            step = int(record["step"])
            for what, booked in (("groups", groups_by_step), ("tokens", tokens_by_step)):
                noted = record.get(f"sampling/{what}/{fate}")
                if noted is not None and int(noted) != booked[step]:
                    unlike.append(
                        f"step {step}: {booked[step]} {what} {fate}, {int(noted)} in metrics.jsonl"
                    )
    yield _fault("sums that metrics.jsonl has otherwise", unlike)


def _unlike_rollouts(run: LedgerRun) -> Iterator[str]:
    """Compare each group with its answers in rollouts/, as far as these keep what it sums up."""
    folder = RunFolder(run.folder)
    by_step = dict[int, list[dict[str, Any]]]()
    for row in run.table.select(_SUMMED).to_pylist():
        by_step.setdefault(row["step"], []).append(row)
    for step, rows in by_step.items():
        if not folder.rollout(step).is_file():
            continue
        answers = dict[int, list[dict[str, Any]]]()
        for answer in read_rollouts(folder.rollout(step)).select(_ANSWERS).to_pylist():
            answers.setdefault(answer["group"], []).append(answer)
        for row in rows:
            unlike = [*_unlike_answers(row, answers.get(row["group"], []))]
            if unlike:
                yield f"group {row['group']} (step {step}): {', '.join(unlike)}"


def _unlike_answers(row: Mapping[str, Any], answers: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if row["answers"] != len(answers):
        yield f"answers {row['answers']} | {len(answers)}"
        return
    if row["score_crc"] != score_crc((each["reward"], each["accuracy"]) for each in answers):
        yield "score_crc"
    if row["tokens"] < sum(each["response_tokens"] for each in answers):
        yield "tokens"
    if any(each["token_ids"] is None for each in answers):
        wrote = {each[end] for each in answers for end in ("oldest_version", "newest_version")}
        known = {min(row["versions"], default=None), max(row["versions"], default=None)}
        wrote = {min(wrote - {None}, default=None), max(wrote - {None}, default=None)}
    else:
        ids = [[np.array(each["token_ids"], np.int64)] for each in answers]
        if row["token_crc"] not in (None, token_crc(ids)):
            yield "token_crc"
        known = {*row["versions"]}
        wrote = {version for each in answers for version in each["versions"]} - {-1}
    if known != wrote:
        yield "versions"


def _ints(table: pa.Table, name: str) -> IntArray:
    column = pc.coalesce(table[name], table["group"]) if name == "turn" else table[name]
    return column.to_numpy().astype(np.int64)  # type: ignore[no-any-return]


def _columns(run: LedgerRun, *names: str) -> list[list[Any]]:
    given = {"turn": _ints(run.table, "turn").tolist()}
    return [given.get(name) or run.table[name].to_pylist() for name in names]


def _kept(table: pa.Table) -> pa.Table:
    """Return the groups that were not given back: one for each turn."""
    return table.filter(pc.invert(table["returned"]))


def _listed(what: str, numbers: IntArray, name: str = "group") -> Difference:
    return _fault(what, [f"{name} {number}" for number in numbers.tolist()])


def _fault(what: str, found: Sequence[str]) -> Difference:
    return Difference(what, len(found), tuple(found[:SHOWN]))


def _settings(folder: RunFolder) -> Any:
    """Return a reader of the recipe's values by key; None where it does not have one."""
    recipe = folder.recipe()

    def value(*keys: str) -> Any:
        found: Any = recipe
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found

    return value
