"""What a step's batch costs one rank of many on its host: memory, CPU-seconds, tokens fetched.

    python -m benchmarks.own_rows [--ranks 128] [--out benchmarks/results/own_rows.md]

The step is that of `benchmarks.lockstep`: 8,192 answers, 16 updates of 512, lengths of mean 5.9k
tokens. A real `Learner` takes it (GRPO, with a pass for the old log-probs), over a model that
computes nothing, once with the whole batch on the rank and once with its own samples. Answers are
references to arrays that lie elsewhere. One rank runs: what the others would send it are zeros, of
the right size, and the seconds that messages take are not in it. Memory is the peak above that
before the step, without what is fetched (on Ray it lies in the node's store).
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from benchmarks.lockstep import ANSWERS, PROMPT, UPDATES, WIDTH, N, drawn
from torch import Tensor

from winnow.algorithms.advantages import ESTIMATORS
from winnow.algorithms.losses import POLICY_LOSSES
from winnow.learning.advantage import AdvantageStage
from winnow.learning.batch import Batch, MicroBatch, MicroBatchSharder, pack
from winnow.learning.data_parallel import DataParallel
from winnow.learning.learner import Learner, LearnerSettings
from winnow.learning.policy import Policy, PolicyObjective
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan
from winnow.workers.array_refs import ArrayBlock, ArrayRef, fetch_arrays

BUDGET = 22_528
_ZEROS = np.zeros(1 << 15, np.int32), np.zeros(1 << 15, np.float32)


class Elsewhere:
    """A handle of arrays of which none has a page of its own."""

    fetched = 0

    def prefetch(self) -> None: ...

    def get(self) -> Any:
        Elsewhere.fetched += 1
        return _ZEROS


class OneOfMany(DataParallel):
    """The first of many ranks, alone: the others send zeros."""

    def __init__(self, ranks: int) -> None:
        super().__init__(None, np.arange(ranks)[:, None])
        self.mesh = cast(Any, "of ranks that are not here")

    def all_reduce(self, values: Tensor) -> Tensor:
        return values.clone()

    def all_gather(self, value: Any) -> list[Any]:
        return [value]

    def _exchanged(self, outgoing: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return torch.zeros(sum(received), outgoing.shape[1], dtype=torch.uint8)


class WholeBatch(MicroBatchSharder):
    """As all ranks did before: each packs everything."""

    def pack(
        self, groups: Sequence[Group], max_tokens: int, overlong_filtering: bool = False
    ) -> Batch:
        fetch_arrays(answer.trajectory for group in groups for answer in group.answers)
        return pack(groups, overlong_filtering)


class Idle:
    """A strategy that computes nothing."""

    replayed = None

    def __init__(self, sharder: MicroBatchSharder) -> None:
        self.sharder, self.tokens = sharder, 0

    def forward(self, microbatches: Sequence[MicroBatch], outputs: Any) -> list[dict[Any, Tensor]]:
        return [dict.fromkeys(outputs, micro.behav) for micro in microbatches]

    def forward_backward(
        self, microbatches: Sequence[MicroBatch], outputs: Any, loss_fn: Any
    ) -> dict[str, float]:
        self.tokens += sum(len(micro.token_ids) for micro in microbatches)
        return {"loss": 0.0, "policy_loss": 0.0}

    def expert_load(self) -> None:
        return None

    def optimizer_step(self, lr: float) -> dict[str, float]:
        return {"grad_norm": 1.0, "skipped": 0}

    def weights_are_finite(self) -> bool:
        return True


def groups_elsewhere() -> list[Group]:
    """The step's groups, with references to their tokens."""
    lengths = iter((drawn("dapo") - PROMPT).tolist())
    prompt, made = np.arange(PROMPT), []
    for place in range(ANSWERS // N):
        answers = []
        for index in range(N):
            size = next(lengths)
            block = ArrayBlock(None, Elsewhere())
            ids, logprobs = (
                cast(Any, ArrayRef(block, i, 0, size, kind))
                for i, kind in enumerate((np.int64, np.float32))
            )
            segment = Segment(ids, logprobs, (VersionSpan(0, size),))
            score = Score(float(index % 3 == 0), float(index % 3 == 0))
            answers.append(Answer(Trajectory((segment,), "stop"), score))
        made.append(Group(place, Prompt(str(place), prompt, "", "", None), tuple(answers)))
    return made


def measure(kind: str, ranks: int) -> Mapping[str, float]:
    """Take one step; figures of this process."""
    torch.set_num_threads(1)
    sharder = (WholeBatch if kind == "whole" else MicroBatchSharder)(None, WIDTH)
    sharder.dp = OneOfMany(ranks)
    strategy, objective = (
        Idle(sharder),
        PolicyObjective(
            POLICY_LOSSES["ppo_clip"],
            {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None},
            "token-mean",
        ),
    )
    learner = Learner(
        Policy(cast(Any, strategy), objective),
        AdvantageStage(ESTIMATORS["grpo"], {"std_normalization": "group"}),
        LearnerSettings(ANSWERS // N // UPDATES, 1, BUDGET, False, 1, 1, lambda step: 1e-6),
    )
    groups = groups_elsewhere()
    held, began = _peak(), time.process_time()
    learner.learn(groups, 1, Metrics(), Stopwatch())
    seconds = time.process_time() - began
    return {
        "gib": (_peak() - held) / 2**20,
        "seconds": seconds,
        "answers": Elsewhere.fetched,
        "tokens": strategy.tokens,
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=128)
    parser.add_argument("--kind", choices=("whole", "own"), help="measure in this process")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    if chosen.kind:
        print(json.dumps(measure(chosen.kind, chosen.ranks)))
        return
    lines = [
        "# A step's batch on a rank's host",
        "",
        f"Made by `python -m benchmarks.own_rows --ranks {chosen.ranks}`; the script says how.",
        "",
        "| a rank packs | memory, GiB | CPU-seconds | answers fetched | tokens learnt from |",
        "|---|---|---|---|---|",
    ]
    for kind in ("whole", "own"):
        command = [sys.executable, "-m", "benchmarks.own_rows", "--kind", kind]
        said = subprocess.run(
            [*command, "--ranks", str(chosen.ranks)], check=True, capture_output=True, text=True
        )
        found = json.loads(said.stdout)
        what = "the whole step" if kind == "whole" else "its own samples"
        lines.append(
            f"| {what} | {found['gib']:.2f} | {found['seconds']:.2f} | "
            f"{found['answers']:,} | {found['tokens']:,} |"
        )
    text = "\n".join(lines) + "\n"
    print(text)
    if chosen.out:
        chosen.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
