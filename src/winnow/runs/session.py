"""A training run from a recipe to the closing screen, as the command line starts it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from rich.console import Console

from winnow import gc_tuning as heap
from winnow.config.root import Config
from winnow.config.sampling import VarianceFilter
from winnow.config.warm_start import SftWarmStart
from winnow.errors import ConfigError, NoSignalError, RewardError, WinnowError
from winnow.observe.console import ConsoleSink, make_console
from winnow.observe.curve import draw_curve
from winnow.observe.figures import duration
from winnow.observe.jsonl import MetricsLog, read_metrics
from winnow.observe.names import SFT_S, Record
from winnow.observe.rollouts import RolloutGroup
from winnow.observe.run_folder import RunFolder
from winnow.observe.samples import samples
from winnow.observe.sinks import FirstRecord, RunInfo, Sinks
from winnow.observe.summary import Summary, print_summary
from winnow.rewards.service import Rewards
from winnow.runs.build import build, make_saver, use_machine
from winnow.runs.build_learner import needs_start
from winnow.runs.checkpoint import Saver, checkpoints_in, load_state
from winnow.runs.loading import load_policy
from winnow.runs.loop import Run, train
from winnow.runs.resume import Opened, opened_run
from winnow.runs.shutdown import ShutdownSignal, Stopped
from winnow.runs.state import seed_everything
from winnow.runs.supervisor import Heartbeat
from winnow.runs.topology import (
    holds_no_weights,
    other_processes,
    placed_models,
    placed_rewards,
    uses_device,
)
from winnow.runs.warm_start import WarmStart, make_warm_start
from winnow.sampling.report import Progress

log = logging.getLogger(__name__)


def run_training(
    config: Config,
    recipe: str,
    fresh: bool,
    console: Console,
    stop: ShutdownSignal,
    heartbeat: Heartbeat,
) -> int:
    """Train a recipe, or go on where a run of it was left, and show what came of it.

    Returns:
        The exit code: 0, or that of the request which stopped the run.

    Raises:
        WinnowError: what the user can mend; what the run had by then stays in its folder.
    """
    began = time.monotonic()
    device = use_machine(config, uses_device(config))
    seed_everything(config.run.seed)
    with opened_run(config, recipe) as opened, opened.folder.logging_to_file(), _errors_logged():
        folder = opened.folder
        heartbeat.folder(folder.path)
        sink = make_console(config.observe.console, console)
        for note in opened.notes or introduction(config, recipe, folder):
            sink.note(note)
            log.info("%s", note)
        if opened.is_finished(config.trainer.steps):
            sink.note(f"{folder.path} is finished: nothing to do (a new run needs a new run.name)")
            _close(config, recipe, folder, console)
            return 0
        path, start = _start_model(config, opened, fresh, sink, heartbeat)
        first = _first_model(config, opened, path, sink, heartbeat)
        policy = load_policy(config, path, device, first, holds_no_weights(config))
        with (
            contextlib.closing(MetricsLog(folder.metrics)) as metrics,
            other_processes(config) as others,
            contextlib.closing(placed_rewards(config, policy, first, others)) as rewards,
            make_saver(config, folder) as saver,  # ends before the ranks that write for it
        ):
            placed = placed_models(config, policy, first, others)
            _warn_of_another_machine(opened, placed.machine, sink)
            sinks = Sinks([sink, FirstRecord(metrics, start), heartbeat])
            run = build(
                config,
                policy,
                folder,
                sinks,
                metrics,
                saver,
                stop,
                rewards,
                placed,
                lambda p: sink.status(_in_words(p)),
            )
            for note in run.notes:
                sink.note(note)
            _resume(config, opened, run)
            for note in _lag_notes(config, run):
                sink.note(note)
                log.info("%s", note)
            opened.rewind(metrics)
            _watch(heartbeat, run, rewards)
            sinks.start(RunInfo(folder.name, run.steps, run.first_step))
            stopped = _train(config, run, saver, stop)
        if stopped is not None:
            sink.note(_farewell(stopped, run.state.step, folder))
            return stopped.exit_code
        _close(config, recipe, folder, console)
        log.info("finished in %s", duration(time.monotonic() - began))
    return 0


def _warn_of_another_machine(
    opened: Opened, machine: Mapping[str, str | int], sink: ConsoleSink
) -> None:
    for difference in opened.differences(machine):
        line = f"{difference}: the bits may differ from an undisturbed run's"
        sink.note(f"Warning: {line}")
        log.warning("%s", line)


def _watch(heartbeat: Heartbeat, run: Run, rewards: Rewards) -> None:
    """What moves while a run is alive."""
    heartbeat.watch(lambda: run.engine.status().generated_tokens)
    heartbeat.watch(lambda: run.learner.progress)
    heartbeat.watch(rewards.scored_apart)


@contextlib.contextmanager
def _errors_logged() -> Iterator[None]:
    """What ends a run stands in its log, too."""
    try:
        yield
    except WinnowError as error:
        log.error("%s", error)
        raise
    except Exception:
        log.exception("this is a mistake of winnow's")
        raise


def _start_model(
    config: Config, opened: Opened, fresh: bool, sink: ConsoleSink, heartbeat: Heartbeat
) -> tuple[str, Record]:
    """The model folder to begin from, and figures of making it."""
    began = time.monotonic()
    if opened.checkpoint is not None:
        return str(opened.checkpoint.model), {}
    if isinstance(config.warm_start, SftWarmStart):
        warm = run_warm_start(config, config.warm_start, fresh, sink, heartbeat.beat)
        return str(warm.folder), {SFT_S: time.monotonic() - began}
    assert config.model.path is not None, "checks.py asks for a model or a warm start"
    return config.model.path, {}


def _first_model(
    config: Config, opened: Opened, path: str, sink: ConsoleSink, heartbeat: Heartbeat
) -> str | None:
    """The folder that the run began from, where an adapter, a reference or a critic needs it.

    A resumed run's policy comes from a checkpoint (`path`), so a warm start that is no longer
    cached is made again, with the same bits.
    """
    if not needs_start(config):
        return None
    if opened.checkpoint is None:
        return path
    if isinstance(config.warm_start, SftWarmStart):
        return str(run_warm_start(config, config.warm_start, False, sink, heartbeat.beat).folder)
    return config.model.path


def _resume(config: Config, opened: Opened, run: Run) -> None:
    """Set the run and the random states to the checkpoint, if there is one."""
    seed_everything(config.run.seed)  # what was started since may have drawn
    checkpoint = opened.checkpoint
    if checkpoint is not None:
        run.unfinished = run.state.restore(checkpoint, load_state(checkpoint))
        run.first_step = checkpoint.step + 1
        run.evaluate_before = False


def _lag_notes(config: Config, run: Run) -> list[str]:
    """How late scores are seen, where the recipe leaves that open and they are late."""
    lag, looks = run.sampler.score_lag_ticks, run.sampler.look_ticks
    if config.sampling.score_lag_ticks is not None or not lag:
        return []
    when = f", when the engines are next looked at (each {looks} ticks)" if looks > 1 else ""
    return [
        f"Scorers run beside the engine: a score is seen {lag} decode ticks after its answer's "
        f"end{when} (sampling.score_lag_ticks)"
    ]


def _train(config: Config, run: Run, saver: Saver, stop: ShutdownSignal) -> Stopped | None:
    """Train, and save what was reached when it is stopped or cannot go on."""
    stopped = None
    with stop.deferring(), heap.frozen():
        try:
            asyncio.run(train(run))
        except Stopped as request:
            stopped = request
            run.state.save()
        except (NoSignalError, RewardError) as error:
            # Both come up while sampling, so weights are those of the boundary.
            if isinstance(error, NoSignalError):
                if config.sampling.on_bound == "stop":
                    run.state.note_sampling()
                # The answers that taught nothing are what there is to look at now.
                seen = [
                    RolloutGroup(s.group, s.fate) for s in run.sampler.ledger.accounting.settled
                ]
                run.keep_rollouts((run.state.step or 0) + 1, seen)
            run.state.save()
            raise
        finally:
            run.sinks.close()
        saver.wait()
    return stopped


def _farewell(stopped: Stopped, step: int | None, folder: RunFolder) -> str:
    saved = "before anything was to be saved" if step is None else f"after step {step}, saved"
    return f"Stopped by {stopped.reason} {saved}. Go on with: winnow resume {folder.path}"


def run_warm_start(
    config: Config,
    warm: SftWarmStart,
    fresh: bool,
    sink: ConsoleSink,
    on_progress: Callable[[], None] = lambda: None,
) -> WarmStart:
    """The cached start, or one made now with its progress shown."""
    started = False

    def show(step: int, record: Mapping[str, float]) -> None:
        nonlocal started
        if not started:
            sink.start(RunInfo("warm-up", warm.steps, kind="warm_up"))
            started = True
        sink.log(step, dict(record))
        on_progress()

    try:
        found = make_warm_start(config, warm, fresh, show)
    finally:
        if started:
            sink.close()
    if found.cached:
        sink.note(f"Warm start: taken from {found.folder} (made before; --fresh makes it anew)")
    return found


def run_sft(config: Config, fresh: bool, console: Console) -> Path:
    """Make a recipe's warm start alone; returns the model's folder.

    Raises:
        ConfigError: the recipe has none.
    """
    if not isinstance(config.warm_start, SftWarmStart):
        raise ConfigError(
            f"warm_start is {config.warm_start.name}: there is nothing to fine-tune; "
            "choose warm_start=sft"
        )
    use_machine(config)
    sink = make_console(config.observe.console, console)
    return run_warm_start(config, config.warm_start, fresh, sink).folder


def introduction(config: Config, recipe: str, folder: RunFolder) -> list[str]:
    """What will happen, in the words of a newcomer."""
    lines = [f"winnow train {recipe}: everything of this run goes to {folder.path}"]
    lines += config.run.description
    size = (
        f"{config.trainer.steps} steps of {config.sampling.groups_per_step} prompts x "
        f"{config.rollout.n} answers"
    )
    if isinstance(config.sampling.filter, VarianceFilter):
        size += (
            "; a prompt whose answers are all right or all wrong teaches nothing and is replaced"
        )
    lines.append(f"{size}.")
    return lines


def _in_words(progress: Progress) -> str:
    return (
        f"{progress.qualified}/{progress.wanted} groups, {progress.in_flight} in flight, "
        f"{progress.generated_tokens:,} tokens"
    )


def _close(
    config: Config,
    recipe: str,
    folder: RunFolder,
    console: Console,
) -> None:
    draw_curve(folder.path, folder.curve, title=folder.name)
    records = read_metrics(folder.metrics)
    last = checkpoints_in(folder.checkpoints)[-1]
    paths = {
        "learning curve": folder.curve,
        "rollouts": folder.rollouts,
        "model": last.model,
        "figures": folder.metrics,
    }
    summary = Summary.of(
        f"{folder.name}: done",
        records,
        samples=samples(folder.evaluation(0), folder.evaluation(config.trainer.steps)),
        paths=paths,
        commands=next_commands(config, recipe, folder),
    )
    if config.observe.console != "off":
        print_summary(summary, console)


def next_commands(config: Config, recipe: str, folder: RunFolder) -> dict[str, str]:
    """Commands that work from here, offline."""
    other = config.run.seed + 1
    # A run's own recipe holds its name, which is taken.
    name = f" run.name={folder.name}-{other}" if Path(recipe) == folder.config else ""
    return {
        f"winnow eval {folder.path}": "ask the trained model the held-out prompts again",
        f"winnow train {recipe}{name} seed={other}": "the same with other random numbers",
        f"winnow train {recipe} --help-config": "every setting, with its meaning",
        f"winnow export {folder.path} FOLDER": "the model as a Hugging Face folder",
    }
