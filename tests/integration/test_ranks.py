"""The processes that tests of many ranks run on: what they say, and what becomes of a failure."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from tests.ranks import RankError, Ranks


@pytest.fixture(scope="module")
def pair() -> Iterator[Ranks]:
    with Ranks(2) as made:
        yield made


def summed(number: float) -> tuple[int, float]:
    total = torch.tensor(number + dist.get_rank())
    dist.all_reduce(total)
    return os.getpid(), float(total)


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise KeyError(f"only rank {rank}")
    dist.barrier()


def sleep_on(rank: int) -> None:
    time.sleep(60 if dist.get_rank() == rank else 0)


def die() -> None:
    os._exit(3)


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ranks_answer_together_and_stay(pair: Ranks) -> None:
    first, second = pair.run(summed, 1.0), pair.run(summed, 10.0)
    assert [total for _, total in first + second] == [3.0, 3.0, 21.0, 21.0]
    assert [pid for pid, _ in first] == [pid for pid, _ in second] == pair.pids


@pytest.mark.parametrize(
    ("function", "args", "told"),
    [
        (fail_on, (1,), r"rank 1: (?s:.*)KeyError: 'only rank 1'"),
        (sleep_on, (0,), r"ranks \[0\] did not answer in time"),
        (die, (), "rank 0: the process died"),
    ],
)
def test_a_rank_that_fails_ends_the_call_and_all_processes(
    pair: Ranks, function: object, args: tuple[int, ...], told: str
) -> None:
    pair.run(summed, 1.0)
    pids = pair.pids
    with pytest.raises(RankError, match=told):
        pair.run(function, *args, timeout_s=4.0)  # type: ignore[arg-type]
    assert not any(is_running(pid) for pid in pids)
    assert [total for _, total in pair.run(summed, 1.0)] == [3.0, 3.0]
