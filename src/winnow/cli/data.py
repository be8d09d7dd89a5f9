"""`winnow data`: get known data sets ready, and look into files before training on them."""

from __future__ import annotations

import json
import shlex
from typing import TYPE_CHECKING, Annotated

import typer

from winnow.errors import DataError, ModelError

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PreTrainedTokenizerBase

    from winnow.data.check import Conflict, DataReport, SharedPrompt
    from winnow.data.prepare import Prepared

app = typer.Typer(
    name="data",
    help="Prepare known data sets, and check files before training on them.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)

_Line = tuple[str, int | None, str]
"""A name, a number and a remark; without a number, a heading."""
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
        _scorer_of,
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


def _scorer_of(source: str) -> str | None:
    """Name the built-in scorer of a data source."""
    from winnow.errors import RewardError
    from winnow.rewards.routing import Router

    try:
        return Router({}).scorer(source).name
    except RewardError:
        return None


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True)


def _show_prepared(done: Prepared, instruction: str, console: Console) -> None:
    console.print(f"{done.name} ({done.split}) from {done.origin}", markup=False)
    lines: list[_Line] = [("rows read", done.read, "")]
    lines += [(f"left out, of source {name}", n, "") for name, n in done.other_sources.items()]
    lines.append(("exact copies removed", done.copies, ""))
    if done.instructions_removed:
        lines.append(("with an instruction, taken off", done.instructions_removed, ""))
    lines.append(("rows written", done.written, done.out))
    _print_lines(lines, console)
    scorers = {source: _scorer_of(source) for source in done.data_sources}
    for source, scorer in scorers.items():
        console.print(_routing(source, scorer), markup=False)
    if done.name != _BARE:
        console.print(_asking(done, instruction), markup=False)
    console.print(f"Next: winnow data check {shlex.quote(done.out)}", markup=False)
    unknown = [source for source, scorer in scorers.items() if scorer is None]
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
    """Write a command that trains on the file, or evaluates with it."""
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
    lines: list[_Line] = [("Sources", None, "")]
    for source in report.sources:
        scorer = f"scored by {source.scorer}" if source.scorer else "NO SCORER for it"
        lines.append((source.source, source.rows, scorer))
    lengths = report.lengths
    lines += [
        (f"Prompts in {lengths.unit}", None, ""),
        ("shortest", lengths.shortest, ""),
        ("median", lengths.median, ""),
        ("95 % are within", lengths.p95, ""),
        ("longest", lengths.longest, ""),
    ]
    if lengths.beyond is not None:
        share = f"{100 * lengths.beyond / report.rows:.2f} % of the rows"
        lines.append((f"longer than {lengths.limit:,}", lengths.beyond, share))
    lines += [
        ("Duplicates", None, ""),
        ("unique prompts", report.unique_prompts, ""),
        ("copies", report.copies, "rows that repeat another"),
        ("alike", report.alike_prompts, "prompts that differ from another in form only"),
        ("conflicting labels", len(report.conflicts), "prompts with more than one label"),
    ]
    overlap = report.overlap
    if overlap is not None:
        lines.append(("Overlap", None, f"with {overlap.file}"))
        lines += [(f"prompts of {name}", n, "") for name, n in overlap.shared_by_source.items()]
        lines.append(("rows that hold them", overlap.rows_affected, ""))
    _print_lines(lines, console)
    _show_examples("Conflicting labels", [_conflict(each) for each in report.conflicts], console)
    shared = [] if overlap is None else [_shared(each) for each in overlap.shared]
    _show_examples("In both files", shared, console)


def _conflict(conflict: Conflict) -> str:
    from winnow.data.files import excerpt

    labels = " or ".join(excerpt(label, 40) for label in conflict.labels)
    return f"  {_rows(conflict.rows)}: {labels}\n    {conflict.prompt}"


def _shared(shared: SharedPrompt) -> str:
    differs = "" if shared.same_label else ", with another label: perhaps another problem"
    where = f"row {shared.evaluation_row} of the other ({shared.source}{differs})"
    return f"  {_rows(shared.rows)}: {where}\n    {shared.prompt}"


def _show_examples(title: str, examples: list[str], console: Console) -> None:
    if not examples:
        return
    console.print(f"\n{title}", style="bold")
    for example in examples[:_SHOWN]:
        console.print(example, markup=False)
    if len(examples) > _SHOWN:
        console.print(f"  … and {len(examples) - _SHOWN} more; --json lists them all")


def _rows(numbers: tuple[int, ...]) -> str:
    some = ", ".join(str(number) for number in numbers[:_SHOWN])
    return f"row{'s' if len(numbers) > 1 else ''} {some}{', …' if len(numbers) > _SHOWN else ''}"


def _print_lines(lines: list[_Line], console: Console) -> None:
    """Print names to the left, numbers to the right and remarks behind, in one table."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for name, number, remark in lines:
        if number is None:
            table.add_row(Text(name, style="bold"), "", Text(remark))
        else:
            table.add_row(Text(f"  {name}"), f"{number:,}", Text(remark))
    console.print(table)
