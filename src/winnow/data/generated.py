"""Generated tasks: rows of problems that are made of a hash, some of them held out."""

from __future__ import annotations

import hashlib
import itertools
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, Generic, TypeVar

from winnow.config.data import CalcTask, ShapesTask, SortDigitsTask
from winnow.data.sources import Row
from winnow.errors import DataError

Task = TypeVar("Task", SortDigitsTask, CalcTask, ShapesTask)


class GeneratedRows(ABC, Generic[Task]):
    """The problems of a seed, `TaskRows`. A training row depends on its index alone.

    Problems whose crc32 modulo 10 is 0 are held out for evaluation and never trained on.
    """

    size = None
    digest_bytes = 16

    def __init__(self, task: Task, seed: int, source: str, settings: str, limit: str) -> None:
        """Name the problems.

        Args:
            source: data source of the rows.
            settings: the problems that the task makes, for the user.
            limit: field of the task of which a higher value gives more problems.
        """
        self.task: Task = task
        self._seed, self._source, self._settings, self._limit = seed, source, settings, limit
        self.data_sources = frozenset({source})
        self.fingerprints = {source: f"{settings}, seed {seed}"}

    @abstractmethod
    def make_problem(self, digest: bytes) -> str:
        """Make a problem of `digest_bytes` random bytes."""

    @abstractmethod
    def is_problem(self, text: str) -> bool:
        """Return whether the task makes this problem."""

    @abstractmethod
    def describe(self, problem: str) -> tuple[str, str, dict[str, Any]]:
        """Return how a problem is asked, its ground truth, and further fields of its row."""

    def training_problems(self, key: str) -> Iterator[str]:
        """Yield random problems that are not held out."""
        return (problem for problem in self._problems(key) if not is_held_out(problem))

    def candidates(self, index: int) -> Iterator[Row]:
        yield self._make_row(next(self.training_problems(f"{self._seed}/{index}")))

    def candidates_of(self, uid: str) -> Iterator[Row]:
        problem = uid.removeprefix(f"{self._source}:")
        if problem == uid or not self.is_problem(problem) or is_held_out(problem):
            raise KeyError(uid)
        return iter([self._make_row(problem)])

    def held_out(self) -> list[Row]:
        """Make rows of the first of the one fixed list of different held-out problems.

        Raises:
            DataError: there are not so many.
        """
        count, problems = self.task.eval_problems, dict[str, None]()
        for problem in itertools.islice(self._problems("evaluation"), 20_000 + 200 * count):
            if is_held_out(problem):
                problems[problem] = None
            if len(problems) == count:
                return [self._make_row(each) for each in problems]
        raise DataError(
            f"data.task.eval_problems is {count}, but {self._settings} give only about "
            f"{len(problems)} held-out problems; lower it, or raise data.task.{self._limit}"
        )

    def _problems(self, key: str) -> Iterator[str]:
        """Yield random problems, of a hash, so that no library's generator can change the data."""
        for attempt in itertools.count():
            digest = hashlib.blake2b(f"{key}/{attempt}".encode(), digest_size=self.digest_bytes)
            yield self.make_problem(digest.digest())

    def _make_row(self, problem: str) -> Row:
        """Make a problem a row of data; its uid is the same whenever the problem comes round."""
        question, truth, fields = self.describe(problem)
        uid, origin = f"{self._source}:{problem}", f"{self._source} {problem}"
        messages = ({"role": "user", "content": question},)
        return Row(uid, origin, self._source, messages, truth, **fields)


def is_held_out(problem: str) -> bool:
    """Return whether a problem is kept for evaluation."""
    return zlib.crc32(problem.encode()) % 10 == 0
