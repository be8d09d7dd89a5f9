"""A training run from a recipe to the closing screen, as the command line starts it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from winnow import gc_tuning
from winnow.builders.engines import driver_holds_no_weights, driver_uses_device
from winnow.builders.environments import (
    environment_processes,
    first_messages_of,
    history_notes,
    tool_schemas,
)
from winnow.builders.preflight import (
    bfloat16_notes,
    check_inputs_exist,
    check_requirements,
    startup_notes,
)
from winnow.builders.processes import worker_processes
from winnow.builders.run import RunContext, build_run, count_steps, prepare_device
from winnow.builders.topology import build_models, build_rewards
from winnow.checkpoints.checkpoint import checkpoints_in, verify
from winnow.checkpoints.opening import DamagedError, OpenedRun, detecting_damage, opened_run, rewind
from winnow.checkpoints.recipe_changes import with_settings
from winnow.checkpoints.run_state import seed_everything
from winnow.config.data import Demonstrations, NoTask
from winnow.config.files import recipe_name
from winnow.config.load import dump_config
from winnow.config.model import SftWarmStart
from winnow.config.roles import Roles
from winnow.config.rollout import VarianceFilter
from winnow.config.root import Config
from winnow.config.trainer import LocalCluster
from winnow.data.loader import PromptSource, training_prompts
from winnow.data.prompts import FirstMessages
from winnow.errors import ConfigError, NoSignalError, RewardError, WinnowError
from winnow.learning.learner import Learner
from winnow.models.fetch import fetched_bytes
from winnow.observe.console import ConsoleSink, make_console
from winnow.observe.files import RunFolder, write_atomic
from winnow.observe.format import command_line, duration
from winnow.observe.jsonl import MetricsLog, read_metrics
from winnow.observe.metrics import SFT_S, START_S, Record, no_timeline
from winnow.observe.profile import profile_notes
from winnow.observe.rollouts import RolloutGroup
from winnow.observe.sinks import BackgroundSink, Kind, RunInfo, Sink, Sinks, load_user_sink
from winnow.observe.trace import TraceFile
from winnow.observe.usage import sampling_usage
from winnow.ranks.learner import needs_start
from winnow.ranks.models import LoadedPolicy, explain_oom, fetch_models, load_policy, start_notes
from winnow.run.loop import OnStep, Run, train
from winnow.run.shutdown import MachineDeadline, ShutdownSignal, Stopped
from winnow.run.supervisor import Heartbeat
from winnow.sampling.ledger import Ledger
from winnow.views.curve import CurveSink, draw_curve
from winnow.views.diagnosis import remedy_of
from winnow.views.doctor import LiveDiagnosis

if TYPE_CHECKING:
    from winnow.run.sft import SftData, SftRun

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class TrainOptions:
    """Command line options and process-wide objects of a run."""

    recipe: str
    """Its name or path, as the user wrote it."""
    fresh: bool
    console: Console
    stop: ShutdownSignal
    heartbeat: Heartbeat
    began_s: float
    """Start of the command, by `time.monotonic`."""
    companion: Callable[[Path], contextlib.AbstractContextManager[str]] | None = None
    """Starts what accompanies a run, of its folder; yields a line for the user."""
    on_step: OnStep = Run.on_step
    """As `Run` has it."""


def run_training(config: Config, options: TrainOptions) -> int:
    """Train a recipe, or resume its run, and show the results.

    Returns:
        The exit code: 0, or that of the request which stopped the run.

    Raises:
        WinnowError: what the user can mend; what the run had by then stays in its folder.
    """
    check_requirements(config)
    options.heartbeat.watch_counters(fetched_bytes)
    try:
        return _train_once(config, options)
    except DamagedError as damage:
        config = with_settings(config, run={"resume": str(damage.older.path)})
        return _train_once(config, options, damage.warnings)


def _train_once(config: Config, options: TrainOptions, warnings: Iterable[str] = ()) -> int:
    """Train a recipe; raise DamagedError if it can only go on from an older checkpoint."""
    recipe, console, heartbeat = options.recipe, options.console, options.heartbeat
    roles, engine = Roles(config), config.rollout.engine
    uses_device = driver_uses_device(engine, config.reward, config.cluster, roles)
    device = prepare_device(config.run, config.model.cache_dir, uses_device)
    seed_everything(config.run.seed)
    with (
        opened_run(config, recipe) as opened,
        detecting_damage(opened) as has_begun,
        _logging_to_folder(opened.folder) as stack,
    ):
        folder, config = opened.folder, _with_saved_sections(config, opened)
        heartbeat.send_folder(folder.path)
        sink = make_console(config.observe.console, console)
        is_finished = opened.is_finished(config.trainer.steps)
        if not is_finished:
            start = None if opened.checkpoint else config.model.path
            check_inputs_exist(config.data, config.sft, start)
            stack.enter_context(sampling_usage(folder.usage))
            if options.companion is not None:
                _note(sink, stack.enter_context(options.companion(folder.path)))
        _note(sink, *warnings, *(opened.notes or introduction(config, recipe, folder)))
        if is_finished:
            if opened.checkpoint and opened.may_be_damaged:
                verify(opened.checkpoint)  # as no ranks will
            sink.print_line(_finished_note(config, folder))
            _show_results(config, recipe, folder, console)
            return 0
        path, first, figures = _resolve_models(config, opened, options.fresh, sink, heartbeat)
        policy = load_policy(config, path, device, first, driver_holds_no_weights(engine, roles))
        workers = worker_processes(config, roles, policy, first)
        early = stack.enter_context(workers) if "environment" in roles else None
        environments = stack.enter_context(environment_processes(config, policy.tokenizer, early))
        _note(sink, *bfloat16_notes(config), *policy.notes, *history_notes(config, policy))
        begin = first_messages_of(config.environment, environments, partial(_note, sink))
        data, config, saved_config = _read_data(config, opened, policy, begin)
        start_workers = partial(early or stack.enter_context(workers), config=config)
        end = MachineDeadline(config.trainer)
        _note(sink, *end.notes, *startup_notes(roles, config.trainer.checkpoint_url))
        with (
            explain_oom(config),
            contextlib.closing(MetricsLog(folder.metrics)) as metrics,
            contextlib.closing(build_rewards(config, roles, policy, start_workers)) as rewards,
        ):
            placed = build_models(config, roles, policy, first, start_workers, environments)
            trace = [TraceFile(folder.trace)] if config.observe.trace else []
            others = _make_sinks(config, folder, sink)
            sinks = Sinks([sink, metrics, heartbeat, end, *trace, *others])
            text = dump_config(saved_config, recipe_name(str(folder.config)))
            context = RunContext(
                config, text, policy, folder, sinks, metrics, options.stop, rewards, placed,
                partial(_note, sink), trace[0] if trace else no_timeline, begin, options.on_step,
            )  # fmt: skip
            run = _build(context, data, sink)
            _restore(context, opened, run, sink)
            has_begun.set()
            heartbeat.watch_counters(
                lambda: (run.engine.status().generated_tokens, run.learner.progress),
                rewards.count_offloaded,
            )
            _start_sinks(sinks, run, folder, figures, options.began_s)
            stopped = _train(context, run, end)
        if stopped is not None:
            _note(sink, _stopped_note(stopped, run.state.step, folder))
            return stopped.exit_code
        _note(sink, *(run.prompt_budget.notes if isinstance(run, Run) else ()))
        _show_results(config, recipe, folder, console)
        log.info("finished in %s", duration(time.monotonic() - options.began_s))
    return 0


def _build(context: RunContext, data: PromptSource | SftData, sink: ConsoleSink) -> Run | SftRun:
    """Build the run for the kind of data."""
    if isinstance(data, PromptSource):
        return build_run(context, data, lambda ledger: sink.show_status(_describe_progress(ledger)))
    from winnow.builders.sft import build_sft

    return build_sft(context, data)


def _read_data(
    config: Config, opened: OpenedRun, policy: LoadedPolicy, begin: FirstMessages | None
) -> tuple[PromptSource | SftData, Config, Config]:
    """Read the training data, put the steps that it fills into the recipe and the one that the
    folder keeps, and keep the tokenizer and the model's config there.

    Args:
        begin: gives the first messages of conversations, where rows do not.
    """
    folder = opened.folder
    if policy.tokenizer.is_fast and not folder.tokenizer.exists():
        write_atomic(folder.tokenizer, policy.tokenizer.backend_tokenizer.to_str().encode())
    if not folder.model.exists():
        write_atomic(folder.model, policy.model.config.to_json_string().encode())
    epochs, steps = config.trainer.data_epochs, config.trainer.steps
    data: PromptSource | SftData
    if isinstance(config.sft, Demonstrations):
        from winnow.builders.sft import read_sft_data

        data = read_sft_data(config.sft, config.data, policy)
        steps = steps if epochs is None else data.count_steps(epochs)
    else:
        tools, seed, vision = tool_schemas(config.environment), config.run.seed, policy.vision
        data = training_prompts(config.data, policy.tokenizer, seed, tools, begin, vision)
        groups, task = config.sampling.groups_per_step, config.data.task.name
        steps = steps if epochs is None else count_steps(epochs, groups, data, task)
    config, saved = (with_settings(c, trainer={"steps": steps}) for c in (config, opened.config))
    return data, config, saved


def _with_saved_sections(config: Config, opened: OpenedRun) -> Config:
    """Take over sections that the run fixed at its start: hub commits, steps."""
    names = "model", "data", "trainer"
    config = config.model_copy(update={name: getattr(opened.config, name) for name in names})
    profile = config.trainer.profile
    path = profile.save_path or str(opened.folder.path.absolute() / "profile")
    return with_settings(
        config, trainer={"profile": profile.model_copy(update={"save_path": path})}
    )


def _finished_note(config: Config, folder: RunFolder) -> str:
    length = "steps" if config.trainer.data_epochs is None else "data_epochs"
    return (
        f"{folder.path} is finished: nothing to do (raise trainer.{length} to train longer, or "
        "set run.name for a new run)"
    )


def _make_sinks(config: Config, folder: RunFolder, sink: ConsoleSink) -> list[Sink]:
    """Make the diagnosis, the curve, the user's sinks and trackers; their warnings are shown as
    other lines."""
    warn, tracking = partial(_note, sink), config.observe.tracking
    sinks: list[Sink] = [LiveDiagnosis(config.model_dump(mode="json"), folder, warn)]
    if not isinstance(config.sft, Demonstrations):  # which has none of the curve's figures
        sinks += [BackgroundSink("curve.png", partial(CurveSink, folder.path), tracking, warn)]
    sinks += [
        load_user_sink(section, number, warn, tracking)
        for number, section in enumerate(config.observe.sinks)
    ]
    if config.observe.trackers:
        from winnow.observe.trackers import make_trackers

        sinks += make_trackers(config, folder, warn)
    return sinks


def _start_sinks(
    sinks: Sinks, run: Run | SftRun, folder: RunFolder, figures: Record, began: float
) -> None:
    """Start the sinks; the first record includes the start-up time."""
    kind: Kind = "train" if isinstance(run, Run) else "sft"
    sinks.start(RunInfo(folder.name, run.steps, run.first_step, kind))
    start_s = time.monotonic() - began - figures.get(SFT_S, 0.0)
    sinks.add_to_first_record({**figures, START_S: start_s})


def _note(sink: ConsoleSink, *lines: str) -> None:
    """Show lines on the console and log them."""
    for line in lines:
        sink.print_line(line)
        log.log(logging.WARNING if line.startswith("Warning") else logging.INFO, "%s", line)


@contextlib.contextmanager
def _logging_to_folder(folder: RunFolder) -> Iterator[contextlib.ExitStack]:
    """Log to the run's folder, also the error that ends the run; yields a stack of contexts."""
    with folder.logging_to_file():
        try:
            with contextlib.ExitStack() as stack:
                yield stack
        except WinnowError as error:
            log.error("%s", error)
            raise
        except Exception:
            log.exception("this is a bug in winnow")
            raise


