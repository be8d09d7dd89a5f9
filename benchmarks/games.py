"""What a tiny model learns of games by rewards alone, after imitating a bad player.

    python -m benchmarks.games start guess --folder DIR      # transcripts, tokenizer, SFT
    python -m benchmarks.games train guess --seed 1 --folder DIR
    python -m benchmarks.games report --folder DIR --out benchmarks/results/games.md

It needs the extras `textarena` and `gymnasium`. Each command takes less than five CPU-minutes.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from winnow.environments import Turn
from winnow.environments.gymnasium import GymnasiumEpisode
from winnow.environments.textarena import TextArenaGame

END, USER, ASSISTANT = "<|end|>", "<|user|>", "<|assistant|>"
CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRANSCRIPTS = 3000
Player = Callable[[random.Random], "Moves"]
Moves = Any
"""A generator that is sent observations and yields moves."""


def adapter(package: str, id: str, **options: Any) -> Any:
    """Return an environment of TextArena or Gymnasium."""
    if package == "textarena":
        return TextArenaGame(id, options)
    return GymnasiumEpisode(id, options, ())


def guess_player(rng: random.Random) -> Moves:
    """A quarter of the players halve the range, with slips; the others guess, and may give up."""
    low, high, guess = 1, 20, 0
    is_careful = rng.random() < 0.25
    observation = yield
    while True:
        if "higher" in observation:
            low = max(low, guess + 1)
        if "lower" in observation:
            high = min(high, guess - 1)
        if is_careful and low <= high and rng.random() < 0.9:
            guess = (low + high) // 2
        else:
            guess = 0 if not is_careful and rng.random() < 0.2 else rng.randint(1, 20)
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


def start(game: Game, folder: Path) -> None:
    """Write transcripts, and a model of random weights."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder.mkdir(parents=True, exist_ok=True)
    played = list(transcripts(game, TRANSCRIPTS))
    won = sum(reward >= 1 for _, reward in played) / len(played)
    turns = sum(len(m) // 2 for m, _ in played) / len(played)
    print(f"player: {won:.3f} won, {turns:.1f} turns")
    with (folder / "transcripts.jsonl").open("w") as file:
        for messages, _ in played:
            file.write(json.dumps({"messages": messages}) + "\n")
    tokenizer = train_tokenizer([m["content"] for messages, _ in played[:1000] for m in messages])
    tokenizer.save_pretrained(folder / "random")
    lengths = [len(tokenizer.apply_chat_template(m)["input_ids"]) for m, _ in played[:200]]
    first = len(tokenizer(played[0][0][0]["content"])["input_ids"])
    print(
        f"vocabulary {len(tokenizer)}, prompt {first}, longest {max(lengths)}",
        tokenizer.tokenize("[13]"),
        tokenizer.tokenize("[right]"),
    )
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=96,
        num_hidden_layers=3,
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
    model = Qwen3ForCausalLM(config)
    print(f"{model.num_parameters():,} weights")
    model.save_pretrained(folder / "random")


def main() -> None:
    """Run a command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=["start", "train", "report"])
    parser.add_argument("game", choices=GAMES)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    folder = args.folder / args.game
    if args.command == "start":
        start(GAMES[args.game], folder)


if __name__ == "__main__":
    main()
