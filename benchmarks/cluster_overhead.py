"""What processes and Ray cost the quickstart: the same recipe in one process, in several, on Ray.

    python -m benchmarks.cluster_overhead [--steps 12] [--turns 3] [--out benchmarks/results/…]

By turns, each with the same seed and warm start: everything in one process; one rank, one engine
and one scorer in processes of this machine; the same as actors of a private Ray. The last two do
the same work in the same places and have the same bits, so that their ratio is what Ray costs. The
first has no other process to overlap with or to talk to. Wall time of a step (median over steps
after the second), and from the command to its first step.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from winnow.observe.jsonl import read_metrics

APART = ("trainer/strategy=fsdp2", "trainer.strategy.ranks=1", "rollout.engine.processes=1")
LAYOUTS = {
    "one process": (),
    "processes": (*APART, "reward.processes=1"),
    "Ray": (*APART, "reward.processes=1", "cluster=ray", "cluster.cpus=0.5"),
}


@dataclass
class Times:
    """Of a layout, over turns."""

    steps: list[float] = field(default_factory=list)
    """Median of each turn, s."""
    start: list[float] = field(default_factory=list)
    """From the command to the first step's end, less that step, s."""
    model: str = ""
    """A digest of the weights that came of it."""


def run(home: Path, name: str, settings: tuple[str, ...], steps: int, times: Times) -> None:
    """Train once, and note what it took."""
    command = [sys.executable, "-m", "winnow.cli.main", "train", "quickstart", f"run.name={name}"]
    command += [f"trainer.steps={steps}", "evaluation.every=null", "evaluation.before=false"]
    command += [
        "optim.warmup_steps=1",
        "evaluation.n=1",
        "data.task.eval_problems=8",
        "observe.console=off",
        *settings,
    ]
    began = time.time()
    subprocess.run(command, cwd=home, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    folder = home / "runs" / name
    lines = [line for line in read_metrics(folder / "metrics.jsonl") if line["step"] > 0]
    walls = [float(line["time/step_s"]) for line in lines]
    times.steps.append(statistics.median(walls[2:]))
    ended = (folder / "metrics.jsonl").stat().st_mtime
    times.start.append(ended - began - sum(walls))
    (weights,) = (folder / "checkpoints" / f"step-{steps}" / "model").glob("*.safetensors")
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()[:12]
    assert times.model in ("", digest), "the same run came to other weights"
    times.model = digest


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    every = {layout: Times() for layout in LAYOUTS}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        run(home, "warm-up", (), 3, Times())  # makes the start that all others take
        for turn in range(given.turns):
            for number, (layout, settings) in enumerate(LAYOUTS.items()):
                run(home, f"turn-{turn}-{number}", settings, given.steps, every[layout])
                print(layout, every[layout], flush=True)
    lines = ["| layout | a step, s | of one process's | to the first step, s | weights |"]
    lines.append("|---|---:|---:|---:|---|")
    base = every["one process"].steps
    for layout, times in every.items():
        ratios = [own / one for own, one in zip(times.steps, base, strict=True)]
        lines.append(
            f"| {layout} | {statistics.median(times.steps):.3f} "
            f"| {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}) "
            f"| {statistics.median(times.start):.1f} | {times.model} |"
        )
    pairs = zip(every["Ray"].steps, every["processes"].steps, strict=True)
    ratios = [ray / local for ray, local in pairs]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    text = (
        "# What processes and Ray cost the quickstart\n\n"
        f"`python -m benchmarks.cluster_overhead --steps {given.steps} --turns {given.turns}`: "
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, one thread a "
        f"process.\n\n" + "\n".join(lines) + "\n\nA step on Ray takes "
        f"{statistics.median(ratios):.2f} ({spread}) of the same in processes of this machine.\n"
    )
    print(text)
    if given.out:
        given.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