def _resolve_models(
    config: Config, opened: OpenedRun, fresh: bool, sink: ConsoleSink, heartbeat: Heartbeat
) -> tuple[str, str | None, Record]:
    """Find the model to load and the run's initial model; make a warm start if needed.

    Returns:
        The folder to go on with, the folder that the run began from where an adapter, a reference
        or a critic needs it, and figures of a warm start made now. A resumed run's warm start that
        is no longer cached is made again, with the same bits.
    """
    checkpoint, is_needed = opened.checkpoint, needs_start(config)
    if checkpoint is not None and not is_needed:
        return str(checkpoint.model), None, {}
    began, start, figures = time.monotonic(), config.model.source, {}
    if isinstance(config.warm_start, SftWarmStart):
        from winnow.builders.warm_start import make_warm_start

        fresh = fresh and checkpoint is None
        start = str(make_warm_start(config, fresh, sink, heartbeat.beat))
        figures = {SFT_S: time.monotonic() - began}
    assert start is not None, "the configuration asks for a model or a warm start"
    if isinstance(config.cluster, LocalCluster):  # elsewhere, each node fetches what it loads
        sections = config.model, config.reference, config.critic, config.reward
        fetch_models(*sections, sink.print_line)
        _note(sink, *start_notes(config.model, start))
    if checkpoint is not None:
        return str(checkpoint.model), start, {}
    return start, start if is_needed else None, figures


