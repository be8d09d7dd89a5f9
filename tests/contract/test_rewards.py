"""What scores a run's answers: the same in its own process and in processes apart."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.faulty_http import serving
from tests.judges import judging
from tests.processes import children, gone
from tests.recipes import recipe
from tests.reward_models import classifier_folder
from tests.small_tokenizers import CHAT_TEMPLATE, train_bpe
from tests.written import answer, written

from winnow.builders.processes import StartWorkers, worker_processes
from winnow.builders.topology import build_rewards
from winnow.config.roles import Roles
from winnow.config.root import Config
from winnow.data.tokenizer import make_decoder
from winnow.errors import RewardError, WorkerError
from winnow.ranks.models import LoadedPolicy
from winnow.rewards import remote_pipeline
from winnow.rewards.rewards import Rewards
from winnow.types import Prompt, Score, Segment, Trajectory

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("forked_workers")]

FILE = """
import asyncio, os, pathlib

class Odd:
    def __str__(self):
        return "odd"

async def compute_score(data_source, solution_str, ground_truth, extra_info, folder):
    word, _, name = solution_str.partition(" ")
    if word == "raise":
        raise ValueError(f"no {name}")
    if word == "wait":
        (pathlib.Path(folder) / f"{name}.begun").touch()
        while not (pathlib.Path(folder) / name).exists():
            await asyncio.sleep(0.01)
    if word == "bare":
        return float(name == ground_truth)
    return {"score": len(solution_str), "acc": float(word == "right"), "style": 0.5, "odd": Odd(),
            "process": os.getpid()}
"""
PROMPT = Prompt(
    "p:1", np.array([3]), "?", "sort_digits", "1359", {}, ({"role": "user", "content": "?"},)
)
TEXTS = ["right", "wrong", "1|539;3|59;5|9;9|#1359", "", "right and long: " + "x" * 60]
KINDS = {"here": [], "apart": ["reward.processes=2"]}
PATIENCE_S = 30.0
"""For what should come at once, on a machine with other work."""
ON_RAY = ["reward.processes=1", "cluster=ray", "cluster.cpus=0.5"]
OVERLONG = ["reward.overlong.buffer_tokens=16", "rollout.max_response_tokens=48"]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> LoadedPolicy:
    """What reads tokens; there is no model."""
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_bpe([FILE])
    tokenizer.save_pretrained(folder)
    none: Any = None
    read = make_decoder(tokenizer)
    cpu = torch.device("cpu")
    return LoadedPolicy(str(folder), cpu, none, tokenizer, read, 800, (1,), str(folder))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The user's file, and what its function waits for."""
    folder = tmp_path_factory.mktemp("function")
    (folder / "reward.py").write_text(FILE)
    return folder


def function(folder: Path, *more: str) -> list[str]:
    own = [f"reward.function.path={folder / 'reward.py'}", "reward.workers=0", *OVERLONG]
    return [*own, f"+reward.function.kwargs={{folder: {folder}}}", *more]


@contextlib.contextmanager
def placed(config: Config, policy: LoadedPolicy) -> Iterator[tuple[Rewards, StartWorkers]]:
    roles = Roles(config)
    with (
        worker_processes(config, roles, policy, None) as others,
        contextlib.closing(build_rewards(config, roles, policy, others)) as rewards,
    ):
        yield rewards, others


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def shared(
    kind: str, folder: Path, policy: LoadedPolicy, forked_workers: None
) -> Iterator[Rewards]:
    with placed(recipe("quickstart", *function(folder), *KINDS[kind]), policy) as (rewards, _):
        yield rewards


@pytest.fixture
def rewards(shared: Rewards) -> Rewards:
    """With a count of its own."""
    return shared.copy()


class Answers:
    """Makes answers of the policy's tokens."""

    def __init__(self, policy: LoadedPolicy) -> None:
        self._policy = policy

    def of(self, text: str) -> Trajectory:
        ids = self._policy.tokenizer.encode(text, add_special_tokens=False)
        assert self._policy.decode(ids) == text
        return answer(written(ids)).trajectory

    async def score(
        self, rewards: Rewards, texts: Sequence[str], training: bool = True
    ) -> list[Score]:
        asked = (rewards.score(PROMPT, self.of(text), None, training) for text in texts)
        return list(await asyncio.gather(*asked))


@pytest.fixture(scope="module")
def answers(policy: LoadedPolicy) -> Answers:
    return Answers(policy)


def bare(score: Score) -> tuple[Any, ...]:
    """What must not depend on where an answer was scored."""
    extra = {k: str(v) for k, v in score.extra.items() if k != "process"}
    return score.reward, score.accuracy, dict(score.parts), extra, score.error, score.outside


def check_scores(rewards: Rewards, answers: Answers) -> None:
    rewards.check_sources(["sort_digits"])
    rewards.check_prompt(PROMPT)
    scores = asyncio.run(answers.score(rewards, TEXTS))
    for text, score in zip(TEXTS, scores, strict=True):
        over = min(0.0, (48 - 16 - answers.of(text).generated_tokens) / 16)
        parts = {"task": float(len(text)), "overlong": pytest.approx(max(over, -1.0))}
        assert dict(score.parts) == parts, text
        assert score.reward == sum(score.parts.values())
        assert score.accuracy == float(text.split(" ")[0] == "right")
        assert str(score.extra["odd"]) == "odd"
    held_out = asyncio.run(answers.score(rewards, TEXTS, training=False))
    assert [score.reward for score in held_out] == [len(text) for text in TEXTS]


