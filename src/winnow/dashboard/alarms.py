"""Findings of the rules of `winnow doctor` in a run, made from its figures as they grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from threading import Lock
from typing import Any

from winnow.dashboard.metrics_columns import MetricsColumns
from winnow.dashboard.runs import RunFiles
from winnow.views.diagnosis import Diagnosis
from winnow.views.doctor import ROLLOUT_COLUMNS, findings_with_answers

_ROLLOUTS = "rollouts"


class DoctorFindings:
    """The findings of a run; each step is looked at once."""

    def __init__(self, files: RunFiles) -> None:
        self._files, self._lock = files, Lock()
        self._key: Any = None
        self._rows = 0
        self._diagnosis = Diagnosis({})

    def findings(
        self, columns: MetricsColumns, settings: Mapping[str, Any], stamp: str
    ) -> list[dict[str, Any]]:
        """Return the findings up to the last step, the gravest first.

        Args:
            columns: the run's figures.
            settings: its recipe as a tree.
            stamp: changes with the recipe.

        Raises:
            UnreadableError: the newest answers cannot be read.
        """
        with self._lock:
            key = stamp, columns.rereads
            if key != self._key:
                self._key, self._rows, self._diagnosis = key, 0, Diagnosis(settings)
            for step, record in columns.records(self._rows):
                self._diagnosis.add(step, record)
                self._rows += 1
            newest = max(self._files.steps(_ROLLOUTS), default=0)
            steps = max(columns.steps, default=0)
            findings = findings_with_answers(
                self._diagnosis, steps, newest, lambda: self._read_rows(newest)
            )
            return [asdict(each) for each in findings]

    def _read_rows(self, step: int) -> list[dict[str, Any]]:
        with self._files.parquet(f"{_ROLLOUTS}/step-{step}.parquet") as file:
            rows: list[dict[str, Any]] = file.read(columns=ROLLOUT_COLUMNS).to_pylist()
        return rows
