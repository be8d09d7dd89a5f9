"""What a new user does on a first day, typed one after the other, each with its time.

    python benchmarks/first_day.py [--out benchmarks/results/first_day.md]

Every command is started as the shell starts it, in a folder of its own that begins empty, with the
programs of the environment that runs this. A command that ends with another exit code than it
should ends the script. Trainings are cut
short: what is measured is how long one waits for each answer of the program, not learning.
"""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

REWARD = """\
def compute_score(data_source, solution_str, ground_truth, extra_info):
    right = solution_str.rpartition("#")[2] == ground_truth
    return {"score": right + 0.2 * (len(solution_str) < 40), "acc": right}
"""
DEMONSTRATIONS = "".join(
    f'{{"prompt": "{n}:", "answer": "#{"".join(sorted(str(n)))}"}}\n' for n in range(1000, 1400)
)
LONGEST_S = 900


@dataclass(frozen=True)
class Action:
    """Something that a user does: a command, and the exit code that it should end with."""

    purpose: str
    command: str
    code: int = 0
    run: Callable[[list[str], Path], tuple[int, str]] | None = None
    """Does more than waiting for the command's end."""
    shows: str = ""
    """What the output must hold."""


@dataclass
class Day:
    """The folder of the day, and what was measured."""

    folder: Path
    rows: list[tuple[str, str, float]] = field(default_factory=list)

    def do(self, action: Action) -> None:
        """Do one thing, and note its time."""
        words = shlex.split(action.command)
        words[0] = str(Path(sys.executable).with_name(words[0]))
        began = time.monotonic()
        code, said = (action.run or wait)(words, self.folder)
        seconds = time.monotonic() - began
        if code != action.code or action.shows not in said:
            raise SystemExit(f"{action.command}: exit code {code}\n{said[-4000:]}")
        self.rows.append((action.purpose, action.command, seconds))
        print(f"{seconds:6.1f} s  {action.command}", flush=True)


def wait(words: list[str], folder: Path) -> tuple[int, str]:
    """Run a command to its end."""
    done = subprocess.run(
        words, cwd=folder, capture_output=True, text=True, timeout=LONGEST_S, check=False
    )
    return done.returncode, done.stdout + done.stderr


def interrupt(words: list[str], folder: Path) -> tuple[int, str]:
    """Press Ctrl-C after the second step."""
    child = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    metrics = folder / "runs/first/metrics.jsonl"
    while child.poll() is None and not (
        metrics.is_file() and metrics.read_bytes().count(b"\n") > 2
    ):
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=LONGEST_S)
    return child.returncode, out.decode()


def open_dashboard(words: list[str], folder: Path) -> tuple[int, str]:
    """Open its first page, and close it."""
    child = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert child.stdout is not None
    said = ""
    while "http://" not in said:
        line = child.stdout.readline().decode()
        if not line:
            return child.wait(), said
        said += line
    address = next(word for word in said.split() if word.startswith("http://"))
    with urllib.request.urlopen(address, timeout=30) as page:
        said += page.read().decode()
    child.send_signal(signal.SIGINT)
    child.communicate(timeout=60)
    return 0, said


SMALL = "observe.console=plain evaluation.max_prompts=40"
ACTIONS = (
    Action("which version is this", "winnow --version"),
    Action("what does my machine have", "winnow doctor"),
    Action("which recipes are there", "winnow recipes", shows="dapo-math"),
    Action("what can I set", "winnow train quickstart --help-config optim", shows="optim.lr"),
    Action(
        "a setting with a slip",
        "winnow train quickstart optim.rl=1",
        code=2,
        shows="optim.lr",
    ),
    Action(
        "the first training, stopped by Ctrl-C",
        f"winnow train quickstart run.name=first trainer.steps=8 {SMALL}",
        code=130,
        run=interrupt,
    ),
    Action(
        "the same command goes on",
        f"winnow train quickstart run.name=first trainer.steps=8 {SMALL}",
        shows="8/8",
    ),
    Action("what did it write", "winnow rollouts runs/first --json", shows="reward"),
    Action("is anything wrong with it", "winnow doctor runs/first"),
    Action("pages in a browser", "winnow dashboard runs --port 0", run=open_dashboard),
    Action("a picture", "winnow plot runs/first --metrics score/accuracy/mean --out first.png"),
    Action("what do the figures mean", "winnow metrics", shows="mismatch"),
    Action("how good is it", f"winnow eval runs/first --out after {SMALL}", shows="pass@"),
    Action("was that luck", f"winnow eval runs/first --step 2 --out before {SMALL}", shows="pass@"),
    Action("compare the two", "winnow compare before after"),
    Action("take the model", "winnow export runs/first model"),
    Action("data of the task", "winnow data prepare sort_digits --rows 100 --out digits.parquet"),
    Action("look the data over", "winnow data check digits.parquet"),
    Action(
        "a reward of my own, tried",
        "winnow reward try digits.parquet --row 3 --answer #1 --function short.py",
        shows="reward",
    ),
    Action(
        "and trained with",
        "winnow train quickstart run.name=short trainer.steps=3 reward.function.path=short.py "
        + SMALL,
    ),
    Action(
        "another learning rate from step 8 on",
        "winnow train quickstart run.name=fork run.fork=runs/first trainer.steps=10 optim.lr=1e-4 "
        + SMALL,
    ),
    Action(
        "three seeds",
        "winnow train quickstart run.seed=1,2,3 trainer.steps=3 warm_start.steps=100 "
        f"{SMALL} --multirun",
    ),
    Action(
        "imitate demonstrations first",
        "winnow sft sft model.path=model sft.train_files=[demonstrations.jsonl] trainer.steps=5 "
        "observe.console=plain",
    ),
    Action("a folder of my own", "winnow init mine"),
    Action("which does what its test says", "python mine/test_reward.py"),
)


def main() -> None:
    """Do everything, and print or write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    # A shell's background job ignores Ctrl-C, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="first-day-") as folder:
        day = Day(Path(folder))
        (day.folder / "short.py").write_text(REWARD)
        (day.folder / "demonstrations.jsonl").write_text(DEMONSTRATIONS)
        for action in ACTIONS:
            day.do(action)
    lines = [
        "# A first day", "", f"`python benchmarks/first_day.py`, load {os.getloadavg()[1]:.1f}", "",
        "| what for | typed | s |", "|---|---|---|",
        *(f"| {why} | `{command}` | {seconds:.1f} |" for why, command, seconds in day.rows),
    ]  # fmt: skip
    text = "\n".join(lines) + "\n"
    if given.out:
        given.out.write_text(text)
    print(text)


if __name__ == "__main__":
    main()
