"""One rank of a run's learning side, run on fake tensors in a fake process group.

The production learner is built from its recipe and put through one update, with two full
micro-batches: the shapes are those of the run, and nothing is allocated or sent. Models are
described by their config.json. A CPU stands for the devices, since autograd on fake CUDA tensors
needs PyTorch's CUDA build; kernels are chosen as on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from winnow.config.judge import SequenceClassifier, sharding_of
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.trainer import Megatron, Sharded
from winnow.errors import ConfigError
from winnow.learning.batch import MicroBatch, all_micro_batches, pack_sequences
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding, make_mesh
from winnow.learning.runner import ModelRunner, Output
from winnow.learning.sequence import SequenceRunner
from winnow.learning.strategy import Stats, Strategy
from winnow.models.causal_lm import load_causal_lm
from winnow.models.folders import torch_dtype
from winnow.models.value import load_reward_model, load_value_model
from winnow.plan.megatron import planned_megatron
from winnow.plan.tracker import DeviceTracker
from winnow.ranks.learner import (
    Learning,
    critic_options,
    critic_passes,
    load_role,
    make_learner,
    make_objective,
    make_value_objective,
    readout_options,
)
from winnow.ranks.models import check_attention, load_policy_model
from winnow.run.step_metrics import Attention

_COLUMNS = "old", "ref", "values", "returns", "advantages", "draws"
Assign = Callable[[str, str, Strategy], object]
"""Takes what tensors are for, the role of a model, and the strategy that has them."""


class _PlannedRunner(SequenceRunner):
    def _places(self, sources: Tensor, n: int) -> Tensor:
        # As many as a rank can have, whose tokens are all written by the policy.
        return torch.arange(min(len(sources), n))


class Planned(Strategy):
    """A strategy on a rank whose neighbours are not there, which says what its tensors are for."""

    kernels: ClassVar[str] = "cuda"

    @property
    def held_modules(self) -> nn.Module:
        """The modules of the model that this rank runs."""
        return self.model

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the optimizer keeps, fp32 masters of weights in half precision included."""
        own = {id(p) for p in self.held_modules.parameters()}
        for name, master in self._masters.items():
            if id(master) not in own:
                yield f"{name} master", master
            for key, moment in self._optimizer.state[master].items():
                yield f"{name} {key}", moment

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the sums of gradients that wait for the optimizer."""
        for name, master in self._masters.items():
            if master.grad is not None:
                yield name, master.grad

    def _over_ranks(self, sums: Stats, maxima: Stats) -> Stats:
        return sums | maxima


class PlannedStrategy(Planned, FSDP2Strategy):
    """FSDP2's strategy on a rank whose neighbours are not there."""

    def _make_runner(self, model: Any, *readout: Any) -> ModelRunner:
        if self._sequence is None:
            return super()._make_runner(model, *readout)
        return _PlannedRunner(model, *readout, group=self._sequence)


@dataclass(frozen=True)
class RankPlan:
    """A rank that has run."""

    tracker: DeviceTracker
    learning: Learning
    parameters: dict[str, int]
    """Parameters of each model, by role."""
    shape: Any
    """Hugging Face's configuration of the policy."""
    refusal: str | None
    """Why GPUs could not compute the policy's attention."""
    apart: dict[str, DeviceTracker]
    """By role, a rank of each model on ranks of its own."""


def run_rank(
    config: Config,
    path: str,
    strategy: type[PlannedStrategy] = PlannedStrategy,
    track: type[DeviceTracker] = DeviceTracker,
    stage: int = 0,
) -> RankPlan:
    """Run the passes and an update of a recipe with ranks, as the first rank of a stage.

    Args:
        path: of the policy's model, a folder with a config.json at least.
        strategy: whose `kernels` ranks have.
        track: sees what they hold.
        stage: of the pipeline; 0 where there is none.

    Raises:
        ConfigError: the recipe's loss cannot be run without numbers.
        ModelError: a model cannot be described by its config.json, or shared by the ranks.
    """
    cpu, refusal = torch.device("cpu"), None
    model = load_policy_model(config.model, path, cpu, config.run.seed, hollow="shapes")
    try:
        check_attention(config, model, "model.dtype", strategy.kernels)
    except ConfigError as error:
        refusal = str(error)
    tracker = track(_attention_flop(config, model, config.trainer.microbatch_tokens))
    tracker.chosen_experts = getattr(model.config, "num_experts_per_tok", None) or 0
    # No kernel of CUDA takes float32 with fewer heads for keys: check_attention refuses the same.
    exact = sdpa_kernel(SDPBackend.MATH) if refusal else contextlib.nullcontext()
    with exact:
        learning, parameters = _learn(config, model, path, strategy, tracker, stage)
    apart = {}
    for role in Roles(config):
        if role.kind == "ranks" and role.name != "policy":
            apart[role.name], held = _run_apart(config, role.name, path)
            parameters[role.name] = held.parameters
            if role.name == "critic":
                passes = replace(learning.passes, **critic_passes(held))
                learning = replace(learning, passes=passes)
    return RankPlan(tracker, learning, parameters, model.config, refusal, apart)


