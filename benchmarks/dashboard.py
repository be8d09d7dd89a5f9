"""The times of the dashboard's pages over large runs, and the bytes that each reads.

    python -m benchmarks.dashboard [--asks 40] [--out benchmarks/results/dashboard.md]

Two runs are made with the writers of real ones: `long` has 2,000 steps of 64 answers with their
tokens, `wide` 20 steps of 8,192 answers with numbers alone. `sweep` is 30 runs of 5,000 steps
without answers, each step with as many figures as one of the quickstart's. A server of its own
process is asked for the data of each page over HTTP, as a browser does; what a page asks for at
once is asked in turn, and counted together. Bytes are those that the server's process reads of
files (/proc/PID/io), the page cache's included. Chromium, where it is installed, opens the overview
of the sweep; its time is from the navigation to the frame after the last chart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import httpx
import numpy as np

from winnow.observe.files import RunFolder
from winnow.observe.jsonl import MetricsLog
from winnow.observe.rollouts import RolloutGroup, write_rollouts
from winnow.observe.trace import TraceFile
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan

LONG, WIDE, SWEEP = "long", "wide", "sweep"
N, TOKENS, FIGURES = 8, 400, 134
SWEEP_RUNS, SWEEP_STEPS, EVAL_EVERY = 30, 5000, 50
DRAWN = """() => document.querySelectorAll('.curves .chart canvas').length === 12 &&
new Promise(done => requestAnimationFrame(() => setTimeout(() => done(performance.now()))))"""
CONFIG = "run: {name: %s}\ntrainer: {steps: %d}\nrollout: {max_response_tokens: 512}\n"
FIGURE_NAMES = (
    *("sampling/accuracy", "score/reward/mean", "length/response/mean", "actor/entropy"),
    *("actor/clip_high", "actor/clip_low", "actor/grad_norm", "mismatch/abs_delta"),
    *("sampling/keep_rate", "throughput/tokens_per_s", "sampling/tokens/generated"),
    *("sampling/tokens/trained", "sampling/tokens/all_right", "time/step_s", "time/rollout_s"),
    *("time/update_s", "memory/peak_gib", "length/truncated"),
)


def make_answer(dice: np.random.Generator, tokens: int) -> Answer:
    """An answer of random tokens and marks."""
    right = float(dice.random() < 0.6)
    ids = dice.integers(5, 260, tokens)
    logprobs = -dice.exponential(0.3, tokens).astype(np.float32)
    segment = Segment(ids, logprobs, (VersionSpan(1, tokens),))
    parts = {"task": 2 * right - 1, "overlong": 0.0}
    return Answer(Trajectory((segment,), "stop"), Score(2 * right - 1, right, parts, {"pred": "7"}))


def make_run(folder: RunFolder, steps: int, answers: int, has_tokens: bool) -> None:
    """Write a run of so many steps."""
    dice = np.random.default_rng(0)
    folder.rollouts.mkdir(parents=True)
    folder.save_config(CONFIG % (folder.name, steps))
    folder.tokenizer.write_text(tokenizer_json())
    metrics, trace = MetricsLog(folder.metrics), TraceFile(folder.trace)
    count = answers // N
    for step in range(1, steps + 1):
        groups = [
            RolloutGroup(
                Group(
                    step * count + n,
                    Prompt(
                        f"row-{dice.integers(5000)}", np.arange(60), "A question. " * 20, "m", "7"
                    ),
                    tuple(make_answer(dice, TOKENS if has_tokens else 20) for _ in range(N)),
                ),
                "trained" if n % 4 else "all_right",
                dice.normal(size=N).astype(np.float32) if n % 4 else None,
            )
            for n in range(count)
        ]
        write_rollouts(
            folder.rollout_file(step),
            step,
            groups,
            version=step,
            text_groups={each.group.id for each in groups} if has_tokens else set(),
            decode=lambda ids: "".join(map(chr, ids)),
        )
        more = {f"more/figure_{n}": dice.random() for n in range(FIGURES - len(FIGURE_NAMES))}
        metrics.log(step, {name: 100 * dice.random() for name in FIGURE_NAMES} | more)
        now = time.perf_counter()
        for n in range(20):
            trace("trainer", f"phase {n % 7}", now + n, now + n + 0.9)
        trace.log(step, {})
    metrics.close()
    trace.close()


def make_sweep(folder: Path) -> None:
    """Write the metrics of many long runs, each a random walk, and one trace that all share."""
    dice = np.random.default_rng(2)
    names = [*FIGURE_NAMES, *(f"more/figure_{n}" for n in range(FIGURES - len(FIGURE_NAMES)))]
    for n in range(SWEEP_RUNS):
        run = RunFolder(folder / f"lr-{n % 10}-seed-{n // 10}")
        run.path.mkdir(parents=True)
        run.save_config(CONFIG % (run.path.name, SWEEP_STEPS) + f"optim: {{lr: {n % 10 + 1}e-5}}\n")
        rows = np.abs(np.cumsum(dice.normal(size=(SWEEP_STEPS, FIGURES)), 0)) / 100
        with run.metrics.open("w") as file:
            for step, row in enumerate(rows.tolist(), start=1):
                record = {"step": step, **dict(zip(names, row, strict=True))}
                if step % EVAL_EVERY == 0:
                    record |= {f"eval/digits/{name}": row[0] for name in ("pass@1", "avg@4")}
                file.write(json.dumps(record, separators=(",", ":")) + "\n")
        if n:
            run.trace.symlink_to(folder / "lr-0-seed-0" / run.trace.name)
            continue
        trace = TraceFile(run.trace)
        for step in range(1, SWEEP_STEPS + 1):
            now = time.perf_counter()
            for part in range(20):
                trace("trainer", f"phase {part % 7}", now + part, now + part + 0.9)
            trace.log(step, {})
        trace.close()


def tokenizer_json() -> str:
    """A tokenizer of 256 bytes and a few special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: n + 5 for n, c in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def pages(run: str, steps: int, answers: int, dice: np.random.Generator) -> dict[str, list[str]]:
    """The addresses that each page asks for, of a random step and group."""
    step, count = int(dice.integers(1, steps + 1)), answers // N
    group = step * count + int(dice.integers(count))
    where = f"run={run}&kind=training&step={step}"
    names = "&".join(f"names={name}" for name in FIGURE_NAMES)
    return {
        "Overview": ["runs", f"series?runs={run}&names=eval/*&{names}&points=250"],
        "Answers, a step": [f"run/steps?run={run}", f"run/groups?{where}"],
        "Answers, a prompt": [
            f"run/group?{where}&group={group}",
            f"run/prompt?run={run}&kind=training&uid=row-{dice.integers(5000)}",
        ],
        "Answers, a search": [f"run/search?{where}&q=zz"],
        "Tokens": [f"series?runs={run}&names=sampling/tokens/*", f"run/spread?run={run}"],
        "Time": [
            f"series?runs={run}&names=time/*_s&names=overlap/*",
            f"run/timeline?run={run}&step={step}",
        ],
        "System": [f"run/system?run={run}", f"series?runs={run}&names=memory/*&names=ranks/*"],
        "Alarms": [f"run/alarms?run={run}"],
    }


