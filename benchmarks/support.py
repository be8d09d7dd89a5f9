"""The support matrix: every pair of choices of a recipe, as the configuration's rules judge it.

    python -m benchmarks.support > docs/support.md

`AXES` holds the choices, each a few overrides of one small recipe. A pair is refused if the recipe
with both of them is, and supported if not. `covering_runs` puts the supported pairs together into
few whole recipes, which test_support.py of tests/e2e and tests/vllm train for three steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any, Literal

from pydantic import ValidationError

from winnow.config.load import parse_recipe
from winnow.config.root import Config
from winnow.config.rules import check_config
from winnow.config.schema import validation_errors
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
    *(
        "reward.judge.parse.pattern='(\\d)'",
        "reward.judge.parse.lowest=0",
        "reward.judge.cache=none",
    ),
    *("reward.judge.parse.highest=9", "reward.judge.max_tokens=12", "reward.on_failure=wrong"),
    "reward.max_failure_share=1",
)
_JUDGE_ENGINE = "reward.judge.path=judge", "reward.judge.max_prompt_tokens=48", *_JUDGE
_CONVERSATION = "environment.workers=1", "data.chat_template=chat.jinja"
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
            Choice("completion order", ("sampling.commit=completion_order",)),
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
            Choice("all weights"),
            Choice("LoRA, merged", ("model/adapter=lora", "model.adapter.rank=2")),
            Choice(
                "LoRA, adapter",
                ("model/adapter=lora", "model.adapter.publish=adapter", "model.adapter.rank=2"),
            ),
        ),
    ),
    Axis(
        "model",
        "rollout.routing_replay",
        (
            Choice("dense", ("model.path=dense",)),
            Choice("mixture", ("model.path=mixture",)),
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
                ("reference/strategy=fsdp2", "reference.strategy.ranks=1", *_KL),
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
                ("critic/strategy=fsdp2", "critic.strategy.ranks=1", *_GAE),
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
                ("reward/model/strategy=fsdp2", "reward.model.strategy.ranks=1", *_CLASSIFIER),
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
            Choice(
                "judge, torch",
                ("reward/judge=engine", "reward/judge/engine=torch", *_JUDGE_ENGINE),
                "judge/requests",
            ),
            Choice(
                "judge, vllm",
                ("reward/judge=engine", "reward/judge/engine=vllm", *_JUDGE_ENGINE),
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
        "environment",
        "environment",
        (
            Choice("single turns"),
            Choice(
                "tools",
                (
                    *("environment=tools", "environment.tools=[talk.py:double]"),
                    *("environment.calls='(?P<digit>\\d)'", *_CONVERSATION),
                ),
                "environment/faults",
            ),
            Choice(
                "custom environment",
                ("environment=custom", "environment.path=talk.py:Talk", *_CONVERSATION),
                "environment/faults",
            ),
            Choice(
                "environment processes",
                (
                    *("environment=custom", "environment.processes=1"),
                    *("environment.path=talk.py:Talk", *_CONVERSATION),
                ),
                "environment/faults",
            ),
        ),
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
        self._first = parse_recipe(None, settings_of(FIRST)).model_dump()
        self._chosen = {
            name: parse_recipe(None, settings_of(completed([name]))).model_dump()
            for name in CHOICES
        }
        self.refusals: dict[Pair, list[str]] = {
            (one.name, two.name): self.lines([one.name, two.name])
            for a, b in combinations(AXES, 2)
            for one, two in product(a.choices, b.choices)
        }

    def lines(self, names: Sequence[str]) -> list[str]:
        """Return the lines that refuse the recipe with these choices, the others being first."""
        values: Any = self._first
        for name in names:
            values = _merged(values, self._first, self._chosen[name])
        try:
            check_config(Config.model_validate(values))
        except ValidationError as error:
            return validation_errors(error, values, lambda path: "the command line")
        except ConfigError as error:
            return str(error).splitlines()
        return []


def _merged(values: Any, first: Any, chosen: Any) -> Any:
    """Return a tree with what a choice changes of the first recipe; variants change as a whole."""
    if chosen == first:
        return values
    trees = values, first, chosen
    if not all(isinstance(tree, dict) for tree in trees) or first.keys() != chosen.keys():
        return chosen
    return {key: _merged(values[key], first[key], chosen[key]) for key in chosen}


def completed(names: Iterable[str]) -> tuple[str, ...]:
    """Return a choice of each axis: those of the names, and the first of the other axes."""
    named = {AXIS_BY_CHOICE[name].name: name for name in names}
    return tuple(named.get(axis.name, axis.choices[0].name) for axis in AXES)


def settings_of(names: Sequence[str]) -> list[str]:
    """Return the overrides of a whole recipe."""
    return [*BASE, *(setting for name in names for setting in CHOICES[name].settings)]


def covering_runs(matrix: Matrix, runner: Runner) -> list[tuple[str, ...]]:
    """Return recipes, a choice of each axis, that hold all supported pairs of a runner.

    Greedy: a recipe begins with the first pair that is not in one yet, and takes on each further
    axis the choice that brings most such pairs.
    """
    runners: set[Runner] = {"cpu", runner}
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
    matrix: Matrix, pair: Pair, left: Mapping[Pair, None], runners: set[Runner]
) -> tuple[str, ...]:
    """Return a supported recipe that holds a pair, and many others that are left to cover."""
    run = {AXIS_BY_CHOICE[name].name: name for name in pair}

    def gain(name: str) -> int:
        return sum((a, name) in left or (name, a) in left for a in run.values())

    for axis in AXES:
        if axis.name in run:
            continue
        names = [choice.name for choice in axis.choices if choice.runner in runners]
        for name in sorted(names, key=gain, reverse=True):
            pairs = [(a, name) for a in run.values()] + [(name, a) for a in run.values()]
            if any(matrix.refusals.get(p) for p in pairs):
                continue
            if not matrix.lines([*run.values(), name]):
                run[axis.name] = name
                break
    return completed(run.values())


_HEAD = """# Support matrix

