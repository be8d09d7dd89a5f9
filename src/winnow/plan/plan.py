"""Plan of a recipe on GPUs: memory and time of its ranks and engines, and a change that fits.

recipe ─► ranks of the machine ─► run_rank (fake tensors) ─► figures ─► faults ─► change
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
from winnow.plan.rank import PolicyRun, run_rank

_SHAPES = Path(__file__).with_name("shapes")
"""Folders with the config.json of published models."""


@dataclass(frozen=True)
class PlanRequest:
    """A recipe, the machine to plan it on, and assumptions about answers and cost."""

    recipe: str
    overrides: tuple[str, ...]
    machine: Machine
    mean_response: float | None = None
    """Mean tokens of an answer; None: a quarter of the limit."""
    lengths: Path | None = None
    """Folder of a run, whose answer lengths replace drawn ones."""
    price: float | None = None
    """Price of a GPU hour."""
    on_progress: Callable[[str], object] = str
    """Called with a line about each simulation."""
    trusts_code: bool = False
    """Code named by the recipe of another user's run may be executed."""


def make_plan(request: PlanRequest) -> Figures:
    """Plan a recipe on a machine.

    Raises:
        ConfigError: the recipe cannot be planned.
        ModelError: a model has no config.json or an unsupported one.
    """
    machine, (given, config) = request.machine, _load_for_machine(request)
    require_trusted_start(config, request.recipe, request.overrides, request.trusts_code)
    described = _find_models(config, request.on_progress)
    request.on_progress(f"running one of {Roles(config)['policy'].count} ranks on fake tensors")
    stages = _run_stages(described)
    plan: Figures = {
        "recipe": request.recipe,
        "machine": {"gpu": machine.name, "nodes": machine.nodes, "gpus_each": machine.per_node},
        "overrides": given,
        "parameters": stages[0].parameters,
        **_estimate(request, config, stages),
    }
    if plan["faults"]:
        plan["change"] = _find_change(request, config, stages, plan)
    return plan


def _run_stages(config: Config) -> list[PolicyRun]:
    """Simulate a rank of the first and the last pipeline stage.

    Stages between hold no more than the first: at most as many layers and fewer micro-batches.
    """
    last = getattr(config.trainer.strategy, "pipeline", 1) - 1
    path = str(Path(config.model.path or "").expanduser())
    return [run_rank(config, path, stage=stage) for stage in sorted({0, last})]


def _load_for_machine(request: PlanRequest, change: Sequence[str] = ()) -> tuple[list[str], Config]:
    """Load the recipe with ranks on every GPU that other roles leave; also returns its overrides.

    Raises:
        ConfigError: no GPU is left for ranks, or the recipe samples nothing.
    """
    given, machine = [*request.overrides, *change], request.machine
    config = load_recipe(request.recipe, given)
    if isinstance(config.sft, Demonstrations):
        raise ConfigError("sft.train_files: SFT cannot be planned; use a recipe that samples")
    other_gpus = estimate.gpus_of_other_roles(config)
    ranks = machine.nodes * machine.per_node - sum(other_gpus.values())
    if ranks < 1:
        neighbours = [role for role in Roles(config) if role.gpus and role.place in other_gpus]
        raise ConfigError(
            f"--nodes {machine.nodes} --gpus {machine.per_node} leave no GPU for ranks after "
            f"{' and '.join(role.count_text for role in neighbours)}; add GPUs, or lower "
            f"{', '.join(role.key for role in neighbours)}"
        )
    if not isinstance(config.trainer.strategy, Fsdp2 | Megatron):
        given.append("trainer/strategy=fsdp2")
    given.append(f"trainer.strategy.ranks={ranks}")
    return given, load_recipe(request.recipe, given)


def _find_models(config: Config, on_progress: Callable[[str], object] = str) -> Config:
    """Return the recipe with model paths replaced by shipped shapes where the folder is missing.

    Raises:
        ModelError: a model has no config.json and no shipped shape.
    """
    paths = {role: getattr(config, role).path for role in ("model", "critic", "reference")}
    if "reward_model" in Roles(config):
        paths["reward.model"] = getattr(config.reward.model, "path", None)
    for role, path in paths.items():
        is_needed = path is not None or role == "model"
        if not is_needed or Path(path or "", "config.json").expanduser().is_file():
            continue
        shape = find_published_shape(path or "") if role != "reward.model" else None
        if shape is None:
            own_start = "" if path else " warm_start=none"
            raise ModelError(
                f"{role}.path={path or 'null'} is not a folder with a config.json (a plan needs "
                f"no weights); set {role}.path=FOLDER{own_start}"
            )
        on_progress(f"{role}.path={path} not found: using the published shape of {shape.name}")
        section = getattr(config, role).model_copy(update={"path": str(shape)})
        config = config.model_copy(update={role: section})
    return config


