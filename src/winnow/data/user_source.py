"""Rows from a user's own code: `data/task=custom data.task.path=mine.py:Sums`.

The place names a class, or a function, that is called with `data.task.options` and returns a
source. `source[index]` is a row of index 0, 1, …: a dict in the schema of data files, and always
the same one for an index. A list will do, and so will a map-style dataset of torch. Where
`len(source)` is known the rows come round in epochs, as a file's do; without it they never end.
Held-out rows for evaluation may stand in `source.held_out`, a list. Example:

    class Sums:
        def __init__(self, largest: int = 99) -> None:
            self.largest = largest
            self.held_out = [self[-index] for index in range(1, 101)]

        def __getitem__(self, index: int) -> dict:
            random = Random(str(index))
            a, b = random.randint(0, self.largest), random.randint(0, self.largest)
            truth = {"ground_truth": str(a + b)}
            return {"data_source": "sums", "prompt": f"{a} + {b} =", "reward_model": truth}

A run keeps indices alone, so that one that is resumed goes on at the same row.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from winnow.config.data import CustomTask, DataConfig
from winnow.data.columns import detect_layout, error_line, excerpt
from winnow.data.prompts import PromptSet
from winnow.data.sources import Row, to_row
from winnow.errors import DataError
from winnow.types import Group
from winnow.user_code import load_user_object

_SAMPLE = 32
"""Rows of an endless source that tell its data sources, and whether it is still the same."""
_ATTEMPTS, _STRIDE = 20, 1 << 32
"""A row that is too long is replaced by one that lies so many further on, so many times."""


class UserRows:
    """The rows of a user's source, checked as those of a file are; `TaskRows`."""

    def __init__(self, task: CustomTask, config: DataConfig) -> None:
        """Make the source.

        Raises:
            DataError: the code fails, or makes something that has no rows by index.
        """
        self._place, self._config = f"data.task.path {task.path}", config
        make = load_user_object(task.path, "data.task.path", DataError)
        self._source: Any = _call_user(self._place, lambda: make(**task.options))
        self.name = task.path.rpartition(":")[2]
        if not hasattr(type(self._source), "__getitem__"):
            raise DataError(
                f"{self._place} returns a {type(self._source).__name__}, which has no rows by "
                "index; give it __getitem__(index), or return a list of rows"
            )
        self.size: int | None = None
        if hasattr(type(self._source), "__len__"):
            self.size = _call_user(self._place, lambda: len(self._source))
            if not self.size:
                raise DataError(f"{self._place} has no rows; return at least one")
            return
        sample = [self.row(index) for index in range(_SAMPLE)]
        self.data_sources = frozenset(row.data_source for row in sample)
        content = repr([(r.data_source, r.messages, r.ground_truth, *r.images) for r in sample])
        digest = hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=16)
        self.fingerprints = {self.name: digest.hexdigest()}

    def row(self, index: int) -> Row:
        """Check the row at `index`.

        Raises:
            DataError: the code fails, or the row is not usable.
        """
        origin = f"{self._place} row {index}"
        record = _call_user(origin, lambda: self._source[index])
        return self._check_row(record, origin, f"{self.name}:{index}")

    def held_out(self) -> list[Row]:
        """Check the held-out rows; none where the source has no such attribute.

        Raises:
            DataError: a row is not usable.
        """
        records = getattr(self._source, "held_out", ())
        return [
            self._check_row(each, f"{self._place} held_out[{i}]", f"{self.name}.held_out:{i}")
            for i, each in enumerate(records)
        ]

    def candidates(self, index: int) -> Iterator[Row]:
        return (self.row(index + attempt * _STRIDE) for attempt in range(_ATTEMPTS))

    def candidates_of(self, uid: str) -> Iterator[Row]:
        name, _, index = uid.rpartition(":")
        if name != self.name or not index.isdecimal():
            raise KeyError(uid)
        return iter([self.row(int(index))])

    def _check_row(self, record: object, origin: str, uid: str) -> Row:
        if not isinstance(record, Mapping):
            raise DataError(
                f"{origin}: must be a dict with columns, got a {type(record).__name__}; see "
                "docs/data.md"
            )
        layout = detect_layout(record, self._config, origin, self.name)
        return to_row(record, origin, uid, layout, Path.cwd())


class UserSampler:
    """Wraps a user's sampler, which chooses the next row and receives the scores.

    `data.sampler` names a class that is called with the prompts of the run, its seed and
    `data.sampler_options`. `next()` returns the index of a prompt, `update(results)` gets after
    each step the index and the scores of each prompt that was used up, and `state_dict()` and
    `load_state_dict(state)` make a resumed run exact.
    """

    def __init__(self, config: DataConfig, prompts: object, seed: int) -> None:
        """Make the sampler.

        Raises:
            DataError: the code fails or lacks a method, or the prompts never end.
        """
        self._place = f"data.sampler {config.sampler}"
        if not isinstance(prompts, PromptSet):
            raise DataError(
                f"{self._place} needs a finite data set, and data/task={config.task.name} is "
                "endless; set data.max_train_prompts, or data.sampler=null"
            )
        self._prompts = prompts
        make = load_user_object(str(config.sampler), "data.sampler", DataError)
        self._sampler: Any = _call_user(
            self._place, lambda: make(prompts.prompts, seed, **config.sampler_options)
        )
        methods = ("next", "update", "state_dict", "load_state_dict")
        lacking = [m for m in methods if not callable(getattr(self._sampler, m, None))]
        if lacking:
            raise DataError(
                f"{self._place} has no method {', '.join(lacking)}; see docs/extending.md"
            )

    def next(self) -> int:
        """Return the index of the prompt to come next.

        Raises:
            DataError: the code fails, or returns no index.
        """
        index = _call_user(self._place, self._sampler.next)
        if type(index) is not int or not 0 <= index < self._prompts.size:
            raise DataError(
                f"{self._place}: next() must return an integer from 0 to {self._prompts.size - 1}, "
                f"got {excerpt(repr(index), 40)}; correct the code"
            )
        return index

    def update(self, groups: Sequence[Group]) -> None:
        """Pass the scores of used prompts to the user's sampler."""
        index = self._prompts.index_by_uid
        results = [(index[g.prompt.uid], [a.score for a in g.answers]) for g in groups]
        _call_user(self._place, lambda: self._sampler.update(results))

    def state_dict(self) -> Any:
        """Return a copy of the user's state."""
        return copy.deepcopy(_call_user(self._place, self._sampler.state_dict))

    def load_state_dict(self, state: Any) -> None:
        """Restore the user's state."""
        _call_user(self._place, lambda: self._sampler.load_state_dict(copy.deepcopy(state)))


def _call_user(origin: str, call: Callable[[], Any]) -> Any:
    """Run a user's code; its errors name the place.

    Raises:
        DataError: instead of any other exception.
    """
    try:
        return call()
    except Exception as error:
        raise DataError(
            f"{origin} fails with {type(error).__name__}: {error_line(error)}; correct the code"
        ) from error
