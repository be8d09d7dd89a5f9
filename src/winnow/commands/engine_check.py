"""`winnow check-engine`: tests that an engine samples from the model that it is said to hold.

    folder ─► the model as training runs it ─► log-probs of fixed sequences ─┐
    engine, or a server of somebody's ─► its log-probs, and tokens it draws ─┴─► findings

The test of what it draws: where a token is drawn from p, the probability of all likelier tokens
plus a random part of p(token) is uniform on [0, 1) (the randomised probability integral transform),
for each token independently. So the number of values in each tail is binomial, whatever the
contexts were. `tail_bias` compares 16 tails with that, each exactly, and multiplies the least
p-value by 16: an engine that is right is refused with probability `ALPHA` at most.

Shapes: `B` answers to a prompt, `T` their tokens, `V` vocabulary.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, cast

import numpy as np
import torch

from winnow.builders.engines import check_engine_installed, draw_canary, engines_sleep, make_engine
from winnow.builders.processes import worker_processes
from winnow.builders.run import prepare_device
from winnow.checkpoints.recipe_changes import with_settings
from winnow.config.environment import NoEnvironment
from winnow.config.judge import NoJudge, NoRewardModel
from winnow.config.load import parse_recipe
from winnow.config.model import LoraAdapter, ReferenceConfig
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.config.trainer import CriticConfig
from winnow.errors import ConfigError, PublicationError
from winnow.http.client import RemoteError
from winnow.learning.canary import Canary, CanaryScores
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import head_logits, hidden_states, output_head
from winnow.ranks.models import LoadedPolicy, load_policy, load_policy_model
from winnow.rollout.embedded.slots import PrefillLayout
from winnow.rollout.engine import (
    AnswerRequest,
    Engine,
    GroupRequest,
    SamplingParams,
    SleepingEngine,
    answer_seed,
    engines_by_name,
    generate,
)
from winnow.rollout.http.engine import HttpEngine
from winnow.rollout.weights import WeightUpdate
from winnow.types import FloatArray, IntArray, Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ALPHA = 1e-6
"""Probability that an engine which samples from the whole softmax is said not to."""
TAILS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.005, 0.002)
"""Probability of each tail; of the least likely tokens, and of the likeliest."""
PROMPTS, ANSWERS, TOKENS = 16, 8, 32
"""4,096 tokens, so that an engine which never draws the least likely 0.5 % is always found."""
_PROMPT_TOKENS = 8


@dataclass(frozen=True)
class EngineFinding:
    """One line of the report."""

    name: str
    state: Literal["passed", "failed", "not offered"]
    text: str
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class TrainerModel:
    """A model as the trainer runs it, with its log-probs of the canary's sequences."""

    strategy: Strategy
    vocabulary: int
    fp32_head: bool
    canary: Canary
    expected: CanaryScores

    @classmethod
    def of(cls, config: Config, policy: LoadedPolicy, model: PreTrainedModel) -> TrainerModel:
        """Score the canary's sequences with a model."""
        model.requires_grad_(False)
        vocabulary, fp32_head = policy.vocabulary, config.model.fp32_head
        temperature = config.rollout.temperature
        strategy = Strategy(
            model, temperature=temperature, vocab_size=vocabulary, fp32_head=fp32_head
        )
        canary = draw_canary(policy, temperature)
        return cls(strategy, vocabulary, fp32_head, canary, canary.score(strategy))

    async def compare(self, name: str, engine: Engine, version: int) -> EngineFinding:
        """Compare the engine's log-probs of fixed sequences."""
        try:
            most = await self.canary.check(self.expected, version, engines_by_name(engine))
        except PublicationError as error:
            return EngineFinding(name, "failed", str(error))
        summary = f"largest |Δlogp| of fixed tokens {most:.2g} nats"
        return EngineFinding(name, "passed", summary, {"largest": most})


def config_to_check(target: str, overrides: Sequence[str], model: str | None) -> Config:
    """Return the recipe to check, or one for a server's URL.

    Raises:
        ConfigError: it is wrong, or names no model.
    """
    defaults = ["trainer/strategy=single", "reward.processes=0", "warm_start=none"]
    defaults += [] if model is None else [f"model.path={json.dumps(model)}"]
    is_server = target.startswith(("http://", "https://"))
    if is_server:
        defaults += ["rollout/engine=http", f"rollout.engine.url={json.dumps([target])}"]
        defaults.append(f"data.max_prompt_tokens={_PROMPT_TOKENS}")
        defaults.append(f"rollout.max_response_tokens={TOKENS}")
    config = parse_recipe(None if is_server else target, [*defaults, *overrides])
    unused = {"reference": ReferenceConfig(), "critic": CriticConfig()}
    config = config.model_copy(update={**unused, "environment": NoEnvironment()})
    config = with_settings(config, reward={"model": NoRewardModel(), "judge": NoJudge()})
    if isinstance(adapter := config.model.adapter, LoraAdapter):  # whole weights are compared
        merged = adapter.model_copy(update={"publish": "merged"})
        config = with_settings(config, model={"adapter": merged})
    if config.model.path is None:
        raise ConfigError("no model to compare with; pass --model FOLDER")
    return config


