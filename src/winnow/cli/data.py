"""`winnow data`: get known data sets ready, and look into files before training on them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from winnow.errors import DataError, RewardError
from winnow.observe.figures import figure_table, printable

if TYPE_CHECKING:
    from rich.console import Console

    from winnow.data.prepare import PrepareReport

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
    from winnow.data.prepare import PrepareRequest, prepare

    files = tuple(source or ())
    request = PrepareRequest(name, split, files, out, revision, instruction, rows, seed)
    _show_prepared(prepare(request), instruction, _console())


@app.command("check", no_args_is_help=True)
def check_command(
    file: Annotated[str, typer.Argument(metavar="FILE", help="Parquet or JSONL, path or URL.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="KEY=VALUE",
            help="Settings of a run's data, such as data.columns.truth=label.",
        ),
    ] = None,
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
    prompt_key: Annotated[str | None, typer.Option(help="Column with the prompt.")] = None,
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
    from winnow.config.load import resolve_recipe
    from winnow.data.check import check
    from winnow.data.tokenizer import load_tokenizer

    config = resolve_recipe(None, settings or ()).data
    config = config.model_copy(update={"prompt_key": prompt_key} if prompt_key else {})
    report = check(
        file,
        _scorer_of,
        tokenizer=load_tokenizer(tokenizer, field="--tokenizer") if tokenizer else None,
        limit=max_prompt_tokens or config.max_prompt_tokens,
        evaluation=evaluation,
        config=config,
    )
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        _show_report(report, _console())


def _scorer_of(source: str) -> str | None:
    """Name the built-in scorer of a data source."""
    from winnow.rewards.routing import Router

    try:
        return Router({}).scorer(source).name
    except RewardError:
        return None


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False)


def _show_prepared(done: PrepareReport, instruction: str, console: Console) -> None:
    console.print(f"{done.name} ({done.split}) from {done.origin}")
    lines: list[_Line] = [("rows read", done.read, "")]
    lines += [(f"left out, of source {name}", n, "") for name, n in done.other_sources.items()]
    lines.append(("exact copies removed", done.copies, ""))
    if done.instructions_removed:
        lines.append(("with an instruction, taken off", done.instructions_removed, ""))
    lines.append(("rows written", done.written, done.out))
    _print_lines(lines, console)
    scorers = {source: _scorer_of(source) for source in done.data_sources}
    none = (
        "has NO built-in scorer yet: training on it stops before the first step unless the recipe "
        "names one in reward.scorers."
    )
    for source, scorer in scorers.items():
        console.print(f"data_source {source} {f'is scored by {scorer}.' if scorer else none}")
    unknown = [source for source, scorer in scorers.items() if scorer is None]
    asking, training = _use(done, instruction, unknown)
    if asking:
        console.print(asking)
    console.print(f"Next: winnow data check {shlex.quote(done.out)}")
    console.print(f"      {training}")


def _use(done: PrepareReport, instruction: str, unknown: list[str]) -> tuple[str, str]:
    """Say how its prompts are asked, and write a command that trains on it or evaluates with it."""
    overrides, scorer = ["model.path=FOLDER"], "dapo_math"
    bare = "Prompts are bare questions: the recipe"
    if done.name == "sort_digits":  # asked as it is, of a model that was warmed up on it
        asking, recipe, overrides, scorer = "", "quickstart", ["data/task=none"], "SCORER"
    elif done.ability != "math":
        asking = "Prompts say how to answer: take the template out of recipes that have one."
        recipe, scorer = "dapo-math", "SCORER"
        overrides.append('data.prompt_template={*:"{prompt}"}')
    elif done.name == "gsm8k":
        asking, recipe = f"{bare} gsm8k says how to ask.", "gsm8k"
    elif instruction == "dapo":
        asking = "Prompts hold DAPO's instruction: for recipes without data.prompt_template."
        recipe = "dapo_qwen2.5_32b"
    else:
        recipe = "dapo-math"
        asking = f"{bare} {recipe} says how to ask; for dapo_qwen2.5_32b add --instruction dapo."
    if done.split == "test":
        overrides += ["data.train_files=[FILE]", f"data.eval_files=[{done.out}]"]
    else:
        overrides.append(f"data.train_files=[{done.out}]")
    overrides += [f"reward.scorers.{source}={scorer}" for source in unknown]
    return asking, shlex.join(["winnow", "train", recipe, *overrides])


def _show_report(report: Mapping[str, Any], console: Console) -> None:
    console.print(printable(f"{report['file']}: {report['rows']:,} rows"), style="bold")
    console.print(printable(f"Read as {report['schema']}"))
    lines: list[_Line] = [("Sources", None, "")]
    for source in report["sources"]:
        scorer = f"scored by {source['scorer']}" if source["scorer"] else "NO SCORER for it"
        lines.append((source["source"], source["rows"], scorer))
    lengths = report["lengths"]
    lines.append((f"Prompts in {lengths['unit']}", None, ""))
    lines += [(name, lengths[name], "") for name in ("shortest", "median")]
    lines += [("95 % are within", lengths["p95"], ""), ("longest", lengths["longest"], "")]
    if lengths["beyond"] is not None:
        share = f"{100 * lengths['beyond'] / report['rows']:.2f} % of the rows"
        lines.append((f"longer than {lengths['limit']:,}", lengths["beyond"], share))
    conflicts, overlap = report["conflicts"], report["overlap"]
    lines += [
        ("Duplicates", None, ""),
        ("unique prompts", report["unique_prompts"], ""),
        ("copies", report["copies"], "rows that repeat another"),
        ("alike", report["alike_prompts"], "prompts that differ from another in form only"),
        ("conflicting labels", len(conflicts), "prompts with more than one label"),
    ]
    if overlap is not None:
        lines.append(("Overlap", None, f"with {overlap['file']}"))
        lines += [(f"prompts of {name}", n, "") for name, n in overlap["shared_by_source"].items()]
        lines.append(("rows that hold them", overlap["rows_affected"], ""))
    _print_lines(lines, console)
    _show_examples("Conflicting labels", [_conflict(each) for each in conflicts], console)
    shared = [] if overlap is None else [_shared(each) for each in overlap["shared"]]
    _show_examples("In both files", shared, console)


def _conflict(conflict: Mapping[str, Any]) -> str:
    from winnow.data.columns import excerpt

    labels = " or ".join(excerpt(label, 40) for label in conflict["labels"])
    return f"  {_rows(conflict['rows'])}: {labels}\n    {conflict['prompt']}"


def _shared(shared: Mapping[str, Any]) -> str:
    differs = "" if shared["same_label"] else ", with another label: perhaps another problem"
    where = f"row {shared['evaluation_row']} of the other ({shared['source']}{differs})"
    return f"  {_rows(shared['rows'])}: {where}\n    {shared['prompt']}"


def _show_examples(title: str, examples: list[str], console: Console) -> None:
    if not examples:
        return
    console.print(f"\n{title}", style="bold")
    for example in examples[:_SHOWN]:
        console.print(printable(example))
    if len(examples) > _SHOWN:
        console.print(f"  … and {len(examples) - _SHOWN} more; --json lists them all")


def _rows(numbers: Sequence[int]) -> str:
    some = ", ".join(str(number) for number in numbers[:_SHOWN])
    return f"row{'s' if len(numbers) > 1 else ''} {some}{', …' if len(numbers) > _SHOWN else ''}"


def _print_lines(lines: list[_Line], console: Console) -> None:
    """Print names to the left, numbers to the right and remarks behind, in one table."""
    from rich.text import Text

    table = figure_table()
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for name, number, remark in lines:
        is_heading = number is None
        title = Text(printable(f"{'' if is_heading else '  '}{name}"), "bold" * is_heading)
        table.add_row(title, "" if is_heading else f"{number:,}", Text(printable(remark)))
    console.print(table)
