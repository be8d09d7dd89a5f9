"""CPU seconds until a command says its first word, beside those of `import torch`.

    python -m benchmarks.start [--winnow OTHER/src] [--times 9] [--out benchmarks/results/start.md]

`winnow --help` runs to its end. `winnow train quickstart` runs to its heading, at which its recipe
is validated and its folder made, and is killed there. Each is started `--times` times, in turn with
the others and with those of the other tree, so that a busy machine is busy for all. The median
counts, of the user and system time of the process and what it has waited for.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import winnow

OURS = Path(winnow.__file__).parents[1]
HEADING = "writing to"
TORCH = "import torch"
COMMANDS = {
    "winnow --help": ("-m", "winnow.cli.main", "--help"),
    "winnow train to its heading": ("-m", "winnow.cli.main", "train", "quickstart"),
    TORCH: ("-c", f"{TORCH}; print({HEADING!r}, flush=True)"),
}


def seconds(words: tuple[str, ...], source: Path, folder: str) -> float:
    """CPU seconds of a Python started with `words` until its heading, or its end without one."""
    environment = os.environ | {"PYTHONPATH": str(source), "WINNOW_CACHE": folder}
    environment["OMP_NUM_THREADS"] = "1"
    process = subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    for line in process.stdout:
        if HEADING in line:
            # After the name, which may hold spaces: fields 14 to 17 are times in ticks.
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
            process.kill()
            process.wait()
            return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    _, code, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(code)
    assert process.returncode == 0, words
    return used.ru_utime + used.ru_stime


def measured(sources: dict[str, Path], times: int) -> dict[str, dict[str, float]]:
    """Medians by command and tree."""
    taken: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(times):
        for name, words in COMMANDS.items():
            for tree, source in sources.items():
                with tempfile.TemporaryDirectory() as folder:
                    taken[name, tree].append(seconds(words, source, folder))
    return {
        name: {tree: statistics.median(taken[name, tree]) for tree in sources} for name in COMMANDS
    }


def table(found: dict[str, dict[str, float]]) -> str:
    """The medians as Markdown, and their ratios to `import torch`."""
    trees = list(found[TORCH])
    heads = [f"{tree}, CPU s" for tree in trees] + [f"{tree} / `{TORCH}`" for tree in trees]
    lines = ["| until | " + " | ".join(heads) + " |", "|---" * (len(heads) + 1) + "|"]
    for name, by_tree in found.items():
        cells = [f"{by_tree[tree]:.2f}" for tree in trees]
        cells += [f"{by_tree[tree] / found[TORCH][tree]:.2f}" for tree in trees]
        lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Measure, print, and write where that is asked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--winnow", type=Path, help="Folder src of another tree: before.")
    parser.add_argument("--times", type=int, default=9)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sources = {"before": options.winnow.resolve()} if options.winnow else {}
    found = table(measured(sources | {"after": OURS}, options.times))
    print(found)
    if options.out is not None:
        text = f"# Start\n\n`python -m benchmarks.start`: medians of {options.times}.\n\n{found}\n"
        options.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
