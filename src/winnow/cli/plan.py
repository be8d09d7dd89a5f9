"""`winnow plan`: memory, time and cost of a recipe on given GPUs."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from typer import Option

from winnow import gc_tuning
from winnow.cli.options import AsJson, Overrides, Recipe, Trust
from winnow.errors import ConfigError


def plan_command(
    recipe: Recipe,
    overrides: Overrides = None,
    nodes: Annotated[
        int | None, Option(min=1, help="Nodes; default: as many as the recipe takes.")
    ] = None,
    gpus: Annotated[int, Option(min=1, help="GPUs per node.")] = 8,
    gpu: Annotated[str, Option(help="GPU model.")] = "h100-80",
    mean_response: Annotated[
        float | None, Option(min=1, help="Mean answer tokens; default: limit / 4.")
    ] = None,
    lengths: Annotated[
        Path | None, Option(metavar="RUN", help="Use the answer lengths of this run.")
    ] = None,
    price: Annotated[
        float | None, Option("--price-per-gpu-hour", min=0.0, help="To print the cost.")
    ] = None,
    efficiency: Annotated[
        list[str] | None,
        Option(metavar="NAME=SHARE", help="Reached share of products, attention, bandwidth."),
    ] = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Estimate memory, time and cost of a recipe on GPUs; suggest a change if it does not fit.

    Example: winnow plan dapo_qwen2.5_32b --nodes 16 --gpus 8
    """
    with gc_tuning.disabled():
        from winnow.plan.estimate import Efficiency, Machine, find_gpu
        from winnow.plan.plan import PlanRequest, format_plan, make_plan

    if lengths is not None and mean_response is not None:
        raise ConfigError("--lengths and --mean-response exclude each other; pass one of them")
    machine = Machine(*find_gpu(gpu), nodes or 0, gpus, Efficiency.parse(efficiency or ()))
    on_progress = partial(typer.echo, err=True)
    settings = tuple(overrides or ())
    plan = make_plan(
        PlanRequest(recipe, settings, machine, mean_response, lengths, price, on_progress, trust)
    )
    typer.echo(json.dumps(plan, indent=2) if as_json else format_plan(plan))
