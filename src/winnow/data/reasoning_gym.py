"""Problems of reasoning-gym (an extra): any of its tasks by name, endless, made on the spot.

A problem's number decides it: the package gives problem `i` of a seed the same way each time. A
row carries the whole entry, because the task that set the problem judges the answer too
(`winnow.rewards.scorers.reasoning_gym`). Problems whose question's crc32 modulo 10 is 0 are held
out for evaluation and never trained on.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from fractions import Fraction
from functools import lru_cache
from importlib.metadata import version
from typing import Any

from winnow.config.data import ReasoningGymTask
from winnow.data.sources import Row
from winnow.errors import DataError

PREFIX = "reasoning_gym/"
INSTRUCTION = (
    "\n\nThink step by step, then give the final answer alone between <answer> and </answer>."
)
# Their problems depend on the order of sets of texts, which differs from process to process.
UNSTABLE = {
    *("codeio", "isomorphic_strings", "knight_swap", "list_functions"),
    *("polynomial_multiplication", "ransom_note", "word_ladder"),
}
_BLOCK = 500
"""Problems of one seed: some tasks prepare them all at once."""
_ATTEMPTS = 50
_EVALUATION = "evaluation"


class ReasoningGymRows:
    """The endless training problems of a task and a seed, and its held-out ones; `TaskRows`."""

    size = None

    def __init__(self, task: ReasoningGymTask, seed: int) -> None:
        """Load the task.

        Raises:
            DataError: the package or the task is missing, or refuses its options.
        """
        self._task, self._options, self._seed = task.task, _as_json(task.options), seed
        self._eval_problems = task.eval_problems
        self._source = f"{PREFIX}{task.task}"
        self.data_sources = frozenset({self._source})
        _make_problems(self._task, self._options, "0", 0)

    @property
    def fingerprints(self) -> dict[str, str]:
        """A text that changes when the rows do.

        Raises:
            DataError: the task makes other problems in each process.
        """
        if self._task in UNSTABLE:
            raise DataError(
                f"data.task.task is {self._task}, whose problems differ between processes, "
                f"so a run could not be resumed; write them to a file with `winnow data prepare "
                f"{self._source}`"
            )
        settings = f"{self._task} {self._options}, seed {self._seed}"
        return {self._source: f"{settings}, version {version('reasoning-gym')}"}

    def candidates(self, index: int) -> Iterator[Row]:
        is_empty = True
        for attempt in range(_ATTEMPTS):
            entry = self._entry(f"{self._seed}/{attempt}", index)
            if not is_held_out(entry):
                is_empty = False
                yield self._row(entry, str(index))
        if is_empty:
            raise DataError(
                f"{self._source} gives too few different problems to hold some out; change "
                "data.task.options, or choose another task"
            )

    def candidates_of(self, uid: str) -> Iterator[Row]:
        number = uid.removeprefix(f"{self._source}:").partition("-")[0]
        if number == uid or not number.isdecimal():
            raise KeyError(uid)
        row = next((each for each in self.candidates(int(number)) if each.uid == uid), None)
        if row is None:
            raise KeyError(uid)
        return iter([row])

    def held_out(self) -> list[Row]:
        """Return the first `eval_problems` of the one fixed list of different held-out problems.

        Raises:
            DataError: there are not so many.
        """
        problems: dict[str, Row] = {}
        for index in range(1_000 + 50 * self._eval_problems):
            entry = self._entry(_EVALUATION, index)
            if is_held_out(entry):
                held_out = self._row(entry, f"held-out-{len(problems)}")
                problems.setdefault(str(entry["question"]), held_out)
            if len(problems) == self._eval_problems:
                return list(problems.values())
        raise DataError(
            f"data.task.eval_problems is {self._eval_problems}, but {self._task} gives only about "
            f"{len(problems)} different held-out problems; lower it, or change data.task.options"
        )

    def _entry(self, key: str, index: int) -> Mapping[str, Any]:
        block, place = divmod(index, _BLOCK)
        entry: Mapping[str, Any] = _make_problems(self._task, self._options, key, block)[place]
        return entry

    def _row(self, entry: Mapping[str, Any], number: str) -> Row:
        """Make a problem a row of data; its uid distinguishes problems of one number."""
        number = f"{number}-{_question_crc(entry):08x}"
        info = {"task": self._task, "config": self._options, "entry": _as_json(dict(entry))}
        answer = entry["answer"]
        return Row(
            uid=f"{self._source}:{number}",
            origin=f"{self._source} {number}",
            data_source=self._source,
            messages=({"role": "user", "content": f"{entry['question']}{INSTRUCTION}"},),
            # Some tasks have no reference answer, only a way to judge one.
            ground_truth="" if answer is None else str(answer),
            extra={"extra_info": info},
        )


def is_held_out(entry: Mapping[str, Any]) -> bool:
    """Return whether a problem is kept for evaluation."""
    return _question_crc(entry) % 10 == 0


def _question_crc(entry: Mapping[str, Any]) -> int:
    return zlib.crc32(str(entry["question"]).encode("utf-8", "surrogatepass"))


@lru_cache(maxsize=8)
def _make_problems(task: str, options: str, key: str, block: int) -> Any:
    """Make the problems of a block.

    Raises:
        DataError: the package or the task is missing, or refuses its options.
    """
    try:
        from reasoning_gym.factory import DATASETS, create_dataset
    except ModuleNotFoundError as error:
        raise DataError(
            f"{PREFIX}{task} needs the package reasoning-gym, which is not installed; "
            "pip install 'winnow-rl[reasoning-gym]'"
        ) from error
    if task not in DATASETS:
        near = get_close_matches(task, DATASETS)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; see its list of tasks"
        raise DataError(f"{PREFIX}{task}: reasoning-gym has no such task{hint}")
    digest = hashlib.blake2b(f"{key}/{block}".encode(), digest_size=4).digest()
    seed = int.from_bytes(digest, "big") >> 1
    try:
        return create_dataset(task, **{"seed": seed, "size": _BLOCK, **json.loads(options)})
    # Settings are checked by assertions, and unknown ones by the class that is to hold them.
    except (AssertionError, TypeError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())
        raise DataError(
            f"data.task.options is {options}, which reasoning-gym's {task} rejects ({reason}); "
            "change or remove them"
        ) from error


def _as_json(value: Any) -> str:
    """JSON that keeps tuples, and keys that are no texts."""
    return json.dumps(_tag_types(value), ensure_ascii=False)


def _tag_types(value: Any) -> Any:
    if isinstance(value, Fraction):
        return {"__fraction__": str(value)}
    if isinstance(value, tuple):
        return {"__tuple__": [_tag_types(each) for each in value]}
    if isinstance(value, list):
        return [_tag_types(each) for each in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _tag_types(each) for key, each in value.items()}
    if isinstance(value, dict):
        return {"__items__": [[_tag_types(key), _tag_types(each)] for key, each in value.items()]}
    return value
