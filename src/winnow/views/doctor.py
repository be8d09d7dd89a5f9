"""A run's diagnosis from its folder, while it goes on and afterwards."""

from __future__ import annotations

import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

from winnow.errors import WinnowError
from winnow.observe.files import RunFolder, write_atomic
from winnow.observe.format import command_line
from winnow.observe.jsonl import read_metrics
from winnow.observe.metrics import Record, grouped
from winnow.observe.rollouts import list_step_files, read_rollouts
from winnow.observe.sinks import RunInfo, Sink, Warn
from winnow.views.diagnosis import Diagnosis, RunFinding

WRONG = ("reward_flat_wrong", "filtered")
"""Findings of which wrong answers may say more."""
_WORD = re.compile(r"\w(?:[\w.,/-]*\w)?")
ROLLOUT_COLUMNS = ["group", "outcome", "accuracy", "prompt", "response"]
"""Columns of a file of answers that findings are made from."""

AnswerRows = Sequence[Mapping[str, Any]]
"""Rows of a file of answers, with `ROLLOUT_COLUMNS`."""

log = logging.getLogger(__name__)


class LiveDiagnosis(Sink):
    """A sink that reports each finding once, when a rule first fires, and writes findings.jsonl.

    Args:
        warn: takes a line for the terminal and the log.
    """

    def __init__(self, settings: Mapping[str, Any], folder: RunFolder, warn: Warn) -> None:
        self._diagnosis, self._folder, self._warn = Diagnosis(settings), folder, warn
        self._lines: list[str] = []

    def start(self, info: RunInfo) -> None:
        """Replay the metrics of a resumed run without reporting its findings again."""
        if info.first_step > 1 and self._folder.metrics.is_file():
            for record in read_metrics(self._folder.metrics):
                self._add(int(record["step"]), record)
        if self._lines or self._folder.findings.is_file():
            self._write_findings()

    def log(self, step: int, record: Record) -> None:
        for finding in self._add(step, record):
            self._warn(
                f"Warning: step {step}: {finding.name}: {finding.evidence} (likely {finding.cause};"
                f" {command_line('doctor', str(self._folder.path))})"
            )
            self._write_findings()

    def _add(self, step: int, record: Record) -> list[RunFinding]:
        new = self._diagnosis.add(step, record)
        self._lines += [f"{json.dumps(asdict(finding))}\n" for finding in new]
        return new

    def _write_findings(self) -> None:
        try:
            write_atomic(self._folder.findings, "".join(self._lines).encode())
        except WinnowError as error:
            log.warning("%s (no findings)", error)


def diagnose_run(folder: RunFolder) -> tuple[int, list[RunFinding], dict[str, str]]:
    """Diagnose a run from metrics.jsonl, config.yaml and its newest rollouts.

    Returns:
        The number of its steps, the findings, and what each rule needs that is not checked so far.

    Raises:
        WinnowError: a file of the record is damaged.
    """
    settings = folder.read_recipe()
    records = read_metrics(folder.metrics) if folder.metrics.is_file() else []
    diagnosis = Diagnosis(settings, records)
    steps = max((int(record["step"]) for record in records), default=0)
    files = list_step_files(folder.rollouts)
    rows = read_rollouts(files[-1][1]).select(ROLLOUT_COLUMNS).to_pylist() if files else []
    newest = files[-1][0] if files else 0
    findings = findings_with_answers(diagnosis, steps, newest, lambda: rows)
    return steps, findings, diagnosis.unmet_needs()


def findings_with_answers(
    diagnosis: Diagnosis, steps: int, answers_step: int, read_rows: Callable[[], AnswerRows]
) -> list[RunFinding]:
    """Return the findings, extended by what the newest answers show.

    Args:
        diagnosis: of all lines of metrics.jsonl; it stays as it is.
        steps: the last step that has a line.
        answers_step: the last step that has answers; 0 without any.
        read_rows: reads the rows of these answers.
    """
    has_line = answers_step <= steps  # a step in which nothing could be learnt has none
    if has_line and not (answers_step and any(each.name in WRONG for each in diagnosis.findings())):
        return diagnosis.findings()
    rows = read_rows()
    if not has_line:
        diagnosis = deepcopy(diagnosis)
        diagnosis.add(answers_step, make_record_from_answers(answers_step, rows))
    clause = describe_wrong_answers(rows)
    return [
        replace(each, evidence=each.evidence + clause) if each.name in WRONG else each
        for each in diagnosis.findings()
    ]


def describe_wrong_answers(rows: AnswerRows) -> str:
    """Describe how often the answers of all-wrong groups agree with each other, as a clause.

    A model that repeats one answer is more likely misread by the scorer than wrong. Empty without
    such groups.

    Args:
        rows: of rollouts.
    """
    endings = grouped(
        ((row.get("group"), " ".join(str(row.get("prompt")).split())), matches[-1])
        for row in rows
        if row.get("accuracy") == 0 and (matches := _WORD.findall(str(row.get("response") or "")))
    )
    votes = {key: Counter(each).most_common(1)[0] for key, each in endings.items() if each[1:]}
    agreed = [key for key, (_, count) in votes.items() if 2 * count > len(endings[key])]
    clause = f"; in {len(agreed)} of {len(votes)} wrong groups most answers agree"
    if not agreed:
        return f"{clause}: a hard task is more likely than a misread format" if votes else ""
    key = max(agreed, key=lambda each: votes[each][1] / len(endings[each]))
    example = f"{key[1][-60:]!r}, answered {votes[key][0][-40:]!r}"
    return f"{clause}, such as {example}: if that is correct, the scorer misreads it"


def make_record_from_answers(step: int, rows: AnswerRows) -> Record:
    """Make the metrics record of a step that sampling could not fill, from its answers."""
    fates = Counter({row["group"]: row["outcome"] for row in rows}.values())
    rights = [row["accuracy"] for row in rows if row["accuracy"] is not None]
    record = {f"sampling/groups/{fate}": float(number) for fate, number in fates.items()}
    record["sampling/accuracy"] = math.fsum(rights) / len(rights) if rights else math.nan
    nothing = {} if fates["trained"] else {"sampling/keep_rate": 0.0, "sampling/empty_bounds": 1.0}
    return {"step": step, **record, **nothing}
