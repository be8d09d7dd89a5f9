"""`winnow eval`: find the model, settle how it is asked, ask, score, write and show.

A run brings its recipe along, which says how its model is asked; any other model is asked as a
recipe for evaluation says. Where the answers go is decided before anything is loaded. Ctrl-C or
SIGTERM ends it with nothing written: answers that are finished first are the short ones, so
figures of a part would flatter.

A run's kind of engine writes the answers, on this machine: the embedded one, or vLLM, which is
started with the model's folder. Servers are run by others. Their weights are compared
with the model's, and never changed, as a run may be training with them.
"""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from winnow.builders.engines import (
    adapter_alone,
    check_engine,
    engine_of,
    has_own_weights,
    uses_device,
)
from winnow.builders.processes import worker_processes
from winnow.builders.run import make_evaluator, use_machine
from winnow.builders.topology import placed_rewards
from winnow.checkpoints.checkpoint import (
    CONFIG,
    MANIFEST,
    Checkpoint,
    find_checkpoint,
    verify,
)
from winnow.checkpoints.strangers import require_trust
from winnow.commands.engine_check import Witness
from winnow.config.data import DataConfig, NoTask
from winnow.config.files import evaluation_recipe
from winnow.config.judge import EngineJudge, NoJudge, NoRewardModel
from winnow.config.load import load_recipe, resolve_recipe
from winnow.config.model import LoraAdapter, ModelConfig
from winnow.config.reward import RewardConfig
from winnow.config.roles import Roles
from winnow.config.rollout import HttpEngineConfig, TorchEngineConfig, VllmEngineConfig
from winnow.config.root import Config
from winnow.config.trainer import LocalCluster, SyncMode, WholeModels, WithPolicy
from winnow.data.loader import evaluation_prompts
from winnow.data.published import without_instruction
from winnow.data.sources import read_rows
from winnow.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    ModelError,
    PublicationError,
    RewardError,
    WinnowError,
)
from winnow.evaluation.evaluator import Evaluated, Evaluator
from winnow.evaluation.report import (
    ANSWERS,
    REPORT,
    SCORED,
    Report,
    print_report,
    watched,
)
from winnow.http.client import RemoteError
from winnow.models.fetch import is_remote, may_be_hub_name
from winnow.models.folders import ADAPTER_CONFIG
from winnow.observe.files import RunFolder, explain_disk_errors, free_path, write_atomic
from winnow.ranks.models import LoadedPolicy, load_policy
from winnow.rewards.routing import Router
from winnow.rollout.engine import Engine, members_of
from winnow.rollout.http.engine import HttpEngine
from winnow.rollout.weights import WeightUpdate
from winnow.run.shutdown import ShutdownSignal, Stopped
from winnow.version import __version__

DEFAULT_RECIPE = "default"
_FOLDERS = Path("evals")
"""Folder of the evaluations of models that belong to no run."""
_LONG = 20
"""Characters from which on the words of a template are an instruction."""
_OF_RUNS = "model", "rollout/engine", "rollout.engine"
"""Settings that a run brings along although a recipe says how it is asked."""
_ENGINE = ("rollout.engine.",)
_NO_PROMPTS = "no held-out prompts: give --data FILE, data.eval_files=[FILE] or a task"


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
    trusts: bool = False
    """The user trusts the run's author."""


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
    note: str = ""
    """A line for the user, shown before the first answer."""


class _OtherWeights(ConfigError):
    """Servers were given other weights while they wrote."""


def run_evaluation(request: EvalRequest, console: Console) -> Report:
    """Evaluate a model, write answers and figures, and print the figures.

    Raises:
        WinnowError: no such run, checkpoint or model, or nothing to evaluate on.
        Stopped: a signal ended it; nothing of it is left.
    """
    stop = ShutdownSignal(speaks=False)
    with stop.listening():
        subject = subject_of(request)
        folder = subject.answers.parent
        had_folder = folder.exists()
        try:
            return _evaluation(subject, console, stop)
        except (KeyboardInterrupt, Stopped, _OtherWeights):
            for file in (subject.answers, subject.report):
                file.unlink(missing_ok=True)
            if not had_folder and folder.exists():
                folder.rmdir()
            raise
        except RewardError as error:
            if not subject.answers.exists():
                raise
            raise RewardError(f"{error}; the answers are kept in {subject.answers}") from error


