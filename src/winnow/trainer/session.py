"""A training run from a recipe to the closing screen, as the command line starts it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console

from winnow.checkpoint import checkpoints_in
from winnow.config.load import dump_config
from winnow.config.root import Config
from winnow.config.warm_start import SftWarmStart
from winnow.errors import ConfigError
from winnow.observe.console import ConsoleSink, make_console
from winnow.observe.curve import draw_curve
from winnow.observe.figures import duration
from winnow.observe.jsonl import MetricsLog, read_metrics
from winnow.observe.run_folder import RunFolder
from winnow.observe.sinks import RunInfo, Sinks
from winnow.observe.summary import Sample, Summary, print_summary
from winnow.sampling.report import Progress
from winnow.trainer.build import build, load_policy, use_machine
from winnow.trainer.evaluate import Evaluator
from winnow.trainer.loop import train
from winnow.trainer.warm_start import WarmStart, make_warm_start

log = logging.getLogger(__name__)


def run_training(config: Config, recipe: str, fresh: bool, console: Console) -> Path:
    """Train a recipe and show what came of it; returns the run's folder.

    Raises:
        WinnowError: what the user can mend; what the run had by then stays in its folder.
    """
    began = time.monotonic()
    device = use_machine(config)
    folder = RunFolder.create(config.run.dir, config.run.name, recipe)
    folder.save_config(dump_config(config))
    sink = make_console(config.observe.console, console)
    with folder.logging_to_file():
        for line in introduction(config, recipe, folder):
            sink.note(line)
        warm_seconds: dict[str, float] = {}
        path = config.model.path
        if isinstance(config.warm_start, SftWarmStart):
            path = str(run_warm_start(config, config.warm_start, fresh, sink).folder)
            warm_seconds = {"warm-up": time.monotonic() - began}
        assert path is not None, "checks.py asks for a model or a warm start"
        policy = load_policy(config, path, device)
        metrics = MetricsLog(folder.metrics)
        sinks = Sinks([sink, metrics])
        built = build(config, policy, folder, sinks, lambda p: sink.status(_in_words(p)))
        for note in built.notes:
            sink.note(note)
        sinks.start(RunInfo(folder.name, config.trainer.steps, built.course.first_step))
        try:
            asyncio.run(train(built.parts, built.course))
        finally:
            sinks.close()
        _close(config, recipe, folder, built.evaluator, warm_seconds, console)
        log.info("finished in %s", duration(time.monotonic() - began))
    return folder.path


def run_warm_start(config: Config, warm: SftWarmStart, fresh: bool, sink: ConsoleSink) -> WarmStart:
    """The cached start, or one made now with its progress shown."""
    started = False

    def show(step: int, record: Mapping[str, float]) -> None:
        nonlocal started
        if not started:
            sink.start(RunInfo("warm-up", warm.steps, kind="warm_up"))
            started = True
        sink.log(step, dict(record))

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
    if isinstance(config.warm_start, SftWarmStart):
        lines += [
            "A toy task on purpose: sort 4-8 digits step by step, with a model of 0.1 M weights.",
            "1. Warm-up: it imitates bad examples (guesses, ramblings, slips). 20 to 60 s, cached.",
            "2. DAPO: from this bad start it learns by rewards alone. 1 to 2 minutes on two cores.",
        ]
    lines.append(
        f"{config.trainer.steps} steps of {config.sampling.groups_per_step} prompts x "
        f"{config.rollout.n} answers; a prompt whose answers are all right or all wrong teaches "
        "nothing and is replaced."
    )
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
    evaluator: Evaluator,
    warm_seconds: Mapping[str, float],
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
        samples=samples(evaluator, config.trainer.steps),
        more_seconds=warm_seconds,
        paths=paths,
        commands=next_commands(config, recipe, folder),
    )
    if config.observe.console != "off":
        print_summary(summary, console)


def next_commands(config: Config, recipe: str, folder: RunFolder) -> dict[str, str]:
    """Commands that work from here, offline."""
    other = config.run.seed + 1
    return {
        f"winnow eval {folder.path}": "ask the trained model the held-out prompts again",
        f"winnow train {recipe} seed={other}": "the same with other random numbers",
        f"winnow train {recipe} --help-config": "every setting, with its meaning",
        f"winnow export {folder.path} FOLDER": "the model as a Hugging Face folder",
    }


def samples(evaluator: Evaluator, last_step: int) -> list[Sample]:
    """A held-out question that training changed from wrong to right, if there is one."""
    answers = evaluator.greedy_answers
    if 0 not in answers or last_step not in answers:
        return []
    pairs = list(zip(evaluator.prompts, answers[0], answers[last_step], strict=True))
    if not pairs:
        return []
    rights = [(b.score.accuracy >= 1, a.score.accuracy >= 1) for _, b, a in pairs]
    place = rights.index((False, True)) if (False, True) in rights else 0
    prompt, before, after = pairs[place]
    decode = evaluator.decode
    return [
        Sample(
            prompt.text,
            decode(before.trajectory.token_ids),
            rights[place][0],
            decode(after.trajectory.token_ids),
            rights[place][1],
        )
    ]
