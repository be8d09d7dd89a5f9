"""`winnow reward`: try a scorer on one answer, or serve a function of yours to runs elsewhere."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import logging.handlers
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option

from winnow.cli.options import AsJson, Host, Port, PromptKey, TokenEnv, Trust
from winnow.errors import ConfigError, DataError, RewardError

if TYPE_CHECKING:
    from winnow.config.data import DataConfig
    from winnow.config.reward import RewardConfig, UserFunction
    from winnow.config.root import Config
    from winnow.rewards.scorers import Scorer
    from winnow.types import Prompt, Segment

app = typer.Typer(help="Try or serve a reward function.", no_args_is_help=True)
_SHOWN = 300
"""Characters of a long text that are shown."""


@app.command("try", no_args_is_help=True)
def try_command(
    words: Annotated[
        list[str] | None,
        Argument(
            metavar="FILE|KEY=VALUE",
            help="Data file (or pass --truth), and settings such as reward.timeout_s=2.",
        ),
    ] = None,
    row: Annotated[int | None, Option(help="Row of FILE, from 1; 1 by default.")] = None,
    answer: Annotated[
        str | None,
        Option(help="Answer to score, or a JSON list of messages; default: standard input."),
    ] = None,
    truth: Annotated[
        str | None, Option(help="Ground truth, instead of the row's; JSON for objects.")
    ] = None,
    source: Annotated[
        str | None, Option(help="Data source, instead of the row's; selects the scorer.")
    ] = None,
    scorer: Annotated[str | None, Option(help="Scorer name; overrides the routing.")] = None,
    function: Annotated[
        str | None, Option(metavar="FILE.py[:NAME]", help="Custom reward function.")
    ] = None,
    recipe: Annotated[str | None, Option(help="Recipe or config.yaml with the settings.")] = None,
    tokens: Annotated[
        int | None, Option(min=0, help="Answer length in tokens, for length penalties.")
    ] = None,
    prompt_key: PromptKey = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Score one answer exactly as a run would, with its limits, and show the result.

    For instance: winnow reward try train.parquet --row 3 --answer "#### 42"
    """
    from winnow.checkpoints.strangers import require_trusted_start
    from winnow.config.reward import UNROUTED

    settings = [word for word in words or () if "=" in word and not os.path.exists(word)]
    files = [word for word in words or () if word not in settings]
    if len(files) > 1:
        raise DataError(f"got {len(files)} files, {' and '.join(files)}; pass one")
    file = files[0] if files else None
    if scorer is not None and function is not None:
        raise RewardError(
            f"--scorer {scorer} and --function {function} exclude each other; drop one"
        )
    if row is not None and file is None:
        raise DataError(f"--row {row} needs a data file; add FILE")
    config = _resolve_config(recipe, settings, scorer, function, tokens)
    require_trusted_start(config, recipe or "", settings, trust)
    by_one = config.reward.function.path is not None
    any_source = by_one or config.reward.manager.name in UNROUTED
    number = 1 if row is None else row
    data = config.data.model_copy(update={"prompt_key": prompt_key} if prompt_key else {})
    prompt = _make_prompt(file, number, truth, source or scorer, data, any_source)
    if answer is None and sys.stdin.isatty():
        typer.echo("Type the answer, then press Ctrl-D on an empty line:", err=True)
    texts = _split_turns(sys.stdin.read() if answer is None else answer)
    turns = _replay_turns(config, prompt, texts)
    text = texts[len(turns) - 1]
    trial = _score_answer(config, prompt, turns, text, tokens or 0, quiet=as_json)
    if as_json:
        typer.echo(json.dumps(trial, ensure_ascii=False, default=str))
    else:
        _print_score(trial, prompt, text)
    if "error" in trial:
        raise RewardError(
            f"scoring this answer failed: {trial['error']}; fix the scorer or the row"
        )


def _split_turns(text: str) -> list[str]:
    """Return the assistant's turns in a JSON list of messages; any other text is one turn."""
    try:
        messages = json.loads(text)
        turns = [str(each["content"]) for each in messages if each["role"] == "assistant"]
    except (ValueError, TypeError, KeyError):
        return [text]
    return turns or [text]


def _replay_turns(config: Config, prompt: Prompt, texts: Sequence[str]) -> list[Segment]:
    """Return the turns without their tokens, as the recipe's environment rewards them, up to the
    one with which it is done.

    Raises:
        EnvironmentFault: it fails.
    """
    import asyncio

    from winnow.rollout.engine import EMPTY

    if config.environment.name == "none":
        return [EMPTY for _ in texts]
    from winnow.builders.environments import environment_processes, turn_parser

    turns = tuple(map(turn_parser(config.environment), texts))
    alone = config.environment.model_copy(update={"workers": 1})
    recipe = config.model_copy(update={"environment": alone})
    with environment_processes(recipe, None) as processes:
        assert processes is not None
        if first := asyncio.run(processes.first_messages(0, prompt)):
            prompt = replace(prompt, messages=tuple(first), row_messages=prompt.messages)
        segments: list[Segment] = []
        for number, turn in enumerate(turns, start=1):
            *_, step = asyncio.run(processes.step(0, prompt, turns[:number]))
            figures = {"calls": len(turn.calls), "malformed": len(turn.malformed), **step.metrics}
            segments.append(replace(EMPTY, reward=step.reward, figures=figures))
            if step.done:
                break
    return segments


