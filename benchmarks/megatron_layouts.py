"""How far gradients of Megatron's layers are from those of one process, over the layouts of ranks.

    python -m benchmarks.megatron_layouts [--out benchmarks/results/megatron_layouts.md]

Four processes on this CPU hold tiny models in parts, as the contract tests do, on recorded
rollouts; the ranks that a layout leaves run other shares of the samples. A gradient's error is the
2-norm of its distance from that of one process over its own, tensor by tensor; the worst one is
told. One process computes with the layers of transformers.
"""

from __future__ import annotations

import argparse
import contextlib
import platform
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tests.contract.test_fsdp2 import Learnt, undivided
from tests.contract.test_megatron import Cut, by_share, learn_on_rank
from tests.forked import Server
from tests.ranks import Ranks

KINDS = {
    "untied": "Qwen3",
    "tied": "Qwen3, tied",
    "qwen2": "Qwen2",
    "llama": "Llama",
    "critic": "Qwen3, critic",
    "even experts": "Qwen3-MoE",
}
DENSE: list[Cut] = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 2, 1)]
MIXTURES: list[Cut] = [(1, 1, 4), (2, 1, 2), (2, 1, 4), (1, 2, 2), (2, 2, 2), (2, 2, 1)]


def worst(found: Learnt, wanted: Learnt) -> tuple[float, str]:
    """Return the largest relative error of the first update's gradients, and the tensor's name."""
    errors = {
        name: float(np.linalg.norm(found.gradients[name] - each) / np.linalg.norm(each))
        for name, each in wanted.gradients.items()
    }
    name = max(errors, key=lambda each: errors[each])
    return errors[name], name


def rows(ranks: Ranks) -> list[str]:
    """Measure every layout of every kind of model."""
    table = []
    for kind, told in KINDS.items():
        for cut in MIXTURES if "experts" in kind else DENSE:
            cells = []
            for dtype in (torch.float64, torch.float32):
                # Layers are recomputed in one of the two.
                options = {"gradient_checkpointing": dtype == torch.float32}
                answers = ranks.run(learn_on_rank, kind, dtype, cut, True, options)
                error, name = worst(by_share(answers)[0], undivided(kind, dtype, 0, False))
                cells += [f"{error:.1e}", f"`{name.removeprefix('model.')}`"]
            tensor, pipeline, expert = cut
            shares = 4 // (tensor * pipeline)
            layout = f"{tensor} | {pipeline} | {expert} | {shares}"
            table.append(f"| {told} | {layout} | {' | '.join(cells)} |")
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table, and write it if a file is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args(arguments)
    with contextlib.closing(Server()) as server, Ranks(4, server) as ranks:
        found = rows(ranks)
    text = "\n".join(
        [
            "# Gradients over the layouts of Megatron's ranks",
            "",
            "`python -m benchmarks.megatron_layouts` on 4 gloo ranks of a CPU "
            f"({platform.machine()}, torch {torch.__version__}): the worst gradient of the first",
            "update against one process, in float64, and in float32 with layers recomputed.",
            "",
            "| model | tensor | pipeline | expert | shares | float64 | of | float32 | of |",
            "|---|---|---|---|---|---|---|---|---|",
            *found,
        ]
    )
    print(text)
    if chosen.out is not None:
        chosen.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
