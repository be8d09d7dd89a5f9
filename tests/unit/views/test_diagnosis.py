"""Rules over a run's record: each finds its disease, none finds it in a run that is well."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.examples import examples
from tests.recipes import recipe

from winnow.config.load import describe_config
from winnow.observe.files import RunFolder
from winnow.observe.jsonl import MetricsLog
from winnow.observe.metric_names import find_metric
from winnow.observe.rollouts import RolloutGroup, write_rollouts
from winnow.observe.sinks import RunInfo
from winnow.views.diagnosis import RULES, Diagnosis, RunFinding
from winnow.views.doctor import LiveDiagnosis, describe_wrong_answers, diagnose_run

ROOT = Path(__file__).resolve().parents[3]
SETTINGS: dict[str, Any] = {
    "sampling": {"groups_per_step": 16},
    "rollout": {"n": 8, "max_response_tokens": 128},
    "algorithm": {"policy_loss": {"name": "ppo_clip"}},
    "environment": {"name": "tools"},
}
Record = dict[str, float]
Change = Callable[[int], Record]
"""What a step has that is not as in a healthy run."""
FLAT = {f"score/task_reward/{kind}": -1.0 for kind in ("mean", "max", "min")}
EVALUATION = "eval/toy/avg@2"


def healthy(step: int) -> Record:
    """A step of a run that learns: 0.4 to 0.8 right in 30 steps, with some noise."""
    wave = math.sin(7 * step)
    right = min(0.4 + 0.013 * step, 0.8) + 0.03 * wave
    record = {
        "step": step,
        **{"score/reward/mean": 2 * right - 1, "score/reward/max": 1, "score/reward/min": -1},
        **{"score/task_reward/max": 1, "score/task_reward/min": -1, "sampling/accuracy": right},
        **{"sampling/keep_rate": 0.7, "sampling/empty_bounds": 0, "sampling/groups/failed": 0},
        **{"sampling/groups/all_right": 3, "sampling/groups/all_wrong": 2},
        **{"length/response/mean": 40 + 2 * wave, "length/truncated": 0.05},
        **{"actor/entropy": 0.3 - 0.005 * step, "actor/clip_low": 0.002, "actor/clip_high": 0.004},
        **{"actor/approx_kl": 0.002, "actor/grad_norm": 1 + 0.2 * wave, "actor/updates": 4},
        **{"actor/skipped_updates": 0, "mismatch/age_0/abs_delta": 0.004, "mismatch/ess": 0.99},
        **{"scoring/answers": 128, "scoring/failed": 0, "scoring/busy_s": 0.1},
        **{"scoring/mean_s": 0.01, "time/step_s": 2.0, "time/wait_s": 0.4},
        **{"overlap/engines_wait_s": 0.5, "sampling/staleness/mean": 0.5},
    }
    if step % 5 == 0:
        record |= {EVALUATION: right, f"{EVALUATION}_se": 0.03}
    return record


def held_out(value: float) -> Change:
    return lambda step: {EVALUATION: value, f"{EVALUATION}_se": 0.03} if step % 5 == 0 else {}


def untaught(step: int) -> Record:
    """Held-out answers, and those in training, stay as they were."""
    return {"sampling/accuracy": 0.4, "score/reward/mean": 0.02 * step, **held_out(0.4)(step)}


def surer(step: int) -> float:
    """Entropy that falls to two fifths in 20 steps."""
    return max(0.3 - 0.009 * step, 0.12)


# A rule, a change that it must find, and one close by that it must not.
CASES: list[tuple[str, Change, Change]] = [
    (
        "reward_flat_wrong",
        lambda step: {**FLAT, "sampling/accuracy": 0.0},
        lambda step: {**FLAT, "score/task_reward/max": 1.0, "sampling/accuracy": 0.01},
    ),
    (
        "reward_flat_right",
        lambda step: {**FLAT, "sampling/accuracy": 1.0},
        lambda step: {**FLAT, "score/task_reward/max": -0.99, "sampling/accuracy": 1.0},
    ),
    (
        "filtered",
        lambda step: {"sampling/keep_rate": 0.06},
        lambda step: {"sampling/keep_rate": 0.15 if step % 5 else 0.05},
    ),
    ("filtered", lambda step: {"sampling/empty_bounds": 1}, lambda step: {}),
    (
        "cut_off",
        lambda step: {"length/truncated": 0.14},
        lambda step: {"length/truncated": 0.11},  # 640 answers: 2.4 % is chance
    ),
    (  # a fall by 1.5 % is chance: 2 sqrt(.146 * .854 / 128) = 6.2 %
        "cut_off",
        lambda step: {"length/truncated": max(0.17 - 0.01 * step, 0.14)},
        lambda step: {"length/truncated": max(0.6 - 0.1 * step, 0.0)},
    ),
    (  # no longer falling from step 4 on
        "cut_off",
        lambda step: {"length/truncated": max(0.6 - 0.1 * step, 0.3)},
        lambda step: {"length/truncated": max(0.6 - 0.1 * step, 0.1)},
    ),
    (  # rejected: 98.5 % to 95.5 % is no tenth; 100 % to 82 %, and 2 sqrt(.908 * .092 / 16) = 14 %
        "filtered",
        lambda step: {"sampling/keep_rate": 0.01 * min(step, 5)},
        lambda step: {"sampling/keep_rate": (0.0, 0.0, 0.1, 0.16, 0.2)[min(step, 5) - 1]},
    ),
    (  # malformed: 90 % to 10 % of the calls; up and down by chance
        "calls_malformed",
        lambda step: {"environment/calls": 0.6 + 0.1 * (step % 2), "environment/malformed": 0.4},
        lambda step: {
            "environment/calls": 0.2 * min(step, 5) - 0.1,
            "environment/malformed": 1.1 - 0.2 * min(step, 5),
        },
    ),
    (
        "scoring_fails",
        lambda step: {"scoring/failed": float(step == 3)},
        lambda step: {"scoring/answers": 0.0},
    ),
    (
        "gradient_spikes",
        lambda step: {"actor/skipped_updates": float(step == 20)},
        lambda step: {"actor/updates": 0.0},
    ),
    (
        "entropy_collapse",
        lambda step: {"actor/entropy": 0.3 * 0.9**step, "sampling/accuracy": 0.5},
        lambda step: {"actor/entropy": 0.3 * 0.9**step, "sampling/accuracy": 0.9},
    ),
    (  # the same fall, once while errors stay, once while they fall further
        "entropy_collapse",
        lambda step: {"actor/entropy": surer(step), "sampling/accuracy": 0.3 + 0.005 * step},
        lambda step: {"actor/entropy": surer(step), "sampling/accuracy": min(0.04 * step, 0.74)},
    ),
    (
        "entropy_blow_up",
        lambda step: {"actor/entropy": 0.3 + 0.02 * step},
        lambda step: {"actor/entropy": 0.3 + 0.005 * step},
    ),
    (
        "clip_never",
        lambda step: {"actor/clip_low": 0, "actor/clip_high": 0, "actor/approx_kl": 1e-8},
        # One update a step cannot be clipped.
        lambda step: {
            **{"actor/clip_low": 0, "actor/clip_high": 0},
            **{"actor/approx_kl": 1e-8, "actor/updates": 1},
        },
    ),
    (
        "clip_often",
        lambda step: {"actor/clip_low": 0.1, "actor/clip_high": 0.12},
        lambda step: {"actor/clip_low": 0.05, "actor/clip_high": 0.06},
    ),
    (
        "clip_often",
        lambda step: {"actor/approx_kl": 0.3 if step == 2 else 0.002},
        lambda step: {"actor/approx_kl": 0.05},
    ),
    (
        "gradient_spikes",
        lambda step: {"actor/grad_norm": 30.0 if step == 17 else 1.0},
        lambda step: {"actor/grad_norm": 6.0 if step == 17 else 1.0},
    ),
    (
        "length_hacking",
        lambda step: {**untaught(step), "length/response/mean": 40.0 + 2 * step},
        lambda step: {"length/response/mean": 40.0 + 2 * step},  # and held-out answers improve
    ),
    (
        "reward_hacking",
        untaught,
        # The reward rises because penalties for length fall away.
        lambda step: {**untaught(step), "score/parts/overlong/mean": 0.02 * step},
    ),
    (
        "reward_hacking",
        held_out(0.3),  # while accuracy in training doubles
        lambda step: held_out(0.3 + 0.005 * step)(step),
    ),
    (
        "reward_hacking",
        untaught,
        # Accuracy in training rises, too, by less than held-out answers could show.
        lambda step: {**untaught(step), "sampling/accuracy": 0.4 + 0.003 * step},
    ),
    (
        "no_calls",
        lambda step: {"environment/calls": 0.0, "environment/malformed": 0.0},
        lambda step: {"environment/calls": 0.01 * (step % 5 == 0), "environment/malformed": 0.0},
    ),
    (
        "no_calls",
        lambda step: {"environment/calls": 0.0},
        lambda step: {"environment/calls": 0.0, "environment/malformed": 0.01},
    ),
    (
        "calls_malformed",
        lambda step: {"environment/calls": 0.0, "environment/malformed": 1.0},
        lambda step: {"environment/calls": 1.0, "environment/malformed": 0.3 * (step % 2)},
    ),
    (
        "environment_faults",
        lambda step: {"environment/faults": 8.0 * (step == 4)},
        # One in a hundred answers, all tried again with success.
        lambda step: {"environment/faults": 1.0},
    ),
    (
        "environment_faults",
        lambda step: {"environment/faults": 1.0, "sampling/groups/failed": float(step == 2)},
        lambda step: {"sampling/groups/failed": 1.0},  # by the scorer
    ),
    (
        "environment_faults",
        lambda step: {"environment/faults": 30.0 * (step == 4), "eval/a/b/prompts": 400.0},
        lambda step: {"environment/faults": 4.0, "eval/a/b/prompts": 400.0},
    ),
    (
        "not_comparable",
        lambda step: {"mismatch/abs_delta": math.nan if step == 9 else 0.01},
        lambda step: {"actor/entropy": math.nan},
    ),
    (
        "mismatch",
        lambda step: {"mismatch/age_0/abs_delta": 0.08},
        # Tokens of older weights differ because the policy has moved.
        lambda step: {"mismatch/abs_delta": 0.08},
    ),
    (
        "mismatch",
        lambda step: {"mismatch/age_0/abs_delta": 0.002 * step},
        lambda step: {"mismatch/age_0/abs_delta": 0.0004 * step},
    ),
    (
        "stale",
        lambda step: {"sampling/staleness/mean": 4.0},
        lambda step: {"sampling/staleness/mean": 2.0},
    ),
    (
        "slow_scoring",
        lambda step: {"scoring/busy_s": 1.9, "scoring/mean_s": 1.0},
        # Many quick scores beside the engine are no delay.
        lambda step: {"scoring/busy_s": 1.9, "scoring/mean_s": 0.01},
    ),
    ("learner_starves", lambda step: {"time/wait_s": 1.6}, lambda step: {"time/wait_s": 1.0}),
    (
        "engine_starves",
        # Most of the step goes to evaluation and saving, which are no waiting.
        lambda step: {
            **{"overlap/engines_wait_s": 1.6, "time/step_s": 10.0},
            **{"time/evaluate_s": 7.0, "time/checkpoint_s": 1.0},
        },
        lambda step: {"overlap/engines_wait_s": 1.0},
    ),
]


def names(change: Change, settings: dict[str, Any] = SETTINGS, steps: int = 30) -> list[str]:
    records = [{**healthy(step), **change(step)} for step in range(1, steps + 1)]
    return [finding.name for finding in Diagnosis(settings, records).findings()]


def test_a_healthy_run_has_nothing() -> None:
    assert names(lambda step: {}) == []
    assert {case[0] for case in CASES} == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    ("name", "sick", "well"), CASES, ids=[f"{i}-{case[0]}" for i, case in enumerate(CASES)]
)
def test_a_rule_finds_its_disease_and_not_what_looks_like_it(
    name: str, sick: Change, well: Change
) -> None:
    assert name in names(sick)
    assert name not in names(well)


@pytest.mark.parametrize("steps", [1, 4])
def test_a_run_that_is_dead_from_its_first_step_says_so_at_once(steps: int) -> None:
    def dead(step: int) -> Record:
        return {**FLAT, "sampling/accuracy": 0.0, "length/truncated": 1.0}

    assert names(dead, steps=steps) == ["reward_flat_wrong", "cut_off"]
    few = {"sampling": {"groups_per_step": 1}, "rollout": {"n": 3}}  # 12 answers may be chance
    assert names(dead, few, steps) == []
    nearly = {"score/task_reward/max": 1.0, "length/truncated": 0.9}
    assert names(lambda step: {**dead(step), **nearly}, steps=steps) == []


def test_rules_say_how_many_steps_they_need() -> None:
    def needs(steps: int) -> dict[str, str]:
        records = ({"step": n, **healthy(n)} for n in range(1, steps + 1))
        return Diagnosis(SETTINGS, records).unmet_needs()

    assert needs(0)["cut_off"] == "needs 5 steps; 0 so far"
    assert needs(4)["entropy_blow_up"] == "needs 6 steps; 4 so far"
    assert needs(9)["reward_hacking"] == "needs 10 steps; 9 so far"
    late = needs(10)
    assert "entropy_collapse" not in late
    assert late["reward_hacking"] == "needs 3 evaluations (evaluation.every); 2 so far"
    assert late["no_calls"].startswith("needs environment/calls, which runs with tools record")
    bare = [{"step": float(n), "actor/entropy": math.nan, "sft/loss": 1.0} for n in range(1, 11)]
    lacking = Diagnosis(SETTINGS, bare).unmet_needs()
    assert lacking["entropy_collapse"] == "needs actor/entropy, which is not finite in any step"
    assert {"reward_flat_wrong", "reward_flat_right", "filtered", "scoring_fails"} < lacking.keys()
    assert names(lambda step: {"mismatch/abs_delta": math.nan}, steps=1) == ["not_comparable"]
    extreme = {"reward_flat_wrong", "reward_flat_right", "filtered", "cut_off", "clip_often",
               "gradient_spikes", "scoring_fails", "environment_faults"}  # fmt: skip
    for rule in RULES:
        for name, sick, _ in CASES:
            if name == rule.name and name not in extreme:
                assert name not in names(sick, steps=rule.steps - 1)


def test_sequence_ratios_are_clipped_more_often_in_a_healthy_run() -> None:
    gspo = {**SETTINGS, "algorithm": {"policy_loss": {"name": "gspo"}}}
    often = next(sick for rule, sick, _ in CASES if rule == "clip_often")
    assert "clip_often" not in names(often, gspo)


def test_a_finding_has_the_steps_and_figures_of_what_it_found() -> None:
    records = [{**healthy(s), "length/truncated": 0.2 if s < 10 else 0.0} for s in range(1, 31)]
    (finding,) = Diagnosis(SETTINGS, records).findings()
    assert (finding.severity, finding.first_step, finding.last_step) == ("warning", 5, 9)
    assert finding.evidence.startswith("20.0% of the answers trained on reached the limit of")
    assert "128 tokens" in finding.evidence
    assert "rollout.max_response_tokens" in finding.remedy


NUMBERS = st.one_of(
    st.floats(allow_nan=True, allow_infinity=True), st.integers(-(2**70), 2**70), st.just(0.0)
)
FIGURES = st.dictionaries(
    st.sampled_from(
        [
            *healthy(5),
            "mismatch/abs_delta",
            "actor/clip",
            "time/evaluate_s",
            "environment/calls",
            "environment/malformed",
            "environment/faults",
        ]
    ),
    NUMBERS,
)


@examples(15)
@given(
    st.lists(FIGURES, max_size=25),
    st.recursive(
        st.none() | st.text(max_size=3) | st.integers(),
        lambda inner: st.dictionaries(
            st.sampled_from(["sampling", "rollout", "n", "algorithm", "policy_loss"]), inner
        ),
        max_leaves=5,
    ).filter(lambda tree: isinstance(tree, dict)),
    st.booleans(),
)
def test_no_record_makes_a_rule_raise(
    changes: list[Record], settings: dict[str, Any], is_partial: bool
) -> None:
    diagnosis = Diagnosis(settings)
    for step, change in enumerate(changes, 1):
        diagnosis.add(step, change if is_partial else {**healthy(step), **change})
    for finding in diagnosis.findings():
        assert finding.evidence


@pytest.mark.parametrize("value", [1e308, -1e308, math.inf, math.nan, 2.0**70, 5e-324, 0.0])
def test_extremes_in_every_figure_make_no_rule_raise(value: float) -> None:
    for sign in (1, -1):
        extreme = {
            name: value if number > 0 else sign * value for name, number in healthy(5).items()
        }
        Diagnosis(SETTINGS, [{**healthy(step), **extreme, "step": step} for step in range(1, 12)])
        Diagnosis(
            SETTINGS, [{**(extreme if s % 2 else healthy(s)), "step": s} for s in range(1, 24)]
        )


def test_rules_ask_for_figures_that_are_listed_and_name_keys_that_exist() -> None:
    assert all(find_metric(name) for name in healthy(5) if name != "step")
    keys = {line.key for line in describe_config(recipe("quickstart"))}  # variants included
    for rule in RULES:
        named = re.findall(r"\b[a-z]+(?:[./][a-z_]+)+\b", rule.remedy)
        for key in named:
            assert key in keys or find_metric(key), (rule.name, key)
        assert named or "`winnow " in rule.remedy, rule.name


def test_docs_have_a_section_for_each_rule() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    assert re.findall(r"^### `(\w+)`", page, re.MULTILINE) == [rule.name for rule in RULES]
    for rule in RULES:
        _, _, rest = page.partition(f"### `{rule.name}`")
        section = " ".join(rest.partition("\n#")[0].split())
        assert rule.cause in section, rule.name
        assert rule.remedy in section, rule.name
        assert rule.severity in section, rule.name


# Live, and from a folder


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "mine")
    made.path.mkdir()
    made.config.write_text("rollout: {n: 8, max_response_tokens: 128}\n")
    return made


def sick(step: int) -> Record:
    return {**healthy(step), "length/truncated": 0.5}


def live(folder: RunFolder, first: int, steps: Iterator[int] | range) -> list[str]:
    said: list[str] = []
    sink = LiveDiagnosis(SETTINGS, folder, said.append)
    sink.start(RunInfo("mine", 30, first))
    for step in steps:
        sink.log(step, sick(step))
    sink.close()
    return said


def kept(folder: RunFolder) -> list[dict[str, Any]]:
    return [json.loads(line) for line in folder.findings.read_text().splitlines()]


def test_a_run_says_each_disease_once_and_keeps_it(folder: RunFolder) -> None:
    (line,) = live(folder, 1, range(1, 20))
    assert line.startswith("Warning: step 5: cut_off: 50.0% of the answers trained on reached")
    assert line.endswith(f"winnow doctor {folder.path})")
    (event,) = kept(folder)
    assert (event["name"], event["first_step"], event["severity"]) == ("cut_off", 5, "warning")
    assert set(event) == set(RunFinding.__dataclass_fields__)


def test_a_resumed_run_does_not_say_again_what_was_found_before(folder: RunFolder) -> None:
    before = live(folder, 1, range(1, 10))
    log = MetricsLog(folder.metrics)
    for step in range(1, 10):
        log.log(step, {name: value for name, value in sick(step).items() if name != "step"})
    log.close()
    assert len(before) == 1
    assert live(folder, 10, range(10, 15)) == []
    assert [event["first_step"] for event in kept(folder)] == [5]
    # Begun anew from the start, it has no past.
    assert len(live(folder, 1, range(1, 7))) == 1
    assert live(folder, 1, range(1, 3)) == []
    assert kept(folder) == []


def test_a_folder_that_refuses_the_file_costs_the_run_nothing(folder: RunFolder) -> None:
    folder.findings.mkdir()
    assert len(live(folder, 1, range(1, 8))) == 1


def test_a_run_without_a_step_is_diagnosed_by_its_answers(
    folder: RunFolder, make_group: Callable[..., Any]
) -> None:
    assert diagnose_run(folder)[:2] == (0, [])
    MetricsLog(folder.metrics).log(0, {EVALUATION: 0.0})
    # All of them say 10, one token each, and none is right.
    groups = [
        RolloutGroup(make_group(number, answers=1 + 2 * (number < 3)), "all_wrong")
        for number in range(4)
    ]
    write_rollouts(
        folder.rollout_file(1),
        1,
        groups,
        version=0,
        text_groups=range(4),
        decode=lambda ids: "so #1359",
    )
    steps, (finding,), _ = diagnose_run(folder)
    assert steps == 0
    assert (finding.name, finding.first_step) == ("filtered", 1)
    assert "4 all wrong" in finding.evidence


def row(group: int, response: str | None, accuracy: float = 0.0) -> dict[str, Any]:
    return {"group": group, "response": response, "accuracy": accuracy, "prompt": f"{group}+1:"}


def test_wrong_answers_that_agree_are_shown_and_others_are_called_hard() -> None:
    agree = [row(group, f"I think it is {group + 1}.") for group in range(3) for _ in range(4)]
    said = describe_wrong_answers(agree)
    assert said.startswith("; in 3 of 3 wrong groups most answers agree")
    assert "'0+1:', answered '1': if that is correct, the scorer misreads it" in said
    differ = [row(group, f"it is {n}") for group in range(3) for n in range(4)]
    assert describe_wrong_answers(differ) == (
        "; in 0 of 3 wrong groups most answers agree: a hard task is more likely than a misread "
        "format"
    )
    for nothing in ([], [row(0, None)], [row(0, "1", 1.0), row(0, "1", 1.0)], [row(0, "…")]):
        assert describe_wrong_answers(nothing) == ""


def test_a_figure_that_is_no_number_at_times_hides_no_disease() -> None:
    assert "cut_off" in names(lambda s: {"length/truncated": 0.5 if s % 3 else math.nan})