def _resolve_config(
    recipe: str | None,
    settings: Sequence[str],
    scorer: str | None,
    function: str | None,
    tokens: int | None,
) -> Config:
    """The settings of a recipe, or the defaults, with those given here."""
    from winnow.checkpoints.recipe_changes import with_settings
    from winnow.config.load import parse_recipe
    from winnow.config.root import Config

    # Hydra takes its time to load, and most trials need no settings.
    config = parse_recipe(recipe, settings) if recipe or settings else Config()
    changes: dict[str, Any] = {"on_failure": "wrong"}
    manager = config.reward.manager.name
    source = scorer or function
    if source is not None and manager in ("remote", "custom"):
        option = "--scorer" if scorer else "--function"
        raise RewardError(
            f"{option} {source} conflicts with reward/manager={manager}; drop {option}, or set "
            "reward/manager=auto"
        )
    if scorer is not None:
        changes["scorers"] = {"*": scorer}
    if function is not None:
        changes["function"] = _user_function(function, config.reward.function)
    config = with_settings(config, reward=changes)
    reward = config.reward
    for name, shaping in (("overlong", reward.overlong), ("cosine", reward.cosine)):
        if tokens is None and shaping.enabled:
            raise ConfigError(
                f"reward.{name}.enabled=true needs the answer's length; pass --tokens, or set "
                f"reward.{name}.enabled=false"
            )
    return config


def _user_function(named: str, section: UserFunction) -> UserFunction:
    path, colon, name = named.rpartition(":")
    if not colon or name.endswith(".py"):
        return section.model_copy(update={"path": named})
    return section.model_copy(update={"path": path, "name": name})


def _make_prompt(
    file: str | None,
    number: int,
    truth: str | None,
    source: str | None,
    data: DataConfig,
    any_source: bool,
) -> Prompt:
    import numpy as np

    from winnow.data.sources import read_rows
    from winnow.rewards.scorers.markers import decode_json
    from winnow.types import Prompt

    nothing = np.zeros(0, np.int64)
    if file is None:
        if truth is None or (source is None and not any_source):
            raise DataError(
                "no ground truth; pass FILE and --row, or --truth with --source or --scorer"
            )
        return Prompt("try", nothing, "", source or "try", decode_json(truth))
    rows = read_rows([file], data)
    if not 1 <= number <= len(rows):
        raise DataError(f"--row must be 1 to {len(rows):,} for {file}, got {number}")
    row = rows[number - 1]
    gold = row.ground_truth if truth is None else decode_json(truth)
    return Prompt(
        uid=row.uid,
        token_ids=nothing,
        text=row.text,
        data_source=source or row.data_source,
        ground_truth=gold,
        extra=row.extra,
        messages=tuple(row.messages),
    )


def _score_answer(
    config: Config, prompt: Prompt, turns: Sequence[Segment], text: str, tokens: int, quiet: bool
) -> dict[str, Any]:
    """Score an answer as in training, with one worker at most; return all results.

    Args:
        turns: without tokens; the last one is `text`, of so many tokens.
        quiet: keep what is printed in this process from the terminal, where a debugger wants it.

    Raises:
        RewardError: nothing can score this source, or the function's file is wrong.
    """
    import asyncio

    import numpy as np

    from winnow.builders.rewards import make_rewards
    from winnow.checkpoints.recipe_changes import with_settings
    from winnow.types import Trajectory

    section = config.reward
    if section.workers or (section.workers is None and section.function.path is not None):
        config = with_settings(config, reward={"workers": 1})  # more would only load the file again
    heard = logging.handlers.BufferingHandler(sys.maxsize)
    workers = logging.getLogger("winnow.rewards.pool")
    output = io.StringIO()
    with contextlib.ExitStack() as stack:
        stack.callback(workers.setLevel, workers.level)
        stack.callback(workers.removeHandler, heard)
        workers.setLevel(logging.INFO)
        workers.addHandler(heard)
        if quiet:
            stack.enter_context(contextlib.redirect_stdout(output))
        service = make_rewards(config, "cpu")
        stack.callback(service.close)
        service.check_sources([prompt.data_source])
        rule, scorer, sandbox = _resolve_scorer(config.reward, prompt.data_source)
        service.check_prompt(prompt)
        zeros = np.zeros(tokens, np.int64)
        last = replace(turns[-1], token_ids=zeros, logprobs=zeros.astype(np.float32))
        answer = Trajectory((*turns[:-1], last), "stop")
        began = time.perf_counter()
        score = asyncio.run(service.score(prompt, answer, text, training=True))
        seconds = time.perf_counter() - began
        traceback = service.failure_report.first_traceback.rstrip()
    rewards = [{"reward": turn.reward, **turn.figures} for turn in turns if turn.figures]
    reason = "" if rule is None else rule.explain_wrong(score, prompt.ground_truth)
    # Workers have ended, so all of their output has come.
    printed = output.getvalue() + "".join(
        getattr(warning, "printed", "") for warning in heard.buffer
    )
    return {
        "scorer": scorer,
        **({"turns": rewards} if rewards else {}),
        **({"sandbox": sandbox} if sandbox else {}),
        "reward": score.reward,
        "accuracy": score.accuracy,
        "parts": dict(score.parts),
        "extra": dict(score.extra),
        **({"reason": reason} if reason else {}),
        "seconds": round(seconds, 6),
        "printed": printed,
        **({"error": score.error, "traceback": traceback} if score.error else {}),
    }


