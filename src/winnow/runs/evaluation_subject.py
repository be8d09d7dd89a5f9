"""What `winnow eval` is asked to evaluate: a run, a checkpoint of one, or any model; and by what.

A run brings its recipe along, which says how its model is asked; any other model is asked as a
recipe for evaluation says. Where the answers go is decided here, too, before anything is loaded.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from winnow.config.data import DataConfig, NoTask
from winnow.config.files import evaluation_recipe
from winnow.config.load import load_recipe, resolve_recipe
from winnow.config.root import Config
from winnow.errors import CheckpointError, ConfigError, DataError, WinnowError
from winnow.observe.files import refusals_told
from winnow.observe.run_folder import RunFolder
from winnow.runs.checkpoint import (
    CONFIG,
    MANIFEST,
    Checkpoint,
    find_checkpoint,
    read_manifest,
    verify,
)
from winnow.runs.trust import require_trust

ANSWERS, REPORT = "answers.parquet", "report.json"
SCORED = "reward: "
"""Before the settings in a report that say what scored the answers."""
DEFAULT_RECIPE = "default"
_FOLDERS = Path("evals")
"""Where evaluations of models go that belong to no run."""
_LONG = 20
"""Characters from which on the words of a template are an instruction."""


@dataclass(frozen=True)
class EvalRequest:
    """The words of `winnow eval`."""

    model: str
    """A run's folder, a checkpoint's, a model's, or a hub name."""
    overrides: tuple[str, ...] = ()
    data: tuple[str, ...] = ()
    """Files, over the recipe's."""
    recipe: str | None = None
    out: str | None = None
    """Folder of the answers and figures."""
    step: int | None = None
    """Of a run's checkpoint; None is the last."""


@dataclass(frozen=True)
class Subject:
    """A model, how to ask it, and where the answers go."""

    title: str
    model: str
    """Folder or hub name."""
    config: Config
    step: int
    """Of a run's checkpoint, else 0."""
    answers: Path
    report: Path


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
    """What lies there; what is missing is a model on the hub, or else taken for a run."""
    if (path / MANIFEST).is_file():
        return "checkpoint"
    if not path.exists():
        return "model" if _may_be_hub_name(name) else "run"
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
        questions: uid and text of prompts as rendered.

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
        # The model is the run's affair, how to ask it the recipe's.
        own = load_recipe(recipe, [o for o in overrides if _is_of_model(o)])
        config = _recipe(request.recipe, [o for o in overrides if not _is_of_model(o)])
        config = config.model_copy(update={"model": own.model})
    require_trust(config, overrides, run.path, "model.trust_remote_code=true")
    name = f"checkpoint-{checkpoint.step}"
    answers, report = run.evaluations / f"{name}.parquet", run.evaluations / f"{name}.json"
    if request.out is not None or not run.config.is_file():
        answers, report = _in_folder(request.out or str(_free_name(name)))
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
        answers, report = _in_folder(str(_free_name(name)))
    else:
        answers, report = _in_folder(request.out)
    return Subject(request.model, request.model, config, 0, answers, report)


def _recipe(name: str, overrides: Sequence[str]) -> Config:
    """Without the rules across sections: most of them are about training."""
    return resolve_recipe(evaluation_recipe(name), overrides)


def _asking(request: EvalRequest, config: Config) -> Config:
    """With the data of the command line, and room for the answers that are asked for."""
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


def _free_name(model: str) -> Path:
    stem = f"{model}-{datetime.datetime.now():%Y%m%d-%H%M%S}"
    path, number = _FOLDERS / stem, 1
    while path.exists():  # two evaluations within a second
        number += 1
        path = _FOLDERS / f"{stem}-{number}"
    return path


def _is_of_model(override: str) -> bool:
    return override.lstrip("+~").startswith(("model.", "model/", "model="))


def _may_be_hub_name(name: str) -> bool:
    """`name` or `owner/name`; a path into a folder that is there is none."""
    if name.startswith(("/", ".", "~")) or name.count("/") > 1 or name.endswith("/"):
        return False
    owner, slash, _ = name.partition("/")
    return not (slash and (Path(owner).is_dir() or owner in ("runs", "evals")))