def _restore(context: RunContext, opened: OpenedRun, run: Run | SftRun, sink: ConsoleSink) -> None:
    """Set the run, the random states and the folder to the checkpoint, if there is one, and say
    what is to be known of the steps that follow."""
    config, checkpoint = context.config, opened.checkpoint
    _note(sink, *opened.manifest.machine_changes(context.placed.machine))
    seed_everything(config.run.seed)  # what was started since may have drawn
    if checkpoint is not None:
        run.unfinished = run.state.restore(checkpoint, opened.load_state(config))
        run.first_step = checkpoint.step + 1
        run.evaluate_before = False
        if isinstance(run, Run) and run.prompt_budget.is_exhausted and run.unfinished is None:
            sink.print_line(_finished_note(config, opened.folder))
    rewind(opened.folder, opened.manifest, context.metrics, context.recipe)
    profile = profile_notes(config.trainer.profile, run.first_step, run.steps)
    _note(sink, *run.notes, *profile)
    if isinstance(run, Run) and config.sampling.score_lag_ticks is None:
        lag, looks = run.sampler.score_lag_ticks, run.sampler.look_ticks
        when = f", when the engines are next polled (every {looks} ticks)" if looks > 1 else ""
        late = (
            f"Scorers run concurrently with the engine: a score arrives {lag} decode ticks after "
            f"its answer ends{when} (sampling.score_lag_ticks)"
        )
        _note(sink, *[late] * bool(lag))


