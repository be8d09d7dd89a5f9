"""Kill a run with SIGKILL at random moments, resume it, and compare it with an undisturbed one.

    python benchmarks/kill.py --times plain=50 critic=10 scorers=10 [--seed 1] [--minutes 60]
                              [--moments rollout update publish] [--out benchmarks/results/kill.md]

Kinds of run: the quickstart's loss in one process (plain), the same with a critic (GAE), with a
scorer of the user's in a process of its own, which takes another time for each answer and in each
run, with a model that is sharded over two ranks, with conversations of three turns: in sync mode,
in one_step_off and in async mode with two engines each, and with images (quickstart-images), with
the engine in this process and in another. A trial is a small run that is killed up to three times,
resumed each time by the same command, and then left alone. Moments: anywhere between the first sign
of the run's folder and its usual end; while a checkpoint is being written or put in place; just
after a line of metrics; while a resumed run is reading and cutting back. With `--moments` they take
turns, and may be phases of a step, in which the run's process kills itself: rollout, update,
publish, write, evaluate or checkpoint. Each trial must end with the same weights, optimizers,
sampler, metrics (times aside), rollouts and evaluations, bit for bit, and with nothing left behind;
in async mode, whose bits are others each time, with no group lost, trained twice or out of order.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from winnow.checkpoints.checkpoint import Checkpoint, checkpoints_in, load_state
from winnow.errors import WinnowError

STEPS = 4
LEDGER = "ledger.parquet"
IMAGES_SETTINGS = (
    *("data.task.eval_problems=8", "warm_start.steps=150", "rollout.n=4"),
    *("rollout.engine.slots=32", "sampling.groups_per_step=8"),
    *("trainer.mini_batch_groups=4", f"trainer.steps={STEPS}", "optim.warmup_steps=1"),
    *("evaluation.every=2", "evaluation.n=1", "evaluation.greedy=false", "observe.console=off"),
    "run.threads=1",
)
SETTINGS = (
    *(*IMAGES_SETTINGS, "data.task.min_digits=2", "data.task.max_digits=4"),
    *("rollout.max_response_tokens=32", "reward.overlong.buffer_tokens=8"),
)
LATE_SCORER = """
import os, random, time

dice = random.Random(os.urandom(16))


def compute_score(data_source, solution_str, ground_truth, extra_info=None, longest=0.0):
    time.sleep(longest * dice.random() ** 4)
    return 1.0 if solution_str.rpartition("#")[2] == ground_truth else -1.0
"""
"""A user's file; its delays are others each time."""
DYING = """
import contextlib, os, signal, threading
from winnow.cli.main import main
from winnow.observe.metrics import Stopwatch

phase, left, delay = os.environ["WINNOW_KILL"].split()
left = int(left)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


@contextlib.contextmanager
def watched(name):
    global left
    left -= name == phase
    if name != phase or left:
        yield
        return
    threading.Timer(float(delay), die).start()
    yield
    die()


Stopwatch.make_range = watched
main()
"""
"""`winnow`, which is killed in a phase, within so many seconds of it."""
ENVIRONMENT = """
import os, random, time
from winnow.environments import Step

dice = random.Random(os.urandom(16))


class Again:
    def reset(self, row):
        self.digits, self.turns = row["ground_truth"], 0
        return ()

    def step(self, turn):
        time.sleep(0.02 * dice.random() ** 4)
        self.turns += 1
        right = turn.text.rpartition("#")[2] == self.digits
        if self.turns == 3:
            return Step(reward=float(right), done=True)
        self.digits = "".join(sorted(self.digits + str(len(turn.text) % 10)))
        return Step(self.digits[::-1] + ":", reward=float(right))
"""
"""Three turns of the quickstart's task, whose replies depend on what was written."""
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
)
ASYNC = (
    *("trainer/mode=async", "run.deterministic=false", "sampling.max_staleness=2"),
    *("sampling.lookahead=1", "trainer.save_every=1"),
)
CONVERSATIONS = (
    *("environment=custom", "environment.path=FOLDER/again.py:Again"),
    *("data.chat_template=FOLDER/chat.jinja", "rollout.max_response_tokens=96"),
)
VARIANTS = {
    "plain": (),
    "critic": (
        *("algorithm/advantage=gae", "critic.warmup_steps=1"),
        *("critic.optim.lr=1e-3", "critic.optim.warmup_steps=1"),
    ),
    "scorers": (
        *("reward.function.path=FOLDER/late.py", "+reward.function.kwargs={longest: 0.05}"),
        "reward.workers=1",
    ),
    "ranks": ("trainer/strategy=fsdp2",),
    "conversations": CONVERSATIONS,
    "conversations-one-step-off": (
        *(*CONVERSATIONS, "trainer/mode=one_step_off", "sampling.max_staleness=2"),
        "rollout.engine.processes=2",
    ),
    "conversations-async": (*CONVERSATIONS, *ASYNC, "rollout.engine.processes=2"),
    "images": (),
    "images-engine": ("rollout.engine.processes=1",),
}
"""Settings of each kind of run."""
CLOCKED = (
    "time/",
    "overlap/",
    "sft/time_s",
    "start/",
    "scoring/",
    "throughput/",
    "memory/",
    "judge/",
    "ranks/peak_gib",
    "environment/reply_s",
)
MOMENTS = ("any", "any", "saving", "logged", "starting")
PHASES = ("rollout", "update", "publish", "write", "evaluate", "checkpoint")
LONGEST_S = 300.0