def _learn(
    config: Config,
    model: Any,
    path: str,
    strategy: type[PlannedStrategy],
    tracker: DeviceTracker,
    stage: int,
) -> tuple[Learning, dict[str, int]]:
    """Build the learner on a rank and take its steps; also returns each model's parameters."""
    chosen, fake = config.trainer.strategy, FakeTensorMode(allow_non_fake_inputs=True)
    planned: Any = contextlib.nullcontext(strategy)
    full = full_micro_batches(config)
    if isinstance(chosen, Megatron):
        planned = planned_megatron(chosen, model.config, Planned, strategy.kernels)
    try:
        mesh = _fake_mesh(cast("Sharded | Megatron", chosen), stage)
        with planned as kind:

            def hold(*args: Any, **options: Any) -> Strategy:
                with fake, tracker:
                    return cast(Strategy, kind(*args, **options))

            learning = make_learner(config, model, model.config.vocab_size, path, mesh, hold)
            roles = {"reference": learning.reference, "policy": learning.policy, **learning.others}
            held = {role: cast(Planned, each) for role, each in roles.items() if each is not None}
            with fake, tracker:
                for role, each in held.items():
                    tracker.know(each.held_modules, role)
                take_steps(config, learning, full, tracker.begin, partial(_assign, tracker))
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"algorithm/policy_loss={config.algorithm.policy_loss.name} or the correction asks "
            f"for sizes that follow from numbers ({error.func}), which a plan does not have; plan "
            "with algorithm/policy_loss=ppo_clip, which takes about the same"
        ) from error
    finally:
        dist.destroy_process_group()
    return learning, {role: each.parameters for role, each in held.items()}


def _run_apart(config: Config, role: str, path: str) -> tuple[DeviceTracker, PlannedStrategy]:
    """Run the passes of a model, and its update if it learns, as the first of its own ranks.

    Returns:
        What the rank held and did, and the strategy that holds the model.
    """
    cpu, scorer, options = torch.device("cpu"), config.reward.model, dict[str, Any]()
    if role == "reference":
        model = load_role(load_causal_lm, config, role, path, cpu, "shapes")
        options = readout_options(config, cast(Any, model).config.vocab_size)
    elif role == "critic":
        model = load_role(load_value_model, config, role, path, cpu, "shapes")
        options = critic_options(config)
    else:
        assert isinstance(scorer, SequenceClassifier)
        dtype = torch_dtype(scorer.dtype or config.model.dtype)
        model = load_reward_model(scorer.path, dtype, cpu, hollow="shapes")
    sharding, fake = sharding_apart(config, role), FakeTensorMode(allow_non_fake_inputs=True)
    most = tokens_apart(config, role)
    tracker = DeviceTracker(_attention_flop(config, model, most))
    micro = full_micro_batch(config, most)
    try:
        mesh = _fake_mesh(sharding)
        with fake, tracker:
            held = Sharding(offload=sharding.offload)
            model.requires_grad_(role == "critic")
            strategy = PlannedStrategy(model, mesh, held, **options)
            tracker.know(strategy.model, role)
            if role == "critic":
                assign = partial(_assign, tracker)
                _fill_optimizer(role, strategy, assign)
                _train_role(config, role, strategy, micro, tracker.begin, assign)
            else:
                tracker.begin(role)
                outputs: set[Output] = {"logprob" if role == "reference" else "score"}
                strategy.forward([micro], frozenset(outputs))
    finally:
        dist.destroy_process_group()
    return tracker, strategy


def sharding_apart(config: Config, role: str) -> Sharded:
    """Return how a model with ranks of its own is sharded over them."""
    found = sharding_of(config.reward.model)
    if role != "reward_model":
        found = getattr(config, role).strategy
    assert isinstance(found, Sharded)
    return found


def tokens_apart(config: Config, role: str) -> int:
    """Return the most tokens that ranks of a model apart run at once."""
    section = {"critic": config.critic, "reward_model": config.reward.model}.get(role)
    return getattr(section, "microbatch_tokens", None) or config.trainer.microbatch_tokens


