"""A reference on ranks of its own (`reference/strategy=fsdp2`), asked before the policy's learn.

groups ─► `ReferenceWorker`s ─► log-probs of each one's samples, left on its node
                                 └─► the policy's ranks, each what is about its own samples
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from winnow.config.model import ShardedReference
from winnow.config.root import Config
from winnow.learning.batch import TokenColumn
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding
from winnow.learning.learner import AnyLearner, Learned
from winnow.learning.peers import device_of
from winnow.learning.strategy import run_pass
from winnow.models.causal_lm import load_causal_lm
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.runs.build_learner import load_role, readout_options
from winnow.runs.scoring_ranks import join_ranks
from winnow.types import Group
from winnow.workers.array_refs import SplitResult, left_here
from winnow.workers.group import WorkerGroup
from winnow.workers.host import RankInfo


class ReferenceWorker:
    """One rank of the reference; a worker of a `WorkerGroup`.

    Args:
        start, vocabulary: as `LearnerWorker` takes them.

    Raises:
        ModelError: it cannot be loaded.
    """

    def __init__(self, rank: RankInfo, config: Config, start: str | None, vocabulary: int) -> None:
        sharding = config.reference.strategy
        assert isinstance(sharding, ShardedReference)
        mesh, _ = join_ranks(rank, config.run.threads, sharding.replicas)
        model = load_role(load_causal_lm, config, "reference", start, device_of(mesh), True)
        readout = readout_options(config, vocabulary)
        held = Sharding(offload=sharding.offload)
        self._strategy = FSDP2Strategy(model.requires_grad_(False), mesh, held, **readout)
        self._max_tokens = config.trainer.microbatch_tokens
        self.progress = 0
        """Moves with each pass."""

    def logprobs(self, groups: Sequence[Group]) -> SplitResult:
        """Return who holds each sample, and log-probs [T] of this rank's, in the step's order."""
        batch = self._strategy.sharder.pack(groups, self._max_tokens)
        found = run_pass(self._strategy, batch, frozenset({"logprob"}), self._max_tokens)
        self.progress += 1
        (logprobs,), block = left_here(found["logprob"].numpy())
        return SplitResult((batch.holders, logprobs), block)

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()


class WithReference:
    """A learner that is given its reference's log-probs by a group of `ReferenceWorker`s.

    Raises:
        WinnowError: as calls of `WorkerGroup`.
    """

    def __init__(self, learner: AnyLearner, ranks: WorkerGroup) -> None:
        self._learner, self._ranks = learner, ranks
        self.state_dict, self.load_state_dict = learner.state_dict, learner.load_state_dict

    @property
    def progress(self) -> int:
        """Moves with each pass and update."""
        return self._learner.progress + sum(each or 0 for each in self._ranks.progress)

    @property
    def begun(self) -> int:
        """The number of steps of which an update may have changed weights."""
        return self._learner.begun

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch
    ) -> Learned:
        """Train on the groups of a step."""
        with watch.phase("reference"):
            said: list[SplitResult] = self._ranks.ask("logprobs", [group.bare for group in groups])
        ref = TokenColumn(said[0].told[0], [each.told[1] for each in said])
        given: Mapping[str, Any] = {"ref": ref}
        return self._learner.learn(groups, step, metrics, watch, **given)
