"""A recipe's plan: what its ranks and engines take on given GPUs, and the change that makes it fit.

recipe ─► ranks of the machine ─► run_rank (fake tensors) ─► figures ─► faults ─► a change
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.config.load import load_recipe
from winnow.config.model import ModelConfig
from winnow.config.rollout import VllmEngineConfig
from winnow.config.root import Config
from winnow.config.rules import longest_tokens, workers_of
from winnow.config.trainer import Fsdp2
from winnow.errors import ConfigError, ModelError
from winnow.plan.estimate import (
    EngineFit,
    Figures,
    Samples,
    dealing_figures,
    drawn_samples,
    engine_figures,
    engine_fit,
    given_samples,
    learning_figures,
    memory_figures,
    run_figures,
    shares_gpus,
    step_flop,
    transfer_figures,
)
from winnow.plan.machine import Machine
from winnow.plan.rank import RankPlan, run_rank

Tell = Callable[[str], None]
_DEPTHS = 2, 4
"""Layers of the models by which changes are tried out first: memory grows by the same with each
layer."""


@dataclass(frozen=True)
class PlanRequest:
    """What to plan."""

    recipe: str
    overrides: tuple[str, ...]
    machine: Machine
    is_given: bool = True
    """The machine's size was given, and ranks are to fill it."""
    mean_response: float | None = None
    """Tokens of an answer in the mean; None takes a quarter of the limit."""
    lengths: tuple[Sequence[int], Sequence[int]] | None = None
    """Measured tokens of prompts and their answers."""
    kept: float = 1.0
    """Share of the groups that the filter keeps."""
    price: float | None = None
    """Of a GPU for an hour."""
    finds_change: bool = True
    """Try out changes where the recipe does not fit."""


def make_plan(request: PlanRequest, tell: Tell = lambda line: None) -> Figures:
    """Plan a recipe on a machine.

    Raises:
        ConfigError: the recipe is not one that can be planned.
        ModelError: a model cannot be described.
    """
    layout = layout_of(request)
    config = load_recipe(request.recipe, [*request.overrides, *layout])
    path = described(config)
    tell(f"running one of {ranks_of(config)} ranks on fake tensors")
    rank = run_rank(config, path)
    machine = request.machine
    memory = memory_figures(rank, config, machine)
    split = getattr(config.rollout.engine, "tensor_parallel", 1)
    fit = engine_fit(config, rank, machine, memory["peak_gib"], split)
    faults = list(_faults(config, rank, memory, fit, machine))
    plan: Figures = {
        "recipe": request.recipe,
        "overrides": [*request.overrides, *layout],
        "machine": {
            "gpu": machine.name,
            "gpu_gib": machine.gpu.memory_gib,
            "nodes": machine.nodes,
            "per_node": machine.per_node,
        },
        "parameters": rank.parameters,
        "faults": faults,
        "memory": memory,
        **_course(request, config, rank, fit),
    }
    if request.finds_change and (rank.refusal or memory["peak_gib"] > machine.limit_gib):
        plan["change"] = find_change(request, config, path, tell)
    return plan


def _course(request: PlanRequest, config: Config, rank: RankPlan, fit: EngineFit) -> Figures:
    """Return all that depends on the lengths of answers."""
    machine, samples = request.machine, _samples(request, config)
    dealt = dealing_figures(config, samples, int(rank.model_config.hidden_size))
    learning = learning_figures(rank, config, machine, dealt)
    engine = engine_figures(fit, config, rank, machine, samples, request.kept)
    transfers = transfer_figures(config, rank, machine)
    seconds = dict(learning["seconds"])
    seconds["publication"] = transfers["publication"]["seconds"]
    seconds["checkpoint"] = transfers["checkpoint"]["seconds"] / (
        config.trainer.save_every or config.trainer.steps
    )
    if "seconds" in engine:
        seconds["rollout"] = engine["seconds"]
    engines = 0 if shares_gpus(config) else engine["engines"] * engine["tensor_parallel"]
    devices = max(ranks_of(config) + engines, machine.devices if request.is_given else 0)
    flop = step_flop(rank.learning.passes, samples, engine["tokens"])
    peak = machine.gpu.float32 if config.model.dtype == "float32" else machine.gpu.bfloat16
    total = sum(seconds.values())
    return {
        "lengths": samples.told,
        "lockstep": dealt["lockstep"],
        "rounds": dealt["rounds"],
        "updates": dealt["updates"],
        "sent_gib": learning["sent_gib"],
        "engine": engine,
        **transfers,
        "seconds": seconds,
        "pflop": flop / 1e15,
        "mfu": flop / (total * devices * peak * 1e12) if "rollout" in seconds else None,
        "run": run_figures(config, seconds, engine["tokens"], devices, request.price)
        if "rollout" in seconds
        else None,
    }