@dataclass(frozen=True)
class Lab:
    """A folder for runs and their warm start, and how long an undisturbed run takes."""

    folder: Path
    seconds: float = 0.0
    """From the first sign of the run's folder to the end of the process."""
    settings: tuple[str, ...] = ()
    """Of every run, beside those of its recipe."""
    recipe: str = "quickstart"

    def run(self, name: str) -> Path:
        """A run's folder."""
        return self.folder / "runs" / name

    def start(self, name: str, *settings: str, dying: str = "") -> subprocess.Popen[bytes]:
        """The command, in a process of its own; `dying` is a phase, its number and a delay."""
        program = ("-c", DYING) if dying else ("-m", "winnow.cli.main")
        command = [sys.executable, *program, "train", self.recipe]
        command += SETTINGS if self.recipe == "quickstart" else IMAGES_SETTINGS
        command += [f"run.dir={self.folder / 'runs'}", f"run.name={name}"]
        more = {"OMP_NUM_THREADS": "1", "WINNOW_CACHE": str(self.folder / "cache")}
        more["WINNOW_KILL"] = dying
        return subprocess.Popen([*command, *self.settings, *settings], env=os.environ | more)

    def undisturbed(self, name: str = "undisturbed") -> Lab:
        """Run once with a fresh cache, once for the time; returns the lab that knows it."""
        assert self.start("warm-up", "trainer.steps=1", "critic.warmup_steps=0").wait() == 0
        return self.timed(name)

    def timed(self, name: str = "undisturbed") -> Lab:
        """Run once; returns the lab that knows how long that takes."""
        process = self.start(name, "trainer.save_every=1")
        wait_for(process, lambda: self.run(name).is_dir())
        began = time.monotonic()
        assert process.wait(LONGEST_S) == 0
        return replace(self, seconds=time.monotonic() - began)


@dataclass(frozen=True)
class Kill:
    """One SIGKILL, and what the folder looked like after it."""

    moment: str
    delay_s: float
    logged: int
    """Steps with a line of metrics."""
    saved: int
    """Step of the newest checkpoint; -1 without one."""
    drafts: int
    """Half-written checkpoints and files."""


@dataclass(frozen=True)
class Trial:
    """A run that was killed, resumed and compared."""

    kills: list[Kill]
    faults: list[str]
    """What differs from the undisturbed run."""


def wait_for(process: subprocess.Popen[bytes], sign: Callable[[], bool]) -> bool:
    """Until the sign shows; False when the process ended first."""
    while not sign():
        if process.poll() is not None:
            return False
        time.sleep(0.0005)
    return True


