"""From a recipe to the objects of a run: the one place where concrete classes are named."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from winnow.builders.topology import Topology
from winnow.checkpoints.checkpoint import Manifest
from winnow.checkpoints.opening import code_hashes
from winnow.checkpoints.run_state import RunState, Stateful
from winnow.config.rollout import BandFilter, VarianceFilter
from winnow.config.root import Config
from winnow.config.rules import notices
from winnow.data.loader import PromptLoader, PromptSource, evaluation_prompts
from winnow.data.prompts import PromptSet
from winnow.data.user_source import UserOrder
from winnow.errors import ConfigError
from winnow.evaluation.evaluator import Evaluator
from winnow.models.fetch import MODEL_CACHE
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import MetricsLog
from winnow.observe.ledger import write_ledger
from winnow.observe.metrics import Timeline, no_timeline
from winnow.observe.profile import profiler_of
from winnow.observe.rollouts import Decode, RolloutGroup, choose_text_groups, write_rollouts
from winnow.observe.sinks import Sinks
from winnow.observe.trace import ScorerTimes
from winnow.ranks.learner import kl_notes, needs_of
from winnow.ranks.models import (
    LoadedPolicy,
    check_positions,
    longest_prompt,
    use_deterministic_kernels,
)
from winnow.rewards.rewards import Rewards
from winnow.rollout.engine import Engine, SamplingParams, members_of
from winnow.run.loop import BaseRun, DataPasses, PendingSteps, Run, Schedule
from winnow.run.shutdown import ShutdownSignal
from winnow.run.step_metrics import Throughput, device_peak
from winnow.sampling.accounting import StepGroups
from winnow.sampling.ledger import Ledger
from winnow.sampling.stream import Sampler

LAG_OF_SCORERS_APART = 16
"""Decode ticks; measured by benchmarks/deterministic.py."""


def use_machine(config: Config, holds_model: bool = True) -> torch.device:
    """Set threads, the cache of models and kernels, and choose the device of this process.

    Args:
        holds_model: else it is the CPU, and no GPU is asked for anything: they are for others.

    Raises:
        ConfigError: run.device is cuda and there is none.
    """
    if config.model.cache_dir is not None:
        os.environ[MODEL_CACHE] = config.model.cache_dir
    if config.run.threads is not None:
        torch.set_num_threads(config.run.threads)
    if config.run.device == "cpu" or not holds_model:
        return torch.device("cpu")
    if config.run.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("run.device is cuda, but torch sees no GPU; set run.device=cpu")
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if config.run.deterministic:
        use_deterministic_kernels()
    return torch.device("cuda")


def rollout_sampling(config: Config, policy: LoadedPolicy) -> SamplingParams:
    """Make the sampling parameters of training answers."""
    rollout = config.rollout
    return SamplingParams(
        max_tokens=rollout.max_response_tokens,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        min_p=rollout.min_p,
        stop_token_ids=policy.stop_ids,
        stop=rollout.stop,
    )


def score_lag_ticks(config: Config, rewards: Rewards, data_sources: Iterable[str]) -> int:
    """`sampling.score_lag_ticks`, chosen where the recipe leaves it open."""
    lag = config.sampling.score_lag_ticks
    if lag is not None:
        return lag
    is_late = config.run.deterministic and rewards.takes_time(data_sources)
    return LAG_OF_SCORERS_APART if is_late else 0


def make_evaluator(
    config: Config,
    policy: LoadedPolicy,
    engine: Engine,
    file_of: Callable[[int], Path],
    rewards: Rewards,
    held_out: PromptSet,
) -> Evaluator:
    """Held-out prompts, checked against the scorers.

    Raises:
        RewardError: a source has no scorer.
    """
    check_positions(config, policy.path, policy.model, longest_prompt(config, held_out))
    rewards.check_sources(held_out.data_sources, held_out=True)
    return Evaluator(
        engine,
        held_out.prompts[: config.evaluation.max_prompts],
        rewards,
        config.evaluation,
        rollout_sampling(config, policy),
        config.run.seed,
        policy.decode,
        file_of,
        config.observe,
        held_out.filtered,
    )


def passes_of(config: Config, source: PromptSource) -> DataPasses:
    """Return the count of prompts with which a run ends; without passes it never does."""
    epochs, size = config.trainer.data_epochs, source.size
    if epochs is None or size is None:
        return DataPasses()
    return DataPasses(int(round(epochs * size, 6)), config.sampling.groups_per_step)


def with_steps(config: Config, source: PromptSource) -> Config:
    """Put the steps that `trainer.data_epochs` can fill into a recipe.

    Raises:
        ConfigError: the data never ends, or fills no step.
    """
    epochs, groups = config.trainer.data_epochs, config.sampling.groups_per_step
    if epochs is None:
        return config
    if source.size is None:
        raise ConfigError(
            f"trainer.data_epochs={epochs:g} counts passes over the data, and "
            f"data/task={config.data.task.name} never ends; set data.max_train_prompts, or "
            "trainer.data_epochs=null and trainer.steps"
        )
    steps = int(passes_of(config, source).prompts) // groups
    if not steps:
        raise ConfigError(
            f"trainer.data_epochs={epochs:g} of {source.size:,} prompts fills no step of "
            f"sampling.groups_per_step={groups}; raise the one or lower the other"
        )
    trainer = config.trainer.model_copy(update={"steps": steps})
    return config.model_copy(update={"trainer": trainer})


@dataclass(frozen=True)
class RunContext:
    """The folder, models and services that every run is built from, whatever it learns from."""

    config: Config
    recipe: str
    """The recipe as YAML; checkpoints keep it."""
    policy: LoadedPolicy
    folder: RunFolder
    sinks: Sinks
    metrics: MetricsLog
    stop: ShutdownSignal
    rewards: Rewards
    placed: Topology
    tell: Timeline = no_timeline


def build(
    context: RunContext,
    source: PromptSource,
    on_progress: Callable[[Ledger], None] = lambda ledger: None,
) -> Run:
    """Build everything that `loop.train` sequences.

    Raises:
        WinnowError: data, scorers and model do not fit what the recipe asks.
    """
    config, policy, folder = context.config, context.policy, context.folder
    rewards, placed, tell = context.rewards, context.placed, context.tell
    _check_prompts(config, policy, source, rewards)
    loader = _make_loader(config, source)
    engine = placed.engine
    held_out = evaluation_prompts(config.data, policy.tokenizer)
    evaluator = make_evaluator(config, policy, engine, folder.evaluation, rewards.twin(), held_out)
    _time_engines(engine, tell)
    scores, pending = ScorerTimes(rewards.score, tell), PendingSteps()
    sampler = _make_sampler(context, loader, scores, source.data_sources, on_progress)
    passes = passes_of(config, source)
    parts: dict[str, Stateful] = {"sampler": sampler, "passes": passes, "pending": pending}
    gpu = str(placed.machine.get("device", ""))
    peak = config.observe.peak_tflops or device_peak(gpu, config.model.dtype)
    notes = (*_notes(source, held_out, config), *kl_notes(config), *notices(config))
    base = make_base(context, evaluator, loader, parts)
    return Run(
        **vars(replace(base, notes=notes)),
        sampler=sampler,
        rest=placed.publish.rest,
        throughput=Throughput(placed.passes, policy.device, peak, placed.devices),
        keep_rollouts=partial(_keep_rollouts, config, folder, policy.decode),
        keep_ledger=partial(keep_ledger, folder),
        check_scoring=rewards.end_step,
        scoring_figures=lambda: {**scores.figures(), **rewards.figures()},
        mode=config.trainer.mode.name,
        pending=pending,
        passes=passes,
    )


def make_base(
    context: RunContext,
    evaluator: Evaluator,
    loader: PromptLoader,
    parts: Mapping[str, Stateful],
) -> BaseRun:
    """Make the objects that runs by rewards and by imitation share.

    Args:
        parts: objects with a state, beside loader and learner.
    """
    config, placed, tell = context.config, context.placed, context.tell
    trainer, steps = config.trainer, config.trainer.steps
    state = RunState(
        placed.tensors,
        {**parts, "loader": loader, "learner": placed.learner},
        context.folder,
        context.metrics,
        trainer,
        Manifest(machine=placed.machine, code=code_hashes(config)),
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
        evaluations=Schedule(config.evaluation.every, steps),
        checkpoints=Schedule(trainer.save_every, steps),
        steps=steps,
        evaluate_before=config.evaluation.before and bool(evaluator.prompts),
        data_figures=loader.figures,
        tell=tell,
        profiler=profiler_of(config, "driver"),
    )


def _make_loader(config: Config, source: PromptSource) -> PromptLoader:
    seed = config.run.seed
    order = UserOrder(config.data, source, seed) if config.data.sampler else None
    return PromptLoader(source, seed, config.data.shuffle, order)


def _make_sampler(
    context: RunContext,
    loader: PromptLoader,
    score: ScorerTimes,
    data_sources: Iterable[str],
    on_progress: Callable[[Ledger], None],
) -> Sampler:
    """Make the sampler; scorings wait for as many as a step has answers."""
    config, rewards, engine = context.config, context.rewards, context.placed.engine
    with_baseline = "greedy_rewards" in needs_of(config)
    step_answers = config.sampling.groups_per_step * (config.rollout.n + with_baseline)
    rewards.patience = step_answers
    lag = score_lag_ticks(config, rewards, data_sources)
    return Sampler(
        config.sampling.model_copy(update={"score_lag_ticks": lag}),
        engine=engine,
        next_prompt=loader.next,
        give_back=loader.give_back,
        on_settled=loader.settled,
        score=score,
        n=config.rollout.n,
        sampling=rollout_sampling(config, context.policy),
        run_seed=config.run.seed,
        with_baseline=with_baseline,
        drop_failed_scores=config.reward.on_failure == "drop_group",
        deterministic=config.run.deterministic,
        look_ticks=getattr(engine, "quantum_ticks", 1),  # of an `EngineGroup`
        on_progress=on_progress,
    )


def _time_engines(engine: Engine, tell: Timeline) -> None:
    """Have engines in processes of their own tell what they work on."""
    for name, member in members_of(engine, "engine 0").items():
        if hasattr(member, "tell"):
            member.tell = partial(tell, name)


def _check_prompts(
    config: Config, policy: LoadedPolicy, source: PromptSource, rewards: Rewards
) -> None:
    """Check that model and scorers can take the training prompts."""
    check_positions(config, policy.path, policy.model, longest_prompt(config, source))
    rewards.check_sources(source.data_sources)
    rewards.check_prompt(source.prompt(0))
    if isinstance(config.sampling.filter, VarianceFilter | BandFilter):
        rewards.require_metric(config.sampling.filter.metric, source.data_sources)


def _keep_rollouts(
    config: Config, folder: RunFolder, decode: Decode, step: int, groups: Sequence[RolloutGroup]
) -> None:
    """Write the groups whose life ended in a step, some of them with their text."""
    folder.check_exists()
    write_rollouts(
        folder.rollout(step),
        step,
        groups,
        version=step - 1,
        text_groups=choose_text_groups(groups, config.observe, config.run.seed, step),
        decode=decode,
    )


def keep_ledger(folder: RunFolder, step: int, sampled: StepGroups) -> None:
    """Write what became of the groups of a step that is learnt."""
    settled = [*sampled.trained, *sampled.discarded]
    write_ledger(folder, step, settled, len(sampled.returned))


def _notes(source: PromptSource, held_out: PromptSet, config: Config) -> Iterator[str]:
    """Say what was read, which columns were taken, and how many rows are left out and why."""
    epochs, groups = config.trainer.data_epochs, config.sampling.groups_per_step
    if epochs is not None:
        unused = int(passes_of(config, source).prompts) % groups
        rest = f"; {unused:,} prompts at their end fill no step" if unused else ""
        if config.sampling.filter.name != "none":
            rest = f"; at their end fewer than {groups:,} prompts fill no step"
        yield (
            f"{epochs:g} passes over {source.size:,} prompts: at most {config.trainer.steps:,} "
            f"steps of {groups}{rest} (trainer.data_epochs)"
        )
    sets = {"training": source, "held-out": held_out}
    for kind, prompts in sets.items():
        if not isinstance(prompts, PromptSet) or not any((*prompts.layouts, prompts.filtered)):
            continue
        yield from (f"Data: {line}" for line in prompts.layouts)
        limit = f"data.max_prompt_tokens={config.data.max_prompt_tokens}"
        notes = [f"{prompts.size + prompts.filtered:,} rows of {kind} data"]
        if kind == "training" and config.data.max_train_prompts is not None:
            notes[0] += " (data.max_train_prompts)"
        notes += [f"{prompts.filtered:,} left out: longer than {limit}"] if prompts.filtered else []
        notes += [f"{prompts.cut:,} cut to {limit}"] if prompts.cut else []
        most = config.evaluation.max_prompts
        if kind == "held-out" and most is not None and most < prompts.size:
            notes.append(f"the first {most:,} of the rest are asked (evaluation.max_prompts)")
        yield ("Warning: " if 2 * prompts.filtered > prompts.size else "") + "; ".join(notes)
    rule, reward = config.sampling.filter, config.reward
    is_theirs = reward.function.path is not None or reward.manager.name in ("remote", "custom")
    if "math" in source.data_sources and not is_theirs and "math" not in reward.scorers:
        yield (
            "Data source math is scored by math_verify (\\boxed{}); verl scores it by the line "
            "Answer:, which is reward.scorers={math: dapo_math}"
        )
    if isinstance(rule, VarianceFilter) and rule.metric == "accuracy" and is_theirs:
        yield "Groups are kept whose answers differ in acc, or in score if your scorer gives none"
