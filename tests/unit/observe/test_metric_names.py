"""The list of figures, and the page that is made of it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.winnow_command import in_this_process

from winnow.observe.metric_names import find_metric, list_metrics

PAGE = Path(__file__).parents[3] / "docs/metrics.md"


def test_the_page_is_what_the_command_prints(tmp_path: Path) -> None:
    printed = in_this_process("metrics", "--markdown", folder=tmp_path).check()
    assert PAGE.read_text(encoding="utf-8") == printed.out, (
        "run: winnow metrics --markdown > docs/metrics.md"
    )


@pytest.mark.parametrize(
    ("figure", "row"),
    [
        ("score/parts/task/mean", "score/parts/NAME/SPREAD"),
        ("source/openai/gsm8k/own/steps/best@8", "source/SOURCE/own/NAME/{mean,best@N,worst@N}"),
        ("eval/openai/gsm8k/avg@16_se", "eval/SOURCE/avg@N_se"),
        ("eval/a/own_passed_share_worst@4", "eval/SOURCE/own_NAME_{mean,best@N,worst@N}"),
        ("actor/clip_low", "actor/clip_{low,high}"),
        ("mismatch/age_3/k3", "mismatch/age_K/{abs_delta,k3}"),
        *((figure, None) for figure in ("actor/cut", "score/reward", "time/step", "")),
        ("eval/a/pass@x", None),
    ],
)
def test_a_figure_belongs_to_its_row_or_is_not_in_the_list(figure: str, row: str | None) -> None:
    assert getattr(find_metric(figure), "name", None) == row


def test_no_name_stands_twice_and_units_are_those_of_the_names() -> None:
    rows = list(list_metrics())
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        is_time = row.name.endswith("_s") and not row.name.endswith("_per_s")
        assert (row.unit == "s") == is_time, row.name
        assert (row.unit == "GiB") == row.name.endswith("_gib"), row.name


@pytest.mark.parametrize(
    ("verls", "ours"),
    [
        ("critic/score/mean", "score/reward/SPREAD"),  # with the overlong penalty, in both
        ("critic/rewards/max", "score/reward/SPREAD"),
        ("prompt_length/clip_ratio", "length/prompt/SPREAD"),
        ("response_length/clip_ratio", "length/truncated"),
    ],
)
def test_a_figure_of_verls_is_listed_by_its_name_there(
    verls: str, ours: str, tmp_path: Path
) -> None:
    said = in_this_process("metrics", verls, folder=tmp_path).check()
    assert said.out.split()[0] == ours


def test_the_command_lists_the_figures_of_a_part(tmp_path: Path) -> None:
    said = in_this_process("metrics", "length", folder=tmp_path).check()
    assert said.out.splitlines()[:2] == [
        "length/response/SPREAD [tokens]",
        "    tokens of an answer; verl: response_length/SPREAD",
    ]
    assert in_this_process("metrics", "lenght", folder=tmp_path).err.startswith(
        "winnow: no metric starts with 'lenght'; prefixes: score, "
    )


def test_what_is_healthy_stands_in_the_list_beside_the_meaning() -> None:
    row = find_metric("actor/entropy")
    assert row is not None
    assert row.unit == "nats"
    assert row.healthy.startswith("falls slowly while accuracy rises")
    assert sum(bool(each.healthy) for each in list_metrics()) > 30