def code_of(process: subprocess.Popen[bytes], longest_s: float) -> int:
    """The exit code of a process that is to end by itself; one that does not is killed."""
    try:
        return process.wait(longest_s)
    finally:
        process.kill()


def trial(
    lab: Lab, name: str, kills: int, rng: random.Random, moments: Sequence[str] = ()
) -> Trial:
    """Run `name` with up to `kills` kills, and compare it with the undisturbed run."""
    done: list[Kill] = []
    save_every = f"trainer.save_every={rng.choice([1, 1, 2])}"
    for moment in [*moments, *[""] * kills][:kills]:
        if moment in PHASES:
            kill = kill_in(lab, name, moment, rng, save_every)
        else:
            kill = kill_at(lab, lab.start(name, save_every), name, rng, moment)
        if kill is None:
            break
        done.append(kill)
    code = lab.start(name, save_every).wait(LONGEST_S)
    faults = [] if code == 0 else [f"the last resume ended with exit code {code}"]
    if "run.deterministic=false" in lab.settings:
        faults += lost_or_repeated(lab.run(name))
    else:
        faults += differences(lab.run("undisturbed"), lab.run(name))
    return Trial(done, faults)


def kill_in(lab: Lab, name: str, phase: str, rng: random.Random, save_every: str) -> Kill | None:
    """Have the run killed in a phase; None when it was over before."""
    number, run = rng.choice([1, 2]), lab.run(name)
    takes = [line.get(f"time/{phase}_s", 0.0) for line in figures(lab.run("undisturbed"), ())]
    delay = rng.uniform(0, max(takes))
    process = lab.start(name, save_every, dying=f"{phase} {number} {delay}")
    killed = process.wait(LONGEST_S) == -signal.SIGKILL
    return kill_of(run, f"{phase} {number}", delay) if killed else None


def kill_at(
    lab: Lab, process: subprocess.Popen[bytes], name: str, rng: random.Random, moment: str = ""
) -> Kill | None:
    """Kill the run at a moment, by default a random one; None when it was over before."""
    run = lab.run(name)
    moment = moment or rng.choice(MOMENTS)
    lines, resumed = size(run / "metrics.jsonl"), size(run / "log.txt")
    signs: dict[str, tuple[Callable[[], bool], float]] = {
        "any": (lambda: True, lab.seconds),
        "saving": (lambda: any_draft(run / "checkpoints"), 0.02),
        "logged": (lambda: size(run / "metrics.jsonl") not in (0, lines), 0.03),
        "starting": (lambda: True, 0.6),
    }
    sign, longest = signs[moment]
    later = rng.randrange(3) if moment in ("saving", "logged") else 0
    # The log grows once the folder is locked, and drafts of an earlier death are gone.
    shown = wait_for(process, lambda: size(run / "log.txt") > resumed)
    shown = shown and wait_for(process, sign)
    for _ in range(later if shown else 0):  # not always the first save, or line
        time.sleep(rng.uniform(0, lab.seconds / 4))
        lines = size(run / "metrics.jsonl")
        shown = shown and wait_for(process, sign)
    delay = rng.uniform(0, longest)
    if shown:
        time.sleep(delay)
    process.send_signal(signal.SIGKILL)
    return kill_of(run, moment, delay) if process.wait() == -signal.SIGKILL else None


def kill_of(run: Path, moment: str, delay: float) -> Kill:
    """Describe the folder of a run that was just killed."""
    found = checkpoints_in(run / "checkpoints")
    return Kill(
        moment,
        delay,
        logged=max(0, content(run / "metrics.jsonl").count(b"\n") - 1),
        saved=found[-1].step if found else -1,
        drafts=len(list(leftovers(run))),
    )


