"""`winnow eval`: find the model, settle how it is asked, ask, score, write and show.

A run brings its recipe along, which says how its model is asked; any other model is asked as a
recipe for evaluation says. Where the answers go is decided before anything is loaded. Ctrl-C or
SIGTERM ends it with nothing written: answers that are finished first are the short ones, so
figures of a part would flatter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.text import Text

import winnow
from winnow.config.data import DataConfig, NoTask
from winnow.config.files import evaluation_recipe
from winnow.config.load import load_recipe, resolve_recipe
from winnow.config.root import Config
from winnow.config.trainer import EvaluationConfig
from winnow.data.tokenizer import may_be_hub_name
from winnow.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    RewardError,
    WinnowError,
)
from winnow.evaluation.evaluator import Evaluated, Evaluator
from winnow.evaluation.report import (
    ANSWERS,
    REPORT,
    SCORED,
    ProgressLine,
    Report,
    print_report,
    watched,
)
from winnow.observe.files import refusals_told, write_atomic
from winnow.observe.run_folder import RunFolder, free_path, require_trust
from winnow.rewards.routing import Router
from winnow.rollout.engine import WeightUpdate
from winnow.runs.build import make_evaluator, use_machine
from winnow.runs.checkpoint import (
    CONFIG,
    MANIFEST,
    Checkpoint,
    find_checkpoint,
    read_manifest,
    verify,
)
from winnow.runs.loading import load_policy
from winnow.runs.process import ShutdownSignal, Stopped
from winnow.runs.rewarding import make_rewards
from winnow.runs.topology import make_engine

DEFAULT_RECIPE = "default"
_FOLDERS = Path("evals")
"""Folder of the evaluations of models that belong to no run."""
_LONG = 20
"""Characters from which on the words of a template are an instruction."""


@dataclass(frozen=True)
class EvalRequest:
    """The words of `winnow eval`."""

    model: str
    """Folder of a run, of a checkpoint or of a model, or a hub name."""
    overrides: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    """Files, over the recipe's."""
    recipe: str | None = None
    out: str | None = None
    """Folder of the answers and figures."""
    step: int | None = None
    """Step of a run's checkpoint; None is the last."""


@dataclass(frozen=True)
class Subject:
    """A model, how to ask it, and where the answers go."""

    title: str
    model: str
    """Folder or hub name."""
    config: Config
    step: int
    """Step of a run's checkpoint, else 0."""
    answers: Path
    report: Path


def run_evaluation(request: EvalRequest, console: Console) -> Report:
    """Evaluate a model, write answers and figures, and print the figures.

    Raises:
        WinnowError: no such run, checkpoint or model, or nothing to evaluate on.
        Stopped: a signal ended it; nothing of it is left.
    """
    stop = ShutdownSignal(notice="")
    with stop.listening():
        return _evaluation(request, console, stop)


def _evaluation(request: EvalRequest, console: Console, stop: ShutdownSignal) -> Report:
    subject = subject_of(request)
    began = time.monotonic()
    with _nothing_left_of(subject):
        found, evaluator = _ask(subject, console, stop)
        seconds = time.monotonic() - began
        report = Report.of(found)
        about = _about(subject, evaluator, seconds)
        write_atomic(subject.report, report.as_json(about))
    print_report(report, console)
    if evaluator.left_out:
        console.print(
            f"{evaluator.left_out:,} rows are left out: longer than data.max_prompt_tokens",
            markup=False,
        )
    for line in (f"answers  {subject.answers}", f"figures  {subject.report}"):
        console.print(Text(line), soft_wrap=True)
    return report


@contextlib.contextmanager
def _nothing_left_of(subject: Subject) -> Iterator[None]:
    """Take the answers away after a stop; where scoring fails too often, say where they are."""
    had_folder = subject.answers.parent.exists()
    try:
        yield
    except (KeyboardInterrupt, Stopped):
        for file in (subject.answers, subject.report):
            file.unlink(missing_ok=True)
        if not had_folder and subject.answers.parent.exists():
            subject.answers.parent.rmdir()
        raise
    except RewardError as error:
        if not subject.answers.exists():
            raise
        raise RewardError(f"{error}; the answers are kept in {subject.answers}") from error


