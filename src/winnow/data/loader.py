"""The prompts of a run, and an endless walk over them from a cursor that can be restored.

A finite source comes round in epochs, each shuffled by a separate seed; an endless one is
walked by index. Prompts given back come first again, in the order given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from winnow.config.data import CustomTask, DataConfig, EpisodesTask
from winnow.data.images import VisionInput
from winnow.data.prompts import FirstMessages, PromptRenderer, PromptSet
from winnow.data.sources import Row, read_rows
from winnow.errors import CheckpointError, DataError
from winnow.types import Group, IntArray, Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from winnow.data.user_source import UserSampler

Tools = Sequence[Mapping[str, Any]]
"""JSON schemas of the tools that the policy may call."""
_SHUFFLE, _CHOICE = 0x5EED_0DA7A, 0x5EED_0C401
"""Separate shuffles and choices from other streams of the same seed."""


class TaskRows(Protocol):
    """Rows by index: those of a generated task, or of a user's code."""

    @property
    def size(self) -> int | None:
        """The number of rows; None when they never end."""

    @property
    def data_sources(self) -> frozenset[str]:
        """The data sources of endless rows."""

    @property
    def fingerprints(self) -> Mapping[str, str]:
        """For each task, a text that changes when its endless rows do."""

    def candidates(self, index: int) -> Iterator[Row]:
        """Yield rows for `index`, always the same: the first that is short enough counts."""

    def candidates_of(self, uid: str) -> Iterator[Row]:
        """Yield the rows that a uid names; KeyError where there is none of it."""

    def held_out(self) -> list[Row]:
        """Return the rows for evaluation, which are never trained on."""


class GeneratedPrompts:
    """Endless prompts: rows of a task, rendered as they are asked for."""

    size = None

    def __init__(self, rows: TaskRows, renderer: PromptRenderer) -> None:
        self._rows, self._renderer = rows, renderer
        self.data_sources, self.fingerprints = rows.data_sources, rows.fingerprints

    def prompt(self, index: int) -> Prompt:
        return self._renderer.first_fitting(self._rows.candidates(index))

    def find(self, uid: str) -> Prompt:
        return self._renderer.first_fitting(self._rows.candidates_of(uid))


PromptSource = PromptSet | GeneratedPrompts


def training_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    seed: int,
    tools: Tools = (),
    first_messages: FirstMessages | None = None,
    vision: VisionInput | None = None,
) -> PromptSource:
    """Make the training prompts of a recipe; a `PromptSet`, with its report, where they end.

    Args:
        tools, first_messages, vision: as `PromptRenderer` takes them.

    Raises:
        DataError: there is no training data, or it is not usable.
    """
    renderer = PromptRenderer(tokenizer, config, tools, first_messages, vision)
    rows = make_task_rows(config, seed)
    if rows is not None:
        size = rows.size or config.max_train_prompts
        if size is None:
            return GeneratedPrompts(rows, renderer)
        candidates = [next(rows.candidates(index)) for index in range(size)]
        return renderer.render(_choose_rows(candidates, config, seed))
    if not config.train_files:
        raise DataError("data.train_files is empty and data/task=none; name the files to train on")
    return renderer.render(_choose_rows(read_rows(config.train_files, config), config, seed))


def _choose_rows(rows: list[Row], config: DataConfig, seed: int) -> list[Row]:
    """Take `data.max_train_prompts` of the rows, in their order."""
    most = config.max_train_prompts
    if most is None or most >= len(rows):
        return rows
    if not config.shuffle:
        return rows[:most]
    chosen = np.random.default_rng([seed, _CHOICE]).choice(len(rows), most, replace=False)
    return [rows[index] for index in sorted(chosen)]


def evaluation_prompts(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    tools: Tools = (),
    first_messages: FirstMessages | None = None,
    vision: VisionInput | None = None,
) -> PromptSet:
    """Make the held-out prompts of a recipe; an empty set where it names none.

    Args:
        tools, first_messages, vision: as `PromptRenderer` takes them.

    Raises:
        DataError: the evaluation data is not usable.
    """
    renderer = PromptRenderer(tokenizer, config, tools, first_messages, vision)
    if config.eval_files:
        return renderer.render(read_rows(config.eval_files, config))
    rows = make_task_rows(config, seed=0)
    return renderer.render([] if rows is None else rows.held_out())


_SEEDED_ROWS = {
    "sort_digits": "winnow.data.sort_digits:SortDigitsRows",
    "calc": "winnow.data.calc:CalcRows",
    "shapes": "winnow.data.shapes:ShapesRows",
    "arithmetic": "winnow.data.arithmetic:ArithmeticRows",
    "reasoning_gym": "winnow.data.reasoning_gym:ReasoningGymRows",
}
"""Rows that are made of a task and a seed, by the task's name."""


