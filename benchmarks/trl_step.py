"""CPU seconds of a step here and in TRL's GRPOTrainer, from one start, side by side.

    pip install trl        # beside winnow, in an environment of its own
    OMP_NUM_THREADS=1 python benchmarks/trl_step.py [--of quickstart] [--steps 8] [--rounds 2]
    OMP_NUM_THREADS=1 python benchmarks/trl_step.py --of FOLDER [--steps 3] [--rounds 1]

Both start from the warm start of the quickstart (or of the recipe dapo) and do its step without
dynamic sampling: 64 prompts x 8 answers of at most 64 (128) tokens at temperature 1, rewards by the
same scorer, clipping at 0.2 and 0.28, token-level loss without a reference, four updates of 128
answers, one thread. TRL pads a micro-batch's answers to the longest; it is measured with the four
updates' 128 answers whole and in micro-batches of 32. With --of FOLDER the start is that folder of
SmolLM2-135M-Instruct, and a step has 8 questions (sums of two digits, rendered by its chat
template) x 8 answers of at most 32 tokens, two updates of 32 answers, learning rate 2e-5, at most
1,024 packed tokens or 8 answers of TRL at once. A step is what a process of its own needs for it in
CPU time, without the first ones; the least of the rounds counts.
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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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
from winnow.rewards.scorers.markers import score_gsm8k_flexible, score_sort_digits
from winnow.types import Score

WITHOUT_SAMPLING = ["sampling/filter=none"]


@dataclass(frozen=True)
class Setup:
    """A step, as both sides take it."""

    score: Callable[..., Score] = score_sort_digits
    prompts: int = 64
    answers: int = 8
    updates: int = 4
    tokens: int = 64
    lr: float = 8e-4
    micro_batch: int = 128
    """Answers that TRL runs at once."""
    warm_up: int = WARM_UP_STEPS
    """First steps, which are not counted."""


SMOLLM2 = Setup(score_gsm8k_flexible, 8, 8, 2, 32, 2e-5, 8, 1)
RECIPES = {"quickstart": Setup(), "dapo": Setup(tokens=128, lr=4e-4)}


def quickstart_rows(count: int, seed: int = 1, recipe: str = "quickstart") -> list[dict[str, str]]:
    """Return the first training problems of the quickstart, or of dapo, with their answers."""
    task = load_recipe(recipe, []).data.task
    assert isinstance(task, SortDigitsTask)
    stream = SortDigitsRows(task, seed)
    problems = [next(stream.candidates(i)).text[:-1] for i in range(count)]
    return [{"prompt": prompt_text(d), "ground_truth": solution(d)} for d in problems]


def sums(count: int) -> list[dict[str, str]]:
    """Return questions with two digits each, with their answers."""
    pairs = [(11 + 7 * i % 89, 12 + 5 * i % 83) for i in range(count)]
    return [{"prompt": f"What is {a} + {b}?", "ground_truth": str(a + b)} for a, b in pairs]


def step_ends(trainer_callback: type, updates: int) -> tuple[list[float], Any]:
    """Return the CPU times at which TRL ended its steps, and the callback that notes them."""
    ends: list[float] = []

    class Clock(trainer_callback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % updates == 0:
                ends.append(time.process_time())

    return ends, Clock()


def trl_trainer(
    start: str,
    rows: Sequence[dict[str, str]],
    setup: Setup,
    scratch: str,
    callback: Any,
    **more: Any,
) -> Any:
    """Make TRL's trainer of all steps that the rows fill.

    Args:
        more: arguments of its `GRPOConfig`.
    """
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def reward(completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
        pairs = zip(completions, ground_truth, strict=True)
        return [setup.score("", text, truth, {}).reward for text, truth in pairs]

    per_update = setup.prompts * setup.answers // setup.updates
    updates = len(rows) // setup.prompts * setup.updates
    settings: dict[str, Any] = {
        "output_dir": scratch,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_steps": updates,
        "logging_steps": updates,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "shuffle_dataset": False,
        "per_device_train_batch_size": setup.micro_batch,
        "gradient_accumulation_steps": per_update // setup.micro_batch,
        "generation_batch_size": setup.prompts * setup.answers,
        "num_generations": setup.answers,
        "max_completion_length": setup.tokens,
        "temperature": 1.0,
        "top_k": 0,
        "loss_type": "dapo",
        "epsilon": 0.2,
        "epsilon_high": 0.28,
        "beta": 0.0,
        "learning_rate": setup.lr,
        "weight_decay": 0.0,
    }
    return trl.GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32),
        reward_funcs=reward,
        args=trl.GRPOConfig(**settings | more),
        train_dataset=Dataset.from_list(list(rows)),
        processing_class=AutoTokenizer.from_pretrained(start, padding_side="left"),
        callbacks=[callback],
    )


def trl_step(steps: int, scratch: str, of: str, micro_batch: int | None) -> float:
    """Return the CPU seconds of a step of TRL's trainer."""
    from transformers import AutoTokenizer, TrainerCallback

    setup = RECIPES.get(of, SMOLLM2)
    if micro_batch is not None:
        setup = replace(setup, micro_batch=micro_batch)
    if of in RECIPES:
        config = load_recipe(of, ["run.threads=1", f"run.dir={scratch}"])
        start = str(make_warm_start(config, False, make_console("off", Console())))
        rows = quickstart_rows(setup.prompts * steps, config.run.seed, of)
    else:
        start, render = of, AutoTokenizer.from_pretrained(of).apply_chat_template
        for row in (rows := sums(setup.prompts * steps)):
            messages = [{"role": "user", "content": row["prompt"]}]
            row["prompt"] = render(messages, tokenize=False, add_generation_prompt=True)
    ends, clock = step_ends(TrainerCallback, setup.updates)
    trl_trainer(start, rows, setup, scratch, clock).train()
    seconds = [after - before for before, after in pairwise(ends)][setup.warm_up - 1 :]
    return sum(seconds) / len(seconds)