def _train(context: RunContext, run: Run | SftRun, end: MachineDeadline) -> Stopped | None:
    """Train, and save the progress if the run is stopped or cannot continue."""
    config, stop = context.config, context.stop
    explained = explain_oom(config, context.policy.model, run.save_after_failure)
    stopped, end.save_s = None, lambda: run.state.save_s
    if isinstance(run.learner, Learner):  # ranks do not report single updates
        stop.updates_left = partial(getattr, run.learner, "updates_left")
    with stop.deferring(), stop.stop_before(end), gc_tuning.frozen(), run.state, explained:
        try:
            if isinstance(run, Run):
                asyncio.run(train(run))
            else:
                from winnow.run.sft import train_sft

                asyncio.run(train_sft(run))
        except Stopped as request:
            stopped = request
            run.state.save()
        except (NoSignalError, RewardError) as error:
            # Both come up while sampling, so weights are those of the boundary.
            if isinstance(error, NoSignalError) and isinstance(run, Run):
                if config.sampling.on_bound == "stop":  # a resumed run goes on with open groups
                    run.state.record_sampling()
                # The answers that taught nothing are what there is to look at now.
                seen = [
                    RolloutGroup(s.group, s.fate) for s in run.sampler.ledger.accounting.settled
                ]
                run.save_rollouts((run.state.step or 0) + 1, seen)
            run.state.save()
            if isinstance(error, NoSignalError) and error.rule:
                raise NoSignalError(f"{error}: {remedy_of(error.rule)}", error.rule) from error
            raise
        else:
            run.sinks.mark_complete()
        finally:
            with contextlib.closing(run.sinks):
                if run.profiler is not None:
                    run.profiler.close()
        run.state.wait()
    return stopped


