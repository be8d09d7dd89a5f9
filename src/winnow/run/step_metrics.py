"""The metrics of a step: of its groups and of its compute (names: `winnow.observe.metrics`)."""

from __future__ import annotations

import math
import re
import resource
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from winnow.evaluation.evaluator import SCORES_CASES
from winnow.evaluation.statistics import finite_numbers, majority_accuracy, vote_of
from winnow.learning.learner import Learned
from winnow.observe.format import percent, safe_excerpt
from winnow.observe.gpus import GPUS
from winnow.observe.metrics import Metrics, Number, grouped
from winnow.observe.rollouts import Decode, RolloutGroup
from winnow.rewards.pipeline import OVERLONG, OVERLONG_REWARD, TASK
from winnow.sampling.accounting import StepGroups
from winnow.sampling.filters import differ
from winnow.types import Score, Trajectory

_PRED_CHARACTERS, _EXAMPLE_CHARACTERS = 40, 600


def record_step(metrics: Metrics, sampled: StepGroups, learned: Learned) -> None:
    """Record scores, lengths and the sampler's counts, besides the learner's metrics."""
    answers = [answer for group in sampled.groups for answer in group.answers]
    metrics.spread("score/reward", [a.score.reward for a in answers])
    metrics.spread("score/accuracy", [a.score.accuracy for a in answers])
    _record_parts(metrics, [answer.score for answer in answers])
    record_sources(metrics, sampled)
    metrics.spread("length/response", [a.trajectory.generated_tokens for a in answers])
    metrics.spread("length/prompt", learned.prompt_lengths)
    metrics.mean_of("length/truncated", sum(a.trajectory.truncated for a in answers), len(answers))
    _record_conversations(metrics, [answer.trajectory for answer in answers])
    _record_sampling(metrics, sampled)
    metrics.last("sampling/tokens/in_progress", sampled.counts.in_progress)


def _record_conversations(metrics: Metrics, trajectories: Sequence[Trajectory]) -> None:
    """Record turns, calls and rewards of conversations, and what their environments measured."""
    if not any(turn.figures for each in trajectories for turn in each.turns):
        return
    for trajectory in trajectories:
        turns = trajectory.turns
        last = {name: value for turn in turns for name, value in turn.figures.items()}
        for name in ("calls", "malformed"):
            last[name] = sum(turn.figures.get(name, 0.0) for turn in turns)
        last |= {"turns": len(turns), "reward": sum(turn.reward for turn in turns)}
        for name, value in last.items():
            metrics.mean(f"environment/{name}", value)
        bad = sum(turn.figures.get("malformed", 0.0) > 0 for turn in turns)
        metrics.mean_of("environment/malformed_turns", bad, len(turns))


def _record_parts(metrics: Metrics, scores: Sequence[Score]) -> None:
    """Record the parts of scores, each over the answers that have it."""
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
    """Record scores by data source, over all groups that the filter saw in the step."""
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
            values = finite_numbers(column)
            if values is None or not n:
                continue
            metrics.mean_of(f"{name}/{figure}/mean", sum(values), n)
            metrics.mean(f"{name}/{figure}/best@{n}", max(values))
            metrics.mean(f"{name}/{figure}/worst@{n}", min(values))
        votes = [vote_of(score.extra.get("pred")) for score in scores]
        says = not any(SCORES_CASES in score.extra for score in scores)
        if says and any("pred" in score.extra for score in scores):
            metrics.mean(f"{name}/accuracy/maj@{n}", majority_accuracy(accuracy, votes))


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
        **({"tokens/environment": tokens.environment_tokens} if tokens.environment_tokens else {}),
        "answers/truncated": tokens.truncated_answers,
        "answers/resumed": tally.resumed_answers,
        "answers/aborted": tally.aborted_answers,
        "answers/retried": tally.retried_answers,
        "empty_bounds": tally.empty_bounds,
        "staleness/mean": counts.staleness_mean,
        "staleness/max": counts.staleness_max,
    }
    for name, figure in figures.items():
        if not math.isnan(figure):  # as in a step of carried groups only
            metrics.last(f"sampling/{name}", figure)


