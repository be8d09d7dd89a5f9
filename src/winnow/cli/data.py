"""`winnow data`: get known data sets ready, and look into files before training on them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated

import typer

from winnow.errors import DataError, ModelError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from winnow.data.check import DataReport, Overlap
    from winnow.data.prepare import Prepared

app = typer.Typer(
    name="data",
    help="Prepare known data sets, and check files before training on them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_SHOWN = 5
"""Examples of a kind that the table shows; --json has them all."""


@app.command("prepare", no_args_is_help=True)
def prepare_command(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="gsm8k, math, dapo-math-17k, aime-2024, aime-2025, amc, humaneval, mbpp, or made "
            "on the spot: sort_digits, countdown, reasoning_gym/TASK.",
        ),
    ],
    source: Annotated[
        list[str] | None,
        typer.Option(
            "--from",
            metavar="PATH_OR_URL",
            help="File or URL (file, hdfs, s3, gs, …) instead of the hub; may be repeated.",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="File to write; data/NAME[-SPLIT].parquet by default.")
    ] = None,
    split: Annotated[
        str | None, typer.Option(help="train or test, where the set has both; train by default.")
    ] = None,
    revision: Annotated[
        str, typer.Option(help="Branch, tag or commit of the hub's data set.")
    ] = "main",
    instruction: Annotated[
        str,
        typer.Option(
            help="none: bare questions, the recipe says how to ask. dapo: with the instruction "
            "of the published DAPO files."
        ),
    ] = "none",
    rows: Annotated[int | None, typer.Option(help="Problems of a set that is made.")] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of a set that is made.")] = None,
) -> None:
    """Write a data set as parquet in verl's schema, without copies of a row."""
    from winnow.data.prepare import Request, prepare

    request = Request(
        name=name,
        split=split,
        files=tuple(source or ()),
        out=out,
        revision=revision,
        instruction=instruction,
        rows=rows,
        seed=seed,
    )
    _show_prepared(prepare(request), instruction, _console())


