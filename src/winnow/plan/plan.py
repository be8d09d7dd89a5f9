"""A recipe's plan: what its ranks and engines take on given GPUs, and the change that makes it fit.

recipe ─► ranks of the machine ─► run_rank (fake tensors) ─► figures ─► faults ─► a change
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from textwrap import fill

from winnow.checkpoints.strangers import require_trusted_start
from winnow.config.data import Demonstrations
from winnow.config.load import load_recipe
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.rules import longest_tokens
from winnow.config.trainer import Fsdp2, Megatron
from winnow.errors import ConfigError, ModelError
from winnow.plan import estimate
from winnow.plan.estimate import Figures, Machine, RecipeEstimate
from winnow.plan.rank import RankPlan, run_rank, stages_of

_SHAPES = Path(__file__).with_name("shapes")
"""Folders with a config.json each: what published models' say of their shape."""


@dataclass(frozen=True)
class PlanRequest:
    """A recipe, and the machine to plan it on."""

    recipe: str
    overrides: tuple[str, ...]
    machine: Machine
    mean_response: float | None = None
    """Tokens of an answer in the mean; None takes a quarter of the limit."""
    lengths: Path | None = None
    """A run's folder, whose answers take the place of drawn ones."""
    price: float | None = None
    """Price of a GPU for an hour."""
    tell: Callable[[str], object] = str
    """Is told what is being run."""
    trusts: bool = False
    """The user trusts whoever made the run that the recipe is of."""


def make_plan(request: PlanRequest) -> Figures:
    """Plan a recipe on a machine.

    Raises:
        ConfigError: the recipe is not one that can be planned.
        ModelError: a model cannot be described.
    """
    machine, (given, config) = request.machine, _laid_out(request)
    require_trusted_start(config, request.recipe, request.overrides, request.trusts)
    described = _described(config, request.tell)
    request.tell(f"running one of {Roles(config)['policy'].count} ranks on fake tensors")
    stages = _run_stages(described)
    plan: Figures = {
        "recipe": request.recipe,
        "machine": {"gpu": machine.name, "nodes": machine.nodes, "gpus_each": machine.per_node},
        "overrides": given,
        "parameters": stages[0].parameters,
        **_figures(request, config, stages),
    }
    if plan["faults"]:
        plan["change"] = _change(request, config, stages, plan)
    return plan


def _run_stages(config: Config) -> list[RankPlan]:
    """Run a rank of the first stage, and of the last if that is another.

    Those between hold no more than the first: as many layers or one less, and fewer micro-batches.
    """
    last = stages_of(config.trainer.strategy) - 1
    path = str(Path(config.model.path or "").expanduser())
    return [run_rank(config, path, stage=stage) for stage in sorted({0, last})]


def _laid_out(request: PlanRequest, change: Sequence[str] = ()) -> tuple[list[str], Config]:
    """Return overrides, and their recipe, whose ranks fill what engines of their own leave.

    Raises:
        ConfigError: there are no GPUs left for ranks, or nothing is sampled.
    """
    given, machine = [*request.overrides, *change], request.machine
    config = load_recipe(request.recipe, given)
    if isinstance(config.sft, Demonstrations):
        raise ConfigError("sft.train_files: imitation is not planned; plan a recipe that samples")
    beside = estimate.gpus_beside(config)
    ranks = machine.nodes * machine.per_node - sum(beside.values())
    if ranks < 1:
        neighbours = [role for role in Roles(config) if role.gpus and role.place in beside]
        raise ConfigError(
            f"--nodes {machine.nodes} --gpus {machine.per_node} leave no GPU for ranks beside "
            f"{' and '.join(role.count_text for role in neighbours)}; give more, or lower "
            f"{', '.join(role.key for role in neighbours)}"
        )
    if not isinstance(config.trainer.strategy, Fsdp2 | Megatron):
        given.append("trainer/strategy=fsdp2")
    given.append(f"trainer.strategy.ranks={ranks}")
    return given, load_recipe(request.recipe, given)


def _described(config: Config, tell: Callable[[str], object] = str) -> Config:
    """Return the recipe with the folder of a config.json for each model, published ones' of ours.

    Raises:
        ModelError: a model has none.
    """
    paths = {role: getattr(config, role).path for role in ("model", "critic", "reference")}
    if "reward_model" in Roles(config):
        paths["reward.model"] = getattr(config.reward.model, "path", None)
    for role, path in paths.items():
        is_needed = path is not None or role == "model"
        if not is_needed or Path(path or "", "config.json").expanduser().is_file():
            continue
        shape = published_shape(path or "") if role != "reward.model" else None
        if shape is None:
            own_start = "" if path else " warm_start=none"
            raise ModelError(
                f"{role}.path={path or 'null'} is no folder with a config.json, which is all that "
                f"a plan needs of a model (no weights); set {role}.path=FOLDER{own_start}"
            )
        tell(f"{role}.path={path} is not here: planned with the published shape of {shape.name}")
        section = getattr(config, role).model_copy(update={"path": str(shape)})
        config = config.model_copy(update={role: section})
    return config


