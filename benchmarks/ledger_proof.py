"""Compare the ledgers of runs that were disturbed with that of one that was not.

    python benchmarks/ledger_proof.py [--kills 20] [--minutes 20] [--modes sync-0 async-2 ...]
                                      [--out benchmarks/results/ledger_proof.md] [--runs FOLDER]

The number behind a mode is `sampling.max_staleness`. In each a small run (the quickstart's task) is
left alone once. It is then repeated: killed with SIGKILL at random moments and resumed until that
many kills are done; with two engines for one; with its model on two ranks; and with a fault that is
put in on purpose: resumed from a checkpoint whose loader has gone on by three prompts. Each is
compared with the undisturbed one as `winnow ledger diff` does. All must be the same but the last.

Runs of modes that repeat bit for bit are compared group by group; with two engines only where no
answer goes on under other weights. The others are compared as with `--no-order`. Runs that are
killed and those on two engines or ranks are forked from a process that has imported everything.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from benchmarks.kill import LONGEST_S, STEPS, Lab, kill_at, wait_for
from tests.fault.quick_lab import SPARES, QuickLab
from tests.forked import Forked, Server

from winnow.checkpoints.checkpoint import checkpoints_in
from winnow.views.ledger_diff import diff_ledgers, open_ledger

STEP_OFF = "trainer/mode=one_step_off"
MODES: dict[str, tuple[str, ...]] = {
    "sync-0": ("sampling.max_staleness=0",),
    "sync-1": ("sampling.max_staleness=1",),
    "one_step_off-1": (STEP_OFF, "sampling.max_staleness=1"),
    "one_step_off-2": (STEP_OFF, "sampling.max_staleness=2"),
    "async-2": ("trainer/mode=async", "run.deterministic=false", "sampling.max_staleness=2"),
}
"""Settings by mode."""
APART = ("rollout.engine.processes=1", "trainer.save_every=1")
"""Of every run."""
ALIKE = ("sync-0", "one_step_off-1")
"""Modes that learn the same tokens with any number of engines."""
ENGINES = ("rollout.engine.processes=2",)
RANKS = ("trainer/strategy=fsdp2", "trainer.strategy.ranks=2")
SKIPPED = 3


@dataclass(frozen=True)
class Row:
    """A comparison of one run with the undisturbed one of its mode."""

    mode: str
    what: str
    runs: int
    is_same: bool
    wanted: bool
    said: str
    """What `winnow ledger diff` found, in a few words."""


class ForkedLab(QuickLab):
    """A lab whose runs, with all that they start, are forked from a server."""

    def start(self, name: str, *settings: str) -> Forked:  # type: ignore[override]
        """The command, in a process of its own."""
        assert self.server is not None
        where = {"WINNOW_CACHE": str(self.folder / "cache")}
        words = self.words(name, *settings)
        return self.server.start("winnow.cli.main", words, environment=where, spares=SPARES)


def compared(
    mode: str,
    what: str,
    lab: Lab,
    names: Sequence[str],
    exact: bool | None = None,
    wanted: bool = True,
) -> Row:
    """Compare runs with the undisturbed one; `exact` as `winnow ledger diff` takes it."""
    faults, late, back, compared_by = dict[str, int](), 0, 0, ""
    for name in names:
        found = diff_ledgers(open_ledger(lab.run("undisturbed")), open_ledger(lab.run(name)), exact)
        late += found.times.count
        back += found.given_back.count
        compared_by = "group by group" if found.exact else "loss, repetition, prompts' order"
        for each in [*found.differences, *found.b.faults, *found.a.faults]:
            faults[each.what] = faults.get(each.what, 0) + each.count
            print(name, each, flush=True)
    said = ", ".join(f"{name}: {count}" for name, count in faults.items()) or "none"
    if late:
        said += f" (admitted or settled at another time: {late})"
    if back:
        said += f" (others given back: {back})"
    row = Row(mode, what, len(names), not faults, wanted, f"{compared_by} | {said}")
    print(row, flush=True)
    return row


def killed(lab: Lab, kills: int, rng: random.Random, until: float) -> tuple[list[str], int]:
    """Kill and resume runs; returns their names and the number of kills before a run's end."""
    names, done = list[str](), 0
    while done < kills and time.monotonic() < until:
        name = f"killed-{len(names)}"
        for _ in range(min(5, kills - done)):
            kill = kill_at(lab, lab.start(name), name, rng)
            if kill is None or kill.saved == STEPS:
                break
            done += 1
        assert lab.start(name).wait(LONGEST_S) == 0
        names.append(name)
    return names, done


