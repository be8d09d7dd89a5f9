"""Ranks that run each micro-batch together learn what one process learns.

The cases of `test_fsdp2` with sequence parallelism: token counts that do not divide, micro-batches
without a sample, and on four ranks fewer key heads than ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from tests.contract.test_fsdp2 import (
    TOLERANCE,
    assert_learn_alike,
    layout_of,
)
from tests.ranks import Ranks

EXACT = torch.float64
LAYOUTS = {
    "2": ((1, 2), 2),
    "2, data-parallel 2": ((1, 4), 2),
    "2, of 2 replicas each": ((2, 2), 2),
    "2, across 4 replicas": ((4, 1), 2),
    "4": ((1, 4), 4),
}
EIGHT = {"4, data-parallel 2": ((1, 8), 4), "4, of 2 replicas each": ((2, 4), 4)}
KINDS = ("tied", "untied", "lora", "frozen", "critic", "reward model", "gspo", "reference")


@pytest.fixture(scope="module")
def eight_ranks() -> Iterator[Ranks]:
    with Ranks(8) as made:
        yield made


def case(mesh, sequence, offloaded, recomputed, dtype=EXACT):
    layout = layout_of(mesh, (False, offloaded, recomputed))
    return dtype, replace(layout, sequence=sequence)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", LAYOUTS)
def test_four(ranks: Ranks, kind: str, name: str) -> None:
    for o, r in ((False, True), (True, False)):
        assert_learn_alike(ranks, kind, [case(*LAYOUTS[name], o, r)], TOLERANCE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", EIGHT)
def test_eight(eight_ranks: Ranks, kind: str, name: str) -> None:
    for o, r in ((False, True), (True, False)):
        assert_learn_alike(eight_ranks, kind, [case(*EIGHT[name], o, r)], TOLERANCE)
