"""`winnow ledger`: check what became of a run's groups, and compare two runs by it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from winnow.cli.options import AsJson, Run
from winnow.observe.format import printable

if TYPE_CHECKING:
    from winnow.views.ledger_diff import Difference, LedgerReport

app = typer.Typer(
    help="Compare runs group by group (exit code 0: same, 1: different).", no_args_is_help=True
)

_Until = Annotated[int | None, Option(metavar="STEP", min=1, help="Ignore later steps.")]


@app.command("diff", no_args_is_help=True)
def diff_command(
    a: Annotated[str, Argument(metavar="A", help="Run folder, such as runs/NAME.")],
    b: Annotated[str, Argument(metavar="B", help="Run folder to compare with A.")],
    order: Annotated[
        bool | None,
        Option(
            "--order/--no-order",
            help="Compare fate, step and tokens of each group (default for runs that repeat bit "
            "for bit), or only check both for lost or repeated groups and the loader's order.",
        ),
    ] = None,
    until: _Until = None,
    as_json: AsJson = False,
) -> None:
    """Compare what two runs consumed: prompts, fates, learning steps, tokens."""
    from winnow.views.ledger_diff import diff_ledgers, open_ledger

    difference = diff_ledgers(open_ledger(a, until), open_ledger(b, until), order)
    if as_json:
        typer.echo(json.dumps(difference.as_json(), ensure_ascii=False, indent=2))
        raise typer.Exit(not difference.same)
    for name, report in (("A", difference.a), ("B", difference.b)):
        _print_report(name, report)
    _print_differences(difference.differences)
    if difference.not_compared:
        typer.echo(
            f"Token ids of {difference.not_compared:,} groups were not recorded and are not "
            "compared"
        )
    if difference.given_back.count:
        typer.echo(
            f"Returned groups differ: {difference.given_back.count:,}; their prompts are sampled "
            "again"
        )
    if difference.times.count:
        typer.echo(f"Admission or end times differ for {difference.times.count:,} groups:")
        for example in difference.times.examples:
            typer.echo(f"      {printable(example)}")
    if difference.same:
        alike = "prompts, fates, learning steps, tokens, scores and weight versions of all groups"
        summary = "no group lost or repeated, prompts in the loader's order"
        typer.echo(f"Same: {alike if difference.exact else summary}")
    else:
        typer.echo("Different")
    raise typer.Exit(not difference.same)


@app.command("check", no_args_is_help=True)
def check_command(run: Run, until: _Until = None, as_json: AsJson = False) -> None:
    """Check a run for lost or repeated groups, and its totals against metrics.jsonl."""
    from dataclasses import asdict

    from winnow.views.ledger_diff import check_ledger, open_ledger

    report = check_ledger(open_ledger(run, until))
    if as_json:
        typer.echo(json.dumps(asdict(report), ensure_ascii=False, indent=2))
    else:
        _print_report("", report)
        if not report.faults:
            typer.echo("Sound: no group lost or repeated, totals match metrics.jsonl")
    raise typer.Exit(bool(report.faults))


def _print_report(name: str, report: LedgerReport) -> None:
    fates = ", ".join(f"{count:,} {fate}" for fate, count in report.fates.items() if count)
    waiting = f", {report.open:,} open" if report.open > 0 else ""
    typer.echo(
        f"{f'{name}  ' if name else ''}{printable(report.run)}: {report.steps} steps, "
        f"{report.groups:,} groups ({fates}{waiting}), {sum(report.tokens.values()):,} tokens"
    )
    _print_differences(report.faults)


def _print_differences(differences: tuple[Difference, ...]) -> None:
    for each in differences:
        typer.echo(f"   {each.what}: {each.count:,}")
        for example in each.examples:
            typer.echo(f"      {printable(example)}")
