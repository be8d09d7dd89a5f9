"""Runs in which a reward model scores beside the rule: figures, filters, the same bits again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from benchmarks.kill import differences
from tests.fault.quick_lab import SPARES
from tests.forked import Server
from tests.reward_models import classifier_folder
from tests.winnow_command import cut_off, in_forked_process, train, winnow
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from winnow.observe.rollouts import read_rollouts

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 2
JUDGED = (
    *("reward/model=sequence_classifier", "reward.model.path=judge", "reward.model.part=taste"),
    *("reward.model.weight=0.25", "reward.weights.task=0.5", "sampling.filter.metric=taste"),
    f"trainer.steps={STEPS}",
)


@pytest.fixture(scope="module")
def home(home: Path) -> Path:
    """With a reward model, `judge`, and a finished run, `whole`."""
    classifier_folder(home / "judge")
    train(home, "whole", *JUDGED).check()
    return home


def test_each_part_is_in_the_rollouts_as_transformers_itself_would_score_it(home: Path) -> None:
    rows = read_rollouts(home / "runs/whole/rollouts").to_pylist()
    shown = [row for row in rows if row["response"] is not None]
    assert len(shown) > 20
    for row in rows:
        parts = 0.5 * row["part/task"] + 0.25 * row["part/taste"] + row["part/overlong"]
        assert row["reward"] == pytest.approx(parts)
    tokenizer = AutoTokenizer.from_pretrained(home / "judge")
    model = AutoModelForSequenceClassification.from_pretrained(home / "judge").eval()
    for row in shown[:40]:
        turns = [
            {"role": "user", "content": row["prompt"]},
            {"role": "assistant", "content": row["response"]},
        ]
        ids = tokenizer.apply_chat_template(turns, return_tensors="pt", return_dict=True)
        with torch.no_grad():
            said = float(model(ids["input_ids"]).logits)
        assert row["part/taste"] == pytest.approx(said, abs=1e-5)


def test_a_run_that_was_cut_off_ends_with_the_same_bits(home: Path) -> None:
    run = cut_off(home, "whole", "cut", 1)
    assert "after step 1" in winnow(home, "resume", str(run), "observe.console=plain").check().out
    assert differences(home / "runs" / "whole", run, steps=STEPS) == []


def test_held_out_answers_are_judged_where_the_recipe_asks(home: Path, server: Server) -> None:
    winnow(home, "eval", "runs/whole").check()
    answers = home / "runs/whole/eval" / f"checkpoint-{STEPS}.parquet"
    assert "part/taste" not in read_rollouts(answers).column_names
    judged = ["reward.model.in_evaluation=true", "reward/model/strategy=fsdp2", "--out", "judged"]
    words = "eval", "runs/whole", *judged
    in_forked_process(server, *words, folder=home, spares=SPARES).check()
    rows = read_rollouts(home / "judged/answers.parquet").to_pylist()
    assert all(row["part/taste"] is not None for row in rows)
