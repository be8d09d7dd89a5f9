"""`winnow reward`: try a scorer on one answer before training by it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from winnow.errors import DataError, RewardError

if TYPE_CHECKING:
    from winnow.config.reward import RewardConfig
    from winnow.rewards.task import Failure
    from winnow.types import Prompt, Score

app = typer.Typer(
    name="reward",
    help="Try what scores an answer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_SHOWN = 300
"""Characters of a long text that are shown."""


@app.callback()
def reward() -> None:
    """Try what scores an answer."""


@app.command("try", no_args_is_help=True)
def try_command(
    file: Annotated[
        str | None,
        typer.Argument(metavar="[FILE]", help="Data file whose row is answered; or give --truth."),
    ] = None,
    row: Annotated[int | None, typer.Option(help="Row of FILE, from 1; 1 by default.")] = None,
    answer: Annotated[
        str | None, typer.Option(help="The answer; without it standard input is read.")
    ] = None,
    truth: Annotated[
        str | None, typer.Option(help="Ground truth, over that of the row; JSON for objects.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="Data source, over that of the row: it chooses the scorer.")
    ] = None,
    scorer: Annotated[str | None, typer.Option(help="Scorer by name, over the routing.")] = None,
    function: Annotated[
        str | None,
        typer.Option(metavar="FILE.py[:NAME]", help="Your reward function instead of a scorer."),
    ] = None,
    prompt_key: Annotated[str, typer.Option(help="Column with the prompt.")] = "prompt",
    as_json: Annotated[bool, typer.Option("--json", help="Print the score as JSON.")] = False,
) -> None:
    """Score one answer as a run would, in a worker with its limits, and show all parts."""
    if scorer is not None and function is not None:
        raise RewardError(f"--scorer is {scorer} and --function is {function}; give one of the two")
    if row is not None and file is None:
        raise DataError(f"--row is {row}, but there is no FILE; name the data file first")
    prompt = _prompt(
        file, 1 if row is None else row, truth, source or scorer, prompt_key, function is not None
    )
    text = sys.stdin.read() if answer is None else answer
    name, result = _scored(_config(scorer, function), prompt, text)
    from winnow.rewards.task import Failure

    if isinstance(result, Failure):
        typer.echo(result.trace.rstrip() or result.line, err=True)
        raise RewardError(f"{name} failed at this answer: {result.line}; mend it, or the row")
    if as_json:
        typer.echo(json.dumps(_as_json(name, result), ensure_ascii=False, default=str))
    else:
        _show(name, prompt, text, result)


def _prompt(
    file: str | None, number: int, truth: str | None, source: str | None, key: str, any_source: bool
) -> Prompt:
    import numpy as np

    from winnow.data.check_text import prompt_text
    from winnow.data.sources import read_rows
    from winnow.types import Prompt

    nothing = np.zeros(0, np.int64)
    if file is None:
        if truth is None or (source is None and not any_source):
            raise DataError(
                "there is nothing to compare with; give FILE and --row, or --truth with --source "
                "or --scorer"
            )
        return Prompt("try", nothing, "", source or "try", _read(truth))
    rows = read_rows([file], key)
    if not 1 <= number <= len(rows):
        raise DataError(f"--row is {number}, but {file} has rows 1 to {len(rows):,}; choose one")
    chosen = rows[number - 1]
    return Prompt(
        chosen.uid,
        nothing,
        prompt_text(chosen.messages),
        source or chosen.data_source,
        chosen.ground_truth if truth is None else _read(truth),
        chosen.extra,
    )


def _read(truth: str) -> Any:
    """An object or a list where the text is one in JSON, else the text."""
    if truth.lstrip()[:1] in ("{", "["):
        with contextlib.suppress(ValueError):
            return json.loads(truth)
    return truth


def _config(scorer: str | None, function: str | None) -> RewardConfig:
    from winnow.config.reward import RewardConfig, UserFunction

    if function is not None:
        path, colon, name = function.rpartition(":")
        if not colon or name.endswith(".py"):
            return RewardConfig(function=UserFunction(path=function))
        return RewardConfig(function=UserFunction(path=path, name=name))
    return RewardConfig(scorers={} if scorer is None else {"*": scorer})


def _scored(config: RewardConfig, prompt: Prompt, text: str) -> tuple[str, Score | Failure]:
    """The scorer's name, and what it says."""
    from winnow.rewards.backend import Backend

    with contextlib.closing(Backend(config)) as backend:
        backend.prepare({prompt.data_source})
        name = (
            config.function.name
            if backend.has_user_function
            else backend.router.scorer(prompt.data_source).name
        )
        return name, asyncio.run(backend.score(prompt, text))


def _as_json(name: str, score: Score) -> dict[str, Any]:
    return {
        "scorer": name,
        "reward": score.reward,
        "accuracy": score.accuracy,
        "parts": dict(score.parts),
        "extra": dict(score.extra),
    }


def _show(name: str, prompt: Prompt, text: str, score: Score) -> None:
    lines = [
        ("scorer", f"{name} (data source {prompt.data_source})"),
        *([("prompt", _short(prompt.text))] if prompt.text else []),
        ("ground truth", _short(str(prompt.ground_truth))),
        ("answer", _short(text)),
        ("reward", f"{score.reward:g}"),
        ("accuracy", f"{score.accuracy:g}"),
        *((f"part {part}", f"{value:g}") for part, value in score.parts.items()),
        *((str(key), _short(str(value))) for key, value in score.extra.items()),
    ]
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        typer.echo(f"{label:<{width}}  {value}")


def _short(text: str) -> str:
    """A text on one line; of a long one its two ends, because answers stand at the end."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if len(shown) <= _SHOWN:
        return shown
    half = _SHOWN // 2
    return f"{shown[:half]} … {shown[-half:]}"
