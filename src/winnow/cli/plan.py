"""`winnow plan`: what a recipe takes on GPUs that are not here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from winnow import gc_tuning as heap
from winnow.errors import ConfigError


def plan_command(
    recipe: Annotated[str, typer.Argument(help="Name of a shipped recipe, or a YAML file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="KEY=VALUE", help="Settings over the recipe's."),
    ] = None,
    nodes: Annotated[int | None, typer.Option(min=1, help="Nodes; ranks fill them.")] = None,
    gpus: Annotated[int | None, typer.Option(min=1, help="GPUs of a node; 8 by default.")] = None,
    gpu: Annotated[str, typer.Option(help="Kind of GPU, with its GiB if need be.")] = "h100-80",
    network: Annotated[
        float, typer.Option(min=0.1, help="GB/s between nodes for each GPU, one way.")
    ] = 50.0,
    disk: Annotated[float, typer.Option(min=0.01, help="GB/s that a node writes.")] = 2.0,
    mean_response: Annotated[
        float | None,
        typer.Option(min=1, help="Tokens of an answer in the mean; a quarter of the limit."),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(help="Measured lengths: a run's folder, or a file with `PROMPT ANSWER` in "
                     "tokens on each line."),
    ] = None,
    kept: Annotated[
        float, typer.Option(min=0.01, max=1.0, help="Share of groups that the filter keeps.")
    ] = 1.0,
    price: Annotated[
        float | None, typer.Option("--price-per-gpu-hour", min=0.0, help="Adds the cost.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:  # fmt: skip
    """Say whether a recipe fits on GPUs, what it takes and costs, and the change that fits.

    For instance: winnow plan dapo_qwen2.5_32b model.path=FOLDER --nodes 16 --gpus 8
    """
    with heap.growing():
        from winnow.plan.machine import Machine, find_gpu
        from winnow.plan.plan import PlanRequest, make_plan
        from winnow.plan.show import as_text

    name, found = find_gpu(gpu)
    request = PlanRequest(
        recipe,
        tuple(overrides or ()),
        Machine(name, found, nodes or 1, gpus or 8, network, disk),
        is_given=nodes is not None or gpus is not None,
        mean_response=mean_response,
        lengths=None if lengths is None else _read_lengths(lengths),
        kept=kept,
        price=price,
    )
    plan = make_plan(request, lambda line: typer.echo(line, err=True))
    typer.echo(json.dumps(plan, indent=2) if as_json else as_text(plan))


def _read_lengths(place: Path) -> tuple[list[int], list[int]]:
    """Read tokens of prompts and answers from a run's folder, or a text file."""
    prompts: list[int] = []
    answers: list[int] = []
    if place.is_dir():
        import pyarrow.parquet as pq

        for path in sorted((place / "rollouts").glob("*.parquet")):
            table = pq.read_table(path, columns=["prompt_tokens", "response_tokens"])
            prompts += table.column(0).to_pylist()
            answers += table.column(1).to_pylist()
    elif place.is_file():
        try:
            rows = [[int(word) for word in line.split()] for line in place.read_text().splitlines()]
            pairs = [(prompt, answer) for prompt, answer in filter(None, rows)]
        except ValueError:
            raise ConfigError(
                f"--lengths {place} must have two numbers on each line: tokens of a prompt and of "
                "its answer"
            ) from None
        prompts, answers = [p for p, _ in pairs], [a for _, a in pairs]
    if not answers or min(*prompts, *answers) < 1:
        raise ConfigError(f"--lengths {place} has no lengths of 1 or more; give a run's folder, "
                          "or a file with `PROMPT ANSWER` on each line")  # fmt: skip
    return prompts, answers