Each pair of the choices below is either supported, or refused before training: on standard error, in
one line with field, value and remedy, with exit code 2. The page is generated from the rules by
`python -m benchmarks.support > docs/support.md`; `tests/e2e/test_support.py` compares the two, runs
every refused pair, and trains the others.

| | |
|---|---|
| ✓ | supported: one of the [runs](#runs) below has both, and trains three steps of a tiny model. Tests check that all steps finish, that the policy gets gradients, and that a critic, a reference, a judge, … record their metrics. On a CPU; megatron-core with [stubs for CUDA](megatron.md#test-coverage) |
| ○ | accepted by the rules, needs a GPU, and [has not been run](gpu.md) |
| a number | [refused](#refusals) with that line |

Restrictions that depend on the model are checked when it is read, and are not on this page: families,
heads, layers and experts for [Megatron](megatron.md#unsupported-settings) or
[a mixture](ranks.md#mixtures-of-experts). A custom engine must return the routes of
tokens for `rollout.routing_replay=true`. Losses, estimators and KL are in [algorithms](algorithms.md), keys
of verl, TRL and OpenRLHF in [coming from](coming_from.md).

## Choices

The first choice of an axis can be combined with everything; tables use it for axes that they do not
name.
"""  # noqa: E501
_OVERVIEW = """
## Axis by axis

✓: every choice of the one goes with every choice of the other. Numbers: [refusals](#refusals) of
some pairs.
"""
_RUNS = """
## Runs

They hold each supported pair once or more. An axis that a run does not name has its first choice.
`make test` trains the first {fast} of those on a CPU, `make test-real` the others.
"""
FAST_RUNS = 4
"""Runs that `make test` has; the others are marked `real`."""
HEADINGS: Mapping[Runner, str] = {
    "cpu": "### On a CPU",
    "vllm": "### With vLLM (`make test-vllm PYTEST_ARGS='-m real'`)",
}


def page(matrix: Matrix) -> str:
    """Return docs/support.md."""
    lines = {pair: found[0] for pair, found in matrix.refusals.items() if found}
    numbers = {line: number for number, line in enumerate(dict.fromkeys(lines.values()), 1)}
    marks = {
        pair: str(numbers[lines[pair]])
        if pair in lines
        else "○"
        if any(CHOICES[name].runner == "gpu" for name in pair)
        else "✓"
        for pair in matrix.refusals
    }
    parts = [_HEAD, *_table(["axis", "key", "choices"], _choice_rows()), _OVERVIEW]
    parts += [*_overview(marks), "", "## Pairs of axes with refusals"]
    for a, b in combinations(AXES, 2):
        rows = [[one.name, *(marks[one.name, two.name] for two in b.choices)] for one in a.choices]
        if any(mark.isdigit() for row in rows for mark in row[1:]):
            head = [f"{a.name} \\ {b.name}", *(two.name for two in b.choices)]
            parts += ["", *_table(head, rows)]
    parts += ["", "## Refusals", ""]
    parts += [f"{number}. `{line}`" for line, number in numbers.items()]
    parts.append(_RUNS.format(fast=FAST_RUNS))
    for runner, heading in HEADINGS.items():
        runs = enumerate(covering_runs(matrix, runner), 1)
        parts += [heading, "", *(f"{i}. {_run_text(run)}" for i, run in runs), ""]
    return "\n".join(parts)


def runs_of(text: str, runner: Runner) -> list[tuple[str, ...]]:
    """Return the runs that the page lists, as `covering_runs` does."""
    runs = []
    for line in text.partition(HEADINGS[runner] + "\n\n")[2].partition("\n\n")[0].splitlines():
        names = line.partition(". ")[2].split(" · ")
        runs.append(completed([name for name in names if name in CHOICES]))
    return runs


def _run_text(run: Sequence[str]) -> str:
    return " · ".join(name for name in run if name not in FIRST) or "each axis its first choice"


def _choice_rows() -> Iterator[list[str]]:
    for axis in AXES:
        choices = [
            f"{choice.name} ({', '.join(f'`{setting}`' for setting in choice.settings[:2])})"
            if choice.settings
            else choice.name
            for choice in axis.choices
        ]
        yield [axis.name, f"`{axis.key}`", "<br>".join(choices)]


def _overview(marks: Mapping[Pair, str]) -> Iterator[str]:
    rows = []
    for row, axis in enumerate(AXES[1:], 1):
        cells = []
        for before in AXES[:row]:
            pairs = product(before.choices, axis.choices)
            found = {marks[a.name, b.name] for a, b in pairs} - {"✓", "○"}
            cells.append(", ".join(sorted(found, key=int)) or "✓")
        rows.append([f"**{axis.name}**", *cells, *[""] * (len(AXES) - 1 - row)])
    return _table(["", *(axis.name for axis in AXES[:-1])], rows)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(head)} |"
    yield "|" + "---|" * len(head)
    for row in rows:
        yield f"| {' | '.join(row)} |"


def main() -> None:
    """Print the page."""
    print(page(Matrix()), end="")


if __name__ == "__main__":
    main()
