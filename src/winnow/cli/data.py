"""`winnow data`: get known data sets ready, and look into files before training on them."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from winnow.cli.options import AsJson, PromptKey
from winnow.errors import DataError, RewardError
from winnow.observe.format import figure_table, printable

if TYPE_CHECKING:
    from rich.console import Console

    from winnow.data.prepare import PrepareReport

app = typer.Typer(help="Prepare known data sets and check data files.", no_args_is_help=True)

_Line = tuple[str, int | None, str]
"""A name, a number and a remark; without a number, a heading."""
_SHOWN = 5
"""Examples of a kind that the table shows; --json has them all."""


@app.command("prepare", no_args_is_help=True)
def prepare_command(
    name: Annotated[
        str,
        Argument(
            metavar="NAME",
            help="gsm8k, math, dapo-math-17k, aime-2024, aime-2025, amc, humaneval, mbpp, or "
            "generated: sort_digits, countdown, reasoning_gym/TASK.",
        ),
    ],
    source: Annotated[
        list[str] | None,
        Option("--from", metavar="PATH_OR_URL", help="Read from here, not the hub; repeatable."),
    ] = None,
    out: Annotated[
        str | None, Option(help="Output file; default: data/NAME[-SPLIT].parquet.")
    ] = None,
    split: Annotated[str | None, Option(help="Split, train or test; train by default.")] = None,
    revision: Annotated[str, Option(help="Branch, tag or commit on the hub.")] = "main",
    instruction: Annotated[
        str, Option(help="none: bare questions; dapo: with the instruction of DAPO's files.")
    ] = "none",
    rows: Annotated[int | None, Option(help="Number of problems to generate.")] = None,
    seed: Annotated[int | None, Option(help="Seed for generated problems.")] = None,
) -> None:
    """Convert a data set to Parquet in verl's schema, without duplicate rows."""
    from winnow.data.prepare import PrepareRequest, prepare

    files = tuple(source or ())
    request = PrepareRequest(name, split, files, out, revision, instruction, rows, seed)
    _show_prepared(prepare(request), instruction, _console())


@app.command("check", no_args_is_help=True)
def check_command(
    file: Annotated[str, Argument(metavar="FILE", help="Parquet or JSONL file, path or URL.")],
    settings: Annotated[
        list[str] | None,
        Argument(metavar="KEY=VALUE", help="Settings, such as data.columns.truth=label."),
    ] = None,
    tokenizer: Annotated[
        str | None, Option(metavar="FOLDER", help="Model folder; report lengths in its tokens.")
    ] = None,
    evaluation: Annotated[
        str | None, Option("--eval", metavar="FILE", help="Held-out file to check for overlap.")
    ] = None,
    max_prompt_tokens: Annotated[
        int | None, Option(min=1, help="Count longer prompts; default: data.max_prompt_tokens.")
    ] = None,
    prompt_key: PromptKey = None,
    as_json: AsJson = False,
) -> None:
    """Check a data file: sources, lengths, duplicates, conflicting labels, overlap."""
    if max_prompt_tokens is not None and tokenizer is None:
        raise DataError(
            f"--max-prompt-tokens {max_prompt_tokens} needs a tokenizer; add --tokenizer FOLDER"
        )
    from winnow.builders.environments import agent_notes
    from winnow.config.load import parse_recipe
    from winnow.data.check import check
    from winnow.data.images import load_vision_input
    from winnow.data.tokenizer import load_tokenizer

    recipe = parse_recipe(None, settings or ())
    config = recipe.data.model_copy(update={"prompt_key": prompt_key} if prompt_key else {})
    report = check(
        file,
        _scorer_of,
        notes_of=partial(agent_notes, recipe.environment),
        tokenizer=load_tokenizer(tokenizer, field="--tokenizer") if tokenizer else None,
        limit=max_prompt_tokens or config.max_prompt_tokens,
        evaluation=evaluation,
        config=config,
        vision=load_vision_input(tokenizer, "--tokenizer") if tokenizer else None,
    )
    if as_json:
        typer.echo(json.dumps(report, ensure_ascii=False, indent=2))
    else:
        _show_report(report, _console())


