"""Throughput, and the watch over failed scorings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import DeepseekV3Config, Gemma3TextConfig, MistralConfig, Qwen2Config

from winnow.learning.learner import Learned
from winnow.observe.metrics import Metrics
from winnow.observe.rollouts import RolloutGroup
from winnow.run.step_metrics import (
    AttentionFlop,
    StepFlop,
    StepTokens,
    Throughput,
    example_lines,
    gpu_peak_tflops,
    record_sources,
    record_step,
    signal_line,
)
from winnow.sampling.accounting import StepAccounting, StepGroups
from winnow.types import Answer, Fate, Group, Prompt, Score, Segment, SettledGroup, Trajectory

ANSWER = Trajectory((Segment(np.array([4, 5]), np.zeros(2, np.float32), ()),), "stop")


def test_flop_are_two_forwards_and_four_backwards_a_weight_and_token() -> None:
    work = Throughput(StepFlop(1_000_000, epochs=2), torch.device("cpu"), peak_tflops=1.0)
    times = {"time/step_s": 3.0, "time/evaluate_s": 1.0, "time/update_s": 0.5}
    figures = work.figures(StepTokens(generated=1000, packed=2000), times)
    # (2*1000 rollout + 2*2000 old + 2*6*2000 update) * 1e6 weights in 2 seconds.
    assert figures["throughput/tflops"] == pytest.approx(30_000e6 / 2 / 1e12)
    assert figures["throughput/mfu"] == figures["throughput/tflops"]
    assert figures["throughput/tokens_per_s"] == 500
    assert figures["time/update_us_per_token"] == pytest.approx(0.5e6 / 4000)
    assert 0.01 < figures["memory/peak_gib"] < 1000


def counted(before: int, tokens: int, widths: dict[int | None, int]) -> int:
    """The FLOP of attention, position by position: 2 for each product of two numbers and its sum,
    for queries with keys and for weights with values."""
    return sum(
        2 * 2 * width * min(place + 1, window or place + 1)
        for window, width in widths.items()
        for place in range(before, before + tokens)
    )


@given(before=st.integers(0, 40), tokens=st.integers(0, 40), window=st.integers(1, 50))
def test_attention_counts_each_position_that_a_token_sees(
    before: int, tokens: int, window: int
) -> None:
    widths = {None: 64, window: 32}
    assert AttentionFlop(widths).flop([before], [tokens]) == counted(before, tokens, widths)


def test_the_flop_of_a_step_have_attention_in_rollout_passes_and_updates() -> None:
    widths, critic = {None: 8}, {None: 4}
    passes = StepFlop(100, 1, 1, 50, AttentionFlop(widths), AttentionFlop(critic))
    # Two answers to prompts of 3 and 5 tokens; one more of 6 tokens was written and dropped.
    tokens = StepTokens(generated=12, packed=14, prompts=[3, 5], responses=[2, 4])
    written = counted(3, 2, widths) + counted(5, 4, widths)
    whole = counted(0, 5, widths) + counted(0, 9, widths)
    values = counted(0, 5, critic) + counted(0, 9, critic)
    wanted = 2 * 100 * (12 + 4 * 14) + 2 * written + 4 * whole + 4 * (2 * 50 * 14 + values)
    assert passes.flop(tokens) == wanted


def test_the_width_of_attention_is_read_from_a_model_s_configuration() -> None:
    plain = Qwen2Config(num_hidden_layers=3, num_attention_heads=4, hidden_size=32)
    assert AttentionFlop.of(plain) == AttentionFlop({None: 3 * 32})
    windows = Gemma3TextConfig(
        num_hidden_layers=6, num_attention_heads=4, head_dim=16, sliding_window=512
    )
    assert AttentionFlop.of(windows) == AttentionFlop({512: 5 * 64, None: 64})
    window = MistralConfig(
        num_hidden_layers=2, num_attention_heads=4, hidden_size=32, sliding_window=9
    )
    assert AttentionFlop.of(window) == AttentionFlop({9: 64})
    latent = DeepseekV3Config(
        num_hidden_layers=2,
        num_attention_heads=4,
        qk_nope_head_dim=24,
        qk_rope_head_dim=8,
        v_head_dim=16,
    )
    assert AttentionFlop.of(latent) == AttentionFlop({None: 2 * 4 * (24 + 8 + 16) // 2})


@pytest.mark.parametrize(
    ("device", "dtype", "peak"),
    [
        ("cuda NVIDIA H100 80GB HBM3", "bfloat16", 989.0),
        ("cuda NVIDIA H100 PCIe", "bfloat16", 756.0),
        ("cuda NVIDIA A100-SXM4-40GB", "float32", 19.5),
        ("cuda NVIDIA L40S", "bfloat16", 362.0),
        ("cuda NVIDIA A10G", "bfloat16", None),
        ("cuda NVIDIA H800 PCIe", "bfloat16", 756.0),
        ("cuda NVIDIA A100-SXM4-80GB MIG 1g.10gb", "bfloat16", None),
        ("cuda NVIDIA GeForce RTX 4090 Laptop GPU", "bfloat16", None),
        ("cpu x86_64", "float32", None),
    ],
)
def test_a_device_s_peak_goes_by_its_name_and_type(
    device: str, dtype: str, peak: float | None
) -> None:
    assert gpu_peak_tflops(device, dtype) == peak


def settled(number: int, fate: Any, answers: Sequence[Score], source: str) -> SettledGroup:
    prompt = Prompt(str(number), np.array([3]), "?", source, "4")
    made = tuple(Answer(ANSWER, score) for score in answers)
    return SettledGroup(Group(number, prompt, made), fate, 0, 0, 0)


def said(reward: float, accuracy: float, pred: str, **extra: Any) -> Score:
    return Score(reward, accuracy, {}, {"pred": pred, **extra})


def test_each_source_has_the_mean_best_worst_and_majority_of_its_groups() -> None:
    trained = [
        settled(0, "trained", [said(1, 1, "4"), said(-1, 0, "5"), said(-1, 0, "5")], "maths"),
        settled(3, "trained", [said(0.5, 1, "ok", passed_share=0.5)] * 2, "code"),
    ]
    discarded = [
        settled(1, "all_right", [said(1, 1, "4", steps=k) for k in (2, 4, 9)], "maths"),
        # Answers that nobody can read have no vote, and are wrong.
        settled(4, "all_wrong", [said(-1, 0, "")] * 4, "unread"),
        settled(2, "surplus", [said(-9, 0, "5")] * 3, "maths"),
    ]
    sampled = StepGroups(0, 2, tuple(trained), tuple(discarded), (), cast(Any, None))
    metrics = Metrics()
    record_sources(metrics, sampled)
    assert metrics.record() == pytest.approx(
        {
            "source/maths/reward/mean": 2 / 6,
            "source/maths/reward/best@3": 1,
            "source/maths/reward/worst@3": 0,
            "source/maths/accuracy/mean": 4 / 6,
            "source/maths/accuracy/best@3": 1,
            "source/maths/accuracy/worst@3": 0.5,
            "source/maths/accuracy/maj@3": 0.5,
            "source/maths/own/steps/mean": 5,
            "source/maths/own/steps/best@3": 9,
            "source/maths/own/steps/worst@3": 2,
            **{f"source/unread/reward/{kind}": -1 for kind in ("mean", "best@4", "worst@4")},
            **{f"source/unread/accuracy/{kind}": 0 for kind in ("mean", "best@4", "worst@4")},
            "source/unread/accuracy/maj@4": 0,
            # What its scorer calls pred is a verdict on tests: no vote.
            "source/code/reward/mean": 0.5,
            "source/code/reward/best@2": 0.5,
            "source/code/reward/worst@2": 0.5,
            "source/code/accuracy/mean": 1,
            "source/code/accuracy/best@2": 1,
            "source/code/accuracy/worst@2": 1,
            "source/code/own/passed_share/mean": 0.5,
            "source/code/own/passed_share/best@2": 0.5,
            "source/code/own/passed_share/worst@2": 0.5,
        }
    )


def test_a_step_that_carried_groups_fill_has_no_figure_of_what_was_looked_at() -> None:
    """Their verdicts were counted in the step before: of this one there is no share to tell."""
    accounting = StepAccounting()
    accounting.settled += [settled(0, "trained", [said(1, 1, "4"), said(-1, 0, "5")], "maths")]
    sampled = accounting.close_step(1, 1, (), 0, (0, 0), 0.5)
    learned = Learned(np.array([1.0, -1.0], np.float32), np.array([1, 1]), 6)
    metrics = Metrics()
    record_step(metrics, sampled, learned)
    figures = metrics.record()
    assert {name for name, value in figures.items() if np.isnan(value)} == set()
    assert not {"sampling/accuracy", "sampling/keep_rate"} & {*figures}
    assert figures["score/accuracy/mean"] == 0.5
    assert figures["sampling/staleness/mean"] == 0


# What is printed of a step's answers

CUT_OFF = Trajectory(ANSWER.segments, "length")
LOOK = "winnow rollouts runs/a"


def closed(
    number: int, fate: Fate, *scores: Score, path: Trajectory = ANSWER, advantage: float = 0.0
) -> RolloutGroup:
    """A group whose answers have these scores; the advantage is that of all."""
    prompt = Prompt(str(number), np.array([1]), f"question {number}", f"source {number % 2}", 7)
    group = Group(number, prompt, tuple(Answer(path, score) for score in scores))
    return RolloutGroup(group, fate, np.full(len(scores), advantage, np.float32))


def worth(reward: float, pred: str | None = None, **more: object) -> Score:
    return Score(reward, 0.0, extra={**more, **({} if pred is None else {"pred": pred})})


RIGHT, WRONG, LATE = worth(1.0, "13"), worth(-1.0, ""), worth(-1.5)
MIXED = closed(0, "trained", WRONG, RIGHT, advantage=1.0)


@pytest.mark.parametrize(
    ("groups", "line"),
    [
        (
            [MIXED, closed(1, "surplus", WRONG, RIGHT), closed(2, "all_wrong", WRONG, LATE),
             closed(3, "trained", LATE, LATE, path=CUT_OFF), closed(4, "failed", worth(9.0), LATE)],
            "first step: 2 of 4 prompts have better and worse answers; rewards -1.50 to 1.00; "
            "25 % cut off; 2 of 5 answers could be read, such as '13'",
        ),
        (
            [closed(1, "trained", LATE, advantage=-0.5), closed(2, "trained", RIGHT)],
            "first step: rewards differ between prompts; rewards -1.50 to 1.00; 0 % cut off; "
            "1 of 1 answers could be read, such as '13'",
        ),
        (
            [closed(1, "all_wrong", WRONG, LATE), closed(2, "all_right", RIGHT, RIGHT)],
            "Warning: first step: no signal: 0 of 2 prompts have better and worse answers; rewards "
            "-1.50 to 1.00; 0 % cut off; 2 of 3 answers could be read, such as '13'; look at them "
            f"with {LOOK}",
        ),
        (
            # A critic's advantages of equal rewards are noise.
            [closed(1, "trained", WRONG, WRONG, path=CUT_OFF, advantage=0.5)],
            "Warning: first step: no signal: 0 of 1 prompts have better and worse answers; rewards "
            "-1.00 to -1.00; 100 % cut off; nothing could be read from 2 answers; look at them "
            f"with {LOOK}",
        ),
        (
            [closed(1, "trained", worth(0.0, "wrong", passed_share=0.0), worth(1.0))],
            "first step: 1 of 1 prompts have better and worse answers; rewards 0.00 to 1.00; "
            "0 % cut off",
        ),
        (
            [closed(1, "failed", LATE), closed(2, "stale")],
            f"Warning: first step: no signal: no answer was scored; look at it with {LOOK}",
        ),
    ],
    ids=["mixed", "one answer", "filtered", "flat", "code", "failed"],
)  # fmt: skip
def test_the_line_of_the_first_step_says_whether_there_is_a_signal(
    groups: list[RolloutGroup], line: str
) -> None:
    assert signal_line(groups, LOOK) == line


def test_examples_are_the_first_prompts_of_each_source_and_cannot_steer_the_terminal() -> None:
    scored = Score(0.5, 1.0, {"task": 1.0, "overlong": -0.5})
    groups = [
        closed(2, "trained", scored, RIGHT),
        closed(0, "stale"),
        closed(3, "all_wrong", Score(0.0, 0.0, error="no\nnumber")),
        *(closed(number, "surplus", RIGHT) for number in (4, 5)),
    ]
    text = "\x1b[2Jred\n" + "x" * 1000
    lines = [*example_lines(7, groups, 1, lambda ids: text * (len(ids) == 2))]
    answer = f"  answer  \\x1b[2Jred {'x' * 389} ... (411 characters) ... {'x' * 200}"
    assert lines == [
        "step 7, source 0", "  prompt  question 2", answer, "  truth   7",
        "  score   0.5 (task 1, overlong -0.5), accuracy 1",
        "step 7, source 1", "  prompt  question 3", answer, "  truth   7",
        "  score   failed: no number",
    ]  # fmt: skip
    assert [*example_lines(7, groups, 0, lambda ids: text)] == []
