"""Diseases of a run, found by rules over its record: figures, likely cause and remedy of each.

A rule is a pure function of the figures up to a step (`Course`): it returns its evidence, or None.
`Diagnosis` asks all rules of `RULES` after each step, while a run goes on or over metrics.jsonl
afterwards (`winnow.views.doctor`), so that both say the same. benchmarks/doctor.py measures what
they find in runs made sick on purpose, and how often they are wrong about healthy ones.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from winnow.config.load import flatten
from winnow.observe import metrics
from winnow.observe.metrics import Record

WINDOW = 5
"""Steps over which a figure is averaged before a rule looks at it."""
_ENOUGH = 2 * WINDOW
_PROOF = 16
"""Answers all alike that are no chance: a run may be judged by them before it has a window."""
_PARTS = ("score/", "sampling/", "length/", "actor/", "mismatch/", "scoring/", "time/", "overlap/")
"""Beginnings of the figures that rules ask for."""
_DEPTH = 21
"""Newest values of a figure that are kept, besides the oldest `WINDOW`."""
_SHAPELESS = "reward without the penalty for length"
_WORK = "seconds of a step without evaluation and saving"
_LARGEST = 1e100
"""Figures are cut there, so that their squares are numbers."""


@dataclass(frozen=True)
class RunFinding:
    """A disease that a rule has found in a run."""

    name: str
    """The rule's; docs/troubleshooting.md has a section for each."""
    severity: Literal["critical", "warning", "note"]
    """critical: nothing is learnt, or nothing true; warning: learning suffers; note: time is lost.
    """
    first_step: int
    last_step: int
    """The last step after which the rule held."""
    evidence: str
    """Figures, as they stood after the last of these steps."""
    cause: str
    remedy: str