def smollm2_settings(folder: str, scratch: str) -> list[str]:
    """Return the overrides of the quickstart that make its step that of `SMOLLM2`."""
    file = Path(scratch) / "sums.jsonl"
    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": row["prompt"]}],
            "reward_model": {"style": "rule", "ground_truth": row["ground_truth"]},
        }
        for row in sums(4096)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return [
        *(
            "warm_start=none",
            "data/task=none",
            f"model.path={folder}",
            f"data.train_files=[{file}]",
        ),
        *("data.max_prompt_tokens=64", "reward.scorers={*: gsm8k_flexible}", "optim.lr=2e-5"),
        *("rollout.max_response_tokens=32", "reward.overlong.enabled=false"),
        *("rollout.engine.slots=64", "sampling.groups_per_step=8", "trainer.mini_batch_groups=4"),
        *("trainer.microbatch_tokens=1024", "sampling/filter=none"),
    ]


def winnow_step(steps: int, scratch: str, of: str, *overrides: str) -> float:
    """Return the CPU seconds of a step here."""
    setup, recipe = RECIPES.get(of, SMOLLM2), of
    if of not in RECIPES:
        recipe, overrides = "quickstart", (*smollm2_settings(of, scratch), *overrides)
    bench = Quickstart(scratch, overrides, recipe)
    return float(asyncio.run(measure(steps, bench, setup.warm_up))["step"])


SIDES: dict[str, Callable[[int, str, str], float]] = {
    "winnow": lambda steps, scratch, of: winnow_step(steps, scratch, of, *WITHOUT_SAMPLING),
    "winnow, with dynamic sampling": winnow_step,
    "winnow, with a pass for old log-probs": lambda steps, scratch, of: winnow_step(
        steps, scratch, of, *WITHOUT_SAMPLING, "algorithm.correction.mode=recompute"
    ),
    "TRL, updates whole": lambda steps, scratch, of: trl_step(steps, scratch, of, None),
    "TRL, micro-batches of 32": lambda steps, scratch, of: trl_step(steps, scratch, of, 32),
}
OF_SMOLLM2 = "winnow", "winnow, with a pass for old log-probs", "TRL, updates whole"


def main() -> None:
    """Measure one side, or let each side measure in turn and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument(
        "--of", default="quickstart", help="quickstart, dapo, or the model's folder"
    )
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="Measure these only.")
    parser.add_argument("--side", choices=SIDES, help="Measure this one here, print JSON.")
    args = parser.parse_args()
    if args.side:
        torch.set_num_threads(1)
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(SIDES[args.side](args.steps, scratch, args.of)))
        return
    sides = args.sides or (SIDES if args.of in RECIPES else OF_SMOLLM2)
    found: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(args.rounds):
        for side, seconds in found.items():
            command = [sys.executable, __file__, "--side", side, "--steps", str(args.steps)]
            command += ["--of", args.of]
            path = {"PYTHONPATH": str(Path(__file__).parents[1] / "src")}
            made = subprocess.run(
                command, env={**os.environ, **path}, check=True, stdout=subprocess.PIPE
            )
            seconds.append(json.loads(made.stdout.splitlines()[-1]))
            print(side, seconds, file=sys.stderr)
    base = min(found["winnow"])
    print("| | CPU s a step | of ours |\n|---|---|---|")
    for side, seconds in found.items():
        print(f"| {side} | {min(seconds):.2f} | {min(seconds) / base:.2f} |")


if __name__ == "__main__":
    main()
