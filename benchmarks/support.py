"""The support matrix: every pair of choices of a recipe, as the configuration's rules judge it.

    python -m benchmarks.support > docs/support.md

`AXES` holds the choices, each a few overrides of one small recipe. A pair is refused if the recipe
with both of them is, and supported if not. `covering_runs` puts the supported pairs together into few
whole recipes, which tests/e2e/test_support.py and tests/vllm/test_support.py train for three steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal

from pydantic import ValidationError

from winnow.config.load import resolve_recipe
from winnow.config.root import Config
from winnow.config.rules import check_config
from winnow.config.schema import validation_lines
from winnow.errors import ConfigError

Runner = Literal["cpu", "vllm", "gpu"]


@dataclass(frozen=True)
class Choice:
    """One choice of an axis."""

    name: str
    settings: tuple[str, ...] = ()
    figure: str = ""
    """A figure of metrics.jsonl that each step of a run with this choice has."""
    runner: Runner = "cpu"
    """Where a run with it can be tested: on a CPU, in the environment of vLLM, on GPUs alone."""
    slow: bool = False
    """True where a run takes so long that `make test-real` has it, and not `make test`."""


@dataclass(frozen=True)
class Axis:
    """Choices of which a recipe has one; the first excludes no choice of another axis."""

    name: str
    key: str
    choices: tuple[Choice, ...]


BASE = (
    *("data/task=sort_digits", "data.task.min_digits=2", "data.task.max_digits=4"),
    *("data.task.eval_problems=2", "data.max_prompt_tokens=16", "evaluation.before=false"),
    *("rollout.n=2", "rollout.max_response_tokens=12", "reward.cosine.enabled=true"),
    *("reward.weights.task=0", "sampling/filter=none", "sampling.groups_per_step=2"),
    *("sampling.max_staleness=2", "trainer.steps=3", "optim.lr=1e-2", "run.threads=1"),
    *("trainer.save_every=null", "observe.console=off"),
)
"""The recipe, as it is trained in the tests: two groups of two answers a step, scored by length."""
_KL = "algorithm/kl/loss=fixed", "algorithm.kl.loss.coef=0.1"
_GAE = "algorithm/advantage=gae", "critic.optim.lr=1e-3"
_JUDGE = (
    *("reward.judge.template='{{ question }}{{ answer }}'", "reward/judge/parse=number"),
    *("reward.judge.parse.pattern='(\\d)'", "reward.judge.parse.lowest=0", "reward.judge.cache=none"),
    *("reward.judge.parse.highest=9", "reward.judge.max_tokens=12", "reward.on_failure=wrong"),
    "reward.max_failure_share=1",
)
_JUDGE_ENGINE = "reward/judge=engine", "reward.judge.path=judge", "reward.judge.max_prompt_tokens=48"
_CLASSIFIER = "reward/model=sequence_classifier", "reward.model.path=classifier"

AXES = (
    Axis(
        "mode",
        "trainer/mode",
        (
            Choice("sync", ("trainer/mode=sync",)),
            Choice("one_step_off", ("trainer/mode=one_step_off",)),
            Choice("async", ("trainer/mode=async",)),
        ),
    ),
    Axis(
        "bits",
        "run.deterministic",
        (
            Choice("free", ("run.deterministic=false",)),
            Choice("deterministic", ("run.deterministic=true",)),
        ),
    ),
    Axis(
        "late groups",
        "sampling.max_staleness, commit",
        (
            Choice("wait"),
            Choice("dropped", ("sampling.max_staleness=0",)),
            Choice("first ended first", ("sampling.commit=completion_order",)),
        ),
    ),
    Axis(
        "policy",
        "trainer/strategy",
        (
            Choice("fsdp2", ("trainer/strategy=fsdp2",), "ranks/lockstep"),
            Choice("single", ("trainer/strategy=single",)),
            Choice(
                "single, compiled",
                ("trainer/strategy=single", "trainer.strategy.compile=true"),
                slow=True,
            ),
            Choice(
                "fsdp2, Ulysses",
                ("trainer/strategy=fsdp2", "trainer.strategy.sequence=2"),
                "ranks/lockstep",
            ),
            Choice(
                "megatron, tensor",
                ("trainer/strategy=megatron", "trainer.strategy.tensor=2"),
                "ranks/lockstep",
            ),
            Choice(
                "megatron, pipeline",
                ("trainer/strategy=megatron", "trainer.strategy.pipeline=2"),
                "ranks/lockstep",
            ),
        ),
    ),
    Axis(
        "engine",
        "rollout/engine",
        (
            Choice("torch process", ("rollout.engine.processes=1",), "publish/max_delta"),
            Choice("torch in run", ("rollout.engine.processes=0",)),
            Choice("http", ("rollout/engine=http", "rollout.engine.url=http://127.0.0.1:1")),
            Choice("custom", ("rollout/engine=custom", "rollout.engine.path=mine.py:Mine")),
            Choice("vllm", ("rollout/engine=vllm",), "publish/max_delta", "vllm"),
            Choice(
                "vllm, asleep", ("rollout/engine=vllm", "rollout.engine.sleep=true"), runner="gpu"
            ),
        ),
    ),
    Axis(
        "weights",
        "model/adapter",
        (
            Choice("all"),
            Choice("LoRA, merged", ("model/adapter=lora", "model.adapter.rank=2")),
            Choice(
                "LoRA, adapter",
                ("model/adapter=lora", "model.adapter.rank=2", "model.adapter.publish=adapter"),
            ),
        ),
    ),
    Axis(
        "model",
        "rollout.routing_replay",
        (
            Choice("dense", ("model.path=dense",)),
            Choice("mixture", ("model.path=mixture",), "experts/max_load"),
            Choice(
                "routing replay",
                ("model.path=mixture", "rollout.routing_replay=true"),
                "experts/rerouted",
            ),
        ),
    ),
    Axis(
        "reference",
        "reference/strategy",
        (
            Choice("no reference"),
            Choice("reference", _KL, "actor/kl_loss"),
            Choice(
                "reference ranks",
                (*_KL, "reference/strategy=fsdp2", "reference.strategy.ranks=1"),
                "actor/kl_loss",
            ),
        ),
    ),
    Axis(
        "critic",
        "critic/strategy",
        (
            Choice("no critic"),
            Choice("critic", _GAE, "critic/value_loss"),
            Choice(
                "critic ranks",
                (*_GAE, "critic/strategy=fsdp2", "critic.strategy.ranks=1"),
                "critic/value_loss",
            ),
        ),
    ),
    Axis(
        "reward model",
        "reward/model",
        (
            Choice("no reward model"),
            Choice("reward model", _CLASSIFIER, "score/parts/model/mean"),
            Choice(
                "reward model ranks",
                (*_CLASSIFIER, "reward/model/strategy=fsdp2", "reward.model.strategy.ranks=1"),
                "score/parts/model/mean",
            ),
        ),
    ),
    Axis(
        "judge",
        "reward/judge",
        (
            Choice("no judge"),
            Choice(
                "judge, openai",
                (
                    *("reward/judge=openai", "reward.judge.base_url=http://127.0.0.1:1/v1"),
                    *("reward.judge.model=m", *_JUDGE),
                ),
                "judge/requests",
            ),
            Choice("judge, torch", (*_JUDGE_ENGINE, *_JUDGE), "judge/requests"),
            Choice(
                "judge, vllm",
                (*_JUDGE_ENGINE, "reward/judge/engine=vllm", *_JUDGE),
                "judge/requests",
                "vllm",
            ),
        ),
    ),
    Axis(
        "scoring",
        "reward.processes",
        (Choice("in run"), Choice("scoring processes", ("reward.processes=1",))),
    ),
    Axis(
        "cluster",
        "cluster",
        (Choice("local"), Choice("ray", ("cluster=ray", "cluster.cpus=0.1"), slow=True)),
    ),
    Axis(
        "updates",
        "trainer.mini_batch_groups",
        (Choice("one update"), Choice("two updates", ("trainer.mini_batch_groups=1",))),
    ),
    Axis(
        "old log-probs",
        "algorithm.correction.mode",
        (
            Choice("recompute"),
            Choice("bypass", ("algorithm.correction.mode=bypass",)),
            Choice("fused", ("algorithm.correction.mode=fused",)),
        ),
    ),
)
CHOICES = {choice.name: choice for axis in AXES for choice in axis.choices}
AXIS_BY_CHOICE = {choice.name: axis for axis in AXES for choice in axis.choices}
FIRST = tuple(axis.choices[0].name for axis in AXES)

Pair = tuple[str, str]


class Matrix:
    """The lines that refuse a recipe with two choices; none for a supported pair."""

    def __init__(self) -> None:
        self._first = resolve_recipe(None, settings_of(FIRST)).model_dump()
        self._chosen = {
            choice.name: resolve_recipe(
                None, settings_of((*FIRST[:i], choice.name, *FIRST[i + 1 :]))
            ).model_dump()
            for i, axis in enumerate(AXES)
            for choice in axis.choices
        }
        self.refusals: dict[Pair, list[str]] = {
            (one.name, two.name): self.lines([one.name, two.name])
            for a, b in combinations(AXES, 2)
            for one, two in product(a.choices, b.choices)
        }

    def lines(self, names: Sequence[str]) -> list[str]:
        """Return the lines that refuse the recipe with these choices, the others being first."""
        values = self._first
        for name in names:
            values = _merged(values, self._first, self._chosen[name])
        try:
            check_config(Config.model_validate(values))
        except ValidationError as error:
            return validation_lines(error, values, lambda path: "the command line")
        except ConfigError as error:
            return str(error).splitlines()
        return []


def _merged(values: Any, first: Any, chosen: Any) -> Any:
    """Return a tree with what a choice changes of the first recipe; a variant changes as a whole."""
    if chosen == first:
        return values
    trees = values, first, chosen
    if not all(isinstance(tree, dict) for tree in trees) or first.keys() != chosen.keys():
        return chosen
    return {key: _merged(values[key], first[key], chosen[key]) for key in chosen}


def settings_of(names: Sequence[str]) -> list[str]:
    """Return the overrides of a whole recipe."""
    return [*BASE, *(setting for name in names for setting in CHOICES[name].settings)]


def covering_runs(matrix: Matrix, runner: Runner) -> list[tuple[str, ...]]:
    """Return recipes, a choice of each axis, that hold each supported pair of a runner once or more.

    Greedy: a recipe begins with the first pair that is not in one yet, and takes on each further
    axis the choice that brings most such pairs.
    """
    runners = {"cpu", runner}
    pairs = {
        pair: {CHOICES[name].runner for name in pair}
        for pair, lines in matrix.refusals.items()
        if not lines
    }
    left = {pair: None for pair, kinds in pairs.items() if kinds <= runners and runner in kinds}
    runs = []
    while left:
        run = _complete(matrix, next(iter(left)), left, runners)
        pairs_of_run = set(combinations(run, 2))
        assert left.keys() & pairs_of_run, "a recipe of a supported pair is refused"
        left = {pair: None for pair in left if pair not in pairs_of_run}
        runs.append(run)
    return sorted(runs, key=lambda run: any(CHOICES[name].slow for name in run))


def _complete(
    matrix: Matrix, pair: Pair, left: Mapping[Pair, None], runners: set[str]
) -> tuple[str, ...]:
    """Return a supported recipe that holds a pair, and many others that are left to cover."""
    run = {AXIS_BY_CHOICE[name].name: name for name in pair}

    def gain(name: str) -> int:
        return sum((a, name) in left or (name, a) in left for a in run.values())

    for axis in AXES:
        if axis.name in run:
            continue
        names = [choice.name for choice in axis.choices if choice.runner in runners]
        for name in sorted(names, key=gain, reverse=True):  # stable: the first of those with most
            pairs = [(a, name) for a in run.values()] + [(name, a) for a in run.values()]
            if any(matrix.refusals.get(p) for p in pairs):
                continue
            if not matrix.lines([*run.values(), name]):
                run[axis.name] = name
                break
    return tuple(run[axis.name] for axis in AXES)