def differences(wanted: Path, run: Path, steps: int = STEPS) -> list[str]:
    """What of a finished run is not as in the other one, bit for bit."""
    faults = [f"left behind: {path.relative_to(run)}" for path in leftovers(run)]
    if figures(wanted) != figures(run):
        faults.append("metrics.jsonl")
    for folder in ("rollouts", "eval"):
        if contents(wanted / folder) != contents(run / folder):
            faults.append(folder)
    if not same_ledger(wanted / LEDGER, run / LEDGER):
        faults.append(LEDGER)
    try:
        ours, theirs = (
            Checkpoint(r / "checkpoints" / f"step-{steps}", steps) for r in (wanted, run)
        )
        if contents(ours.model) != contents(theirs.model):
            faults.append("model")
        if not same(load_state(ours), load_state(theirs)):
            faults.append("state")
    except WinnowError as error:
        faults.append(str(error))
    return faults


def lost_or_repeated(run: Path, steps: int = STEPS) -> list[str]:
    """Faults in what became of a finished run's groups, by its ledger and last checkpoint."""
    rows = [
        row for part in sorted((run / LEDGER).iterdir()) for row in pq.read_table(part).to_pylist()
    ]
    trained = [row for row in rows if row["fate"] == "trained"]
    ids = [row["group"] for row in trained]
    ledger = load_state(checkpoints_in(run / "checkpoints")[-1])["sampler"]["ledger"]
    groups = ledger["groups"]
    settled = [each.group.id for each in ledger["accounting"].settled]
    alive = [*groups.open, *groups.qualified, *groups.failing, *settled]
    checks = {
        "a group is trained twice, or out of order": ids == sorted(set(ids)),
        "a step has too few groups": [row["learnt_step"] for row in trained]
        == sorted([*range(1, steps + 1)] * 8),
        "a group is too late": all(row["staleness"] <= 2 for row in rows),
        "a group was dropped": {row["fate"] for row in rows}.isdisjoint({"stale", "surplus"}),
        "a group is lost": sorted([row["group"] for row in rows] + alive)
        == list(range(ledger["next_id"])),
    }
    return [fault for fault, is_right in checks.items() if not is_right]


def same_ledger(wanted: Path, run: Path) -> bool:
    """Whether two ledgers are equal; on Ray the driver has no token ids of which to keep a CRC."""
    ours, theirs = (
        {part.name: pq.read_table(part).to_pylist() for part in sorted(folder.iterdir())}
        for folder in (wanted, run)
    )
    for row, other in zip(chain(*ours.values()), chain(*theirs.values()), strict=False):
        if None in (row["token_crc"], other["token_crc"]):
            row["token_crc"] = other["token_crc"] = None
    return ours == theirs


