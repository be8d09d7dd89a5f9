"""One rank of a run's learning side, run on fake tensors in a fake process group.

The production learner is built from its recipe and put through one update, with two full
micro-batches: the shapes are those of the run, and nothing is allocated or sent. Models are
described by their config.json. A CPU stands for the devices, since autograd on fake CUDA tensors
needs PyTorch's CUDA build; kernels are chosen as on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from winnow.config.root import Config
from winnow.config.trainer import Fsdp2
from winnow.errors import ConfigError
from winnow.learning.batch import MicroBatch, all_micro_batches, pack_sequences
from winnow.learning.fsdp2 import FSDP2Strategy, make_mesh
from winnow.learning.sequence import SequenceRunner
from winnow.learning.strategy import ModelRunner, Stats
from winnow.plan.tracker import DeviceTracker
from winnow.runs.build_learner import Learning, make_learner, make_objective, make_value_objective
from winnow.runs.loading import check_attention, load_policy_model
from winnow.runs.metrics import Attention

_COLUMNS = "old", "ref", "values", "returns", "advantages", "draws"
Assign = Callable[[str, Iterable[tuple[str, Tensor]]], object]
"""Takes a role and tensors with their names."""


class _PlannedRunner(SequenceRunner):
    def _places(self, sources: Tensor, n: int) -> Tensor:
        # As many as a rank can have, whose tokens are all written by the policy.
        return torch.arange(min(len(sources), n))


class PlannedStrategy(FSDP2Strategy):
    """A strategy on a rank whose neighbours are not there."""

    kernels: ClassVar[str] = "cuda"

    def _make_runner(self, model: Any, *readout: Any) -> ModelRunner:
        if self._sequence is None:
            return super()._make_runner(model, *readout)
        return _PlannedRunner(model, *readout, group=self._sequence)

    def _over_ranks(self, sums: Stats, maxima: Stats) -> Stats:
        return sums | maxima


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


def run_rank(
    config: Config,
    path: str,
    strategy: type[PlannedStrategy] = PlannedStrategy,
    track: type[DeviceTracker] = DeviceTracker,
) -> RankPlan:
    """Run the passes and an update of a recipe with ranks, as its first rank.

    Args:
        path: of the policy's model, a folder with a config.json at least.
        strategy: whose `kernels` ranks have.
        track: sees what they hold.

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
    lengths = np.array(micro_lengths(config, config.trainer.microbatch_tokens))
    attention = Attention.of(model.config)
    whole = attention.flop(np.zeros_like(lengths), lengths) / max(sum(attention.widths.values()), 1)
    tracker = track(lambda width: whole * width)
    fake, full = FakeTensorMode(allow_non_fake_inputs=True), full_micro_batches(config)
    # No kernel of CUDA takes float32 with fewer heads for keys: check_attention refuses the same.
    exact = sdpa_kernel(SDPBackend.MATH) if refusal else contextlib.nullcontext()

    def hold(*args: Any, **options: Any) -> FSDP2Strategy:
        with fake, tracker:
            return strategy(*args, **options)

    try:
        mesh = _fake_mesh(config)
        learning = make_learner(config, model, model.config.vocab_size, path, mesh, hold)
        roles = {"reference": learning.reference, "policy": learning.policy, **learning.others}
        parameters = {role: each.parameters for role, each in roles.items() if each is not None}
        with exact, fake, tracker:
            for role, each in roles.items():
                if each is not None:
                    tracker.know(each.model, role)
            take_steps(config, learning, full, tracker.begin, tracker.assign)
    except (DataDependentOutputException, DynamicOutputShapeException) as error:
        raise ConfigError(
            f"algorithm/policy_loss={config.algorithm.policy_loss.name} or the correction asks "
            f"for sizes that follow from numbers ({error.func}), which a plan does not have; plan "
            "with algorithm/policy_loss=ppo_clip, which takes about the same"
        ) from error
    finally:
        dist.destroy_process_group()
    return RankPlan(tracker, learning, parameters, model.config, refusal)


def _fake_mesh(config: Config) -> DeviceMesh:
    """Become the first of many ranks that are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    strategy = config.trainer.strategy
    assert isinstance(strategy, Fsdp2)
    dist.init_process_group("fake", rank=0, world_size=strategy.ranks, store=FakeStore())
    return make_mesh("cpu", strategy.ranks, strategy.replicas)


def micro_lengths(config: Config, max_tokens: int) -> list[int]:
    """Return the samples of a micro-batch of as many tokens as one may have, in tokens."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    lengths = [longest] * max(max_tokens // longest, 1)
    rest = max_tokens - sum(lengths)
    return [*lengths, rest] if rest > 1 else lengths


def full_micro_batches(config: Config) -> tuple[MicroBatch, MicroBatch]:
    """Make micro-batches of policy and critic, of as many tokens as one may have."""

    def full(max_tokens: int) -> MicroBatch:
        ids = [np.zeros(length, np.int64) for length in micro_lengths(config, max_tokens)]
        batch = pack_sequences(ids, last=config.rollout.max_response_tokens)
        T = len(batch.token_ids)
        batch.columns.update({name: torch.zeros(T) for name in _COLUMNS})
        batch.columns["selected"] = torch.zeros(T, dtype=torch.bool)
        return all_micro_batches(batch, T)[0]

    tokens = config.trainer.microbatch_tokens
    return full(tokens), full(config.critic.microbatch_tokens or tokens)


def take_steps(
    config: Config,
    learning: Learning,
    full: tuple[MicroBatch, MicroBatch],
    begin: Callable[[str], object],
    assign: Assign = lambda role, named: None,
) -> None:
    """Fill the optimizers, then take a step's passes and an update of each model that learns.

    Args:
        full: of `full_micro_batches`.
        begin: is told the name of each phase.
        assign: is told what tensors are for.
    """
    learners: dict[str, Any] = {**learning.others, "policy": learning.policy}
    for role, strategy in learners.items():
        # As after a resume: an update that has moments to step with.
        moments = strategy.blank_state()["optimizer"]
        strategy.load_state_dict(strategy.state_dict() | {"optimizer": moments})
        del moments
        states = strategy.state_dict()["optimizer"].items()
        named = ((f"{role} {n} {k}", t) for n, state in states for k, t in state.items())
        assign("optimizer state", named)
    objective = make_objective(config)
    if objective.old == "pass":
        begin("old log-probs")
        learning.policy.forward(full[:1], frozenset({"logprob", "entropy"}))
    if learning.reference is not None:
        begin("reference")
        learning.reference.forward(full[:1], frozenset({"logprob"}))
    for role, strategy in learners.items():
        micro, loss = full[0], cast(Any, objective)
        if role == "critic":
            micro, loss = full[1], make_value_objective(config)
            begin("values")
            strategy.forward([micro], loss.outputs)
        begin(f"{role} update")
        # Twice the same: the second one's gradients are added to those of the first.
        strategy.forward_backward([micro, micro], loss.outputs, loss)
        owned = ((f"{role} {n}", p.grad) for n, p in strategy.trained() if p.grad is not None)
        assign("gradients", owned)
        begin(f"{role} optimizer")
        strategy.optimizer_step(1e-6)
