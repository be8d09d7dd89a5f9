"""Games of TextArena and environments of Gymnasium in training: faults, and token ids that differ.

    python -m benchmarks.environments [--steps 20] [--only Taxi-v4 …] [--out FILE]

For each, a model of random weights, which favours legal actions and the token that ends a turn,
trains some steps. A mismatch is a turn whose context at the engine is not, token by token, the
context of the turn before, what was sampled then, and the environment's reply; or a finished
conversation that is not what the engine saw. It needs the extras `textarena` and `gymnasium`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.games import END, adapter, train_tokenizer

from winnow.environments import Turn
from winnow.observe.jsonl import read_metrics

MOVES = "up", "down", "left", "right"
ACTIONS: dict[str, Sequence[str]] = {
    "GuessTheNumber-v0": [str(number) for number in range(1, 21)],
    "Mastermind-v0": [" ".join(code) for code in itertools.permutations("123456", 4)][::9],
    "TowerOfHanoi-v0": [" ".join(towers) for towers in itertools.permutations("ABC", 2)],
    "FrozenLake-v0": MOVES,
    "Sokoban-v0": MOVES,
    "LightsOut-v0": [f"{row} {column}" for row in range(5) for column in range(5)],
    "Bandit-v0": ["red", "blue", "green", "yellow", "purple"],
    "Countdown-v0": [f"{i} {j} {op}" for i in range(3) for j in range(3) for op in "+-*"],
    "Taxi-v4": ["south", "north", "east", "west", "pickup", "dropoff"],
    "CliffWalking-v1": MOVES,
}
GYMNASIUM = "Taxi-v4", "CliffWalking-v1"
MISMATCHES = "mismatches.json"
_COLUMNS = "faults", "mismatches", "turns compared", "turns", "reward", "seconds", "CPU seconds"


def make_model(game: str, folder: Path) -> None:
    """Write a model of random weights that favours a game's actions and the end of a turn."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    actions = [f"[{action}]" for action in ACTIONS[game]]
    package = "gymnasium" if game in GYMNASIUM else "textarena"
    texts = []
    for seed in range(4):
        environment = adapter(package, game)
        texts.append(environment.reset({"seed": seed}))
        for action in itertools.islice(itertools.cycle(["?", *actions]), 12):
            step = environment.step(Turn(action))
            if step.done:
                break
            texts.append(str(step.observation))
    tokenizer = train_tokenizer(texts, min_frequency=2)
    tokenizer.add_tokens([action for action in actions if action not in tokenizer.get_vocab()])
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=16,
            intermediate_size=32,
            max_position_embeddings=8192,
            tie_word_embeddings=False,
            eos_token_id=tokenizer.convert_tokens_to_ids(END),
            bos_token_id=None,
            pad_token_id=tokenizer.convert_tokens_to_ids(END),
        )
    )
    favoured = tokenizer.convert_tokens_to_ids(actions)
    with torch.no_grad():  # the last hidden state is then nearly all ones
        model.model.embed_tokens.weight += 10
        model.lm_head.weight[favoured] += math.log(8 * len(tokenizer) / len(favoured)) / 32
        model.lm_head.weight[model.config.eos_token_id] += math.log(4 * len(tokenizer)) / 32
    model.save_pretrained(folder)