def _ask(subject: Subject, console: Console, stop: ShutdownSignal) -> tuple[Evaluated, Evaluator]:
    config = subject.config
    device = use_machine(config)
    with _limits_named_as_given(config.evaluation):
        policy = load_policy(config, subject.model, device)
    engine = make_engine(config, policy)
    line = ProgressLine(console, config.observe.console)

    async def ask(evaluator: Evaluator) -> Evaluated:
        await engine.load_weights(WeightUpdate(version=subject.step))
        return await watched(evaluator, subject.step, line)

    with contextlib.closing(make_rewards(config, device, policy.decode, False)) as rewards:
        with _limits_named_as_given(config.evaluation):
            evaluator = make_evaluator(
                _with_all_texts(config), policy, engine, lambda _: subject.answers, rewards
            )
        if not evaluator.prompts:
            raise DataError("no held-out prompts: give --data FILE, or data.eval_files=[FILE]")
        check_not_asked_twice(config.data, [(p.uid, p.text) for p in evaluator.prompts])
        console.print(Text(_title(subject, evaluator), style="bold"), soft_wrap=True)
        with line.shown():
            return stop.run(lambda: ask(evaluator)), evaluator


def _with_all_texts(config: Config) -> Config:
    """Have every answer kept with its text; in a run only some are."""
    rows = 2**63 - 1
    observe = config.observe.model_copy(update={"rollout_text_groups": rows})
    return config.model_copy(update={"observe": observe})


@contextlib.contextmanager
def _limits_named_as_given(config: EvaluationConfig) -> Iterator[None]:
    """Name a limit that does not fit by the key that set it."""
    try:
        yield
    except ModelError as error:
        if config.max_response_tokens is None:
            raise
        own = "evaluation.max_response_tokens"
        raise ModelError(str(error).replace("rollout.max_response_tokens", own)) from error


def _about(subject: Subject, evaluator: Evaluator, seconds: float) -> dict[str, Any]:
    config = subject.config
    asked = config.evaluation
    return {
        "title": subject.title,
        "model": subject.model,
        "step": subject.step,
        "winnow": winnow.__version__,
        "data": list(config.data.eval_files) or config.data.task.name,
        "settings": {
            "n": asked.n,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "max_response_tokens": config.rollout.max_response_tokens,
            "seed": config.run.seed,
            "chat_template": config.data.chat_template,
            **_scoring(config, sorted({prompt.data_source for prompt in evaluator.prompts})),
        },
        "rows_left_out": evaluator.left_out,
        "generated_tokens": evaluator.progress.tokens,
        "seconds": round(seconds, 3),
    }


def _scoring(config: Config, sources: Sequence[str]) -> dict[str, str]:
    """Say what scored the answers: for each source a scorer, so that comparisons see a change."""
    reward = config.reward
    function = reward.function
    found: dict[str, str] = {
        f"{SCORED}manager": reward.manager.name,
        f"{SCORED}judge": reward.judge.name,
    }
    for source in sources:
        if function.path is not None:
            name = f"{function.path}:{function.name}"
        else:
            try:
                name = Router(reward.scorers).scorer(source).name
            except RewardError:  # a manager that scores by itself needs none
                name = reward.manager.name
        found[f"{SCORED}scorer of {source}"] = name
    return found


def _title(subject: Subject, evaluator: Evaluator) -> str:
    asked = subject.config.evaluation
    how = [f"{len(evaluator.prompts):,} held-out prompts", f"temperature {asked.temperature:g}"]
    how += [f"top_p {asked.top_p:g}"] if asked.top_p < 1 else []
    how += [f"top_k {asked.top_k}"] if asked.top_k else []
    limit = subject.config.rollout.max_response_tokens
    return f"{subject.title}: {', '.join(how)}, at most {limit:,} tokens"


def subject_of(request: EvalRequest) -> Subject:
    """Find the model and settle the recipe; reads no weights.

    Raises:
        WinnowError: there is no such run, checkpoint or model folder, the recipe is wrong, no data
            is named, or the folder for the answers is taken.
    """
    path = Path(request.model).expanduser()
    with refusals_told(path):
        kind = _kind_of(path, request.model)
    if kind == "checkpoint":
        checkpoint = Checkpoint(path, read_manifest(Checkpoint(path, 0)).step)
        verify(checkpoint)
        run = RunFolder(path.absolute().parent.parent)
        return _of_run(request, run, checkpoint, str(path / CONFIG))
    if kind == "model":
        return _of_model(request)
    folder = RunFolder.open(path)
    return _of_run(request, folder, find_checkpoint(folder.path, request.step), str(folder.config))


def _kind_of(path: Path, name: str) -> Literal["checkpoint", "model", "run"]:
    """Tell what lies there; a missing path is a model on the hub, or else taken for a run."""
    if (path / MANIFEST).is_file():
        return "checkpoint"
    if not path.exists():
        is_ours = name.endswith("/") or name.partition("/")[0] in ("runs", "evals")
        return "model" if may_be_hub_name(name) and not is_ours else "run"
    if (path / "config.json").is_file():
        return "model"
    if not (path / CONFIG).is_file():
        raise WinnowError(
            f"{path} is neither a run's folder (no config.yaml) nor a model's (no config.json); "
            "give runs/NAME, a Hugging Face folder or a hub name"
        )
    return "run"