def published_shape(path: str) -> Path | None:
    """Return the folder of ours with the config.json of a published model, by its path's last part.

    Bases and their instruction-tuned kin have one shape.
    """
    name = Path(path).name.lower().partition("@")[0].removeprefix("meta-")
    folder = _SHAPES / re.sub(r"-(instruct|base|rl)$", "", name)
    return folder if (folder / "config.json").is_file() else None


def _figures(request: PlanRequest, config: Config, stages: Sequence[RankPlan]) -> Figures:
    """Return all figures of a recipe whose ranks were run, and what is wrong with them."""
    if request.lengths is None:
        lengths = estimate.drawn_lengths(config, request.mean_response)
    else:
        lengths = estimate.kept_lengths(config, request.lengths)
    return RecipeEstimate(config, request.machine, stages, *lengths, request.price).figures()


def _change(
    request: PlanRequest, config: Config, stages: list[RankPlan], plan: Figures
) -> Figures | None:
    """Find the first change after which all fits; None if none is found."""
    machine, is_full = request.machine, plan["memory"]["peak_gib"] > request.machine.limit_gib
    for change in changes(config) if is_full else [[]]:
        words, ran, found, beside = [*change], config, stages, 0.0
        for _ in range(2):  # with an engine that would fit alone, then beside what a rank takes
            try:
                _, tried = _laid_out(request, words)
                engine = estimate.engine_figures(found[0], tried, machine, beside)
                if not engine["fits"]:
                    words += estimate.engine_change(engine, tried, machine) or []
                    _, tried = _laid_out(request, words)
                if (tried.trainer, tried.model) != (ran.trainer, ran.model):
                    request.tell(f"trying {' '.join(words)}")
                    ran, found = tried, _run_stages(_described(tried))
            except (ConfigError, ModelError):
                break  # heads or ranks do not divide
            figures = _figures(request, tried, found)
            memory = {name: figures["memory"][name] for name in ("peak_gib", "host_gib")}
            if not figures["faults"]:
                rows = figures["engine"]["rows"]
                return {"set": words, **memory, "rows": rows, **figures["run"]}
            beside = memory["peak_gib"]
    return None


def changes(config: Config) -> list[list[str]]:
    """List changes of a recipe that take memory from a rank, in the order of what they cost."""
    must = ["model.dtype=bfloat16"] if config.model.dtype == "float32" else []
    longest, singles = longest_tokens(config), []
    if not config.model.gradient_checkpointing:
        singles.append("model.gradient_checkpointing=true")
    if config.trainer.microbatch_tokens > longest:
        singles.append(f"trainer.microbatch_tokens={longest}")
    if isinstance(strategy := config.trainer.strategy, Megatron):
        for field in ("tensor", "pipeline"):
            more = (n for n in (2, 4, 8) if n > getattr(strategy, field))
            singles += [f"trainer.strategy.{field}={n}" for n in more]
    else:
        singles += [f"trainer.strategy.sequence={n}" for n in (2, 4, 8)]
        singles.append("trainer.strategy.offload=true")
    found = [[*must, single] for single in singles]
    found += [[*must, singles[0], other] for other in singles[1:]]
    return [must, *found] if must else found


def as_text(plan: Figures) -> str:
    """Write a plan down for people; figures have the names that they have in JSON."""
    machine, change = plan["machine"], plan.get("change")
    size = f"{machine['nodes']} x {machine['gpus_each']} {machine['gpu']}"
    told = [f"{plan['recipe']} on {size}: {' '.join(plan['overrides'])}"]
    told += [f"FAULT: {fault}" for fault in plan["faults"]]
    if change:
        told.append(f"FITS with {' '.join(change['set'])}")
    elif plan["faults"]:
        told.append("No change that was tried lets it fit: use more or larger GPUs")
    figures = {name: value for name, value in plan.items() if name not in ("recipe", "machine")}
    lines = [(line, "  ") for line in told] + [(line, " " * 21) for line in _lines(figures)]
    wrap = partial(fill, width=80, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap(line, subsequent_indent=indent) for line, indent in lines)


def _lines(figures: Figures) -> Iterator[str]:
    for name, value in figures.items():
        if isinstance(value, dict) and value:
            yield f"{name}:"
            yield from (f"  {line}" for line in _lines(value))
        elif not isinstance(value, dict | list):
            form = ",.3f" if isinstance(value, float) else "," * (type(value) is int)
            yield f"{format(value, form):>15}  {name}"
