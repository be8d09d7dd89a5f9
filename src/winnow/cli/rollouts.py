"""`winnow rollouts`: what a run's model wrote, in a terminal or as JSON, by the dashboard's reader.

On a terminal it asks what to show next; elsewhere it prints once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from typer import Argument, Option

from winnow.errors import WinnowError
from winnow.observe.format import DASH, WIDTH, count, number, percent, printable

if TYPE_CHECKING:
    from winnow.dashboard.pages import RunPages

Row = dict[str, Any]
_KEEPS: dict[str, Callable[[Row], bool]] = {
    "all": lambda group: True,
    "wrong": lambda group: group["accuracy"] == 0,
    "cut-off": lambda group: group["cut_off"] > 0,
    "overlong": lambda group: group["overlong"] > 0,
    "failed": lambda group: group["failed"] > 0,
    "mismatch": lambda group: group["mismatch"] is not None,
}
_HELP = (
    "NUMBER: open, Enter: more, b: back, n/p: next/previous, s 12: step 12, s: newest step; f "
    f"{'|'.join(_KEEPS)}: filter, /TEXT: search, /: clear search, q: quit"
)
_ENDS = {None: DASH, "stop": "stop", "length": "cut off", "aborted": "aborted"}
_LEAST_SURE = 5
"""Tokens that are named of an answer."""
_CONTEXT_LINES = 8
"""Lines that a list leaves to its title and to the question."""


def rollouts_command(
    run: Annotated[str, Argument(help="Run folder, such as runs/NAME, or its URL.")],
    step: Annotated[int | None, Option(help="Step to show; default: a list of steps.")] = None,
    group: Annotated[int | None, Option(help="Group of the step: show its answers.")] = None,
    only: Annotated[
        str,
        Option(
            "--filter",
            metavar="|".join(_KEEPS),
            help="Groups without a right answer, with a truncated or overlong answer, with failed "
            "scoring; mismatch: trained groups, largest log-prob difference first.",
        ),
    ] = "all",
    search: Annotated[str, Option(help="Groups that contain this text, ignoring case.")] = "",
    held_out: Annotated[bool, Option("--held-out", help="Show held-out prompts.")] = False,
    as_json: Annotated[bool, Option("--json", help="Print one JSON line per answer.")] = False,
) -> None:
    """Show what the model generated: steps, prompts, answers; with filter, search and JSON."""
    kind = "held_out" if held_out else "training"
    browser = Browser(_open_run(run), Console(highlight=False), kind, step, group, only, search)
    browser.lists_steps = step is None and group is None and only == "all" and not search
    if as_json:
        for line in browser.lines():
            print(line)
    elif sys.stdin.isatty() and sys.stdout.isatty():
        browser.browse(input)
    else:
        browser.show()


@dataclass
class Browser:
    """Shows parts of a run and handles commands; reads the folder anew each time."""

    run: RunPages
    console: Console
    kind: str
    """training or held_out."""
    step: int | None = None
    """None follows the newest."""
    group: int | None = None
    """None lists the groups, or the steps."""
    only: str = "all"
    search: str = ""
    lists_steps: bool = False
    shown: int | None = None
    """Step of the last list: what is chosen from it is of that step, although a run goes on."""
    answer: int = 1
    """Number of the answer whose text is shown."""
    first: int = 0
    """Row of the list at the top."""
    limit: int | None = None
    """Rows of a list, and of a group one answer's text; None shows all."""

    def browse(self, ask: Callable[[str], str]) -> None:
        """Show, read and handle commands until `q` or end of input; `ask` is like `input`."""
        self.limit = max(self.console.height - _CONTEXT_LINES, 5)
        self._print(_HELP, "dim")
        while True:
            try:
                self.show()
            except WinnowError as error:
                self._print(str(error), "red")
            try:
                word = ask("rollouts> ").strip()
            except (EOFError, KeyboardInterrupt):
                word = "q"
            if word == "q":
                return
            with suppress(WinnowError):  # the next look tells it
                self._handle_command(word)

    def show(self) -> None:
        """Print the current view.

        Raises:
            WinnowError: it is not there, or damaged.
        """
        if self.lists_steps:
            self._show_steps()
        elif self.group is None:
            self._show_groups()
        else:
            self._show_group(self.group)

    def lines(self) -> Iterator[str]:
        """Yield a line of JSON for each answer of the selected groups.

        Raises:
            WinnowError: a file is missing or damaged.
        """
        from winnow.dashboard.answers import iter_answers

        name = self.run.answers_file(self.kind, self._step())
        listed = self._group_ids() if self.group is None else [self.group]
        for row in iter_answers(self.run.files, name, listed):
            # JSON has no NaN.
            yield json.dumps(json.loads(json.dumps(row), parse_constant=lambda _: None))

    def _handle_command(self, word: str) -> None:
        name, _, rest = word.partition(" ")
        if word == "":
            self.first += self.limit or 0
        elif word.isdecimal() and self.lists_steps:
            self._go_to(int(word))
        elif word.isdecimal() and self.group is not None:
            self.answer = int(word)
        elif word.isdecimal():
            self._go_to(self.shown, int(word))
        elif name == "s" and rest.strip().isdecimal() | (not rest):
            self._go_to(int(rest) if rest else None)
        elif word in ("n", "p") and not self.lists_steps:
            self._move(1 if word == "n" else -1)
        elif word == "b":
            is_list = self.group is None
            self._go_to(self.step)
            self.lists_steps = is_list
        elif name == "f" and rest in _KEEPS:
            self.only = rest
            self._go_to(self.step)
        elif word.startswith("/"):
            self.search = word[1:].strip()
            self._go_to(self.step)
        else:
            self._print(f"unknown command {word[:40]!r}. {_HELP}", "red")

    def _go_to(self, step: int | None, group: int | None = None) -> None:
        self.step, self.group, self.answer, self.first = step, group, 1, 0
        self.lists_steps = False

    def _move(self, by: int) -> None:
        """Go to the next or previous group, or step of a list."""
        step, is_list = self._step(), self.group is None
        listed, now = (self._steps(), step) if is_list else (self._group_ids(), self.group)
        at = listed.index(now) + by if now in listed else 0
        for place in listed[at : at + 1]:
            self._go_to(*((place, None) if is_list else (step, place)))

    def _steps(self) -> list[int]:
        steps: list[int] = self.run.steps()[self.kind]
        if not steps:
            raise WinnowError(f"{self.run.files.name} has no answers yet; try again later")
        return steps

    def _step(self) -> int:
        return self._steps()[-1] if self.step is None else self.step

    def _group_ids(self) -> list[int]:
        return [row["group"] for row in self._groups()]

    def _groups(self) -> list[Row]:
        """Read the groups of a step that match filter and search."""
        table = self.run.groups(self.kind, self._step())
        if self.only not in _KEEPS:
            raise WinnowError(f"--filter must be one of {', '.join(_KEEPS)}, got {self.only[:40]}")
        rows = [dict(zip(table, row, strict=True)) for row in zip(*table.values(), strict=True)]
        groups = [row for row in rows if _KEEPS[self.only](row)]
        if self.search:
            hits = self.run.search_texts(self.kind, self._step(), self.search)["groups"]
            groups = [row for row in groups if str(row["group"]) in hits]
        return (
            sorted(groups, key=lambda row: -row["mismatch"]) if self.only == "mismatch" else groups
        )

    def _show_steps(self) -> None:
        """List steps, newest first, with totals of their answers."""
        steps = self._steps()[::-1]
        self._print_heading(f"{len(steps)} steps, newest first")
        table = _table(
            "step", "prompts", "answers", "right", "reward", "tokens", "cut off", "failed"
        )
        self.first = self.first if self.first < len(steps) else 0
        for step in steps[self.first :][: self.limit]:
            try:
                groups = self.run.groups(self.kind, step)
            except WinnowError as error:
                self._print(str(error), "red")
                continue
            sizes = groups["answers"]
            total = sum(sizes)
            right, reward, length = (
                sum((v or 0.0) * n for v, n in zip(groups[name], sizes, strict=True))
                / max(total, 1)
                for name in ("accuracy", "reward", "length")
            )
            cut_off, failed = sum(groups["cut_off"]), sum(groups["failed"])
            table.add_row(
                str(step), count(len(sizes)), count(total), percent(right), number(reward),
                number(length, 1), percent(cut_off / max(total, 1)), count(failed),
            )  # fmt: skip
        self._print_block(table)

    def _show_groups(self) -> None:
        groups = self._groups()
        self.shown = self._step()
        plural = "" if len(groups) == 1 else "s"
        text = f"step {self.shown} of {self._steps()[-1]}, {len(groups)} prompt{plural}"
        text += f", {self.only}" * (self.only != "all")
        self._print_heading(text + f", with {self.search}" * bool(self.search))
        table = _table("group", "prompt", "fate", "right", "reward", "tokens", "mismatch")
        self.first = self.first if self.first < len(groups) else 0
        for row in groups[self.first :][: self.limit]:
            table.add_row(
                str(row["group"]), self._one_line(row["prompt"] or row["uid"] or DASH),
                self._one_line(str(row["outcome"]).replace("_", " ")),
                f"{(row['accuracy'] or 0) * row['answers']:.3g}/{row['answers']}",
                number(row["reward"]), count(row["length"]), number(row["mismatch"], 4),
            )  # fmt: skip
        self._print_block(table)

    def _show_group(self, group: int) -> None:
        answers = self.run.group(self.kind, self._step(), group)["answers"]
        self._print_heading(f"step {self._step()}, group {group}, {answers[0]['outcome']}")
        self._print(answers[0]["prompt"] or "(text not kept: observe.rollout_text_tokens)", "bold")
        later = sum(len(turn.get("images") or ()) for turn in answers[0].get("turns") or ())
        self._print_images((answers[0].get("images") or ())[: -later or None])
        names = "answer", "right", "reward", "advantage", "tokens", "entropy", "end", "read as"
        table = _table(*names)
        for place, each in enumerate(answers, 1):
            table.add_row(
                f"greedy {place}" if each["kind"] == "greedy" else str(place),
                "failed" if each.get("scorer_error") else percent(each["accuracy"]),
                number(each["reward"]), number(each.get("advantage")),
                count(each["response_tokens"]), _mean_entropy(each),
                self._one_line(_ENDS.get(end := each.get("finish_reason"), str(end))),
                self._one_line(each.get("pred") or DASH),
            )  # fmt: skip
        self._print_block(table)
        for place, each in enumerate(answers, 1):
            if self.limit is None or place == min(max(self.answer, 1), len(answers)):
                self._print_heading(f"answer {place}")
                if each.get("scorer_error"):
                    self._print(f"scoring failed: {each['scorer_error']}", "red")
                self._print_response(each)
                if unsure := _highest_entropies(each):
                    self._print(f"highest entropies: token {unsure} nats", "dim")

    def _print_response(self, answer: Row) -> None:
        """Print the text of an answer; a conversation turn by turn, its calls in colour."""
        from winnow.observe.rollouts import turn_heading

        turns = answer.get("turns") if answer["response"] else None
        if not turns:
            self._print(answer["response"] or "(no text)")
        for place, turn in enumerate(turns or (), 1):
            self._print(turn_heading(place, turn), "bold")
            pieces = [
                (printable(text, self.console.encoding), "cyan" if is_call else "")
                for text, is_call in turn["pieces"]
            ]
            self.console.print(Text.assemble(*pieces))
            self._print_images(turn.get("images") or ())

    def _print_images(self, paths: Sequence[str]) -> None:
        for path in paths:
            self.console.print(Text(path, "cyan"), soft_wrap=True)

    def _one_line(self, text: str) -> Text:
        line = " ".join(printable(text, self.console.encoding).split())
        return Text(line, no_wrap=True, overflow="ellipsis")

    def _print_heading(self, text: str) -> None:
        self._print_block(Rule(self._one_line(f"{self.run.files.name}, {text}"), align="left"))

    def _print_block(self, shown: Rule | Table) -> None:
        self.console.print(shown, width=min(WIDTH, self.console.width))

    def _print(self, text: str, style: str = "") -> None:
        self.console.print(Text(printable(text, self.console.encoding), style))


