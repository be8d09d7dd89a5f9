"""The trainer's side of the canary, on ranks that hold the model in parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.contract import test_fsdp2 as fsdp2
from tests.contract import test_megatron as megatron
from tests.ranks import Ranks
from tests.recorded import VOCABULARY

from winnow.learning import canary as module
from winnow.learning.batch import pack_sequences
from winnow.learning.canary import Canary, CanaryScores
from winnow.learning.fsdp2 import Sharding
from winnow.learning.strategy import Strategy, run_pass

CANARY = Canary.random(VOCABULARY, 200, torch.float64, temperature=0.7)
LARGE_STEP = 0.25
"""Of a nudge, which then shows in every figure: at the wrong token it would be seen."""


def score(strategy: Strategy) -> CanaryScores:
    with patch.object(module, "rounding_step", lambda dtype: LARGE_STEP):
        return CANARY.score(strategy)


@dataclass(frozen=True)
class OnRank:
    scores: CanaryScores
    gathers: int
    """Of weights, for all rows of the canary."""
    of_a_pass: int
    """The same of a pass over the sequences themselves."""


def on_fsdp2(sequence: int) -> OnRank:
    from torch.distributed.fsdp._fully_shard import _fsdp_param_group as group

    layout = fsdp2.Layout((1, 2), Sharding(), sequence=sequence)
    strategy = fsdp2.strategy_on_rank("tied", torch.float64, layout)
    with patch.object(group, "foreach_all_gather", wraps=group.foreach_all_gather) as gather:
        scores = score(strategy)
        gathers = gather.call_count
        batch = pack_sequences(CANARY.sequences)
        run_pass(strategy, batch, frozenset({"logprob"}), 2048)
        return OnRank(scores, gathers, gather.call_count - gathers)


def on_megatron(cut: tuple[int, int, int]) -> CanaryScores:
    return score(megatron.strategy_on_rank("tied", torch.float64, cut, cut[0] > 1))


def assert_as_alone(found: CanaryScores) -> None:
    expected = score(fsdp2.alone("tied", torch.float64))
    assert found.limits.mean == pytest.approx(expected.limits.mean, rel=1e-6)
    for ours, theirs in zip(found.logprobs, expected.logprobs, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("sequence", [1, 2])
def test_two_ranks_gather_the_weights_once_for_all_rows(ranks: Ranks, sequence: int) -> None:
    for each in ranks.run(on_fsdp2, sequence):
        assert each.gathers == each.of_a_pass > 1
        assert_as_alone(each.scores)


@pytest.mark.parametrize("cut", [(2, 1, 1), (1, 2, 1)])
def test_embeddings_of_a_first_stage_are_nudged(ranks: Ranks, cut: Any) -> None:
    for scores in ranks.run(on_megatron, cut):
        assert_as_alone(scores)


def test_each_row_is_as_in_a_pass_of_its_own() -> None:
    strategy: Any = fsdp2.alone("tied", torch.float64)
    batch = pack_sequences(CANARY.sequences, module.SCORED)
    passes = []
    for place in (None, 0, 1, 2):

        def nudge(layer: Any, args: Any, output: torch.Tensor, place: Any = place) -> torch.Tensor:
            scale = torch.ones(output.shape[-1], dtype=output.dtype)
            if place is not None:
                scale[place::8] += LARGE_STEP
            return output * scale

        with strategy.embeddings.register_forward_hook(nudge):
            found = run_pass(strategy, batch, frozenset({"logprob"}), 2048)["logprob"]
        rows = np.split(found.float().numpy(), batch.offsets[1:-1].numpy())
        passes.append([row[-module.SCORED :] for row in rows])
    scores = score(strategy)
    means = np.array([each[:-1] for each in passes]).mean(0)
    np.testing.assert_allclose(scores.logprobs[:-1], means, atol=1e-6)
    np.testing.assert_allclose(scores.logprobs[-1], passes[0][-1], atol=1e-6)
