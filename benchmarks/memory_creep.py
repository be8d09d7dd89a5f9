"""Memory of a run on a CPU, step by step, with and without returning free heap to the system.

    OMP_NUM_THREADS=1 python -m benchmarks.memory_creep [--steps N]

A model of SmolLM2-135M's shape with 6 of its 30 layers and random weights (fp32, 49,152 ids)
samples 8 groups of 4 answers of up to 96 tokens, 41 on average, and trains on them, in one
process. Resident memory is read from /proc every 20 ms: its peak within a step, and what is left
at its end. `without` runs with `malloc_trim` replaced by nothing.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from transformers import LlamaConfig, LlamaForCausalLM

from winnow.data.sort_digits import build_tokenizer
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics

SETTINGS = (
    *("warm_start=none", "sampling/filter=none", "rollout.n=4", "sampling.groups_per_step=8"),
    *("rollout.max_response_tokens=96", "rollout.engine.slots=64", "trainer.mini_batch_groups=8"),
    *("trainer.microbatch_tokens=null", "trainer.save_every=null", "evaluation.every=null"),
    *("data.task.eval_problems=8", "evaluation.n=1", "evaluation.greedy=false"),
    *("observe.console=off", "run.name=run", "run.device=cpu"),
)
WITHOUT = """
import sys
from winnow import gc_tuning
gc_tuning.release_free_memory = lambda: None
from winnow.cli import main
sys.exit(main())
"""
WITH = WITHOUT.replace("gc_tuning.release_free_memory = lambda: None\n", "")


def save_start(folder: Path) -> None:
    """Save the model with random weights, and a tokenizer with the ids of digits."""
    shape = {"hidden_size": 576, "num_attention_heads": 9, "num_key_value_heads": 3}
    size = {"num_hidden_layers": 6, "intermediate_size": 1536, "vocab_size": 49152}
    model = LlamaForCausalLM(LlamaConfig(**shape, **size, tie_word_embeddings=True))
    model.generation_config.eos_token_id = list(range(1000, 2024))  # one draw in 48
    model.save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def resident_by_step(program: str, folder: Path, steps: int) -> list[tuple[float, float]]:
    """Train, and return the peak and the last resident memory of each step in GiB."""
    where = f"run.dir={folder / 'runs'}", f"model.path={folder / 'start'}"
    command = ["train", "quickstart", *SETTINGS, *where, f"trainer.steps={steps}"]
    child = subprocess.Popen([sys.executable, "-c", program, *command])
    metrics, page = RunFolder(folder / "runs" / "run").metrics, os.sysconf("SC_PAGE_SIZE")
    seen: list[list[float]] = [[] for _ in range(steps + 1)]
    while child.poll() is None:
        done = len(metrics.read_bytes().splitlines()) if metrics.is_file() else 0
        pages = Path(f"/proc/{child.pid}/statm").read_text().split()
        seen[min(done, steps)] += [int(pages[1]) * page / 2**30] if len(pages) > 1 else []
        time.sleep(0.02)
    assert child.returncode == 0
    print(f"{sum(r['time/step_s'] for r in read_metrics(metrics)):.0f} s of steps")
    return [(max(each), each[-1]) for each in seen[:steps]]


def main() -> None:
    """Print a line for each step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=16)
    steps = parser.parse_args().steps
    columns = []
    for program in (WITHOUT, WITH):
        with tempfile.TemporaryDirectory() as folder:
            save_start(Path(folder) / "start")
            columns.append(resident_by_step(program, Path(folder), steps))
    print("| step | peak without | end without | peak with | end with |\n|---|---|---|---|---|")
    for step, ((a, b), (c, d)) in enumerate(zip(*columns, strict=True), 1):
        print(f"| {step} | {a:.2f} GiB | {b:.2f} GiB | {c:.2f} GiB | {d:.2f} GiB |")


if __name__ == "__main__":
    main()