def _evaluation(subject: Subject, console: Console, stop: ShutdownSignal) -> Report:
    began = time.monotonic()
    evaluated, evaluator = _ask(subject, console, stop)
    report = Report.of(evaluated)
    about = _about(subject, evaluator, time.monotonic() - began)
    write_atomic(subject.report, report.as_json(about))
    print_report(
        report, console, {each: _rule(subject.config.reward, each) for each in report.sources}
    )
    if evaluator.filtered:
        console.print(
            f"{evaluator.filtered:,} held-out rows are left out: longer than "
            f"data.max_prompt_tokens={subject.config.data.max_prompt_tokens}",
            markup=False,
        )
    for line in (f"answers  {subject.answers}", f"figures  {subject.report}"):
        console.print(Text(line), soft_wrap=True)
    return report


def _ask(subject: Subject, console: Console, stop: ShutdownSignal) -> tuple[Evaluated, Evaluator]:
    config = subject.config
    check_engine(config)
    holds_none, roles = _holds_no_weights(config), Roles(config)
    device = use_machine(config, not holds_none or uses_device(config, roles))
    with contextlib.ExitStack() as stack:
        try:
            policy = load_policy(config, subject.model, device, hollow=holds_none)
            start_workers = stack.enter_context(worker_processes(config, roles, policy, None))
            engine = engine_of(config, policy, start_workers())
            rewards = placed_rewards(config, roles, policy, start_workers, training=False)
            stack.callback(rewards.close)
            held_out = evaluation_prompts(config.data, policy.tokenizer)
            evaluator = make_evaluator(
                config, policy, engine, lambda _: subject.answers, rewards, held_out
            )
        except ModelError as error:
            if config.evaluation.max_response_tokens is None:
                raise
            # The limit that does not fit was set by this key.
            limit = "evaluation.max_response_tokens"
            raise ModelError(str(error).replace("rollout.max_response_tokens", limit)) from error
        if not evaluator.prompts:
            raise DataError(_NO_PROMPTS)
        _check_template_once(config.data, evaluator)
        console.print(Text(_title(subject, evaluator), style="bold"), soft_wrap=True)
        for line in (subject.note, *(f"Data: {line}" for line in held_out.layouts)):
            if line:
                console.print(Text(line), soft_wrap=True)

        async def ask() -> Evaluated:
            try:
                named = await _names_of_weights(engine)
                await _settle_weights(subject, policy, engine)
                evaluated = await watched(evaluator, subject.step, console, config.observe.console)
                _check_same_weights(named, await _names_of_weights(engine))
                return evaluated
            finally:
                await engine.close()

        return stop.run(ask()), evaluator


def _holds_no_weights(config: Config) -> bool:
    """Return whether the engine alone has the model: vLLM, unless an adapter is to be merged."""
    is_vllm = isinstance(config.rollout.engine, VllmEngineConfig)
    return is_vllm and not isinstance(config.model.adapter, LoraAdapter)


async def _settle_weights(subject: Subject, policy: LoadedPolicy, engine: Engine) -> None:
    """Tell the engine the version; give vLLM an adapter, and compare what servers hold.

    Raises:
        ConfigError: servers hold other weights than the model.
        PublicationError: vLLM did not take them.
    """
    config, step = subject.config, subject.step
    if not has_own_weights(config, Roles(config)) or _holds_no_weights(config):
        await engine.load_weights(WeightUpdate(step))
        return
    is_http = isinstance(config.rollout.engine, HttpEngineConfig)
    witness = Witness.of(config, policy, policy.model)
    is_alone = adapter_alone(config) is not None
    tensors = None if is_http else witness.strategy.export_weights(adapter_only=is_alone)
    await engine.load_weights(WeightUpdate(step, tensors))
    try:
        await witness.canary.check(witness.expected, step, members_of(engine))
    except PublicationError as error:
        if not is_http:
            raise
        raise ConfigError(
            f"{error}; start the server with --model {Path(subject.model).absolute()}, or choose "
            "rollout/engine=torch"
        ) from None


