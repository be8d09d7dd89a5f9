"""Simulation of one training rank on fake tensors in a fake process group.

The production learner is built from the recipe and runs one update with two full micro-batches:
shapes are those of the run, but nothing is allocated or sent. Models need only a config.json. The
device is the CPU, since autograd on fake CUDA tensors requires a CUDA build of PyTorch; kernels are
selected as on CUDA.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from winnow.learning.data_parallel import SINGLE_PROCESS
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding, make_mesh
from winnow.learning.images import EncodedImages
from winnow.learning.runner import ModelRunner, Output
from winnow.learning.sequence import SequenceRunner
from winnow.learning.strategy import LossFn, Stats, Strategy
from winnow.models.causal_lm import load_causal_lm
from winnow.models.folders import torch_dtype
from winnow.models.value import load_reward_model, load_value_model
from winnow.plan.megatron import patched_megatron
from winnow.plan.tracker import DeviceTracker
from winnow.plan.vision import TowerRunner, TrackedImages, make_images
from winnow.ranks import learner
from winnow.ranks.models import load_policy_model
from winnow.run.step_metrics import AttentionFlop
from winnow.types import Image, IntArray

_COLUMNS = "old", "ref", "values", "returns", "advantages", "draws"
_CPU = torch.device("cpu")
_DATA_DEPENDENT = fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException


class _TrackedRunner(SequenceRunner):
    def _local_part(self, places: IntArray, n: int) -> slice:
        # The most that a rank can have: every token is the policy's.
        return slice(min(len(places), n))


class TrackedStrategy(Strategy):
    """A strategy on a simulated rank, which reports the purpose of its tensors to a tracker."""

    kernels: ClassVar[str] = "cuda"
    _tracker: DeviceTracker
    _role: str
    _images: tuple[Image, ...]

    @property
    def local_modules(self) -> nn.Module:
        """The modules of the model that this rank executes."""
        return self.model

    def track_with(self, tracker: DeviceTracker, role: str, images: tuple[Image, ...] = ()) -> None:
        """Register this model's tensors with a tracker under a role.

        Args:
            images: those that a rank encodes for an update.
        """
        self._tracker, self._role, self._images = tracker, role, images
        tracker.register_model(self.local_modules, role)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._report("optimizer state", self.optimizer_tensors())

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: frozenset[Output], loss_fn: LossFn
    ) -> Stats:
        figures = super().forward_backward(microbatches, outputs, loss_fn)
        self._report("gradients", self.gradients())
        return figures

    def _encode_images(self, microbatches: Sequence[MicroBatch]) -> EncodedImages | None:
        if (shown := microbatches[0].images) is None:
            return None
        begin, phase = self._tracker.begin, list(self._tracker.phases)[-1]
        begin(f"{phase}: images")
        shown, most = replace(shown, images=self._images), sum(microbatches[0].lengths)
        encoded = TrackedImages([shown], most, SINGLE_PROCESS, self._runner)
        encoded.begin = partial(begin, f"{phase}: images backward")
        begin(phase)
        return encoded

    def optimizer_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the optimizer's tensors, including fp32 masters of half-precision weights."""
        weights = {id(p) for p in self.local_modules.parameters()}
        for name, master in self._masters.items():
            if id(master) not in weights:
                yield f"{name} master", master
            for key, moment in self._optimizer.state[master].items():
                yield f"{name} {key}", moment

    def gradients(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the accumulated gradients."""
        for name, master in self._masters.items():
            if master.grad is not None:
                yield name, master.grad

    def _report(self, use: str, named: Iterator[tuple[str, Tensor]]) -> None:
        self._tracker.assign_role(use, ((f"{self._role} {name}", tensor) for name, tensor in named))

    def _reduce_figures(self, sums: Stats, maxima: Stats) -> Stats:
        return sums | maxima


class TrackedFSDP2(TrackedStrategy, FSDP2Strategy):
    """FSDP2's strategy on a simulated rank."""

    def _make_runner(self, model: Any, *readout: Any) -> ModelRunner:
        if self._sequence is None:
            return TowerRunner(model, *readout)
        return _TrackedRunner(model, *readout, group=self._sequence)


@dataclass(frozen=True)
class RankRun:
    """A simulated rank of a model."""

    tracker: DeviceTracker
    strategy: Sharded | Megatron
    max_tokens: int
    """Tokens of a micro-batch."""


@dataclass(frozen=True)
class PolicyRun(RankRun):
    """A simulated rank of the policy, and of each model on separate ranks."""

    learning: learner.Learning
    parameters: dict[str, int]
    """Parameters by role."""
    shape: Any
    """Hugging Face configuration of the policy, of a vision-language model that of its text."""
    separate: dict[str, RankRun]
    """By role, a rank of each model on separate ranks."""
    images: tuple[Image, ...] = ()
    """Images that a rank encodes for an update."""


def run_rank(
    config: Config,
    path: str,
    strategy: type[TrackedFSDP2] = TrackedFSDP2,
    track: type[DeviceTracker] = DeviceTracker,
    stage: int = 0,
) -> PolicyRun:
    """Simulate the first rank of a pipeline stage: a step's passes and one update.

    Args:
        path: folder of the policy's model; config.json is enough.
        strategy: FSDP2's strategy class; its `kernels` selects the attention kernels.
        track: class of the tracker.
        stage: pipeline stage; 0 without a pipeline.

    Raises:
        ConfigError: the loss has data-dependent shapes.
        ModelError: config.json cannot describe a model, or the ranks cannot shard it.
    """
    model = load_policy_model(config.model, path, _CPU, config.run.seed, hollow="shapes")
    layout, most = config.trainer.strategy, config.trainer.token_budget
    assert isinstance(layout, Fsdp2 | Megatron)
    tracker, images = track(_attention_flop(config, model, most)), make_images(config, model)
    shape = model.config.get_text_config()
    tracker.chosen_experts = getattr(shape, "num_experts_per_tok", None) or 0
    learning, models = _run_learner(config, model, path, strategy, tracker, stage, images)
    separate = {}
    for role in Roles(config):
        if role.kind == "ranks" and role.name != "policy":
            separate[role.name], models[role.name] = _run_separate_model(config, role.name, path)
    if "critic" in separate:
        passes = replace(learning.passes, **learner.critic_passes(models["critic"]))
        learning = replace(learning, passes=passes)
    parameters = {role: each.n_parameters for role, each in models.items()}
    ran = tracker, layout, most
    return PolicyRun(*ran, learning, parameters, shape, separate, images)


def _run_learner(
    config: Config,
    model: Any,
    path: str,
    strategy: type[TrackedFSDP2],
    tracker: DeviceTracker,
    stage: int,
    images: tuple[Image, ...],
) -> tuple[learner.Learning, dict[str, TrackedStrategy]]:
    """Build the learner on a rank and run its phases; also returns the models by role."""
    chosen, fake = config.trainer.strategy, fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    strategy_class: Any = contextlib.nullcontext(strategy)
    if isinstance(chosen, Megatron):
        strategy_class = patched_megatron(chosen, model.config, TrackedStrategy, strategy.kernels)
    full = full_batches(config, images)
    with _fake_group(cast("Sharded | Megatron", chosen), stage) as mesh, strategy_class as kind:

        def make(*args: Any, **options: Any) -> Strategy:
            with fake, tracker:
                return cast(Strategy, kind(*args, **options))

        of_policy = model, model.config.get_text_config().vocab_size, path
        learning = learner.make_learner(config, Roles(config), *of_policy, mesh, make)
        roles = {"reference": learning.reference, "policy": learning.policy, **learning.others}
        models = {role: cast(TrackedStrategy, each) for role, each in roles.items() if each}
        with fake, tracker:
            for role, each in models.items():
                each.track_with(tracker, role, images)
            try:
                run_phases(config, learning, full, tracker.begin)
            except _DATA_DEPENDENT as error:
                raise ConfigError(
                    f"algorithm/policy_loss={config.algorithm.policy_loss.name} or the correction "
                    f"has data-dependent shapes ({error.func}), which cannot be planned; plan with "
                    "algorithm/policy_loss=ppo_clip, whose memory and time are about the same"
                ) from error
    return learning, models


def _run_separate_model(config: Config, role: str, path: str) -> tuple[RankRun, TrackedStrategy]:
    """Simulate the first rank of a model on separate ranks: its passes, and a critic's update."""
    section: Any = config.reward.model if role == "reward_model" else getattr(config, role)
    most = getattr(section, "microbatch_tokens", None) or config.trainer.token_budget
    options = dict[str, Any]()
    if role == "reference":
        model = learner.load_role(load_causal_lm, config, role, path, _CPU, "shapes")
        sections, vocabulary = (config.rollout, config.trainer, config.model), cast(Any, model)
        options = learner.readout_options(*sections, vocabulary.config.get_text_config().vocab_size)
    elif role == "critic":
        model = learner.load_role(load_value_model, config, role, path, _CPU, "shapes")
        options = learner.critic_options(config)
    else:
        dtype = torch_dtype(section.dtype or config.model.dtype)
        model = load_reward_model(section.path, dtype, _CPU, hollow="shapes")
    tracker = DeviceTracker(_attention_flop(config, model, most))
    micro, sharding = _full_batch(config, most), section.strategy
    fake = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
    with _fake_group(sharding) as mesh, fake, tracker:
        model.requires_grad_(role == "critic")
        strategy = TrackedFSDP2(model, mesh, Sharding(offload=sharding.offload), **options)
        strategy.track_with(tracker, role)
        if role == "critic":
            _fill_optimizer(strategy)
            _train_role(config, role, strategy, micro, tracker.begin)
        else:
            tracker.begin(role)
            strategy.forward([micro], frozenset({"logprob" if role == "reference" else "score"}))
    return RankRun(tracker, sharding, most), strategy


def _attention_flop(config: Config, model: Any, max_tokens: int) -> Callable[[int], float]:
    """Return the FLOP of packed attention over a full micro-batch, by query heads x head size."""
    lengths, attention = np.array(full_lengths(config, max_tokens)), AttentionFlop.of(model.config)
    whole = attention.flop(np.zeros_like(lengths), lengths) / max(sum(attention.widths.values()), 1)
    return lambda width: whole * width


@contextlib.contextmanager
def _fake_group(strategy: Sharded | Megatron, stage: int = 0) -> Iterator[DeviceMesh]:
    """Initialize a fake process group as the first rank of a stage."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    rank = stage * strategy.ranks // getattr(strategy, "pipeline", 1)
    dist.init_process_group("fake", rank=rank, world_size=strategy.ranks, store=FakeStore())
    try:
        yield make_mesh("cpu", strategy.ranks, getattr(strategy, "replicas", 1))
    finally:
        dist.destroy_process_group()


def count_microbatches(config: Config) -> int:
    """Return the micro-batches of a simulated update: gradients accumulate, all stages are busy."""
    return max(2, getattr(config.trainer.strategy, "pipeline", 1))


def full_lengths(config: Config, max_tokens: int) -> list[int]:
    """Return the sample lengths of a micro-batch that uses the whole token budget."""
    longest = config.data.max_prompt_tokens + config.rollout.max_response_tokens
    lengths = [longest] * max(max_tokens // longest, 1)
    rest = max_tokens - sum(lengths)
    return [*lengths, rest] if rest > 1 else lengths


def full_batches(config: Config, images: tuple[Image, ...] = ()) -> tuple[MicroBatch, MicroBatch]:
    """Make micro-batches of policy and critic that use their whole token budgets."""
    tokens = config.trainer.token_budget
    critic_tokens = config.critic.microbatch_tokens or tokens
    return _full_batch(config, tokens, images), _full_batch(config, critic_tokens)


def _full_batch(config: Config, max_tokens: int, images: tuple[Image, ...] = ()) -> MicroBatch:
    """Make a micro-batch of `max_tokens` tokens from the longest samples."""
    ids = [np.zeros(length, np.int64) for length in full_lengths(config, max_tokens)]
    last = config.rollout.max_response_tokens
    shown = [images[:1] if len(each) > last + sum(map(len, images[:1])) else () for each in ids]
    batch = pack_sequences(ids, last, shown if any(shown) else ())
    T = len(batch.token_ids)
    batch.columns.update({name: torch.zeros(T) for name in _COLUMNS})
    batch.columns["selected"] = torch.zeros(T, dtype=torch.bool)
    return all_micro_batches(batch, T)[0]


def run_phases(
    config: Config,
    learning: learner.Learning,
    full: tuple[MicroBatch, MicroBatch],
    begin: Callable[[str], object],
) -> None:
    """Fill the optimizers, then run a step's passes and one update of each trained model.

    Args:
        full: micro-batches of `full_batches`.
        begin: called with the name of each phase at its start.
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
    """Allocate the optimizer state, as a resume does."""
    moments = strategy.blank_state()["optimizer"]
    strategy.load_state_dict(strategy.state_dict() | {"optimizer": moments})


def _train_role(
    config: Config, role: str, strategy: Strategy, micro: MicroBatch, begin: Callable[[str], object]
) -> None:
    """Run an update of a model; for a critic, the pass for its values first."""
    loss = cast(Any, learner.make_objective(config))
    if role == "critic":
        loss = learner.make_value_objective(config)
        begin("values")
        strategy.forward([micro], loss.outputs)
    begin(f"{role} update")
    # The same micro-batch repeatedly: gradients accumulate from the second on.
    strategy.forward_backward([micro] * count_microbatches(config), loss.outputs, loss)
    begin(f"{role} optimizer")
    strategy.optimizer_step(1e-6)
