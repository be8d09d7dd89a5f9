"""The figures of a step: of its groups, and of its work (names: `winnow.observe.metrics`)."""

from __future__ import annotations

import math
import re
import resource
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from winnow.evaluation.evaluator import SCORES_CASES
from winnow.evaluation.statistics import majority, numbers, vote
from winnow.learning.learner import Learned
from winnow.observe.gpus import GPUS
from winnow.observe.metrics import Metrics, Number
from winnow.observe.rollouts import RolloutGroup
from winnow.rewards.pipeline import OVERLONG, OVERLONG_REWARD, TASK
from winnow.sampling.accounting import StepGroups
from winnow.types import FloatArray, Score

_GIB = 2**30
_KIB = 2**10


def record_step(metrics: Metrics, sampled: StepGroups, learned: Learned) -> None:
    """Record scores, lengths and the sampler's counts; the policy's figures are there already."""
    answers = [answer for group in sampled.groups for answer in group.answers]
    metrics.spread("score/reward", [a.score.reward for a in answers])
    metrics.spread("score/accuracy", [a.score.accuracy for a in answers])
    _record_parts(metrics, [answer.score for answer in answers])
    record_sources(metrics, sampled)
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


def record_sources(metrics: Metrics, sampled: StepGroups) -> None:
    """Record, by data source, the answers of all groups that the filter looked at in the step."""
    looked_at = ("trained", "all_right", "all_wrong")
    closed = [s.group for s in (*sampled.trained, *sampled.discarded) if s.fate in looked_at]
    for group in sorted(closed, key=lambda group: group.id):
        name = f"source/{group.prompt.data_source}"
        scores = [answer.score for answer in group.answers]
        extra = {
            f"own/{key}": [score.extra.get(key) for score in scores]
            for key in dict.fromkeys(chain.from_iterable(score.extra for score in scores))
            if key not in (OVERLONG, OVERLONG_REWARD)
        }
        reward, accuracy = [s.reward for s in scores], [s.accuracy for s in scores]
        figures: dict[str, Sequence[object]] = {"reward": reward, "accuracy": accuracy, **extra}
        n = len(scores)
        for figure, column in figures.items():
            values = numbers(column)
            if values is None or not n:
                continue
            metrics.mean_of(f"{name}/{figure}/mean", sum(values), n)
            metrics.mean(f"{name}/{figure}/best@{n}", max(values))
            metrics.mean(f"{name}/{figure}/worst@{n}", min(values))
        votes = [vote(score.extra.get("pred")) for score in scores]
        says = not any(SCORES_CASES in score.extra for score in scores)
        if says and any("pred" in score.extra for score in scores):
            metrics.mean(f"{name}/accuracy/maj@{n}", majority(accuracy, votes))


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
        if not math.isnan(figure):  # as of a step that carried groups filled: it looked at none
            metrics.last(f"sampling/{name}", figure)


def rollout_groups(sampled: StepGroups, learned: Learned) -> list[RolloutGroup]:
    """List the groups whose life ended in this step, the trained ones with their advantages."""
    sizes = [len(group.answers) for group in sampled.groups]
    ends = np.cumsum(sizes)[:-1]
    parts = np.split(learned.advantages, ends)
    nothing = [None] * len(parts)
    distances = nothing if learned.mismatch is None else np.split(learned.mismatch, ends)
    tokens = (
        _split_by_group(sampled, learned, v) for v in (learned.old_logprobs, learned.entropies)
    )
    trained = (
        RolloutGroup(settled.group, "trained", *columns)
        for settled, *columns in zip(sampled.trained, parts, distances, *tokens, strict=True)
    )
    rest = (RolloutGroup(settled.group, settled.fate) for settled in sampled.discarded)
    return list(chain(trained, rest))


def _split_by_group(
    sampled: StepGroups, learned: Learned, values: FloatArray | None
) -> Sequence[list[FloatArray] | None]:
    """Cut numbers [T] of a step's tokens into those of its groups' answers."""
    if values is None:
        return [None] * len(sampled.groups)
    lengths = [[sum(map(len, a.trajectory.segments)) for a in g.answers] for g in sampled.groups]
    whole = learned.prompt_lengths + np.array(list(chain.from_iterable(lengths)))
    ends = iter(np.cumsum(whole).tolist())
    return [
        [values[end - length : end] for length, end in zip(each, ends, strict=False)]
        for each in lengths
    ]


@dataclass(frozen=True, eq=False)
class StepTokens:
    """The tokens of a step: written by the policy, and packed to learn from."""

    generated: int = 0
    packed: int = 0
    prompts: Sequence[int] = ()
    """[B] lengths of the prompts of the answers learnt from."""
    responses: Sequence[int] = ()
    """[B] lengths of these answers."""


def count_step_tokens(sampled: StepGroups, learned: Learned) -> StepTokens:
    """Count the tokens of a step that is learnt."""
    return StepTokens(
        sampled.counts.tokens.generated,
        learned.packed_tokens,
        learned.prompt_lengths.tolist(),
        [a.trajectory.generated_tokens for group in sampled.groups for a in group.answers],
    )