def _scorer_of(source: str) -> str | None:
    """Return the name of a data source's built-in scorer."""
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
    lines += [(f"skipped, of source {name}", n, "") for name, n in done.other_sources.items()]
    lines.append(("exact duplicates removed", done.copies, ""))
    if done.instructions_removed:
        lines.append(("instruction removed", done.instructions_removed, ""))
    _print_table([*lines, ("rows written", done.written, done.out)], console)
    scorers = {source: _scorer_of(source) for source in done.data_sources}
    none = (
        "has NO built-in scorer: training stops before the first step unless reward.scorers names "
        "one."
    )
    for source, scorer in scorers.items():
        console.print(f"data_source {source} {f'is scored by {scorer}.' if scorer else none}")
    unknown = [source for source, scorer in scorers.items() if scorer is None]
    asking, training = _usage_hint(done, instruction, unknown)
    if asking:
        console.print(asking)
    console.print(f"Next: winnow data check {shlex.quote(done.out)}\n      {training}")


def _usage_hint(done: PrepareReport, instruction: str, unknown: list[str]) -> tuple[str, str]:
    """Return a hint about the prompts, and a command that trains on or evaluates with the data."""
    overrides, scorer = ["model.path=FOLDER"], "dapo_math"
    bare = "Prompts have no instruction; the recipe"
    if done.name == "sort_digits":  # asked as it is, of a model that was warmed up on it
        asking, recipe, overrides, scorer = "", "quickstart", ["data/task=none"], "SCORER"
    elif done.ability != "math" or done.name == "geometry3k":
        asking = "Prompts contain the answer format; use recipes without data.prompt_template."
        recipe, scorer = "dapo-math", "SCORER"
        overrides.append('data.prompt_template={*:"{prompt}"}')
    elif done.name == "gsm8k":
        asking, recipe = f"{bare} gsm8k adds it.", "gsm8k"
    elif instruction == "dapo":
        asking = "Prompts contain DAPO's instruction; use recipes without data.prompt_template."
        recipe = "dapo_qwen2.5_32b"
    else:
        recipe = "dapo-math"
        asking = f"{bare} {recipe} adds it; for dapo_qwen2.5_32b use --instruction dapo."
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
        scorer = f"scored by {source['scorer']}" if source["scorer"] else "NO SCORER"
        lines.append((source["source"], source["rows"], scorer))
    lines += [("images", report["images"], "opened")] if report["images"] else []
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
        ("copies", report["copies"], "duplicate rows"),
        ("alike", report["alike_prompts"], "prompts that differ only in formatting"),
        ("conflicting labels", len(conflicts), "prompts with more than one label"),
    ]
    if overlap is not None:
        lines.append(("Overlap", None, f"with {overlap['file']}"))
        lines += [(f"prompts of {name}", n, "") for name, n in overlap["shared_by_source"].items()]
        lines.append(("rows that hold them", overlap["rows_affected"], ""))
    _print_table(lines, console)
    _show_examples("Conflicting labels", [_format_conflict(each) for each in conflicts], console)
    shared = [] if overlap is None else [_format_overlap(each) for each in overlap["shared"]]
    _show_examples("In both files", shared, console)
    _show_examples("Environment", report["warnings"], console)


def _format_conflict(conflict: Mapping[str, Any]) -> str:
    from winnow.data.columns import excerpt

    labels = " or ".join(excerpt(label, 40) for label in conflict["labels"])
    return f"  {_format_rows(conflict['rows'])}: {labels}\n    {conflict['prompt']}"


def _format_overlap(shared: Mapping[str, Any]) -> str:
    differs = "" if shared["same_label"] else ", different label: possibly another problem"
    where = f"row {shared['evaluation_row']} of the other ({shared['source']}{differs})"
    return f"  {_format_rows(shared['rows'])}: {where}\n    {shared['prompt']}"


def _show_examples(title: str, examples: list[str], console: Console) -> None:
    if examples:
        console.print(f"\n{title}", style="bold")
    for example in examples[:_SHOWN]:
        console.print(printable(example))
    if len(examples) > _SHOWN:
        console.print(f"  … and {len(examples) - _SHOWN} more; --json lists them all")


def _format_rows(numbers: Sequence[int]) -> str:
    some = ", ".join(str(number) for number in numbers[:_SHOWN])
    return f"row{'s' if len(numbers) > 1 else ''} {some}{', …' if len(numbers) > _SHOWN else ''}"


def _print_table(lines: list[_Line], console: Console) -> None:
    """Print rows of name, number and remark as one table."""
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
