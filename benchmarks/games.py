"""What a tiny model learns of games by rewards alone, after imitating a bad player.

    python -m benchmarks.games start guess --folder DIR      # transcripts, tokenizer, SFT
    python -m benchmarks.games train guess --seeds 1 2 3 --folder DIR
    python -m benchmarks.games report --folder DIR --out benchmarks/results/games.md

It needs the extras `textarena` and `gymnasium`. Each command takes less than five CPU-minutes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.environments import Turn
from winnow.environments.gymnasium import GymnasiumEpisode
from winnow.environments.textarena import TextArenaGame
from winnow.observe.jsonl import read_metrics

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRANSCRIPTS, SFT_STEPS, EPISODES = 3000, 200, 200
STEPS = "16 steps of 16 x 8 episodes"
SUCCESS = "eval/episodes/pass@1"
Player = Callable[[random.Random], "Moves"]
Moves = Any
"""A generator that is sent observations and yields moves."""


def adapter(package: str, id: str, **options: Any) -> Any:
    """Return an environment of TextArena or Gymnasium."""
    if package == "textarena":
        return TextArenaGame(id, options)
    return GymnasiumEpisode(id, options, ())


def guess_player(rng: random.Random) -> Moves:
    """A fifth of the players halve the range, with slips; the others guess, and may give up."""
    low, high, guess = 1, 20, 0
    is_careful = rng.random() < 0.2
    observation = yield
    while True:
        if guess and "higher" in observation:
            low = max(low, guess + 1)
        if guess and "lower" in observation:
            high = min(high, guess - 1)
        if is_careful and low <= high and rng.random() < 0.9:
            guess = (low + high) // 2
        else:
            guess = 0 if not is_careful and rng.random() < 0.3 else rng.randint(1, 20)
        observation = yield f"[{guess}]"


LAKE = "DDDLDUDLRRDLLRRL"
"""A way across the ice, by cell."""


def lake_player(rng: random.Random) -> Moves:
    """A quarter of the players know the way, with slips; the others walk at random."""
    names = {"D": "[down]", "L": "[left]", "R": "[right]", "U": "[up]"}
    is_careful = rng.random() < 0.25
    observation = yield
    while True:
        rows = observation.replace("<red ", "*").replace(">", "").split("\n")[-4:]
        cell = "".join(rows).index("*")
        know = is_careful and rng.random() < 0.9
        observation = yield names[LAKE[cell] if know else rng.choice("DLRU")]


@dataclass(frozen=True)
class Game:
    """A game, and what plays it."""

    environment: tuple[str, ...]
    make: Callable[[], Any]
    player: Player
    max_turns: int


GAMES = {
    "guess": Game(
        ("environment=textarena", "environment.id=GuessTheNumber-v0"),
        lambda: TextArenaGame("GuessTheNumber-v0", {}),
        guess_player,
        16,
    ),
    "lake": Game(
        (
            "environment=gymnasium",
            "environment.id=FrozenLake-v1",
            "environment.options={is_slippery: false}",
        ),
        lambda: GymnasiumEpisode("FrozenLake-v1", {"is_slippery": False}, ()),
        lake_player,
        16,
    ),
}


def transcripts(game: Game, count: int) -> Iterator[tuple[list[dict[str, str]], float]]:
    """Yield conversations of the scripted player, and their rewards."""
    for seed in range(count):
        rng = random.Random(seed)
        environment, player = game.make(), game.player(rng)
        next(player)
        observation, reward = environment.reset({"seed": 10**6 + seed}), 0.0
        messages = [{"role": "user", "content": observation}]
        for _ in range(game.max_turns):
            move = player.send(observation)
            messages.append({"role": "assistant", "content": move})
            step = environment.step(Turn(move))
            reward += step.reward
            if step.done:
                break
            observation = str(step.observation)
            messages.append({"role": "user", "content": observation})
        yield messages if messages[-1]["role"] == "assistant" else messages[:-1], reward


def train_tokenizer(texts: Sequence[str], min_frequency: int = 20) -> Any:
    """A byte-level BPE whose tokens may be as long as a line."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=1024,
        min_frequency=min_frequency,
        special_tokens=[END, USER, ASSISTANT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    made = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=END)
    made.chat_template = CHAT_TEMPLATE
    return made