def skipping(lab: Lab) -> str:
    """Resume a run from a checkpoint whose loader has skipped prompts."""
    name, run = "skipping", lab.run("skipping")
    process = lab.start(name)
    wait_for(process, lambda: any(c.step >= 2 for c in checkpoints_in(run / "checkpoints")))
    process.kill()
    process.wait()
    fault = (
        "import winnow.data.loader as l\n"
        "load = l.PromptLoader.load_state_dict\n"
        "def skip(self, state):\n"
        f"    load(self, {{**state, 'position': state['position'] + {SKIPPED}}})\n"
        "l.PromptLoader.load_state_dict = skip\n"
        "from winnow.cli.main import main\n"
        "main()\n"
    )
    command = [sys.executable, "-c", fault, "resume", str(run)]
    assert subprocess.run(command, check=False).returncode == 0
    return name


def proof(
    mode: str, folder: Path, kills: int, seed: int, until: float, server: Server
) -> list[Row]:
    """Make all comparisons of a mode."""
    folder.mkdir(parents=True)
    fresh = Lab(folder, settings=(*APART, *MODES[mode])).undisturbed()
    lab = ForkedLab(folder, fresh.seconds, fresh.settings, server=server).timed("again")
    rows = [compared(mode, "undisturbed, again", lab, ["again"])]
    names, done = killed(lab, kills, random.Random(seed), until)
    rows.append(compared(mode, f"{done} kills", lab, names))
    for what, settings in (("2 engines for 1", ENGINES), ("2 ranks for 1", RANKS)):
        name = what.replace(" ", "-")
        assert lab.start(name, *settings).wait(LONGEST_S) == 0
        exact = None if mode in ALIKE or settings is RANKS else False
        rows.append(compared(mode, what, lab, [name], exact))
    what = f"fault: {SKIPPED} prompts skipped in a resume"
    rows.append(compared(mode, what, lab, [skipping(fresh)], wanted=False))
    return rows


def report(rows: Sequence[Row]) -> str:
    """Write the comparisons as Markdown."""
    lines = [
        "| mode | run | runs | compared | differences | |",
        "|---|---|---:|---|---|---|",
        *(
            f"| {row.mode} | {row.what} | {row.runs} | {row.said} | "
            f"{'as it should be' if row.is_same == row.wanted else 'WRONG'} |"
            for row in rows
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Make the proof of each mode, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20, help="A mode.")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Kill no later.")
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=Path, help="Keep the runs here.")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    rows = list[Row]()
    with tempfile.TemporaryDirectory() as scratch, closing(Server()) as server:
        for mode in args.modes:
            folder = (args.runs or Path(scratch)).resolve() / mode
            rows += proof(mode, folder, args.kills, args.seed, until, server)
            if args.out is not None:
                command = " ".join(["python", "benchmarks/ledger_proof.py", *sys.argv[1:]])
                head = (
                    f"# Ledgers compared\n\nMade by `{command}`: {STEPS} steps of 8 groups of 4 "
                    "answers, a checkpoint each step.\n\n"
                )
                args.out.write_text(head + report(rows))
    print(report(rows))
    sys.exit(any(row.is_same != row.wanted for row in rows))


if __name__ == "__main__":
    main()
