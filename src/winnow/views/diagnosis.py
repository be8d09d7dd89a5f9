"""Rules that find problems of a run in its metrics: evidence, likely cause and remedy of each.

A rule is a pure function of the figures up to a step (`RunHistory`): it returns evidence, or None.
`Diagnosis` asks all rules of `RULES` after each step, while a run goes on or over metrics.jsonl
afterwards (`winnow.views.doctor`), so that both say the same. benchmarks/doctor.py measures what
they find in runs broken on purpose, and their false positives in healthy ones.
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
_PARTS = (
    *("score/", "sampling/", "length/", "actor/", "mismatch/", "scoring/", "time/", "overlap/"),
    "environment/",
)
"""Beginnings of the figures that rules ask for."""
_DEPTH = 21
"""Newest values of a figure that are kept, besides the oldest `WINDOW`."""
_MOST_MALFORMED = 0.2
"""Share of calls."""
_MOST_FAULTS = 0.01
"""Faults an answer."""
_SHAPELESS = "reward without the penalty for length"
_WORK = "seconds of a step without evaluation and saving"
_ANSWERS = "answers of a step, held-out ones included"
_LARGEST = 1e100
"""Figures are cut there, so that their squares are numbers."""


@dataclass(frozen=True)
class RunFinding:
    """A problem that a rule found in a run."""

    name: str
    """The rule's; docs/troubleshooting.md has a section for each."""
    severity: Literal["critical", "warning", "note"]
    """critical: learning is broken; warning: learning is impaired; note: time is wasted."""
    first_step: int
    last_step: int
    """The last step after which the rule held."""
    evidence: str
    """Figures, as they stood after the last of these steps."""
    cause: str
    remedy: str


