"""Decoding speed of the embedded engine against vLLM, alternating, in CPU seconds and wall time.

    .venv-vllm/bin/python benchmarks/vllm_decode.py [--dtypes fp32] [--threads 1 2] [--rounds 3]

Each engine is a process of its own with the same random Qwen2 (6 layers of width 256, V = 8,192)
and 128 rows. They take turns, so that what else the machine does falls on all alike. `uniform` is
16 prompts x 8 answers of 256 tokens; `ragged` is 256 prompts of 8 to 64 tokens whose answers end
by one of 64 stop tokens, 128 tokens on average and at most 384, so that rows are filled again.
`vllm` samples itself, `winnow draws` is `rollout/engine=vllm`, and Hugging Face `generate` gets
batches of 128, in which tokens behind a stop count for nobody. The table shows each one's median,
and the first engine's rate over it: the median of the rounds' ratios, and the least and the
largest. `generate`, a reference that takes several times as long, runs in the first round alone.
All engines have the same number of OpenMP threads and bind none of them to a core (vLLM does that
only where its worker is a process apart). Threads sleep while they wait for each other, unless
OMP_WAIT_POLICY is set: where they spin, as is OpenMP's default, CPU seconds count that, too, and
beside other work two threads take many times as long.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

ROWS, VOCABULARY, MARK = 128, 8192, "DECODED "
DTYPES = {"fp32": "float32", "bf16": "bfloat16"}
STOPS = tuple(range(64))
WORKLOADS = ("uniform", "ragged")
TORCH, VLLM, OWN_DRAWS, GENERATE = "torch engine", "vllm", "winnow draws", "generate"
Write = Callable[[Sequence["Prompt"]], int]
"""Writes the answers to prompts; returns how many tokens they have."""


@dataclass(frozen=True)
class Prompt:
    """A prompt and what is asked for it."""

    ids: list[int]
    answers: int
    limit: int
    stops: tuple[int, ...]


def prompts_of(workload: str) -> list[Prompt]:
    """Return the prompts of a workload, the same in each process."""
    import numpy as np

    rng = np.random.default_rng(0)

    def ids(length: int) -> list[int]:
        return [int(i) for i in rng.integers(len(STOPS), VOCABULARY, length)]

    if workload == "uniform":
        return [Prompt(ids(32), 8, 256, ()) for _ in range(ROWS // 8)]
    if workload == "warm-up":
        return [Prompt(ids(32), 1, 8, ()) for _ in range(ROWS)]
    return [Prompt(ids(int(rng.integers(8, 65))), 1, 384, STOPS) for _ in range(2 * ROWS)]


def write_model(folder: str, kv_heads: int) -> None:
    """Write the model that all engines load."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=VOCABULARY,
        hidden_size=256,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=kv_heads,
        intermediate_size=1024,
        tie_word_embeddings=True,
        max_position_embeddings=512,
        pad_token_id=0,
    )
    Qwen2ForCausalLM(config).save_pretrained(folder)


def tick_engine(make: Callable[[], Any]) -> Write:
    """Write with one of Winnow's engines."""
    import numpy as np

    from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams

    engine = make()

    def write(prompts: Sequence[Prompt]) -> int:
        groups = [
            GroupRequest(
                g,
                np.array(prompt.ids),
                tuple(AnswerRequest(i, 8 * g + i) for i in range(prompt.answers)),
                SamplingParams(prompt.limit, stop_token_ids=prompt.stops),
                g,
            )
            for g, prompt in enumerate(prompts)
        ]

        async def run() -> int:
            await engine.submit(groups)
            tokens = 0
            while events := await engine.events():
                tokens += sum(len(event.segment) for event in events)
            return tokens

        return asyncio.run(run())

    return write


def torch_engine(folder: str, dtype: str) -> Write:
    """Write with `rollout/engine=torch`."""
    import torch

    from winnow.models.causal_lm import load_causal_lm
    from winnow.rollout.embedded.torch_engine import TorchEngine

    model = load_causal_lm(folder, getattr(torch, dtype), torch.device("cpu"))
    return tick_engine(lambda: TorchEngine(model, slots=ROWS, prefill_tokens=8192))


def own_draws(folder: str, dtype: str) -> Write:
    """Write with `rollout/engine=vllm`."""
    import torch

    from winnow.rollout.vllm.engine import VllmEngine, meta_model, start_vllm
    from winnow.rollout.vllm.worker import VllmOptions

    llm = start_vllm(
        folder,
        VllmOptions(dtype=dtype, slots=ROWS, prefill_tokens=8192, longest=512, cache_gib=1.0),
    )
    shapes = meta_model(folder, getattr(torch, dtype))
    return tick_engine(lambda: VllmEngine(llm, shapes, ROWS, VOCABULARY))