def run_engine_check(config: Config, update: str | None) -> list[EngineFinding]:
    """Run every check; the engine holds the weights of `model.path` again afterwards.

    Args:
        update: folder of other weights of the same model.

    Raises:
        WinnowError: the engine cannot be made, or dies.
    """
    check_engine_installed(config.cluster, config.rollout.engine, config.reward.judge)
    device = prepare_device(config.run, config.model.cache_dir)
    assert config.model.path is not None
    source = config.model.source or config.model.path
    policy = load_policy(config, source, device)

    def load(path: str) -> TrainerModel:
        model = load_policy_model(config.model, path, device, config.run.seed)
        return TrainerModel.of(config, policy, model)

    reference = load(source)
    updated = None if update is None else load(update)
    if updated is not None and _have_same_logprobs(reference, updated):
        raise ConfigError(
            f"--update {update}: same log-probs as model.path {config.model.path}, so that an "
            "update could not be detected; use other weights"
        )
    roles = Roles(config)
    with worker_processes(config, roles, policy, None) as start_workers:
        engine = make_engine(config, policy, start_workers(), trains=False)
        sleeps = engines_sleep(config.rollout.engine, config.trainer, config.cluster, roles)
        return asyncio.run(_run_checks(engine, reference, updated, config.run.seed, sleeps))


async def _run_checks(
    engine: Engine, reference: TrainerModel, updated: TrainerModel | None, seed: int, sleeps: bool
) -> list[EngineFinding]:
    try:
        findings = [await reference.compare("weights", engine, 0)]
        findings += await _check_sampling(engine, reference, seed)
        findings.append(await _check_update(engine, reference, updated))
        findings.append(await _check_sleep(engine, reference, sleeps))
    finally:
        await engine.close()
    return findings


async def _check_sampling(
    engine: Engine, reference: TrainerModel, seed: int
) -> list[EngineFinding]:
    """Sample tokens; compare them and their log-probs with the softmax."""
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(TOKENS, temperature=reference.canary.temperature)
    groups = [
        GroupRequest(
            number,
            rng.integers(0, reference.vocabulary, _PROMPT_TOKENS),
            tuple(AnswerRequest(i, answer_seed(seed, number, i)) for i in range(ANSWERS)),
            sampling,
            number,
        )
        for number in range(PROMPTS)
    ]
    done = await generate(engine, groups)
    pits, gaps = list[FloatArray](), list[FloatArray]()
    for group in groups:
        answers = [done[group.group_id, i] for i in range(ANSWERS)]
        group_pits, group_gaps = score_draws(reference, group.prompt_ids, answers, rng)
        pits.append(group_pits)
        gaps.append(group_gaps)
    return [
        _support_finding(np.concatenate(pits)),
        _logprobs_finding(reference, np.concatenate(gaps)),
    ]


def _support_finding(pits: FloatArray) -> EngineFinding:
    p_value, where = tail_bias(pits)
    figures = {"p_value": p_value, "tokens": float(len(pits))}
    if p_value < ALPHA:
        summary = f"does not sample from the full softmax: {where} (p = {p_value:.1g})"
        return EngineFinding("support", "failed", summary, figures)
    summary = f"{len(pits):,} tokens match the full softmax (p = {p_value:.2g})"
    return EngineFinding("support", "passed", summary, figures)


def _logprobs_finding(reference: TrainerModel, gaps: FloatArray) -> EngineFinding:
    most, mean = float(gaps.max()), float(gaps.mean())
    allowed = 2 * reference.expected.limits.mean  # own log-probs are one pass's, not a mean
    numbers = f"mean |Δlogp| {mean:.2g} nats, largest {most:.2g}"
    figures = {"mean": mean, "largest": most, "allowed": allowed}
    if not mean <= allowed:
        summary = (
            "log-probs do not match the distribution at temperature "
            f"{reference.canary.temperature:g}: {numbers}, limit of the mean {allowed:.2g} (vLLM: "
            "start it with --logprobs-mode processed_logprobs)"
        )
        return EngineFinding("logprobs", "failed", summary, figures)
    return EngineFinding("logprobs", "passed", f"match the sampled tokens: {numbers}", figures)


