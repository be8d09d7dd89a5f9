"""Learning reads numbers off its device where it must and nowhere else: a GPU's host would wait."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from tests.ranks import fake_ranks
from tests.small_models import digits_model
from tests.written import group_of
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from winnow.algorithms.losses import POLICY_LOSSES
from winnow.learning.batch import pack
from winnow.learning.data_parallel import DataParallel
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding
from winnow.learning.policy import PolicyObjective
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import use_layout_attention

ATEN = torch.ops.aten
SIZED = {ATEN.nonzero.default, ATEN.masked_select.default, ATEN._local_scalar_dense.default}


class Operations(TorchDispatchMode):
    """Counts operations whose result, or its size, comes from numbers on the device."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        masks = [x for x in args[1] if x is not None] if func is ATEN.index.Tensor else []
        if func in SIZED or any(mask.dtype == torch.bool for mask in masks):
            self.waits[str(func)] += 1
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """Counts `tolist`, which copies without an operation."""

    def __init__(self, waits: Counter[str]) -> None:
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.waits["tolist"] += func is Tensor.tolist
        return func(*args, **(kwargs or {}))


class CudaStrategy(Strategy):
    kernels = "cuda"


class ShardedStrategy(FSDP2Strategy):
    kernels = "cuda"


def waits_of(work: Any) -> int:
    with Operations() as operations, Calls(operations.waits):
        work()
    return operations.waits.total()


def count_waits(strategy: Strategy) -> list[int]:
    """Waits of a pass, of an update's micro-batches, of its step and of an export."""
    batch = pack([group_of([range(5), range(7)]), group_of([range(3), range(6)])])
    batch.columns.update(old=batch.behav, advantages=torch.ones(len(batch.token_ids)))
    micro = strategy.sharder.cut_update(batch, [0, 1], 8)
    assert len(micro) > 1
    clips = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None}
    objective = PolicyObjective(POLICY_LOSSES["ppo_clip"], clips, "token-mean")
    return [
        waits_of(lambda: strategy.forward(micro, objective.outputs)),
        waits_of(lambda: strategy.forward_backward(micro, objective.outputs, objective)),
        waits_of(lambda: strategy.optimizer_step(1e-3)),
        waits_of(lambda: [*strategy.export_weights(torch.bfloat16)]),
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_waits_for_its_figures_and_for_its_norm(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No kernel of CUDA attends here; the blocks of fp32 do.
    monkeypatch.setattr("winnow.models.packed_attention._HALF", ())
    model = digits_model(num_hidden_layers=2).to(dtype)
    use_layout_attention(model)
    strategy = CudaStrategy(model.eval(), gradient_checkpointing=True)
    assert count_waits(strategy) == [0, 1, 1, 0]


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_wait_no_more_often_with_parts_of_sequences_too(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Objects travel over gloo, through the hosts' memory.
    monkeypatch.setattr(DataParallel, "all_gather", lambda self, value: [value])
    with fake_ranks(2):
        mesh = init_device_mesh("cpu", (2,))
        group = None if size == 1 else distributed.group.WORLD
        model = digits_model(num_hidden_layers=2)
        use_layout_attention(model)
        strategy = ShardedStrategy(model.eval(), mesh, Sharding(), group)
        assert count_waits(strategy) == [0, 1, 1, 0]