def find_published_shape(path: str) -> Path | None:
    """Return the shipped folder with the config.json of a published model, by the path's last part.

    A base model and its instruction-tuned variants share one shape.
    """
    name = Path(path).name.lower().partition("@")[0].removeprefix("meta-")
    folder = _SHAPES / re.sub(r"-(instruct|base|rl)$", "", name)
    return folder if (folder / "config.json").is_file() else None


def _estimate(request: PlanRequest, config: Config, stages: Sequence[PolicyRun]) -> Figures:
    """Return all figures and faults of a recipe whose ranks were simulated."""
    if request.lengths is None:
        lengths = estimate.draw_lengths(config, request.mean_response)
    else:
        lengths = estimate.read_lengths(config, request.lengths)
    return RecipeEstimate(config, request.machine, stages, *lengths, request.price).figures()


def _find_change(
    request: PlanRequest, config: Config, stages: list[PolicyRun], plan: Figures
) -> Figures | None:
    """Find the first change after which the recipe fits; None if none does."""
    machine, is_full = request.machine, plan["memory"]["peak_gib"] > request.machine.limit_gib
    for change in list_changes(config) if is_full or stages[0].refusal else [[]]:
        words, ran, found, beside = [*change], config, stages, 0.0
        for _ in range(2):  # with an engine that would fit alone, then beside what a rank takes
            try:
                _, tried = _load_for_machine(request, words)
                engine = estimate.estimate_engine(found[0], tried, machine, beside)
                if not engine["fits"]:
                    words += estimate.suggest_engine(engine, tried, machine) or []
                    _, tried = _load_for_machine(request, words)
                if (tried.trainer, tried.model) != (ran.trainer, ran.model):
                    request.on_progress(f"trying {' '.join(words)}")
                    ran, found = tried, _run_stages(_find_models(tried))
            except (ConfigError, ModelError):
                break  # heads or ranks do not divide
            figures = _estimate(request, tried, found)
            memory = {name: figures["memory"][name] for name in ("peak_gib", "host_gib")}
            if not figures["faults"]:
                rows = figures["engine"]["rows"]
                return {"set": words, **memory, "rows": rows, **figures["run"]}
            beside = memory["peak_gib"]
    return None


def list_changes(config: Config) -> list[list[str]]:
    """List changes of a recipe that reduce the memory of a rank, cheapest first."""
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


def format_plan(plan: Figures) -> str:
    """Format a plan as text; figures have the names of the JSON output."""
    machine, change = plan["machine"], plan.get("change")
    size = f"{machine['nodes']} x {machine['gpus_each']} {machine['gpu']}"
    told = [f"{plan['recipe']} on {size}: {' '.join(plan['overrides'])}"]
    told += [f"FAULT: {fault}" for fault in plan["faults"]]
    if change:
        told.append(f"FITS with {' '.join(change['set'])}")
    elif plan["faults"]:
        told.append("No tried change makes it fit: use more or larger GPUs")
    figures = {name: value for name, value in plan.items() if name not in ("recipe", "machine")}
    lines = [(line, "  ") for line in told]
    lines += [(line, " " * 21) for line in _format_figures(figures)]
    wrap = partial(fill, width=80, break_long_words=False, break_on_hyphens=False)
    return "\n".join(wrap(line, subsequent_indent=indent) for line, indent in lines)


def _format_figures(figures: Figures) -> Iterator[str]:
    for name, value in figures.items():
        if isinstance(value, dict) and value:
            yield f"{name}:"
            yield from (f"  {line}" for line in _format_figures(value))
        elif not isinstance(value, dict | list):
            form = ",.3f" if isinstance(value, float) else "," * (type(value) is int)
            yield f"{format(value, form):>15}  {name}"
