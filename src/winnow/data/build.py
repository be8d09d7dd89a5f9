"""The prompts that a recipe's section `data` asks for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Protocol

from winnow.config.data import CustomTask, DataConfig, ReasoningGymTask, SortDigitsTask
from winnow.data.loader import PromptSource
from winnow.data.prompts import LengthReport, PromptRenderer, PromptSet
from winnow.errors import DataError
from winnow.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from winnow.data.sources import Row


class RowStream(Protocol):
    """Endless rows by index, such as those of a generated task."""

    data_sources: frozenset[str]
    """The data sources of its rows."""
    fingerprints: dict[str, str]
    """For each task, a text that changes when the rows do."""

    def candidates(self, index: int) -> Iterator[Row]:
        """Yield rows for `index`, always the same: the first that is short enough counts."""
        ...

    def candidates_of(self, uid: str) -> Iterator[Row]:
        """Yield the rows that a uid names; KeyError where there is none of it."""
        ...


class GeneratedPrompts:
    """An endless `PromptSource`: a stream of rows, rendered as they are asked for."""

    size = None

    def __init__(self, stream: RowStream, renderer: PromptRenderer) -> None:
        self._stream, self._renderer = stream, renderer
        self.data_sources, self.fingerprints = stream.data_sources, stream.fingerprints

    def prompt(self, index: int) -> Prompt:
        return self._renderer.first_fitting(self._stream.candidates(index))

    def find(self, uid: str) -> Prompt:
        return self._renderer.first_fitting(self._stream.candidates_of(uid))


def training_prompts(
    config: DataConfig, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PromptSource:
    """Make the training prompts of a recipe; a `PromptSet`, with its report, where they end.

    Raises:
        DataError: there is no training data, or it is not usable.
    """
    renderer = PromptRenderer(tokenizer, config)
    if isinstance(config.task, SortDigitsTask):
        from winnow.data.tasks.sort_digits import SortDigitsStream

        return GeneratedPrompts(SortDigitsStream(config.task, seed), renderer)
    if isinstance(config.task, ReasoningGymTask):
        from winnow.data.tasks.procedural import ProceduralStream

        return GeneratedPrompts(ProceduralStream(config.task, seed), renderer)
    if isinstance(config.task, CustomTask):
        from winnow.data.user_source import UserRows

        rows = UserRows(config.task, config.prompt_key)
        if rows.size is None:
            return GeneratedPrompts(rows, renderer)
        return renderer.render([rows.row(index) for index in range(rows.size)])
    if not config.train_files:
        raise DataError("data.train_files is empty and data/task=none; name the files to train on")
    from winnow.data.sources import read_rows

    return renderer.render(read_rows(config.train_files, config.prompt_key))


def evaluation_prompts(config: DataConfig, tokenizer: PreTrainedTokenizerBase) -> PromptSet:
    """Make the held-out prompts of a recipe; an empty set where it names none.

    Raises:
        DataError: the evaluation data is not usable.
    """
    renderer = PromptRenderer(tokenizer, config)
    if config.eval_files:
        from winnow.data.sources import read_rows

        return renderer.render(read_rows(config.eval_files, config.prompt_key))
    if isinstance(config.task, SortDigitsTask):
        from winnow.data.tasks.sort_digits import held_out_problems, row

        problems = held_out_problems(config.task, config.task.eval_problems)
        return renderer.render([row(digits) for digits in problems])
    if isinstance(config.task, ReasoningGymTask):
        from winnow.data.tasks.procedural import held_out_rows

        return renderer.render(held_out_rows(config.task))
    if isinstance(config.task, CustomTask):
        from winnow.data.user_source import UserRows

        return renderer.render(UserRows(config.task, config.prompt_key).held_out())
    return PromptSet((), LengthReport(0, 0, 0))
