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

from winnow.dashboard.answers import GroupedRows, float_column, require_columns
from winnow.dashboard.metrics_columns import round_to
from winnow.dashboard.runs import RunFiles, UnreadableError

LENGTH_BINS = 32
RATES = ("0", "to 25 %", "to 50 %", "to 75 %", "below 100 %", "1")
"""Classes of the share of a prompt's answers that are right."""
_COLUMNS = ("group", "kind", "prompt_uid", "outcome", "response_tokens", "reward", "accuracy")
_FIRST_LOOK_S = 0.15
"""A short run is whole when the first page asks."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StepDigest:
    """The sums of a step; by group: admission number, hash of the prompt, means, outcome."""

    groups: np.ndarray
    prompts: np.ndarray
    accuracy: np.ndarray
    reward: np.ndarray
    length: np.ndarray
    outcomes: tuple[str, ...]
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
                digest = self._read_digest(f"{self._folder}/step-{step}.parquet")
                self.problems.pop(step, None)
            except UnreadableError as error:
                self.problems[step] = str(error)
            with self._lock:
                self._digests[step] = stamp, digest

    def _read_digest(self, name: str) -> StepDigest:
        with self._files.parquet(name) as file:
            available = set(file.schema_arrow.names)
            table = file.read(columns=[each for each in _COLUMNS if each in available])
            require_columns(table, name, *_COLUMNS)
            is_sampled = pc.equal(table["kind"], "sampled")
            if pc.any(is_sampled).as_py():
                table = table.filter(is_sampled)
            return _make_digest(table, self.longest)


def _make_digest(table: pa.Table, longest: int) -> StepDigest:
    by = GroupedRows(table)
    names = ("accuracy", "reward", "response_tokens")
    accuracy, reward, length = (
        (by.sums(float_column(table, name)) / by.counts).astype(np.float32) for name in names
    )
    # Classes: 0 | (0, .25] | (.25, .5] | (.5, .75] | (.75, 1) | 1
    classes = np.digitize(accuracy, [1e-6, 0.25 + 1e-6, 0.5 + 1e-6, 0.75 + 1e-6, 1 - 1e-6])
    lengths = table["response_tokens"].to_numpy()
    bins = np.minimum(lengths * LENGTH_BINS // (longest + 1), LENGTH_BINS - 1)
    return StepDigest(
        by.groups,
        np.array([hash(uid) for uid in by.firsts("prompt_uid")], np.int64),
        accuracy,
        reward,
        length,
        tuple(by.firsts("outcome")),
        np.bincount(bins, minlength=LENGTH_BINS),
        np.bincount(classes, minlength=len(RATES)),
    )


def prompt_history(digests: Mapping[int, StepDigest], prompt_uid: str) -> list[dict[str, Any]]:
    """List the outcomes of one prompt: a row for each group that was made of it."""
    uid_hash = hash(prompt_uid)
    return [
        {
            "step": step,
            "group": int(digest.groups[at]),
            "outcome": digest.outcomes[at],
            "accuracy": round_to(float(digest.accuracy[at])),
            "reward": round_to(float(digest.reward[at])),
            "length": round_to(float(digest.length[at])),
        }
        for step, digest in digests.items()
        for at in np.flatnonzero(digest.prompts == uid_hash)
    ]