class RunHistory:
    """The metrics of a run up to a step, as rules read them; absent and NaN values are skipped.

    Args:
        settings: the resolved recipe as a tree of plain values.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = flatten(settings)
        groups, answers = ("sampling.groups_per_step", 64), ("rollout.n", 8)
        self.answers_per_step = self.setting(*groups) * self.setting(*answers)
        self._first: defaultdict[str, list[float]] = defaultdict(list)
        self._last: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_DEPTH))
        self.seen = Counter[str]()
        """Values that each figure has had."""
        self.not_finite = Counter[str]()
        """Steps in which each figure was NaN or infinite."""
        self.steps = 0
        """The last step that was added."""
        self.held_out: list[tuple[float, float]] = []
        """Accuracy of each evaluation, and its standard error."""

    def add(self, record: Record) -> None:
        """Append the record of the next step."""
        figures = {name: value for name, value in record.items() if name.startswith(_PARTS)}
        penalty = record.get("score/parts/overlong/mean", 0.0)
        figures[_SHAPELESS] = record.get(metrics.REWARD, math.nan) - penalty
        other = (record.get(f"time/{name}_s", 0.0) for name in ("evaluate", "checkpoint"))
        figures[_WORK] = record.get(metrics.STEP_S, math.nan) - sum(other)
        held_out = metrics.eval_by_source(record).values()
        prompts = sum(each.get("prompts", 0) for each in held_out)
        figures[_ANSWERS] = self.answers_per_step + self.setting("evaluation.n", 1) * prompts
        for name, value in figures.items():
            self.not_finite[name] += name in record and not math.isfinite(value)
            if math.isfinite(value):
                self.seen[name] += 1
                self._last[name].append(_clamp(value))
                self._first[name] += [_clamp(value)] * (self.seen[name] <= WINDOW)
        if valid := [each for each in map(_accuracy_and_error, held_out) if each is not None]:
            error = math.hypot(*(error for _, error in valid)) / len(valid)
            self.held_out.append((_mean([value for value, _ in valid]), error))

    def latest(self, name: str, count: int = WINDOW) -> list[float]:
        """Return the newest values of a figure, at most `count` of `_DEPTH`."""
        return list(self._last[name])[-count:]

    def earliest(self, name: str, count: int = WINDOW) -> list[float]:
        """Return the oldest values of a figure, at most `count` of `WINDOW`."""
        return self._first[name][:count]

    def mean(self, name: str, last: int = WINDOW) -> float:
        """Return the mean of the newest values; NaN, which meets no bound, if there are none."""
        return _mean(self.latest(name, last))

    def share_of_step(self, name: str) -> float:
        """Return a figure's share of step time (less evaluation and saving) over the last window;
        NaN before there is one."""
        spent, total = (math.fsum(self.latest(each)) for each in (name, _WORK))
        return spent / total if total > 0 and self.seen[name] >= WINDOW else math.nan

    def is_sufficient(self, values: Sequence[float]) -> bool:
        """Return whether equal values, one a step, fill a window or stand for enough answers."""
        return len(values) == WINDOW or len(values) * self.answers_per_step >= _PROOF

    def setting(self, key: str, default: Any) -> Any:
        """Return a key of the recipe, or the default if it is missing or of another type."""
        value = self._settings.get(key)
        return value if isinstance(value, type(default)) else default


Check = Callable[[RunHistory], str | None]
"""Returns the evidence of a problem, or None."""


class Rule(NamedTuple):
    """A problem that can be found."""

    name: str
    severity: Literal["critical", "warning", "note"]
    check: Check
    cause: str
    remedy: str
    steps: int = WINDOW
    """Steps before the rule can fire, except in extreme cases."""
    figure: str = ""
    """The figure that so many of them must have; empty: any run has what the rule looks at."""
    recorded_by: str = ""
    """The runs that record it, as a clause."""
    evaluations: int = 0
    """Evaluations before the rule can fire."""

    def unmet_need(self, run: RunHistory) -> str | None:
        """Return what a run lacks for the rule to be checked; None if it is."""
        count = run.seen[self.figure] if self.figure else run.steps
        if run.not_finite[self.figure] and not count:
            return f"needs {self.figure}, which is not finite in any step"
        if run.steps >= self.steps and not count:
            return f"needs {self.figure}, which {self.recorded_by or 'this run lacks'}"
        if count < self.steps:
            return f"needs {self.steps} step{'s' * (self.steps > 1)}; {count} so far"
        if len(run.held_out) < self.evaluations:
            counts = f"{self.evaluations} evaluations (evaluation.every); {len(run.held_out)}"
            return f"needs {counts} so far"
        return None


def _is_falling(shares: Sequence[float], trials: float) -> bool:
    """Return whether a share falls within the window, by a tenth of itself and beyond chance.

    Args:
        shares: one a step.
        trials: answers, groups or calls behind each.
    """
    before, now, mean = _mean(shares[:2]), _mean(shares[-2:]), _mean(shares)
    chance = 2 * math.sqrt(max(mean * (1 - mean), 0) / max(trials, 1))
    return len(shares) == WINDOW and before - now > max(0.1 * before, chance)


# Rewards and groups


def _flat_check(counts_as_right: bool) -> Check:
    def check(run: RunHistory) -> str | None:
        task = "score/task_reward" if run.seen["score/task_reward/min"] else "score/reward"
        lows, highs = run.latest(f"{task}/min"), run.latest(f"{task}/max")
        if len(lows) != len(highs) or not run.is_sufficient(lows):
            return None
        if max(highs) - min(lows) > 1e-9 * max(1.0, abs(lows[0])):
            return None
        steps = f"last {len(lows)} steps" if len(lows) > 1 else "first step"
        text = f"every answer of the {steps} has the reward {lows[0]:g}"
        accuracy = run.mean("sampling/accuracy", len(lows))
        fires = (accuracy >= 0.5) == counts_as_right
        return f"{text}; {accuracy:.0%} count as right" if fires else None

    return check


def _check_filtered(run: RunHistory) -> str | None:
    keep, is_empty = run.latest("sampling/keep_rate"), run.mean("sampling/empty_bounds", 1) > 0
    is_well = len(keep) < WINDOW or _mean(keep) >= 0.1
    is_well |= _is_falling(
        [1 - share for share in keep], run.setting("sampling.groups_per_step", 64)
    )
    if is_well and not is_empty:
        return None
    kinds = ("all_wrong", "all_right", "failed")
    groups = {kind: math.fsum(run.latest(f"sampling/groups/{kind}")) for kind in kinds}
    passed = f"{_mean(keep):.1%} of the groups passed the filter" if keep else "no group passed"
    counted = ", ".join(f"{n:,.0f} {kind.replace('_', ' ')}" for kind, n in groups.items())
    return f"{passed} in the last steps; rejected: {counted}"


def _check_cut_off(run: RunHistory) -> str | None:
    shares = run.latest("length/truncated")
    bound = 0.1 + 2 * math.sqrt(0.09 / max(run.answers_per_step * WINDOW, 1))  # beyond chance
    limit, length = run.setting("rollout.max_response_tokens", 0), run.mean(metrics.LENGTH)
    evidence = (
        f"{_mean(shares):.1%} of the answers trained on reached the limit of {limit:,} tokens"
    )
    fires = len(shares) == WINDOW and _mean(shares) > bound
    fires = fires and not _is_falling(shares, run.answers_per_step)
    fires = fires or (run.is_sufficient(shares) and min(shares) == 1)
    return f"{evidence}; mean length {length:,.0f}" if fires else None


def _check_scoring(run: RunHistory) -> str | None:
    failed, answers = (math.fsum(run.latest(f"scoring/{n}")) for n in ("failed", "answers"))
    return f"scoring failed for {failed:,.0f} of {answers:,.0f} answers" if failed > 0 else None


# The policy


def _check_entropy_collapse(run: RunHistory) -> str | None:
    before, now = _mean(run.earliest("actor/entropy", 3)), run.mean("actor/entropy")
    was_right, right = _mean(run.earliest(metrics.ACCURACY, 3)), run.mean(metrics.ACCURACY)
    # A policy that is wrong half as often may be twice as sure; one that hardly ever is, surer.
    has_reason = now * (1 - was_right) >= before * (1 - right) or right >= 0.75
    fall = f"entropy fell from {before:.3g} to {now:.3g} nats"
    gain = f"accuracy went from {was_right:.0%} to {right:.0%}"
    fires = run.seen["actor/entropy"] >= _ENOUGH and now < before / 2 and not has_reason
    return f"{fall}, while {gain}" if fires else None


def _check_entropy_blow_up(run: RunHistory) -> str | None:
    before, now = _mean(run.earliest("actor/entropy", 3)), run.mean("actor/entropy", 3)
    fires = run.seen["actor/entropy"] >= 6 and now > max(2 * before, before + 0.15)
    return f"entropy rose from {before:.3g} to {now:.3g} nats" if fires else None


def _clip_shares(run: RunHistory, count: int) -> list[float]:
    if run.seen["actor/clip"]:
        return run.latest("actor/clip", count)
    pairs = (run.latest(f"actor/clip_{side}", count) for side in ("low", "high"))
    return [low + high for low, high in zip(*pairs, strict=False)]


def _check_clip_never(run: RunHistory) -> str | None:
    clipped, updates = _clip_shares(run, _ENOUGH), run.mean("actor/updates")
    moved = max(map(abs, run.latest("actor/approx_kl", _ENOUGH)), default=math.nan)
    is_still = len(clipped) == _ENOUGH and not any(clipped) and updates >= 2 and moved < 1e-5
    evidence = f"no token was clipped in {_ENOUGH} steps; KL within a step was {moved:.1g} nats"
    return evidence if is_still else None


def _check_clip_often(run: RunHistory) -> str | None:
    clipped = _clip_shares(run, WINDOW)
    bound = 0.5 if run.setting("algorithm.policy_loss.name", "") == "gspo" else 0.15
    kl = run.mean("actor/approx_kl", 1)
    is_clipped = len(clipped) == WINDOW and _mean(clipped) > bound
    evidence = f"{_mean(clipped):.1%} of the tokens were clipped; KL within a step {kl:.2g} nats"
    return evidence if is_clipped or kl > 0.1 else None


def _check_gradient_spikes(run: RunHistory) -> str | None:
    norms, skipped = run.latest("actor/grad_norm", _DEPTH), run.mean("actor/skipped_updates", 1)
    if skipped > 0:
        return f"{skipped:,.0f} updates were skipped: their gradient was not finite"
    if len(norms) < 6 or not norms[-1] > 10 * (usual := statistics.median(norms[:-1])) > 0:
        return None
    times = norms[-1] / usual
    return f"the gradient's norm was {norms[-1]:.3g}, {times:,.0f} times its median of {usual:.3g}"


# Reward against held-out accuracy


def _significant_rise(run: RunHistory, name: str) -> tuple[float, float] | None:
    """Return the means of the first and the last window if the rise is significant, else None."""
    before, now = run.earliest(name), run.latest(name)
    if run.seen[name] < _ENOUGH:
        return None
    low, high = _mean(before), _mean(now)
    noise = math.hypot(*(statistics.stdev(each) / math.sqrt(len(each)) for each in (before, now)))
    return (low, high) if high - low > max(3 * noise, 0.05 * abs(low), 1e-9) else None


def _stalled_held_out(run: RunHistory) -> tuple[float, float] | None:
    """Return the first and the newest held-out accuracy if it stalled while training accuracy did
    not rise either, or rose by far more."""
    if len(run.held_out) < 3:
        return None
    (before, error), now = run.held_out[0], _mean([v for v, _ in run.held_out[-2:]])
    gain, trained = now - before, _significant_rise(run, metrics.ACCURACY)
    is_less = trained is None or gain + 2 * error < (trained[1] - trained[0]) / 2
    return (before, now) if gain <= max(error, 0.01) and is_less else None


def _check_length_hacking(run: RunHistory) -> str | None:
    reward, held_out = _significant_rise(run, _SHAPELESS), _stalled_held_out(run)
    length = _significant_rise(run, metrics.LENGTH)
    if not (reward and held_out and length and length[1] > 1.25 * length[0]):
        return None
    return f"length {length[0]:,.0f} to {length[1]:,.0f} tokens, {_describe(reward, held_out)}"


def _check_reward_hacking(run: RunHistory) -> str | None:
    reward, held_out = _significant_rise(run, _SHAPELESS), _stalled_held_out(run)
    return _describe(reward, held_out) if reward and held_out else None


def _describe(reward: tuple[float, float], held_out: tuple[float, float]) -> str:
    pairs = {"reward": reward, "held-out accuracy": held_out}
    return ", ".join(f"{name} {a:.3g} to {b:.3g}" for name, (a, b) in pairs.items())


# Tools and environments


def _check_no_calls(run: RunHistory) -> str | None:
    counts = [run.latest(f"environment/{name}") for name in ("calls", "malformed")]
    is_enough = run.setting("environment.name", "") == "tools" and len(counts[0]) == WINDOW
    if not is_enough or any(map(any, counts)):
        return None
    return f"no answer trained on in the last {WINDOW} steps has a call of a tool"


def _check_malformed(run: RunHistory) -> str | None:
    counts = [run.latest(f"environment/{name}") for name in ("malformed", "calls")]
    bad, total = math.fsum(counts[0]), math.fsum(map(math.fsum, counts))
    if run.seen["environment/malformed"] < WINDOW or not bad > _MOST_MALFORMED * total > 0:
        return None
    shares = [m / (m + n) if m else 0.0 for m, n in zip(*counts, strict=True)]
    if _is_falling(shares, total / WINDOW * run.answers_per_step):
        return None
    return f"{bad / total:.0%} of the calls in the last {WINDOW} steps could not be parsed"


def _check_faults(run: RunHistory) -> str | None:
    counts = run.latest("environment/faults")
    faults, dropped = math.fsum(counts), math.fsum(run.latest("sampling/groups/failed"))
    bound = _MOST_FAULTS * math.fsum(run.latest(_ANSWERS))
    evidence = f"environments failed {faults:,.0f} times in the last {len(counts)} steps"
    groups = f"; {dropped:,.0f} groups were dropped" if dropped else ""
    return evidence + groups if faults > (0 if dropped else bound) else None


# Sampler, trainer, and who waits for whom


def _check_not_comparable(run: RunHistory) -> str | None:
    steps = run.not_finite["mismatch/abs_delta"]
    evidence = f"mismatch/abs_delta was NaN or infinite in {steps} step{'s' * (steps > 1)}"
    return evidence if steps else None


def _check_mismatch(run: RunHistory) -> str | None:
    fresh = "mismatch/age_0/abs_delta"  # older tokens differ because the policy has moved on
    name = fresh if run.seen[fresh] else "mismatch/abs_delta"
    before, now = _mean(run.earliest(name, 3)), run.mean(name)
    is_high = run.seen[name] >= WINDOW and now > 0.05
    is_rising = run.seen[name] >= _ENOUGH and now > max(3 * before, 0.02)
    evidence = f"log-probs of sampler and trainer differ by {now:.2g} nats a token"
    return f"{evidence}; by {before:.2g} in the first steps" if is_high or is_rising else None


def _check_stale(run: RunHistory) -> str | None:
    age, ess = run.mean("sampling/staleness/mean"), run.mean("mismatch/ess")
    evidence = f"groups trained on were started {age:.1f} weight versions earlier"
    fires = run.seen["sampling/staleness/mean"] >= WINDOW and age > 2.5
    size = "" if math.isnan(ess) else f"; effective sample size {ess:.0%}"
    return evidence + size if fires else None


def _check_slow_scoring(run: RunHistory) -> str | None:
    busy, seconds = run.share_of_step("scoring/busy_s"), run.mean("scoring/mean_s")
    evidence = f"a score took {seconds:.2g} s, and waiting for scores took {busy:.0%} of the time"
    return evidence if busy > 0.7 and seconds > 0.25 * run.mean(_WORK) else None


def _wait_check(figure: str, event: str) -> Check:
    def check(run: RunHistory) -> str | None:
        waits = run.share_of_step(figure)
        return f"{event} {waits:.0%} of the time" if waits > 0.6 else None

    return check


_OF_TOOLS = "runs with tools record (environment=tools)"
_OF_ASYNC = "runs that sample while they learn record (trainer/mode)"

# fmt: off
RULES: tuple[Rule, ...] = (
    Rule("reward_flat_wrong", "critical", _flat_check(False),
         "the scorer expects another answer format, or the task is too hard",
         "run `winnow reward try FILE --row 1 --answer TEXT` with a correct answer; if scored as "
         "wrong, fix the scorer or the prompt, else use easier prompts or a stronger model", 1,
         "score/reward/min"),
    Rule("reward_flat_right", "critical", _flat_check(True),
         "the scorer accepts any answer, or the task is solved",
         "run `winnow reward try FILE --row 1 --answer nonsense`; if it is scored right, fix "
         "the scorer (reward.function.path, reward.scorers), else use harder prompts", 1,
         "score/reward/min"),
    Rule("filtered", "critical", _check_filtered,
         "answers to a prompt rarely differ: prompts are too hard or too easy, or labels are wrong",
         "all wrong: use easier prompts, and check a correct answer with `winnow reward try`; all "
         "right: use harder prompts; raise rollout.n so that answers differ more often",
         figure="sampling/keep_rate"),
    Rule("scoring_fails", "warning", _check_scoring,
         "the scorer raises, exceeds its time or memory, or a sandbox or service is unreachable",
         "read the error in the column scorer_error of rollouts/, then fix the scorer or raise "
         "reward.timeout_s; reward.on_failure sets how such groups are handled", 1,
         "scoring/answers"),
    Rule("cut_off", "warning", _check_cut_off,
         "answers exceed the limit, or the model emits no end token",
         "raise rollout.max_response_tokens; if answers loop, penalise length "
         "(reward.overlong.enabled=true) and check for a missing end token (rollout.stop)",
         figure="length/truncated"),
    Rule("entropy_collapse", "warning", _check_entropy_collapse,
         "the policy repeats the same answers, so groups carry less and less signal",
         "raise algorithm.policy_loss.clip_high (0.28 in DAPO), lower optim.lr, or set "
         "algorithm.entropy_coef to a small positive number", _ENOUGH, "actor/entropy"),
    Rule("entropy_blow_up", "warning", _check_entropy_blow_up,
         "the policy diverges: updates are too large, or the entropy bonus is too high",
         "lower optim.lr and algorithm.entropy_coef, or set algorithm/kl/loss=fixed", 6,
         "actor/entropy"),
    Rule("clip_never", "warning", _check_clip_never,
         "updates are so small that the policy hardly changes",
         "raise optim.lr; check optim.grad_clip, and that rewards differ within groups",
         _ENOUGH, "actor/approx_kl"),
    Rule("clip_often", "warning", _check_clip_often,
         "updates are too large for the clip range: most of the gradient is discarded",
         "lower optim.lr or trainer.epochs, or raise trainer.mini_batch_groups",
         figure="actor/approx_kl"),
    Rule("gradient_spikes", "warning", _check_gradient_spikes,
         "reward outliers without normalisation, or a learning rate that is too high",
         "bound the reward, set algorithm.advantage.std_normalization=group, lower optim.lr", 6,
         "actor/grad_norm"),
    Rule("length_hacking", "critical", _check_length_hacking,
         "the reward or the loss favours long answers",
         "remove length from the score, set reward.overlong.enabled=true, try another "
         "algorithm.aggregation", _ENOUGH, evaluations=3),
    Rule("reward_hacking", "critical", _check_reward_hacking,
         "the reward favours something other than correct answers, or prompts are memorised",
         "read the answers with the highest reward; change the weights of its parts "
         "(reward.weights.task), or add prompts if the data was repeated often (data/epoch)",
         _ENOUGH, evaluations=3),
    Rule("no_calls", "warning", _check_no_calls,
         "the prompt does not show the tools, the model was never taught to call them, or its "
         "calls are written in another form than the one that is read",
         "read answers with `winnow rollouts RUN`; if they have calls, set environment.calls to "
         "their form, else check that the chat template shows the tools (data.chat_template), or "
         "begin with a model that calls them, such as one of an SFT on examples",
         figure="environment/calls", recorded_by=_OF_TOOLS),
    Rule("calls_malformed", "warning", _check_malformed,
         "the model writes calls in another form than the one that is read, or broken JSON",
         "read the turns with malformed calls with `winnow rollouts RUN`; set environment.calls to "
         "the form that the model writes, lower rollout.temperature, or begin with a model that "
         "was taught the form",
         figure="environment/malformed", recorded_by=_OF_TOOLS),
    Rule("environment_faults", "warning", _check_faults,
         "the environment raises, or exceeds its time or memory",
         "read the faults in the log, then fix the environment, or raise environment.timeout_s or "
         "environment.memory_mb", 1,
         "environment/faults", "runs with an environment record"),
    Rule("not_comparable", "critical", _check_not_comparable,
         "log-probs of the engine or the trainer are not finite: weights or logits are NaN or "
         "infinite",
         "run `winnow check-engine`; resume from a checkpoint before these steps with a lower "
         "optim.lr or another model.dtype", 1,
         "mismatch/abs_delta"),
    Rule("mismatch", "warning", _check_mismatch,
         "the engine samples from another policy: precision, kernels, top-p/top-k, stale weights",
         "set rollout.top_p=1, rollout.top_k=0 and rollout.min_p=0, run `winnow check-engine`, or "
         "correct for it: algorithm/correction/weight=truncated",
         figure="mismatch/abs_delta"),
    Rule("stale", "warning", _check_stale,
         "answers wait too long before they are trained on",
         "lower sampling.lookahead and sampling.max_staleness, or rollout.engine.slots",
         figure="sampling/staleness/mean"),
    Rule("slow_scoring", "warning", _check_slow_scoring,
         "scoring takes longer than generation",
         "raise reward.workers or reward.processes, lower reward.timeout_s, speed up the scorers",
         figure="scoring/busy_s"),
    Rule("learner_starves", "note", _wait_check("time/wait_s", "the learner waited for groups"),
         "groups are generated more slowly than they are learnt",
         "raise rollout.engine.processes, rollout.engine.slots or sampling.lookahead",
         figure="time/wait_s", recorded_by=_OF_ASYNC),
    Rule("engine_starves", "note", _wait_check("overlap/engines_wait_s", "engines were idle"),
         "groups are generated faster than they are learnt",
         "raise trainer.strategy.ranks, trainer.microbatch_tokens or sampling.max_staleness",
         figure="overlap/engines_wait_s", recorded_by=_OF_ASYNC),
)
# fmt: on
_ORDER = ("critical", "warning", "note")


class Diagnosis:
    """The findings of all rules in a run so far.

    Args:
        settings: the resolved recipe as a tree of plain values.
        records: the run's records so far.
    """

    def __init__(self, settings: Mapping[str, Any], records: Iterable[Record] = ()) -> None:
        self._history = RunHistory(settings)
        self._cases: dict[str, RunFinding] = {}
        self.records = 0
        """Records that were added."""
        for record in records:
            self.add(int(record["step"]), record)

    def add(self, step: int, record: Record) -> list[RunFinding]:
        """Check the rules after another step; returns findings that are new."""
        self._history.add(record)
        self._history.steps = step
        self.records += 1
        new = []
        for rule in RULES:
            if (evidence := rule.check(self._history)) is None:
                continue
            name, texts = rule.name, (evidence, rule.cause, rule.remedy)
            first = self._cases[name].first_step if name in self._cases else step
            finding = RunFinding(name, rule.severity, first, step, *texts)
            new += [] if name in self._cases else [finding]
            self._cases[name] = finding
        return new

    def findings(self) -> list[RunFinding]:
        """Return all findings, the most severe first."""
        return sorted(self._cases.values(), key=lambda f: (_ORDER.index(f.severity), f.first_step))

    def unmet_needs(self) -> dict[str, str]:
        """Return what each rule that could not be checked so far needs, by the rule's name."""
        needs = ((rule.name, rule.unmet_need(self._history)) for rule in RULES)
        return {name: need for name, need in needs if need and name not in self._cases}


def remedy_of(name: str) -> str:
    """Return the remedy of the rule of a name."""
    return next(rule.remedy for rule in RULES if rule.name == name)


def _accuracy_and_error(figures: Mapping[str, float]) -> tuple[float, float] | None:
    """Return the accuracy of an evaluation and its standard error; None without a finite one."""
    for name, value in figures.items():
        if name.startswith("avg@") and not name.endswith("_se") and math.isfinite(value):
            error = figures.get(f"{name}_se", 0.0)
            return _clamp(value), _clamp(error) if math.isfinite(error) else 0.0
    return None


def _clamp(value: float) -> float:
    return max(min(float(value), _LARGEST), -_LARGEST)


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan
