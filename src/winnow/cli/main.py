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
from typer import Argument, Option
from typer.core import TyperOption

from winnow import gc_tuning
from winnow.cli.data import app as data_app
from winnow.cli.init import init_command
from winnow.cli.ledger import app as ledger_app
from winnow.cli.options import AsJson, Overrides, Recipe, Run, Step, Trust
from winnow.cli.plan import plan_command
from winnow.cli.reward import app as reward_app
from winnow.cli.rollouts import rollouts_command
from winnow.cli.servers import dashboard_command, sandbox_app
from winnow.errors import ConfigError, WinnowError

if TYPE_CHECKING:
    from rich.console import Console

    from winnow.config.root import Config

app = typer.Typer(
    name="winnow",
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

Fresh = Annotated[bool, Option("--fresh", help="Retrain the warm start even if it is cached.")]
WithDashboard = Annotated[bool, Option("--dashboard", help="Show the run in a browser, live.")]
HelpConfig = Annotated[
    bool, Option("--help-config", help="List settings, optionally below a prefix such as optim.")
]


def _print_version(show: bool) -> None:
    if show:
        from winnow.version import __version__

        typer.echo(f"winnow {__version__}")
        raise typer.Exit


@app.callback()
def winnow(
    version: Annotated[
        bool, Option("--version", is_eager=True, callback=_print_version, help="Print the version.")
    ] = False,
) -> None:
    """Train language models with reinforcement learning from verifiable rewards."""


@app.command(no_args_is_help=True)
def train(
    recipe: Recipe,
    overrides: Overrides = None,
    fresh: Fresh = False,
    help_config: HelpConfig = False,
    dashboard: WithDashboard = False,
    multirun: Annotated[
        bool,
        Option("--multirun", "-m", help="Sweep: train each combination of optim.lr=1e-6,2e-6."),
    ] = False,
    jobs: Annotated[int, Option(min=1, help="Concurrent runs of --multirun.")] = 1,
    trust: Trust = False,
    heartbeat: Annotated[int | None, Option(hidden=True)] = None,
    continued: Annotated[str | None, Option(hidden=True)] = None,
    parent: Annotated[int | None, Option(hidden=True)] = None,
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
        raise ConfigError(f"--jobs {jobs} needs --multirun; add --multirun, or drop --jobs")
    if multirun:
        if options:
            raise ConfigError(f"{options[0]} does not work with --multirun; drop one of them")
        from winnow.cli.sweep import run_sweep

        raise typer.Exit(run_sweep(recipe, overrides or [], jobs, _console()))
    _run_training(recipe, overrides, continued, options, heartbeat)


@app.command(no_args_is_help=True)
def resume(
    run: Run, overrides: Overrides = None, dashboard: WithDashboard = False, trust: Trust = False
) -> None:
    """Continue a run that was stopped or killed from its newest checkpoint."""
    from winnow.observe.files import RunFolder

    options = ["--dashboard"] * dashboard + ["--trust"] * trust
    _run_training(str(RunFolder.open(run).config), overrides, run, options)


@app.command(no_args_is_help=True)
def sft(
    recipe: Recipe,
    overrides: Overrides = None,
    fresh: Fresh = False,
    help_config: HelpConfig = False,
    trust: Trust = False,
) -> None:
    """Fine-tune on demonstrations; without any, make the recipe's warm start only.

    For instance: winnow sft sft model.path=FOLDER 'sft.train_files=[FILE]'
    """
    if help_config:
        _print_settings(recipe, overrides or [])
        return
    config = _load(recipe, overrides)
    if config.sft.name != "none":  # supervised, where the recipe asks for that
        _run_training(recipe, overrides, None, ["--fresh"] * fresh + ["--trust"] * trust)
    _require_trust(config, recipe, overrides, trust)
    with gc_tuning.disabled():
        from winnow.commands.train import run_sft

    typer.echo(f"Warm start: {run_sft(config, fresh, _console())}")


@app.command("eval", no_args_is_help=True)
def eval_command(
    model: Annotated[
        str,
        Argument(
            metavar="MODEL",
            help="Run folder (runs/NAME), checkpoint, Hugging Face folder or hub name.",
        ),
    ],
    overrides: Overrides = None,
    data: Annotated[
        list[str] | None,
        Option(metavar="FILE", help="Held-out prompts, Parquet or JSONL; repeatable."),
    ] = None,
    recipe: Annotated[
        str | None, Option(help="Evaluation recipe (see `winnow recipes`); default: the run's own.")
    ] = None,
    out: Annotated[
        str | None, Option(metavar="FOLDER", help="Output folder; default: RUN/eval/ or evals/.")
    ] = None,
    step: Step = None,
    trust: Trust = False,
) -> None:
    """Evaluate a model on held-out prompts: avg@N, pass@k, maj@k by source; all answers saved."""
    with gc_tuning.disabled():
        from winnow.commands.evaluate import EvalRequest, run_evaluation
        from winnow.run.shutdown import EXIT_INTERRUPTED, Stopped

    files = tuple(data or ())
    request = EvalRequest(model, tuple(overrides or ()), files, recipe, out, step, trust)
    try:
        run_evaluation(request, _console())
    except (KeyboardInterrupt, Stopped) as stopped:
        # Answers that end first are the short ones: figures of a part would flatter.
        typer.echo("winnow: interrupted; this evaluation was discarded", err=True)
        code = stopped.exit_code if isinstance(stopped, Stopped) else EXIT_INTERRUPTED
        raise typer.Exit(code) from None


@app.command("compare", no_args_is_help=True)
def compare_command(
    a: Annotated[
        str,
        Argument(
            metavar="A", help="Output of `winnow eval`, a run folder, or a sweep folder alone."
        ),
    ],
    b: Annotated[str | None, Argument(metavar="B", help="What to compare with A.")] = None,
    as_json: AsJson = False,
) -> None:
    """Test whether B is better than A on the problems that both answered, or only luckier.

    With a sweep folder alone: print a table of its runs.
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
    target: Annotated[str, Argument(help="Folder to create.")],
    step: Step = None,
    adapter: Annotated[
        bool, Option("--adapter", help="Export the LoRA adapter only, as a PEFT folder.")
    ] = False,
    trust: Trust = False,
    push: Annotated[
        str | None, Option(metavar="OWNER/NAME", help="Upload to the hub, with a model card.")
    ] = None,
    private: Annotated[bool, Option("--private", help="Create the repository private.")] = False,
    revision: Annotated[str | None, Option(help="Branch to push to; main by default.")] = None,
) -> None:
    """Export a run's model as a Hugging Face folder for AutoModelForCausalLM."""
    for option, is_set in (("--private", private), ("--revision", revision is not None)):
        if is_set and push is None:
            raise ConfigError(f"{option} needs --push; add --push OWNER/NAME, or drop {option}")
    with gc_tuning.disabled():
        from winnow.commands.export import run_export
        from winnow.commands.push import HubTarget

    hub = None if push is None else HubTarget(push, private, revision)
    place = run_export(run, target, step, adapter, trust, hub)
    typer.echo(f"{'Exported' if hub is None else 'Pushed'} to {place}")


@app.command("check-engine", no_args_is_help=True)
def check_engine(
    engine: Annotated[
        str,
        Argument(metavar="URL|RECIPE", help="URL of a /inference/v1/generate server, or a recipe."),
    ],
    overrides: Overrides = None,
    model: Annotated[
        str | None, Option(metavar="FOLDER", help="Model that the engine should serve.")
    ] = None,
    update: Annotated[
        str | None, Option(metavar="FOLDER", help="Other weights to load, then restore.")
    ] = None,
    as_json: AsJson = False,
    trust: Trust = False,
) -> None:
    """Test that an engine samples from a model's full softmax and accepts new weights.

    For instance: winnow check-engine http://127.0.0.1:8000 --model FOLDER model.dtype=bfloat16
    """
    from dataclasses import asdict

    with gc_tuning.disabled():
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
    run: Annotated[str | None, Argument(help="Run folder, such as runs/NAME.")] = None,
    runs: Annotated[str, Option(help="Folder for runs.")] = "runs",
    as_json: AsJson = False,
    gpu: Annotated[
        bool, Option("--gpu", help="Run checks on a GPU, ten minutes at most; needs a checkout.")
    ] = False,
) -> None:
    """Diagnose a run; without one, check this machine for what Winnow needs."""
    from winnow.cli.doctor import check_gpu, print_diagnosis, print_report

    if gpu:
        if run is not None or as_json:
            raise ConfigError("--gpu checks this machine: leave out RUN and --json, or --gpu")
        raise typer.Exit(check_gpu(Path("winnow-gpu.txt")))
    if run is not None:
        raise typer.Exit(print_diagnosis(run, as_json))
    if as_json:
        raise ConfigError("--json needs a run: winnow doctor RUN --json")
    raise typer.Exit(print_report(runs))


@app.command()
def metrics(
    part: Annotated[str, Argument(help="Prefix such as actor, or verl's name of a metric.")] = "",
    markdown: Annotated[bool, Option("--markdown", help="Print docs/metrics.md.")] = False,
) -> None:
    """List every metric that a run records: unit, meaning, healthy values, and verl's name."""
    from winnow.observe.metric_names import list_metrics, metrics_markdown

    if markdown:
        typer.echo(metrics_markdown(), nl=False)
        return
    spread = part.replace("/mean", "/SPREAD").replace("/max", "/SPREAD").replace("/min", "/SPREAD")
    rows = [row for row in list_metrics() if row.name.startswith(part)] or [
        row for row in list_metrics() if spread in row.verl
    ]
    if not rows:
        parts = ", ".join(dict.fromkeys(row.name.partition("/")[0] for row in list_metrics()))
        raise ConfigError(f"no metric starts with {part!r}; prefixes: {parts}")
    for row in rows:
        unit, verl = f" [{row.unit}]" if row.unit else "", f"; verl: {row.verl}" if row.verl else ""
        typer.echo(f"{row.name}{unit}\n    {row.meaning}{verl}")
        if row.healthy:
            typer.echo(f"    healthy: {row.healthy}")


@app.command(no_args_is_help=True)
def plot(
    runs: Annotated[list[str], Argument(metavar="RUN", help="Run folders.")],
    metrics: Annotated[
        str,
        Option(
            metavar="A,B",
            help="Metrics (see `winnow metrics`); default: reward, accuracy, length, entropy.",
        ),
    ] = "",
    out: Annotated[Path, Option(metavar="FILE", help="Output file, .png or .svg.")] = Path(
        "plot.png"
    ),
    by: Annotated[Literal["steps", "tokens", "time"], Option(help="Horizontal axis.")] = "steps",
    smooth: Annotated[int, Option(min=0, help="Moving average: steps on either side.")] = 0,
) -> None:
    """Plot metrics of runs; seeds of one recipe as their mean with a 95 % interval."""
    from winnow.evaluation.plot import PlotRequest
    from winnow.evaluation.plot import plot_runs as draw

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


def _run_training(
    recipe: str,
    overrides: list[str] | None,
    folder: str | None,
    options: Sequence[str],
    heartbeat: int | None = None,
) -> NoReturn:
    """Train and exit, in this process, or in supervised children if the recipe restarts.

    Args:
        folder: of the run to go on with.
        options: of `winnow train` that the user gave.
        heartbeat: pipe of a parent, which has asked for trust.
    """
    from winnow.run.shutdown import ShutdownSignal, Stopped, ignore_broken_output
    from winnow.run.supervisor import Heartbeat, Supervisor, make_child_command

    config = _load(recipe, overrides, folder)
    trainer = config.trainer
    if heartbeat is None:
        _require_trust(config, recipe, overrides, "--trust" in options)
    if trainer.max_restarts and heartbeat is None:
        ignore_broken_output()
        command = make_child_command([*options, recipe, *(overrides or [])])
        supervisor = Supervisor(
            command, trainer.max_restarts, trainer.stall_timeout_s, folder=folder
        )
        raise typer.Exit(supervisor.run())
    began, companion = time.monotonic(), None
    if "--dashboard" in options:
        from winnow.dashboard.sidecar import serve_dashboard

        companion = serve_dashboard
    ignore_broken_output()
    stop = ShutdownSignal()
    try:
        with stop.listening():
            with gc_tuning.disabled():
                from winnow.commands.train import TrainOptions, run_training

            beats, fresh = Heartbeat(heartbeat), "--fresh" in options
            run = TrainOptions(recipe, fresh, _console(), stop, beats, began, companion)
            code = run_training(config, run)
    except Stopped as stopped:
        print(f"winnow: stopped by {stopped.reason}", file=sys.stderr)
        code = stopped.exit_code
    raise typer.Exit(code)


def _load(recipe: str, overrides: list[str] | None, folder: str | None = None) -> Config:
    """Load a recipe; with a folder, to resume its run."""
    from winnow.checkpoints.recipe_changes import with_settings
    from winnow.config.load import load_recipe

    config = load_recipe(recipe, overrides or [])
    return config if folder is None else with_settings(config, run={"resume": folder})


def _require_trust(config: Config, recipe: str, overrides: list[str] | None, trusts: bool) -> None:
    from winnow.checkpoints.strangers import require_trusted_start

    require_trusted_start(config, recipe, overrides or [], trusts)


def _console() -> Console:
    from rich.console import Console

    return Console(highlight=False)


def _print_settings(recipe: str, overrides: list[str]) -> None:
    """Print settings as recipe and overrides resolve them, under the prefixes among `overrides`."""
    from winnow.config.load import describe_config, parse_recipe
    from winnow.observe.format import safe_line

    prefixes = [word for word in overrides if "=" not in word]
    config = parse_recipe(recipe, [word for word in overrides if "=" in word])
    lines = [line for prefix in prefixes or [""] for line in describe_config(config, prefix)]
    for line in lines:
        only = f" [only with {line.variant}]" if line.variant else ""
        shown = f"{line.key}={line.default}  ({line.type}){only}\n    {line.meaning}"
        typer.echo(safe_line(shown))


# Threads that wait for each other spinning make a run many times slower as soon as anything
# else wants a core; asleep they cost some speed on an idle machine, where the user may say ACTIVE.
# Read once by OpenMP, so it must be set before torch is imported.
_CALM_THREADS = ("OMP_WAIT_POLICY", "PASSIVE")
_INTERRUPTED = 130


def main() -> None:
    """Entry point: errors for the user become one line and exit code 2."""
    os.environ.setdefault(*_CALM_THREADS)
    gc_tuning.freeze_at_exit()
    code = _run_command()
    sinks = sys.modules.get("winnow.observe.sinks")
    hangs = sinks is not None and sinks.has_hanging_sink()
    if code == _INTERRUPTED or hangs:
        from winnow.workers.threads import end_process

        end_process(code, skip_cleanup=hangs)
    sys.exit(code)


def _run_command() -> int:
    """Run the command line; return the exit code."""
    try:
        return app(prog_name="winnow", standalone_mode=False) or 0
    except (WinnowError, _UsageError) as error:
        from winnow.observe.format import safe_line

        is_ours = isinstance(error, WinnowError)
        for line in str(error).splitlines() if is_ours else _usage_lines(error):
            print(f"winnow: {safe_line(line)}", file=sys.stderr)
        return error.exit_code if is_ours else 2
    except KeyboardInterrupt:
        print("winnow: interrupted", file=sys.stderr)
        return _INTERRUPTED


_UsageError: Any = typer.BadParameter.__base__
"""The error of typer for a command line that it cannot read; typer exports no name for it."""


def _usage_lines(error: Any) -> Iterator[str]:
    """Describe a usage error, with the value and where to find help."""
    message = " ".join(error.format_message().split()).rstrip(".")
    if not message:  # the help of a command without arguments, which is shown already
        return
    option, context = getattr(error, "param", None), error.ctx
    names = option.opts if isinstance(option, TyperOption) else ()
    typed = [
        value if equals else after
        for name, equals, value, after in _typed_arguments()
        if name in names
    ]
    got = f", got {typed[0]!r}" if typed else ""
    command = "winnow" if context is None else context.command_path
    name = getattr(error, "option_name", "")
    if name and context is not None:
        own_flags = [word for each in context.command.params for word in each.opts]
        answers = dict(_explain_foreign_options(own_flags))
        yield from answers.values()
        if name in answers:
            return
    end = "" if message.endswith("?") else ";"
    yield f"{message[:1].lower()}{message[1:]}{got}{end} see `{command} --help`"


def _explain_foreign_options(own_flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield typed flags and keys of other systems, each with its Winnow equivalent."""
    from winnow.config.load import SHORTHANDS
    from winnow.config.other_names import explain_foreign_key
    from winnow.config.schema import all_keys

    keys = {*SHORTHANDS, *(".".join(key.path) for key in all_keys())}
    for name, equals, value, following in _typed_arguments():
        is_flag = name.startswith("-") and name not in own_flags
        if is_flag and not equals and not following.startswith("--"):
            value = following
        key = name.lstrip("-").replace("-", "_") if is_flag else name.lstrip("+~")
        is_ours = key.replace("/", ".") in keys and not is_flag
        if (is_flag or equals) and not is_ours and (answer := explain_foreign_key(key, value)):
            fault = f"no such option: {name}" if is_flag else f"{key} is not a known key"
            form = ", given as KEY=VALUE" if is_flag and "'s name for " in answer else ""
            yield name, f"{fault}; {answer}{form}"


def _typed_arguments() -> Iterator[tuple[str, str, str, str]]:
    """Yield typed arguments as name, equals sign, value and the next argument."""
    for word, following in itertools.pairwise([*sys.argv[2:], ""]):
        yield *word.partition("="), following


if __name__ == "__main__":
    main()
