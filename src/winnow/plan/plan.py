"""A recipe's plan: what its ranks and engines take on given GPUs, and the change that makes it fit.

recipe ─► ranks of the machine ─► run_rank (fake tensors) ─► figures ─► faults ─► a change
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from winnow.config.load import load_recipe
from winnow.config.root import Config
from winnow.config.rules import longest_tokens, workers_of
from winnow.config.trainer import Fsdp2
from winnow.errors import ConfigError, ModelError
from winnow.plan import estimate
from winnow.plan.estimate import Figures, Machine, shares_gpus
from winnow.plan.rank import RankPlan, run_rank
from winnow.runs.metrics import StepTokens
from winnow.types import IntArray


@dataclass(frozen=True)
class PlanRequest:
    """A recipe, and the machine to plan it for."""

    recipe: str
    overrides: tuple[str, ...]
    machine: Machine
    fills: bool = True
    """Ranks are to fill the machine; else they are as many as the recipe has."""
    mean_response: float | None = None
    """Tokens of an answer in the mean; None takes a quarter of the limit."""
    lengths: tuple[IntArray, IntArray] | None = None
    """Measured tokens of prompts and their answers."""
    price: float | None = None
    """Price of a GPU for an hour."""


def make_plan(request: PlanRequest, tell: Callable[[str], None] = lambda line: None) -> Figures:
    """Plan a recipe on a machine.

    Raises:
        ConfigError: the recipe is not one that can be planned.
        ModelError: a model cannot be described.
    """
    machine = request.machine
    given = [*request.overrides, *_layout(request)]
    config = load_recipe(request.recipe, given)
    path = _described(config)
    tell(f"running one of {workers_of(config)['policy']} ranks on fake tensors")
    rank = run_rank(config, path)
    memory = estimate.memory_figures(rank, config, machine)
    split = getattr(config.rollout.engine, "tensor_parallel", 1)
    sleeps = getattr(config.rollout.engine, "sleep", False)
    beside = memory["peak_gib"] if shares_gpus(config) and not sleeps else 0.0
    engine = estimate.engine_figures(rank, config, machine, beside, split)
    shown = {"gpu": machine.name, "nodes": machine.nodes, "gpus": machine.per_node}
    plan: Figures = {
        "recipe": request.recipe,
        "overrides": given,
        "machine": shown | {"gpu_gib": machine.gpu.memory_gib},
        "parameters": rank.parameters,
        "faults": list(_faults(rank, config, machine, memory, engine)),
        "memory": memory,
        "engine": engine,
        **_course(request, config, rank, engine),
    }
    if rank.refusal or memory["peak_gib"] > machine.limit_gib:
        plan["change"] = _change(request, config, path, tell)
    return plan


def _course(request: PlanRequest, config: Config, rank: RankPlan, engine: Figures) -> Figures:
    """Return all that depends on the lengths of answers."""
    machine, count = request.machine, config.sampling.groups_per_step * config.rollout.n
    prompts, answers = estimate.drawn_lengths(config, request.mean_response)
    if request.lengths is not None:
        places = np.random.default_rng(0).integers(0, len(request.lengths[1]), count)
        prompts, answers = (tokens[places] for tokens in request.lengths)
    written, packed = int(answers.sum()), int((prompts + answers).sum())
    figures = estimate.learning_figures(rank, config, machine, prompts + answers)
    transfers, steps = estimate.transfer_figures(rank, config, machine), config.trainer.steps
    seconds = figures["seconds"]
    seconds["publication"] = transfers["publication"]["seconds"]
    seconds["checkpoint"] = transfers["checkpoint"]["seconds"] / (
        config.trainer.save_every or steps
    )
    figures |= transfers | {"mean_response": float(answers.mean()), "tokens": written * steps}
    if engine["fits"]:
        seconds["rollout"] = estimate.rollout_seconds(engine, rank, config, machine, answers)
        engines = 0 if shares_gpus(config) else engine["engines"] * engine["tensor_parallel"]
        devices = workers_of(config)["policy"] + engines
        step = sum(seconds.values())
        tokens = StepTokens(written, packed, prompts.tolist(), answers.tolist())
        peak = machine.gpu.float32 if config.model.dtype == "float32" else machine.gpu.bfloat16
        figures["mfu"] = rank.learning.passes.flop(tokens) / (step * devices * peak * 1e12)
        figures["hours"] = step * steps / 3600
        figures["gpu_hours"] = figures["hours"] * devices
        if request.price is not None:
            figures["cost"] = figures["gpu_hours"] * request.price
    return figures


def _layout(request: PlanRequest) -> list[str]:
    """Return the overrides that have ranks fill the machine, beside engines on GPUs of their own.

    Raises:
        ConfigError: there are no GPUs left for ranks.
    """
    config, machine = load_recipe(request.recipe, request.overrides), request.machine
    is_sharded = isinstance(config.trainer.strategy, Fsdp2)
    if is_sharded and not request.fills:
        return []
    split = getattr(config.rollout.engine, "tensor_parallel", 1)
    engines = 0 if shares_gpus(config) else workers_of(config)["rollout"] * split
    ranks = machine.nodes * machine.per_node - engines
    if ranks < 1:
        raise ConfigError(
            f"--nodes {machine.nodes} --gpus {machine.per_node} leave no GPU for ranks beside "
            f"{engines} of engines; give more, or lower rollout.engine.processes"
        )
    chosen = [] if is_sharded else ["trainer/strategy=fsdp2"]
    return [*chosen, f"trainer.strategy.ranks={ranks}"]


def _described(config: Config) -> str:
    """Return the folder of the policy's model; all models have a config.json at least."""
    for role in ("model", "critic", "reference"):
        path = getattr(config, role).path
        is_needed = path is not None or role == "model"
        if is_needed and not Path(path or "", "config.json").expanduser().is_file():
            raise ModelError(
                f"{role}.path={path or 'null'} is no folder with a config.json, which is all that "
                f"a plan needs of a model (no weights); set {role}.path=FOLDER"
            )
    return str(Path(config.model.path or "").expanduser())


