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
    check_engine_installed,
    driver_uses_device,
    has_separate_weights,
    make_engine,
    published_adapter,
)
from winnow.builders.environments import (
    environment_processes,
    first_messages_of,
    tool_schemas,
    with_conversations,
)
from winnow.builders.processes import worker_processes
from winnow.builders.run import make_evaluator, prepare_device
from winnow.builders.topology import build_rewards
from winnow.checkpoints.checkpoint import CONFIG, MANIFEST, Checkpoint, find_checkpoint, verify
from winnow.checkpoints.recipe_changes import with_settings
from winnow.checkpoints.strangers import require_trust
from winnow.commands.engine_check import TrainerModel
from winnow.config.base import Section
from winnow.config.data import DataConfig, NoTask
from winnow.config.files import resolve_evaluation_recipe
from winnow.config.judge import EngineJudge, NoJudge, NoRewardModel
from winnow.config.load import load_recipe, parse_recipe
from winnow.config.model import LoraAdapter, ModelConfig
from winnow.config.reward import RewardConfig
from winnow.config.roles import Roles
from winnow.config.rollout import HttpEngineConfig, TorchEngineConfig, VllmEngineConfig
from winnow.config.root import Config
from winnow.config.trainer import LocalCluster, SyncMode, WholeModels, WithPolicy
from winnow.data.loader import evaluation_prompts
from winnow.data.published import strip_instructions
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
from winnow.evaluation.evaluator import EvalResult, Evaluator
from winnow.evaluation.report import (
    ANSWERS,
    REPORT,
    SCORED,
    Report,
    print_report,
    run_with_progress,
)
from winnow.http.client import RemoteError
from winnow.models.fetch import is_remote, may_be_hub_name
from winnow.models.folders import ADAPTER_CONFIG
from winnow.models.gguf import DEQUANTISED
from winnow.observe.files import RunFolder, explain_disk_errors, unused_path, write_atomic
from winnow.ranks.models import LoadedPolicy, load_policy
from winnow.rewards.routing import Router
from winnow.rollout.engine import Engine, engines_by_name
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
_SAMPLING = "n", "temperature", "top_p", "top_k"
_PROMPTING = "chat_template", "chat_template_kwargs", "system_prompt", "prompt_template"
"""Settings of `evaluation` and of `data` that a report has."""
_NO_PROMPTS = "no held-out prompts; pass --data FILE, or set data.eval_files=[FILE] or a task"


@dataclass(frozen=True)
class EvalRequest:
    """Arguments of `winnow eval`."""

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
class EvalSetup:
    """A model to evaluate, its sampling settings, and the output files."""

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


class _WeightsChangedError(ConfigError):
    """Servers received other weights during an evaluation."""


def run_evaluation(
    request: EvalRequest, console: Console, stop: ShutdownSignal | None = None
) -> Report:
    """Evaluate a model, write answers and figures, and print the figures.

    Args:
        stop: ends it from another thread; None handles the signals of this one.

    Raises:
        WinnowError: no such run, checkpoint or model, or nothing to evaluate on.
        Stopped: a signal ended it; nothing of it is left.
    """
    stop = stop or ShutdownSignal(announces=False)
    with stop.listening():
        setup = resolve_setup(request)
        folder = setup.answers.parent
        had_folder = folder.exists()
        try:
            return _evaluate(setup, console, stop)
        except (KeyboardInterrupt, Stopped, _WeightsChangedError):
            for file in (setup.answers, setup.report):
                file.unlink(missing_ok=True)
            if not had_folder and folder.exists():
                folder.rmdir()
            raise
        except RewardError as error:
            if not setup.answers.exists():
                raise
            raise RewardError(f"{error}; the answers are kept in {setup.answers}") from error


