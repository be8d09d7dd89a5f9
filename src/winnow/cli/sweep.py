"""`winnow train RECIPE a=1,2,3 --multirun`: each combination of the values is a run of its own.

Hydra parses the values and combines them (`a=1,2`, `b=range(1,4)`); configurations are loaded as
those of single runs. All runs of a sweep lie in one folder, with sweep.json beside them: which
settings each has, and how it ended. Started again, runs that are done are left alone, the others
begin or go on.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from winnow.config.load import load_recipe
from winnow.errors import ConfigError
from winnow.observe.files import explain_write_errors, recipe_stem, unused_path, write_atomic
from winnow.observe.format import duration, figure_table, number, percent, print_table, printable
from winnow.observe.jsonl import METRICS_FILE, evaluations, read_metrics
from winnow.observe.metrics import LENGTH, REWARD
from winnow.run.shutdown import Stopped, ignore_broken_output, stop_signals

if TYPE_CHECKING:
    from rich.console import Console

SWEEP = "sweep.json"
_LONGEST_NAME = 80
_EVERY_S = 0.2


@dataclass
class Sweep:
    """The runs of a sweep, by the names of their folders."""

    folder: Path
    recipe: str
    runs: dict[str, list[str]]
    """The overrides of each run."""
    codes: dict[str, int] = field(default_factory=dict)
    """Exit codes of the runs that have ended."""

    def save(self) -> None:
        """Write sweep.json."""
        content = {"recipe": self.recipe, "runs": self.runs, "codes": self.codes}
        write_atomic(self.folder / SWEEP, json.dumps(content, indent=1).encode())

    def command(self, name: str) -> list[str]:
        """Return the command line of a run."""
        place = (
            f"run.dir={_quote_for_hydra(str(self.folder))}",
            f"run.name={_quote_for_hydra(name)}",
        )
        start = sys.executable, "-m", "winnow.cli.main", "train", "--parent", str(os.getpid())
        return [*start, self.recipe, *self.runs[name], *place]


def plan_sweep(recipe: str, overrides: list[str]) -> Sweep:
    """Expand the values of a command line into runs; every combination is validated.

    Raises:
        ConfigError: no key has several values, or a combination cannot be trained.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    try:
        parsed = OverridesParser.create().parse_overrides(overrides)
        swept = [each for each in parsed if each.is_sweep_override()]
        (combined,) = BasicSweeper.split_arguments(swept, None)
    except HydraException as error:
        raise ConfigError(f"{str(error).splitlines()[0]}; write KEY=VALUE,VALUE") from None
    if not swept:
        raise ConfigError("--multirun needs a key with several values, such as optim.lr=1,2")
    fixed = [w for w, each in zip(overrides, parsed, strict=True) if not each.is_sweep_override()]
    keys = [each.key_or_group for each in swept]
    runs = {_run_name(overrides, keys): [*fixed, *overrides] for overrides in combined}
    *_, config = (load_recipe(recipe, overrides) for overrides in runs.values())
    run = config.run
    name = f"{recipe_stem(recipe)}-sweep"
    folder = Path(run.dir) / run.name if run.name else unused_path(Path(run.dir), name)
    return Sweep(folder, recipe, runs)


def run_sweep(recipe: str, overrides: list[str], jobs: int, console: Console) -> int:
    """Train all pending runs of a sweep, `jobs` at a time; return the exit code."""
    ignore_broken_output()
    sweep = plan_sweep(recipe, overrides)
    runs = sweep.runs
    if (sweep.folder / SWEEP).is_file():
        was = read_sweep(sweep.folder)
        if was.recipe != recipe:
            raise ConfigError(
                f"run.name={sweep.folder.name} is a sweep of {was.recipe}, not of {recipe}; choose "
                "another run.name"
            )
        sweep.runs = {**was.runs, **runs}
        sweep.codes = {
            name: code
            for name, code in was.codes.items()
            if name not in runs or (not code and was.runs.get(name) == runs[name])
        }
    waiting = [name for name in runs if name not in sweep.codes]
    ready = len(runs) - len(waiting)
    _print_line(
        f"{len(runs)} runs in {sweep.folder}{f', {ready} already done' if ready else ''}; output "
        "in NAME.txt",
        console,
    )
    sweep.save()
    stopped = _train_all(sweep, list(waiting), jobs, console)
    print_sweep(sweep, console)
    if stopped:
        console.print("Stopped; run the same command to continue.")
        return stopped
    failed = {name: sweep.codes[name] for name in waiting if sweep.codes[name]}
    for name, code in failed.items():
        output = (sweep.folder / f"{name}.txt").read_text(errors="replace").split("\n")
        last = next((line for line in reversed(output) if line.strip()), "")
        _print_line(f"{name} ended with exit code {code}: {last}", console)
    return next(iter(failed.values()), 0)