def test_answers_are_read_scored_and_shaped(rewards: Rewards, answers: Answers) -> None:
    check_scores(rewards, answers)
    assert min(score.parts["overlong"] for score in asyncio.run(answers.score(rewards, TEXTS))) < 0


def test_on_a_private_ray_answers_are_scored_alike(
    folder: Path, policy: LoadedPolicy, answers: Answers, tmp_path: Path
) -> None:
    import ray

    before = children()
    timeline = tmp_path / "ray/timeline.json"
    with tempfile.TemporaryDirectory(prefix="w-", dir="/tmp") as name:  # short, as Ray wants it
        init = f"cluster.init={{num_cpus: 3, object_store_mb: 128, temp_dir: {name}}}"
        config = recipe(
            "quickstart", *function(folder), *ON_RAY, init, f"cluster.timeline_file={timeline}"
        )
        with placed(config, policy) as (rewards, _):
            offered = ray.cluster_resources()
            assert (offered["CPU"], offered["object_store_memory"]) == (3.0, 128 << 20)
            assert len(list(Path(name).iterdir())) == 1
            check_scores(rewards, answers)
            rewards.require_metric("elegance", ["sort_digits"])
            with pytest.raises(RewardError, match="no such number"):
                asyncio.run(answers.score(rewards, ["right"]))
        assert list(Path(name).iterdir()) == []
    assert gone(children() - before)
    events = json.loads(timeline.read_text())
    assert any("RayWorker" in event["cat"] for event in events)


def test_a_text_that_is_given_is_not_read_from_tokens(rewards: Rewards, answers: Answers) -> None:
    score = asyncio.run(rewards.score(PROMPT, answers.of("right"), "wrong", True))
    assert (score.accuracy, score.parts["task"]) == (0.0, 5.0)


def test_failures_are_counted_where_they_are_asked_for(
    rewards: Rewards, answers: Answers, folder: Path
) -> None:
    twin = rewards.copy()
    rewards.figures()
    scores = asyncio.run(answers.score(rewards, ["raise one", "right", "raise one", "wrong"]))
    asyncio.run(answers.score(twin, ["raise one"]))
    counted = {"scoring/answers": 4, "scoring/failed": 2}
    assert rewards.figures().items() >= counted.items()
    assert rewards.figures()["scoring/failed"] == 0
    twin = rewards.copy()
    line = f"ValueError: no one at {folder / 'reward.py'}:11"
    assert [score.error for score in scores] == [line, "", line, ""]
    report = rewards.failure_report
    assert (report.count, report.first_error) == (2, f"{line} (prompt p:1)")
    assert "Traceback (most recent call last)" in report.first_traceback
    asyncio.run(answers.score(rewards, ["right"] * 5))
    with pytest.raises(RewardError, match=r"^scoring failed for 2 of 9 answers \(22%\)"):
        rewards.end_step()
    assert twin.failure_report.count == 0
    rewards.end_step()


def test_what_a_filter_asks_for_must_be_there(rewards: Rewards, answers: Answers) -> None:
    assert rewards.supported_metrics(["sort_digits"]) is None
    rewards.require_metric("style", ["sort_digits"])
    fine, failed = asyncio.run(answers.score(rewards, ["right", "raise two"]))
    assert (fine.metric("style"), failed.metric("style")) == (0.5, 0.0)
    with pytest.raises(RewardError, match=r"sampling\.filter\.metric is style, but the score has"):
        asyncio.run(answers.score(rewards, ["bare 1359"]))
    (other,) = asyncio.run(answers.score(rewards.copy(), ["bare 1359"]))
    assert other.parts["task"] == 1.0