def _faults(
    rank: RankPlan, config: Config, machine: Machine, memory: Figures, engine: Figures
) -> Iterator[str]:
    """Yield a line for each reason why the recipe would fail on these GPUs."""
    if rank.refusal is not None:
        yield rank.refusal
    if memory["peak_gib"] > machine.limit_gib:
        role, name, gib = memory["tensors_gib"][0]
        yield (
            f"a rank holds {memory['peak_gib']:,.1f} GiB in the {memory['phase']}, {gib:,.1f} of "
            f"it {role} of {name}, and a GPU of {machine.gpu.memory_gib:g} GiB has room for "
            f"{machine.limit_gib:.1f}"
        )
    if not engine["fits"]:
        split, wanted = engine["tensor_parallel"], max(engine["cache_gib"], engine["row_gib"])
        yield (
            f"an engine on {split} GPU{'s' * (split > 1)} needs {engine['weights_gib']:.1f} GiB "
            f"for weights and {wanted:.1f} for keys and values on each, and has "
            f"{max(engine['room_gib'], 0.0):.1f}{' beside a rank' * shares_gpus(config)}; "
            "split it with rollout/engine=vllm rollout.engine.tensor_parallel=N, on GPUs of its own"
        )


def _change(
    request: PlanRequest, config: Config, path: str, tell: Callable[[str], None]
) -> Figures | None:
    """Find the first change after which a rank fits; None if none does."""
    layout = _layout(request)
    for change in changes(config):
        tell(f"trying {' '.join(change)}")
        try:
            tried = load_recipe(request.recipe, [*request.overrides, *layout, *change])
            found = run_rank(tried, path)
        except (ConfigError, ModelError):
            continue  # heads or ranks do not divide
        memory = estimate.memory_figures(found, tried, request.machine)
        if not found.refusal and memory["peak_gib"] <= request.machine.limit_gib:
            return {"set": change, "peak_gib": memory["peak_gib"], "host_gib": memory["host_gib"]}
    return None


def changes(config: Config) -> list[list[str]]:
    """List changes of a recipe that take memory from a rank, in the order of what they cost."""
    must = ["model.dtype=bfloat16"] if config.model.dtype == "float32" else []
    longest, singles = longest_tokens(config), []
    if not config.model.gradient_checkpointing:
        singles.append("model.gradient_checkpointing=true")
    if config.trainer.microbatch_tokens > longest:
        singles.append(f"trainer.microbatch_tokens={longest}")
    singles += [f"trainer.strategy.sequence={n}" for n in (2, 4, 8)]
    singles.append("trainer.strategy.offload=true")
    found = [[*must, single] for single in singles]
    found += [[*must, singles[0], other] for other in singles[1:]]
    return [must, *found] if must else found


def as_text(plan: Figures) -> str:
    """Write a plan down for people."""
    machine, memory, engine = plan["machine"], plan["memory"], plan["engine"]
    models = ", ".join(f"{role} {n / 1e9:.2f} B" for role, n in plan["parameters"].items())
    size = f"{machine['nodes']} x {machine['gpus']} {machine['gpu']}"
    lines = [f"{plan['recipe']} on {size}: {models}", f"  {' '.join(plan['overrides'])}"]
    lines += [f"FAULT: {fault}" for fault in plan["faults"]]
    if change := plan.get("change"):
        lines.append(f"FITS with {' '.join(change['set'])}: {change['peak_gib']:.1f} GiB a rank")
    elif "change" in plan:
        lines.append("No change that was tried lets a rank fit; use more or larger GPUs")
    lines += [
        f"A rank's tensors: {memory['peak_gib']:.2f} GiB at the peak, in the {memory['phase']}, "
        f"{memory['host_gib']:.2f} on the host; room for {memory['limit_gib']:.1f}",
        "  " + ", ".join(f"{role} {gib:.2f}" for role, gib in memory["roles_gib"].items()),
        *(f"  {gib:10.2f} GiB  {role}: {name}" for role, name, gib in memory["tensors_gib"][:8]),
        f"Answers of {plan['mean_response']:,.0f} tokens in the mean: lockstep "
        f"{plan['lockstep']:.3f}, {plan['rounds']:.0f} micro-batches a rank and step",
        "Collectives of a rank, GiB a step: "
        + ", ".join(f"{kind} {gib:,.1f}" for kind, gib in plan["sent_gib"].items()),
        f"Engines: {engine['engines']}, on {engine['tensor_parallel']} GPUs each: "
        f"{engine['weights_gib']:.1f} GiB of weights, {engine['cache_gib']:.1f} of keys and "
        f"values: {engine['rows']} of the longest answers at once",
        f"Publication {plan['publication']['gib']:.1f} GiB, checkpoint "
        f"{plan['checkpoint']['gib']:.1f} GiB in {plan['checkpoint']['seconds']:.0f} s",
        "At least so many seconds a step:",
        *(f"  {seconds:10.1f}  {name}" for name, seconds in plan["seconds"].items()),
    ]
    if "hours" in plan:
        cost = f", {plan['cost']:,.0f} at that price" if "cost" in plan else ""
        lines.append(
            f"At least {plan['hours']:,.1f} hours, {plan['gpu_hours']:,.0f} GPU hours{cost}, for "
            f"{plan['tokens'] / 1e9:.2f} B tokens written; MFU at most {plan['mfu']:.1%}"
        )
    return "\n".join(lines)
