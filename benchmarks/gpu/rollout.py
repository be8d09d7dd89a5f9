"""The rollout side: log-probs beside the trainer's, speed of drawing and decoding, publication."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.multiprocessing as mp
from benchmarks.gpu.harness import Bench, synchronize

from winnow.learning.batch import pack_sequences
from winnow.learning.strategy import Strategy, run_pass
from winnow.rollout.draw import RowParams, draw, uniform
from winnow.rollout.embedded.torch_engine import TorchEngine
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams, generate
from winnow.rollout.weights import WeightReceiver, WeightUpdate, pack_buckets, to_array
from winnow.types import IntArray, Trajectory


def answer(
    bench: Bench, model: Any, prompts: Sequence[IntArray], n: int, tokens: int
) -> dict[tuple[int, int], Trajectory]:
    """Write n answers of that many tokens to each prompt, all of them side by side."""
    engine = TorchEngine(model, len(prompts) * n, 8192, vocab_size=bench.ids)
    groups = []
    for i, prompt in enumerate(prompts):
        requests = tuple(AnswerRequest(j, seed=i * n + j) for j in range(n))
        groups.append(GroupRequest(i, prompt, requests, SamplingParams(tokens), i))
    return asyncio.run(generate(engine, groups))


def mismatch(bench: Bench) -> None:
    """Compare an engine's log-probs of its answers with the trainer's, in bf16."""
    rng, tokens = np.random.default_rng(0), bench.pick(64, 4)
    prompts = [rng.integers(0, bench.ids, int(length)) for length in rng.integers(5, 90, 16)]
    model = bench.model(layers=4)
    answers = answer(bench, model, prompts, 2, tokens)
    sequences = [np.concatenate([prompts[i], a.token_ids]) for (i, _), a in answers.items()]
    batch = pack_sequences(sequences, last=tokens)
    strategy = Strategy(model, vocab_size=bench.ids)
    logprobs = run_pass(strategy, batch, frozenset({"logprob"}), 4096)["logprob"]
    behaviour = np.concatenate([each.logprobs for each in answers.values()])
    gaps = np.abs(logprobs.numpy()[batch.gen_mask] - behaviour)
    figures = {"mean": float(gaps.mean()), "max": float(gaps.max())}
    bench.report("engine against trainer, nats", tokens=len(gaps), **figures)


def decode(bench: Bench) -> None:
    """Time the draw of a token a row, and the torch engine with full rows."""
    rows, rng, model = bench.pick(256, 8), np.random.default_rng(0), bench.model()
    # A view: the head's rows beyond the tokenizer's ids are cut off.
    logits = torch.randn(rows, model.config.vocab_size, device=bench.device)[:, : bench.ids]
    seeds = torch.arange(rows, device=bench.device)
    params = RowParams([SamplingParams(1)], torch.zeros_like(seeds))

    def gumbel() -> torch.Tensor:
        noise = torch.empty_like(logits).exponential_().log()
        return (logits.log_softmax(-1) - noise).argmax(-1)

    draw_s = bench.timed(lambda: draw(logits, uniform(seeds, seeds), params), 20, 3)
    gumbel_ms = bench.timed(gumbel, 20, 3) * 1e3
    bench.report("draw", rows=rows, ms=draw_s * 1e3, softmax_and_gumbel_ms=gumbel_ms)
    for rows, tokens in bench.pick([(64, 256), (256, 256), (256, 1024)], [(8, 16)]):
        prompts = list(rng.integers(0, bench.ids, (rows // 8, 128)))
        bench.peak_gib()
        all_s = bench.timed(partial(answer, bench, model, prompts, 8, tokens), 1, 0)
        figures = {"tokens_per_s": rows * tokens / all_s, "tick_ms": all_s / tokens * 1e3}
        sizes = {"rows": rows, "tokens": tokens, "peak_gib": bench.peak_gib()}
        bench.report("torch engine", **sizes, **figures)


def publish(bench: Bench) -> None:
    """Time publication through the host, what it consists of, and ways past the host."""
    source, target = bench.model(), bench.model()
    nbytes, is_equal = sum(p.nbytes for p in source.parameters()), []

    async def through_host() -> None:
        receiver = WeightReceiver(target, 1)
        for bucket in pack_buckets(WeightUpdate(1, source.named_parameters())):
            is_equal.append(receiver.take(bucket) == bucket.checksum())

    def rate(figure: str, nbytes: int, work: Callable[[], object], **values: Any) -> None:
        seconds = bench.timed(work)
        bench.report(figure, gb=nbytes / 1e9, s=seconds, gb_s=nbytes / seconds / 1e9, **values)

    rate("buckets through the host", nbytes, lambda: asyncio.run(through_host()))
    bench.report("checksums", equal=all(is_equal))
    pairs = list(zip(target.parameters(), source.parameters(), strict=True))
    rate("copies on the device", nbytes, lambda: [to.data.copy_(of) for to, of in pairs])
    weight = next(source.parameters()).detach()
    data: Any = to_array(weight).view(np.uint8)
    pinned = torch.empty(weight.shape, dtype=weight.dtype, pin_memory=bench.on_gpu)
    words = weight.view(torch.int32).view(-1)
    places = torch.arange(len(words), device=bench.device)
    rate("CRC-32 on a core", weight.nbytes, lambda: zlib.crc32(data))
    rate("weighted sum on the device", weight.nbytes, lambda: (words.long() * places).sum())
    rate("device to host", weight.nbytes, lambda: weight.to("cpu", copy=True))
    rate("device to pinned", weight.nbytes, lambda: pinned.copy_(weight, non_blocking=True))
    context = mp.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=copy_shared, args=(inbox, outbox), daemon=True)
    process.start()
    outbox.get(timeout=100)
    start = time.perf_counter()
    inbox.put([p.detach() for p in source.parameters()])
    copy_s = outbox.get(timeout=100)
    figures = {"s": time.perf_counter() - start, "copies_s": copy_s}
    inbox.put(None)
    process.join()
    bench.report("to another process", gb=nbytes / 1e9, **figures, gb_s=nbytes / copy_s / 1e9)


def copy_shared(inbox: Any, outbox: Any) -> None:
    """Copy tensors that another process shares (on GPUs by CUDA IPC), and answer with the time."""
    outbox.put("ready")
    tensors = inbox.get()
    copies = [torch.empty_like(tensor) for tensor in tensors]
    synchronize()
    start = time.perf_counter()
    torch._foreach_copy_(copies, tensors)
    synchronize()
    outbox.put(time.perf_counter() - start)
    inbox.get()  # the other process holds the memory until then
