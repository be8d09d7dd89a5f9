"""The prompts that a recipe's section `data` asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from winnow.config.data import DataConfig, ReasoningGymTask, SortDigitsTask
from winnow.data.loader import PromptSource
from winnow.data.prompts import LengthReport, PromptRenderer, PromptSet
from winnow.data.sources import Row, read_rows
from winnow.data.tasks.procedural import ProceduralStream, held_out_rows
from winnow.data.tasks.sort_digits import SortDigitsStream, held_out_problems, row
from winnow.errors import DataError
from winnow.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class RowStream(Protocol):
    """A task's endless rows: `SortDigitsStream`, `ProceduralStream`."""

    @property
    def data_source(self) -> str:
        """What all its rows have."""
        ...

    @property
    def fingerprint(self) -> str:
        """Changes when the rows do."""
        ...

    def candidates(self, index: int) -> Iterator[Row]:
        """Rows for `index`, always the same ones: the first that is short enough counts."""
        ...

    def candidates_of(self, uid: str) -> Iterator[Row]:
        """Those that a uid names; KeyError when the task has none of it."""
        ...


class GeneratedPrompts:
    """An endless `PromptSource`: a task's stream of rows, rendered as they are asked for."""

    size = None

    def __init__(self, stream: RowStream, renderer: PromptRenderer) -> None:
        self._stream = stream
        self._renderer = renderer

    @property
    def data_sources(self) -> frozenset[str]:
        """The one of the task."""
        return frozenset({self._stream.data_source})

    @property
    def fingerprints(self) -> dict[str, str]:
        """What decides the rows."""
        return {self._stream.data_source: self._stream.fingerprint}

    def prompt(self, index: int) -> Prompt:
        """The prompt at `index`.

        Raises:
            DataError: no candidate for it is short enough.
        """
        return self._first_kept(self._stream.candidates(index))

    def find(self, uid: str) -> Prompt:
        """The prompt of a uid; KeyError when the task has none of it."""
        return self._first_kept(self._stream.candidates_of(uid))

    def _first_kept(self, rows: Iterator[Row]) -> Prompt:
        for each in rows:
            last = each
            if self._renderer.keeps(each):
                break
        return self._renderer.prompt(last)


def training_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PromptSource:
    """The training prompts of a recipe; a `PromptSet`, with its report, where they are files.

    Raises:
        DataError: there is no training data, or it is not usable.
    """
    renderer = PromptRenderer(tokenizer, config)
    if isinstance(config.task, SortDigitsTask):
        return GeneratedPrompts(SortDigitsStream(config.task, seed), renderer)
    if isinstance(config.task, ReasoningGymTask):
        return GeneratedPrompts(ProceduralStream(config.task, seed), renderer)
    if not config.train_files:
        raise DataError("data.train_files is empty and data/task=none; name the files to train on")
    return renderer.render(read_rows(config.train_files, config.prompt_key))


def evaluation_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """The held-out prompts of a recipe; an empty set where it names none.

    Raises:
        DataError: the evaluation data is not usable.
    """
    renderer = PromptRenderer(tokenizer, config)
    if config.eval_files:
        return renderer.render(read_rows(config.eval_files, config.prompt_key))
    if isinstance(config.task, SortDigitsTask):
        problems = held_out_problems(config.task, config.task.eval_problems)
        return renderer.render([row(digits) for digits in problems])
    if isinstance(config.task, ReasoningGymTask):
        return renderer.render(held_out_rows(config.task))
    return PromptSet((), LengthReport(0, 0, 0, 0, 0))
