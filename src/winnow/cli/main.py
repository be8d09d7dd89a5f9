"""The command line. Imports torch and its kin only inside commands that need them.

Exit codes: 0 done, 1 our mistake, 2 yours (one line says which field, which value, what to do),
75 stopped by SIGTERM (what was reached is saved; start it again), 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperOption

from winnow import gc_tuning
from winnow.cli.dashboard import dashboard_command
from winnow.cli.data import app as data_app
from winnow.cli.init import init_command
from winnow.cli.ledger import app as ledger_app
from winnow.cli.plan import plan_command
from winnow.cli.reward import app as reward_app
from winnow.cli.rollouts import rollouts_command
from winnow.cli.sandbox import app as sandbox_app
from winnow.errors import ConfigError, WinnowError

if TYPE_CHECKING:
    from rich.console import Console

    from winnow.config.root import Config

app = typer.Typer(
    name="winnow",
    help="Train language models by reinforcement learning from verifiable rewards.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(data_app, name="data")
app.add_typer(ledger_app, name="ledger")
app.add_typer(reward_app, name="reward")
app.add_typer(sandbox_app, name="sandbox")
app.command("dashboard")(dashboard_command)
app.command("rollouts", no_args_is_help=True)(rollouts_command)
app.command("init", no_args_is_help=True)(init_command)
app.command("plan", no_args_is_help=True)(plan_command)

Recipe = Annotated[str, typer.Argument(help="Name of a shipped recipe, or a YAML file.")]
Run = Annotated[str, typer.Argument(help="A run's folder, such as runs/NAME.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Settings over the recipe's, in Hydra's grammar."),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Run the code, programs and links of a stranger's run.")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Make the warm start anew.")]
Step = Annotated[int | None, typer.Option(help="Checkpoint to take; the last by default.")]
WithDashboard = Annotated[
    bool, typer.Option("--dashboard", help="Show it in a browser while it trains.")
]
Multirun = Annotated[
    bool,
    typer.Option("--multirun", "-m", help="Train each combination of values: optim.lr=1e-6,2e-6."),
]
Jobs = Annotated[int, typer.Option(min=1, help="With --multirun: runs at a time.")]
HeartbeatPipe = Annotated[int | None, typer.Option("--heartbeat", hidden=True)]
Parent = Annotated[int | None, typer.Option("--parent", hidden=True)]
Continued = Annotated[str | None, typer.Option("--continued", hidden=True)]
HelpConfig = Annotated[
    bool,
    typer.Option(
        "--help-config",
        help="List every setting with its default and meaning; a prefix such as optim may follow.",
    ),
]


def _version(show: bool) -> None:
    if show:
        from winnow.version import __version__

        typer.echo(f"winnow {__version__}")
        raise typer.Exit


@app.callback()
def winnow(
    version: Annotated[
        bool,
        typer.Option("--version", is_eager=True, callback=_version, help="Print the version."),
    ] = False,
) -> None:
    """Train language models by reinforcement learning from verifiable rewards."""


@app.command(no_args_is_help=True)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    fresh: Fresh = False,
    help_config: HelpConfig = False,
    dashboard: WithDashboard = False,
    multirun: Multirun = False,
    jobs: Jobs = 1,
    trust: Trust = False,
    heartbeat: HeartbeatPipe = None,
    continued: Continued = None,
    parent: Parent = None,
) -> None:
    """Train a recipe, for instance: winnow train quickstart."""
    if parent is not None:
        from winnow.workers.child import die_with_parent

        die_with_parent(parent, signal.SIGTERM)  # which lets it save
    if help_config:
        _print_settings(recipe, overrides or [])
        return
    options = ["--fresh"] * fresh + ["--dashboard"] * dashboard + ["--trust"] * trust
    if jobs > 1 and not multirun:
        raise ConfigError(f"--jobs {jobs} is for --multirun; leave it out, or give --multirun")
    if multirun:
        if options:
            raise ConfigError(f"{options[0]} is for a single run; leave it out with --multirun")
        from winnow.cli.sweep import run_sweep

        raise typer.Exit(run_sweep(recipe, overrides or [], jobs, _console()))
    _train(recipe, overrides, continued, options, heartbeat)


@app.command(no_args_is_help=True)
def resume(
    run: Run, overrides: Overrides = None, dashboard: WithDashboard = False, trust: Trust = False
) -> None:
    """Go on with a run that was stopped or killed, from its newest checkpoint."""
    from winnow.observe.files import RunFolder

    options = ["--dashboard"] * dashboard + ["--trust"] * trust
    _train(str(RunFolder.open(run).config), overrides, run, options)


@app.command(no_args_is_help=True)
def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    fresh: Fresh = False,
    help_config: HelpConfig = False,
    trust: Trust = False,
) -> None:
    """Imitate demonstrations; of a recipe without any, make the warm start alone.

    For instance: winnow sft sft model.path=FOLDER 'sft.train_files=[FILE]'
    """
    if help_config:
        _print_settings(recipe, overrides or [])
        return
    config = _load(recipe, overrides)
    if config.sft.name != "none":  # supervised, where the recipe asks for that
        _train(recipe, overrides, None, ["--fresh"] * fresh + ["--trust"] * trust)
    _require_trust(config, recipe, overrides, trust)
    with gc_tuning.growing():
        from winnow.commands.train import run_sft

    typer.echo(f"Warm start: {run_sft(config, fresh, _console())}")


@app.command("eval", no_args_is_help=True)
def eval_command(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="A run's folder (runs/NAME), a checkpoint's, a Hugging Face folder or hub name.",
        ),
    ],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Held-out prompts: parquet or JSONL; may be repeated."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(help="How to ask: a name that `winnow recipes` lists, or a YAML file. A run "
                     "brings its own."),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Where answers.parquet and report.json go; RUN/eval/ "
                     "or evals/ by default."),
    ] = None,
    step: Step = None,
    trust: Trust = False,
) -> None:  # fmt: skip
    """Ask a model held-out prompts: avg@N, pass@k, maj@k by source, all answers in a file."""
    with gc_tuning.growing():
        from winnow.commands.evaluate import EvalRequest, run_evaluation
        from winnow.run.shutdown import EXIT_INTERRUPTED, Stopped

    request = EvalRequest(
        model, tuple(overrides or ()), tuple(data or ()), recipe, out, step, trust
    )
    try:
        run_evaluation(request, _console())
    except (KeyboardInterrupt, Stopped) as stopped:
        # Answers that end first are the short ones: figures of a part would flatter.
        typer.echo("winnow: interrupted; nothing of this evaluation is kept", err=True)
        code = stopped.exit_code if isinstance(stopped, Stopped) else EXIT_INTERRUPTED
        raise typer.Exit(code) from None


@app.command("compare", no_args_is_help=True)
def compare_command(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A",
            help="A folder that `winnow eval` wrote, a file in it, or a run's folder; a sweep's "
            "folder alone.",
        ),
    ],
    b: Annotated[str | None, typer.Argument(metavar="B", help="The other one.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Say whether B is better than A on the problems that both answered, or only luckier.

    The folder of a sweep alone: a table of its runs.
    """
    if b is None:
        from winnow.cli.sweep import print_sweep, read_sweep, sweep_figures

        sweep = read_sweep(Path(a))
        if as_json:
            typer.echo(json.dumps(sweep_figures(sweep), indent=2))
        else:
            print_sweep(sweep, _console())
        return
    from winnow.evaluation.compare import run_comparison

    run_comparison(a, b, as_json, _console())


