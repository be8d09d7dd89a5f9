"""Sources of prompts, and how a row becomes token ids."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from winnow.config.base import CODE, Change, ImportPath, Options, Section, UserCode


class NoTask(Section):
    """No generated task: prompts come from files."""

    name: Literal["none"] = "none"


class SortDigitsTask(Section):
    """Sort a string of digits, character by character; made on the spot, endless.

    Problems whose crc32 modulo 10 is 0 are held out for evaluation.
    """

    name: Literal["sort_digits"] = "sort_digits"
    min_digits: int = Field(4, ge=2, le=12)
    """Fewest digits of a problem."""
    max_digits: int = Field(8, ge=2, le=12)
    """Most digits of a problem."""
    eval_problems: Annotated[int, Change.ON_RESUME] = Field(400, ge=1)
    """Held-out problems for evaluation, always the same ones first."""

    def conflicts(self) -> Iterator[str]:
        yield from self.order_conflicts("data.task", "min_digits", "max_digits", equal=True)


class CalcTask(Section):
    """Products of two numbers, asked as 37*48, which a calculator (environment=tools) works out;
    endless.

    Problems whose crc32 modulo 10 is 0 are held out for evaluation.
    """

    name: Literal["calc"] = "calc"
    min_factor: int = Field(11, ge=0, le=9999)
    """Smallest factor of a problem."""
    max_factor: int = Field(99, ge=0, le=9999)
    """Largest factor of a problem."""
    eval_problems: Annotated[int, Change.ON_RESUME] = Field(200, ge=1)
    """Held-out problems for evaluation, always the same ones first."""

    def conflicts(self) -> Iterator[str]:
        yield from self.order_conflicts("data.task", "min_factor", "max_factor", equal=True)


class ShapesTask(Section):
    """Pictures of which the squares or the crosses are counted; endless.

    Problems whose crc32 modulo 10 is 0 are held out for evaluation.
    """

    name: Literal["shapes"] = "shapes"
    side: int = Field(2, ge=1, le=3)
    """Cells in a row of a picture, and rows."""
    eval_problems: Annotated[int, Change.ON_RESUME] = Field(200, ge=1)
    """Held-out problems for evaluation, always the same ones first."""


class ArithmeticTask(Section):
    """Sums and products of numbers of one and two digits, asked in a sentence; for models that
    know English.

    A tenth of the pairs of numbers is held out for evaluation, in both orders and for both.
    """

    name: Literal["arithmetic"] = "arithmetic"
    eval_problems: Annotated[int, Change.ON_RESUME] = Field(200, ge=1)
    """Held-out problems for evaluation, always the same ones first."""


class ReasoningGymTask(Section):
    """A task of reasoning-gym (`pip install 'winnow-rl[reasoning-gym]'`); endless, judged by
    reasoning-gym itself.

    Problems whose question's crc32 modulo 10 is 0 are held out for evaluation.
    """

    name: Literal["reasoning_gym"] = "reasoning_gym"
    task: str = "chain_sum"
    """Name of the task in reasoning-gym, such as chain_sum or sudoku."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Settings of the task, such as {max_digits: 3}."""
    eval_problems: Annotated[int, Change.ON_RESUME] = Field(200, ge=1)
    """Held-out problems for evaluation, always the same ones first."""


class EpisodesTask(Section):
    """Seeds in the place of prompts, for an environment that makes its episodes of them."""

    name: Literal["episodes"] = "episodes"
    train_episodes: int = Field(1024, ge=1)
    """Number of different seeds to train on."""
    eval_episodes: Annotated[int, Change.ON_RESUME] = Field(128, ge=1)
    """Number of held-out seeds."""


class CustomTask(UserCode):
    """A custom source of prompts, given by its import path; docs/data.md shows its signature."""


Task = Annotated[
    NoTask
    | SortDigitsTask
    | CalcTask
    | ShapesTask
    | ArithmeticTask
    | ReasoningGymTask
    | EpisodesTask
    | CustomTask,
    Field(discriminator="name"),
]


class ColumnsConfig(Section):
    """Columns of data files whose schema is not known, or not meant."""

    prompt: str | None = None
    """Column with the list of messages (or a bare string); null: data.prompt_key, or a known one
    (problem, question, input, messages)."""
    truth: str | None = None
    """Column with the ground truth, or keys joined by dots (extra_info.answer), taken as it stands;
    null: a known one (reward_model.ground_truth, solution, answer, label, ground_truth); none: rows
    have no ground truth, and the reward needs none."""
    source: str | None = None
    """Column with the name that routes the answer to a scorer; null: data_source, if there is
    one."""


class NoDemonstrations(Section):
    """Learn from rewards (no SFT)."""

    name: Literal["none"] = "none"


class SftColumns(Section):
    """Columns of demonstrations; null takes those that are known, see docs/sft.md."""

    messages: str | None = None
    """Column with the whole conversation, whose last message is an answer."""
    prompt: str | None = None
    """Column with the prompt: a text or a list of messages."""
    answer: str | None = None
    """Column with the answer to it."""