def vllm(folder: str, dtype: str) -> Write:
    """Write with vLLM as it is, its own sampler included, and log-probs of the drawn tokens."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=folder,
        dtype=dtype,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_seqs=ROWS,
        max_num_batched_tokens=8192,
        max_model_len=512,
        kv_cache_memory_bytes=1 << 30,
        disable_log_stats=True,
    )

    def write(prompts: Sequence[Prompt]) -> int:
        params = [
            SamplingParams(
                n=prompt.answers,
                max_tokens=prompt.limit,
                stop_token_ids=list(prompt.stops),
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
            )
            for prompt in prompts
        ]
        asked = [{"prompt_token_ids": prompt.ids} for prompt in prompts]
        outputs = llm.generate(asked, params, use_tqdm=False)
        return sum(len(answer.token_ids) for output in outputs for answer in output.outputs)

    return write


def generate(folder: str, dtype: str) -> Write:
    """Write with Hugging Face's `generate`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()

    def write_batch(prompts: Sequence[Prompt]) -> int:
        width = max(len(prompt.ids) for prompt in prompts)
        ids = torch.zeros(len(prompts), width, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt.ids) :] = torch.tensor(prompt.ids)
        stops = list(prompts[0].stops) or None
        out = model.generate(
            ids,
            attention_mask=(ids != 0).long(),
            do_sample=True,
            top_k=0,
            max_new_tokens=prompts[0].limit,
            eos_token_id=stops,
            pad_token_id=0,
        )[:, width:]
        ended = torch.isin(out, torch.tensor(prompts[0].stops, dtype=torch.long)).cumsum(1)
        return int((ended.roll(1, 1)[:, 1:] == 0).sum()) + len(out)

    def write(prompts: Sequence[Prompt]) -> int:
        each = [prompt for prompt in prompts for _ in range(prompt.answers)]
        return sum(write_batch(each[i : i + ROWS]) for i in range(0, len(each), ROWS))

    return write


ENGINES = {TORCH: torch_engine, VLLM: vllm, OWN_DRAWS: own_draws, GENERATE: generate}


def serve(engine: str, folder: str, dtype: str, threads: int) -> None:
    """Write the workloads that come as lines, and print what each took."""
    import torch

    torch.set_num_threads(threads)  # which vLLM forbids once it has started
    write = ENGINES[engine](folder, DTYPES[dtype])
    print(MARK + json.dumps({"threads": torch.get_num_threads()}), flush=True)
    for line in sys.stdin:
        prompts = prompts_of(line.strip())
        cpu, wall = time.process_time(), time.perf_counter()
        tokens = write(prompts)
        took = time.process_time() - cpu, time.perf_counter() - wall
        print(
            MARK + json.dumps({"tokens": tokens, "cpu_s": took[0], "wall_s": took[1]}), flush=True
        )


class Child:
    """An engine in a process of its own."""

    def __init__(self, engine: str, folder: str, dtype: str, threads: int) -> None:
        self.engine = engine
        self.rates: dict[str, list[tuple[float, float]]] = {}
        """Tokens a CPU second and a second of each round, by workload."""
        given = ["--serve", engine, folder, dtype, str(threads)]
        environment = {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        self._process = subprocess.Popen(
            [sys.executable, __file__, *given],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={"OMP_WAIT_POLICY": "PASSIVE"} | os.environ | environment,
        )
        has = self._answer()["threads"]
        if has != threads:
            raise SystemExit(f"{engine} computes with {has} threads instead of {threads}")

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith(MARK):
                found: dict[str, float] = json.loads(line.removeprefix(MARK))
                return found
        raise SystemExit(f"{self.engine} ended with exit code {self._process.wait()}")

    def run(self, workload: str, counts: bool = True) -> None:
        """Write a workload once; the first one warms up and counts for nothing."""
        assert self._process.stdin is not None
        print(workload, file=self._process.stdin, flush=True)
        took = self._answer()
        if counts:
            rates = took["tokens"] / took["cpu_s"], took["tokens"] / took["wall_s"]
            told = (
                f"{self.engine}, {workload}: {rates[0]:,.0f} tokens/CPU s, {rates[1]:,.0f} tokens/s"
            )
            print(told, file=sys.stderr, flush=True)
            self.rates.setdefault(workload, []).append(rates)

    def median(self, workload: str, column: int) -> float:
        """Return its median tokens a CPU second (0) or a second (1)."""
        return statistics.median(rates[column] for rates in self.rates[workload])

    def ratios(self, other: Child, workload: str, column: int) -> str:
        """Return the median, least and largest ratio of its rates to another's, by round."""
        pairs = zip(self.rates[workload], other.rates[workload], strict=False)
        found = [ours[column] / theirs[column] for ours, theirs in pairs]
        return f"{statistics.median(found):.2f} ({min(found):.2f} to {max(found):.2f})"

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def compare(folder: str, dtype: str, threads: int, args: argparse.Namespace) -> None:
    """Let the engines take turns, and print a line for each workload and engine."""
    children = [Child(engine, folder, dtype, threads) for engine in args.engines]
    for child in children:
        child.run("warm-up", counts=False)
    for round_ in range(args.rounds):
        for workload in args.workloads:
            for child in children:
                if round_ == 0 or child.engine != GENERATE:
                    child.run(workload)
    load = f"{os.getloadavg()[1]:.0f}"
    for workload in args.workloads:
        for child in children:
            rates = [f"{child.median(workload, column):,.0f}" for column in (0, 1)]
            ratios = [children[0].ratios(child, workload, column) for column in (0, 1)]
            cells = [dtype, str(threads), workload, child.engine, *rates, *ratios, load]
            print(f"| {' | '.join(cells)} |", flush=True)
    for child in children:
        child.close()


def main() -> None:
    """Print a table: tokens a CPU second and a second, and the first engine's share over each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=WORKLOADS)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kv-heads", type=int, default=2, help="key/value heads beside 8 heads")
    parser.add_argument("--serve", nargs=4, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.serve:
        engine, folder, dtype, threads = args.serve
        serve(engine, folder, dtype, int(threads))
        return
    print(
        "| dtype | threads | answers | engine | tokens/CPU s | tokens/s "
        f"| {args.engines[0]} over it, CPU | wall | load |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        write_model(folder, args.kv_heads)
        for dtype in args.dtypes:
            for threads in args.threads:
                compare(folder, dtype, threads, args)


if __name__ == "__main__":
    main()
