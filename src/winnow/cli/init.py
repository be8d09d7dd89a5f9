"""`winnow init FOLDER`: a folder to begin with, whose recipe, code, data and test all work."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from shlex import quote
from typing import Annotated, Literal

import typer
from typer import Argument, Option

from winnow.errors import ConfigError, WinnowError

_TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
_REAL_MODEL = "Qwen/Qwen2.5-0.5B-Instruct"
_TOY_ONLY = ("toy.yaml", "warm_up.yaml", "demos.jsonl")
_CHAT_TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}"
    "{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def init_command(
    folder: Annotated[Path, Argument(help="Folder to create.")],
    model: Annotated[
        str | None,
        Option(
            help="Model to train: folder or Hugging Face name; default: a toy of 0.1 M weights."
        ),
    ] = None,
    template: Annotated[
        Literal["format", "maths", "code", "judge", "environment", "reward"],
        Option(
            help="Reward: your function for format and answer, the rule for mathematics, tests of "
            "programs, a judge over HTTP, or an environment that replies; reward is format."
        ),
    ] = "format",
) -> None:
    """Write a folder with a recipe, a reward or an environment, a test of it, and a little data."""
    from winnow.config.files import to_yaml
    from winnow.observe.files import explain_write_errors

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder} is not empty; choose a new folder")
    local_model = Path(model or _REAL_MODEL).expanduser()
    path = str(local_model.resolve()) if local_model.is_dir() else model or _REAL_MODEL
    place = _TEMPLATES / ("format" if template == "reward" else template)
    sources = [*(_TEMPLATES / "shared").glob("*.txt"), *place.glob("*.txt")]
    files = {file.stem: file.read_text(encoding="utf-8") for file in sources}
    shown = to_yaml({"path": path}).strip()
    files["recipe.yaml"] = files["recipe.yaml"].replace("path: MODEL", shown)
    if template == "code":  # a toy copies two numbers into a program only after more steps
        for name in ("toy.yaml", "warm_up.yaml"):
            files[name] = files[name].replace("600", "1200")
    with explain_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        if subprocess.run([sys.executable, "-B", "make_data.py"], cwd=folder).returncode:
            raise WinnowError(
                f"{folder / 'make_data.py'} failed, for the reason above; remove {folder}, and "
                "try again"
            )
        if model is None:
            _write_toy_model(folder / "toy")
        else:
            for name in _TOY_ONLY:
                (folder / name).unlink()
    written = ", ".join(sorted(each.name for each in folder.iterdir()))
    typer.echo(f"{folder} holds {written}. Next:\n")
    for command, meaning in commands(folder, is_toy=model is None).items():
        typer.echo(f"  {command:<46} {meaning}".rstrip())
    if model is None:
        typer.echo("\nThen, with a real model: winnow train recipe.yaml model.path=FOLDER")


def commands(folder: Path, is_toy: bool) -> dict[str, str]:
    """Return the next commands for a new folder, with their meaning."""
    test = next(folder.glob("test_*.py")).name
    server = {"python judge.py &": "start the judge's stand-in, in the background"}
    warm_up = {"winnow sft warm_up.yaml run.name=warm-up": "teach the toy model to answer, badly"}
    recipe = "toy.yaml" if is_toy else "recipe.yaml"
    return {
        f"cd {quote(str(folder))}": "",
        f"python {test}": "test the reward, also with pytest",
        **(server if (folder / "judge.py").exists() else {}),
        **(warm_up if is_toy else {}),
        f"winnow train {recipe} run.name=first": "train; the same command resumes it",
        "winnow eval runs/first": "evaluate on the held-out prompts",
    }


def _write_toy_model(folder: Path) -> None:
    """Write a model of random weights whose tokens are the characters of ASCII."""
    from winnow.builders.warm_start import make_tiny_model
    from winnow.config.model import SftWarmStart, TinyModelConfig
    from winnow.data.tokenizer import make_tokenizer
    from winnow.models.causal_lm import save_model

    roles = [f"<|{role}|>" for role in ("system", "user", "assistant", "tool")]
    characters = ["\n", *map(chr, range(ord(" "), ord("~") + 1))]
    vocabulary = ["<pad>", "<eos>", "<unk>", *roles, *characters]
    sizes = SftWarmStart(model=TinyModelConfig(mlp_size=256))
    toy = make_tiny_model(sizes, len(vocabulary), positions=512, seed=0)
    save_model(toy, make_tokenizer(vocabulary, roles, _CHAT_TEMPLATE), folder)
