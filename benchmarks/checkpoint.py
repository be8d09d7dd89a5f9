"""What saving costs: how long training waits, how long the thread works, how large it gets.

    python benchmarks/checkpoint.py [--width 768 --layers 10] [--folder /disk/to/try]

Saves a random Qwen3 of that shape with AdamW's state three times. The first save also pays for
memory that is touched for the first time. `gap` is the longest that a busy main thread had to
wait for the interpreter while the thread was writing.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from winnow.checkpoint import Content, Retention, this_machine
from winnow.data.sort_digits import build_tokenizer
from winnow.models import model_writer, use_layout_attention
from winnow.trainer.saver import Saver
from winnow.trainer.state import RunState
from winnow.workers.single import SingleStrategy


def strategy(width: int, layers: int) -> SingleStrategy:
    """A model with an optimizer that has stepped once."""
    shape: dict[str, Any] = {
        "vocab_size": 32_000,
        "hidden_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": width // 64,
        "head_dim": 64,
        "intermediate_size": 3 * width,
        "tie_word_embeddings": True,
    }
    model = Qwen3ForCausalLM(Qwen3Config(**shape)).eval()
    use_layout_attention(model)
    made = SingleStrategy(model)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    made.optimizer_step(1e-4)
    return made


def main() -> None:
    """Save three times and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--layers", type=int, default=10)
    parser.add_argument("--folder", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    held = strategy(args.width, args.layers)
    weights = sum(parameter.numel() for parameter in held.model.parameters())
    print(f"{weights / 1e6:.1f} M weights\n")
    print("| save | training waits, ms | thread works, s | gap, ms | MB |\n|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        with Saver(folder, Retention(1)) as saver:
            frame = partial(Content, machine=this_machine(held.device))
            writer = model_writer(held.model, build_tokenizer())
            state = RunState(held, {}, lambda: 0, saver.save, frame, writer)
            for step in (1, 2, 3):
                began = time.perf_counter()
                state.note(step, None)
                state.save()
                waited = time.perf_counter() - began
                gap, last = 0.0, time.perf_counter()
                while saver.is_busy:
                    now = time.perf_counter()
                    gap, last = max(gap, now - last), now
                worked = time.perf_counter() - began - waited
                saver.wait()
                files = (path.stat() for path in folder.rglob("*"))
                size = sum(status.st_size for status in files) / 1e6
                cells = f"{1e3 * waited:,.0f} | {worked:.1f} | {1e3 * gap:.0f} | {size:,.0f}"
                print(f"| {step} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
