"""Plan of a recipe on GPUs: memory and time of its ranks and engines, and a change that fits.

recipe ─► ranks of the machine ─► run_rank (fake tensors) ─► figures ─► faults ─► change
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

from winnow.builders.lockstep import draw_lengths, lockstep_notes
from winnow.checkpoints.strangers import require_trusted_start
from winnow.config.data import Demonstrations
from winnow.config.load import load_recipe
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.rules import max_sequence_tokens
from winnow.config.trainer import Fsdp2, Megatron, RayCluster
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
    settings, config = _load_for_machine(request)
    nodes = request.machine.nodes or estimate.count_nodes(config, request.machine.per_node)
    machine = replace(request.machine, nodes=nodes)
    request = replace(request, machine=machine)
    estimate.check_placement(config, machine)
    require_trusted_start(config, request.recipe, request.overrides, request.trusts_code)
    described = _find_models(config, request.on_progress)
    request.on_progress(f"running one of {Roles(config)['policy'].count} ranks on fake tensors")
    stages = _run_stages(described)
    images = stages[0].images
    plan: Figures = {
        "recipe": request.recipe,
        "machine": {"gpu": machine.name, "nodes": nodes, "gpus_each": machine.per_node},
        "placement": _placement(config),
        "overrides": settings,
        "command": _command(request.recipe, settings),
        "parameters": stages[0].parameters,
        **({"images": {"tokens": len(images[0]), "per_update": len(images)}} if images else {}),
        **_estimate(request, config, stages),
    }
    if plan["faults"]:
        plan["change"] = _find_change(request, config, stages, plan)
    return plan


def _placement(config: Config) -> str:
    """Describe the processes of a recipe. Example: `8 ranks of the policy, 2 engines of 4 GPUs`."""
    widths = (f" of {role.width} GPUs" * (role.width > 1) for role in Roles(config))
    return ", ".join(r.count_text + width for r, width in zip(Roles(config), widths, strict=True))


def _command(recipe: str, settings: Sequence[str]) -> str:
    """Return the command that trains a recipe with settings, of which the last of a key counts."""
    last = dict[str, str]()
    for setting in settings:
        key = setting.partition("=")[0]
        if last.get(key) != setting:
            last.pop(key, None)
            last[key] = setting
    return shlex.join(["winnow", "train", recipe, *last.values()])


def _run_stages(config: Config) -> list[PolicyRun]:
    """Simulate a rank of the first and the last pipeline stage.

    Stages between hold no more than the first: at most as many layers and fewer micro-batches.
    """
    last = getattr(config.trainer.strategy, "pipeline", 1) - 1
    path = str(Path(config.model.path or "").expanduser())
    return [run_rank(config, path, stage=stage) for stage in sorted({0, last})]


def _load_for_machine(request: PlanRequest) -> tuple[list[str], Config]:
    """Load a recipe, with ranks on every free GPU if it has none; also returns its overrides.

    A strategy that the overrides choose without its ranks has none, whatever their default is.

    Raises:
        ConfigError: the recipe samples nothing.
    """
    settings, machine = [*request.overrides], request.machine
    config = load_recipe(request.recipe, settings)
    if isinstance(config.sft, Demonstrations):
        raise ConfigError("sft.train_files: SFT cannot be planned; use a recipe that samples")
    strategy, keys = config.trainer.strategy, {each.partition("=")[0] for each in settings}
    is_open = "trainer/strategy" in keys and "trainer.strategy.ranks" not in keys
    is_sharded = isinstance(strategy, Fsdp2 | Megatron)
    if is_sharded and not is_open:
        return settings, config
    nodes = machine.nodes or 1
    ranks = nodes * machine.per_node - sum(estimate.gpus_of_other_roles(config).values())
    if nodes > 1 and not isinstance(config.cluster, RayCluster):
        ranks -= ranks % nodes
        settings += ["cluster=ray", f"cluster.nodes={nodes}"]
    ranks = max(ranks, nodes)  # too many are refused with all other roles
    settings += [] if is_sharded else ["trainer/strategy=fsdp2"]
    settings.append(f"trainer.strategy.ranks={ranks}")
    return settings, load_recipe(request.recipe, settings)


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
        prompts, answers = draw_lengths(config, request.mean_response)
        lengths = prompts.clip(min=sum(map(len, stages[0].images[:1]))), answers
    else:
        lengths = estimate.read_lengths(config, request.lengths)
    likely = RecipeEstimate(config, request.machine, stages, *lengths, request.price)
    least = replace(likely, machine=replace(request.machine, efficiency=estimate.PEAK))
    notes = list(lockstep_notes(config, stages[0].shape, lengths[0] + lengths[1]))
    return {"notes": notes, **least.figures(), "expected": likely.times()}


def _find_change(
    request: PlanRequest, config: Config, stages: list[PolicyRun], plan: Figures
) -> Figures | None:
    """Find the first change after which the recipe fits; None if none does."""
    machine, simulated = request.machine, [(config, stages)]
    is_full = plan["memory"]["peak_gib"] > machine.limit_gib
    for change in list_changes(config) if is_full else [[]]:
        attempts = [change]
        for settings in attempts:
            whole = [*plan["overrides"], *settings]
            try:
                tried = load_recipe(request.recipe, whole)
                estimate.check_placement(tried, machine)
                learns = tried.trainer, tried.model  # of which the simulated ranks are
                ranks = next((r for c, r in simulated if (c.trainer, c.model) == learns), None)
                if ranks is None:
                    request.on_progress(f"trying {' '.join(settings)}")
                    ranks = _run_stages(_find_models(tried))
                    simulated.append((tried, ranks))
            except (ConfigError, ModelError):
                continue  # heads, ranks or GPUs do not divide, or roles exclude each other
            figures = _estimate(request, tried, ranks)
            if not figures["faults"]:
                memory = {name: figures["memory"][name] for name in ("peak_gib", "host_gib")}
                return {
                    "set": settings,
                    "placement": _placement(tried),
                    "command": _command(request.recipe, whole),
                    "notes": figures["notes"],
                    **memory,
                    "rows": figures["engine"]["rows"],
                    **figures["run"],
                    "expected": figures["expected"]["run"],
                }
            if settings is change and figures["memory"]["peak_gib"] <= machine.limit_gib:
                engines = estimate.suggest_engines(figures["engine"], tried)
                attempts += [[*change, *more] for more in engines]
    return None


def list_changes(config: Config) -> list[list[str]]:
    """List changes of a recipe that reduce the memory of a rank, cheapest first."""
    must = ["model.dtype=bfloat16"] if config.model.dtype == "float32" else []
    longest, singles = max_sequence_tokens(config), []
    if not config.model.gradient_checkpointing:
        singles.append("model.gradient_checkpointing=true")
    if config.trainer.token_budget > longest:
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
    chosen, lines = change or plan, [f"{plan['recipe']} on {size}: {plan['placement']}"]
    lines += [f"FAULT: {fault}" for fault in plan["faults"]]
    if change:
        lines.append(f"FITS with {' '.join(change['set'])}: {change['placement']}")
    elif plan["faults"]:
        lines.append("No tried change makes it fit: use more or larger GPUs")
    else:
        lines.append("FITS as it is")
    lines += chosen["notes"]
    wrap = partial(fill, width=80, break_long_words=False, break_on_hyphens=False)
    text = [wrap(line, subsequent_indent="  ") for line in lines]
    if change or not plan["faults"]:
        words = (shlex.quote(word).replace(" ", "\0") for word in shlex.split(chosen["command"]))
        command = wrap(" ".join(words), width=78, subsequent_indent="  ")
        text += ["", command.replace("\n", " \\\n").replace("\0", " "), ""]
    hidden = ("recipe", "machine", "expected", "command", "placement")
    figures = {name: value for name, value in plan.items() if name not in hidden}
    rows = [f"{'at least':>15}  {'expected':>15}", *_format_figures(figures, plan["expected"])]
    return "\n".join([*text, *(wrap(row, subsequent_indent=" " * 38) for row in rows)])


def _format_figures(figures: Figures, expected: Figures) -> Iterator[str]:
    for name, value in figures.items():
        likely: Any = expected.get(name, {})
        if isinstance(value, dict) and value:
            likely = value.get("expected", likely) if name == "change" else likely
            yield f"{name}:"
            rows = {key: each for key, each in value.items() if key != "expected"}
            yield from (f"  {line}" for line in _format_figures(rows, likely))
        elif not isinstance(value, dict | list) and name not in ("command", "placement"):
            second = _format(likely) if expected.get(name, value) != value else ""
            yield f"{_format(value):>15}  {second:>15}  {name}"


def _format(value: Any) -> str:
    form = ",.3f" if isinstance(value, float) else "," * (type(value) is int)
    return format(value, form)
