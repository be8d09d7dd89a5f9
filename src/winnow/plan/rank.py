"""One rank of a run's learning side, run on fake tensors in a fake process group.

The production learner is built from its recipe and put through one update, with two full
micro-batches: the shapes are those of the run, and nothing is allocated or sent. Models are
described by their config.json. A CPU stands for the devices, since autograd on fake CUDA tensors
needs PyTorch's CUDA build; kernels are chosen as on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.distributed.device_mesh import DeviceMesh

from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.trainer import Fsdp2, Megatron, Sharded
from winnow.errors import ConfigError
from winnow.learning.batch import MicroBatch, all_micro_batches, pack_sequences
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding, make_mesh
from winnow.learning.runner import ModelRunner, Output
from winnow.learning.sequence import SequenceRunner
from winnow.learning.strategy import LossFn, Stats, Strategy
from winnow.models.causal_lm import load_causal_lm
from winnow.models.folders import torch_dtype
from winnow.models.value import load_reward_model, load_value_model
from winnow.plan.megatron import planned_megatron
from winnow.plan.tracker import DeviceTracker
from winnow.ranks import learner
from winnow.ranks.models import load_policy_model
from winnow.run.step_metrics import Attention
from winnow.types import IntArray

_COLUMNS = "old", "ref", "values", "returns", "advantages", "draws"
_CPU = torch.device("cpu")
_NEEDS_NUMBERS = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException


class _PlannedRunner(SequenceRunner):
    def _local_part(self, places: IntArray, n: int) -> slice:
        # As many as a rank can have, whose tokens are all written by the policy.
        return slice(min(len(places), n))


class Planned(Strategy):
    """A strategy on a rank whose neighbours are not there, which says what its tensors are for."""

    kernels: ClassVar[str] = "cuda"
    _tracker: DeviceTracker
    _role: str

    @property
    def held_modules(self) -> nn.Module:
        """The modules of the model that this rank runs."""
        return self.model

    def report_to(self, tracker: DeviceTracker, role: str) -> None:
        """Say from now on what the tensors of this model are for."""
        self._tracker, self._role = tracker, role
        tracker.know(self.held_modules, role)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._report("optimizer state", self.moments())

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output], loss_fn: LossFn
    ) -> Stats:
        figures = super().forward_backward(microbatches, outputs, loss_fn)
        self._report("gradients", self.gradients())
        return figures

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

    def _report(self, use: str, named: Iterator[tuple[str, Tensor]]) -> None:
        self._tracker.assign(use, ((f"{self._role} {name}", tensor) for name, tensor in named))

    def _reduce_figures(self, sums: Stats, maxima: Stats) -> Stats:
        return sums | maxima


class PlannedStrategy(Planned, FSDP2Strategy):
    """FSDP2's strategy on a rank whose neighbours are not there."""

    def _make_runner(self, model: Any, *readout: Any) -> ModelRunner:
        if self._sequence is None:
            return super()._make_runner(model, *readout)
        return _PlannedRunner(model, *readout, group=self._sequence)


@dataclass(frozen=True)
class RankRun:
    """A rank of a model that has run."""

    tracker: DeviceTracker
    strategy: Sharded | Megatron
    max_tokens: int
    """Tokens that it runs at once."""


@dataclass(frozen=True)
class RankPlan(RankRun):
    """A rank of the policy that has run, and those of models on ranks of their own."""

    learning: learner.Learning
    parameters: dict[str, int]
    """Parameters of each model, by role."""
    shape: Any
    """Hugging Face's configuration of the policy."""
    apart: dict[str, RankRun]
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
    model = load_policy_model(config.model, path, _CPU, config.run.seed, hollow="shapes")
    layout, most = config.trainer.strategy, config.trainer.microbatch_tokens
    assert isinstance(layout, Fsdp2 | Megatron)
    tracker = track(_attention_flop(config, model, most))
    tracker.chosen_experts = getattr(model.config, "num_experts_per_tok", None) or 0
    learning, models = _learn(config, model, path, strategy, tracker, stage)
    apart = {}
    for role in Roles(config):
        if role.kind == "ranks" and role.name != "policy":
            apart[role.name], models[role.name] = _run_apart(config, role.name, path)
    if "critic" in apart:
        passes = replace(learning.passes, **learner.critic_passes(models["critic"]))
        learning = replace(learning, passes=passes)
    parameters = {role: held.n_parameters for role, held in models.items()}
    ran = tracker, layout, most
    return RankPlan(*ran, learning, parameters, model.config, apart)


def _learn(
    config: Config,
    model: Any,
    path: str,
    strategy: type[PlannedStrategy],
    tracker: DeviceTracker,
    stage: int,
) -> tuple[learner.Learning, dict[str, Planned]]:
    """Build the learner on a rank and take its steps; also returns its models, by role."""
    chosen, fake = config.trainer.strategy, fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    planned: Any = contextlib.nullcontext(strategy)
    if isinstance(chosen, Megatron):
        planned = planned_megatron(chosen, model.config, Planned, strategy.kernels)
    full = full_micro_batches(config)
    with _fake_ranks(cast("Sharded | Megatron", chosen), stage) as mesh, planned as kind:

        def hold(*args: Any, **options: Any) -> Strategy:
            with fake, tracker:
                return cast(Strategy, kind(*args, **options))

        learning = learner.make_learner(config, model, model.config.vocab_size, path, mesh, hold)
        roles = {"reference": learning.reference, "policy": learning.policy, **learning.others}
        models = {role: cast(Planned, each) for role, each in roles.items() if each is not None}
        with fake, tracker:
            for role, each in models.items():
                each.report_to(tracker, role)
            try:
                take_steps(config, learning, full, tracker.begin)
            except _NEEDS_NUMBERS as error:
                raise ConfigError(
                    f"algorithm/policy_loss={config.algorithm.policy_loss.name} or the correction "
                    f"asks for sizes that follow from numbers ({error.func}), which a plan does "
                    "not have; plan with algorithm/policy_loss=ppo_clip, which takes about the same"
                ) from error
    return learning, models