def score_draws(
    reference: TrainerModel,
    prompt: IntArray,
    answers: Sequence[Trajectory],
    rng: np.random.Generator,
) -> tuple[FloatArray, FloatArray]:
    """Return the PIT values of sampled tokens, and the errors of their log-probs.

    Args:
        answers: B of T tokens each, to one prompt.

    Returns:
        Values [B * T], uniform on [0, 1) if the tokens were drawn from the softmax, large where a
        token is unlikely; and |Δlogp| [B * T] in nats.
    """
    model, temperature = reference.strategy.model, reference.canary.temperature
    head = output_head(model)
    ids = np.stack([np.concatenate([prompt, answer.token_ids]) for answer in answers])
    flat = torch.from_numpy(ids[:, :-1].copy()).to(head.weight.device)
    layout = PrefillLayout(np.full(len(flat), flat.shape[1]), flat.device)
    pits, gaps = [], []
    with torch.inference_mode():
        hidden = hidden_states(model, flat.flatten(), layout.positions, layout)
        hidden = hidden.view(len(flat), flat.shape[1], -1)[:, len(prompt) - 1 :]
        for row, answer in zip(hidden, answers, strict=True):
            logits = head_logits(head, row, reference.fp32_head)[:, : reference.vocabulary]
            logprobs = (logits.double() / temperature).log_softmax(-1).cpu().numpy()  # [T, V]
            drawn = np.arange(len(row)), answer.token_ids
            drawn_logprobs = logprobs[drawn]
            likelier = np.where(logprobs > drawn_logprobs[:, None], np.exp(logprobs), 0).sum(-1)
            equal = np.where(logprobs == drawn_logprobs[:, None], np.exp(logprobs), 0).sum(-1)
            pits.append(likelier + rng.random(len(row)) * equal)
            gaps.append(np.abs(drawn_logprobs - answer.logprobs))
    return np.concatenate(pits), np.concatenate(gaps)


def tail_bias(pits: FloatArray) -> tuple[float, str]:
    """Test whether values are uniform in their tails; returns the p-value and the worst tail.

    Each count is compared with the binomial distribution, exactly and from both sides; the p-value
    is the least of them times their number (Bonferroni), so that it is never too small.
    """
    count, worst, where = len(pits), 1.0, ""
    for tail in TAILS:
        for name, hits in (("least likely", pits > 1 - tail), ("likeliest", pits < tail)):
            hit = int(hits.sum())
            p_value = 2 * min(_binomial_tails(hit, count, tail))
            if p_value < worst:
                worst = p_value
                where = (
                    f"the {name} {tail:.1%} of probability was drawn {hit:,} times in {count:,} "
                    f"tokens, expected {tail * count:,.0f}"
                )
    return min(1.0, worst * 2 * len(TAILS)), where


def _binomial_tails(hits: int, count: int, chance: float) -> tuple[float, float]:
    """Return the probabilities of at most and of at least so many hits."""
    k = torch.arange(count + 1, dtype=torch.float64)
    ways = math.lgamma(count + 1) - torch.lgamma(k + 1) - torch.lgamma(count - k + 1)
    each = ways + k * math.log(chance) + (count - k) * math.log1p(-chance)
    return float(each[: hits + 1].logsumexp(0).exp()), float(each[hits:].logsumexp(0).exp())


async def _check_update(
    engine: Engine, reference: TrainerModel, updated: TrainerModel | None
) -> EngineFinding:
    """Load other weights into the engine, then the original ones again."""
    name = "update"
    if updated is None:
        return EngineFinding(name, "not offered", "pass other weights with --update FOLDER")
    figures, faults = dict[str, float](), list[str]()
    for number, (model, what) in enumerate([(updated, "new"), (reference, "first")], 1):
        try:
            await engine.load_weights(WeightUpdate(number, model.strategy.export_weights()))
        except (ConfigError, PublicationError) as error:
            faults.append(f"{what} weights: {error}")
            break
        finding = await model.compare(name, engine, number)
        if finding.state == "failed":
            faults.append(f"{what} weights: {finding.text}")
        figures |= {f"{what} {key}": value for key, value in finding.figures.items()}
    if faults:
        return EngineFinding(name, "failed", "; ".join(faults), figures)
    summary = ", ".join(f"{key} {value:.2g}" for key, value in figures.items())
    return EngineFinding(name, "passed", f"|Δlogp| in nats: {summary}", figures)


async def _check_sleep(engine: Engine, reference: TrainerModel, sleeps: bool) -> EngineFinding:
    """Put servers, or an engine that sleeps, to sleep, wake them, and compare their weights."""
    if sleeps:  # as a run does, which publishes weights after their memory is there again
        sleeper = cast(SleepingEngine, engine)
        await sleeper.sleep()
        await sleeper.wake("weights")
        try:
            await engine.load_weights(WeightUpdate(3, reference.strategy.export_weights()))
        except (ConfigError, PublicationError) as error:
            return EngineFinding("sleep", "failed", str(error))
        await sleeper.wake("cache")
        return await reference.compare("sleep", engine, 3)
    servers = engine.servers.values() if isinstance(engine, HttpEngine) else ()
    try:
        slept = [await server.sleep_and_wake() for server in servers]
    except RemoteError as error:
        return EngineFinding("sleep", "failed", str(error))
    if not slept or not all(slept):
        return EngineFinding(
            "sleep", "not offered", "the engine does not support sleep, or sleep is off"
        )
    return await reference.compare("sleep", engine, 3)


def _have_same_logprobs(one: TrainerModel, two: TrainerModel) -> bool:
    pairs = zip(one.expected.logprobs, two.expected.logprobs, strict=True)
    gaps = np.concatenate([np.abs(a - b) for a, b in pairs])
    return float(gaps.mean()) <= one.expected.limits.mean