async def _names_of_weights(engine: Engine) -> dict[str, str]:
    """Ask servers for the names of their weights, by address; no other engine has any."""
    names = dict[str, str]()
    for url, server in engine.servers.items() if isinstance(engine, HttpEngine) else ():
        with contextlib.suppress(RemoteError):  # one that reports none takes no new ones either
            names[url] = await server.version()
    return names


def _check_same_weights(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    for url in before.keys() & after.keys():
        if before[url] != after[url]:
            raise _OtherWeights(
                f"{url} was given other weights ({after[url]}) while it wrote, perhaps by a run "
                "that trains with it; the answers are not kept. Ask a server that nobody else uses"
            )


def _about(subject: Subject, evaluator: Evaluator, seconds: float) -> dict[str, Any]:
    config = subject.config
    section = config.evaluation
    return {
        "title": subject.title,
        "model": subject.model,
        "step": subject.step,
        "winnow": __version__,
        "engine": config.rollout.engine.name,
        "data": list(config.data.eval_files) or config.data.task.name,
        "settings": {
            "n": section.n,
            "temperature": section.temperature,
            "top_p": section.top_p,
            "top_k": section.top_k,
            "max_response_tokens": config.rollout.max_response_tokens,
            "seed": config.run.seed,
            "chat_template": config.data.chat_template,
            "chat_template_kwargs": config.data.chat_template_kwargs,
            "system_prompt": config.data.system_prompt,
            "prompt_template": config.data.prompt_template,
            # For comparisons to see a change of them.
            f"{SCORED}manager": config.reward.manager.name,
            f"{SCORED}judge": config.reward.judge.name,
            **{
                f"{SCORED}scorer of {source}": _scorer(config.reward, source)
                for source in sorted({prompt.data_source for prompt in evaluator.prompts})
            },
        },
        "rows_left_out": evaluator.filtered,
        "generated_tokens": evaluator.progress.tokens,
        "seconds": round(seconds, 3),
    }


def _scorer(reward: RewardConfig, source: str) -> str:
    if reward.function.path is not None:
        return f"{reward.function.path}:{reward.function.name}"
    try:
        return Router(reward.scorers).scorer(source).name
    except RewardError:  # a manager that scores by itself needs none
        return reward.manager.name


def _rule(reward: RewardConfig, source: str) -> str:
    """Say what a scorer of Winnow's wants: the first line of its documentation."""
    with contextlib.suppress(RewardError):
        scorer = None if reward.function.path else Router(reward.scorers).scorer(source)
        if scorer is not None:
            summary, *_ = (scorer.score.__doc__ or "").splitlines()
            return f"{scorer.name}: {summary}"
    return ""


def _title(subject: Subject, evaluator: Evaluator) -> str:
    sampling = subject.config.evaluation
    how = [f"{len(evaluator.prompts):,} held-out prompts", f"temperature {sampling.temperature:g}"]
    how += [f"top_p {sampling.top_p:g}"] if sampling.top_p < 1 else []
    how += [f"top_k {sampling.top_k}"] if sampling.top_k else []
    limit = subject.config.rollout.max_response_tokens
    return f"{subject.title}: {', '.join(how)}, at most {limit:,} tokens"


def _check_template_once(data: DataConfig, evaluator: Evaluator) -> None:
    """Refuse a template around rows that hold its instruction already, as published files do."""
    starts = {text.partition("{prompt}")[0].strip() for text in data.prompt_template.values()}
    for prompt in evaluator.prompts:
        if any(len(start) >= _LONG and prompt.text.count(start) > 1 for start in starts):
            raise DataError(
                f"{prompt.uid}: the row holds the instruction of data.prompt_template already, so "
                "it would be given twice; add 'data.prompt_template={*:\"{prompt}\"}', or take "
                "the bare questions of winnow data prepare"
            )


def subject_of(request: EvalRequest) -> Subject:
    """Find the model and settle the recipe; reads no weights.

    Raises:
        WinnowError: there is no such run, checkpoint or model folder, the recipe is wrong, no data
            is named, or the folder for the answers is taken.
    """
    path = Path(request.model).expanduser()
    with explain_disk_errors(path):
        is_checkpoint, is_run = (path / MANIFEST).is_file(), _is_run(path, request.model)
    if is_checkpoint:
        checkpoint = Checkpoint(path, verify(Checkpoint(path, 0)).step)
        if request.step not in (None, checkpoint.step):
            raise CheckpointError(
                f"--step is {request.step}, but {path} is of step {checkpoint.step}; leave one of "
                "them out"
            )
        return _of_run(request, RunFolder(path.absolute().parent.parent), checkpoint, path)
    if is_run:
        run = RunFolder.open(path)
        return _of_run(request, run, find_checkpoint(run.path, request.step), path)
    if request.step is not None:
        raise ConfigError(
            f"--step is {request.step}, but {request.model} is a model, not a run; leave it out"
        )
    config = _recipe(request.recipe or DEFAULT_RECIPE, request.overrides)
    model = config.model.model_copy(update={"path": request.model})
    source = model.source or request.model
    config, _ = _writing(_asking(request, config, model), True)
    config, note = (config, "") if request.recipe else _as_recipes_ask(config)
    answers, report = _places(request.out, None, path.absolute().name)
    return Subject(source, source, config, 0, answers, report, note)


def _as_recipes_ask(config: Config) -> tuple[Config, str]:
    """Settle the templates of the default recipe; returns what to say of them.

    None is put around rows that hold an instruction, and a template of the user's replaces all.
    """
    data, default = config.data, _recipe(DEFAULT_RECIPE, ()).data.prompt_template.items()
    custom = dict(data.prompt_template.items() - default)
    rows = [] if custom else read_rows(data.eval_files, data)
    instructed = {row.data_source.lower() for row in rows if without_instruction(row)[1]}
    templates = custom or {name: text for name, text in default if name.lower() not in instructed}
    data = data.model_copy(update={"prompt_template": templates})
    names = {name.lower() for name in templates}
    sources = dict.fromkeys(row.data_source for row in rows if row.data_source.lower() in names)
    note = "bare questions, asked as Winnow's recipes ask them (data.prompt_template)"
    note = f"{', '.join(sources)}: {note}" if sources else ""
    return config.model_copy(update={"data": data}), note


def _is_run(path: Path, name: str) -> bool:
    """Tell a run from a model; a missing path is a model on the hub, or else taken for a run."""
    if is_remote(name):
        return False
    if not path.exists():
        is_ours = name.endswith("/") or name.partition("/")[0] in ("runs", "evals")
        return is_ours or not may_be_hub_name(name)
    if any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return False
    if not (path / CONFIG).is_file():
        raise WinnowError(
            f"{path} is neither a run's folder (no config.yaml) nor a model's (no config.json); "
            "give runs/NAME, a Hugging Face folder or a hub name"
        )
    return True


def _of_run(request: EvalRequest, run: RunFolder, checkpoint: Checkpoint, folder: Path) -> Subject:
    """Settle the sampling of a run's model by the recipe in `folder`."""
    recipe, overrides = str(folder / CONFIG), request.overrides
    asks_alone = ["rollout.routing_replay=false"]  # of engines, too, that cannot return routes
    if request.recipe is None:
        config = base = load_recipe(recipe, [*overrides, *asks_alone])
    else:
        # The run says which model and engine, the recipe how to ask it.
        base = load_recipe(recipe, [*(o for o in overrides if _is_of(o, _OF_RUNS)), *asks_alone])
        config = _recipe(request.recipe, [o for o in overrides if not _is_of(o, _OF_RUNS)])
        rollout = config.rollout.model_copy(update={"engine": base.rollout.engine})
        config = config.model_copy(update={"rollout": rollout})
    has_servers = any(_is_of(override, _OF_RUNS[1:]) for override in overrides)
    config, note = _writing(_asking(request, config, base.model), has_servers)
    prefixes = ("rollout.", "data.task.", "reward.") if request.recipe is None else _ENGINE
    require_trust(run.path, config, overrides, request.trusts, ("model.", *prefixes))
    name = f"checkpoint-{checkpoint.step}"
    answers, report = _places(request.out, run if run.config.is_file() else None, name)
    title = f"{run.name}, step {checkpoint.step}"
    return Subject(title, str(checkpoint.model), config, checkpoint.step, answers, report, note)


def _recipe(name: str, overrides: Sequence[str]) -> Config:
    """Resolve a recipe without the rules across sections: most of them are about training."""
    return resolve_recipe(evaluation_recipe(name), overrides)


def _asking(request: EvalRequest, config: Config, model: ModelConfig) -> Config:
    """Settle model and data, room for the answers that are asked for, and that all are kept."""
    files = request.data or config.data.eval_files
    if not files and isinstance(config.data.task, NoTask):
        raise DataError(_NO_PROMPTS)
    data_set = config.evaluation.data_set
    missing = [f for f in files if "://" not in f and not Path(f).expanduser().exists()]
    if data_set is not None and missing and not request.data:
        raise DataError(
            f"{missing[0]}: no such file; get it by `winnow data prepare {data_set}`, or give "
            "--data FILE"
        )
    limit = config.evaluation.max_response_tokens or config.rollout.max_response_tokens
    return config.model_copy(
        update={
            "model": model,
            "data": config.data.model_copy(update={"eval_files": files}),
            "rollout": config.rollout.model_copy(update={"max_response_tokens": limit}),
            "observe": config.observe.model_copy(update={"rollout_text_groups": sys.maxsize}),
        }
    )


def _writing(config: Config, has_servers: bool) -> tuple[Config, str]:
    """Settle the engine, and leave out all other processes of a run; returns what to say of it.

    Args:
        has_servers: the user has named servers for this evaluation.
    """
    engine, note = config.rollout.engine, ""
    if isinstance(engine, TorchEngineConfig):
        engine = engine.model_copy(update={"processes": 0})
    elif isinstance(engine, VllmEngineConfig):
        engine = engine.model_copy(update={"sleep": False})
    elif isinstance(engine, HttpEngineConfig) and not has_servers:
        engine = TorchEngineConfig()
        note = (
            "The run's servers are not asked, as they may hold other weights: the torch engine "
            "writes (servers started with this checkpoint: rollout.engine.url=URL)"
        )
    sections: dict[str, dict[str, Any]] = {
        "rollout": {"engine": engine},
        "trainer": {"mode": SyncMode(), "strategy": WholeModels()},
        "reward": {"processes": 0},
        "reference": {"strategy": WithPolicy()},
        "critic": {"strategy": WithPolicy()},
    }
    if not getattr(config.reward.model, "in_evaluation", True):
        sections["reward"]["model"] = NoRewardModel()
    judge = config.reward.judge
    if isinstance(judge, EngineJudge) and not judge.in_evaluation:
        sections["reward"]["judge"] = NoJudge()
    settled = {
        name: getattr(config, name).model_copy(update=update) for name, update in sections.items()
    }
    return config.model_copy(update={**settled, "cluster": LocalCluster()}), note


def _places(out: str | None, run: RunFolder | None, name: str) -> tuple[Path, Path]:
    """Say where answers and report go: to `--out`, among a run's evaluations, or to evals/."""
    if out is None and run is not None:
        answers, report = (run.evaluations / f"{name}{kind}" for kind in (".parquet", ".json"))
    else:
        folder = free_path(_FOLDERS, name) if out is None else Path(out).expanduser()
        answers, report = folder / ANSWERS, folder / REPORT
    for file in (answers.parent, answers, report):
        if file.is_file():
            raise WinnowError(f"{file} is there already; name another folder with --out")
    return answers, report


def _is_of(override: str, keys: Sequence[str]) -> bool:
    """Return whether an override is of one of these keys, or below it."""
    return re.match(rf"[+~]*({'|'.join(map(re.escape, keys))})([./=]|$)", override) is not None
