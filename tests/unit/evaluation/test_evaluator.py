"""From scored answers to figures by problem, and what is shown meanwhile."""

from __future__ import annotations

import asyncio
import io
import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.scoring import rewards_of

from winnow.config.reward import RewardConfig
from winnow.config.root import ObserveConfig
from winnow.config.trainer import EvaluationConfig
from winnow.errors import TrainingError
from winnow.evaluation import report
from winnow.evaluation.evaluator import EvalProgress, EvalResult, Evaluator, merge_by_problem
from winnow.evaluation.report import Report, print_report, progress_line, run_with_progress
from winnow.rollout.engine import CompletionEvent, EngineStatus, GroupRequest, SamplingParams
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan


def group(
    number: int,
    preds: Sequence[str | None],
    *,
    asks: str = "2 + 2?",
    source: str = "sums",
    lengths: Sequence[int] = (),
    **score: Any,
) -> Group:
    """Answers that say `preds`; 4 is right."""
    made = []
    for place, pred in enumerate(preds):
        length = lengths[place] if lengths else 3
        ids = np.arange(length)
        segment = Segment(ids, np.zeros(length, np.float32), (VersionSpan(0, length),))
        right = float(pred == "4")
        extra = {} if pred is None else {"pred": pred}
        reason = "length" if length >= 9 else "stop"
        made.append(Answer(Trajectory((segment,), reason), Score(right, right, {}, extra, **score)))
    return Group(number, Prompt(f"f:{number}", np.arange(2), asks, source, "4"), tuple(made))


def evaluated(*groups: Group, greedy: Sequence[Group] = ()) -> EvalResult:
    sources = frozenset(each.prompt.data_source for each in groups)
    return EvalResult(merge_by_problem(groups, greedy, sources - {"code"}), seed=0)


def test_rows_that_ask_the_same_are_one_problem() -> None:
    found = evaluated(
        group(0, ["4", "5"]), group(1, ["7", "7"], asks="3 + 1?"), group(2, ["4", "4"])
    )
    record = found.record()
    assert record["eval/sums/prompts"] == 2
    assert record["eval/sums/avg@2"] == (3 / 4 + 0) / 2
    assert record["eval/sums/avg@2_se"] == pytest.approx((3 / 4) / 2)
    assert (record["eval/sums/length"], record["eval/sums/truncated"]) == (3, 0)
    assert record["eval/sums/unread"] == 0
    unread = evaluated(group(0, ["4", "", "5"]), group(1, ["7", "7"], asks="3 + 1?")).record()
    assert unread["eval/sums/unread"] == 1 / 5
    report = Report.from_result(found)
    assert report.overall is None, "one source needs no line for all"
    assert "all" not in json.loads(report.as_json({}))
    same, other = found.problems
    assert (len(same.accuracies), same.parsed) == (4, ["4", "5", "4", "4"])
    assert other.parsed == ["7", "7"]


def test_the_best_and_the_worst_answer_and_a_scorers_own_numbers_have_figures() -> None:
    groups = group(0, ["4", "5"]), group(1, ["4", "4"], asks="3 + 1?")
    for number, each in enumerate(groups):
        for place, answer in enumerate(each.answers):
            answer.score.extra.update({"steps": 10 * number + place, "odd": "word"})  # type: ignore[attr-defined]
    record = evaluated(*groups).record()
    assert (record["eval/sums/best@2"], record["eval/sums/worst@2"]) == (1, 0.5)
    own = {name: value for name, value in record.items() if "own" in name}
    assert own == {
        "eval/sums/own_steps_mean": 5.5,
        "eval/sums/own_steps_best@2": 6,
        "eval/sums/own_steps_worst@2": 5,
    }


def test_what_says_nothing_has_no_vote_and_verdicts_are_none() -> None:
    voted = evaluated(group(0, ["4", "", "5", None])).problems[0].parsed
    assert voted == ["4", None, "5", None]
    assert evaluated(group(0, [None, None])).problems[0].parsed is None
    assert evaluated(group(0, ["pass", "wrong"], source="code")).problems[0].parsed is None


@pytest.mark.parametrize(("source", "votes"), [("humaneval", False), ("gsm8k", True)])
def test_only_scorers_that_read_an_answer_give_votes(source: str, votes: bool) -> None:
    rewards = rewards_of(RewardConfig(workers=0), 8)
    try:
        prompt = Prompt("f:1", np.arange(2), "?", source, "4")
        evaluator = idle([prompt], rewards, EvaluationConfig(), running=0, queued=0)
        assert (source in evaluator._voting_sources()) == votes
    finally:
        rewards.close()


class _Idle:
    """An engine that is looked at only."""

    def __init__(self, **told: int) -> None:
        self.told = told
        self.asked: list[GroupRequest] = []

    async def submit(self, groups: Sequence[GroupRequest]) -> None:
        self.asked += groups

    async def events(self, until: int | None = None) -> Sequence[CompletionEvent]:
        return []

    def status(self) -> EngineStatus:
        return EngineStatus(slots=4, weight_version=0, generated_tokens=70, tick=9, **self.told)


def idle(prompts: list[Prompt], rewards: Any, config: EvaluationConfig, **told: int) -> Any:
    """An evaluator that is looked at only."""
    engine: Any = _Idle(**told)
    sampling = SamplingParams(max_tokens=8)
    return Evaluator(
        engine, prompts, rewards, config, sampling, 0, str, lambda _: None, ObserveConfig()
    )


