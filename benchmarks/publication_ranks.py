"""What a publication from ranks costs the driver, and what each rank sends, by the number of ranks.

    python -m benchmarks.publication_ranks [--ranks 2 16] [--engines 2] [--layers 64]
                                           [--repeats 7] [--out benchmarks/results/FILE.md]

So many ranks publish a random Qwen3 to engines in processes of their own, as after a step: with as
many tensors (707) and buckets (976) as a model of 32B has, which are small here, as the driver does
not touch them. Ranks run the production code over models that each holds whole: gathering, in which
the driver has no part, would take half a minute for 16 ranks on two cores, and the driver's watch
over processes as long. "Driver" is the CPU time of the driver's process, all its threads included;
"calls" is how many messages it sends to ranks and engines. Bytes are of the weights that lie in
each rank's store.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from winnow.data.sort_digits import build_tokenizer
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import load_causal_lm
from winnow.ranks.remote import RemoteLearner
from winnow.ranks.workers import LearnerWorker
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.remote_engine import RemoteEngine
from winnow.workers.group import WorkerGroup, WorkerGroups, start_local
from winnow.workers.host import RankInfo

BUCKETS = 976
ENGINE = "winnow.rollout.remote_engine:TorchEngineWorker"
RANK = "benchmarks.publication_ranks:WholeRank"
HEAD = (
    "| ranks | driver, CPU ms (least, most) | calls | buckets | MB a rank (least, most) | wall, s |"
)


class _Whole(Strategy):
    """A strategy that knows the bytes of its export, as a sharded one does."""

    def exported_bytes(self, what: str) -> int:
        """Bytes of all weights."""
        return sum(tensor.nbytes for tensor in self.model.parameters())


class WholeRank(LearnerWorker):
    """A rank whose exports are those of production, of a model that is not sharded."""

    def __init__(self, rank: RankInfo, folder: str) -> None:
        model = load_causal_lm(folder, torch.bfloat16, torch.device("cpu"))
        self._strategies: Any = {"policy": _Whole(model)}
        assert rank.store is not None
        self._store, self._rank, self._ranks = rank.store, rank.rank, rank.size
        self._exported = 0
        self._bucket_bytes = math.ceil(self._strategies["policy"].exported_bytes("all") / BUCKETS)

    @property
    def progress(self) -> int:
        """Moves with each bucket, as in production."""
        return self._exported

    def facts(self) -> Any:
        """Nothing that a publication needs."""
        return SimpleNamespace(learner={})

    def close(self) -> None:
        """Hold nothing."""


def save_model(folder: Path, layers: int) -> str:
    """Save a random model in bfloat16; with 64 layers it has as many tensors as one of 32B."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    tokenizer = build_tokenizer()
    config = Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=256, **shape, **heads)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def sizes(update: Any) -> tuple[int, list[int]]:
    """Buckets of an update, and bytes by rank."""
    shares = [share.get() for share in update.stored]
    own = [sum(len(p.array) * 2 for b in share for p in b.pieces) for share in shares]
    return sum(map(len, shares)), own


def count_calls(groups: list[WorkerGroup]) -> int:
    """Messages that were sent to the workers of some groups."""
    return sum(rank.calls for group in groups for rank in group._ranks)


def measure(folder: str, counts: Sequence[int], engines: int, repeats: int) -> list[str]:
    """Rows of the table: groups of so many ranks publish in turn, to the same engines."""
    common = {"model": folder, "dtype": "bfloat16", "slots": 4, "prefill_tokens": 512}
    groups = WorkerGroups()
    took: dict[int, list[float]] = {count: [] for count in counts}
    walls: dict[int, list[float]] = {count: [] for count in counts}
    said: dict[int, str] = {}
    try:
        one = {"OMP_NUM_THREADS": "1"}
        names = [f"engine {i}" for i in range(engines)]
        starts = [partial(start_local, name, ENGINE, common, 1, one) for name in names]
        own = {"folder": folder}
        starts += [partial(start_local, f"learner {n}", RANK, own, n, one) for n in counts]
        started = groups.start(*starts)
        members = [
            RemoteEngine(each, each.call_blocking("call", "")[0]) for each in started[:engines]
        ]
        group = EngineGroup(members, True)
        learners = [RemoteLearner(each) for each in started[engines:]]
        for turn in range(repeats + 1):
            for place, (count, remote) in enumerate(zip(counts, learners, strict=True)):
                version = 1 + turn * len(counts) + place
                calls, cpu, wall = count_calls(started), time.process_time(), time.perf_counter()
                update = remote.weights(version)
                asyncio.run(group.load_weights(update))
                if not turn:  # maps memory that is new
                    continue
                walls[count].append(time.perf_counter() - wall)
                took[count].append(1e3 * (time.process_time() - cpu))
                number, share = sizes(update)
                even = f"{min(share) / 1e6:.2f}, {max(share) / 1e6:.2f}"
                said[count] = f"{count_calls(started) - calls} | {number} | {even}"
    finally:
        groups.close()
    rows = []
    for count in counts:
        cpus = sorted(took[count])
        middle = f"{statistics.median(cpus):.1f} ({cpus[0]:.1f}, {cpus[-1]:.1f})"
        wall_s = statistics.median(walls[count])
        rows.append(f"| {count} | {middle} | {said[count]} | {wall_s:.2f} |")
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Measure each number of ranks, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = Path("/proc/loadavg").read_text().split()[0]
    print(HEAD)
    with tempfile.TemporaryDirectory() as name:
        folder = save_model(Path(name), args.layers)
        rows = measure(folder, args.ranks, args.engines, args.repeats)
        size = (Path(name) / "model.safetensors").stat().st_size / 1e6
    command = " ".join(["python -m benchmarks.publication_ranks", *sys.argv[1:]])
    text = f"# What a publication from ranks costs the driver\n\nMade by `{command}`; "
    text += f"{size:.0f} MB in bfloat16, {args.engines} engines, two cores"
    text += f" that all processes share (load average when it began: {load}).\n\n"
    text += "\n".join([HEAD, "|---:|---|---:|---:|---|---:|", *rows]) + "\n"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    text += f"\nThe driver's peak of memory: {peak:.0f} MiB.\n"
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
