"""Checks and measurements of Winnow on one GPU; `README.md` beside this file says what each does.

    python -m benchmarks.gpu [CHECK ...] [--out FOLDER] [--limit-s SECONDS] [--cpu]

A check reports JSON lines, which are also appended to FOLDER/figures.jsonl. Several checks run one
after another, in a process each, so that none has the memory or the compiled code of another.
"""

from __future__ import annotations

import argparse
import importlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ONE_RANK = "trainer/strategy=fsdp2", "trainer.strategy.ranks=1"  # NCCL takes one a GPU

CHECKS: dict[str, tuple[Any, ...]] = {
    "machine": ("machine", "machine"),
    "tests": ("machine", "gpu_tests"),
    "gradients": ("learner", "gradients"),
    "mismatch": ("rollout", "mismatch"),
    "update": ("learner", "update", 16_384),
    "update-compiled": ("learner", "update", 16_384, "compiled"),
    "update-long": ("learner", "update", 65_536),
    "update-long-compiled": ("learner", "update", 65_536, "compiled"),
    "update-stored": ("learner", "update", 16_384, "stored"),
    "update-attention": ("learner", "update", 16_384, "attention"),
    "shared-prompts": ("learner", "shared_prompts"),
    "head": ("logprobs", "head"),
    "kernel": ("row_stats", "kernel"),
    "fp32": ("quickstart", "train", "model.dtype=float32"),
    "bf16": ("quickstart", "train", "model.dtype=bfloat16"),
    "one-step-off": ("quickstart", "train", "trainer/mode=one_step_off"),
    "deterministic": ("quickstart", "repeat", "run.deterministic=true"),
    "ranks": ("quickstart", "train", *ONE_RANK, "rollout.engine.processes=1"),
    "offload": ("quickstart", "train", *ONE_RANK, "trainer.strategy.offload=true"),
    "publish": ("rollout", "publish"),
    "memory": ("learner", "memory"),
    "decode": ("rollout", "decode"),
}
"""Module, function and arguments of each check, in the order in which all are run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run checks; returns 1 if one failed, 2 if there is no GPU."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("checks", nargs="*", metavar="CHECK", help=f"all of: {', '.join(CHECKS)}")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--limit-s", type=float, help="most seconds of each of several checks")
    parser.add_argument("--cpu", action="store_true", help="try the scripts, at tiny sizes")
    arguments = parser.parse_args(argv)
    names = arguments.checks or list(CHECKS)
    if unknown := set(names) - CHECKS.keys():
        parser.error(f"no check is called {', '.join(unknown)}; there are {', '.join(CHECKS)}")
    if len(names) == 1:
        return run(names[0], arguments.out, arguments.cpu)
    command = [sys.executable, "-m", "benchmarks.gpu", "--out", str(arguments.out)]
    failed = []
    for name in names:
        words = [*command, name, *["--cpu"] * arguments.cpu]
        try:
            subprocess.run(words, timeout=arguments.limit_s, check=True)
        except subprocess.SubprocessError as error:
            failed.append(name)
            print(error, file=sys.stderr)
    print(f"failed: {', '.join(failed) or 'none'} of {len(names)} checks", file=sys.stderr)
    return int(bool(failed))


def run(name: str, out: Path, on_cpu: bool) -> int:
    """Run a check in this process; returns 1 if it failed, 2 if there is no GPU."""
    module, function, *options = CHECKS[name]
    if module == "learner" and not on_cpu:  # as in ranks that learn; torch reads it at its import
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    import torch
    from benchmarks.gpu.harness import Bench

    if not on_cpu and not torch.cuda.is_available():
        print("torch sees no GPU; --cpu tries the scripts, at tiny sizes", file=sys.stderr)
        return 2
    out.mkdir(parents=True, exist_ok=True)
    bench = Bench(name, torch.device("cpu" if on_cpu else "cuda"), out)
    with bench.guard("failed"):
        getattr(importlib.import_module(f"benchmarks.gpu.{module}"), function)(bench, *options)
    return int(bench.failures > 0)


if __name__ == "__main__":
    sys.exit(main())
