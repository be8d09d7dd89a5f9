"""CPU seconds of a DAPO step here and in TRL's GRPOTrainer, from one warm start, side by side.

    pip install trl        # beside winnow, in an environment of its own
    OMP_NUM_THREADS=1 python benchmarks/trl_step.py [--steps 8] [--rounds 2]

Both start from the quickstart's warm start and do the quickstart's step without dynamic sampling:
64 prompts x 8 answers of at most 128 tokens at temperature 1, rewards by the same scorer, clipping
at 0.2 and 0.28, token-level loss without a reference, four updates of 128 answers, learning rate
4e-4, one thread. TRL pads a micro-batch's answers to the longest; it is measured with the four
updates' 128 answers whole and in micro-batches of 32. A step is what a process of its own needs for
it in CPU time, without the first two; the least of the rounds counts.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from speed import WARM_UP_STEPS, Quickstart, measure

from winnow.builders.warm_start import make_warm_start
from winnow.config.data import SortDigitsTask
from winnow.config.load import load_recipe
from winnow.data.sort_digits import SortDigitsRows, prompt_text, solution
from winnow.observe.console import make_console
from winnow.rewards.scorers.markers import score_sort_digits

PROMPTS, ANSWERS, UPDATES, TOKENS = 64, 8, 4, 128
WITHOUT_SAMPLING = ["sampling/filter=none"]


def rewards_of(completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
    """Score decoded answers, as TRL asks for it."""
    pairs = zip(completions, ground_truth, strict=True)
    return [score_sort_digits("sort_digits", text, truth, {}).reward for text, truth in pairs]


def step_ends(trainer_callback: type) -> tuple[list[float], Any]:
    """Return the CPU times at which TRL ended its steps, and the callback that notes them."""
    ends: list[float] = []

    class Clock(trainer_callback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % UPDATES == 0:
                ends.append(time.process_time())

    return ends, Clock()


def trl_step(steps: int, scratch: str, micro_batch: int) -> float:
    """CPU seconds of a step of TRL's trainer."""
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

    config = load_recipe("quickstart", ["run.threads=1", f"run.dir={scratch}"])
    start = make_warm_start(config, False, make_console("off", Console()))
    tokenizer = AutoTokenizer.from_pretrained(start, padding_side="left")
    assert isinstance(config.data.task, SortDigitsTask)
    stream = SortDigitsRows(config.data.task, config.run.seed)
    problems = [next(stream.candidates(i)).text[:-1] for i in range(PROMPTS * steps)]
    rows = [{"prompt": prompt_text(d), "ground_truth": solution(d)} for d in problems]
    per_update = PROMPTS * ANSWERS // UPDATES
    settings = trl.GRPOConfig(
        output_dir=scratch,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        max_steps=steps * UPDATES,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=per_update // micro_batch,
        generation_batch_size=PROMPTS * ANSWERS,
        num_generations=ANSWERS,
        max_completion_length=TOKENS,
        temperature=1.0,
        top_k=0,
        loss_type="dapo",
        epsilon=0.2,
        epsilon_high=0.28,
        beta=0.0,
        learning_rate=4e-4,
        weight_decay=0.0,
        shuffle_dataset=False,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_steps=steps * UPDATES,
    )
    ends, clock = step_ends(TrainerCallback)
    trainer = trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        reward_funcs=rewards_of,
        args=settings,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[clock],
    )
    trainer.train()
    seconds = [after - before for before, after in pairwise(ends)][WARM_UP_STEPS - 1 :]
    return sum(seconds) / len(seconds)


def winnow_step(steps: int, scratch: str, *overrides: str) -> float:
    """CPU seconds of a step here."""
    return float(asyncio.run(measure(steps, Quickstart(scratch, overrides)))["step"])


SIDES: dict[str, Callable[[int, str], float]] = {
    "winnow": lambda steps, scratch: winnow_step(steps, scratch, *WITHOUT_SAMPLING),
    "winnow, with dynamic sampling": winnow_step,
    "TRL, updates whole": lambda steps, scratch: trl_step(steps, scratch, 128),
    "TRL, micro-batches of 32": lambda steps, scratch: trl_step(steps, scratch, 32),
}


def main() -> None:
    """Measure one side, or let each side measure in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", choices=SIDES, help="Measure this one here, print JSON.")
    args = parser.parse_args()
    if args.side:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(SIDES[args.side](args.steps, scratch)))
        return
    found: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(args.rounds):
        for side, seconds in found.items():
            command = [sys.executable, __file__, "--side", side, "--steps", str(args.steps)]
            path = {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
            made = subprocess.run(
                command, env={**os.environ, **path}, check=True, stdout=subprocess.PIPE
            )
            seconds.append(json.loads(made.stdout.splitlines()[-1]))
    own = min(found["winnow"])
    print("| | CPU s a step | of ours |\n|---|---|---|")
    for side, seconds in found.items():
        print(f"| {side} | {min(seconds):.2f} | {min(seconds) / own:.2f} |")


if __name__ == "__main__":
    main()