def _stopped_note(stopped: Stopped, step: int | None, folder: RunFolder) -> str:
    saved = "before the first checkpoint" if step is None else f"after step {step}, saved"
    resume = command_line("resume", str(folder.path))
    return f"Stopped by {stopped.reason} {saved}. Resume with: {resume}"


def run_sft(config: Config, fresh: bool, console: Console) -> Path:
    """Make only a recipe's warm start; return the model's folder.

    Raises:
        ConfigError: the recipe has none.
    """
    if not isinstance(config.warm_start, SftWarmStart):
        raise ConfigError(
            f"warm_start={config.warm_start.name}: nothing to fine-tune; set warm_start=sft"
        )
    from winnow.builders.warm_start import make_warm_start

    prepare_device(config.run, config.model.cache_dir)
    sink = make_console(config.observe.console, console)
    return make_warm_start(config, fresh, sink)


def introduction(config: Config, recipe: str, folder: RunFolder) -> list[str]:
    """Introduce the run in plain words."""
    kind = "sft" if isinstance(config.sft, Demonstrations) else "train"
    lines = [f"winnow {kind} {recipe}: writing to {folder.path}"]
    lines += config.run.description
    if isinstance(config.sft, Demonstrations):
        return lines
    epochs, groups = config.trainer.data_epochs, config.sampling.groups_per_step
    length = f"{config.trainer.steps}" if epochs is None else f"{epochs:g} passes over the data in"
    size = f"{length} steps of {groups} prompts x {config.rollout.n} answers"
    if isinstance(config.sampling.filter, VarianceFilter):
        size += "; prompts with all answers right or all wrong give no signal and are replaced"
    lines.append(f"{size}.")
    return lines


def _describe_progress(ledger: Ledger) -> str:
    return (
        f"{ledger.qualified}/{ledger.target} groups, {ledger.in_flight} in flight, "
        f"{ledger.account.generated:,} tokens"
    )


def _show_results(config: Config, recipe: str, folder: RunFolder, console: Console) -> None:
    last = checkpoints_in(folder.checkpoints)[-1]
    if isinstance(config.sft, Demonstrations):
        if config.observe.console != "off":
            console.print(f"{folder.name}: done; the model is in {last.model}", soft_wrap=True)
            for command, meaning in next_commands(config, recipe, folder).items():
                console.print(f"{command}  # {meaning}", soft_wrap=True, markup=False)
        return
    draw_curve(folder.path)
    paths = {
        "learning curve": folder.curve,
        "rollouts": folder.rollouts,
        "model": last.model,
        "figures": folder.metrics,
    }
    if config.observe.console != "off":
        from winnow.views.summary import pick_samples, print_summary

        print_summary(
            console,
            f"{folder.name}: done",
            read_metrics(folder.metrics),
            samples=pick_samples(folder.eval_file(0), folder.eval_file(last.step)),
            paths=paths,
            commands=next_commands(config, recipe, folder),
        )


def next_commands(config: Config, recipe: str, folder: RunFolder) -> dict[str, str]:
    """List commands for a finished run that work offline."""
    other, path, target = config.run.seed + 1, str(folder.path), f"{folder.name}-model"
    commands = {}
    if isinstance(config.sft, Demonstrations):
        model = f"model.path={checkpoints_in(folder.checkpoints)[-1].model}"
        commands[command_line("train", "RECIPE", model)] = "continue with reinforcement learning"
    if config.data.eval_files or not isinstance(config.data.task, NoTask):
        commands[command_line("eval", path)] = "evaluate the trained model on the held-out prompts"
    commands |= {
        command_line("rollouts", path): "read the answers and their scores",
        command_line("doctor", path): "diagnose the run",
        command_line("dashboard", str(folder.path.parent)): "show all of it in a browser",
    }
    if config.run.fork is None:
        new = str(folder.config), f"run.name={folder.name}-{other}", f"seed={other}"
        commands[command_line("train", *new)] = "repeat with another seed"
    return {
        **commands,
        command_line("train", recipe, "--help-config"): "list all settings",
        command_line("export", path, target): "export the model as a Hugging Face folder",
    }
