"""Sums over all answers of a run: each step's file is read once, in the background.

What there is so far is shown at once, with how many steps it covers. Kept are, of each step, a
histogram of lengths and of pass rates, and a few numbers of each group, so that one prompt can be
followed over the steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from threading import Lock, Thread
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from winnow.dashboard.answers import aggregate_groups, read_sampled
from winnow.dashboard.metrics_columns import round_to
from winnow.dashboard.runs import RunFiles, UnreadableError

LENGTH_BINS = 32
RATES = ("0", "to 25 %", "to 50 %", "to 75 %", "below 100 %", "1")
"""Classes of the share of a prompt's answers that are right."""
_MEANS = [
    *((name, "first") for name in ("prompt_uid", "outcome")),
    *((name, "mean") for name in ("accuracy", "reward", "response_tokens")),
]
_FIRST_LOOK_S = 0.15
"""A short run is whole when the first page asks."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StepDigest:
    """The sums of a step."""

    groups: pa.Table
    """Groups by id, with step, prompt, outcome and means."""
    lengths: np.ndarray
    """Answers by length, `LENGTH_BINS` classes up to the longest that is allowed."""
    rates: np.ndarray
    """Groups by pass rate, in the classes of `RATES`."""


class AnswerIndex:
    """The digests of a run's steps.

    Args:
        folder: of the answers, rollouts or eval.
        longest: the limit of an answer, in tokens; longer ones are counted in the last class.
    """

    def __init__(self, files: RunFiles, folder: str, longest: int) -> None:
        self._files, self._folder, self.longest = files, folder, longest
        self._lock = Lock()
        self._digests: dict[int, tuple[str, StepDigest | None]] = {}
        self._thread: Thread | None = None
        self.problems: dict[int, str] = {}
        """Steps whose file could not be read, and why."""

    def snapshot(self) -> tuple[Mapping[int, StepDigest], int, bool]:
        """Return the digests so far, the number of steps, and True once all of them are looked at.

        What is missing is read in the background.

        Raises:
            UnreadableError: the folder cannot be listed.
        """
        stamps = {step: each.stamp for step, each in self._files.steps(self._folder).items()}
        with self._lock:
            for step in [s for s in self._digests if s not in stamps]:  # a resumed run did it again
                del self._digests[step]
                self.problems.pop(step, None)
            todo = {s: stamp for s, stamp in stamps.items()
                    if self._digests.get(s, ("", None))[0] != stamp}  # fmt: skip
            is_new = bool(todo) and (self._thread is None or not self._thread.is_alive())
            if is_new:
                self._thread = Thread(target=self._read_steps, args=(todo,), daemon=True)
                self._thread.start()
            thread = self._thread
        if is_new and thread is not None:
            thread.join(_FIRST_LOOK_S)
        with self._lock:
            digests = {s: digest for s, (_, digest) in sorted(self._digests.items()) if digest}
            return digests, len(stamps), stamps.keys() <= self._digests.keys()

    def _read_steps(self, todo: Mapping[int, str]) -> None:
        # The newest first: they are what is looked at.
        for step, stamp in sorted(todo.items(), reverse=True):
            digest = None
            try:
                digest = self._read_digest(step)
                self.problems.pop(step, None)
            except UnreadableError as error:
                self.problems[step] = str(error)
            with self._lock:
                self._digests[step] = stamp, digest

    def _read_digest(self, step: int) -> StepDigest:
        name = f"{self._folder}/step-{step}.parquet"
        with self._files.explain_errors(name):
            table = read_sampled(self._files, name, [column for column, _ in _MEANS])
            groups = aggregate_groups(table, _MEANS)
            groups = groups.append_column("step", pa.array([step] * len(groups), pa.int64()))
            # Classes: 0 | (0, .25] | (.25, .5] | (.5, .75] | (.75, 1) | 1
            bounds = [1e-6, 0.25 + 1e-6, 0.5 + 1e-6, 0.75 + 1e-6, 1 - 1e-6]
            classes = np.digitize(groups["accuracy_mean"].to_numpy(), bounds)
            tokens = table["response_tokens"].to_numpy()
            bins = np.minimum(tokens * LENGTH_BINS // (self.longest + 1), LENGTH_BINS - 1)
            lengths = np.bincount(bins, minlength=LENGTH_BINS)
            return StepDigest(groups, lengths, np.bincount(classes, minlength=len(RATES)))


def prompt_history(digests: Mapping[int, StepDigest], prompt_uid: str) -> list[dict[str, Any]]:
    """List the outcomes of one prompt: a row for each group that was made of it."""
    if not digests:
        return []
    tables = [digest.groups for digest in digests.values()]
    groups = pa.concat_tables(tables, promote_options="permissive")
    rows = groups.filter(pc.equal(groups["prompt_uid_first"], prompt_uid)).to_pylist()
    return [
        {
            "step": row["step"],
            "group": row["group"],
            "outcome": row["outcome_first"],
            "accuracy": round_to(row["accuracy_mean"]),
            "reward": round_to(row["reward_mean"]),
            "length": round_to(row["response_tokens_mean"]),
        }
        for row in rows
    ]
