"""Reading the pages of the documentation: their blocks of code and the commands in them.

`python -m tests.pages` lists the commands that no test runs, each with its reason.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("docs/*.md"), ROOT / "README.md"])
_NEEDS = {
    "make": "installs, and trains for minutes: .ci/run types `make quickstart` and `make test`",
    "pip": "installs from a package index",
    "sbatch": "needs Slurm: the script's grammar and its command are tested in test_docs.py",
    "kubectl": "needs Kubernetes: the manifest and its command are tested in test_docs.py",
    "docker": "needs a Docker engine: what the file copies and installs is tested in test_docs.py",
    "ray": "needs a Ray cluster with a job server: typed by hand (docs/cluster.md)",
    "python -m vllm.entrypoints.openai.api_server": (
        "needs vLLM: tests/vllm/test_http_server.py starts it with these options"
    ),
    "python -m tests.e2e.test_bad_input_resume": (
        "makes the page: what it writes is compared by tests/e2e/test_bad_input.py"
    ),
    "winnow … rollout/engine=vllm": (
        "needs vLLM: tests/vllm trains with it, in an environment of its own"
    ),
    "winnow … trainer/strategy=megatron": (
        "needs GPUs: tests/e2e/test_megatron.py trains with it, with answers in CUDA's place"
    ),
    **dict.fromkeys(
        ("winnow train … eight_gpus.yaml", "winnow train … lora.yaml"),
        "needs GPUs: tests/e2e/test_guides.py plans it at its size",
    ),
    "winnow … cluster=ray": (
        "needs a Ray cluster: tests/e2e/test_pools.py trains with these settings on two nodes"
    ),
    "winnow … cluster.address=auto": (
        "needs 16 nodes: tests/vllm/test_published_layout.py trains with the layout in small"
    ),
}
"""Commands that are not run, by what is typed, and why. All others are."""


@dataclass(frozen=True)
class Typed:
    """A command of a page.

    Attributes:
        words: of the command, its program first.
        environment: variables that are set for it.
    """

    words: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()

    @property
    def why_not_run(self) -> str:
        """The reason for which no test runs it; empty where one does."""
        said = " ".join(self.words) + " "
        for start, reason in _NEEDS.items():
            program, _, setting = start.partition(" … ")
            is_help = "--help-config" in self.words
            if said.startswith(f"{program} ") and f"{setting} " in said and not is_help:
                return reason
        return ""


def code_blocks(page: str) -> Iterator[tuple[str, str]]:
    """Kind and text of each fenced block."""
    yield from re.findall(r"^```(\w*)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)


def write_shown_files(page: str, folder: Path) -> None:
    """Write the recipes and programs of a page, each named in backticks before its block."""
    for name, code in re.findall(r"`(\w+\.\w+)`[^`]*?```\w+\n(.*?)^```", page, re.S | re.M):
        if name.endswith((".py", ".yaml")):
            (folder / name).unlink(missing_ok=True)
            (folder / name).write_text(code)


def typed(page: str) -> list[Typed]:
    """Every command in the shell blocks of a page."""
    found = []
    for kind, block in code_blocks(page):
        environment: dict[str, str] = {}
        for line in block.replace("\\\n", " ").splitlines() if kind == "sh" else ():
            words = shlex.split(re.sub(r"\$\([^)]*\)", "made", line), comments=True)
            own = dict(environment)
            if words[:1] == ["export"]:
                environment |= dict([words[1].split("=", 1)])
                continue
            while words and re.match(r"[A-Z_]+=", words[0]):
                own |= dict([words.pop(0).split("=", 1)])
            if words:
                words[0] = words[0].removeprefix(".venv/bin/")
                found.append(Typed(tuple(words), tuple(own.items())))
    return found


def commands(page: str) -> list[list[str]]:
    """The words behind `winnow` of each such command of a page."""
    return [list(command.words[1:]) for command in typed(page) if command.words[0] == "winnow"]


def main() -> None:
    """List what is not run."""
    for page in PAGES:
        for command in typed(page.read_text("utf-8")):
            if command.why_not_run:
                print(f"{page.name}: {shlex.join(command.words)}\n    {command.why_not_run}")


if __name__ == "__main__":
    main()
