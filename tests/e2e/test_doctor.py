"""Real runs that are sick: each says so while it trains, and `winnow doctor RUN` afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.kill import SETTINGS
from tests.fault.quick_lab import SPARES
from tests.forked import Server
from tests.small_models import digits_model, save
from tests.winnow_command import Outcome, in_forked_process, winnow
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from winnow.checkpoints.checkpoint import checkpoints_in
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TINY = tuple(each for each in SETTINGS if not each.startswith("rollout.engine."))
SCORERS = """
from zlib import crc32


def compute_score(data_source, solution_str, ground_truth, extra_info=None, fails=0):
    if fails and crc32(solution_str.encode()) % fails == 0:
        raise ValueError("cannot read this")
    return 0.1 + 0.1 * (solution_str.rpartition("#")[2] == ground_truth)
"""
ENGINES = """
import asyncio
from pathlib import Path

import torch
from winnow.rollout.embedded.torch_engine import TorchEngine


class Greedy(TorchEngine):
    def __init__(self, *, model, once, pause_s, **given):
        self.once, self.pause_s = Path(once), pause_s
        super().__init__(model, 32, 4096, **given)

    async def load_weights(self, update):
        self.version = update.version
        await super().load_weights(update)

    async def events(self, until=None):
        if self.version == 2 and not self.once.exists():
            self.once.touch()
            await asyncio.sleep(self.pause_s)
            torch.empty(2**60)
        return await super().events(until)
"""
TOOL = '''
def look(key: str) -> str:
    """Look something up.

    Args:
        key: of it.
    """
    return key
'''
TEMPLATE = (
    "{% if tools %}{{ tools | length }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}<eos>{% endif %}"
    "{% endfor %}"
)


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    (home / "scorers.py").write_text(SCORERS)
    (home / "engines.py").write_text(ENGINES)
    return home


def train(
    home: Path, name: str, *settings: str, server: Server | None = None
) -> tuple[Outcome, RunFolder]:
    """A run, in this process or in one that the server forks."""
    words = (
        *("train", "quickstart", *TINY, f"run.name={name}", "trainer.save_every=null"),
        *("evaluation.every=null", "observe.console=plain", *settings),
    )
    if server is None:
        said = winnow(home, *words)
    else:
        cache = {"WINNOW_CACHE": str(home / "cache")}
        said = in_forked_process(server, *words, folder=home, environment=cache, spares=SPARES)
    return said, RunFolder(home / "runs" / name)


def test_a_scorer_that_fails_is_counted_said_once_kept_with_its_text_and_not_trained_on(
    home: Path,
) -> None:
    said, run = train(
        home,
        "failing",
        *("reward.function.path=scorers.py", "+reward.function.kwargs.fails=12"),
        *("observe.rollout_text_groups=0", "reward.max_failure_share=0.5"),
    )
    said.check()
    # The function gives no accuracy: 0.1 and 0.2 are told apart all the same.
    assert "Groups are kept whose answers differ in acc, or in score if your scorer" in (
        " ".join(said.out.split())
    )
    steps = [record for record in read_metrics(run.metrics) if record["step"]]
    assert sum(r["sampling/groups/trained"] for r in steps) > 0
    failed = sum(record["scoring/failed"] for record in steps)
    rows = read_rollouts(run.rollouts).to_pylist()
    broken = [row for row in rows if row["scorer_error"]]
    assert 0 < len(broken) <= failed
    assert {row["outcome"] for row in broken} == {"failed"}
    assert all(row["response"] for row in broken)
    assert not any(row["response"] for row in rows if row["outcome"] == "trained")
    assert said.out.count("scoring_fails") == 1
    events = [json.loads(line) for line in run.findings.read_text().splitlines()]
    assert [event["name"] for event in events] == ["scoring_fails"]
    shown = winnow(home, "doctor", str(run.path))
    assert shown.code == 0
    assert f"{run.path}: 4 steps, 1 found\n" in shown.out
    assert "warning: scoring_fails, steps 1 to 4" in shown.out
    assert "read the error in the column scorer_error" in shown.out
    (found,) = json.loads(winnow(home, "doctor", str(run.path), "--json").out)
    assert (found["name"], found["first_step"]) == ("scoring_fails", events[0]["first_step"])


# Ranks tell of their progress once a second, and so of a step when the next is sampled.
@pytest.mark.parametrize(("strategy", "pause_s"), [("single", 0.0), ("fsdp2", 2.5)])
def test_memory_that_ends_while_answers_are_written_costs_none_of_the_steps_before(
    home: Path, strategy: str, pause_s: float, server: Server
) -> None:
    words = (
        *("trainer.steps=3", "rollout/engine=custom", "rollout.engine.path=engines.py:Greedy"),
        f"+rollout.engine.options.once={home / strategy}",
        *(f"+rollout.engine.options.pause_s={pause_s}", f"trainer/strategy={strategy}"),
    )
    said, run = train(home, f"greedy-{strategy}", *words, server=server)
    assert said.code == 2
    (line,) = said.err.splitlines()
    assert line.startswith("winnow: out of memory: ")
    assert "tokens of 32 answers at once" in line
    assert "trainer.microbatch_tokens" in line
    assert [each.step for each in checkpoints_in(run.checkpoints)] == [2]
    if strategy == "single":
        assert said.out.count("first step: ") == 1
        assert "first step: " not in winnow(home, "resume", str(run.path)).check().out
        assert [r["step"] for r in read_metrics(run.metrics)] == [0, 1, 2, 3]


def test_calls_that_cannot_be_parsed_are_found_and_shown(home: Path) -> None:
    """A model with random weights that has tags of calls among its tokens."""
    tags, others = ["<tool_call>", "</tool_call>"], '0123456789:"{},abcdefghi'
    tokenizer = Tokenizer(
        models.WordLevel(
            {t: n for n, t in enumerate(["<p>", "<eos>", "<u>", *tags, *others])}, "<u>"
        )
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<[^<>]+>|[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<p>", eos_token="<eos>", unk_token="<u>"
    )
    save(digits_model(), fast, home / "model")
    (home / "tools.py").write_text(TOOL)
    winnow(
        home,
        *("train", "quickstart", "warm_start=none", "model.path=model", "run.name=malformed"),
        *("environment=tools", "environment.tools=[tools.py:look]", "environment.max_turns=2"),
        "environment.workers=1",
        f'data.chat_template="{TEMPLATE}"',
        *("trainer.steps=5", "sampling.groups_per_step=2", "trainer.mini_batch_groups=2"),
        *("rollout.n=4", "rollout.max_response_tokens=64", "sampling/filter=none"),
        *("evaluation.every=null", "trainer.save_every=null", "run.threads=1"),
    ).check()
    run = RunFolder(home / "runs" / "malformed")
    found = json.loads(winnow(home, "doctor", str(run.path), "--json").out)
    assert "calls_malformed" in {each["name"] for each in found}
    rows = read_rollouts(run.rollouts).to_pylist()
    bad = next(row for row in rows if any(turn["malformed"] for turn in row["turns"] or ()))
    assert bad["token_ids"][: bad["turns"][0]["tokens"]][-1] == 1
    where = *("--step", str(bad["step"])), *("--group", str(bad["group"]))
    shown = winnow(home, "rollouts", str(run.path), *where).out
    assert ", malformed 1" in shown
    assert "<tool_call>" in shown
