"""Builds the objects of a run from its recipe: this package alone names concrete classes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path

import torch

from winnow.builders.environments import agent_notes, tool_schemas
from winnow.builders.lockstep import lockstep_notes
from winnow.builders.placement import uses_gpu
from winnow.builders.topology import RunModels
from winnow.checkpoints.checkpoint import Manifest
from winnow.checkpoints.opening import code_hashes, user_code_files, user_code_settings
from winnow.checkpoints.run_state import RunState, Stateful
from winnow.config.base import Section
from winnow.config.data import DataConfig
from winnow.config.reward import UNROUTED, RewardConfig
from winnow.config.rollout import BandFilter, RolloutConfig, SamplingConfig, VarianceFilter
from winnow.config.root import Config, RunConfig
from winnow.config.rules import config_warnings
from winnow.config.trainer import TrainerConfig
from winnow.data.loader import PromptLoader, PromptSource, evaluation_prompts
from winnow.data.prompts import FirstMessages, PromptSet
from winnow.data.user_source import UserSampler
from winnow.errors import ConfigError
from winnow.evaluation.evaluator import Evaluator
from winnow.models.fetch import MODEL_CACHE
from winnow.observe.files import RunFolder
from winnow.observe.format import command_line
from winnow.observe.jsonl import MetricsLog
from winnow.observe.ledger import write_ledger
from winnow.observe.metrics import Timeline, no_timeline
from winnow.observe.profile import make_profiler
from winnow.observe.rollouts import RolloutGroup, choose_text_groups, write_rollouts
from winnow.observe.sinks import Sinks
from winnow.observe.trace import TimedScorer
from winnow.ranks.learner import kl_notes, needs_of
from winnow.ranks.models import LoadedPolicy, check_positions, use_deterministic_kernels
from winnow.rewards.rewards import Rewards
from winnow.rollout.engine import Engine, SamplingParams, engines_by_name
from winnow.run.loop import BaseRun, OnStep, PendingSteps, PromptBudget, Run
from winnow.run.shutdown import ShutdownSignal
from winnow.run.step_metrics import Throughput, example_lines, gpu_peak_tflops, signal_line
from winnow.sampling.accounting import StepGroups
from winnow.sampling.ledger import Ledger
from winnow.sampling.stream import Sampler
from winnow.user_code import PROGRAM

ASYNC_SCORE_LAG_TICKS = 16
"""Decode ticks; measured by benchmarks/deterministic.py."""


def prepare_device(run: RunConfig, cache_dir: str | None, holds_model: bool = True) -> torch.device:
    """Set threads, the cache of models and kernels, and choose the device of this process.

    Args:
        cache_dir: `model.cache_dir`.
        holds_model: False leaves all GPUs to other processes and returns the CPU.

    Raises:
        ConfigError: as for `uses_gpu`.
    """
    if cache_dir is not None:
        os.environ[MODEL_CACHE] = cache_dir
    if run.threads is not None:
        torch.set_num_threads(run.threads)
    if not (holds_model and uses_gpu(run.device)):
        return torch.device("cpu")
    if run.deterministic:
        use_deterministic_kernels()
    return torch.device("cuda")


def rollout_sampling(rollout: RolloutConfig, policy: LoadedPolicy) -> SamplingParams:
    """Make the sampling parameters of training answers."""
    options = rollout.model_dump(include={"temperature", "top_p", "top_k", "min_p", "stop"})
    return SamplingParams(rollout.max_response_tokens, stop_token_ids=policy.stop_ids, **options)


def choose_score_lag_ticks(
    lag: int | None, deterministic: bool, rewards: Rewards, data_sources: Iterable[str]
) -> int:
    """Return `sampling.score_lag_ticks`, or a value for the scorers where the recipe has none."""
    if lag is not None:
        return lag
    is_late = deterministic and rewards.takes_time(data_sources)
    return ASYNC_SCORE_LAG_TICKS if is_late else 0


def make_evaluator(
    config: Config,
    policy: LoadedPolicy,
    engine: Engine,
    file_of: Callable[[int], Path],
    rewards: Rewards,
    held_out: PromptSet,
) -> Evaluator:
    """Make the evaluator of held-out prompts, which are checked against model and scorers.

    Raises:
        ModelError: the longest prompt does not fit the model.
        RewardError: a data source has no scorer.
    """
    check_positions(config.data, config.sft, config.rollout, policy.path, policy.model, held_out)
    rewards.check_sources(held_out.data_sources, held_out=True)
    return Evaluator(
        engine,
        held_out.prompts[: config.evaluation.max_prompts],
        rewards,
        config.evaluation,
        rollout_sampling(config.rollout, policy),
        config.run.seed,
        policy.decode,
        file_of,
        config.observe,
        held_out.filtered,
    )


def make_prompt_budget(
    epochs: float | None, groups_per_step: int, source: PromptSource
) -> PromptBudget:
    """Return the number of prompts that a run may use; no limit without `trainer.data_epochs`."""
    if epochs is None or source.size is None:
        return PromptBudget()
    return PromptBudget(int(round(epochs * source.size, 6)), groups_per_step)


def count_steps(epochs: float, groups_per_step: int, source: PromptSource, task: str) -> int:
    """Return the steps that passes over the data can fill.

    Args:
        task: `data.task.name`, for the error.

    Raises:
        ConfigError: the data is endless, or fills no step.
    """
    if source.size is None:
        raise ConfigError(
            f"trainer.data_epochs={epochs:g} counts passes over the data, and data/task={task} "
            "never ends; set data.max_train_prompts, or trainer.data_epochs=null and trainer.steps"
        )
    steps = int(make_prompt_budget(epochs, groups_per_step, source).prompts) // groups_per_step
    if not steps:
        raise ConfigError(
            f"trainer.data_epochs={epochs:g} of {source.size:,} prompts fills no step of "
            f"sampling.groups_per_step={groups_per_step}; raise the one or lower the other"
        )
    return steps


@dataclass(frozen=True)
class RunContext:
    """The folder, models and services of a run, of RL and of SFT alike."""

    config: Config
    recipe: str
    """The recipe as YAML, which checkpoints contain."""
    policy: LoadedPolicy
    folder: RunFolder
    sinks: Sinks
    metrics: MetricsLog
    stop: ShutdownSignal
    rewards: Rewards
    placed: RunModels
    note: Callable[[str], None]
    """Takes a line for the terminal and the log."""
    timeline: Timeline = no_timeline
    first_messages: FirstMessages | None = None
    """As `PromptRenderer` takes it."""
    on_step: OnStep = BaseRun.on_step


def build_run(
    context: RunContext, source: PromptSource, on_progress: Callable[[Ledger], None]
) -> Run:
    """Build the objects that `loop.train` uses.

    Args:
        on_progress: called with the ledger when it changes.

    Raises:
        WinnowError: data, scorers and model do not fit the recipe.
    """
    config, policy, folder = context.config, context.policy, context.folder
    rewards, placed, tell = context.rewards, context.placed, context.timeline
    check_positions(config.data, config.sft, config.rollout, policy.path, policy.model, source)
    rewards.check_sources(source.data_sources)
    rewards.check_prompt(source.prompt(0))
    if isinstance(config.sampling.filter, VarianceFilter | BandFilter):
        rewards.require_metric(config.sampling.filter.metric, source.data_sources)
    seed, engine = config.run.seed, placed.engine
    order = UserSampler(config.data, source, seed) if config.data.sampler else None
    loader = PromptLoader(source, seed, config.data.shuffle, order)
    tools, begin, vision = tool_schemas(config.environment), context.first_messages, policy.vision
    held_out = evaluation_prompts(config.data, policy.tokenizer, tools, begin, vision)
    evaluator = make_evaluator(config, policy, engine, folder.eval_file, rewards.copy(), held_out)
    for name, member in engines_by_name(engine, "engine 0").items():
        if hasattr(member, "on_served"):  # it is in another process, which reports its calls
            member.on_served = partial(tell, name)
    scores, pending = TimedScorer(rewards.score, tell), PendingSteps()
    replies = getattr(engine, "environment_figures", dict)
    sampler = _make_sampler(context, loader, scores, source.data_sources, on_progress)
    budget = make_prompt_budget(config.trainer.data_epochs, config.sampling.groups_per_step, source)
    parts: dict[str, Stateful] = {"sampler": sampler, "passes": budget, "pending": pending}
    gpu = str(placed.machine.get("device", ""))
    peak = config.observe.peak_tflops or gpu_peak_tflops(gpu, config.model.dtype)
    notes = [
        *_epoch_notes(config.trainer, config.sampling, source, budget),
        *_row_notes(config.data, "training", source, config.data.max_train_prompts),
        *_row_notes(config.data, "held-out", held_out, config.evaluation.max_prompts),
        *islice(agent_notes(config.environment, getattr(source, "prompts", ())), 1),
        *_scorer_notes(config.reward, config.sampling.filter, source),
        *_program_notes(config),
        *kl_notes(config.algorithm),
        *config_warnings(config),
        *lockstep_notes(config, policy.model.config),
    ]
    base = make_base_run(context, evaluator, loader, parts)

    return Run(
        **vars(replace(base, notes=tuple(notes))),
        sampler=sampler,
        sleep_engines=placed.publish.sleep_engines,
        throughput=Throughput(placed.passes, policy.device, peak, placed.devices),
        save_rollouts=partial(save_rollouts, context, sampler.ledger),
        save_ledger=partial(save_ledger, folder),
        check_scoring=rewards.end_step,
        scoring_figures=lambda: {**scores.figures(), **rewards.figures(), **replies()},
        mode=config.trainer.mode.name,
        pending=pending,
        prompt_budget=budget,
    )


def make_base_run(
    context: RunContext, evaluator: Evaluator, loader: PromptLoader, parts: Mapping[str, Stateful]
) -> BaseRun:
    """Make the objects that RL and SFT runs share.

    Args:
        parts: objects whose state is saved, besides loader and learner.
    """
    config, placed, tell = context.config, context.placed, context.timeline
    trainer, steps = config.trainer, config.trainer.steps
    state = RunState(
        placed.model_states,
        {**parts, "loader": loader, "learner": placed.learner},
        context.folder,
        context.metrics,
        trainer,
        Manifest(machine=placed.machine, code=code_hashes(user_code_files(config))),
        context.recipe,
        tell,
    )
    return BaseRun(
        learner=placed.learner,
        publish=placed.publish,
        engine=placed.engine,
        evaluator=evaluator,
        sinks=context.sinks,
        state=state,
        stop=context.stop,
        evaluate_every=config.evaluation.every,
        save_every=trainer.save_every,
        steps=steps,
        evaluate_before=config.evaluation.before and bool(evaluator.prompts),
        data_figures=loader.figures,
        timeline=tell,
        profiler=make_profiler(trainer.profile, "driver"),
        on_step=context.on_step,
    )


def _make_sampler(
    context: RunContext,
    loader: PromptLoader,
    score: TimedScorer,
    data_sources: Iterable[str],
    on_progress: Callable[[Ledger], None],
) -> Sampler:
    """Make the sampler; failed scorings are first counted after as many as a step has answers."""
    config, rewards, engine = context.config, context.rewards, context.placed.engine
    with_baseline = "greedy_rewards" in needs_of(config.algorithm.advantage)
    rewards.patience = config.sampling.groups_per_step * (config.rollout.n + with_baseline)
    lag, deterministic = config.sampling.score_lag_ticks, config.run.deterministic
    lag = choose_score_lag_ticks(lag, deterministic, rewards, data_sources)
    return Sampler(
        config.sampling.model_copy(update={"score_lag_ticks": lag}),
        engine=engine,
        next_prompt=loader.next,
        give_back=loader.give_back,
        on_settled=loader.report_settled,
        score=score,
        n=config.rollout.n,
        sampling=rollout_sampling(config.rollout, context.policy),
        run_seed=config.run.seed,
        with_baseline=with_baseline,
        drop_failed_scores=config.reward.on_failure == "drop_group",
        deterministic=deterministic,
        look_ticks=getattr(engine, "quantum_ticks", 1),  # of an `EngineGroup`
        on_progress=on_progress,
    )


def save_rollouts(
    context: RunContext, ledger: Ledger, step: int, groups: Sequence[RolloutGroup]
) -> None:
    """Write the answers of a step; note the signal of the first, and examples."""
    observe, decode = context.config.observe, context.policy.decode
    folder = context.folder.check_exists()
    shown = choose_text_groups(groups, observe, context.config.run.seed, step)
    write_rollouts(
        folder.rollout_file(step), step, groups, version=step - 1, text_groups=shown,
        decode=decode, image_mib=observe.image_mib,
    )  # fmt: skip
    # A step that stopped at its bound has its qualified groups in the ledger, not among these.
    is_whole = not ledger.qualified or any(each.outcome == "trained" for each in groups)
    if step == 1 and is_whole:
        context.note(signal_line(groups, command_line("rollouts", str(folder.path))))
    for line in example_lines(step, groups, observe.examples, decode):
        context.note(line)


def save_ledger(folder: RunFolder, step: int, sampled: StepGroups) -> None:
    """Write the outcome of each group of a trained step."""
    settled = [*sampled.trained, *sampled.discarded]
    write_ledger(folder, step, settled, len(sampled.returned))


def _epoch_notes(
    trainer: TrainerConfig, sampling: SamplingConfig, source: PromptSource, budget: PromptBudget
) -> Iterator[str]:
    """Return a line on the steps that the passes over the data fill."""
    epochs, groups = trainer.data_epochs, sampling.groups_per_step
    if epochs is None:
        return
    unused = int(budget.prompts) % groups
    rest = f"; {unused:,} prompts at their end fill no step" if unused else ""
    if sampling.filter.name != "none":
        rest = f"; at their end fewer than {groups:,} prompts fill no step"
    yield (
        f"{epochs:g} passes over {source.size:,} prompts: at most {trainer.steps:,} steps of "
        f"{groups}{rest} (trainer.data_epochs)"
    )


def _row_notes(
    data: DataConfig, kind: str, prompts: PromptSource, max_prompts: int | None
) -> Iterator[str]:
    """Return lines on the columns that were read, and on rows that are left out."""
    if not isinstance(prompts, PromptSet) or not any((*prompts.layouts, prompts.filtered)):
        return
    yield from (f"Data: {line}" for line in prompts.layouts)
    limit = f"data.max_prompt_tokens={data.max_prompt_tokens}"
    notes = [f"{prompts.size + prompts.filtered:,} rows of {kind} data"]
    if kind == "training" and max_prompts is not None:
        notes[0] += " (data.max_train_prompts)"
    notes += [f"{prompts.filtered:,} left out: longer than {limit}"] if prompts.filtered else []
    notes += [f"{prompts.cut:,} cut to {limit}"] if prompts.cut else []
    if kind == "held-out" and max_prompts is not None and max_prompts < prompts.size:
        notes.append(f"the first {max_prompts:,} of the rest are used (evaluation.max_prompts)")
    yield ("Warning: " if 2 * prompts.filtered > prompts.size else "") + "; ".join(notes)


def _program_notes(config: Config) -> Iterator[str]:
    """Return a line if the run calls objects of the running program."""
    keys = [k for k, place in user_code_settings(config) if place.partition(":")[0] == PROGRAM]
    if keys:
        yield (
            f"{', '.join(keys)}: objects of this program, which no other process can import; they "
            "are called here, without limits of time and memory, and the run can only be continued "
            "by this program's winnow.Trainer. Define them in a file of their own to change that"
        )


def _scorer_notes(reward: RewardConfig, rule: Section, source: PromptSource) -> Iterator[str]:
    """Return lines on rules of scoring and filtering that differ from verl's."""
    is_custom = reward.function.path is not None or reward.manager.name in UNROUTED
    if "math" in source.data_sources and not is_custom and "math" not in reward.scorers:
        yield (
            "Data source math is scored by math_verify (\\boxed{}); verl scores it by the line "
            "Answer:, which is reward.scorers={math: dapo_math}"
        )
    if isinstance(rule, VarianceFilter) and rule.metric == "accuracy" and is_custom:
        yield "Groups are kept whose answers differ in acc, or in score if your scorer gives none"
