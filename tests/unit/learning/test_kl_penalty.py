"""KL in the reward by hand and against loops, and the weight that adapts."""

from __future__ import annotations

import math

import pytest
import torch
from tests.recorded import recorded_groups

from winnow.errors import TrainingError
from winnow.learning.advantage import KlPenalty, sum_samples
from winnow.learning.batch import Batch, pack
from winnow.observe.metrics import Metrics


def batch_of(old: list[float], ref: list[float]) -> Batch:
    """Two recorded answers, cut to what is asked for by their masks: 2 and 1 written tokens."""
    batch = pack(recorded_groups(1, 2))
    chosen = torch.zeros_like(batch.gen_mask)
    first, second = (int(batch.prompt_lengths[b] + batch.offsets[b]) for b in range(2))
    places = torch.tensor([first, first + 1, second])
    chosen[places] = True
    batch.gen_mask.copy_(chosen)
    for name, values in (("old", old), ("ref", ref)):
        column = torch.full((len(batch.token_ids),), 7.0)
        column[places] = torch.tensor(values)
        batch.columns[name] = column
    return batch


def test_the_penalty_by_hand() -> None:
    batch, metrics = batch_of([-1.0, -2.0, -0.5], [-1.5, -1.0, -2.5]), Metrics()
    penalty = KlPenalty(0.1, "k1")(batch, metrics)
    assert penalty.dtype == torch.float64
    assert penalty[batch.gen_mask].tolist() == pytest.approx([0.05, -0.1, 0.2])
    assert not penalty[~batch.gen_mask].any()
    # Means of the samples are -0.25 and 2.0: the second counts as much, though it is shorter.
    assert metrics.record() == {"reward/kl": pytest.approx(0.875), "reward/kl_coef": 0.1}


@pytest.mark.parametrize("estimator", ["k1", "abs", "k2", "k3"])
def test_the_penalty_of_recorded_answers_equals_the_loop(estimator: str) -> None:
    batch, metrics = pack(recorded_groups(2)), Metrics()
    torch.manual_seed(1)
    for name in ("old", "ref"):
        batch.columns[name] = -torch.rand(len(batch.token_ids)) * 3
    penalty = KlPenalty(0.3, estimator)(batch, metrics)
    value = {
        "k1": lambda d: d,
        "abs": abs,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: min(math.exp(-d) + d - 1, 10.0),
    }[estimator]
    means = []
    for b in range(batch.n_samples):
        found = []
        for t in range(int(batch.offsets[b]), int(batch.offsets[b + 1])):
            if not batch.gen_mask[t]:
                assert penalty[t] == 0
                continue
            found.append(value(float(batch.columns["old"][t]) - float(batch.columns["ref"][t])))
            assert float(penalty[t]) == pytest.approx(0.3 * found[-1], abs=1e-12)
        means.append(sum(found) / len(found))
    assert metrics.record()["reward/kl"] == pytest.approx(sum(means) / len(means))


@pytest.mark.parametrize(
    ("kl", "factor"),
    [
        (0.11, 1 + 0.1 * 2 / 100),  # 10 % over a target of 0.1
        (5.0, 1 + 0.2 * 2 / 100),  # held at 20 %
        (-5.0, 1 - 0.2 * 2 / 100),
        (0.1, 1.0),
    ],
)
def test_the_weight_moves_after_a_step_as_the_formula_says(kl: float, factor: float) -> None:
    batch, metrics = batch_of([kl] * 3, [0.0] * 3), Metrics()
    penalty = KlPenalty(0.5, "k1", target=0.1, horizon=100)
    assert penalty(batch, metrics)[batch.gen_mask].tolist() == pytest.approx([0.5 * kl] * 3)
    assert metrics.record()["reward/kl_coef"] == 0.5, "this step's"
    assert penalty.coef == pytest.approx(0.5 * factor)
    again = Metrics()
    penalty(batch, again)
    assert again.record()["reward/kl_coef"] == pytest.approx(0.5 * factor)


def test_a_fixed_weight_stays() -> None:
    penalty = KlPenalty(0.5, "k1")
    penalty(batch_of([1.0] * 3, [0.0] * 3), Metrics())
    assert penalty.coef == 0.5


def test_a_kl_that_is_not_finite_stops_the_run_with_one_line() -> None:
    for value in (math.nan, -math.inf):
        with pytest.raises(TrainingError, match=r"^algorithm\.kl\.reward: the KL .* optim\.lr$"):
            KlPenalty(0.5, "k1")(batch_of([value, 0.0, 0.0], [0.0] * 3), Metrics())


def test_sums_of_samples_keep_integers() -> None:
    batch = batch_of([0.0] * 3, [0.0] * 3)
    assert sum_samples(batch.gen_mask.long(), batch).tolist() == [2, 1]
    ids = sum_samples(batch.token_ids, batch)
    assert ids.tolist() == [
        int(part.sum()) for part in batch.token_ids.split(batch.offsets.diff().tolist())
    ]
