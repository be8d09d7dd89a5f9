"""The summary printed at the end of a run: accuracy, an example, cost, and next commands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from winnow.observe.format import (
    DASH,
    WIDTH,
    count,
    duration,
    figure_table,
    number,
    percent,
    printable,
    safe_excerpt,
    spaced,
)
from winnow.observe.jsonl import Evaluation, evaluations, seconds_by_phase, tokens_by_use
from winnow.observe.metrics import Record
from winnow.observe.rollouts import read_rollouts

_ANSWER_CHARACTERS = 240
_SAMPLE_COLUMNS = ("group", "answer", "outcome", "accuracy", "prompt", "response", "turns")
_TOKEN_CLASSES = {
    "trained": "trained on",
    "no_advantage": "trained on, no signal",
    "all_right": "all right, no signal",
    "all_wrong": "all wrong, no signal",
    "surplus": "surplus, dropped",
    "stale": "too old",
    "failed": "failed",
    "in_progress": "in progress at the end",
}

_ADVANTAGE = "score/advantage/"
_NOTHING_LEARNT = "Nothing was learnt: all advantages were 0 (see winnow doctor RUN)"


@dataclass(frozen=True)
class Sample:
    """One held-out question with its answer before and after training."""

    question: str
    before: Sequence[tuple[str, str]]
    """Author and text of each turn; an answer without an environment has one, without an author."""
    before_right: bool
    after: Sequence[tuple[str, str]]
    after_right: bool


def pick_samples(before: Path, after: Path) -> list[Sample]:
    """Pick a question that training changed from wrong to right, else the first with its text.

    Greedy answers where there are any, else the first one sampled. Empty where an evaluation was
    not made, or kept no text (`observe.rollout_text_groups`).

    Raises:
        WinnowError: a file is damaged.
    """
    if not before.is_file() or not after.is_file():
        return []
    old, new = _read_answers(before), _read_answers(after)
    pairs = [(old[group], new[group]) for group in sorted(old.keys() & new.keys())]
    if not pairs:
        return []
    rights = [(b["accuracy"] >= 1, a["accuracy"] >= 1) for b, a in pairs]
    place = rights.index((False, True)) if (False, True) in rights else 0
    (was, now), (was_right, is_right) = pairs[place], rights[place]
    return [Sample(now["prompt"], _turns_of(was), was_right, _turns_of(now), is_right)]


def _turns_of(answer: Mapping[str, Any]) -> list[tuple[str, str]]:
    turns = answer.get("turns") or [{"author": "", "text": answer["response"]}]
    return [(turn["author"], turn["text"]) for turn in turns]


def _read_answers(file: Path) -> dict[int, dict[str, Any]]:
    """Map each group whose text was kept to the answer that is shown of it."""
    table = read_rollouts(file)
    rows = table.select([c for c in _SAMPLE_COLUMNS if c in table.column_names]).to_pylist()
    with_text = [row for row in rows if row["response"] is not None and row["answer"] == 0]
    greedy = [row for row in with_text if row["outcome"] == "held_out_greedy"]
    return {row["group"]: row for row in greedy or with_text}


def print_summary(
    console: Console,
    title: str,
    records: Sequence[Record],
    *,
    samples: Sequence[Sample] = (),
    paths: Mapping[str, Path] | None = None,
    commands: Mapping[str, str] | None = None,
) -> None:
    """Print the summary of a run, at most 100 columns wide; empty parts are skipped.

    Args:
        records: the lines of metrics.jsonl.
        paths: files by what they hold.
        commands: command lines, and what each does.
    """
    width = min(WIDTH, console.width)
    line = "=" if console.options.ascii_only else "\u2500"
    evaluated = [(record["step"], evaluations(record)) for record in records]
    measured = [(step, by_source) for step, by_source in evaluated if by_source]
    before = measured[0][1] if measured and measured[0][0] == 0 else {}
    after = measured[-1][1] if measured and measured[-1][0] > 0 else {}
    steps = [record for record in records if record["step"] > 0]
    flat = [r for r in steps if r.get(f"{_ADVANTAGE}min") == r.get(f"{_ADVANTAGE}max") == 0]
    tokens = tokens_by_use(records)
    if flat:
        tokens["no_advantage"] = tokens_by_use(flat)["trained"]
        tokens["trained"] -= tokens["no_advantage"]
    parts: list[RenderableType] = [
        "",
        Text(printable(title, console.encoding), style="bold"),
        Text(line * width, style="dim", no_wrap=True),
        *([Text(_NOTHING_LEARNT, style="red")] if flat and len(flat) == len(steps) else []),
        *(
            _accuracy_table(source, before.get(source), after.get(source))
            for source in dict.fromkeys([*before, *after])
        ),
        *(_sample_table(sample, console.encoding) for sample in samples),
        _cost_tables(tokens, seconds_by_phase(records)),
        *_two_columns(console, "Look at", {k: str(v) for k, v in (paths or {}).items()}),
        *_next_steps(console, commands or {}, width),
    ]
    console.print(Group(*parts), width=width, crop=False)


def _cost_tables(tokens: Mapping[str, int], seconds: Mapping[str, float]) -> Columns:
    """Make the tables of tokens and time, side by side where they fit."""
    tables: list[RenderableType] = []
    if sum(tokens.values()):
        uses = {label: tokens[name] for name, label in _TOKEN_CLASSES.items() if name in tokens}
        tables.append(_share_table("Tokens generated", "tokens", uses, lambda n: f"{n:,}"))
    if seconds:
        phases = {phase.replace("_", " "): value for phase, value in seconds.items()}
        tables.append(_share_table("Time", "min:s", phases, duration))
    return Columns(tables, padding=(0, 3, 0, 0))


def _accuracy_table(source: str, before: Evaluation | None, after: Evaluation | None) -> Padding:
    present = [evaluation for evaluation in (before, after) if evaluation]
    prompts = next((e.prompts for e in present if e.prompts), None)
    of = f"{count(prompts)} held-out problems of {source}" if prompts else f"held out: {source}"
    table = figure_table("before", "after", title=of)

    def row(title: str, get: Callable[[Evaluation], float | None], is_share: bool = True) -> None:
        values = [None if e is None else get(e) for e in (before, after)]
        if any(value is not None for value in values):
            show = (lambda v: percent(v, 1)) if is_share else (lambda v: number(v, 1))
            table.add_row(title, *map(show, values))

    row("right, sampled (pass@1)", lambda e: e.accuracy)
    row("right, greedy", lambda e: e.greedy)
    for kind, label in (("best_pass", "right at least once"), ("best_maj", "majority right")):
        k = next((getattr(e, kind)[0] for e in present if getattr(e, kind)), 0)
        row(f"{label} in {k}", lambda e, kind=kind: (getattr(e, kind) or (0, None))[1])  # type: ignore[misc]
    row("cut off at the limit", lambda e: e.truncated)
    if any(evaluation.truncated for evaluation in present):
        row("right, of those that ended", lambda e: e.avg_ended)
    row("length of an answer", lambda e: e.length, is_share=False)
    return spaced(table)


def _sample_table(sample: Sample, encoding: str) -> Padding:
    title = safe_excerpt(sample.question, _ANSWER_CHARACTERS, encoding)
    table = figure_table(title=f"A held-out problem: {title}")
    is_conversation = any(author for author, _ in (*sample.before, *sample.after))
    for _ in range(2 + is_conversation):
        table.add_column(no_wrap=True, overflow="crop")
    table.add_column(overflow="fold")
    for when, turns, is_right in (
        ("before", sample.before, sample.before_right),
        ("after", sample.after, sample.after_right),
    ):
        verdict = Text("right", style="green") if is_right else Text("wrong", style="red")
        first: tuple[RenderableType, ...] = (when, verdict)
        for author, text in turns:
            authors = (Text(author, style="dim"),) if is_conversation else ()
            shown = safe_excerpt(text, _ANSWER_CHARACTERS, encoding)
            table.add_row(*first, *authors, Text(shown))
            first = ("", "")
    return spaced(table)


def _share_table(
    title: str, unit: str, amounts: Mapping[str, float], show: Callable[[float], str]
) -> Padding:
    total = sum(amounts.values())
    table = figure_table(unit, "share", title=title)
    for name, value in amounts.items():
        table.add_row(name, show(value), percent(value / total, 1) if total else DASH)
    table.add_section()
    table.add_row("in all", show(total), percent(1.0, 1))
    return spaced(table)


def _next_steps(console: Console, commands: Mapping[str, str], width: int) -> list[RenderableType]:
    """Make the list of commands; one that is longer than the screen stays whole, to be copied."""
    columns = (max(map(len, texts), default=0) for texts in (commands, commands.values()))
    if sum(columns) < width - 3:
        return [*_two_columns(console, "Next", commands)]
    lines = [f"{command}  # {meaning}" for command, meaning in commands.items()]
    return [Text("Next", style="bold"), *(Text(x, no_wrap=True, overflow="ignore") for x in lines)]


def _two_columns(console: Console, title: str, pairs: Mapping[str, str]) -> list[Padding]:
    """Make a heading and two columns; on a narrow screen the second folds, nothing is lost."""
    table = figure_table(title=title)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    for key, value in pairs.items():
        table.add_row(Text(key), Text(printable(value, console.encoding)))
    return [spaced(table)] if pairs else []