def test_a_slow_answer_holds_up_nobody(
    rewards: Rewards,
    answers: Answers,
    folder: Path,
    kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = f"slow-{kind}"
    monkeypatch.setattr(remote_pipeline, "PATIENCE_S", 1000.0)  # no call ends for want of it

    async def run() -> list[Score]:
        slow = asyncio.ensure_future(answers.score(rewards, [f"wait {name}"]))
        # More than are sent at once, of which some go where the slow one is.
        await asyncio.wait_for(answers.score(rewards, ["right"] * 40), PATIENCE_S)
        await asyncio.wait_for(answers.score(rewards, ["wrong"]), PATIENCE_S)
        assert not slow.done()
        (folder / name).touch()
        return await slow

    (score,) = asyncio.run(run())
    assert score.parts["task"] == len(f"wait {name}")


def test_a_cancelled_scoring_leaves_the_others(
    rewards: Rewards, answers: Answers, folder: Path, kind: str
) -> None:
    name = f"never-{kind}"

    async def run() -> list[Score]:
        given_up = asyncio.ensure_future(answers.score(rewards, [f"wait {name}", "raise three"]))
        while not (folder / f"{name}.begun").exists():
            await asyncio.sleep(0.01)
        given_up.cancel()
        return await answers.score(rewards, ["right"])

    for _ in range(2):  # each in a loop of its own, with what the last one left behind
        (score,) = asyncio.run(run())
        assert score.accuracy == 1.0
    (folder / name).touch()
    assert [s.accuracy for s in asyncio.run(answers.score(rewards, TEXTS))] == [1, 0, 0, 0, 1]


class Elsewhere:
    """Tokens that only another process may read, as those in a cluster's store."""

    def __init__(self, ids: np.ndarray) -> None:
        self.ids = ids

    def __len__(self) -> int:
        return len(self.ids)

    def __array__(self, *_: Any, **__: Any) -> np.ndarray:
        raise AssertionError("read in the driver's process")

    def __reduce__(self) -> Any:
        return np.array, (self.ids,)


@pytest.mark.parametrize("kind", ["apart"], indirect=True, scope="module")
def test_the_driver_reads_no_tokens_and_each_process_has_its_part(
    rewards: Rewards, answers: Answers
) -> None:
    def far(text: str) -> Trajectory:
        (segment,) = answers.of(text).segments
        ids: Any = Elsewhere(segment.token_ids)
        return Trajectory((Segment(ids, ids, segment.spans),), "stop")

    async def run(count: int) -> list[Score]:
        asked = (rewards.score(PROMPT, far("right"), None, True) for _ in range(count))
        return list(await asyncio.gather(*asked))

    scores = asyncio.run(run(101))
    assert {score.accuracy for score in scores} == {1.0}
    where = [score.extra["process"] for score in scores]
    assert sorted(map(where.count, set(where))) == [50, 51]
    assert os.getpid() not in where
    many = 1500
    assert len(asyncio.run(run(many))) == many


MODELS = [
    *("reward/judge=openai", "reward.judge.model=m", "reward.judge.cache=none"),
    *("reward/model=sequence_classifier", "run.threads=1", "reward.workers=1"),
]
SHARDED = {"sharded": ["reward/model/strategy=fsdp2"]}
ASKED = ["#1359", "#1395", "1|539;3|59;5|9;9|#1359", "#1", "#2", "9" * 40]


def test_models_are_asked_alike_and_one_that_is_killed_ends_it(
    policy: LoadedPolicy, answers: Answers, tmp_path: Path
) -> None:
    model = classifier_folder(tmp_path / "classifier", template=CHAT_TEMPLATE)
    found: dict[str, list[Any]] = {}
    figures: dict[str, dict[str, int]] = {}
    with serving([judging()]) as server:
        own = [f"reward.model.path={model}", f"reward.judge.base_url={server.url}/v1", *OVERLONG]
        for kind, more in (KINDS | SHARDED).items():
            before = children()
            with placed(recipe("quickstart", *MODELS, *own, *more), policy) as (rewards, others):
                rewards.check_sources(["sort_digits"])
                rewards.check_prompt(PROMPT)
                zero = rewards.figures()
                assert set(zero.values()) == {0}
                found[kind] = [*map(bare, asyncio.run(answers.score(rewards, ASKED)))]
                figures[kind] = rewards.figures()
                assert rewards.figures() == zero
                if others():
                    name = "reward" if kind == "apart" else "reward model"
                    kill_one(rewards, answers, children() - before, name)
            assert gone(children() - before), kind
    assert found["here"] == found["apart"]
    assert found["here"] == found["sharded"]
    assert len({score[0] for score in found["here"]}) == len(ASKED)
    assert figures["here"] == figures["apart"]
    assert figures["apart"]["judge/requests"] == len(ASKED)


def kill_one(rewards: Rewards, answers: Answers, processes: set[int], name: str) -> None:
    """SIGKILL for one of those that score, while it does; `name` is what they are called."""
    line = rf"^{name}\[[01]\] was killed by SIGKILL [^\n]*; see its last lines in the log$"
    victims = [p for p in processes if Path(f"/proc/{p}/comm").read_text() == "child\n"]
    assert len(victims) == 2

    async def run() -> None:
        asked = asyncio.ensure_future(answers.score(rewards, ["x" * 40] * 200))
        await asyncio.sleep(0)
        os.kill(max(victims), signal.SIGKILL)
        with pytest.raises(WorkerError, match=line):
            await asked
        with pytest.raises(WorkerError, match=line):
            await answers.score(rewards, ["x"])

    asyncio.run(run())


def test_a_file_that_cannot_be_loaded_is_told_in_one_line_and_leaves_no_process(
    policy: LoadedPolicy, tmp_path: Path
) -> None:
    (tmp_path / "reward.py").write_text("def compute_score(:\n")
    before = children()
    config = recipe("quickstart", *function(tmp_path), "reward.processes=1")
    with pytest.raises(RewardError) as caught, placed(config, policy):
        pass
    assert str(caught.value).startswith(f"reward.function.path {tmp_path / 'reward.py'}, line 1")
    assert "\n" not in str(caught.value)
    assert gone(children() - before)
