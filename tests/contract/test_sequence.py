"""Ranks that run each micro-batch together learn what one process learns.

The cases of `test_fsdp2` with sequence parallelism, in float64: with token counts that no number of
ranks divides, micro-batches without a sample, and, where four ranks run one, fewer key heads than
ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest
import torch
from tests.contract.test_fsdp2 import (
    BUDGET,
    KINDS,
    SHAPE,
    THOROUGH,
    TOLERANCE,
    assert_learn_alike,
    batch_of,
    layout_of,
    mesh_of,
    model_of,
    shares_of,
)
from tests.ranks import Ranks

from winnow.learning.batch import MicroBatchSharder
from winnow.observe.metrics import Metrics

EXACT = torch.float64
LAYOUTS = {
    "2": (4, (1, 2), 2),
    "2 x 2": (4, (1, 4), 2),
    "2 x 2, replicas": (4, (2, 2), 2),
    "2 across replicas": (4, (4, 1), 2),
    "4": (4, (1, 4), 4),
    "4 x 2": (8, (1, 8), 4),
    "4 x 2, replicas": (8, (2, 4), 4),
}
"""Processes; replicas, shards; ranks that run a micro-batch together."""
OPTIONS = list(itertools.product((False, True), repeat=2))
"""Offloaded, recomputed."""
USUAL = {
    "2 x 2, replicas": OPTIONS[3:],
    "2 across replicas": OPTIONS[:1],
    "4 x 2": OPTIONS[1:2],
    "4 x 2, replicas": OPTIONS[2:3],
}
"""Of a layout when not all are asked for; elsewhere one or the other, as `test_fsdp2` has it."""
OTHERS = (*KINDS[1:], "gspo")


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    with Ranks(8) as made:
        yield made


def assert_alike(
    request: pytest.FixtureRequest,
    layout: str,
    kind: str,
    options: Sequence[tuple[bool, bool]],
    dtype: torch.dtype = EXACT,
    tolerance: float = TOLERANCE[EXACT],
) -> None:
    processes, mesh, sequence = LAYOUTS[layout]
    ranks = request.getfixturevalue("ranks" if processes == 4 else "eight_ranks")
    cases = [
        (dtype, replace(layout_of(mesh, (False, *option)), sequence=sequence)) for option in options
    ]
    assert_learn_alike(ranks, kind, cases, {dtype: tolerance})


def test_the_cases_are_as_ragged_as_they_are_meant_to_be() -> None:
    batch = batch_of("tied", EXACT)
    for groups, size in ((1, 2), (2, 2), (1, 4), (2, 4)):
        shares = shares_of(batch, groups)
        assert any(sum(micro.lengths) % size for own in shares for micro in own)
        assert all(any(not micro.lengths for micro in own) for own in shares)
    config = model_of("tied", EXACT).config
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_policy_learns_what_it_learns_alone(request: pytest.FixtureRequest, layout: str) -> None:
    some = USUAL.get(layout, OPTIONS[1:3])
    assert_alike(request, layout, "tied", OPTIONS if THOROUGH else some)


@pytest.mark.parametrize("kind", OTHERS)
def test_so_does_each_kind_of_model(request: pytest.FixtureRequest, kind: str) -> None:
    number = OTHERS.index(kind)
    layouts = [name for name in LAYOUTS if LAYOUTS[name][0] == 4]
    for layout in layouts if THOROUGH else ["4" if number % 2 else "2 x 2"]:
        assert_alike(request, layout, kind, OPTIONS if THOROUGH else [OPTIONS[number % 4]])


def test_bf16_differs_by_its_rounding_alone(request: pytest.FixtureRequest) -> None:
    # A weight's gradient is summed in bf16 over the tokens of a rank, and alone over all of them.
    assert_alike(request, "2 x 2", "tied", OPTIONS[:1], torch.bfloat16, 0.05)


def dealt(size: int) -> tuple[list[list[int]], Metrics, list[float]]:
    """This rank's samples, figures of how even the shares are, and what a pass finds."""
    batch = batch_of("tied", EXACT)
    sharder = MicroBatchSharder(mesh_of((1, 4)), SHAPE["hidden_size"], size)
    micro = sharder.update(batch, range(batch.n_groups), BUDGET)
    found = sharder.gather(batch, micro, [each.token_ids.double() for each in micro])
    return [each.samples.tolist() for each in micro], sharder.figures(), found.tolist()


@pytest.mark.parametrize("size", [2, 4])
def test_samples_are_dealt_to_groups_of_ranks(ranks: Ranks, size: int) -> None:
    batch = batch_of("tied", EXACT)
    found = ranks.run(dealt, size)
    groups = [found[rank][0] for rank in range(0, 4, size)]
    assert [samples for samples, _, _ in found] == [own for own in groups for _ in range(size)]
    every = [sample for own in groups for samples in own for sample in samples]
    assert sorted(every) == list(range(batch.n_samples))
    lengths = batch.offsets.diff().double()
    work = lengths + lengths**2 / (12 * SHAPE["hidden_size"])
    sums = [float(work[[b for samples in own for b in samples]].sum()) for own in groups]
    for _, figures, tokens in found:
        spread = max(sums) / (sum(sums) / len(sums))
        assert figures.record()["ranks/spread"] == pytest.approx(spread)
        assert tokens == batch.token_ids.tolist()