@app.command(no_args_is_help=True)
def export(
    run: Run,
    target: Annotated[str, typer.Argument(help="Folder to make.")],
    step: Step = None,
    adapter: Annotated[
        bool, typer.Option("--adapter", help="Write a LoRA adapter alone, as a PEFT folder.")
    ] = False,
    trust: Trust = False,
    push: Annotated[
        str | None, typer.Option(metavar="OWNER/NAME", help="Upload it to the hub, with a card.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Make a new repository a private one.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(help="Branch to push to; main by default.")
    ] = None,
) -> None:
    """Write a run's model as a Hugging Face folder that AutoModelForCausalLM loads."""
    for option, is_set in (("--private", private), ("--revision", revision is not None)):
        if is_set and push is None:
            raise ConfigError(f"{option} is for a push; leave it out, or give --push OWNER/NAME")
    with gc_tuning.growing():
        from winnow.commands.export import run_export, run_push
        from winnow.commands.push import HubTarget

    if push is not None:
        hub = HubTarget(push, private, revision)
        typer.echo(f"Pushed to {run_push(run, target, step, adapter, trust, hub)}")
        return
    typer.echo(f"Exported to {run_export(run, target, step, adapter, trust)}")


@app.command("check-engine", no_args_is_help=True)
def check_engine(
    engine: Annotated[
        str,
        typer.Argument(
            metavar="URL|RECIPE",
            help="Address of a server that speaks /inference/v1/generate, or a recipe.",
        ),
    ],
    overrides: Overrides = None,
    model: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="The model that the engine is said to hold."),
    ] = None,
    update: Annotated[
        str | None,
        typer.Option(metavar="FOLDER", help="Other weights of it, to be loaded and taken back."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
    trust: Trust = False,
) -> None:
    """Test that an engine samples from a model's whole softmax, and takes new weights.

    For instance: winnow check-engine http://127.0.0.1:8000 --model FOLDER model.dtype=bfloat16
    """
    from dataclasses import asdict

    with gc_tuning.growing():
        from winnow.commands.engine_check import config_to_check, run_engine_check

    config = config_to_check(engine, overrides or [], model)
    _require_trust(config, engine, overrides, trust)
    findings = run_engine_check(config, update)
    if as_json:
        typer.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        for finding in findings:
            typer.echo(f"{finding.name:<9} {finding.state:<12} {finding.text}")
    raise typer.Exit(any(finding.state == "failed" for finding in findings))


@app.command()
def doctor(
    run: Annotated[str | None, typer.Argument(help="A run's folder, such as runs/NAME.")] = None,
    runs: Annotated[str, typer.Option("--runs", help="Folder that is to hold runs.")] = "runs",
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is wrong with a run; without one, what this machine has for Winnow, or lacks."""
    from winnow.cli.doctor import print_diagnosis, print_report

    if run is not None:
        raise typer.Exit(print_diagnosis(run, as_json))
    if as_json:
        raise ConfigError("--json is about a run; name its folder: winnow doctor RUN --json")
    raise typer.Exit(print_report(runs))


@app.command()
def metrics(
    part: Annotated[
        str, typer.Argument(help="Beginning of the names, such as actor, or a name of verl's.")
    ] = "",
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write the page docs/metrics.md.")
    ] = False,
) -> None:
    """List every figure that a run records: unit, meaning, and verl's name for it."""
    from winnow.observe.metric_names import as_markdown, every_metric

    if markdown:
        typer.echo(as_markdown(), nl=False)
        return
    spread = part.replace("/mean", "/SPREAD").replace("/max", "/SPREAD").replace("/min", "/SPREAD")
    rows = [row for row in every_metric() if row.name.startswith(part)] or [
        row for row in every_metric() if spread in row.verl
    ]
    if not rows:
        parts = ", ".join(dict.fromkeys(row.name.partition("/")[0] for row in every_metric()))
        raise ConfigError(f"no figure's name begins with {part!r}; the parts are {parts}")
    for row in rows:
        unit, verl = f" [{row.unit}]" if row.unit else "", f"; verl: {row.verl}" if row.verl else ""
        typer.echo(f"{row.name}{unit}\n    {row.meaning}{verl}")


@app.command(no_args_is_help=True)
def plot(
    runs: Annotated[list[str], typer.Argument(metavar="RUN", help="Folders of runs.")],
    metrics: Annotated[
        str,
        typer.Option(metavar="A,B", help="Figures to draw, of those that `winnow metrics` lists; "
                     "reward, accuracy, length and entropy by default."),
    ] = "",
    out: Annotated[Path, typer.Option(metavar="FILE", help="A .png or .svg.")] = Path("plot.png"),
    by: Annotated[
        Literal["steps", "tokens", "time"], typer.Option(help="What the horizontal axis counts.")
    ] = "steps",
    smooth: Annotated[int, typer.Option(min=0, help="Steps either side of a moving mean.")] = 0,
) -> None:  # fmt: skip
    """Draw figures of runs; seeds of one recipe as their mean and its 95 % interval."""
    from winnow.evaluation.plot import PlotRequest
    from winnow.evaluation.plot import plot as draw

    draw(PlotRequest(runs, [n for n in metrics.split(",") if n], out, by, smooth))
    typer.echo(f"Drawn: {out}")


@app.command()
def recipes() -> None:
    """List the shipped recipes."""
    from winnow.config.files import available_recipes, evaluation_recipes, recipe_title

    width = max(map(len, available_recipes()))
    for name in available_recipes():
        typer.echo(f"{name:<{width}}  {recipe_title(name)}")
    typer.echo(f"\nFor winnow eval MODEL --recipe: {', '.join(evaluation_recipes())}")


def _train(
    recipe: str,
    overrides: list[str] | None,
    folder: str | None,
    options: Sequence[str],
    heartbeat: int | None = None,
) -> NoReturn:
    """Train, and end with the exit code: in this process, or in children where a recipe restarts.

    Args:
        folder: of the run to go on with.
        options: of `winnow train` that the user gave.
        heartbeat: pipe of a parent, which has asked for trust.
    """
    from winnow.run.shutdown import ShutdownSignal, Stopped, outlive_readers
    from winnow.run.supervisor import Heartbeat, Supervisor, winnow_command

    config = _load(recipe, overrides, folder)
    trainer = config.trainer
    if heartbeat is None:
        _require_trust(config, recipe, overrides, "--trust" in options)
    if trainer.max_restarts and heartbeat is None:
        outlive_readers()
        command = winnow_command([*options, recipe, *(overrides or [])])
        supervisor = Supervisor(
            command, trainer.max_restarts, trainer.stall_timeout_s, folder=folder
        )
        raise typer.Exit(supervisor.run())
    began, companion = time.monotonic(), None
    if "--dashboard" in options:
        from winnow.dashboard.beside import serve_dashboard

        companion = serve_dashboard
    outlive_readers()
    stop = ShutdownSignal()
    try:
        with stop.listening():
            with gc_tuning.growing():
                from winnow.commands.train import TrainOptions, run_training

            beats, fresh = Heartbeat(heartbeat), "--fresh" in options
            run = TrainOptions(recipe, fresh, _console(), stop, beats, began, companion)
            code = run_training(config, run)
    except Stopped as stopped:
        print(f"winnow: stopped by {stopped.reason}", file=sys.stderr)
        code = stopped.exit_code
    raise typer.Exit(code)


def _load(recipe: str, overrides: list[str] | None, folder: str | None = None) -> Config:
    """Load a recipe, to go on with the run in a folder if there is one."""
    from winnow.config.load import load_recipe

    config = load_recipe(recipe, overrides or [])
    if folder is None:
        return config
    run = config.run.model_copy(update={"resume": folder})
    return config.model_copy(update={"run": run})


def _require_trust(config: Config, recipe: str, overrides: list[str] | None, trusts: bool) -> None:
    from winnow.checkpoints.strangers import require_trusted_start

    require_trusted_start(config, recipe, overrides or [], trusts)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _print_settings(recipe: str, overrides: list[str]) -> None:
    """Print settings as recipe and overrides resolve them, under the prefixes among `overrides`."""
    from winnow.config.load import describe_config, resolve_recipe
    from winnow.observe.figures import message

    prefixes = [word for word in overrides if "=" not in word]
    config = resolve_recipe(recipe, [word for word in overrides if "=" in word])
    lines = [line for prefix in prefixes or [""] for line in describe_config(config, prefix)]
    for line in lines:
        only = f" [only with {line.variant}]" if line.variant else ""
        shown = f"{line.key}={line.default}  ({line.type}){only}\n    {line.meaning}"
        typer.echo(message(shown))


# Threads that wait for each other spinning make a run many times slower as soon as anything
# else wants a core; asleep they cost some speed on an idle machine, where the user may say ACTIVE.
# Read once by OpenMP, so it must be set before torch is imported.
_CALM_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")
_INTERRUPTED = 130


def main() -> None:
    """Entry point: errors for the user become one line and exit code 2."""
    os.environ.setdefault(*_CALM_THREADS)
    gc_tuning.leave_at_exit()
    code = _run()
    sinks = sys.modules.get("winnow.observe.sinks")
    hangs = sinks is not None and sinks.hangs()
    if code == _INTERRUPTED or hangs:
        from winnow.workers.threads import end_process

        end_process(code, skip_cleanup=hangs)
    sys.exit(code)


def _run() -> int:
    """Run the command that was typed; returns the exit code."""
    try:
        return app(prog_name="winnow", standalone_mode=False) or 0
    except (WinnowError, _UsageError) as error:
        from winnow.observe.figures import message

        is_ours = isinstance(error, WinnowError)
        for line in str(error).splitlines() if is_ours else _usage_lines(error):
            print(f"winnow: {message(line)}", file=sys.stderr)
        return error.exit_code if is_ours else 2
    except KeyboardInterrupt:
        print("winnow: interrupted", file=sys.stderr)
        return _INTERRUPTED


_UsageError: Any = typer.BadParameter.__base__
"""The error of typer for a command line that it cannot read; typer exports no name for it."""


def _usage_lines(error: Any) -> Iterator[str]:
    """Say what is wrong with the words typed, with the value if any, and where to read on."""
    message = " ".join(error.format_message().split()).rstrip(".")
    if not message:  # the help of a command without arguments, which is shown already
        return
    option, context = getattr(error, "param", None), error.ctx
    names = option.opts if isinstance(option, TyperOption) else ()
    typed = [
        value if equals else after for name, equals, value, after in _arguments() if name in names
    ]
    got = f", got {typed[0]!r}" if typed else ""
    command = "winnow" if context is None else context.command_path
    name = getattr(error, "option_name", "")
    if name and context is not None:
        taken = [word for each in context.command.params for word in each.opts]
        answers = dict(_foreign_names(taken))
        yield from answers.values()
        if name in answers:
            return
    end = "" if message.endswith("?") else ";"
    yield f"{message[:1].lower()}{message[1:]}{got}{end} see `{command} --help`"


def _foreign_names(taken: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the words typed that other systems know, flags and KEY=VALUE, each with its answer."""
    from winnow.config.load import SHORTHANDS
    from winnow.config.other_names import foreign_name
    from winnow.config.schema import all_keys

    keys = {*SHORTHANDS, *(".".join(key.path) for key in all_keys())}
    for name, equals, value, following in _arguments():
        is_flag = name.startswith("-") and name not in taken
        if is_flag and not equals and not following.startswith("--"):
            value = following
        key = name.lstrip("-").replace("-", "_") if is_flag else name.lstrip("+~")
        is_ours = key.replace("/", ".") in keys and not is_flag
        if (is_flag or equals) and not is_ours and (answer := foreign_name(key, value)):
            fault = f"no such option: {name}" if is_flag else f"{key} is no known key"
            form = ", given as KEY=VALUE" if is_flag and "'s name for " in answer else ""
            yield name, f"{fault}; {answer}{form}"


def _arguments() -> Iterator[tuple[str, str, str, str]]:
    """Yield the words typed behind a command: name, equals sign, value, and the word behind it."""
    for word, following in itertools.pairwise([*sys.argv[2:], ""]):
        yield *word.partition("="), following


if __name__ == "__main__":
    main()
