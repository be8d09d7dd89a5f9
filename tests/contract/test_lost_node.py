"""What a worker kept is lost with its node: whoever reads it says so, in one line."""

from __future__ import annotations

import asyncio
import os
import signal

import numpy as np
import pytest
from tests.ray_nodes import parent_of, ray_nodes

from winnow.errors import WorkerError
from winnow.workers.array_refs import ArrayRef, SplitResult
from winnow.workers.ray.group import start_ray
from winnow.workers.ray.session import Pool, ray_session, reserve

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
PATH = "tests.workers:Probe"
COUNT = 200_000


async def lose_a_node() -> None:
    reserved = await reserve([Pool("a", ("a",)), Pool("b", ("b",))])
    writer = await start_ray("writer", PATH, {}, reserved.placement("a"))
    reader = await start_ray("reader", PATH, {}, reserved.placement("b"))
    try:
        kept: SplitResult = await writer.call_rank(0, "keep", COUNT, 4)
        stored = ArrayRef(kept.block, 0, 0, 3, np.int64)
        expected = np.random.default_rng([4, 0]).integers(9, size=COUNT)[:3]
        other: SplitResult = await writer.call_rank(0, "keep", COUNT, 5)
        late = ArrayRef(other.block, 0, 0, 3, np.int64)
        ((found,),) = await reader.call("read", stored)
        np.testing.assert_array_equal(found, expected)
        os.kill(parent_of(writer.processes()[0]), signal.SIGKILL)
        lost = r"what writer\[0\] wrote is lost, as its node is gone"
        with pytest.raises(WorkerError, match=lost):
            await reader.call("read", late)
        with pytest.raises(WorkerError, match=lost):
            np.asarray(late)
    finally:
        await writer.close()
        await reader.close()
        reserved.release()


def test_what_was_kept_on_a_node_that_is_gone_is_told_as_lost() -> None:
    with ray_nodes({"num_cpus": 1}, {"num_cpus": 1}) as address, ray_session(address):
        asyncio.run(asyncio.wait_for(lose_a_node(), 200))
