"""The published DAPO layout in small: the recipe `dapo_qwen2.5_32b`, shrunk only in its sizes.

    python -m benchmarks.published_layout [--nodes 2] [--per-node 4] [--out FOLDER]

In `.venv-vllm`. Ranks with sequence parallelism 2 and offload share their slots with vLLM engines
over two of them each, on a Ray of that many nodes on this machine; what they sample and learn is
compared with one rank and one engine that share nothing. `tests/vllm/test_published_layout.py` does
it with 2 x 2 slots, `benchmarks.two_machines` over a network.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.processes import descendants
from tests.small_models import save
from transformers import Qwen2Config, Qwen2ForCausalLM

from winnow.data.sort_digits import build_tokenizer
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts

STEPS = 3
TOLERANCE = 1e-5
SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    right = sum(map(ord, solution_str)) % 2 == 0
    return {"score": 1.0 if right else -1.0, "acc": float(right)}
"""
SIZES = (
    *("model.path=model", "data.train_files=[train.jsonl]", "data.eval_files=[eval.jsonl]"),
    *("reward.function.path=score.py", "reward.workers=0", "model.dtype=float32"),
    *("data.max_prompt_tokens=32", "rollout.max_response_tokens=16", "data.chat_template=none"),
    *("reward.overlong.buffer_tokens=4", "rollout.n=4", "sampling.groups_per_step=4"),
    *("trainer.mini_batch_groups=2", "sampling.max_groups_per_step=48", f"trainer.steps={STEPS}"),
    *("evaluation.every=3", "optim.lr=1e-3", "optim.warmup_steps=0", "trainer.save_every=1"),
    *("rollout.engine.prefill_tokens=256", "rollout.engine.cache_gib=0.1", "run.threads=1"),
    *("observe.console=off", "run.device=cpu"),
)
ALONE = (
    *("cluster=local", "trainer.strategy.ranks=1", "trainer.strategy.sequence=1"),
    *("trainer.strategy.offload=false", "rollout.engine.tensor_parallel=1"),
    *("trainer.microbatch_tokens=256", "rollout.engine.slots=16"),
)


def layout(nodes: int, per_node: int, width: int = 2) -> tuple[str, ...]:
    """Return settings of as many ranks as there are slots, with an engine over each `width`."""
    ranks = nodes * per_node
    wide = [f"rollout.engine.tensor_parallel={width}"] if width > 1 else []
    return (
        *(f"cluster.nodes={nodes}", "cluster.cpus=0.5", f"trainer.strategy.ranks={ranks}"),
        *("trainer.strategy.sequence=2", "trainer.microbatch_tokens=512", *wide),
        f"rollout.engine.slots={16 * width // ranks}",
    )


