"""Hashes of short runs: two source trees that print the same lines train to the same bits.

    OMP_NUM_THREADS=1 python benchmarks/golden.py [--winnow PATH/TO/winnow] [RUN ...]

Each run is three steps from the cached warm start: `plain` is the quickstart, `ppo` adds a critic,
`resumed` is the quickstart killed with SIGKILL once its first checkpoint stands and then resumed,
`apart` has a rank, an engine and a scorer in processes of their own, `one_step_off` an engine that
writes while a step is learnt, `fsdp2` two ranks, `megatron` two tensor-parallel ranks on the CPU.
A line gives the hash of the trained weights and that of metrics.jsonl without times, memory and
throughput. `resumed` must print the hashes of `plain`. Bits depend on the machine: compare lines
that one machine has printed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

STEPS = 3
COMMON = (
    f"trainer.steps={STEPS}",
    "trainer.save_every=1",
    "optim.warmup_steps=1",
    "evaluation.n=1",
    "evaluation.every=null",
    "data.task.eval_problems=8",
    "observe.console=off",
)
APART = ("trainer/strategy=fsdp2", "trainer.strategy.ranks=1", "rollout.engine.processes=1")
RUNS = {
    "plain": ("quickstart", ()),
    "ppo": ("ppo", ("critic.warmup_steps=1", "critic.optim.warmup_steps=1")),
    "resumed": ("quickstart", ()),
    "apart": ("quickstart", (*APART, "reward.processes=1")),
    "one_step_off": ("quickstart", ("trainer/mode=one_step_off", "sampling.max_staleness=1")),
    "fsdp2": ("quickstart", ("trainer/strategy=fsdp2", "trainer.strategy.ranks=2")),
    "megatron": ("quickstart", ("trainer/strategy=megatron", "trainer.strategy.tensor=2")),
}
MEGATRON_ON_CPU = Path(__file__).parents[1] / "tests" / "megatron_on_cpu"
UNSTABLE = ("time/", "overlap/", "throughput/", "memory/", "ranks/peak")
LATER = re.compile(
    r"scoring/|mismatch/age_|ranks/lockstep|source/|data/epoch|eval/.*/(own_.*|best@\d+|worst@\d+|unread)$"
)
"""Figures that older trees do not write."""


def main() -> None:
    """Print a line for each run that was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", nargs="*", default=list(RUNS), help="of " + ", ".join(RUNS))
    parser.add_argument("--winnow", default=str(Path(sys.executable).parent / "winnow"))
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        for name in asked.runs:
            print(name, *digests(asked.winnow, Path(scratch), name), flush=True)


def digests(winnow: str, home: Path, name: str) -> tuple[str, str]:
    """Train a run of `RUNS` in `home`; the hashes of its weights and of its figures."""
    recipe, settings = RUNS[name]
    command = [winnow, "train", recipe, f"run.name={name}", *COMMON, *settings]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if name == "megatron":
        path = [str(MEGATRON_ON_CPU), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(path)
    folder = home / "runs" / name
    if name == "resumed":
        with subprocess.Popen(command, cwd=home, env=environment, start_new_session=True) as run:
            while not list(folder.glob("checkpoints/step-*/manifest.json")):
                assert run.poll() is None, "the run ended before it could be killed"
                time.sleep(0.02)
            os.killpg(run.pid, signal.SIGKILL)
        command = [winnow, "resume", str(folder)]
    subprocess.run(command, cwd=home, check=True, env=environment, stdout=subprocess.DEVNULL)
    model = folder / "checkpoints" / f"step-{STEPS}" / "model"
    weights = b"".join(path.read_bytes() for path in sorted(model.glob("*.safetensors")))
    return _digest(weights), _digest(_figures(folder / "metrics.jsonl").encode())


def _figures(path: Path) -> str:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    kept = [
        {
            key: value
            for key, value in line.items()
            if not key.startswith(UNSTABLE)
            and not LATER.match(key)
            and not key.endswith(("_s", "_gib"))
        }
        for line in lines
    ]
    return "\n".join(json.dumps(line, sort_keys=True) for line in kept)


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


if __name__ == "__main__":
    main()
