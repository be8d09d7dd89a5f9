"""`winnow eval` and `winnow compare`: how good a model is, and whether another is better."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from winnow import gc_tuning as heap

if TYPE_CHECKING:
    from rich.console import Console


def eval_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run's folder (runs/NAME), a checkpoint's, a Hugging Face folder or hub name.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings over the recipe's, such as "
                       "evaluation.n=16."),
    ] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Held-out prompts: parquet or JSONL; may be repeated."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="How to ask: a name that `winnow recipes` lists, or a YAML file. A run "
                     "brings its own."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where answers.parquet and report.json go; RUN/eval/ "
                     "or evals/ by default."),
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="A run's checkpoint; the last by default.")
    ] = None,
) -> None:  # fmt: skip
    """Ask a model held-out prompts: avg@N, pass@k, maj@k by source, all answers in a file."""
    with heap.growing():
        from winnow.runs.evaluate import EvalRequest, run_evaluation
        from winnow.runs.shutdown import EXIT_INTERRUPTED, Stopped

    request = EvalRequest(model, tuple(overrides or ()), tuple(data or ()), recipe, out, step)
    try:
        run_evaluation(request, _console())
    except (KeyboardInterrupt, Stopped) as stopped:
        # Answers that end first are the short ones: figures of a part would flatter.
        typer.echo("winnow: interrupted; nothing of this evaluation is kept", err=True)
        code = stopped.exit_code if isinstance(stopped, Stopped) else EXIT_INTERRUPTED
        raise typer.Exit(code) from None


def compare_command(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A folder that `winnow eval` wrote, a file in it, or a run's folder."
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The other one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Say whether B is better than A on the problems that both answered, or only luckier."""
    from winnow.evaluation.compare import run_comparison

    run_comparison(a, b, as_json, _console())


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)