def check_not_asked_twice(data: DataConfig, questions: Sequence[tuple[str, str]]) -> None:
    """Refuse a template around rows that hold its instruction already, as published files do.

    Args:
        questions: uid and rendered text of each prompt.

    Raises:
        DataError: names the row.
    """
    starts = {text.partition("{prompt}")[0].strip() for text in data.prompt_template.values()}
    for uid, text in questions:
        if any(len(start) >= _LONG and text.count(start) > 1 for start in starts):
            raise DataError(
                f"{uid}: the row holds the instruction of data.prompt_template already, so it "
                "would be given twice; add 'data.prompt_template={*:\"{prompt}\"}', or take the "
                "bare questions of winnow data prepare"
            )


def _of_run(request: EvalRequest, run: RunFolder, checkpoint: Checkpoint, recipe: str) -> Subject:
    if request.step is not None and request.step != checkpoint.step:
        raise CheckpointError(
            f"--step is {request.step}, but {checkpoint.path} is of step {checkpoint.step}; "
            "leave one of them out"
        )
    overrides = request.overrides
    if request.recipe is None:
        config = load_recipe(recipe, overrides)
    else:
        # The run says which model, the recipe how to ask it.
        own = load_recipe(recipe, [o for o in overrides if _is_of_model(o)])
        config = _recipe(request.recipe, [o for o in overrides if not _is_of_model(o)])
        config = config.model_copy(update={"model": own.model})
    require_trust(config, overrides, run.path, "model.trust_remote_code=true")
    name = f"checkpoint-{checkpoint.step}"
    answers, report = run.evaluations / f"{name}.parquet", run.evaluations / f"{name}.json"
    if request.out is not None or not run.config.is_file():
        answers, report = _in_folder(request.out or str(free_path(_FOLDERS, name)))
    elif answers.exists() or report.exists():
        raise WinnowError(
            f"{answers} holds an evaluation of this checkpoint already; give --out FOLDER, or "
            "delete it and the .json beside it"
        )
    title = f"{run.name}, step {checkpoint.step}"
    asked = _asking(request, config)
    return Subject(title, str(checkpoint.model), asked, checkpoint.step, answers, report)


def _of_model(request: EvalRequest) -> Subject:
    if request.step is not None:
        raise ConfigError(
            f"--step is {request.step}, but {request.model} is a model, not a run; leave it out"
        )
    config = _recipe(request.recipe or DEFAULT_RECIPE, request.overrides)
    model = config.model.model_copy(update={"path": request.model})
    config = _asking(request, config.model_copy(update={"model": model}))
    if request.out is None:
        name = Path(request.model).expanduser().absolute().name
        answers, report = _in_folder(str(free_path(_FOLDERS, name)))
    else:
        answers, report = _in_folder(request.out)
    return Subject(request.model, request.model, config, 0, answers, report)


def _recipe(name: str, overrides: Sequence[str]) -> Config:
    """Resolve a recipe without the rules across sections: most of them are about training."""
    return resolve_recipe(evaluation_recipe(name), overrides)


def _asking(request: EvalRequest, config: Config) -> Config:
    """Settle the data of the command line, and room for the answers that are asked for."""
    data = config.data
    if request.data:
        data = data.model_copy(update={"eval_files": request.data})
    if not data.eval_files and isinstance(data.task, NoTask):
        raise DataError("no held-out prompts: give --data FILE, data.eval_files=[FILE] or a task")
    known = config.evaluation.data_set
    missing = [f for f in data.eval_files if "://" not in f and not Path(f).expanduser().exists()]
    if known is not None and missing and not request.data:
        raise DataError(
            f"{missing[0]}: no such file; get it by `winnow data prepare {known}`, or give "
            "--data FILE"
        )
    limit = config.evaluation.max_response_tokens or config.rollout.max_response_tokens
    rollout = config.rollout.model_copy(update={"max_response_tokens": limit})
    return config.model_copy(update={"data": data, "rollout": rollout})


def _in_folder(out: str) -> tuple[Path, Path]:
    folder = Path(out).expanduser()
    if folder.is_file():
        raise WinnowError(f"--out {out} is a file; name a folder")
    taken = [folder / name for name in (ANSWERS, REPORT) if (folder / name).exists()]
    if taken:
        raise WinnowError(f"--out {out} holds an evaluation already; name another folder")
    return folder / ANSWERS, folder / REPORT


def _is_of_model(override: str) -> bool:
    return override.lstrip("+~").startswith(("model.", "model/", "model="))
