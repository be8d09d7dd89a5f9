"""What a publication from ranks costs the driver, and what each rank sends, by the number of ranks.

    python benchmarks/publication_ranks.py [--ranks 2 4 8 16] [--engines 2] [--layers 64]
                                           [--repeats 7] [--out benchmarks/results/FILE.md]

The production learner on so many ranks publishes a random Qwen3 to engines in processes of their
own, as after a step. "Driver" is the CPU time of the driver's process, all its threads included,
less what it takes in as long a time while nothing is asked of the workers, which it watches;
"calls" is how many messages it sends to ranks and engines. Bytes are of the weights that lie in
each rank's store.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from winnow.config.load import load_recipe
from winnow.data.sort_digits import build_tokenizer
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.remote_engine import RemoteEngine
from winnow.runs.remote_learner import RemoteLearner
from winnow.workers.group import WorkerGroup, WorkerGroups, start_local

ENGINE = "winnow.rollout.remote_engine:TorchEngineWorker"
LEARNER = "winnow.runs.remote_learner:LearnerWorker"
SETTINGS = (
    *("warm_start=none", "model.dtype=bfloat16", "run.threads=1", "trainer/strategy=fsdp2"),
    *("trainer.strategy.bucket_mb=1", "observe.console=off"),
)
_REST_S = 3.0
HEAD = (
    "| ranks | driver, CPU ms (least, most) | calls | buckets | MB a rank (least, most) | wall, s |"
)


def save_model(folder: Path, layers: int) -> str:
    """Save a random model in bfloat16; with 64 layers it has as many tensors as one of 32B."""
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": layers}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    tokenizer = build_tokenizer()
    config = Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=256, **shape, **heads)
    Qwen3ForCausalLM(config).bfloat16().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def sizes(update: Any, ranks: int) -> tuple[int, list[int]]:
    """Buckets of an update, and megabytes by rank."""
    own = [0] * ranks
    for bucket in update.buckets:
        own[bucket.index % ranks] += sum(len(p.array) * 2 for p in bucket.pieces)
    return len(update.buckets), own


def count_calls(groups: list[WorkerGroup]) -> int:
    """Messages that were sent to the workers of some groups."""
    return sum(rank.calls for group in groups for rank in group._ranks)


def measure(folder: str, ranks: int, engines: int, repeats: int) -> str:
    """A row of the table."""
    config = load_recipe(
        "quickstart", [*SETTINGS, f"model.path={folder}", f"trainer.strategy.ranks={ranks}"]
    )
    common = {"model": folder, "dtype": "bfloat16", "slots": 4, "prefill_tokens": 512}
    learner = {"config": config, "path": folder, "start": folder}
    learner |= {"vocabulary": len(build_tokenizer()), "tokenizer": folder}
    groups = WorkerGroups()
    try:
        one = {"OMP_NUM_THREADS": "1"}
        starting = [start_local("learner", LEARNER, learner, ranks, one)]
        starting += [start_local(f"engine {i}", ENGINE, common, 1, one) for i in range(engines)]
        started = groups.start(*starting)
        remote = RemoteLearner(started[0])
        members = [RemoteEngine(each, each.ask("ask", "")[0]) for each in started[1:]]
        group = EngineGroup(members, True)
        took, walls, calls, share = [], [], 0, (0, [0])
        idle = time.process_time()
        time.sleep(_REST_S)
        idle = (time.process_time() - idle) / _REST_S
        for version in range(1, repeats + 2):
            before, own, wall = count_calls(started), time.process_time(), time.perf_counter()
            update = remote.weights(version)
            asyncio.run(group.load_weights(update))
            walls.append(time.perf_counter() - wall)
            took.append(time.process_time() - own - idle * walls[-1])
            calls = count_calls(started) - before
            if isinstance(update.buckets, list):
                share = sizes(update, ranks)
    finally:
        groups.close()
    cpu = sorted(1e3 * each for each in took[1:])  # the first maps memory that is new
    even = f"{min(share[1]) / 1e6:.2f}, {max(share[1]) / 1e6:.2f}"
    middle = f"{statistics.median(cpu):.1f} ({cpu[0]:.1f}, {cpu[-1]:.1f})"
    wall_s = statistics.median(walls[1:])
    line = f"| {ranks} | {middle} | {calls} | {share[0]} | {even} | {wall_s:.2f} |"
    print(line, flush=True)
    return line


def main() -> None:
    """Measure each number of ranks, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    load = Path("/proc/loadavg").read_text().split()[0]
    print(HEAD)
    with tempfile.TemporaryDirectory() as name:
        folder = save_model(Path(name), args.layers)
        rows = [measure(folder, ranks, args.engines, args.repeats) for ranks in args.ranks]
        size = (Path(name) / "model.safetensors").stat().st_size / 1e6
    command = " ".join(["python", "benchmarks/publication_ranks.py", *sys.argv[1:]])
    text = f"# What a publication from ranks costs the driver\n\nMade by `{command}`; "
    text += f"{size:.0f} MB in bfloat16, {args.engines} engines, buckets of 1 MB at most, two cores"
    text += f" that all processes share (load average when it began: {load}).\n\n"
    text += "\n".join([HEAD, "|---:|---|---:|---:|---|---:|", *rows]) + "\n"
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    text += f"\nThe driver's peak of memory: {peak:.0f} MiB.\n"
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