def rollout_groups(sampled: StepGroups, learned: Learned) -> list[RolloutGroup]:
    """Return the groups that a step trained, with their advantages, and those it discarded."""
    answers = [answer for group in sampled.groups for answer in group.answers]
    lengths = np.array([sum(map(len, each.trajectory.segments)) for each in answers], np.int64)
    ends = np.cumsum(learned.prompt_lengths + lengths)  # [B] of samples, packed in this order
    spans = [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    columns: list[Any] = [learned.advantages, learned.mismatch]
    for values in (learned.old_logprobs, learned.entropies):
        columns.append(None if values is None else [values[span] for span in spans])
    groups, first = [], 0
    for settled in sampled.trained:
        part = slice(first, first + len(settled.group.answers))
        cells = (None if column is None else column[part] for column in columns)
        groups.append(RolloutGroup(settled.group, "trained", *cells))
        first = part.stop
    return groups + [RolloutGroup(settled.group, settled.fate) for settled in sampled.discarded]


def signal_line(groups: Iterable[RolloutGroup], command: str) -> str:
    """Describe the signal of a run's first step, as a warning where there is none: prompts whose
    answers differ in reward, all rewards, answers cut off, and what a scorer read from them.

    Args:
        groups: of the step, also those that the filter left out.
        command: shows the answers.
    """
    scored = [each for each in groups if each.outcome != "failed" and each.group.answers]
    answers = [answer for each in scored for answer in each.group.answers]
    if not answers:
        return f"Warning: first step: no signal: no answer was scored; look at it with {command}"
    qualified = [each.group for each in scored if each.outcome not in ("all_right", "all_wrong")]
    mixed = sum(differ([a.score.reward for a in group.answers]) for group in qualified)
    rewards = [answer.score.reward for answer in answers]
    # The baseline of a batch or a critic's compares answers to different prompts.
    is_learnt = any(each.advantages is not None and each.advantages.any() for each in scored)
    has_signal = mixed > 0 or (is_learnt and differ(rewards))
    parts = [f"{mixed:,} of {len(scored):,} prompts have better and worse answers"]
    if has_signal and not mixed:
        parts = ["rewards differ between prompts"]
    cut_off = sum(answer.trajectory.truncated for answer in answers) / len(answers)
    parts += [f"rewards {min(rewards):.2f} to {max(rewards):.2f}", f"{percent(cut_off)} cut off"]
    extras = [answer.score.extra for answer in answers]
    votes = [vote_of(e["pred"]) for e in extras if "pred" in e and SCORES_CASES not in e]
    if read := [safe_excerpt(vote, _PRED_CHARACTERS) for vote in votes if vote is not None]:
        parts.append(f"{len(read):,} of {len(votes):,} answers could be read, such as '{read[0]}'")
    elif votes:
        parts.append(f"nothing could be read from {len(votes):,} answers")
    if has_signal:
        return f"first step: {'; '.join(parts)}"
    return f"Warning: first step: no signal: {'; '.join(parts)}; look at them with {command}"


def example_lines(
    step: int, groups: Iterable[RolloutGroup], count: int, decode: Decode
) -> Iterator[str]:
    """Yield lines with an answer to each of the step's first `count` prompts of a data source, what
    it was compared with, and its score."""
    answered = sorted((e.group for e in groups if e.group.answers), key=lambda group: group.id)
    for members in grouped((group.prompt.data_source, group) for group in answered).values():
        for group in members[:count]:
            prompt, answer, score = group.prompt, group.answers[0], group.answers[0].score
            parts = ", ".join(f"{name} {value + 0:g}" for name, value in score.parts.items())
            worth = f"{score.reward:g} ({parts}), accuracy {score.accuracy:g}"
            yield f"step {step}, {safe_excerpt(prompt.data_source, _EXAMPLE_CHARACTERS)}"
            for title, text in (
                ("prompt", prompt.text),
                ("answer", decode(answer.trajectory.token_ids)),
                ("truth", str(prompt.ground_truth)),
                ("score", f"failed: {score.error}" if score.error else worth),
            ):
                yield f"  {title:<6}  {safe_excerpt(text, _EXAMPLE_CHARACTERS)}"


@dataclass(frozen=True, eq=False)
class StepTokens:
    """The tokens of a step: generated by the policy, and packed for learning."""

    generated: int = 0
    packed: int = 0
    prompts: Sequence[int] = ()
    """[B] prompt lengths of the trained answers."""
    responses: Sequence[int] = ()
    """[B] lengths of the trained answers."""


def count_step_tokens(sampled: StepGroups, learned: Learned) -> StepTokens:
    """Count the tokens of a learned step."""
    return StepTokens(
        sampled.counts.tokens.generated,
        learned.packed_tokens,
        learned.prompt_lengths.tolist(),
        [a.trajectory.generated_tokens for group in sampled.groups for a in group.answers],
    )


@dataclass(frozen=True)
class AttentionFlop:
    """FLOP of attention, over the whole context or a sliding window.

    A token that sees c others and itself costs `4 · width · (c + 1)` FLOP forwards: products of
    query and key, and of weights and values (arXiv 2204.02311, appendix B).
    """

    widths: Mapping[int | None, int]
    """Sum over layers of heads x size of a head, by window in tokens; None is no window."""

    @classmethod
    def of(cls, config: Any) -> AttentionFlop:
        """Read a Hugging Face configuration; layers without softmax attention count nothing."""
        config = config.get_text_config()
        heads = config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // heads
        if values := getattr(config, "v_head_dim", None):  # latent attention: queries are larger
            size = (config.qk_nope_head_dim + config.qk_rope_head_dim + values) // 2
        width = heads * size
        window = getattr(config, "sliding_window", None)
        usual = "full_attention" if window is None else "sliding_attention"
        kinds = getattr(config, "layer_types", None) or [usual] * config.num_hidden_layers
        windows = {"full_attention": None, "sliding_attention": window}
        layers = Counter(windows[kind] for kind in kinds if kind in windows)
        return cls({reach: count * width for reach, count in layers.items()})

    def flop(self, before: ArrayLike, tokens: ArrayLike) -> float:
        """Return the forward FLOP of sequences.

        Args:
            before: [B] tokens in the cache.
            tokens: [B] tokens computed after them.
        """
        first, added = np.asarray(before, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
        total = 0.0
        for window, width in self.widths.items():
            seen = _sum_attended(first + added, window) - _sum_attended(first, window)
            total += 4.0 * width * float(seen.sum())
        return total


def _sum_attended(length: NDArray[np.float64], window: int | None) -> NDArray[np.float64]:
    """Sum the positions that each token of a sequence sees: 1 + 2 + … up to a window's size."""
    reach = length if window is None else np.minimum(length, window)
    return reach * (reach + 1) / 2 + (length - reach) * reach


NO_ATTENTION = AttentionFlop({})


@dataclass(frozen=True)
class StepFlop:
    """FLOP of a step, from the passes that it makes over its packed tokens.

    Counts 2 FLOP a parameter and token forwards, 4 backwards (arXiv 2001.08361, section 2.1), and
    attention by the lengths of the trained answers. The embedding counts once, as the output layer.
    Frozen parameters (LoRA) count like trained ones; of a mixture of experts, only the experts that
    a token is routed to. A prompt that is run once for its answers counts for each of them.
    """

    parameters: int
    """Active parameters of the policy."""
    epochs: int
    """Updates on each token."""
    forwards: int = 1
    """Forward passes of a model of the policy's size, besides updates: old log-probs, reference.
    A pass over some groups only (`algorithm.correction.mode=reuse`) is not counted."""
    critic_parameters: int = 0
    """Parameters of the critic, which has one forward pass and all updates."""
    attention: AttentionFlop = NO_ATTENTION
    """Attention of the policy."""
    critic_attention: AttentionFlop = NO_ATTENTION

    def flop(self, tokens: StepTokens) -> float:
        """Return the FLOP of a step, rollout included."""
        prompts, responses = (
            np.asarray(t, dtype=np.float64) for t in (tokens.prompts, tokens.responses)
        )
        learning, written = self.forwards + 3 * self.epochs, max(float(responses.sum()), 1.0)
        # Answers that are not trained are assumed to be of the same lengths.
        attended = self.attention.flop(prompts, responses) * tokens.generated / written
        whole = np.zeros_like(prompts), prompts + responses
        policy = 2.0 * self.parameters * (tokens.generated + learning * tokens.packed)
        policy += attended + learning * self.attention.flop(*whole)
        critic = 2 * self.critic_parameters * tokens.packed + self.critic_attention.flop(*whole)
        return policy + (1 + 3 * self.epochs) * critic


def gpu_peak_tflops(device: str, dtype: str) -> float | None:
    """Return the peak TFLOP/s of a GPU by its name; None if unknown, as for MIG slices and for
    variants of other sizes."""
    names = [name for name in GPUS if re.search(rf"\b{name}\b", device)]
    names = [] if re.search(r"\b(MIG|Laptop|Ti|D)\b", device) else names
    if not names:
        return None
    gpu = GPUS[max(names, key=len)]
    return gpu.float32 if dtype == "float32" else gpu.bfloat16


@dataclass(frozen=True)
class Throughput:
    """Throughput of a step: tokens and FLOP per second."""

    passes: StepFlop
    device: torch.device
    peak_tflops: float | None
    """Peak of one device."""
    devices: int = 1

    def figures(self, tokens: StepTokens, times: Mapping[str, Number]) -> dict[str, Number]:
        """Compute `throughput/…`, `memory/…` and `time/PHASE_us_per_token` of a step.

        Args:
            times: from `Stopwatch.lap`.
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
            "memory/peak_gib": peak_gib(self.device),
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


def peak_gib(device: torch.device) -> float:
    """Return the most memory that this process has taken: of its GPU, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
