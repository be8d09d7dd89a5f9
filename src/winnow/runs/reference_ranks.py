"""A reference on ranks of its own (`reference/strategy=fsdp2`), asked before the policy's learn.

    groups ─► `ReferenceWorker`s ─► log-probs [T], left on rank 0's node ─► the policy's ranks

Each rank packs the step's groups as the policy's do, so that the log-probs are in the same order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist

from winnow.config.model import ShardedReference
from winnow.config.root import Config
from winnow.learning.batch import device_of, pack
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding
from winnow.learning.learner import AnyLearner, Learned
from winnow.learning.strategy import run_pass
from winnow.models.causal_lm import load_causal_lm
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.runs.build_learner import load_role, readout_options
from winnow.runs.scoring_ranks import join_ranks
from winnow.types import Group
from winnow.workers.array_refs import SplitResult, fetch, left_here
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
        self._is_first = rank.rank == 0
        self.progress = 0
        """Moves with each pass."""

    def logprobs(self, groups: Sequence[Group]) -> SplitResult | None:
        """Return the log-probs [T] of a step's answers in batch order; on rank 0 alone."""
        fetch(groups)
        found = run_pass(self._strategy, pack(groups), frozenset({"logprob"}), self._max_tokens)
        self.progress += 1
        if not self._is_first:
            return None
        (logprobs,), block = left_here(found["logprob"].numpy())
        return SplitResult(logprobs, block)

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

    def learn(
        self, groups: Sequence[Group], step: int, metrics: Metrics, watch: Stopwatch
    ) -> Learned:
        """Train on the groups of a step."""
        with watch.phase("reference"):
            said: SplitResult = self._ranks.ask("logprobs", list(groups))[0]
        given: Mapping[str, Any] = {"ref": said.told}
        return self._learner.learn(groups, step, metrics, watch, **given)