def write_home(folder: Path) -> None:
    """Write the files that the shrunk recipe names into a folder."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {
        **{"vocab_size": 29, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 64},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 256},
        **{"tie_word_embeddings": False, "initializer_range": 0.3},
        **{"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None},
    }
    model = Qwen2ForCausalLM(Qwen2Config(**shape))
    # Nothing ends an answer but its limit: the ticks at which groups come to their end, and others
    # are admitted in their place, are then those of the engines' quanta with one engine, too.
    with torch.no_grad():
        model.lm_head.weight.mul_(2.0)[1] = 0.0
    save(model, build_tokenizer(), folder / "model")
    (folder / "score.py").write_text(SCORER)
    for name, count in (("train", 40), ("eval", 4)):
        rows = [
            {"prompt": f"sort: {3 + i} {i % 7} =", "data_source": "digits",
             "reward_model": {"ground_truth": str(i)}}
            for i in range(count)
        ]  # fmt: skip
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def trained_answers(run: Path) -> list[list[Any]]:
    """Return group, ids and versions of the answers that were trained on, by step."""
    tables = [read_rollouts(run / "rollouts" / f"step-{n}.parquet") for n in range(1, STEPS + 1)]
    return [
        [
            (row["group"], row["answer"], row["token_ids"], row["versions"])
            for row in table.to_pylist()
            if row["outcome"] == "trained"
        ]
        for table in tables
    ]


def largest_difference(alone: Path, other: Path) -> tuple[float, str]:
    """Return the largest difference of a figure between two runs, and the figure's name.

    A difference is divided by 1 + the figure's size, as where `rtol` and `atol` are the same.
    """
    worst = 0.0, "none"
    pairs = zip(*(read_metrics(run / "metrics.jsonl") for run in (alone, other)), strict=True)
    for one, two in pairs:
        for key in (k for k in one if k.startswith(("actor/", "reward/", "eval/", "length/"))):
            difference = abs(two[key] - one[key]) / (1 + abs(one[key]))
            worst = max(worst, (math.inf if math.isnan(difference) else difference, key))
    return worst


@contextlib.contextmanager
def ray_nodes(nodes: int, per_node: int) -> Iterator[str]:
    """Start Ray with nodes that have room for their share of the slots alone; yield its address."""
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    try:
        for _ in range(nodes):
            # A slot has a rank and half an engine, of half a core each.
            cluster.add_node(num_cpus=per_node, object_store_memory=100 << 20)
        yield cluster.address
    finally:
        cluster.shutdown()


@dataclass
class Memory:
    """The most memory that this process's children had together, sampled each two seconds."""

    gib: float = 0.0
    processes: int = 0

    def watch(self, over: threading.Event) -> None:
        """Sample until the event is set: shared pages are shared out (PSS)."""
        while not over.wait(2.0):
            pids = descendants(os.getpid())
            self.processes = max(self.processes, len(pids))
            self.gib = max(self.gib, sum(map(_pss_kib, pids)) / 2**20)


def _pss_kib(pid: int) -> int:
    with contextlib.suppress(OSError):  # it has ended
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)
    return 0


def train(home: Path, name: str, *settings: str) -> tuple[float, Memory]:
    """Train once; return seconds and memory."""
    command = [sys.executable, "-m", "winnow.cli.main", "train", "dapo_qwen2.5_32b", *SIZES]
    memory, over, began = Memory(), threading.Event(), time.monotonic()
    watch = threading.Thread(target=memory.watch, args=[over])
    watch.start()
    try:
        subprocess.run([*command, *settings, f"run.name={name}"], cwd=home, check=True)
    finally:
        over.set()
        watch.join()
    return time.monotonic() - began, memory


def main() -> None:
    """Train alone and together, and print how they compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=2)
    parser.add_argument("--per-node", type=int, default=4)
    parser.add_argument("--out", type=Path, help="folder to keep; a temporary one by default")
    given = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")
    with contextlib.ExitStack() as after:
        home = given.out or Path(after.enter_context(tempfile.TemporaryDirectory()))
        home.mkdir(parents=True, exist_ok=True)
        write_home(home)
        rows = [("1 rank, 1 engine", *train(home, "alone", *ALONE))]
        with ray_nodes(given.nodes, given.per_node) as address:
            settings = *layout(given.nodes, given.per_node), f"cluster.address={address}"
            ranks = given.nodes * given.per_node
            title = f"{given.nodes} x {given.per_node} slots, {ranks} ranks, {ranks // 2} engines"
            rows.append((title, *train(home, "together", *settings)))
        alone, together = home / "runs/alone", home / "runs/together"
        print("| layout | time | processes | memory (PSS) |\n|---|---|---|---|")
        for title, seconds, memory in rows:
            print(f"| {title} | {seconds:.0f} s | {memory.processes} | {memory.gib:.1f} GiB |")
        same = trained_answers(alone) == trained_answers(together)
        differs, name = largest_difference(alone, together)
        print(f"\nequal ids: {same}; largest difference of a figure: {differs:.1e} ({name})")
        raise SystemExit(not same or differs > TOLERANCE)


if __name__ == "__main__":
    main()