def train(arguments: Sequence[str], report: Path) -> None:
    """Train in this process, and write the number of mismatches.

    Args:
        arguments: of `winnow train`.
    """
    import numpy as np

    import winnow.environments.conversation as conversation
    from winnow.cli import main as winnow_main

    counts = {"compared": 0, "mismatches": 0}
    contexts: dict[tuple[int, int], Any] = {}
    """By answer, what the engine has seen and sampled of it."""

    def compare(is_same: bool) -> None:
        counts["compared"] += 1
        counts["mismatches"] += not is_same

    class Watched(conversation.ConversationEngine):
        """Compares what the engine below is given and returns with what is trained on."""

        async def events(self, until: int | None = None) -> Any:
            events = await super().events(until)
            for event in events:
                if event.kind == "finished":
                    segments = [*event.earlier, event.segment]
                    ids = np.concatenate([segment.token_ids for segment in segments])
                    compare(np.array_equal(ids, contexts.pop(event.key)))
            return events

        async def _continue(self, conversation: Any) -> None:
            before = contexts.get(conversation.key)
            await super()._continue(conversation)
            if before is not None and conversation.reply is None:
                ids = np.concatenate([each.token_ids for each in conversation.segments])
                reply = conversation.segments[-1]
                is_appended = np.array_equal(ids, np.append(before, reply.token_ids))
                compare(is_appended and reply.source == "environment")

        def _handle(self, event: Any) -> None:
            if event.kind == "finished":
                contexts[event.key] = event.segment.token_ids  # all since the prompt
            super()._handle(event)

    conversation.ConversationEngine = Watched  # type: ignore[misc]
    with contextlib.suppress(SystemExit):
        sys.argv[1:] = arguments
        winnow_main()
    report.write_text(json.dumps(counts))


def measure(game: str, steps: int, folder: Path) -> dict[str, float]:
    """Train on a game in a process of its own; return its figures."""
    model = folder / game / "model"
    make_model(game, model)
    package = "gymnasium" if game in GYMNASIUM else "textarena"
    arguments = [
        *("train", str(Path(__file__).with_name("games.yaml")), f"model.path={model}"),
        *(f"environment={package}", f"environment.id={game}", "environment.workers=1"),
        *(
            "environment.max_turn_tokens=8",
            "environment.max_turns=12",
            "data.max_prompt_tokens=2048",
        ),
        *("rollout.max_response_tokens=2048", "rollout.n=4", "sampling.groups_per_step=2"),
        "sampling/filter=none",  # a model with random weights wins too seldom
        *("trainer.mini_batch_groups=2", f"trainer.steps={steps}", "evaluation.every=null"),
        *(
            "data/task=episodes",
            "data.task.train_episodes=16",
            "data.task.eval_episodes=4",
            "observe.console=off",
        ),
        *(f"run.dir={folder / game}", "run.name=run", "trainer.microbatch_tokens=8192"),
    ]
    report = folder / game / MISMATCHES
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "benchmarks.environments", "--train", str(report), *arguments]
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    records = [r for r in read_metrics(folder / game / "run" / "metrics.jsonl") if r["step"] > 0]
    assert len(records) == steps
    counts = json.loads(report.read_text())
    cpu = sum(getattr(after, key) - getattr(before, key) for key in ("ru_utime", "ru_stime"))
    values = (
        sum(record["environment/faults"] for record in records),
        counts["mismatches"],
        counts["compared"],
        sum(record["environment/turns"] for record in records) / steps,
        sum(record["environment/reward"] for record in records) / steps,
        sum(record["time/step_s"] for record in records),
        cpu,
    )
    return dict(zip(_COLUMNS, values, strict=True))


def main() -> None:
    """Train on each, and print the table."""
    if sys.argv[1:2] == ["--train"]:
        train(sys.argv[3:], Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--only", nargs="+", choices=ACTIONS, default=list(ACTIONS))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for game in args.only:
            figures = measure(game, args.steps, Path(folder))
            cells = [
                f"{value:,.0f}" if value == int(value) else f"{value:.2f}"
                for value in figures.values()
            ]
            rows.append(f"| {game} | {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    head = f"| {args.steps} steps | {' | '.join(_COLUMNS)} |\n{'|---' * (len(_COLUMNS) + 1)}|"
    if args.out is not None:
        command = " ".join(["python -m benchmarks.environments", *sys.argv[1:]])
        title = "# Environments that exist, in training"
        args.out.write_text("\n".join([title, "", f"Made by `{command}`.", "", head, *rows, ""]))


if __name__ == "__main__":
    main()