def sweep_pages(runs: Sequence[str], dice: np.random.Generator) -> dict[str, list[str]]:
    """The addresses that each page asks for, of all runs or of the first."""
    some = pages(runs[0], SWEEP_STEPS, N, dice)
    together = "&".join(f"runs={run}" for run in runs)
    names = some["Overview"][1].partition("&names=")[2]
    one = f"series?{together}&names=actor/entropy&points="
    return {
        f"Overview, {len(runs)} runs": ["runs", f"series?{together}&names={names}"],
        "List of runs": ["runs"],
        f"A large chart, {len(runs)} runs": [f"{one}{30_000 // len(runs)}"],
        f"CSV, {len(runs)} runs": [f"{one}1000000000"],
        **{name: urls for name, urls in some.items() if not name.startswith("Answers")},
    }


def bytes_read(pid: int) -> int:
    """Bytes that a process has read so far."""
    found = re.search(r"rchar: (\d+)", Path(f"/proc/{pid}/io").read_text())
    return int(found[1]) if found else 0


def seconds_used(pid: int) -> float:
    """CPU seconds that a process has used so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def served(folder: Path) -> Iterator[tuple[str, int]]:
    """Run the command over a folder; yields its address and process."""
    words = [sys.executable, "-m", "winnow.cli.main", "dashboard", str(folder), "--port", "0"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        told = re.search(r"http://\S+", process.stdout.readline())
        assert told is not None
        yield told[0].rstrip("/"), process.pid
    finally:
        process.terminate()
        process.wait()


def resident_mb(pid: int) -> float:
    """Memory of a process at its most."""
    found = re.search(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())
    return int(found[1]) / 1000 if found else 0.0


def measure_sweep(folder: Path, asks: int) -> list[str]:
    """Ask for each page of many runs, the first at once after the start; returns rows."""
    runs = sorted(each.name for each in folder.iterdir())
    dice = np.random.default_rng(1)
    for url, pid in served(folder):
        start = resident_mb(pid)
        with httpx.Client(base_url=f"{url}/api/", trust_env=False, timeout=600) as client:

            def urls(name: str) -> list[str]:
                return sweep_pages(runs, dice)[name]

            names = list(sweep_pages(runs, dice))
            rows = [time_page(client, pid, SWEEP, n, partial(urls, n), asks) for n in names]
        memory = f"memory: {start:.0f} MB at first, {resident_mb(pid):.0f} MB at most"
        lines = memory, *browser_times(url, runs)
        rows += [f"| {SWEEP} | {line} | | | | |" for line in lines]
    return rows


def browser_times(url: str, runs: Sequence[str], times: int = 6) -> Iterator[str]:
    """Open the overview of all runs in a browser; yields what it took."""
    if not (path := shutil.which("chromium")):
        return
    from playwright.sync_api import sync_playwright

    with sync_playwright() as started:
        flags = ["--no-sandbox", "--disable-gpu"]
        page = started.chromium.launch(executable_path=path, args=flags).new_page()
        page.set_default_timeout(120_000)
        for count in (1, len(runs)):
            found = []
            for _ in range(times):
                page.goto("about:blank")
                page.goto(f"{url}/#/overview?" + "&".join(f"runs={run}" for run in runs[:count]))
                found.append(page.wait_for_function(DRAWN).json_value())
            told = f"first {found[0]:.0f} ms, then {min(found[1:]):.0f} to {max(found[1:]):.0f} ms"
            yield f"browser, overview of {count}: {told}"


def measure(folder: Path, shape: dict[str, tuple[int, int]], asks: int) -> list[str]:
    """Ask for each page; returns rows of a table."""
    rows = []
    for run, (steps, answers) in shape.items():
        for url, pid in served(folder):
            with httpx.Client(base_url=f"{url}/api/", trust_env=False, timeout=60) as client:
                rows += ask(client, pid, run, steps, answers, asks)
    return rows


def ask(client: httpx.Client, pid: int, run: str, steps: int, answers: int, asks: int) -> list[str]:
    """Ask a server that has just started."""
    dice = np.random.default_rng(1)
    began, before, used = time.perf_counter(), bytes_read(pid), seconds_used(pid)
    while not client.get(f"run/spread?run={run}").json()["is_done"]:
        time.sleep(0.05)
    rows = [
        f"| {run} | background, once | | {time.perf_counter() - began:.1f} s | "
        f"{seconds_used(pid) - used:.1f} s | {(bytes_read(pid) - before) / 1e6:.1f} MB |"
    ]

    def urls(name: str) -> list[str]:
        return pages(run, steps, answers, dice)[name]

    names = list(pages(run, steps, answers, dice))
    return rows + [time_page(client, pid, run, n, partial(urls, n), asks) for n in names]


def time_page(
    client: httpx.Client, pid: int, run: str, name: str, urls: Callable[[], list[str]], asks: int
) -> str:
    """Ask for a page `asks` times after a first one; returns a row of the table."""
    times: list[float] = []
    for turn in range(asks + 1):
        if turn == 1:
            before, used = bytes_read(pid), seconds_used(pid)
        wanted = urls()
        began = time.perf_counter()
        for url in wanted:
            client.get(url).raise_for_status()
        times.append(1e3 * (time.perf_counter() - began))
    p50, p95, most = np.percentile(times[1:], (50, 95, 100))
    cpu = 1e3 * (seconds_used(pid) - used) / asks
    row = (
        f"| {run} | {name} | {times[0]:.0f} ms | {p50:.0f} / {p95:.0f} / {most:.0f} ms | "
        f"{cpu:.0f} ms | {(bytes_read(pid) - before) / asks / 1e6:.2f} MB |"
    )
    print(row, flush=True)
    return row


def main(words: Sequence[str] | None = None) -> None:
    """Make the runs, ask, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--asks", type=int, default=40)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--folder", type=Path, help="Keep the runs here, or take those there are.")
    parser.add_argument("--runs", choices=(LONG, WIDE, SWEEP), nargs="*", help="Of these alone.")
    given = parser.parse_args(words)
    chosen = given.runs or (LONG, WIDE, SWEEP)
    shape = {run: each for run, each in {LONG: (2000, 64), WIDE: (20, 8192)}.items()
             if run in chosen}  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        folder = given.folder or Path(made)
        for run, (steps, answers) in shape.items():
            if not (folder / run).exists():
                make_run(RunFolder(folder / run), steps, answers, has_tokens=run == LONG)
        if SWEEP in chosen and not (folder / SWEEP).exists():
            make_sweep(folder / SWEEP)
        sizes = {
            run: sum(each.stat().st_size for each in (folder / run).rglob("*") if each.is_file())
            for run in chosen
        }
        lines = [
            "| run | page | first | p50 / p95 / max | CPU, mean | read |",
            "|---|---|---|---|---|---|",
            *measure(folder, shape, given.asks),
            *(measure_sweep(folder / SWEEP, given.asks) if SWEEP in chosen else ()),
        ]
    told = ", ".join(f"`{run}` {size / 1e6:.0f} MB" for run, size in sizes.items())
    load = f"Load average at the end: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores."
    text = "\n".join([*lines, "", f"On disk: {told}. {given.asks} asks a page. {load}"])
    print(text)
    if given.out:
        given.out.write_text(f"# Times of the dashboard's pages\n\n{text}\n")


if __name__ == "__main__":
    main()