def _run_apart(config: Config, role: str, path: str) -> tuple[RankRun, Planned]:
    """Run the passes of a model, and its update if it learns, as the first of its own ranks."""
    section: Any = config.reward.model if role == "reward_model" else getattr(config, role)
    most = getattr(section, "microbatch_tokens", None) or config.trainer.microbatch_tokens
    options = dict[str, Any]()
    if role == "reference":
        model = learner.load_role(load_causal_lm, config, role, path, _CPU, "shapes")
        options = learner.readout_options(config, cast(Any, model).config.vocab_size)
    elif role == "critic":
        model = learner.load_role(load_value_model, config, role, path, _CPU, "shapes")
        options = learner.critic_options(config)
    else:
        dtype = torch_dtype(section.dtype or config.model.dtype)
        model = load_reward_model(section.path, dtype, _CPU, hollow="shapes")
    tracker, micro = DeviceTracker(_attention_flop(config, model, most)), _full(config, most)
    fake, sharding = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True), section.strategy
    with _fake_ranks(sharding) as mesh, fake, tracker:
        model.requires_grad_(role == "critic")
        strategy = PlannedStrategy(model, mesh, Sharding(offload=sharding.offload), **options)
        strategy.report_to(tracker, role)
        if role == "critic":
            _fill_optimizer(strategy)
            _train_role(config, role, strategy, micro, tracker.begin)
        else:
            tracker.begin(role)
            strategy.forward([micro], frozenset({"logprob" if role == "reference" else "score"}))
    return RankRun(tracker, sharding, most), strategy


def _attention_flop(config: Config, model: Any, max_tokens: int) -> Callable[[int], float]:
    """Return the FLOP of packed attention over a full micro-batch, by heads x size of a head."""
    lengths, attention = np.array(micro_lengths(config, max_tokens)), Attention.of(model.config)
    whole = attention.flop(np.zeros_like(lengths), lengths) / max(sum(attention.widths.values()), 1)
    return lambda width: whole * width


@contextlib.contextmanager
def _fake_ranks(strategy: Sharded | Megatron, stage: int = 0) -> Iterator[DeviceMesh]:
    """Be the first of a stage's many ranks, which are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = stage * strategy.ranks // stages_of(strategy)
    dist.init_process_group("fake", rank=rank, world_size=strategy.ranks, store=FakeStore())
    try:
        yield make_mesh("cpu", strategy.ranks, getattr(strategy, "replicas", 1))
    finally:
        dist.destroy_process_group()


def stages_of(strategy: object) -> int:
    """Return the stages that micro-batches pass through."""
    return strategy.pipeline if isinstance(strategy, Megatron) else 1


def cut_update(config: Config) -> int:
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
    return _full(config, tokens), _full(config, config.critic.microbatch_tokens or tokens)


def _full(config: Config, max_tokens: int) -> MicroBatch:
    """Make a micro-batch of so many tokens, of the longest samples."""
    ids = [np.zeros(length, np.int64) for length in micro_lengths(config, max_tokens)]
    batch = pack_sequences(ids, last=config.rollout.max_response_tokens)
    T = len(batch.token_ids)
    batch.columns.update({name: torch.zeros(T) for name in _COLUMNS})
    batch.columns["selected"] = torch.zeros(T, dtype=torch.bool)
    return all_micro_batches(batch, T)[0]


def take_steps(
    config: Config,
    learning: learner.Learning,
    full: tuple[MicroBatch, MicroBatch],
    begin: Callable[[str], object],
) -> None:
    """Fill the optimizers, then take a step's passes and an update of each model that learns.

    Args:
        full: of `full_micro_batches`.
        begin: is told the name of each phase.
    """
    learners = {**learning.others, "policy": learning.policy}
    for strategy in learners.values():
        _fill_optimizer(strategy)
    if learner.make_objective(config).old == "pass":
        begin("old log-probs")
        learning.policy.forward(full[:1], frozenset({"logprob", "entropy"}))
    if learning.reference is not None:
        begin("reference")
        learning.reference.forward(full[:1], frozenset({"logprob"}))
    for role, strategy in learners.items():
        _train_role(config, role, strategy, full[role == "critic"], begin)


def _fill_optimizer(strategy: Any) -> None:
    """Give a model the moments that it has after a resume, for an update to step with."""
    moments = strategy.blank_state()["optimizer"]
    strategy.load_state_dict(strategy.state_dict() | {"optimizer": moments})


def _train_role(
    config: Config,
    role: str,
    strategy: Strategy,
    micro: MicroBatch,
    begin: Callable[[str], object],
) -> None:
    """Take an update of a model, behind a critic's pass for its values."""
    loss = cast(Any, learner.make_objective(config))
    if role == "critic":
        loss = learner.make_value_objective(config)
        begin("values")
        strategy.forward([micro], loss.outputs)
    begin(f"{role} update")
    # The same again and again: gradients of the second are added to those of the first.
    strategy.forward_backward([micro] * cut_update(config), loss.outputs, loss)
    begin(f"{role} optimizer")
    strategy.optimizer_step(1e-6)