def test_an_engine_is_told_that_no_answer_of_an_evaluation_is_trained_on() -> None:
    prompt = Prompt("f:1", np.arange(2), "?", "sums", "4")
    evaluator = idle([prompt], None, EvaluationConfig(n=3), running=0, queued=0)
    with pytest.raises(TrainingError, match="is idle with 3 answers missing"):
        asyncio.run(evaluator.collect_answers(0))
    (asked,) = evaluator.engine.asked
    assert [answer.trained for answer in asked.answers] == [False] * 3


def test_a_report_holds_each_source_and_all_together() -> None:
    groups = [
        group(0, ["4", "5"], lengths=[2, 4]),
        group(1, ["5", "5"], asks="1 + 3?", lengths=[9, 9]),
        group(2, ["4", "4"], source="words"),
    ]
    greedy = [group(0, ["4"]), group(1, ["4"], asks="1 + 3?"), group(2, ["7"], source="words")]
    found = evaluated(*groups, greedy=greedy)
    report = Report.from_result(found)
    sums, words = report.sources["sums"], report.sources["words"]
    record = found.record()
    assert (record["eval/sums/greedy"], record["eval/words/greedy"]) == (1, 0)
    assert math.isnan(record["eval/words/greedy_se"])
    assert (len(sums.prompts), sums.answers, sums.average.mean) == (2, 2, 0.25)
    assert (sums.truncated.mean, sums.tokens.mean) == (0.5, 6.0)
    shares = {name: value.mean for name, value in sums.figures.items() if "std" not in name}
    assert shares == {"avg@2": 0.25, "pass@1": 0.25, "pass@2": 0.5, "maj@2": 0.25}
    assert sums.greedy is not None
    assert sums.greedy.mean == 1
    assert words.greedy is not None
    assert words.greedy.mean == 0
    assert report.overall is not None
    assert len(report.overall.prompts) == 3
    assert report.overall.average.mean == pytest.approx((0.5 + 0 + 1) / 3)
    assert report.overall.greedy is not None
    assert report.overall.greedy.mean == pytest.approx(2 / 3)
    body = json.loads(report.as_json({"title": "t"}))
    assert body["sources"]["words"]["avg@2"]["standard_error"] is None, "JSON has no NaN"
    assert body["all"]["problems"] == 3
    assert "std@2" in body["all"]


def test_best_and_worst_are_of_as_many_answers_as_each_problem_has() -> None:
    copies = [group(place, ["5", "4"], source="sums") for place in (0, 1)]
    record = evaluated(*copies, group(2, ["5", "5"], asks="1 + 3?")).record()
    assert record["eval/sums/avg@2"] == 0.25
    # Of the four answers to the first the first two count: one wrong, one right.
    assert (record["eval/sums/best@2"], record["eval/sums/worst@2"]) == (0.5, 0)
    late = [group(0, ["5", "5"]), group(1, ["4", "4"]), group(2, ["5", "5"], asks="1 + 3?")]
    assert evaluated(*late).record()["eval/sums/best@2"] == 0


@pytest.mark.parametrize("width", [80, 100])
def test_the_tables_fit_and_lose_no_figure(width: int) -> None:
    groups = [
        group(0, ["4", "5"] * 16, source="openai/gsm8k", error="broke"),
        group(1, ["4"] * 32, asks="?", source="AIME-2024-30"),
    ]
    out = io.StringIO()
    report = Report.from_result(evaluated(*groups, greedy=groups))
    print_report(report, Console(file=out, width=width), {})
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = out.getvalue()
    assert all(words in text for words in ("openai/gsm8k", "AIME-2024-30", "avg@32", "k = 1"))
    assert "50.0 %" in text
    assert "100.0 %" in text
    assert "Scoring failed for 64 answers" in text


def test_progress_counts_what_is_written_and_scored() -> None:
    prompts = [Prompt(f"f:{i}", np.arange(2), "?", "sums", "4") for i in range(4)]
    evaluator = idle(prompts, None, EvaluationConfig(n=2, greedy=True), running=3, queued=5)
    evaluator._requested = 8
    assert evaluator.progress == EvalProgress(answers=12, written=0, scored=0, tokens=70)
    evaluator.engine.told = {"running": 1, "queued": 0}
    assert evaluator.progress.written == 7


class Watched:
    """An evaluator whose progress is seen at the times given."""

    def __init__(self, *times: float) -> None:
        self.times, self.now = times, 0.0

    @property
    def progress(self) -> EvalProgress:
        return EvalProgress(3840, 1234, 17, int(512 * self.now))

    async def collect_answers(self, step: int) -> EvalResult:
        for now in self.times:
            self.now = now
            await asyncio.sleep(0)
        return EvalResult([], step)


def shown(console: Console, mode: Any, *times: float) -> str:
    """What is shown of an evaluation; the times are those of the looks at it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(report, "_EVERY_S", 0)
        evaluator: Any = Watched(*times)
        done = run_with_progress(evaluator, 7, console, mode, clock=lambda: evaluator.now)
        assert asyncio.run(done).seed == 7
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_a_log_gets_a_line_now_and_then() -> None:
    text = shown(Console(file=io.StringIO(), width=80), "auto", 0, 10, 31, 40, 62, 62)
    assert text.splitlines() == [
        "1,234 of 3,840 answers, 17 scored, 512 tokens/s, 0:31",
        "1,234 of 3,840 answers, 17 scored, 512 tokens/s, 1:02",
    ]


def test_a_terminal_is_told_live_and_off_means_silence() -> None:
    live = Console(file=io.StringIO(), width=80, force_terminal=True)
    assert "1,234 of 3,840 answers" in shown(live, "auto", 0, 0, 0)
    assert shown(Console(file=io.StringIO(), width=80), "off", 0, 100, 100) == ""
    assert progress_line(EvalProgress(10, 4, 0, 100), 0.0) == "4 of 10 answers, 0 tokens/s, 0:00"