@dataclass(frozen=True)
class AttentionFlop:
    """The layers of a model that attend over the whole context, or over a window of it.

    A token that sees c others and itself costs `4 · width · (c + 1)` FLOP forwards: products of
    query and key, and of weights and values (arXiv 2204.02311, appendix B).
    """

    widths: Mapping[int | None, int]
    """Sum over layers of heads x size of a head, by window in tokens; None is no window."""

    @classmethod
    def of(cls, config: Any) -> AttentionFlop:
        """Read a Hugging Face configuration; layers that do not attend (linear ones) count none."""
        config = config.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        if values := getattr(config, "v_head_dim", None):  # latent attention: queries are larger
            size = (config.qk_nope_head_dim + config.qk_rope_head_dim + values) // 2
        width = heads * size
        window = getattr(config, "sliding_window", None)
        usual = "full_attention" if window is None else "sliding_attention"
        kinds = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
        widths: dict[int | None, int] = {}
        for kind in kinds:
            if kind in ("full_attention", "sliding_attention"):
                reach = window if kind == "sliding_attention" else None
                widths[reach] = widths.get(reach, 0) + width
        return cls(widths)

    def flop(self, before: ArrayLike, tokens: ArrayLike) -> float:
        """Return the forward FLOP of sequences.

        Args:
            before: [B] tokens that are in the cache already.
            tokens: [B] tokens that are computed behind them.
        """
        first, added = np.asarray(before, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
        total = 0.0
        for window, width in self.widths.items():
            seen = _triangle(first + added, window) - _triangle(first, window)
            total += 4.0 * width * float(seen.sum())
        return total


def _triangle(length: NDArray[np.float64], window: int | None) -> NDArray[np.float64]:
    """Sum the positions that each token of a sequence sees: 1 + 2 + … up to a window's size."""
    reach = length if window is None else np.minimum(length, window)
    return reach * (reach + 1) / 2 + (length - reach) * reach


NO_ATTENTION = AttentionFlop({})


@dataclass(frozen=True)
class StepFlop:
    """The passes of a step over the tokens that it packs, by model.

    Counts 2 FLOP a parameter and token forwards, 4 backwards (arXiv 2001.08361, section 2.1), and
    attention by the lengths of the answers learnt from. The embedding counts once, as the output
    layer. Frozen parameters (LoRA), whose own gradient is not computed, count as the others do; of
    a mixture of experts those that a token goes to count, not all.
    """

    parameters: int
    """Parameters of the policy that a token meets."""
    epochs: int
    """Updates that see a token."""
    forwards: int = 1
    """Forward passes of a model as large as the policy, updates aside: old log-probs, reference."""
    critic_parameters: int = 0
    """Parameters of the critic, which runs forwards once and then takes part in each update."""
    attention: AttentionFlop = NO_ATTENTION
    """Attention of the policy."""
    critic_attention: AttentionFlop = NO_ATTENTION

    def flop(self, tokens: StepTokens) -> float:
        """Return the FLOP of a step, rollout included."""
        prompts, responses = (
            np.asarray(t, dtype=np.float64) for t in (tokens.prompts, tokens.responses)
        )
        learning, written = self.forwards + 3 * self.epochs, max(float(responses.sum()), 1.0)
        # What was written and is not learnt from is taken to be as long.
        attended = self.attention.flop(prompts, responses) * tokens.generated / written
        whole = np.zeros_like(prompts), prompts + responses
        policy = 2.0 * self.parameters * (tokens.generated + learning * tokens.packed)
        policy += attended + learning * self.attention.flop(*whole)
        critic = 2 * self.critic_parameters * tokens.packed + self.critic_attention.flop(*whole)
        return policy + (1 + 3 * self.epochs) * critic


def gpu_peak_tflops(device: str, dtype: str) -> float | None:
    """Return the peak of a device in TFLOP/s by its name; None where it is not known, as of a part
    of a GPU (MIG), and of variants of other sizes."""
    names = [name for name in GPUS if re.search(rf"\b{name}\b", device)]
    names = [] if re.search(r"\b(MIG|Laptop|Ti|D)\b", device) else names
    if not names:
        return None
    gpu = GPUS[max(names, key=len)]
    return gpu.float32 if dtype == "float32" else gpu.bfloat16


@dataclass(frozen=True)
class Throughput:
    """A step's tokens and FLOP over its seconds."""

    passes: StepFlop
    device: torch.device
    peak_tflops: float | None
    """Peak of one device."""
    devices: int = 1

    def figures(self, tokens: StepTokens, times: Mapping[str, Number]) -> dict[str, Number]:
        """Compute `throughput/…`, `memory/…` and `time/PHASE_us_per_token` of a step.

        Args:
            times: as `Stopwatch.lap` gives them.
        """
        busy = times["time/step_s"] - times.get("time/evaluate_s", 0.0)
        generated, packed = tokens.generated, tokens.packed
        if busy <= 0 or not packed:  # resumed for an evaluation only
            return {}
        tflops = self.passes.flop(tokens) / busy / 1e12
        record: dict[str, Number] = {
            "throughput/tokens_per_s": generated / busy,
            "throughput/tokens_per_s_per_device": generated / busy / self.devices,
            "throughput/tflops": tflops,
            "memory/peak_gib": self._peak_gib(),
        }
        if self.peak_tflops is not None:
            record["throughput/mfu"] = tflops / self.peak_tflops / self.devices
        per_token = {
            "rollout": generated,
            "old_logprobs": packed,
            "reference": packed,
            "values": packed,
            "update": packed * self.passes.epochs,
        }
        for phase, number in per_token.items():
            seconds = times.get(f"time/{phase}_s")
            if number and seconds is not None:
                record[f"time/{phase}_us_per_token"] = seconds * 1e6 / number
        return record

    def _peak_gib(self) -> float:
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device) / _GIB
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB / _GIB
