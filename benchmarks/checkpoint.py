"""What saving costs: how long training waits, how long the thread works, how large it gets.

    python benchmarks/checkpoint.py [--models quickstart large] [--folder /disk/to/try]
                                    [--out benchmarks/results/checkpoint.md]

Saves a random model with AdamW's state three times: the quickstart's, and a Qwen3 of about a
hundred million weights. The first save also pays for memory that is touched for the first time.
"On a core" is the part of it that a processor worked, which other jobs do not change. `gap` is the
longest that a busy main thread had to wait for the interpreter while the thread was writing. A
run's checkpoint also holds its carried groups, histories and cursors, which are small.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from winnow.builders.warm_start import make_tiny_model
from winnow.checkpoints.checkpoint import Manifest, describe_machine
from winnow.checkpoints.run_state import LocalModelStates, RunState
from winnow.config.model import SftWarmStart
from winnow.config.trainer import TrainerConfig
from winnow.data.sort_digits import build_tokenizer
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import model_writer, use_layout_attention
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import MetricsLog


def quickstart() -> PreTrainedModel:
    """The model that the quickstart's warm start makes."""
    return make_tiny_model(SftWarmStart(), len(build_tokenizer()), positions=256, seed=0)


def large() -> PreTrainedModel:
    """A Qwen3 of 101 M weights."""
    shape: dict[str, Any] = {
        "vocab_size": 32_000,
        "hidden_size": 768,
        "num_hidden_layers": 10,
        "num_attention_heads": 12,
        "num_key_value_heads": 12,
        "head_dim": 64,
        "intermediate_size": 2304,
        "tie_word_embeddings": True,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    use_layout_attention(model)
    return model


HEAD = "| save | training waits, ms | on a core | thread works, s | on a core | gap, ms | MB |"
MODELS = {"quickstart": quickstart, "large": large}


def stepped(model: PreTrainedModel) -> Strategy:
    """The model with an optimizer that has stepped once."""
    made = Strategy(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    made.optimizer_step(1e-4)
    return made


def saves(name: str, folder: Path) -> str:
    """Save a model three times; a table in Markdown."""
    held = stepped(MODELS[name]())
    weights = sum(parameter.numel() for parameter in held.model.parameters())
    lines = [f"## {name}: {weights / 1e6:.1f} M weights", ""]
    lines += [HEAD, "|---|---|---|---|---|---|---|"]
    run = RunFolder(folder)
    frame = Manifest(machine=describe_machine(held.device))
    tensors = LocalModelStates(held, {}, model_writer(held.model, build_tokenizer()))
    with (
        closing(MetricsLog(run.metrics)) as log,
        RunState(tensors, {}, run, log, TrainerConfig(keep_last=1), frame) as state,
    ):
        for step in (1, 2, 3):
            began, own, both = time.perf_counter(), time.thread_time(), time.process_time()
            state.record_step(step, None)
            state.save()
            waited, copied = time.perf_counter() - began, time.thread_time() - own
            gap, last = 0.0, time.perf_counter()
            while any(thread.name == "checkpoint" for thread in threading.enumerate()):
                now = time.perf_counter()
                gap, last = max(gap, now - last), now
            worked = time.perf_counter() - began - waited
            beside = time.process_time() - both - (time.thread_time() - own)
            state.wait()
            size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
            cells = f"{1e3 * waited:,.0f} | {1e3 * copied:,.0f} | {worked:.2f} | {beside:.2f} "
            cells += f"| {1e3 * gap:.0f} | {size / 1e6:,.1f}"
            lines.append(f"| {step} | {cells} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Save each model and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    parts = []
    for name in args.models:
        with tempfile.TemporaryDirectory(dir=args.folder) as folder:
            parts.append(saves(name, Path(folder)))
        print(parts[-1], flush=True)
    if args.out is not None:
        command = " ".join(["python", "benchmarks/checkpoint.py", *sys.argv[1:]])
        head = f"# What a checkpoint costs\n\nMade by `{command}` on one thread.\n\n"
        args.out.write_text(head + "\n".join(parts))


if __name__ == "__main__":
    main()