def make_task_rows(config: DataConfig, seed: int) -> TaskRows | None:
    """Make the rows of `data.task`; None where prompts come from files."""
    task = config.task
    if isinstance(task, EpisodesTask):
        from winnow.data.episodes import EpisodeRows

        return EpisodeRows(task)
    if isinstance(task, CustomTask):
        from winnow.data.user_source import UserRows

        return UserRows(task, config)
    if task.name not in _SEEDED_ROWS:
        return None
    return cast(TaskRows, resolve_name(_SEEDED_ROWS[task.name])(task, seed))


class PromptLoader:
    """Iterates endlessly over a source. Its state is a cursor and the returned prompts."""

    def __init__(
        self,
        source: PromptSource,
        seed: int,
        shuffle: bool = True,
        order: UserSampler | None = None,
    ) -> None:
        assert source.size is None or source.size > 0
        self._source = source
        self._seed = seed
        self._shuffle = shuffle
        self._sampler = order
        self._epoch = 0
        self._position = 0
        self._order: tuple[int, IntArray] | None = None
        self._returned: deque[Prompt] = deque()

    def next(self) -> Prompt:
        """Return the next prompt: the first of those given back, else the one under the cursor."""
        if self._returned:
            return self._returned.popleft()
        size, index, sampler = self._source.size, self._position, self._sampler
        if size is not None:
            index = int(self._epoch_order(size)[index]) if sampler is None else sampler.next()
        prompt = self._source.prompt(index)
        self._position += 1
        if self._position == size:
            self._epoch, self._position = self._epoch + 1, 0
        return prompt

    def give_back(self, prompts: Iterable[Prompt]) -> None:
        """Return prompts to the front; the first of them comes next."""
        self._returned.extendleft(reversed(list(prompts)))

    def report_settled(self, groups: Sequence[Group]) -> None:
        """Pass the scores of groups that a step has used up to the user's sampler."""
        if self._sampler is not None:
            self._sampler.update(groups)

    def figures(self) -> dict[str, float]:
        """Return `data/epoch`, the passes over the data so far; nothing of one without an end."""
        size = self._source.size
        return {} if size is None else {"data/epoch": self._epoch + self._position / size}

    def state_dict(self) -> dict[str, Any]:
        """Return the walk so far as plain JSON values."""
        return {
            "seed": self._seed,
            "shuffle": self._shuffle,
            "epoch": self._epoch,
            "position": self._position,
            "returned": [prompt.uid for prompt in self._returned],
            "data": dict(self._source.fingerprints),
            "order": None if self._sampler is None else self._sampler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the position of `state`.

        Raises:
            CheckpointError: it was taken from other data, or in another order of them.
        """
        self._check_fingerprints(state["data"])
        for key, now in (("run.seed", self._seed), ("data.shuffle", self._shuffle)):
            was = state[key.partition(".")[2]]
            if was != now:
                raise CheckpointError(
                    f"{key} was {was} when the checkpoint was saved and is {now} now, which "
                    "changes the order of the prompts; set it back, or start a new run"
                )
        try:
            returned = deque(self._source.find(uid) for uid in state["returned"])
        except KeyError as error:
            raise CheckpointError(
                f"the checkpoint holds the prompt {error.args[0]}, which the data no longer has; "
                "restore the data, or start a new run"
            ) from error
        if self._sampler is not None:
            self._sampler.load_state_dict(state["order"])
        self._epoch, self._position = state["epoch"], state["position"]
        self._returned = returned

    def _epoch_order(self, size: int) -> IntArray:
        if self._order is None or self._order[0] != self._epoch:
            order: IntArray = np.arange(size, dtype=np.int64)
            if self._shuffle:
                np.random.default_rng([self._seed, _SHUFFLE, self._epoch]).shuffle(order)
            self._order = (self._epoch, order)
        return self._order[1]

    def _check_fingerprints(self, was: Mapping[str, str]) -> None:
        now = self._source.fingerprints
        changed = [name for name in {**was, **now} if was.get(name) != now.get(name)]
        if changed:
            raise CheckpointError(
                f"{changed[0]}: the prompts differ from those the checkpoint was saved with; "
                "restore data.train_files, the tokenizer and the section data, or start a new run"
            )
        if list(was) != list(now):
            raise CheckpointError(
                f"the data came in the order {', '.join(was)} when the checkpoint was saved and "
                f"comes as {', '.join(now)} now; restore the order, or start a new run"
            )
