"""One rank of a run's learning side, run on fake tensors in a fake process group.

The production learner is built from its recipe and put through one update, with two full
micro-batches: the shapes are those of the run, and nothing is allocated or sent. Models are
described by their config.json. A CPU stands for the devices, since autograd on fake CUDA tensors
needs PyTorch's CUDA build; kernels are chosen as on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from winnow.config.root import Config
from winnow.config.trainer import Fsdp2
from winnow.errors import ConfigError
from winnow.learning.batch import Batch, MicroBatch, all_micro_batches, pack
from winnow.learning.fsdp2 import FSDP2Strategy
from winnow.learning.sequence import SequenceRunner
from winnow.learning.strategy import ModelRunner, Stats
from winnow.plan.tracker import Tracker
from winnow.runs.build_learner import Learning, make_learner, make_objective, make_value_objective
from winnow.runs.loading import check_attention, load_policy_model
from winnow.runs.metrics import Attention
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory


class _PlannedRunner(SequenceRunner):
    def _places(self, sources: Tensor, n: int) -> Tensor:
        # As many as a rank can have, whose tokens are all written by the policy.
        return torch.arange(min(len(sources), n))


class PlannedStrategy(FSDP2Strategy):
    """A strategy on a rank whose neighbours are not there."""

    kernels: ClassVar[str | None] = "cuda"

    def _make_runner(self, model: Any, *readout: Any) -> ModelRunner:
        if self._sequence is None:
            return super()._make_runner(model, *readout)
        return _PlannedRunner(model, *readout, group=self._sequence)

    def _over_ranks(self, sums: Stats, maxima: Stats) -> Stats:
        return sums | maxima


class PlannedOnCpu(PlannedStrategy):
    """The same for ranks on CPUs."""

    kernels: ClassVar[str | None] = "cpu"


@contextlib.contextmanager
def fake_ranks(strategy: Fsdp2) -> Iterator[DeviceMesh]:
    """Be the first of many ranks that are not there; yields their mesh."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=strategy.ranks, store=FakeStore())
    try:
        shards = strategy.ranks // strategy.replicas
        if strategy.replicas == 1:
            yield init_device_mesh("cpu", (shards,))
        else:
            names = ("replicate", "shard")
            yield init_device_mesh("cpu", (strategy.replicas, shards), mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def micro_lengths(config: Config, max_tokens: int) -> list[int]:
    """Return the samples of a micro-batch of as many tokens as one may have, in tokens."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    lengths = [longest] * max(max_tokens // longest, 1)
    if (rest := max_tokens - sum(lengths)) > 1:
        lengths.append(rest)
    return lengths


def full_micro_batches(config: Config) -> tuple[MicroBatch, MicroBatch]:
    """Make micro-batches of policy and critic, of as many tokens as one may have."""

    def full(max_tokens: int) -> MicroBatch:
        lengths = micro_lengths(config, max_tokens)
        batch = made_batch(lengths, config.data.max_prompt_tokens)
        return all_micro_batches(batch, sum(lengths))[0]

    tokens = config.trainer.microbatch_tokens
    return full(tokens), full(config.critic.microbatch_tokens or tokens)


def made_batch(lengths: Sequence[int], prompt: int) -> Batch:
    """Make a batch of samples of these lengths, with the columns that passes would have filled."""
    groups = []
    for place, length in enumerate(lengths):
        asked = min(prompt, length - 1)
        n = length - asked
        answer = Segment(np.zeros(n, np.int64), np.zeros(n, np.float32), ())
        made = Answer(Trajectory((answer,), "stop"), Score(1.0, 1.0))
        asked_ids = np.zeros(asked, np.int64)
        groups.append(Group(place, Prompt(str(place), asked_ids, "", "", None), (made,)))
    batch = pack(groups)
    names = "old", "ref", "values", "returns", "advantages"
    batch.columns.update({name: torch.zeros(len(batch.token_ids)) for name in names})
    batch.columns["selected"] = torch.zeros(len(batch.token_ids), dtype=torch.bool)
    batch.columns["draws"] = torch.zeros(len(batch.token_ids))
    return batch


Assign = Callable[[str, Iterable[tuple[str, Tensor]]], object]
"""Takes a role and tensors with their names."""


@dataclass(frozen=True)
class RankPlan:
    """What a rank did."""

    tracker: Tracker
    parameters: dict[str, int]
    """Of each model, by role."""
    model_config: Any
    """Of the policy, as Hugging Face has it."""
    learning: Learning
    refusal: str | None
    """Why these GPUs could not compute the policy's attention."""


def run_rank(config: Config, path: str, kernels: str = "cuda") -> RankPlan:
    """Run the passes and an update of a recipe with ranks, as its first rank.

    Args:
        path: of the policy's model, a folder with a config.json at least.
        kernels: type of device that ranks have.

    Raises:
        ModelError: a model cannot be described by its config.json.
    """
    strategy = config.trainer.strategy
    assert isinstance(strategy, Fsdp2)
    planned = PlannedStrategy if kernels == "cuda" else PlannedOnCpu
    cpu = torch.device("cpu")
    model = load_policy_model(config.model, path, cpu, config.run.seed, hollow="shapes")
    refusal = None
    try:
        check_attention(config, model, "model.dtype", kernels)
    except ConfigError as error:
        refusal = str(error)
    attention = Attention.of(model.config)
    lengths = np.array(micro_lengths(config, config.trainer.microbatch_tokens))
    width = sum(attention.widths.values()) or 1
    whole = attention.flop(np.zeros(len(lengths)), lengths)
    tracker = Tracker(lambda own: whole * own / width, copies=kernels == "cpu")
    full = full_micro_batches(config)
    # No kernel of CUDA takes float32 with fewer heads for keys.
    exact = config.model.dtype == "float32" and kernels == "cuda"
    heads = model.config.num_attention_heads
    shared = getattr(model.config, "num_key_value_heads", heads) or heads
    kernel = sdpa_kernel(SDPBackend.MATH) if exact and shared < heads else contextlib.nullcontext()
    fake = FakeTensorMode(allow_non_fake_inputs=True)

    def hold(*args: Any, **options: Any) -> FSDP2Strategy:
        with fake, tracker:
            return planned(*args, **options)

    with fake_ranks(strategy) as mesh:
        learning = make_learner(config, model, model.config.vocab_size, path, mesh, hold)
        roles = {"policy": learning.policy, **learning.others}
        if learning.reference is not None and learning.reference is not learning.policy:
            roles["reference"] = learning.reference
        for role, each in roles.items():
            tracker.know(each.model)
            named = each.model.named_parameters()
            tracker.assign("weights", ((f"{role} {name}", p) for name, p in named))
        try:
            with kernel, fake, tracker:
                take_steps(config, learning, full, tracker.begin, tracker.assign)
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise ConfigError(
                f"algorithm/policy_loss={config.algorithm.policy_loss.name} or the correction asks "
                f"for sizes that follow from numbers ({error.func}), which a plan does not have; "
                "plan with algorithm/policy_loss=ppo_clip, which takes about the same"
            ) from error
    parameters = {role: each.parameters for role, each in roles.items()}
    return RankPlan(tracker, parameters, model.config, learning, refusal)


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
    learners: dict[str, Any] = {"policy": learning.policy, **learning.others}
    for role, strategy in learners.items():
        # As after a resume: an update that has moments to step with.
        moments = strategy.blank_state()["optimizer"]
        strategy.load_state_dict(strategy.state_dict() | {"optimizer": moments})
        del moments
        states = strategy.state_dict()["optimizer"].items()
        named = ((f"{role} {n} {k}", t) for n, state in states for k, t in state.items())
        assign("optimizer state", named)
    begin("micro-batch")
    micro, own = (_copied(each, assign) for each in full)
    objective = make_objective(config)
    if objective.old == "pass":
        begin("old log-probs")
        learning.policy.forward([micro], frozenset({"logprob", "entropy"}))
    if learning.reference is not None:
        begin("reference")
        learning.reference.forward([micro], frozenset({"logprob"}))
    for role, strategy in learning.others.items():
        values = make_value_objective(config)
        begin("values")
        strategy.forward([own], values.outputs)
        _update(role, strategy, own, values, begin, assign)
    _update("policy", learning.policy, micro, objective, begin, assign)


def _update(
    role: str,
    strategy: Any,
    micro: MicroBatch,
    objective: Any,
    begin: Callable[[str], object],
    assign: Assign,
) -> None:
    begin(f"{role} update")
    # Twice the same: the second one's gradients are added to those of the first.
    strategy.forward_backward([micro, micro], objective.outputs, objective)
    owned = ((f"{role} {n}", p.grad) for n, p in strategy.trained() if p.grad is not None)
    assign("gradients", owned)
    begin(f"{role} optimizer")
    strategy.optimizer_step(1e-6)


def _copied(micro: MicroBatch, assign: Assign) -> MicroBatch:
    """Return a micro-batch as it comes to a device."""

    def made(name: str, tensor: Tensor) -> Tensor:
        found = tensor.clone()
        assign("micro-batch", [(name, found)])
        return found

    values: dict[str, Any] = {f.name: getattr(micro, f.name) for f in fields(micro)}
    values |= {n: made(n, v) for n, v in values.items() if isinstance(v, Tensor)}
    values["columns"] = {n: made(n, v) for n, v in micro.columns.items()}
    return MicroBatch(**values)