def _samples(request: PlanRequest, config: Config) -> Samples:
    if request.lengths is None:
        return drawn_samples(config, request.mean_response)
    return given_samples(*request.lengths, config)


def layout_of(request: PlanRequest) -> list[str]:
    """Return the overrides that have ranks fill the machine, where its size was given.

    Engines that do not share the ranks' GPUs keep theirs.

    Raises:
        ConfigError: there are no GPUs left for ranks.
    """
    config = load_recipe(request.recipe, request.overrides)
    strategy = config.trainer.strategy
    if isinstance(strategy, Fsdp2) and not request.is_given:
        return []
    engines = 0
    if not shares_gpus(config):
        each = getattr(config.rollout.engine, "tensor_parallel", 1)
        engines = workers_of(config)["rollout"] * each
    ranks = request.machine.devices - engines
    if ranks < 1:
        raise ConfigError(
            f"{request.machine.devices} GPUs (--nodes x --gpus) leave none for ranks beside "
            f"{engines} of engines; give more, or lower rollout.engine.processes"
        )
    chosen = [] if isinstance(strategy, Fsdp2) else ["trainer/strategy=fsdp2"]
    return [*chosen, f"trainer.strategy.ranks={ranks}"]


def ranks_of(config: Config) -> int:
    """Return the number of ranks that learn."""
    return workers_of(config)["policy"]


def described(config: Config) -> str:
    """Return the folder of the policy's model, which has a config.json at least.

    Raises:
        ModelError: there is none, for the policy or another role.
    """
    named = {"model.path": config.model.path}
    named |= {"critic.path": config.critic.path, "reference.path": config.reference.path}
    for field, path in named.items():
        if path is None and field != "model.path":
            continue
        folder = Path(path or "").expanduser()
        if path is None or not (folder / "config.json").is_file():
            raise ModelError(
                f"{field}={path or 'null'} is no folder with a config.json, which is all that a "
                f"plan needs of a model (no weights); copy it from the hub, and set {field}=FOLDER"
            )
    return str(Path(config.model.path or "").expanduser())


def _faults(
    config: Config, rank: RankPlan, memory: Figures, fit: EngineFit, machine: Machine
) -> Iterator[str]:
    """Yield a line for each reason why the recipe would fail on these GPUs."""
    if rank.refusal is not None:
        yield rank.refusal
    if memory["peak_gib"] > machine.limit_gib:
        largest = memory["tensors"][0]
        yield (
            f"a rank holds {memory['peak_gib']:,.1f} GiB in the {memory['phase']} (most of it: "
            f"{largest['role']}, {largest['made_by'].strip()}), and a GPU of "
            f"{machine.gpu.memory_gib:g} GiB has room for {machine.limit_gib:.1f}"
        )
    if not fit.fits:
        beside = ", beside a rank" if shares_gpus(config) else ""
        wanted = max(fit.cache_gib, fit.row_gib)
        yield (
            f"an engine on {fit.tensor_parallel} GPU{'s' * (fit.tensor_parallel > 1)} needs "
            f"{fit.weights_gib:.1f} GiB for weights and {wanted:.1f} for keys and values on each "
            f"and has {max(fit.room_gib, 0.0):.1f}{beside}"
            f"{_engine_remedy(config, rank, machine)}"
        )