def _attention_flop(config: Config, model: Any, max_tokens: int) -> Callable[[int], float]:
    """Return the FLOP of packed attention over a full micro-batch, by heads x size of a head."""
    lengths, attention = np.array(micro_lengths(config, max_tokens)), Attention.of(model.config)
    whole = attention.flop(np.zeros_like(lengths), lengths) / max(sum(attention.widths.values()), 1)
    return lambda width: whole * width


def _fake_mesh(strategy: Sharded | Megatron, stage: int = 0) -> DeviceMesh:
    """Become the first of a stage's many ranks, which are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = stage * strategy.ranks // stages_of(strategy)
    dist.init_process_group("fake", rank=rank, world_size=strategy.ranks, store=FakeStore())
    return make_mesh("cpu", strategy.ranks, getattr(strategy, "replicas", 1))


def stages_of(strategy: object) -> int:
    """Return the stages that micro-batches pass through."""
    return strategy.pipeline if isinstance(strategy, Megatron) else 1


def update_micro_batches(config: Config) -> int:
    """Return the micro-batches of an update that is run: gradients add up, and stages are full."""
    return max(2, stages_of(config.trainer.strategy))


def micro_lengths(config: Config, max_tokens: int) -> list[int]:
    """Return the samples of a micro-batch of as many tokens as one may have, in tokens."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    lengths = [longest] * max(max_tokens // longest, 1)
    rest = max_tokens - sum(lengths)
    return [*lengths, rest] if rest > 1 else lengths


def full_micro_batches(config: Config) -> tuple[MicroBatch, MicroBatch]:
    """Make micro-batches of policy and critic, of as many tokens as one may have."""
    tokens = config.trainer.microbatch_tokens
    most = tokens, config.critic.microbatch_tokens or tokens
    return full_micro_batch(config, most[0]), full_micro_batch(config, most[1])


def full_micro_batch(config: Config, max_tokens: int) -> MicroBatch:
    """Make a micro-batch of as many tokens as one may have, of the longest samples."""
    ids = [np.zeros(length, np.int64) for length in micro_lengths(config, max_tokens)]
    batch = pack_sequences(ids, last=config.rollout.max_response_tokens)
    T = len(batch.token_ids)
    batch.columns.update({name: torch.zeros(T) for name in _COLUMNS})
    batch.columns["selected"] = torch.zeros(T, dtype=torch.bool)
    return all_micro_batches(batch, T)[0]


def take_steps(
    config: Config,
    learning: Learning,
    full: tuple[MicroBatch, MicroBatch],
    begin: Callable[[str], object],
    assign: Assign = lambda what, role, strategy: None,
) -> None:
    """Fill the optimizers, then take a step's passes and an update of each model that learns.

    Args:
        full: of `full_micro_batches`.
        begin: is told the name of each phase.
        assign: is told what tensors are for.
    """
    learners: dict[str, Any] = {**learning.others, "policy": learning.policy}
    for role, strategy in learners.items():
        _fill_optimizer(role, strategy, assign)
    if make_objective(config).old == "pass":
        begin("old log-probs")
        learning.policy.forward(full[:1], frozenset({"logprob", "entropy"}))
    if learning.reference is not None:
        begin("reference")
        learning.reference.forward(full[:1], frozenset({"logprob"}))
    for role, strategy in learners.items():
        _train_role(config, role, strategy, full[role == "critic"], begin, assign)


def _fill_optimizer(role: str, strategy: Any, assign: Assign) -> None:
    """Give a model the moments that it has after a resume, for an update to step with."""
    moments = strategy.blank_state()["optimizer"]
    strategy.load_state_dict(strategy.state_dict() | {"optimizer": moments})
    del moments
    assign("optimizer state", role, strategy)


def _train_role(
    config: Config,
    role: str,
    strategy: Strategy,
    micro: MicroBatch,
    begin: Callable[[str], object],
    assign: Assign,
) -> None:
    """Take an update of a model, behind a critic's pass for its values."""
    loss = cast(Any, make_objective(config))
    if role == "critic":
        loss = make_value_objective(config)
        begin("values")
        strategy.forward([micro], loss.outputs)
    begin(f"{role} update")
    # The same again and again: gradients of the second are added to those of the first.
    strategy.forward_backward([micro] * update_micro_batches(config), loss.outputs, loss)
    assign("gradients", role, strategy)
    begin(f"{role} optimizer")
    strategy.optimizer_step(1e-6)


def _assign(tracker: DeviceTracker, what: str, role: str, held: Strategy) -> None:
    """Book what a strategy's gradients or moments are for."""
    assert isinstance(held, Planned)
    named = held.gradients() if what == "gradients" else held.moments()
    tracker.assign(what, ((f"{role} {name}", tensor) for name, tensor in named))
