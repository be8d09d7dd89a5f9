"""`winnow init FOLDER`: a folder to begin with, whose recipe, code, data and test all work."""

from __future__ import annotations

import json
from pathlib import Path
from shlex import quote
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from winnow.errors import ConfigError

_TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
_TRAINED, _HELD_OUT = 128, 32


def init_command(
    folder: Annotated[Path, Argument(help="Folder to create.")],
    model: Annotated[
        str, Option(help="Model to train: folder or Hugging Face name.")
    ] = "Qwen/Qwen2.5-0.5B-Instruct",
    template: Annotated[
        Literal["reward", "environment"],
        Option(help="Scores single answers, or plays a conversation."),
    ] = "reward",
) -> None:
    """Write a folder with a recipe, a reward or an environment, a test of it, and a little data."""
    from winnow.config.files import to_yaml
    from winnow.observe.files import explain_write_errors

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; choose a new folder")
    local_model = Path(model).expanduser()
    path = str(local_model.resolve()) if local_model.is_dir() else model
    files = {file.stem: file.read_text() for file in sorted((_TEMPLATES / template).glob("*.txt"))}
    shown = to_yaml({"path": path}).strip()
    files["recipe.yaml"] = files["recipe.yaml"].replace("path: MODEL", shown)
    make_row = _make_sum if template == "reward" else _make_secret
    rows = [json.dumps(make_row(number)) + "\n" for number in range(_TRAINED + _HELD_OUT)]
    files["train.jsonl"] = "".join(rows[_HELD_OUT:])
    files["held_out.jsonl"] = "".join(rows[:_HELD_OUT])
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
    typer.echo(f"{folder} holds {', '.join(files)}. Next:\n")
    for command, meaning in commands(folder, template).items():
        typer.echo(f"  {command:<50} {meaning}")


def commands(folder: Path, template: str) -> dict[str, str]:
    """Return the next commands for a new folder, with their meaning."""
    return {
        f"cd {quote(str(folder))}": "",
        f"python test_{template}.py": f"test the {template}, also with pytest",
        "winnow train recipe.yaml run.name=first": "train; the same command resumes it",
        "winnow eval runs/first": "evaluate on the held-out prompts",
    }


def _make_sum(number: int) -> dict[str, Any]:
    """Make a row in verl's schema; no two sums are the same."""
    a, b = 11 + 37 * number % 89, 10 + number
    return {
        "data_source": "sums",
        "prompt": [{"role": "user", "content": f"What is {a} + {b}? End with the number."}],
        "reward_model": {"ground_truth": str(a + b)},
    }


def _make_secret(number: int) -> dict[str, Any]:
    """Make a row whose ground truth is a number from 1 to 63."""
    return {
        "data_source": "guess",
        "prompt": [{"role": "user", "content": f"Game {number + 1}"}],
        "reward_model": {"ground_truth": str(1 + 37 * number % 63)},
    }