def _engine_remedy(config: Config, rank: RankPlan, machine: Machine) -> str:
    """Return the least split of a vLLM engine on GPUs of its own that fits, as a remedy."""
    heads = rank.model_config.num_attention_heads
    bf16 = config.model.model_copy(update={"dtype": "bfloat16"})
    for dtype in dict.fromkeys((config.model.dtype, "bfloat16")):
        engine = VllmEngineConfig(processes=max(workers_of(config)["rollout"], 1))
        tried = config.model_copy(
            update={
                "model": config.model if dtype == config.model.dtype else bf16,
                "rollout": config.rollout.model_copy(update={"engine": engine}),
                "cluster": Config.model_fields["cluster"].get_default(call_default_factory=True),
            }
        )
        for split in (1, 2, 4, 8, 16):
            fits = heads % split == 0 and split <= machine.per_node
            if fits and engine_fit(tried, rank, machine, 0.0, split).fits:
                also = "" if dtype == config.model.dtype else f" and model.dtype={dtype}"
                return (
                    "; set rollout/engine=vllm rollout.engine.tensor_parallel="
                    f"{split} rollout.engine.processes=N{also}, on GPUs of their own"
                )
    return "; use GPUs with more memory"


def find_change(request: PlanRequest, config: Config, path: str, tell: Tell) -> Figures | None:
    """Find the first change, of those with fewest keys, after which a rank fits.

    Each is tried on shallow models first, and confirmed on the whole one.
    """
    layout = layout_of(request)
    limit = request.machine.limit_gib
    for change in changes(config):
        try:
            tried = load_recipe(request.recipe, [*request.overrides, *layout, *change])
            tell(f"trying {' '.join(change)}")
            guessed = _guess(tried, path, request.machine)
            if guessed > limit:
                continue
            found = run_rank(tried, path)
        except (ConfigError, ModelError):
            continue  # heads or ranks do not divide
        memory = memory_figures(found, tried, request.machine)
        if memory["peak_gib"] <= limit:
            return {"set": change, "peak_gib": memory["peak_gib"], "phase": memory["phase"]}
    return None


def changes(config: Config) -> list[list[str]]:
    """List changes of a recipe that take memory from a rank, the smallest first."""
    singles: list[list[str]] = []
    must = ["model.dtype=bfloat16"] if config.model.dtype == "float32" else []
    if not config.model.gradient_checkpointing:
        singles.append(["model.gradient_checkpointing=true"])
    if config.trainer.microbatch_tokens > (longest := longest_tokens(config)):
        singles.append([f"trainer.microbatch_tokens={longest}"])
    singles += [[f"trainer.strategy.sequence={n}"] for n in (2, 4, 8)]
    singles.append(["trainer.strategy.offload=true"])
    pairs = [[*singles[0], *other] for other in singles[1:]]
    most = [*singles[0], "trainer.strategy.sequence=8", "trainer.strategy.offload=true"]
    more = [[*must, *change] for change in (*singles, *pairs, most)]
    return [must, *more] if must else more


def _guess(config: Config, path: str, machine: Machine) -> float:
    """Guess a rank's peak in GiB from models of few layers."""
    layers = int(json.loads((Path(path) / "config.json").read_text())["num_hidden_layers"])
    if layers <= 2 * max(_DEPTHS):
        return 0.0
    found = []
    for depth in _DEPTHS:
        with shallow(config, path, depth) as (less, folder):
            found.append(memory_figures(run_rank(less, folder), less, machine)["peak_gib"])
    each = (found[1] - found[0]) / (_DEPTHS[1] - _DEPTHS[0])
    return float(found[1] + each * (layers - _DEPTHS[1]))


@contextlib.contextmanager
def shallow(config: Config, path: str, layers: int) -> Iterator[tuple[Config, str]]:
    """Make a recipe whose models have so many layers, described in a temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        folders: dict[str, str] = {}

        def cut(role: str, given: str) -> str:
            folder = Path(name, role)
            folder.mkdir()
            told: dict[str, Any] = json.loads((Path(given) / "config.json").read_text())
            told["num_hidden_layers"] = layers
            if told.get("layer_types"):
                told["layer_types"] = told["layer_types"][:layers]
            (folder / "config.json").write_text(json.dumps(told))
            folders[role] = str(folder)
            return str(folder)

        model: ModelConfig = config.model.model_copy(update={"path": cut("model", path)})
        less = config.model_copy(update={"model": model})
        for role in ("critic", "reference"):
            own = getattr(config, role)
            if own.path is not None:
                given = str(Path(own.path).expanduser())
                section = own.model_copy(update={"path": cut(role, given)})
                less = less.model_copy(update={role: section})
        yield less, folders["model"]