@app.command("check", no_args_is_help=True)
def check_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Parquet or JSONL, path or URL.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Measure prompts in this model folder's tokens."),
    ] = None,
    evaluation: Annotated[
        str | None,
        typer.Option("--eval", metavar="FILE", help="Look for this file's prompts in FILE."),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(help="Count longer prompts; data.max_prompt_tokens by default."),
    ] = None,
    prompt_key: Annotated[str, typer.Option(help="Column with the prompt.")] = "prompt",
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Say what a data file holds: sources, lengths, duplicates, conflicting labels, overlap."""
    if max_prompt_tokens is not None and max_prompt_tokens < 1:
        raise DataError(f"--max-prompt-tokens is {max_prompt_tokens}; it must be at least 1")
    if max_prompt_tokens is not None and tokenizer is None:
        raise DataError(
            f"--max-prompt-tokens is {max_prompt_tokens}, but tokens need a tokenizer; name a "
            "model folder with --tokenizer"
        )
    from winnow.config.data import DataConfig
    from winnow.data.check import check

    report = check(
        file,
        _scorer_names(),
        tokenizer=_tokenizer(tokenizer) if tokenizer else None,
        limit=max_prompt_tokens or DataConfig().max_prompt_tokens,
        evaluation=evaluation,
        prompt_key=prompt_key,
    )
    if as_json:
        typer.echo(json.dumps(report.as_json(), ensure_ascii=False, indent=2))
    else:
        _show_report(report, _console())


def _tokenizer(folder: str) -> PreTrainedTokenizerBase:
    from winnow.data.tokenizer import load_tokenizer

    try:
        return load_tokenizer(folder)
    except ModelError as error:
        raise ModelError(str(error).replace("model.path", "--tokenizer", 1)) from error


def _scorer_names() -> Callable[[str], str | None]:
    """From a data source to the name of its built-in scorer."""
    from winnow.errors import RewardError
    from winnow.rewards.routing import Router

    router = Router({})

    def name(source: str) -> str | None:
        try:
            return router.scorer(source).name
        except RewardError:
            return None

    return name


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def _show_prepared(done: Prepared, instruction: str, console: Console) -> None:
    console.print(f"{done.name} ({done.split}) from {done.origin}", markup=False)
    table = _Table(console)
    table.line("rows read", done.read)
    for source, count in done.other_sources.items():
        table.line(f"left out, of source {source}", count)
    table.line("exact copies removed", done.copies)
    if done.instructions_removed:
        table.line("with an instruction, taken off", done.instructions_removed)
    table.line("rows written", done.written, done.out)
    table.show()
    scorer_of = _scorer_names()
    unknown = [source for source in done.data_sources if scorer_of(source) is None]
    for source in done.data_sources:
        console.print(_routing(source, scorer_of(source)), markup=False)
    if done.name != _BARE:
        console.print(_asking(done, instruction), markup=False)
    console.print(f"Next: winnow data check {shlex.quote(done.out)}", markup=False)
    console.print(f"      {_training(done, instruction, unknown)}", markup=False)


def _routing(source: str, scorer: str | None) -> str:
    if scorer is not None:
        return f"data_source {source} is scored by {scorer}."
    return (
        f"data_source {source} has NO built-in scorer yet: training on it stops before the first "
        "step unless the recipe names one in reward.scorers."
    )


# Its prompts are asked as they are, of a model that was warmed up on them.
_BARE = "sort_digits"
_MATHS_ABILITY = "math"


def _asking(done: Prepared, instruction: str) -> str:
    if instruction == "dapo":
        return "Prompts hold DAPO's instruction: for recipes without data.prompt_template."
    if done.abilities != {_MATHS_ABILITY}:
        return "Prompts say how to answer: take the template out of recipes that have one."
    recipe = "gsm8k" if done.name == "gsm8k" else "dapo-math"
    other = "" if recipe == "gsm8k" else "; for dapo_qwen2.5_32b add --instruction dapo"
    return f"Prompts are bare questions: the recipe {recipe} says how to ask{other}."


def _training(done: Prepared, instruction: str, unknown: list[str]) -> str:
    """A command that trains on the file, or evaluates with it."""
    words = ["winnow", "train"]
    if done.name == _BARE:
        words += ["quickstart", "data/task=none"]
    elif done.name == "gsm8k":
        words += ["gsm8k", "model.path=FOLDER"]
    else:
        recipe = "dapo_qwen2.5_32b" if instruction == "dapo" else "dapo-math"
        words += [recipe, "model.path=FOLDER"]
    if done.split == "test":
        words += ["data.train_files=[FILE]", f"data.eval_files=[{done.out}]"]
    else:
        words.append(f"data.train_files=[{done.out}]")
    if done.name != _BARE and done.abilities != {_MATHS_ABILITY}:
        words.append('data.prompt_template={*:"{prompt}"}')
    scorer = "dapo_math" if done.abilities == {_MATHS_ABILITY} else "SCORER"
    words += [f"reward.scorers.{source}={scorer}" for source in unknown]
    return shlex.join(words)


def _show_report(report: DataReport, console: Console) -> None:
    console.print(f"{report.file}: {report.rows:,} rows", markup=False, style="bold")
    table = _Table(console)
    table.head("Sources")
    for source in report.sources:
        scorer = f"scored by {source.scorer}" if source.scorer else "NO SCORER for it"
        table.line(source.source, source.rows, scorer)
    lengths = report.lengths
    table.head(f"Prompts in {lengths.unit}")
    table.line("shortest", lengths.shortest)
    table.line("median", lengths.median)
    table.line("95 % are within", lengths.p95)
    table.line("longest", lengths.longest)
    if lengths.beyond is not None:
        share = 100 * lengths.beyond / report.rows
        table.line(f"longer than {lengths.limit:,}", lengths.beyond, f"{share:.2f} % of the rows")
    table.head("Duplicates")
    table.line("unique prompts", report.unique_prompts)
    table.line("copies", report.copies, "rows that repeat another")
    table.line("alike", report.alike_prompts, "prompts that differ from another in form only")
    table.line("conflicting labels", len(report.conflicts), "prompts with more than one label")
    if report.overlap is not None:
        _add_overlap(report.overlap, table)
    table.show()
    _show_conflicts(report, console)
    if report.overlap is not None and report.overlap.shared:
        _show_shared(report.overlap, console)


def _add_overlap(overlap: Overlap, table: _Table) -> None:
    table.head("Overlap", f"with {overlap.file}")
    for source, count in overlap.shared_by_source.items():
        table.line(f"prompts of {source}", count)
    table.line("rows that hold them", overlap.rows_affected)


def _show_conflicts(report: DataReport, console: Console) -> None:
    from winnow.data.files import excerpt

    if not report.conflicts:
        return
    console.print("\nConflicting labels", style="bold")
    for conflict in report.conflicts[:_SHOWN]:
        labels = " or ".join(excerpt(label, 40) for label in conflict.labels)
        console.print(f"  {_rows(conflict.rows)}: {labels}\n    {conflict.prompt}", markup=False)
    _say_more(len(report.conflicts), console)


def _show_shared(overlap: Overlap, console: Console) -> None:
    console.print("\nIn both files", style="bold")
    for shared in overlap.shared[:_SHOWN]:
        differs = "" if shared.same_label else ", with another label: perhaps another problem"
        console.print(
            f"  {_rows(shared.rows)}: row {shared.evaluation_row} of the other ({shared.source}"
            f"{differs})\n    {shared.prompt}",
            markup=False,
        )
    _say_more(len(overlap.shared), console)


def _rows(numbers: tuple[int, ...]) -> str:
    some = ", ".join(str(number) for number in numbers[:_SHOWN])
    return f"row{'s' if len(numbers) > 1 else ''} {some}{', …' if len(numbers) > _SHOWN else ''}"


def _say_more(count: int, console: Console) -> None:
    if count > _SHOWN:
        console.print(f"  … and {count - _SHOWN} more; --json lists them all")


class _Table:
    """Names to the left, numbers to the right, remarks behind; no lines around them."""

    def __init__(self, console: Console) -> None:
        from rich.table import Table

        self._console = console
        self._table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        self._table.add_column(no_wrap=True)
        self._table.add_column(justify="right", no_wrap=True)
        self._table.add_column(overflow="fold")

    def head(self, text: str, remark: str = "") -> None:
        """A heading over the lines to come."""
        from rich.text import Text

        self._table.add_row(Text(text, style="bold"), "", Text(remark))

    def line(self, name: str, number: int, remark: str = "") -> None:
        """A number and what it is."""
        from rich.text import Text

        self._table.add_row(Text(f"  {name}"), f"{number:,}", Text(remark))

    def show(self) -> None:
        """Print what was added."""
        self._console.print(self._table)
