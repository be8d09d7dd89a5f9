"""Runs with environments: first messages, faults, figures, and settings that are refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tests.ray_nodes import RayWorkers
from tests.small_models import digits_folder
from tests.winnow_command import Outcome, in_this_process

from winnow.observe.jsonl import read_metrics

pytestmark = pytest.mark.slow
TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
SORT = '''
import os, re, signal, time, zlib
from pathlib import Path
from winnow.environments import Step

class Sort:
    """Repeats a number of the row. It fails once at one of `every` turns, by row and text."""

    def __init__(self, every=0, dies=False, always=False, restless=False, log="", nodes=""):
        self.every, self.dies, self.always, self.heard = every, dies, always, []
        self.log, self.nodes = log, nodes
        self.begin = str(time.monotonic_ns() % 10) if restless else ""

    def reset(self, row):
        self.key = row["messages"][0]["content"]
        return "<eos>" + self.begin + self.key[::-1]

    def step(self, turn):
        self.heard.append(turn.text)
        name = zlib.crc32(repr((self.key, self.heard)).encode())
        if self.every and name % self.every == 0:
            self.fail(Path("faults") / str(name))
        done, told = len(self.heard) == 3, {"heard": len(self.heard), "calls": 99}
        return Step(self.key, reward=len(turn.text) % 7, done=done, metrics=told)

    def fail(self, mark):
        if self.always or not mark.exists():
            mark.touch()
            if self.log:  # once, the worker of environments dies, or its node
                (mark.parent / "killed").touch(exist_ok=False)
                pid = re.findall(r"ready: process (\\d+)", Path(self.log).read_text())[-1]
                pid = (Path(self.nodes) / pid).read_text() if self.nodes else pid
                os.kill(int(pid), signal.SIGKILL)
                time.sleep(2)
            if self.dies:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("it crashed")

def double(x: str) -> str:
    \"\"\"Double a digit.

    Args:
        x: the digit.
    \"\"\"
'''
SETTINGS = (
    *("data/task=sort_digits", "data.task.eval_problems=2", "data.max_prompt_tokens=24"),
    *("data.max_train_prompts=6", f"data.chat_template={TEMPLATE!r}", "model.path=digits"),
    *("environment=custom", "environment.workers=1"),
    *("sampling/filter=none", "sampling.groups_per_step=4", "rollout.n=6", "trainer.steps=3"),
    *("rollout.max_response_tokens=64", "run.threads=1", "trainer.save_every=null"),
    *("observe.console=off", "evaluation.before=false", "evaluation.every=null"),
)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environments")
    digits_folder(folder / "digits")
    (folder / "sort.py").write_text(SORT)
    (folder / "small.yaml").write_text("trainer: {steps: 3}\n")
    train(folder, "plain").check()
    return folder


def train(home: Path, name: str, *settings: str) -> Outcome:
    for mark in (home / "faults").glob("*"):
        mark.unlink()
    (home / "faults").mkdir(exist_ok=True)
    custom = ("environment.path=sort.py:Sort",) * ("environment=tools" not in settings)
    words = "train", "small.yaml", *SETTINGS, *custom, f"run.name={name}", *settings
    return in_this_process(*words, folder=home)


def answers(home: Path, name: str) -> list[dict[str, object]]:
    columns = ["step", "prompt_uid", "prompt", "prompt_ids", "token_ids", "reward"]
    files = sorted((home / f"runs/{name}/rollouts").glob("*.parquet"))
    return [row for file in files for row in pq.read_table(file, columns=columns).to_pylist()]


def total(home: Path, name: str, figure: str) -> float:
    return sum(line.get(figure, 0) for line in read_metrics(home / f"runs/{name}/metrics.jsonl"))


@pytest.mark.parametrize(("every", "dies"), [(40, False), (80, True)])
def test_crashes_are_counted_and_change_no_reward(home: Path, every: int, dies: bool) -> None:
    name = f"every{every}"
    train(home, name, f"environment.options={{every: {every}, dies: {dies}}}").check()
    injected = len(list((home / "faults").iterdir()))
    assert injected
    assert total(home, name, "environment/faults") == injected
    assert total(home, name, "sampling/answers/retried") == injected
    assert answers(home, name) == answers(home, "plain")
    for figure in ("environment/reward", "environment/turns", "environment/heard"):
        assert total(home, name, figure) == total(home, "plain", figure) > 0


def test_tokens_of_replies_are_booked_apart(home: Path) -> None:
    files = sorted((home / "runs/plain/rollouts").glob("*.parquet"))
    tokens = {"model": 0, "environment": 0}
    for row in chain.from_iterable(pq.read_table(file).to_pylist() for file in files):
        whole = [{"author": "model", "tokens": len(row["token_ids"])}]  # cut off in its first turn
        for turn in row["turns"] or whole:
            tokens[turn["author"]] += turn["tokens"]
    assert total(home, "plain", "sampling/tokens/environment") == tokens["environment"] > 0
    assert total(home, "plain", "sampling/tokens/trained") == tokens["model"]


def test_conversations_begin_as_the_environment_does(home: Path) -> None:
    for answer in answers(home, "plain"):
        number = str(answer["prompt_uid"]).removeprefix("sort_digits:")
        assert answer["prompt"] == f"<eos>:{number[::-1]}"
        assert len(answer["prompt_ids"]) == 5 + len(number) + 1  # no stop token: five characters
    train(home, "endless", "data.max_train_prompts=null", "trainer.steps=1").check()
    assert all(str(each["prompt"]).startswith("<eos>:") for each in answers(home, "endless"))


def test_an_environment_that_always_fails_ends_groups_but_no_evaluation(home: Path) -> None:
    settings = "environment.options={every: 9, always: true}", "evaluation.n=3"
    train(home, "failing", "evaluation.before=true", "trainer.steps=1", *settings).check()
    assert total(home, "failing", "sampling/groups/failed") > 0
    outcome = in_this_process("eval", "runs/plain", *settings, folder=home).check()
    assert "failed for" in outcome.out


def test_an_environment_that_begins_anew_each_time_is_named(home: Path) -> None:
    settings = "environment.options={restless: true}", "sampling.max_empty_steps=1"
    outcome = train(home, "restless", *settings)
    assert outcome.code == 2
    assert "reset returned other messages than those of the prompt; let them" in outcome.err


def test_the_greedy_baseline_of_remax_is_a_conversation(home: Path) -> None:
    train(home, "remax", "algorithm/advantage=remax", "trainer.steps=1").check()
    (line,) = read_metrics(home / "runs/remax/metrics.jsonl")
    assert line["sampling/tokens/baseline"] > 0
    assert 1 <= line["environment/heard"] <= line["environment/turns"] <= 3
    assert line["environment/calls"] == line["environment/malformed_turns"] == 0
    assert line["environment/reply_s"] > 0


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (
            ("environment=tools", "environment.tools=[sort.py:double]"),
            "environment=tools: the chat template shows no tools; set data.chat_template to one "
            "that does, or describe the calls in the prompts and set environment.calls",
        ),
        (
            ("data.chat_template=auto",),
            "environment=custom needs a chat template, and there is none; set "
            "data.chat_template=FILE, or use a model whose tokenizer has one",
        ),
        (
            ("data.chat_template=none",),
            "environment=custom does not support data.chat_template=none; set it to auto, or to a "
            "file",
        ),
        (
            ("rollout.stop=[x]",),
            "environment=custom does not support rollout.stop, whose strings may be in replies; "
            "set rollout.stop=[]",
        ),
        (
            ("sft=demonstrations", "sft.train_files=[x.jsonl]", "data.max_train_prompts=null"),
            "environment=custom does not support sft=demonstrations; set environment=none",
        ),
    ],
)
def test_what_conversations_exclude_is_refused_in_a_line(
    home: Path, settings: tuple[str, ...], line: str
) -> None:
    outcome = train(home, "refused", *settings)
    assert (outcome.code, outcome.err) == (2, f"winnow: {line}\n")


@pytest.fixture(scope="module")
def cluster(ray_workers: RayWorkers) -> Iterator[str]:
    """The address of a Ray cluster of a head without cores and two nodes."""
    head, node = {"num_cpus": 0}, {"num_cpus": 1}
    with ray_workers.nodes(head, node, node) as address:
        yield address


@pytest.mark.usefixtures("forked_workers")
@pytest.mark.parametrize("lost", ["", "worker", "node"])
def test_workers_on_ray_give_the_same_bits_and_losing_one_is_a_fault(
    home: Path, cluster: str, ray_workers: RayWorkers, lost: str
) -> None:
    name, nodes = f"ray{lost}", str(ray_workers.path.parent) if lost == "node" else ""
    options = f"{{every: 60, log: runs/{name}/log.txt, nodes: {nodes!r}}}" if lost else "{}"
    there = "cluster=ray", f"cluster.address={cluster}", "cluster.cpus=0.5"
    settings = f"environment.options={options}", "environment.processes=2", "environment.workers=1"
    train(home, name, *there, *settings).check()
    assert answers(home, name) == answers(home, "plain")
    faults = total(home, name, "environment/faults")
    assert faults == total(home, name, "sampling/answers/retried")
    assert (faults > 0) == (home / "faults/killed").exists() == bool(lost)
    log = (home / f"runs/{name}/log.txt").read_text()
    started = len(re.findall(r"environment [01]\[0\]: ready: process", log))
    assert started > 2 if lost else started == 2
