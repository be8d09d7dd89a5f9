"""From scored answers to figures by problem, and what is shown meanwhile."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from tests.scoring import rewards_of

from winnow.config.reward import RewardConfig
from winnow.evaluation.evaluator import AskProgress, Evaluated, EvaluationSettings, Evaluator
from winnow.evaluation.report import ProgressLine, Report, in_words, print_report
from winnow.rollout.engine import EngineStatus, SamplingParams
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


def evaluated(*groups: Group, greedy: Sequence[Group] = ()) -> Evaluated:
    sources = frozenset(each.prompt.data_source for each in groups)
    return Evaluated(groups, tuple(greedy), sources - {"code"}, seed=0)


def test_rows_that_ask_the_same_are_one_problem() -> None:
    found = evaluated(
        group(0, ["4", "5"]), group(1, ["7", "7"], asks="3 + 1?"), group(2, ["4", "4"])
    )
    record = found.record()
    assert record["eval/sums/prompts"] == 2
    assert record["eval/sums/avg@2"] == (3 / 4 + 0) / 2
    same, other = found.problems
    assert (len(same.accuracies), same.parsed) == (4, ["4", "5", "4", "4"])
    assert other.parsed == ["7", "7"]


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
        settings = EvaluationSettings(1, False, SamplingParams(max_tokens=8), 0)
        engine: Any = _Idle(running=0, queued=0)
        evaluator = Evaluator(engine, [prompt], rewards, settings, str, lambda _: None, 0)
        assert (source in evaluator._votes()) == votes
    finally:
        rewards.close()


class _Idle:
    """An engine that is looked at only."""

    def __init__(self, **told: int) -> None:
        self.told = told

    def status(self) -> EngineStatus:
        return EngineStatus(
            slots=4,
            weight_version=0,
            generated_tokens=70,
            tick=9,
            **self.told,
        )


def test_a_report_holds_each_source_and_all_together() -> None:
    groups = [
        group(0, ["4", "5"], lengths=[2, 4]),
        group(1, ["5", "5"], asks="1 + 3?", lengths=[9, 9]),
        group(2, ["4", "4"], source="words"),
    ]
    report = Report.of(
        evaluated(*groups, greedy=[group(0, ["4"]), group(2, ["7"], source="words")])
    )
    sums, words = report.sources["sums"], report.sources["words"]
    assert (sums.problems, sums.answers, sums.average.mean) == (2, 2, 0.25)
    assert (sums.truncated.mean, sums.tokens.mean) == (0.5, 6.0)
    assert {k: value.mean for k, value in sums.at_k("pass").items()} == {1: 0.25, 2: 0.5}
    assert {k: value.mean for k, value in sums.at_k("maj").items()} == {2: 0.25}
    assert sums.greedy is not None
    assert sums.greedy.mean == 1
    assert words.greedy is not None
    assert words.greedy.mean == 0
    assert report.everything is not None
    assert report.everything.problems == 3
    assert report.everything.average.mean == pytest.approx((0.5 + 0 + 1) / 3)
    assert report.everything.greedy is not None
    assert report.everything.greedy.mean == 0.5
    body = json.loads(report.as_json({"title": "t"}))
    assert body["sources"]["words"]["avg@2"]["standard_error"] is None, "JSON has no NaN"
    assert body["all"]["problems"] == 3
    assert "std@2" in body["all"]


def test_one_source_needs_no_line_for_all() -> None:
    report = Report.of(evaluated(group(0, ["4"])))
    assert report.everything is None
    assert "all" not in json.loads(report.as_json({}))


@pytest.mark.parametrize("width", [80, 100])
def test_the_tables_fit_and_lose_no_figure(width: int) -> None:
    groups = [
        group(0, ["4", "5"] * 16, source="openai/gsm8k", error="broke"),
        group(1, ["4"] * 32, asks="?", source="AIME-2024-30"),
    ]
    out = io.StringIO()
    print_report(Report.of(evaluated(*groups, greedy=groups)), Console(file=out, width=width))
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    text = out.getvalue()
    assert all(words in text for words in ("openai/gsm8k", "AIME-2024-30", "avg@32", "k = 1"))
    assert "50.0 %" in text
    assert "100.0 %" in text
    assert "Scoring failed for 64 answers" in text


def test_progress_counts_what_is_written_and_scored() -> None:
    engine: Any = _Idle(running=3, queued=5)
    prompts = [Prompt(f"f:{i}", np.arange(2), "?", "sums", "4") for i in range(4)]
    settings = EvaluationSettings(2, True, SamplingParams(max_tokens=8), 0)
    rewards: Any = None
    evaluator = Evaluator(engine, prompts, rewards, settings, str, lambda _: None, 0)
    evaluator._asked = 8
    assert evaluator.progress == AskProgress(answers=12, written=0, scored=0, tokens=70)
    engine.told = {"running": 1, "queued": 0}
    assert evaluator.progress.written == 7


def test_a_plain_terminal_gets_a_line_now_and_then() -> None:
    out, now = io.StringIO(), [0.0]
    line = ProgressLine(Console(file=out, width=80), "auto", clock=lambda: now[0])
    with line.shown():
        for now[0] in (0.0, 10.0, 31.0, 40.0, 62.0):
            line.update(AskProgress(3840, 1234, 17, int(512 * now[0])))
    assert out.getvalue().splitlines() == [
        "1,234 of 3,840 answers, 17 scored, 512 tokens/s, 0:31",
        "1,234 of 3,840 answers, 17 scored, 512 tokens/s, 1:02",
    ]


def test_a_terminal_is_told_live_and_off_means_silence() -> None:
    out = io.StringIO()
    live = ProgressLine(Console(file=out, width=80, force_terminal=True), "auto")
    with live.shown():
        live.update(AskProgress(10, 4, 0, 100))
    assert "4 of 10 answers" in out.getvalue()
    silent, now = io.StringIO(), [0.0]
    off = ProgressLine(Console(file=silent, width=80), "off", clock=lambda: now[0])
    with off.shown():
        now[0] = 100.0
        off.update(AskProgress(10, 4, 0, 100))
    assert silent.getvalue() == ""
    assert in_words(AskProgress(10, 4, 0, 100), 0.0) == "4 of 10 answers, 0 tokens/s, 0:00"