class Course:
    """The figures of a run up to a step, as rules ask for them; absent and NaN ones are left out.

    Args:
        settings: the resolved recipe as a tree of plain values.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = flatten(settings)
        self._first: defaultdict[str, list[float]] = defaultdict(list)
        self._last: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_DEPTH))
        self.seen = Counter[str]()
        """Values that each figure has had."""
        self.not_finite = Counter[str]()
        """Steps in which each figure was NaN or infinite."""
        self.held_out: list[tuple[float, float]] = []
        """Accuracy of each evaluation, and its standard error."""

    def add(self, record: Record) -> None:
        """Take in the record of the next step."""
        figures = {name: value for name, value in record.items() if name.startswith(_PARTS)}
        penalty = record.get("score/parts/overlong/mean", 0.0)
        figures[_SHAPELESS] = record.get(metrics.REWARD, math.nan) - penalty
        other = (record.get(f"time/{name}_s", 0.0) for name in ("evaluate", "checkpoint"))
        figures[_WORK] = record.get(metrics.STEP_S, math.nan) - sum(other)
        for name, value in figures.items():
            self.not_finite[name] += name in record and not math.isfinite(value)
            if math.isfinite(value):
                self.seen[name] += 1
                self._last[name].append(_bounded(value))
                self._first[name] += [_bounded(value)] * (self.seen[name] <= WINDOW)
        accuracies = [_accuracy(figures) for figures in metrics.by_source(record).values()]
        if valid := [each for each in accuracies if each is not None]:
            error = math.hypot(*(error for _, error in valid)) / len(valid)
            self.held_out.append((_mean([value for value, _ in valid]), error))

    def last(self, name: str, count: int = WINDOW) -> list[float]:
        """Return the newest values of a figure, at most `count` of `_DEPTH`."""
        return list(self._last[name])[-count:]

    def first(self, name: str, count: int = WINDOW) -> list[float]:
        """Return the oldest values of a figure, at most `count` of `WINDOW`."""
        return self._first[name][:count]

    def mean(self, name: str, count: int = WINDOW) -> float:
        """Return the mean of the newest values; NaN, which no bound is met by, without any."""
        return _mean(self.last(name, count))

    def share_of_step(self, name: str) -> float:
        """Return the share of the seconds of steps, evaluation and saving left out, over a window;
        NaN before there is one."""
        spent, total = (math.fsum(self.last(each)) for each in (name, _WORK))
        return spent / total if total > 0 and self.seen[name] >= WINDOW else math.nan

    def is_proof(self, values: Sequence[float]) -> bool:
        """Return whether values alike, one a step, are a window, or of many answers from the first
        step on."""
        answers = self.setting("sampling.groups_per_step", 64) * self.setting("rollout.n", 8)
        return len(values) == WINDOW or len(values) * answers >= _PROOF

    def setting(self, key: str, default: Any) -> Any:
        """Return a key of the recipe; what an older recipe lacks, or has as another type, is the
        default."""
        value = self._settings.get(key)
        return value if isinstance(value, type(default)) else default


Check = Callable[[Course], str | None]
"""Returns the evidence of a disease, or None where there is none."""


class Rule(NamedTuple):
    """A disease that can be found."""

    name: str
    severity: Literal["critical", "warning", "note"]
    check: Check
    cause: str
    remedy: str
    steps: int = WINDOW
    """Steps of a run before it can be found, but for extremes."""


# Rewards and groups


def _flat(counts_as_right: bool) -> Check:
    def check(course: Course) -> str | None:
        task = "score/task_reward" if course.seen["score/task_reward/min"] else "score/reward"
        lows, highs = course.last(f"{task}/min"), course.last(f"{task}/max")
        if len(lows) != len(highs) or not course.is_proof(lows):
            return None
        if max(highs) - min(lows) > 1e-9 * max(1.0, abs(lows[0])):
            return None
        steps = f"last {len(lows)} steps" if len(lows) > 1 else "first step"
        text = f"every answer of the {steps} has the reward {lows[0]:g}"
        accuracy = course.mean("sampling/accuracy", len(lows))
        return (
            f"{text}; {accuracy:.0%} count as right"
            if (accuracy >= 0.5) == counts_as_right
            else None
        )

    return check


def _filtered(course: Course) -> str | None:
    keep, is_empty = course.last("sampling/keep_rate"), course.mean("sampling/empty_bounds", 1) > 0
    if not is_empty and (len(keep) < WINDOW or _mean(keep) >= 0.1):
        return None
    kinds = ("all_wrong", "all_right", "failed")
    groups = {kind: math.fsum(course.last(f"sampling/groups/{kind}")) for kind in kinds}
    passed = f"{_mean(keep):.1%} of the groups passed the filter" if keep else "no group passed"
    counted = ", ".join(f"{n:,.0f} {kind.replace('_', ' ')}" for kind, n in groups.items())
    return f"{passed} in the last steps; of the others: {counted}"


def _cut_off(course: Course) -> str | None:
    shares = course.last("length/truncated")
    answers = course.setting("sampling.groups_per_step", 64) * course.setting("rollout.n", 8)
    bound = 0.1 + 2 * math.sqrt(0.09 / max(answers * WINDOW, 1))  # beyond chance
    limit, length = course.setting("rollout.max_response_tokens", 0), course.mean(metrics.LENGTH)
    evidence = (
        f"{_mean(shares):.1%} of the answers trained on were ended by the limit of {limit:,} tokens"
    )
    is_sick = len(shares) == WINDOW and _mean(shares) > bound
    is_sick = is_sick or (course.is_proof(shares) and min(shares) == 1)
    return f"{evidence}; mean length {length:,.0f}" if is_sick else None


def _scoring_fails(course: Course) -> str | None:
    failed, answers = (math.fsum(course.last(f"scoring/{n}")) for n in ("failed", "answers"))
    return f"scoring failed for {failed:,.0f} of {answers:,.0f} answers" if failed > 0 else None


# The policy


def _entropy_collapse(course: Course) -> str | None:
    before, now = _mean(course.first("actor/entropy", 3)), course.mean("actor/entropy")
    was_right, right = _mean(course.first(metrics.ACCURACY, 3)), course.mean(metrics.ACCURACY)
    # A policy that is wrong half as often may be twice as sure; one that hardly ever is, surer.
    has_reason = now * (1 - was_right) >= before * (1 - right) or right >= 0.75
    fall = f"entropy fell from {before:.3g} to {now:.3g} nats"
    gain = f"accuracy went from {was_right:.0%} to {right:.0%}"
    is_sick = course.seen["actor/entropy"] >= _ENOUGH and now < before / 2 and not has_reason
    return f"{fall}, while {gain}" if is_sick else None


def _entropy_blow_up(course: Course) -> str | None:
    before, now = _mean(course.first("actor/entropy", 3)), course.mean("actor/entropy", 3)
    is_sick = course.seen["actor/entropy"] >= 6 and now > max(2 * before, before + 0.15)
    return f"entropy rose from {before:.3g} to {now:.3g} nats" if is_sick else None


def _clipped(course: Course, count: int) -> list[float]:
    if course.seen["actor/clip"]:
        return course.last("actor/clip", count)
    pairs = (course.last(f"actor/clip_{side}", count) for side in ("low", "high"))
    return [low + high for low, high in zip(*pairs, strict=False)]


def _clip_never(course: Course) -> str | None:
    clipped, updates = _clipped(course, _ENOUGH), course.mean("actor/updates")
    moved = max(map(abs, course.last("actor/approx_kl", _ENOUGH)), default=math.nan)
    is_still = len(clipped) == _ENOUGH and not any(clipped) and updates >= 2 and moved < 1e-5
    evidence = f"no token was clipped in {_ENOUGH} steps; KL within a step was {moved:.1g} nats"
    return evidence if is_still else None


def _clip_often(course: Course) -> str | None:
    clipped = _clipped(course, WINDOW)
    bound = 0.5 if course.setting("algorithm.policy_loss.name", "") == "gspo" else 0.15
    kl = course.mean("actor/approx_kl", 1)
    is_clipped = len(clipped) == WINDOW and _mean(clipped) > bound
    evidence = f"{_mean(clipped):.1%} of the tokens were clipped; KL within a step {kl:.2g} nats"
    return evidence if is_clipped or kl > 0.1 else None


def _gradient_spikes(course: Course) -> str | None:
    norms, skipped = course.last("actor/grad_norm", _DEPTH), course.mean("actor/skipped_updates", 1)
    if skipped > 0:
        return f"{skipped:,.0f} updates were left out: their gradient was not finite"
    if len(norms) < 6 or not norms[-1] > 10 * (usual := statistics.median(norms[:-1])) > 0:
        return None
    times = norms[-1] / usual
    return f"the gradient's norm was {norms[-1]:.3g}, {times:,.0f} times its median of {usual:.3g}"


# Reward against held-out accuracy


def _rise(course: Course, name: str) -> tuple[float, float] | None:
    """Return the means of the first and the last window, where the second is higher beyond
    chance."""
    before, now = course.first(name), course.last(name)
    if course.seen[name] < _ENOUGH:
        return None
    low, high = _mean(before), _mean(now)
    noise = math.hypot(*(statistics.stdev(each) / math.sqrt(len(each)) for each in (before, now)))
    return (low, high) if high - low > max(3 * noise, 0.05 * abs(low), 1e-9) else None


def _held_out_flat(course: Course) -> tuple[float, float] | None:
    """Return the first and the newest held-out accuracy, where it has not risen, and where accuracy
    in training has not either, or by much more than chance allows."""
    if len(course.held_out) < 3:
        return None
    (before, error), now = course.held_out[0], _mean([v for v, _ in course.held_out[-2:]])
    gain, trained = now - before, _rise(course, metrics.ACCURACY)
    is_less = trained is None or gain + 2 * error < (trained[1] - trained[0]) / 2
    return (before, now) if gain <= max(error, 0.01) and is_less else None


def _length_hacking(course: Course) -> str | None:
    reward, held_out = _rise(course, _SHAPELESS), _held_out_flat(course)
    length = _rise(course, metrics.LENGTH)
    if not (reward and held_out and length and length[1] > 1.25 * length[0]):
        return None
    return f"length {length[0]:,.0f} to {length[1]:,.0f} tokens, {_hacking(reward, held_out)}"


def _reward_hacking(course: Course) -> str | None:
    reward, held_out = _rise(course, _SHAPELESS), _held_out_flat(course)
    return _hacking(reward, held_out) if reward and held_out else None


def _hacking(reward: tuple[float, float], held_out: tuple[float, float]) -> str:
    pairs = {"reward": reward, "held-out accuracy": held_out}
    return ", ".join(f"{name} {a:.3g} to {b:.3g}" for name, (a, b) in pairs.items())


# Sampler, trainer, and who waits for whom


def _not_comparable(course: Course) -> str | None:
    steps = course.not_finite["mismatch/abs_delta"]
    evidence = f"mismatch/abs_delta was NaN or infinite in {steps} step{'s' * (steps > 1)}"
    return evidence if steps else None


def _mismatch(course: Course) -> str | None:
    fresh = "mismatch/age_0/abs_delta"  # older tokens differ because the policy has moved on
    name = fresh if course.seen[fresh] else "mismatch/abs_delta"
    before, now = _mean(course.first(name, 3)), course.mean(name)
    is_high = course.seen[name] >= WINDOW and now > 0.05
    is_rising = course.seen[name] >= _ENOUGH and now > max(3 * before, 0.02)
    evidence = f"log-probs of sampler and trainer differ by {now:.2g} nats a token"
    return f"{evidence}; by {before:.2g} in the first steps" if is_high or is_rising else None


def _stale(course: Course) -> str | None:
    age, ess = course.mean("sampling/staleness/mean"), course.mean("mismatch/ess")
    evidence = f"groups trained on were begun {age:.1f} weight versions before"
    is_sick = course.seen["sampling/staleness/mean"] >= WINDOW and age > 2.5
    size = "" if math.isnan(ess) else f"; effective sample size {ess:.0%}"
    return evidence + size if is_sick else None


def _slow_scoring(course: Course) -> str | None:
    busy, seconds = course.share_of_step("scoring/busy_s"), course.mean("scoring/mean_s")
    evidence = f"a score took {seconds:.2g} s, and scores were waited for {busy:.0%} of the time"
    return evidence if busy > 0.7 and seconds > 0.25 * course.mean(_WORK) else None


def _starves(figure: str, event: str) -> Check:
    def check(course: Course) -> str | None:
        waits = course.share_of_step(figure)
        return f"{event} {waits:.0%} of the time" if waits > 0.6 else None

    return check


# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("reward_flat_wrong", "critical", _flat(False),
         "the scorer wants another format than the model writes, or the task is too hard",
         "ask `winnow reward try FILE --row 1 --answer TEXT` with a right answer; if it scores as "
         "wrong, mend the scorer or the prompt, else use easier prompts or a stronger model", 1),
    Rule("reward_flat_right", "critical", _flat(True),
         "the scorer finds any answer right, or the task is solved",
         "ask `winnow reward try FILE --row 1 --answer nonsense`; if that scores as right, mend "
         "the scorer (reward.function.path, reward.scorers), else use harder prompts", 1),
    Rule("filtered", "critical", _filtered,
         "answers to a prompt rarely differ: it is too hard or too easy, or labels are wrong",
         "all wrong: easier prompts, a right answer tried with `winnow reward try`; all right: "
         "harder ones; raise rollout.n so that answers differ more often"),
    Rule("scoring_fails", "warning", _scoring_fails,
         "the scorer raises, runs out of time or memory, or a sandbox or service is not there",
         "read the error in the column scorer_error of rollouts/, then mend the scorer, or raise "
         "reward.timeout_s; reward.on_failure says what becomes of such groups", 1),
    Rule("cut_off", "warning", _cut_off,
         "answers are longer than the limit, or the model does not end them",
         "raise rollout.max_response_tokens; if answers go round in circles, penalise length "
         "(reward.overlong.enabled=true) and look for a missing end token (rollout.stop)"),
    Rule("entropy_collapse", "warning", _entropy_collapse,
         "the policy writes the same answer again and again, so that groups say ever less",
         "raise algorithm.policy_loss.clip_high (0.28 in DAPO), lower optim.lr, or set "
         "algorithm.entropy_coef to a small positive number", _ENOUGH),
    Rule("entropy_blow_up", "warning", _entropy_blow_up,
         "the policy comes apart: updates are too large, or entropy is paid for",
         "lower optim.lr and algorithm.entropy_coef, or set algorithm/kl/loss=fixed", 6),
    Rule("clip_never", "warning", _clip_never,
         "updates are so small that the policy stays where it is",
         "raise optim.lr; look at optim.grad_clip, and whether rewards differ within groups",
         _ENOUGH),
    Rule("clip_often", "warning", _clip_often,
         "updates are too large for the clip range: most of a step's gradient is thrown away",
         "lower optim.lr or trainer.epochs, or raise trainer.mini_batch_groups"),
    Rule("gradient_spikes", "warning", _gradient_spikes,
         "rewards with outliers and without normalisation, or a learning rate that is too high",
         "bound the reward, set algorithm.advantage.std_normalization=group, lower optim.lr", 6),
    Rule("length_hacking", "critical", _length_hacking,
         "the reward pays for length, or the loss favours long answers",
         "take length out of the score, set reward.overlong.enabled=true, try another "
         "algorithm.aggregation", _ENOUGH),
    Rule("reward_hacking", "critical", _reward_hacking,
         "the reward pays for something other than right answers, or prompts are known by heart",
         "read the best rewarded answers; weigh the parts of the reward anew (reward.weights.task) "
         "or use more prompts if the data has been round often (data/epoch)", _ENOUGH),
    Rule("not_comparable", "critical", _not_comparable,
         "the engine or the trainer gives log-probs that are not finite: their weights or logits "
         "are NaN or infinite",
         "try `winnow check-engine`; go on from a checkpoint before these steps with a lower "
         "optim.lr, or another model.dtype", 1),
    Rule("mismatch", "warning", _mismatch,
         "the engine samples from another policy: precision, kernels, cut sampling, old weights",
         "set rollout.top_p=1, rollout.top_k=0 and rollout.min_p=0, try `winnow check-engine`, or "
         "weigh by it: algorithm/correction/weight=truncated"),
    Rule("stale", "warning", _stale,
         "answers wait long before they are learnt",
         "lower sampling.lookahead and sampling.max_staleness, or rollout.engine.slots"),
    Rule("slow_scoring", "warning", _slow_scoring,
         "scores are waited for more than tokens",
         "raise reward.workers or reward.processes, lower reward.timeout_s, make scorers fast"),
    Rule("learner_starves", "note", _starves("time/wait_s", "learning waited for groups"),
         "groups come more slowly than they are learnt",
         "raise rollout.engine.processes, rollout.engine.slots or sampling.lookahead"),
    Rule("engine_starves", "note", _starves("overlap/engines_wait_s", "engines had to wait"),
         "groups are written faster than they are learnt",
         "raise trainer.strategy.ranks, trainer.microbatch_tokens or sampling.max_staleness"),
)
# fmt: on
_ORDER = ("critical", "warning", "note")


class Diagnosis:
    """The findings in a run up to now.

    Args:
        settings: the resolved recipe as a tree of plain values.
        records: the run's records so far.
    """

    def __init__(self, settings: Mapping[str, Any], records: Iterable[Record] = ()) -> None:
        self._course = Course(settings)
        self._cases: dict[str, RunFinding] = {}
        for record in records:
            self.add(int(record["step"]), record)

    def add(self, step: int, record: Record) -> list[RunFinding]:
        """Look at a further step; returns what is found for the first time."""
        self._course.add(record)
        new = []
        for rule in RULES:
            evidence = rule.check(self._course)
            if evidence is None:
                continue
            name, severity, _, cause, remedy, _ = rule
            first = self._cases[name].first_step if name in self._cases else step
            finding = RunFinding(name, severity, first, step, evidence, cause, remedy)
            new += [] if name in self._cases else [finding]
            self._cases[name] = finding
        return new

    def findings(self) -> list[RunFinding]:
        """Return all findings, the gravest first."""
        return sorted(self._cases.values(), key=lambda f: (_ORDER.index(f.severity), f.first_step))


def too_short(steps: int) -> str:
    """Say which rules a run is too short for, and how many steps they need; empty if for none."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for rule in RULES:
        if rule.steps > steps:
            names[rule.steps].append(rule.name)
    count = sum(map(len, names.values()))
    needs = "; ".join(f"{', '.join(names[need])} need {need}" for need in sorted(names))
    return f"{steps} steps: too few for {count} of {len(RULES)} rules ({needs})" if count else ""


def remedy_of(name: str) -> str:
    """Return the remedy of the rule of a name."""
    return next(rule.remedy for rule in RULES if rule.name == name)


def _accuracy(figures: Mapping[str, float]) -> tuple[float, float] | None:
    """Return the accuracy of an evaluation and its standard error; NaN is none."""
    for name, value in figures.items():
        if name.startswith("avg@") and not name.endswith("_se") and math.isfinite(value):
            error = figures.get(f"{name}_se", 0.0)
            return _bounded(value), _bounded(error) if math.isfinite(error) else 0.0
    return None


def _bounded(value: float) -> float:
    return max(min(float(value), _LARGEST), -_LARGEST)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