class Demonstrations(Section):
    """Supervised fine-tuning on demonstrations, with winnow sft; see docs/sft.md."""

    name: Literal["demonstrations"] = "demonstrations"
    train_files: tuple[str, ...] = ()
    """Parquet or JSONL files (paths, fsspec URLs, or hf://datasets/OWNER/NAME/CONFIG/SPLIT on the
    hub) of conversations, or prompts and answers."""
    eval_files: tuple[str, ...] = ()
    """Files of the same kind, for the held-out loss. data.eval_files has prompts to be answered and
    scored, as in training by rewards."""
    columns: SftColumns = SftColumns()
    """Columns that nothing here knows."""
    batch_size: int = Field(32, ge=1)
    """Demonstrations a step, which is one update."""
    max_tokens: int = Field(4096, ge=2)
    """Longest demonstration, prompt and answers together; longer ones are left out."""
    turns: Literal["all", "last"] = "all"
    """Answers of a conversation that are imitated."""


Sft = Annotated[NoDemonstrations | Demonstrations, Field(discriminator="name")]


def _check_prompt_template(texts: dict[str, str]) -> dict[str, str]:
    if without := [source for source, text in texts.items() if "{prompt}" not in text]:
        raise ValueError(f"must contain {{prompt}}, for {without[0]!r} too")
    return texts


class DataConfig(Section):
    """Training and evaluation data, prompt form and length limits."""

    task: Task = NoTask()
    """A task that generates prompts, instead of files."""
    train_files: Annotated[tuple[str, ...], Change.ON_RESUME] = ()
    """Parquet or JSONL files: paths, fsspec URLs, or hf://datasets/OWNER/NAME/CONFIG/SPLIT on the
    hub; docs/data.md says which columns are known."""
    eval_files: Annotated[tuple[str, ...], Change.ON_RESUME] = ()
    """Files for evaluation."""
    hub_files: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Files that each hf:// URL names, at their commit; a run fills it in at its start."""
    prompt_key: str = "prompt"
    """Column with the list of messages (or a bare string)."""
    image_key: str = "images"
    """Column with the images of a row, one for each <image> in its prompt; none: images are left
    out. docs/images.md says what it may hold."""
    max_images: int = Field(16, ge=1)
    """Most images of a prompt; a row with more is refused."""
    max_image_pixels: int = Field(64_000_000, ge=1, le=89_478_485)
    """Most pixels of an image as its file says; a row with a larger one is refused, undecoded."""
    min_pixels: int | None = Field(None, ge=1)
    """Least pixels of an image as the model sees it; null: what the model's processor says."""
    max_pixels: int | None = Field(None, ge=1)
    """Most pixels of an image as the model sees it, to which larger ones are reduced; null: what
    the model's processor says."""
    columns: ColumnsConfig = ColumnsConfig()
    """Columns of prompt, ground truth and data source, by name."""
    default_source: str | None = Field(None, min_length=1)
    """Data source of rows that have none; null: gsm8k where the answers are GSM8K's, else the name
    of the file."""
    chat_template: str = "auto"
    """auto applies the tokenizer's chat template if it has one; none joins the contents; anything
    else is a Jinja template or a file that contains one."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Variables of the chat template, such as {enable_thinking: false}."""
    system_prompt: str | None = None
    """System message of every prompt; it replaces a row's system message."""
    prompt_template: Annotated[dict[str, str], AfterValidator(_check_prompt_template)] = Field({})
    """Text put around the last user message, by data source (case-insensitive, `*` for
    every source); `{prompt}` stands for the message."""
    max_prompt_tokens: int = Field(1024, ge=1)
    """Longest prompt in tokens."""
    overlong_prompts: Literal["filter", "error", "left", "right", "middle"] = "filter"
    """Fate of a longer prompt: leave the row out, stop, or cut it on that side."""
    max_train_prompts: int | None = Field(None, ge=1)
    """Maximum number of training rows, before the length limit: a seeded (run.seed) sample if
    data.shuffle is true, else the first rows. An endless task then repeats its first prompts in
    epochs. evaluation.max_prompts limits held-out prompts."""
    shuffle: bool = True
    """Reshuffle the rows in each epoch (seeded)."""
    sampler: Annotated[ImportPath | None, CODE] = None
    """Import path of a class that chooses the next row, instead of epochs: FILE.py:NAME or
    package.module:NAME. docs/extending.md shows one."""
    sampler_options: Options = Field(default_factory=dict)
    """Keyword arguments passed to the class."""

    def conflicts(self) -> Iterator[str]:
        if self.min_pixels and self.max_pixels:
            yield from self.order_conflicts("data", "min_pixels", "max_pixels", equal=True)
        if self.columns.prompt and self.prompt_key not in ("prompt", self.columns.prompt):
            yield (
                f"data.columns.prompt={self.columns.prompt} and data.prompt_key={self.prompt_key} "
                "both name the prompt's column; leave data.prompt_key out"
            )
        if self.train_files and not isinstance(self.task, NoTask):
            yield (
                f"data.train_files={list(self.train_files)} and data/task={self.task.name} both "
                "give prompts; set data.train_files=[] or data/task=none"
            )