def _open_run(place: str) -> RunPages:
    from winnow.dashboard.pages import RunPages
    from winnow.dashboard.runs import RunSet

    runs = RunSet([place]).discover()
    if len(runs) != 1:
        names = ", ".join(runs) or "none"
        raise WinnowError(f"{place} must be one run folder, found {names}; pass one")
    return RunPages(next(iter(runs.values())))


def _mean_entropy(answer: Row) -> str:
    values = [each for each in answer["columns"].get("entropies", ()) if each is not None]
    return number(sum(values) / len(values)) if values else DASH


def _highest_entropies(answer: Row) -> str:
    """Format the tokens of an answer with the highest entropy, by position."""
    values = answer["columns"].get("entropies", ())
    texts = [f" {each!r}" for each in answer.get("tokens", {}).get("texts", ())]
    texts = texts or [""] * len(values)
    places = [place for place, value in enumerate(values) if value is not None]
    most = sorted(places, key=lambda place: -values[place])[:_LEAST_SURE]
    return ", ".join(f"{place + 1}{texts[place]} {values[place]:.2f}" for place in most)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        is_word, is_text = name in ("fate", "end"), name in ("prompt", "read as")
        justify: Literal["left", "right"] = "left" if is_word or is_text else "right"
        table.add_column(name, justify=justify, no_wrap=not is_text)
    return table