def same(a: Any, b: Any) -> bool:
    """Whether two states are equal in every bit."""
    if isinstance(a, dict) and isinstance(b, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and same(a.numpy(), b.numpy())
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return type(a) is type(b) and repr(a) == repr(b)


def figures(run: Path, without: tuple[str, ...] = CLOCKED) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock or the operating system says."""
    lines = [json.loads(line) for line in content(run / "metrics.jsonl").splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(without)} for line in lines]


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def leftovers(run: Path) -> Iterator[Path]:
    """Drafts of checkpoints and of files."""
    yield from run.glob("checkpoints/.*")
    yield from run.glob("*.partial")
    for folder in ("rollouts", "eval"):
        yield from run.glob(f"{folder}/*.partial")


def any_draft(folder: Path) -> bool:
    """Whether a checkpoint is being written."""
    try:
        return any(entry.name[0] == "." for entry in os.scandir(folder))
    except FileNotFoundError:
        return False


def content(path: Path) -> bytes:
    """A file's bytes; none of a file that is not there."""
    return path.read_bytes() if path.exists() else b""


def size(path: Path) -> int:
    """A file's bytes, counted."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def trials(
    lab: Lab, times: int, rng: random.Random, until: float, moments: Sequence[str] = ()
) -> list[Trial]:
    """Kill so many times; no run begins after the moment `until` of the monotonic clock."""
    done: list[Trial] = []
    turns = [*moments] * times
    while (left := times - sum(len(each.kills) for each in done)) > 0 and time.monotonic() < until:
        done.append(trial(lab, f"trial-{len(done)}", min(3, left), rng, turns[times - left :]))
        verdict = done[-1].faults or "same"
        print(f"{times - left + len(done[-1].kills)} kills; run {len(done)}: {verdict}", flush=True)
    return done


def report(trials: list[Trial], wanted: int, settings: tuple[str, ...] = ()) -> str:
    """The trials as Markdown: a summary by moment, then each kill."""
    end, good_run = "bit for bit as the undisturbed one", "same bits"
    if "run.deterministic=false" in settings:
        end, good_run = "with no group lost, trained twice or out of order", "all groups once"
    kills = [kill for each in trials for kill in each.kills]
    # A run that came to its end before the first moment was not killed.
    trials = [each for each in trials if each.kills]
    good = sum(not each.faults for each in trials)
    by_moment = Counter(kill.moment for kill in kills)
    counts = ", ".join(f"{number} {moment}" for moment, number in sorted(by_moment.items()))
    asked = "" if len(kills) >= wanted else f" of {wanted} asked for: the time was up"
    lines = [
        f"{len(kills)} kills{asked} in {len(trials)} runs ({counts}); "
        f"{sum(kill.drafts > 0 for kill in kills)} left a draft behind, which the next start "
        f"removed; {good} of {len(trials)} runs ended {end}.",
        "",
        "| run | kill | moment | after s | steps logged | newest checkpoint | drafts | the run |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for number, each in enumerate(trials, start=1):
        for place, kill in enumerate(each.kills, start=1):
            verdict = "" if place < len(each.kills) else "; ".join(each.faults) or good_run
            saved = f"step {kill.saved}" if kill.saved >= 0 else "none"
            lines.append(
                f"| {number} | {place} | {kill.moment} | {kill.delay_s:.3f} | {kill.logged} "
                f"| {saved} | {kill.drafts} | {verdict} |"
            )
    return "\n".join(lines)


def write_user_files(folder: Path) -> None:
    """Write the files that settings of `VARIANTS` name."""
    (folder / "late.py").write_text(LATE_SCORER)
    (folder / "again.py").write_text(ENVIRONMENT)
    (folder / "chat.jinja").write_text(CHAT_TEMPLATE)


def variant(text: str) -> tuple[str, int]:
    """`plain=50` as a pair."""
    name, equals, times = text.partition("=")
    if name not in VARIANTS or not equals:
        raise argparse.ArgumentTypeError(
            f"{text}: give NAME=KILLS, NAME from {', '.join(VARIANTS)}"
        )
    return name, int(times)


def main() -> None:
    """Kill as often as asked, and write the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=variant, nargs="+", default=[("plain", 50)])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--moments", nargs="+", choices=[*MOMENTS[1:], *PHASES], default=[])
    parser.add_argument("--minutes", type=float, default=float("inf"), help="Begin no run later.")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=Path, help="Keep the runs here.")
    args = parser.parse_args()
    until = time.monotonic() + 60 * args.minutes
    parts, faults = [], 0
    for name, times in args.times:
        with tempfile.TemporaryDirectory() as scratch:
            folder = (args.runs or Path(scratch)).resolve() / name
            folder.mkdir(parents=True)
            write_user_files(folder)
            settings = tuple(each.replace("FOLDER", str(folder)) for each in VARIANTS[name])
            recipe = "quickstart-images" if name.startswith("images") else "quickstart"
            lab = Lab(folder, settings=settings, recipe=recipe).undisturbed()
            done = trials(lab, times, random.Random(args.seed), until, args.moments)
        faults += sum(bool(each.faults) for each in done)
        extra = f"Settings: `{' '.join(VARIANTS[name])}`.\n\n" if VARIANTS[name] else ""
        parts.append(f"## {name}\n\n{extra}{report(done, times, settings)}\n")
        print(parts[-1], flush=True)
        if args.out is not None:
            command = " ".join(["python", "benchmarks/kill.py", *sys.argv[1:]])
            head = f"# Killed and resumed\n\nMade by `{command}`.\n\n"
            args.out.write_text(head + "\n".join(parts))
    sys.exit(faults > 0)


if __name__ == "__main__":
    main()
