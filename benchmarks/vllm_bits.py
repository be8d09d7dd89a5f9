"""Runs of vLLM engines compared with the torch engine's, and with killed and resumed ones, by bits.

    .venv-vllm/bin/python -m benchmarks.vllm_bits [--out benchmarks/results/vllm_bits.md]

Each run has some steps of the quickstart's task in fp32 on a CPU, with heads of 32 that vLLM's CPU
kernels take. Answers are compared by all that is kept of them but log-probs, which differ between
engines by rounding. The number of engines decides which groups are under way when a step is cut, so
that two engines are compared with two.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from benchmarks.kill import LONGEST_S, STEPS, Lab, content, contents, differences, wait_for

VLLM = "rollout/engine=vllm"
WIDE = (
    *("warm_start.model.head_dim=32", "trainer.save_every=1", "trainer.keep_last=null"),
    "data.max_prompt_tokens=16",  # with the response, the positions that the model has
    "observe.rollout_text_groups=1000",  # the ids of all answers
    "algorithm.correction.mode=recompute",  # log-probs of the torch engine alone are reused
)
TWO = "rollout.engine.processes=2"
SPLIT = "rollout.engine.tensor_parallel=2"


@dataclass(frozen=True)
class Case:
    """A run, and the one that it is compared with."""

    name: str
    about: str
    settings: tuple[str, ...] = ()
    against: str = ""
    victims: tuple[str, ...] = ()
    """Processes that are killed with SIGKILL, each after a further step: engine, driver."""


CASES = (
    Case("torch", "torch engine in the run's process"),
    Case("vllm", "1 vLLM engine", (VLLM,), "torch"),
    Case("torch-2", "2 torch engines", (TWO,)),
    Case("vllm-2", "2 vLLM engines", (VLLM, TWO), "torch-2"),
    Case("split", "1 vLLM engine, tensor_parallel=2", (VLLM, SPLIT), "torch"),
    Case("ray", "1 vLLM engine on Ray", (VLLM, "cluster=ray"), "vllm"),
    Case(
        "killed",
        "1 vLLM engine, killed in 2 steps",
        (VLLM, "trainer.max_restarts=2"),
        "vllm",
        ("engine", "engine"),
    ),
    Case("resumed", "the run killed in 2 steps, resumed", (VLLM,), "vllm", ("driver", "driver")),
)

ROUNDED = ("logprobs", "mismatch")
"""Columns of the engine's log-probs, and of their distance from the trainer's."""


def answers(run: Path) -> dict[str, dict[str, list[Any]]]:
    """Everything that is kept of a run's answers but the engine's log-probs, by file and column."""
    found = {}
    for path in sorted((run / "rollouts").iterdir()):
        columns = pq.read_table(path).to_pydict()
        found[path.name] = {name: columns[name] for name in columns if name not in ROUNDED}
    return found


def model_of(run: Path, step: int = STEPS) -> dict[str, bytes]:
    """The files of a run's model as it was after a step."""
    return contents(run / "checkpoints" / f"step-{step}" / "model")


def logged(run: Path) -> int:
    """Steps with a line of metrics."""
    return max(0, content(run / "metrics.jsonl").count(b"\n") - 1)


def gets_on(process: subprocess.Popen[bytes], run: Path) -> bool:
    """Wait until a run has got on by a step; False when it ended first."""
    least = logged(run) + 1
    return wait_for(process, lambda: logged(run) >= least)


def engine_of(run: Path) -> int:
    """The newest process of the run's first engine."""
    told = (run / "log.txt").read_text()
    return int(re.findall(r"engine 0\[0\]: ready: process (\d+) on ", told)[-1])


def train(lab: Lab, case: Case) -> None:
    """Run a case to its end; what is killed goes on, supervised or by the same command."""
    run = lab.run(case.name)
    process = lab.start(case.name, *case.settings)
    for victim in case.victims:
        assert gets_on(process, run)
        if victim == "engine":
            os.kill(engine_of(run), signal.SIGKILL)
        else:
            process.kill()
            process.wait()
            process = lab.start(case.name, *case.settings)
    assert process.wait(3 * LONGEST_S) == 0, f"{case.name} failed: {run / 'log.txt'}"


def row(lab: Lab, case: Case) -> str:
    """A row of the table."""
    run, other = lab.run(case.name), lab.run(case.against or case.name)
    tokens = sum(len(ids) for file in answers(run).values() for ids in file["token_ids"])
    digest = hashlib.sha256(b"".join(model_of(run).values())).hexdigest()[:16]
    cells = [case.about, f"{tokens:,}", digest, case.against]
    if case.against:
        pairs = (answers(run), answers(other)), (model_of(run), model_of(other))
        cells += ["same" if ours == theirs else "DIFFERENT" for ours, theirs in pairs]
        cells.append(", ".join(differences(other, run)) or "nothing")
    else:
        cells += [""] * 3
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """Train the cases and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        lab = Lab(Path(scratch), settings=WIDE)
        rows = []
        for case in CASES:
            train(lab, case)
            rows.append(row(lab, case))
            print(rows[-1], flush=True)
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    ).stdout.strip()
    text = (
        f"# Bits of runs with vLLM\n\nMade by `python -m benchmarks.vllm_bits` at {commit}: "
        f"{STEPS} steps, fp32, CPU, one thread each.\n\n"
        "| run | tokens kept | weights | compared with | answers | final weights | differs in |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    print(text)
    if asked.out is not None:
        asked.out.write_text(text)
    sys.exit(any("DIFFERENT" in each for each in rows))


if __name__ == "__main__":
    main()
