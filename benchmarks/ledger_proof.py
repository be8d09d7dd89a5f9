"""Compare the ledgers of runs that were disturbed with that of one that was not.

    python benchmarks/ledger_proof.py [--kills 20] [--minutes 20] [--modes sync one_step_off async]
                                      [--out benchmarks/results/ledger_proof.md] [--runs FOLDER]

In each mode a small run (the quickstart's task) is left alone once. It is then repeated: killed
with SIGKILL at random moments and resumed until that many kills are done; with two engines for
one; with its model on two ranks; and with a fault that is put in on purpose: resumed from a
checkpoint whose loader has gone on by three prompts. `winnow ledger diff` compares each with the
undisturbed one, and `winnow ledger check` looks at each alone. All must be the same but the last.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.kill import LONGEST_S, STEPS, Lab, kill_at, wait_for

from winnow.runs.checkpoint import checkpoints_in

MODES: dict[str, tuple[str, ...]] = {
    "sync": ("rollout.engine.processes=1",),
    "one_step_off": ("trainer/mode=one_step_off", "sampling.max_staleness=2"),
    "async": ("trainer/mode=async", "run.deterministic=false", "sampling.max_staleness=2"),
}
"""Settings by mode, each with one engine apart."""
ENGINES = ("rollout.engine.processes=2",)
RANKS = ("trainer/strategy=fsdp2", "trainer.strategy.ranks=2")
SAVE = "trainer.save_every=1"
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


def ledger(*words: str) -> Any:
    """Call `winnow ledger` and read its JSON."""
    command = [sys.executable, "-m", "winnow.cli.main", "ledger", *words, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def compared(
    mode: str, what: str, lab: Lab, names: Sequence[str], *options: str, wanted: bool = True
) -> Row:
    """Compare runs with the undisturbed one; options go to `winnow ledger diff`."""
    faults, late, compared_by = dict[str, int](), 0, ""
    for name in names:
        found = ledger("diff", str(lab.run("undisturbed")), str(lab.run(name)), *options)
        late += found["times"]["count"]
        compared_by = "group by group" if found["exact"] else "loss, repetition, prompts' order"
        for each in [*found["differences"], *found["b"]["faults"], *found["a"]["faults"]]:
            faults[each["what"]] = faults.get(each["what"], 0) + each["count"]
    said = ", ".join(f"{name}: {count}" for name, count in faults.items()) or "none"
    if late:
        said += f" ({late} groups admitted or settled at another time)"
    row = Row(mode, what, len(names), not faults, wanted, f"{compared_by} | {said}")
    print(row, flush=True)
    return row


def killed(lab: Lab, kills: int, rng: random.Random, until: float) -> tuple[list[str], int]:
    """Kill and resume runs; returns their names and the number of kills."""
    names, done = list[str](), 0
    while done < kills and time.monotonic() < until:
        name = f"killed-{len(names)}"
        for _ in range(min(5, kills - done)):
            if kill_at(lab, lab.start(name, SAVE), name, rng) is None:
                break
            done += 1
        assert lab.start(name, SAVE).wait(LONGEST_S) == 0
        names.append(name)
    return names, done


def skipping(lab: Lab) -> str:
    """Resume a run from a checkpoint whose loader has skipped prompts."""
    name, run = "skipping", lab.run("skipping")
    process = lab.start(name, SAVE)
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


def proof(mode: str, folder: Path, kills: int, seed: int, until: float) -> list[Row]:
    """Make all comparisons of a mode."""
    folder.mkdir(parents=True)
    lab = Lab(folder, settings=MODES[mode]).undisturbed()
    rows = [compared(mode, "undisturbed, again", lab, [lab.timed("again").run("again").name])]
    names, done = killed(lab, kills, random.Random(seed), until)
    rows.append(compared(mode, f"{done} kills", lab, names))
    for what, settings in (("2 engines for 1", ENGINES), ("2 ranks for 1", RANKS)):
        name = what.replace(" ", "-")
        assert lab.start(name, SAVE, *settings).wait(LONGEST_S) == 0
        # Engines write in another order, which changes what is carried over a cut.
        options = ("--no-order",) if settings is ENGINES else ()
        rows.append(compared(mode, what, lab, [name], *options))
    what = f"fault: {SKIPPED} prompts skipped in a resume"
    rows.append(compared(mode, what, lab, [skipping(lab)], wanted=False))
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
    with tempfile.TemporaryDirectory() as scratch:
        for mode in args.modes:
            folder = (args.runs or Path(scratch)).resolve() / mode
            rows += proof(mode, folder, args.kills, args.seed, until)
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
