"""`winnow plan`: what a recipe takes on GPUs that are not here."""

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
    nodes: Annotated[int, Option(min=1, help="Number of nodes.")] = 1,
    gpus: Annotated[int, Option(min=1, help="GPUs per node.")] = 8,
    gpu: Annotated[str, Option(help="GPU type.")] = "h100-80",
    mean_response: Annotated[
        float | None, Option(min=1, help="Mean response tokens; default: a quarter of the limit.")
    ] = None,
    lengths: Annotated[
        Path | None, Option(metavar="RUN", help="Use the response lengths of this run.")
    ] = None,
    price: Annotated[
        float | None, Option("--price-per-gpu-hour", min=0.0, help="Price, to estimate the cost.")
    ] = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Estimate memory, time and cost of a recipe on GPUs; suggest a change if it does not fit.

    For instance: winnow plan dapo_qwen2.5_32b --nodes 16 --gpus 8
    """
    with gc_tuning.disabled():
        from winnow.plan.estimate import Machine, find_gpu
        from winnow.plan.plan import PlanRequest, as_text, make_plan

    if lengths is not None and mean_response is not None:
        raise ConfigError("--lengths and --mean-response exclude each other; drop one")
    machine = Machine(*find_gpu(gpu), nodes, gpus)
    tell = partial(typer.echo, err=True)
    settings = tuple(overrides or ())
    plan = make_plan(
        PlanRequest(recipe, settings, machine, mean_response, lengths, price, tell, trust)
    )
    typer.echo(json.dumps(plan, indent=2) if as_json else as_text(plan))
