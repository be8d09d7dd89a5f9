"""The figures of a step: of its groups, and of its work (names: `winnow.observe.metrics`)."""

from __future__ import annotations

import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch

from winnow.learning.learner import Learned
from winnow.observe.metrics import Metrics, Number
from winnow.observe.rollouts import RolloutGroup
from winnow.rewards.pipeline import OVERLONG, OVERLONG_REWARD, TASK
from winnow.sampling.accounting import StepGroups
from winnow.types import Score

_GIB = 2**30
_KIB = 2**10


def record_step(metrics: Metrics, sampled: StepGroups, learned: Learned) -> None:
    """Record scores, lengths and the sampler's counts; the policy's figures are there already."""
    answers = [answer for group in sampled.groups for answer in group.answers]
    metrics.spread("score/reward", [a.score.reward for a in answers])
    metrics.spread("score/accuracy", [a.score.accuracy for a in answers])
    _record_parts(metrics, [answer.score for answer in answers])
    metrics.spread("length/response", [a.trajectory.generated_tokens for a in answers])
    metrics.spread("length/prompt", learned.prompt_lengths)
    metrics.mean_of("length/truncated", sum(a.trajectory.truncated for a in answers), len(answers))
    _record_sampling(metrics, sampled)
    metrics.last("sampling/tokens/in_progress", sampled.counts.in_progress)


def _record_parts(metrics: Metrics, scores: Sequence[Score]) -> None:
    """Record each part over the answers that have it: not every source has every part."""
    for name in dict.fromkeys(chain.from_iterable(score.parts for score in scores)):
        values = [score.parts[name] for score in scores if name in score.parts]
        metrics.spread(f"score/parts/{name}", values)
        if name == TASK:
            metrics.spread("score/task_reward", values)
    keys = (OVERLONG, OVERLONG_REWARD)
    noted = [[score.extra.get(key) for key in keys] for score in scores]
    if noted and all(isinstance(value, float) for pair in noted for value in pair):  # by dapo
        flags, penalties = zip(*noted, strict=True)
        metrics.mean_of("score/overlong", sum(flags), len(flags))
        metrics.spread("score/overlong_reward", penalties)


def _record_sampling(metrics: Metrics, sampled: StepGroups) -> None:
    counts, tally, tokens = sampled.counts, sampled.counts.tally, sampled.counts.tokens
    figures = {
        "accuracy": tally.mean_accuracy,
        "keep_rate": tally.keep_rate,
        "qualify_rate": counts.qualify_rate,
        "groups/admitted": tally.admitted,
        "groups/looked_at": counts.looked_at,
        **{f"groups/{fate}": number for fate, number in counts.fates.items()},
        "groups/carried_qualified": counts.carried_qualified,
        "groups/carried_open": counts.carried_open,
        "tokens/generated": tokens.generated,
        **{f"tokens/{fate}": getattr(tokens, fate) for fate in counts.fates},
        "tokens/truncated": tokens.truncated_tokens,
        **({"tokens/baseline": tokens.baseline_tokens} if tokens.baseline_tokens else {}),
        "answers/truncated": tokens.truncated_answers,
        "answers/resumed": tally.resumed_answers,
        "answers/aborted": tally.aborted_answers,
        "answers/retried": tally.retried_answers,
        "empty_bounds": tally.empty_bounds,
        "staleness/mean": counts.staleness_mean,
        "staleness/max": counts.staleness_max,
    }
    for name, figure in figures.items():
        metrics.last(f"sampling/{name}", figure)


def rollout_groups(sampled: StepGroups, learned: Learned) -> list[RolloutGroup]:
    """List the groups whose life ended in this step, the trained ones with their advantages."""
    sizes = [len(group.answers) for group in sampled.groups]
    parts = np.split(learned.advantages, np.cumsum(sizes)[:-1])
    trained = (
        RolloutGroup(settled.group, "trained", advantages)
        for settled, advantages in zip(sampled.trained, parts, strict=True)
    )
    rest = (RolloutGroup(settled.group, settled.fate) for settled in sampled.discarded)
    return list(chain(trained, rest))


@dataclass(frozen=True)
class Passes:
    """The passes of a step over the tokens that it packs, by model.

    Counts 2 FLOP a parameter and token forwards, 4 backwards (arXiv 2001.08361, section 2.1). The
    embedding counts once, as the output layer; attention scores are left out, so the figure is a
    lower bound.
    """

    parameters: int
    """Parameters of the policy."""
    epochs: int
    """Updates that see a token."""
    forwards: int = 1
    """Forward passes of a model as large as the policy, updates aside: old log-probs, reference."""
    critic_parameters: int = 0
    """Parameters of the critic, which runs forwards once and then takes part in each update."""

    def flop(self, generated_tokens: int, packed_tokens: int) -> float:
        """Return the FLOP of a step, rollout included."""
        updates = 6 * self.epochs
        policy = self.parameters * (
            2 * generated_tokens + (2 * self.forwards + updates) * packed_tokens
        )
        return policy + self.critic_parameters * (2 + updates) * packed_tokens


@dataclass(frozen=True)
class Throughput:
    """A step's tokens and FLOP over its seconds."""

    passes: Passes
    device: torch.device
    peak_tflops: float | None
    """Peak of one device."""
    devices: int = 1

    def figures(
        self, generated_tokens: int, packed_tokens: int, times: Mapping[str, Number]
    ) -> dict[str, Number]:
        """Compute `throughput/…`, `memory/…` and `time/PHASE_us_per_token` of a step.

        Args:
            generated_tokens: written by the policy in the step.
            packed_tokens: prompts and answers trained on.
            times: as `Stopwatch.lap` gives them.
        """
        busy = times["time/step_s"] - times.get("time/evaluate_s", 0.0)
        if busy <= 0 or not packed_tokens:  # resumed for an evaluation only
            return {}
        tflops = self.passes.flop(generated_tokens, packed_tokens) / busy / 1e12
        record: dict[str, Number] = {
            "throughput/tokens_per_s": generated_tokens / busy,
            "throughput/tokens_per_s_per_device": generated_tokens / busy / self.devices,
            "throughput/tflops": tflops,
            "memory/peak_gib": self._peak_gib(),
        }
        if self.peak_tflops is not None:
            record["throughput/mfu"] = tflops / self.peak_tflops / self.devices
        per_token = {
            "rollout": generated_tokens,
            "old_logprobs": packed_tokens,
            "reference": packed_tokens,
            "values": packed_tokens,
            "update": packed_tokens * self.passes.epochs,
        }
        for phase, tokens in per_token.items():
            seconds = times.get(f"time/{phase}_s")
            if tokens and seconds is not None:
                record[f"time/{phase}_us_per_token"] = seconds * 1e6 / tokens
        return record

    def _peak_gib(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / _GIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB / _GIB