def _train_all(sweep: Sweep, waiting: list[str], jobs: int, console: Console) -> int:
    """Start one process a run, at most `jobs` at once; returns the code of a request to stop."""
    running: dict[str, tuple[subprocess.Popen[bytes], float]] = {}
    numbers, reported = list[int](), 0
    handlers = {
        number: signal.signal(number, lambda n, _: numbers.append(n)) for number in stop_signals()
    }
    try:
        while running or (waiting and not numbers):
            while waiting and len(running) < jobs and not numbers:
                name = waiting.pop(0)
                path = sweep.folder / f"{name}.txt"
                with explain_write_errors(path), path.open("ab") as out:
                    child = subprocess.Popen(
                        sweep.command(name), stdout=out, stderr=out, process_group=0
                    )
                running[name] = child, time.monotonic()
            time.sleep(_EVERY_S)
            for number in numbers[reported:]:
                reported += 1
                for child, _ in running.values():
                    child.send_signal(number)
            for name, (child, began) in list(running.items()):
                if (code := child.poll()) is None:
                    continue
                del running[name]
                sweep.codes[name] = code if code >= 0 else 128 - code
                sweep.save()
                state = "done" if code == 0 else f"exit code {sweep.codes[name]}"
                took, remaining = duration(time.monotonic() - began), len(waiting) + len(running)
                _print_line(f"{name}: {state} in {took}, {remaining} to go", console)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return Stopped(numbers[0]).exit_code if numbers else 0


def read_sweep(folder: Path) -> Sweep:
    """Read the sweep.json of a folder.

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    try:
        saved = json.loads((folder / SWEEP).read_text(encoding="utf-8"))
        return Sweep(folder, **saved)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{folder} is not a sweep ({SWEEP}: {error}); pass the folder that --multirun created"
        ) from error


def sweep_figures(sweep: Sweep) -> list[dict[str, Any]]:
    """Return each run's last step, reward, length and held-out accuracies.

    `held_out` maps each data source to the first and the last accuracy.
    """
    rows: list[dict[str, Any]] = []
    for name, overrides in sweep.runs.items():
        file = sweep.folder / name / METRICS_FILE
        records = read_metrics(file) if file.is_file() else []
        last = {key: value for record in records for key, value in record.items()}
        held_out: dict[str, list[float]] = {}
        for source, evaluation in ((s, f) for r in records for s, f in evaluations(r).items()):
            held_out[source] = [*held_out.get(source, [])[:1], evaluation.accuracy]
        start = {"run": name, "settings": overrides, "exit_code": sweep.codes.get(name)}
        end = {"step": last.get("step"), "reward": last.get(REWARD), "length": last.get(LENGTH)}
        rows.append({**start, **end, "held_out": held_out})
    return rows


def print_sweep(sweep: Sweep, console: Console) -> None:
    """Print the runs of a sweep as a table."""
    rows = sweep_figures(sweep)
    sources = list(dict.fromkeys(source for row in rows for source in row["held_out"]))
    table = figure_table("step", *sources, "reward", "length", title=f"Sweep {sweep.folder}")
    for row in rows:
        cells = ["-" if row["step"] is None else str(row["step"])]
        shares = [row["held_out"].get(source, [None]) for source in sources]
        cells += [" -> ".join(percent(value, 1) for value in each) for each in shares]
        cells += [number(row["reward"]), number(row["length"], 1)]
        table.add_row(Text(printable(row["run"])), *cells)
    print_table(table, console)


def _print_line(line: str, console: Console) -> None:
    console.print(printable(line), soft_wrap=True, markup=False)


def _run_name(overrides: list[str], keys: list[str]) -> str:
    """Name a run after its settings, with short keys where those are unique."""
    short = [re.split(r"[./]", key)[-1] for key in keys]
    named = short if len(set(short)) == len(short) else keys
    text = ",".join(f"{k}={w.partition('=')[2]}" for k, w in zip(named, overrides, strict=True))
    name = re.sub(r"[^\w.,=+-]+", "_", text).lstrip(".")
    if name == text and len(name) <= _LONGEST_NAME:
        return name
    return f"{name[:_LONGEST_NAME]}-{zlib.crc32(text.encode()):08x}"


def _quote_for_hydra(text: str) -> str:
    """Quote a value for Hydra's grammar."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
