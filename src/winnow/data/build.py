"""The prompts that a recipe's section `data` asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from winnow.config.data import DataConfig, SortDigitsTask
from winnow.data.loader import PromptSource
from winnow.data.prompts import LengthReport, PromptRenderer, PromptSet
from winnow.data.sort_digits import DATA_SOURCE, SortDigitsStream, held_out_problems, row
from winnow.data.sources import read_rows
from winnow.errors import DataError
from winnow.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class GeneratedPrompts:
    """An endless `PromptSource`: a task's stream of rows, rendered as they are asked for."""

    size = None
    data_sources = frozenset({DATA_SOURCE})

    def __init__(self, stream: SortDigitsStream, renderer: PromptRenderer) -> None:
        self._stream = stream
        self._renderer = renderer

    @property
    def fingerprints(self) -> dict[str, str]:
        """What decides the rows."""
        return {DATA_SOURCE: self._stream.fingerprint}

    def prompt(self, index: int) -> Prompt:
        """The prompt at `index`."""
        return self._renderer.prompt(self._stream.row(index))

    def find(self, uid: str) -> Prompt:
        """The prompt of a uid; KeyError when the task has none of it."""
        return self._renderer.prompt(self._stream.row_of(uid))


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
    return PromptSet((), LengthReport(0, 0, 0, 0, 0))