def _evaluate(setup: EvalSetup, console: Console, stop: ShutdownSignal) -> Report:
    began = time.monotonic()
    evaluated, evaluator, policy = _generate_answers(setup, console, stop)
    report = Report.from_result(evaluated)
    about = _report_header(setup, evaluator, time.monotonic() - began)
    about |= {DEQUANTISED: types} if (types := policy.dequantised_from) else {}
    write_atomic(setup.report, report.as_json(about))
    print_report(
        report,
        console,
        {each: _scorer_summary(setup.config.reward, each) for each in report.sources},
    )
    if evaluator.filtered:
        console.print(
            f"{evaluator.filtered:,} held-out rows skipped: longer than "
            f"data.max_prompt_tokens={setup.config.data.max_prompt_tokens}",
            markup=False,
        )
    for line in (f"answers  {setup.answers}", f"figures  {setup.report}"):
        console.print(Text(line), soft_wrap=True)
    return report


def _generate_answers(
    setup: EvalSetup, console: Console, stop: ShutdownSignal
) -> tuple[EvalResult, Evaluator, LoadedPolicy]:
    config = setup.config
    section, roles = config.rollout.engine, Roles(config)
    check_engine_installed(config.cluster, section, config.reward.judge)
    holds_none = _holds_no_weights(section, config.model.adapter)
    uses_device = driver_uses_device(section, config.reward, config.cluster, roles)
    device = prepare_device(config.run, config.model.cache_dir, not holds_none or uses_device)
    with contextlib.ExitStack() as stack:
        try:
            policy = load_policy(config, setup.model, device, hollow=holds_none)
            environments = stack.enter_context(environment_processes(config, policy.tokenizer))
            start_workers = stack.enter_context(worker_processes(config, roles, policy, None))
            engine = make_engine(config, policy, start_workers(), trains=False)
            rewards = build_rewards(config, roles, policy, start_workers, training=False)
            stack.callback(rewards.close)
            begin = first_messages_of(config.environment, environments, console.print)
            tools, vision = tool_schemas(config.environment), policy.vision
            held_out = evaluation_prompts(config.data, policy.tokenizer, tools, begin, vision)
            conversing = with_conversations(config, policy, engine, environments)
            evaluator = make_evaluator(
                config, policy, conversing, lambda _: setup.answers, rewards, held_out
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
        sampling, longest = config.evaluation, config.rollout.max_response_tokens
        how = [f"{len(evaluator.prompts):,} held-out prompts"]
        how.append(f"temperature {sampling.temperature:g}")
        how += [f"top_p {sampling.top_p:g}"] if sampling.top_p < 1 else []
        how += [f"top_k {sampling.top_k}"] if sampling.top_k else []
        how.append(f"at most {longest:,} tokens")
        how += [f"weights dequantised from {types}"] if (types := policy.dequantised_from) else []
        heading = f"{setup.title}: {', '.join(how)}"
        console.print(Text(heading, style="bold"), soft_wrap=True)
        for line in (setup.note, *(f"Data: {line}" for line in held_out.layouts)):
            if line:
                console.print(Text(line), soft_wrap=True)

        async def ask() -> EvalResult:
            try:
                named = await _weight_versions(engine)
                await _set_weights(setup, policy, engine)
                evaluated = await run_with_progress(
                    evaluator, setup.step, console, config.observe.console
                )
                _check_same_weights(named, await _weight_versions(engine))
                return evaluated
            finally:
                await conversing.close()

        return stop.run(ask()), evaluator, policy


def _holds_no_weights(engine: Section, adapter: Section) -> bool:
    """Return whether only the engine holds the model: vLLM, unless an adapter is merged."""
    return isinstance(engine, VllmEngineConfig) and not isinstance(adapter, LoraAdapter)


async def _set_weights(setup: EvalSetup, policy: LoadedPolicy, engine: Engine) -> None:
    """Set the engine's version; load an adapter into vLLM, and compare the weights of servers.

    Raises:
        ConfigError: servers hold other weights than the model.
        PublicationError: vLLM did not take them.
    """
    config, step = setup.config, setup.step
    section, adapter = config.rollout.engine, config.model.adapter
    holds_none = _holds_no_weights(section, adapter)
    if holds_none or not has_separate_weights(section, Roles(config)):
        await engine.load_weights(WeightUpdate(step))
        return
    is_http = isinstance(section, HttpEngineConfig)
    trainer_model = TrainerModel.of(config, policy, policy.model)
    is_alone = published_adapter(adapter) is not None
    tensors = None if is_http else trainer_model.strategy.export_weights(adapter_only=is_alone)
    await engine.load_weights(WeightUpdate(step, tensors))
    try:
        await trainer_model.canary.check(trainer_model.expected, step, engines_by_name(engine))
    except PublicationError as error:
        if not is_http:
            raise
        raise ConfigError(
            f"{error}; start the server with --model {Path(setup.model).absolute()}, or choose "
            "rollout/engine=torch"
        ) from None


async def _weight_versions(engine: Engine) -> dict[str, str]:
    """Return the weight versions that servers report, by URL."""
    names = dict[str, str]()
    for url, server in engine.servers.items() if isinstance(engine, HttpEngine) else ():
        with contextlib.suppress(RemoteError):  # one that reports none takes no new ones either
            names[url] = await server.weight_version()
    return names


def _check_same_weights(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    for url in before.keys() & after.keys():
        if before[url] != after[url]:
            raise _WeightsChangedError(
                f"{url} received other weights ({after[url]}) during the evaluation, perhaps from "
                "a training run; the answers were discarded. Use a server that nothing else updates"
            )


def _report_header(setup: EvalSetup, evaluator: Evaluator, seconds: float) -> dict[str, Any]:
    config = setup.config
    return {
        "title": setup.title,
        "model": setup.model,
        "step": setup.step,
        "winnow": __version__,
        "engine": config.rollout.engine.name,
        "data": list(config.data.eval_files) or config.data.task.name,
        "settings": {
            **{name: getattr(config.evaluation, name) for name in _SAMPLING},
            "max_response_tokens": config.rollout.max_response_tokens,
            "seed": config.run.seed,
            **{name: getattr(config.data, name) for name in _PROMPTING},
            # For comparisons to see a change of them.
            f"{SCORED}manager": config.reward.manager.name,
            f"{SCORED}judge": config.reward.judge.name,
            **{
                f"{SCORED}scorer of {source}": _scorer_name(config.reward, source)
                for source in sorted({prompt.data_source for prompt in evaluator.prompts})
            },
        },
        "rows_left_out": evaluator.filtered,
        "generated_tokens": evaluator.progress.tokens,
        "seconds": round(seconds, 3),
    }


def _scorer_name(reward: RewardConfig, source: str) -> str:
    if reward.function.path is not None:
        return f"{reward.function.path}:{reward.function.name}"
    try:
        return Router(reward.scorers).scorer(source).name
    except RewardError:  # a manager that scores by itself needs none
        return reward.manager.name


def _scorer_summary(reward: RewardConfig, source: str) -> str:
    """Return the first line of a built-in scorer's docstring."""
    with contextlib.suppress(RewardError):
        scorer = None if reward.function.path else Router(reward.scorers).scorer(source)
        if scorer is not None:
            summary, *_ = (scorer.score.__doc__ or "").splitlines()
            return f"{scorer.name}: {summary}"
    return ""


def _check_template_once(data: DataConfig, evaluator: Evaluator) -> None:
    """Refuse a template for rows that already contain its instruction, as published files do."""
    starts = {text.partition("{prompt}")[0].strip() for text in data.prompt_template.values()}
    for prompt in evaluator.prompts:
        if any(len(start) >= _LONG and prompt.text.count(start) > 1 for start in starts):
            raise DataError(
                f"{prompt.uid}: the row already contains the instruction of data.prompt_template; "
                f"set 'data.prompt_template={{*:\"{{prompt}}\"}}', or use the bare questions of "
                "winnow data prepare"
            )


def resolve_setup(request: EvalRequest) -> EvalSetup:
    """Find the model and resolve the recipe, without reading weights.

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
                f"--step is {request.step}, but {path} is of step {checkpoint.step}; drop one of "
                "them"
            )
        return _run_setup(request, RunFolder(path.absolute().parent.parent), checkpoint, path)
    if is_run:
        run = RunFolder.open(path)
        return _run_setup(request, run, find_checkpoint(run.path, request.step), path)
    if request.step is not None:
        raise ConfigError(
            f"--step is {request.step}, but {request.model} is a model, not a run; drop --step"
        )
    config = _resolve_recipe(request.recipe or DEFAULT_RECIPE, request.overrides)
    model = config.model.model_copy(update={"path": request.model})
    source = model.source or request.model
    config, _ = _with_local_engine(_with_model_and_data(request, config, model), True)
    config, note = (config, "") if request.recipe else _with_default_templates(config)
    answers, report = _output_paths(request.out, None, path.absolute().name)
    return EvalSetup(source, source, config, 0, answers, report, note)


def _with_default_templates(config: Config) -> tuple[Config, str]:
    """Select templates of the default recipe; return them with a note for the user.

    None is put around rows that hold an instruction, and a template of the user's replaces all.
    """
    data, default = config.data, _resolve_recipe(DEFAULT_RECIPE, ()).data.prompt_template.items()
    custom = dict(data.prompt_template.items() - default)
    rows = [] if custom else read_rows(data.eval_files, data)
    instructed = {row.data_source.lower() for row in rows if strip_instructions(row)[1]}
    templates = custom or {name: text for name, text in default if name.lower() not in instructed}
    names = {name.lower() for name in templates}
    sources = dict.fromkeys(row.data_source for row in rows if row.data_source.lower() in names)
    note = "bare questions; applying the prompt template of Winnow's recipes (data.prompt_template)"
    note = f"{', '.join(sources)}: {note}" if sources else ""
    return with_settings(config, data={"prompt_template": templates}), note


def _is_run(path: Path, name: str) -> bool:
    """Distinguish a run from a model; a missing path is a hub model or else a run."""
    if is_remote(name):
        return False
    if not path.exists():
        is_ours = name.endswith("/") or name.partition("/")[0] in ("runs", "evals")
        return is_ours or not may_be_hub_name(name)
    if any((path / name).is_file() for name in ("config.json", ADAPTER_CONFIG)):
        return False
    if not (path / CONFIG).is_file():
        raise WinnowError(
            f"{path} is neither a run folder (no config.yaml) nor a model folder (no config.json); "
            "use runs/NAME, a Hugging Face folder or a hub name"
        )
    return True


def _run_setup(
    request: EvalRequest, run: RunFolder, checkpoint: Checkpoint, folder: Path
) -> EvalSetup:
    """Set up the evaluation of a run's model by the recipe in `folder`."""
    recipe, overrides = str(folder / CONFIG), request.overrides
    asks_alone = ["rollout.routing_replay=false"]  # of engines, too, that cannot return routes
    if request.recipe is None:
        config = base = load_recipe(recipe, [*overrides, *asks_alone])
    else:
        # The run says which model and engine, the recipe how to ask it.
        base = load_recipe(
            recipe, [*(o for o in overrides if _is_override_of(o, _OF_RUNS)), *asks_alone]
        )
        config = _resolve_recipe(
            request.recipe, [o for o in overrides if not _is_override_of(o, _OF_RUNS)]
        )
        config = with_settings(config, rollout={"engine": base.rollout.engine})
    has_servers = any(_is_override_of(override, _OF_RUNS[1:]) for override in overrides)
    config, note = _with_local_engine(
        _with_model_and_data(request, config, base.model), has_servers
    )
    prefixes = ("rollout.", "data.task.", "reward.") if request.recipe is None else _ENGINE
    require_trust(run.path, config, overrides, request.trusts, ("model.", *prefixes))
    name = f"checkpoint-{checkpoint.step}"
    answers, report = _output_paths(request.out, run if run.config.is_file() else None, name)
    title = f"{run.name}, step {checkpoint.step}"
    return EvalSetup(title, str(checkpoint.model), config, checkpoint.step, answers, report, note)


def _resolve_recipe(name: str, overrides: Sequence[str]) -> Config:
    """Resolve a recipe without cross-section rules, most of which concern training."""
    return parse_recipe(resolve_evaluation_recipe(name), overrides)


def _with_model_and_data(request: EvalRequest, config: Config, model: ModelConfig) -> Config:
    """Set model, data and response limit, and keep all answers."""
    files = request.data or config.data.eval_files
    if not files and isinstance(config.data.task, NoTask):
        raise DataError(_NO_PROMPTS)
    data_set = config.evaluation.data_set
    missing = [f for f in files if "://" not in f and not Path(f).expanduser().exists()]
    if data_set is not None and missing and not request.data:
        raise DataError(
            f"{missing[0]}: no such file; create it with `winnow data prepare {data_set}`, or pass "
            "--data FILE"
        )
    limit = config.evaluation.max_response_tokens or config.rollout.max_response_tokens
    return with_settings(
        config.model_copy(update={"model": model}),
        data={"eval_files": files},
        rollout={"max_response_tokens": limit},
        observe={"rollout_text_groups": sys.maxsize},
    )


def _with_local_engine(config: Config, has_servers: bool) -> tuple[Config, str]:
    """Select the engine, without other processes of a run; return a note for the user.

    Args:
        has_servers: the user has named servers for this evaluation.
    """
    engine, note, timeout_s = config.rollout.engine, "", config.cluster.start_timeout_s
    if isinstance(engine, TorchEngineConfig):
        engine = engine.model_copy(update={"processes": 0})
    elif isinstance(engine, VllmEngineConfig):
        engine = engine.model_copy(update={"sleep": False})
    elif isinstance(engine, HttpEngineConfig) and not has_servers:
        engine = TorchEngineConfig()
        note = (
            "Not using the run's servers, which may hold other weights: generating with the torch "
            "engine (for servers of this checkpoint, set rollout.engine.url=URL)"
        )
    reward: dict[str, Any] = {"processes": 0}
    if not getattr(config.reward.model, "in_evaluation", True):
        reward["model"] = NoRewardModel()
    judge = config.reward.judge
    if isinstance(judge, EngineJudge) and not judge.in_evaluation:
        reward["judge"] = NoJudge()
    others: dict[str, Any] = {"reward": reward}
    if "environment" in Roles(config):
        others["environment"] = {"processes": 0}
    config = with_settings(
        config.model_copy(update={"cluster": LocalCluster(start_timeout_s=timeout_s)}),
        rollout={"engine": engine},
        trainer={"mode": SyncMode(), "strategy": WholeModels()},
        reference={"strategy": WithPolicy()},
        critic={"strategy": WithPolicy()},
        **others,
    )
    return config, note


def _output_paths(out: str | None, run: RunFolder | None, name: str) -> tuple[Path, Path]:
    """Return the paths of answers and report: in `--out`, the run's eval/, or evals/."""
    if out is None and run is not None:
        answers, report = (run.evaluations / f"{name}{kind}" for kind in (".parquet", ".json"))
    else:
        folder = unused_path(_FOLDERS, name) if out is None else Path(out).expanduser()
        answers, report = folder / ANSWERS, folder / REPORT
    for file in (answers.parent, answers, report):
        if file.is_file():
            raise WinnowError(f"{file} already exists; choose another folder with --out")
    return answers, report


def _is_override_of(override: str, keys: Sequence[str]) -> bool:
    """Return whether an override sets one of these keys or a key below."""
    return re.match(rf"[+~]*({'|'.join(map(re.escape, keys))})([./=]|$)", override) is not None
