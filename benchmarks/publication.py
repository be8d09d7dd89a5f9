"""What publishing weights costs, against a plain copy of the same bytes in the same run.

    python benchmarks/publication.py [--layers 8] [--repeats 5]
                                     [--out benchmarks/results/publication.md]

A random Qwen3 (166 M weights by default) is published to engines in buckets, with checksums, as
training does after each step: to one in this process, to one and to two in processes of their own.
A copy is `memcpy` from one warm buffer to another, of as many bytes. The figures of a row are taken
in turns with the copy, so that other work on the machine hits both alike; medians of the turns.

The last table has how long an engine in another process stands still while it writes answers: the
longest time between two of its ticks, with the update copied beside its weights and into them.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
import zlib
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from winnow.learning.canary import Canary
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import use_layout_attention
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.rollout.engine_group import EngineGroup
from winnow.rollout.remote_engine import RemoteEngine, TorchEngineWorker
from winnow.rollout.weights import WeightUpdate, to_array
from winnow.workers.group import start_local

WORKER = "winnow.rollout.remote_engine:TorchEngineWorker"
WATCHED = "benchmarks.publication:WatchedWorker"
POSITIONS = 2048
SETTINGS: dict[str, Any] = {"slots": 4, "prefill_tokens": 2048}
HEAD = "| what | s | GB/s | times a copy (least, most) |\n|---|---|---|---|"


def config_of(layers: int) -> Qwen3Config:
    """The model that is published."""
    return Qwen3Config(
        vocab_size=64_000,
        hidden_size=1024,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=64,
        intermediate_size=3072,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=True,
    )


class Turns:
    """Times of something, each beside that of a copy."""

    def __init__(self, tensors: Sequence[tuple[str, Tensor]], repeats: int) -> None:
        self._source = np.concatenate([to_array(t).view(np.uint8) for _, t in tensors])
        self._target = np.zeros_like(self._source)
        self._repeats = repeats
        self.copies: list[float] = []

    @property
    def gigabytes(self) -> float:
        """Of the weights."""
        return self._source.nbytes / 1e9

    def _copy(self) -> float:
        began = time.perf_counter()
        np.copyto(self._target, self._source)
        return time.perf_counter() - began

    async def row(self, what: str, work: Callable[[], Awaitable[None]]) -> str:
        """Run it by turns; a line of the table."""
        await work()
        self._copy()
        took, ratios = [], []
        for _ in range(self._repeats):
            before = self._copy()
            began = time.perf_counter()
            await work()
            took.append(time.perf_counter() - began)
            copy = (before + self._copy()) / 2
            self.copies.append(copy)
            ratios.append(took[-1] / copy)
        middle = statistics.median(took)
        spread = f"{statistics.median(ratios):.1f} ({min(ratios):.1f}, {max(ratios):.1f})"
        line = f"| {what} | {middle:.3f} | {self.gigabytes / middle:.2f} | {spread} |"
        print(line, flush=True)
        return line

    def copy_row(self) -> str:
        """The copy itself."""
        middle = statistics.median(self.copies)
        return f"| a copy in memory | {middle:.3f} | {self.gigabytes / middle:.2f} | 1 |"


async def measure(layers: int, dtype: torch.dtype, repeats: int) -> str:
    """One table in Markdown."""
    torch.manual_seed(0)
    model: Any = Qwen3ForCausalLM(config_of(layers)).to(dtype).eval()
    use_layout_attention(model)
    policy = Strategy(model)
    tensors = list(policy.export_weights(dtype))
    turns = Turns(tensors, repeats)
    name = str(dtype).removeprefix("torch.")
    canary = Canary.random(64_000, POSITIONS, dtype)

    async def checksum() -> None:
        for _, tensor in tensors:
            zlib.crc32(to_array(tensor).view(np.uint8))  # type: ignore[arg-type]

    def publish(group: EngineGroup) -> Callable[[], Awaitable[None]]:
        return lambda: group.load_weights(WeightUpdate(1, policy.export_weights(dtype)))

    lines = [await turns.row("one CRC-32 of the bytes", checksum)]
    here: Any = Qwen3ForCausalLM(config_of(layers)).to(dtype).eval()
    use_layout_attention(here)
    embedded = EngineGroup([TorchEngine(here, **SETTINGS)], True)
    lines.append(await turns.row("published to an engine in this process", publish(embedded)))
    with tempfile.TemporaryDirectory() as folder:
        here.save_pretrained(folder)
        options = SETTINGS | {"model": folder, "dtype": name}
        starts = [
            start_local("engine", WORKER, options, 1, {"OMP_NUM_THREADS": "1"}) for _ in range(2)
        ]
        groups = await asyncio.gather(*starts)
    try:
        engines = [RemoteEngine(each, await each.call_rank(0, "call", "")) for each in groups]
        for count, what in (
            (1, "an engine in another process"),
            (2, "two engines, a process each"),
        ):
            group = EngineGroup(engines[:count], True)
            lines.append(await turns.row(f"published to {what}", publish(group)))
        expected = canary.score(policy)

        async def listen() -> None:
            await canary.check(expected, 1, {"engine": engines[0]})

        lines.append(await turns.row("the canary, engine's side", listen))

        async def trainer() -> None:
            canary.score(policy)

        lines.append(await turns.row("the canary, trainer's side", trainer))
    finally:
        await asyncio.gather(*(group.close() for group in groups))
    weights = sum(tensor.numel() for _, tensor in tensors)
    title = f"## {weights / 1e6:.0f} M weights in {name}, {turns.gigabytes:.2f} GB\n\n"
    return title + "\n".join([HEAD, turns.copy_row(), *lines]) + "\n"


class WatchedWorker(TorchEngineWorker):
    """A worker that notes the longest time between two ticks of its engine."""

    def __init__(self, rank: Any, **options: Any) -> None:
        super().__init__(rank, **options)
        engine: Any = self._engine
        advance, self._ended_s, self._gap_s = engine._advance, 0.0, 0.0

        def noted() -> Any:
            self._gap_s = max(self._gap_s, time.perf_counter() - self._ended_s)
            events = advance()
            self._ended_s = time.perf_counter()
            return events

        engine._advance = noted

    def take_gap(self) -> float:
        """Return the longest time since the last call."""
        gap, self._gap_s, self._ended_s = self._gap_s, 0.0, time.perf_counter()
        return gap


async def _ticks(engine: RemoteEngine, count: int) -> None:
    """Wait for so many ticks."""
    until = engine.status().tick + count
    while engine.status().tick < until:
        await engine.progress()


async def stalls(layers: int, dtype: torch.dtype, repeats: int) -> str:
    """One table of how long decoding stands still."""
    torch.manual_seed(0)
    policy: Any = Qwen3ForCausalLM(config_of(layers)).to(dtype).eval()
    tensors = [(name, tensor.detach()) for name, tensor in policy.named_parameters()]
    folder = tempfile.mkdtemp(prefix="winnow-publication-")
    policy.save_pretrained(folder)
    options = SETTINGS | {"model": folder, "dtype": str(dtype).removeprefix("torch.")}
    options |= {"live_updates": True, "longest": POSITIONS}
    kinds = ("into the weights", 0), ("beside them", 1)
    found: dict[str, list[tuple[float, float, int]]] = {what: [] for what, _ in kinds}
    groups = {
        what: await start_local(
            "engine", WATCHED, options | {"staging": engines}, 1, {"OMP_NUM_THREADS": "1"}
        )
        for what, engines in kinds
    }
    try:
        engines = {
            what: RemoteEngine(each, await each.call_rank(0, "call", ""))
            for what, each in groups.items()
        }
        for number in range(repeats + 1):
            for what, engine in engines.items():
                answers = tuple(AnswerRequest(i, i) for i in range(4))
                sampling = SamplingParams(POSITIONS - 8)
                await engine.submit([GroupRequest(0, np.arange(3, 9), answers, sampling, 0)])
                waiting = asyncio.ensure_future(engine.events())
                await _ticks(engine, 8)
                await groups[what].call_rank(0, "take_gap")
                began, before = time.perf_counter(), engine.status().generated_tokens
                await engine.load_weights(WeightUpdate(number + 1, tensors))
                took = time.perf_counter() - began
                await _ticks(engine, 1)
                written = engine.status().generated_tokens - before
                gap = await groups[what].call_rank(0, "take_gap")
                if number:  # the first one warms up
                    found[what].append((took, gap, written))
                await engine.abort([0])
                await waiting
    finally:
        await asyncio.gather(*(group.close() for group in groups.values()))
    size = sum(tensor.nbytes for _, tensor in tensors) / 1e9
    lines = [
        f"## Decoding meanwhile, {size:.2f} GB in {options['dtype']}",
        "",
        "| copied | publication, s | stands still, s | tokens written meanwhile |",
        "|---|---|---|---|",
    ]
    for what, rows in found.items():
        took, gap, written = (statistics.median(column) for column in zip(*rows, strict=True))
        lines.append(f"| {what} | {took:.3f} | {gap:.3f} | {written:.0f} |")
    pairs = zip(*found.values(), strict=True)
    ratios = [beside[1] / into[1] for into, beside in pairs]
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    lines.append(f"\nBeside the weights it stands still {spread} times as long as otherwise.")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure in both dtypes, print and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--stalls", action="store_true", help="the last table alone")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    load = Path("/proc/loadavg").read_text().split()[0]
    dtypes = () if args.stalls else (torch.bfloat16, torch.float32)
    tables = [asyncio.run(measure(args.layers, dtype, args.repeats)) for dtype in dtypes]
    tables.append(asyncio.run(stalls(args.layers, torch.float32, args.repeats)))
    command = " ".join(["python", "benchmarks/publication.py", *sys.argv[1:]])
    head = f"# What publishing weights costs\n\nMade by `{command}`, one thread a process; other "
    head += f"work on the machine (load average) when it began: {load}.\n\n"
    text = head + "\n".join(tables)
    print(text)
    if args.out is not None:
        args.out.write_text(text)


if __name__ == "__main__":
    main()