def _resolve_scorer(config: RewardConfig, data_source: str) -> tuple[Scorer | None, str, str]:
    """The built-in scorer if it is one, its name, and the sandbox where it has one."""
    from winnow.config.reward import CustomManager, RemoteManager
    from winnow.rewards.routing import Router
    from winnow.sandbox import current

    if config.manager.name == "environment":
        return None, "the environment", ""
    if isinstance(config.manager, RemoteManager | CustomManager):
        section = config.manager
        return None, section.url if isinstance(section, RemoteManager) else section.path, ""
    if config.function.path is not None:
        return None, config.function.name, ""
    scorer = Router(config.scorers).scorer(data_source)
    return scorer, scorer.name, current().description if scorer.sandboxed else ""


def _print_score(trial: dict[str, Any], prompt: Prompt, text: str) -> None:
    failed = " (scoring failed: a run drops the group, see reward.on_failure)"
    lines = [
        ("scorer", f"{trial['scorer']} (data source {prompt.data_source})"),
        ("sandbox", trial.get("sandbox", "")),
        ("prompt", _shorten(prompt.text)),
        ("ground truth", _shorten(str(prompt.ground_truth))),
        ("answer", _shorten(text)),
        *(
            (f"turn {number}", ", ".join(f"{name} {value:g}" for name, value in turn.items()))
            for number, turn in enumerate(trial.get("turns", ()), start=1)
        ),
        ("reward", f"{trial['reward']:g}{failed if 'error' in trial else ''}"),
        ("accuracy", f"{trial['accuracy']:g}"),
        ("reason", _shorten(trial.get("reason", ""))),
        *((f"part {part}", f"{value:g}") for part, value in trial["parts"].items()),
        *((str(key), _shorten(str(value))) for key, value in trial["extra"].items()),
        ("time", f"{trial['seconds']:.3g} s"),
    ]
    lines = [line for line in lines if line[1] or line[0] in ("ground truth", "answer")]
    width = max(len(label) for label, _ in lines)
    for label, value in lines:
        typer.echo(f"{label:<{width}}  {value}".rstrip())
    if trial["printed"].strip():
        typer.echo(f"\nIt printed:\n{trial['printed'].rstrip()}")
    if trial.get("traceback") and trial["traceback"] != trial.get("error"):
        typer.echo(f"\n{trial['traceback']}", err=True)


def _shorten(text: str) -> str:
    """A text on one line; of a long one its two ends, because answers stand at the end."""
    shown = "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)
    if len(shown) <= _SHOWN:
        return shown
    half = _SHOWN // 2
    return f"{shown[:half]} … {shown[-half:]}"


@app.command("serve", no_args_is_help=True)
def serve_command(
    function: Annotated[str, Option(metavar="FILE.py[:NAME]", help="Custom reward function.")],
    host: Host = "127.0.0.1",
    port: Port = 8090,
    workers: Annotated[
        int | None, Option(min=1, help="Scoring processes; default: half of the cores.")
    ] = None,
    timeout_s: Annotated[float, Option(min=0.001, help="Timeout per answer, seconds.")] = 10.0,
    token_env: TokenEnv = None,
) -> None:
    """Serve a reward function over HTTP for runs with reward/manager=remote."""
    from winnow.config.reward import RewardConfig, UserFunction
    from winnow.http.client import read_token
    from winnow.http.service import listen, listener_url, serve
    from winnow.rewards.managers import make_manager
    from winnow.rewards.serve import QUEUE_S, make_service

    token = read_token(token_env, "--token-env")
    with contextlib.closing(listen(host, port, token)) as listener:
        section = _user_function(function, UserFunction())
        manager = make_manager(RewardConfig(function=section, workers=workers, timeout_s=timeout_s))
        with contextlib.closing(manager):
            service = make_service(manager, token, timeout_s + QUEUE_S)
            line = f"{section.name} of {section.path} scores at {listener_url(listener)}/"
            code = serve(service, listener, line)
    raise typer.Exit(code)