def start(name: str, folder: Path) -> None:
    """Write transcripts and a model of random weights, and have it imitate them."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    played = list(transcripts(GAMES[name], TRANSCRIPTS))
    player = sum(reward >= 1 for _, reward in played) / len(played)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "player.json").write_text(json.dumps({"success": player}))
    rows = [json.dumps({"messages": messages}) + "\n" for messages, _ in played]
    (folder / "transcripts.jsonl").write_text("".join(rows))
    tokenizer = train_tokenizer([m["content"] for messages, _ in played[:1000] for m in messages])
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=24,
        intermediate_size=192,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        eos_token_id=0,
        bos_token_id=None,
        pad_token_id=0,
        initializer_range=0.05,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder / "random")
    tokenizer.save_pretrained(folder / "random")
    winnow(
        *("sft", "sft", f"model.path={folder / 'random'}", f"trainer.steps={SFT_STEPS}"),
        *(f"sft.train_files=[{folder / 'transcripts.jsonl'}]", "sft.batch_size=32"),
        *("optim.lr=2e-3", "optim.warmup_steps=10", "evaluation.every=null", "run.threads=1"),
        *(f"run.dir={folder}", "run.name=sft", "trainer.save_every=null", "observe.console=off"),
    )


def train(name: str, seed: int, folder: Path) -> None:
    """Train by rewards alone."""
    winnow(
        *("train", str(Path(__file__).with_name("games.yaml")), f"seed={seed}"),
        f"model.path={folder / 'sft' / 'checkpoints' / f'step-{SFT_STEPS}' / 'model'}",
        *(f"run.dir={folder}", f"run.name=seed-{seed}", *GAMES[name].environment),
        f"environment.max_turns={GAMES[name].max_turns}",
        *("data/task=episodes", f"data.task.eval_episodes={EPISODES}"),
    )


def winnow(*arguments: str) -> None:
    """Run a command of winnow."""
    subprocess.run([str(Path(sys.executable).with_name("winnow")), *arguments], check=True)


def report(folder: Path, out: Path) -> None:
    """Write the table and the curves of all games and seeds that were trained."""
    import matplotlib.pyplot as plt

    rows, head = [], "| game | player | seed | before | after | seconds |"
    figure, axes = plt.subplots(figsize=(7, 3.5))
    for name in GAMES:
        player = json.loads((folder / name / "player.json").read_text())["success"]
        for run in sorted((folder / name).glob("seed-*")):
            records = read_metrics(run / "metrics.jsonl")
            held_out = [(r["step"], r[SUCCESS]) for r in records if SUCCESS in r]
            if len(held_out) < 2:  # it was cut off
                continue
            before, after = held_out[0][1], held_out[-1][1]
            seconds = sum(record["time/step_s"] for record in records)
            cells = name, f"{player:.3f}", run.name[5:], _interval(before), _interval(after)
            rows.append(f"| {' | '.join(cells)} | {seconds:.0f} |")
            color = f"C{list(GAMES).index(name)}"
            shares = [record["score/accuracy/mean"] for record in records if record["step"]]
            axes.plot(range(1, len(shares) + 1), shares, color=color, label=f"{name}, {run.name}")
    axes.set(xlabel="step", ylabel="share of training episodes won", ylim=(0, 1))
    axes.legend(fontsize="x-small")
    figure.tight_layout()
    figure.savefig(out.with_suffix(".svg"), metadata={"Date": None})
    text = f"""# Games learnt by rewards

Made by `benchmarks/games.py` (see its head): success on {EPISODES} held-out episodes, sampled at
temperature 1, with Wilson's 95 % interval, before and after {STEPS}; all seeds of a game
start from one model that imitated {TRANSCRIPTS:,} transcripts of the player.

{head}
{"|---" * 6}|
"""
    picture = f"![Success by step]({out.with_suffix('.svg').name})"
    out.write_text(text + "\n".join([*rows, "", picture, ""]))


def _interval(share: float) -> str:
    """A share of `EPISODES` with its interval."""
    z2, n = 1.96**2, EPISODES
    middle = (share + z2 / (2 * n)) / (1 + z2 / n)
    half = 1.96 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    return f"{share:.3f} ({middle - half:.3f} to {middle + half:.3f})"


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["start", "train", "report"])
    parser.add_argument("game", choices=GAMES, nargs="?")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.command == "report":
        report(args.folder, args.out)
        return
    folder = (args.folder / args.game).resolve()
    if args.command == "start":
        start(args.game, folder)
    else:
        for seed in args.seeds:
            train(args.game, seed, folder)


if __name__ == "__main__":
    main()
