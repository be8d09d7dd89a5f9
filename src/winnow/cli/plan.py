"""`winnow plan`: what a recipe takes on GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from winnow import gc_tuning as heap
from winnow.errors import ConfigError


def plan_command(
    recipe: Annotated[str, typer.Argument(help="Name of a shipped recipe, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings over the recipe's.")
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes, which ranks fill.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of a node; 8.")] = None,
    gpu: Annotated[str, typer.Option(help="Kind of GPU, and its GiB.")] = "h100-80",
    mean_response: Annotated[
        float | None, typer.Option(min=1, help="Mean tokens of an answer; a quarter of the limit.")
    ] = None,
    lengths: Annotated[
        Path | None, typer.Option(metavar="RUN", help="A run's folder, for its answers' lengths.")
    ] = None,
    price: Annotated[float | None, typer.Option("--price-per-gpu-hour", min=0.0)] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Say whether a recipe fits on GPUs, what it takes and costs, and the change that fits.

    For instance: winnow plan dapo_qwen2.5_32b model.path=FOLDER --nodes 16 --gpus 8
    """
    with heap.growing():
        from winnow.plan.estimate import Machine, find_gpu
        from winnow.plan.plan import PlanRequest, as_text, make_plan

    machine = Machine(*find_gpu(gpu), nodes or 1, gpus or 8)
    fills = nodes is not None or gpus is not None
    measured = None if lengths is None else _lengths_of(lengths)
    request = PlanRequest(
        recipe, tuple(overrides or ()), machine, fills, mean_response, measured, price
    )
    plan = make_plan(request, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(plan, indent=2) if as_json else as_text(plan))


def _lengths_of(run: Path) -> Any:
    """Read tokens of prompts and answers from a run's folder."""
    import pyarrow.parquet as pq

    files = sorted((run / "rollouts").glob("*.parquet"))
    if not files:
        raise ConfigError(f"--lengths {run} has no rollouts/*.parquet; give a run's folder")
    table = pq.read_table(files, columns=["prompt_tokens", "response_tokens"])
    return tuple(column.to_numpy() for column in table.columns)
