"""`winnow plan`: what a recipe takes on GPUs that are not here."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from winnow import gc_tuning
from winnow.errors import ConfigError


def plan_command(
    recipe: Annotated[str, typer.Argument(help="Name of a shipped recipe, or a YAML file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="KEY=VALUE", help="Settings over the recipe's.")
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="Nodes; ranks fill them.")] = 1,
    gpus: Annotated[int, typer.Option(min=1, help="GPUs of a node.")] = 8,
    gpu: Annotated[str, typer.Option(help="Kind of GPU.")] = "h100-80",
    mean_response: Annotated[
        float | None, typer.Option(min=1, help="Mean tokens of an answer; a quarter of the limit.")
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Lengths of this run's answers, instead of drawn ones."),
    ] = None,
    price: Annotated[
        float | None, typer.Option("--price-per-gpu-hour", min=0.0, help="For the run's cost.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Run the code that a stranger's run names.")
    ] = False,
) -> None:
    """Say whether a recipe fits on GPUs, what it takes and costs, and the change that fits.

    For instance: winnow plan dapo_qwen2.5_32b --nodes 16 --gpus 8
    """
    with gc_tuning.disabled():
        from winnow.plan.estimate import Machine, find_gpu
        from winnow.plan.plan import PlanRequest, as_text, make_plan

    if lengths is not None and mean_response is not None:
        raise ConfigError("--lengths has a mean of its own; leave out --mean-response")
    machine = Machine(*find_gpu(gpu), nodes, gpus)
    tell = partial(typer.echo, err=True)
    settings = tuple(overrides or ())
    plan = make_plan(
        PlanRequest(recipe, settings, machine, mean_response, lengths, price, tell, trust)
    )
    typer.echo(json.dumps(plan, indent=2) if as_json else as_text(plan))
