"""Offloading on GPUs, as far as a CPU reaches: on a mesh of CUDA devices that are not there.

What would lie on a GPU has the device `meta` here, and no other rank sends anything. What is kept
on the host is real: weights are read, checked as FSDP2 checks them before its first pass, stepped,
saved and read back.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from tests.ranks import fake_ranks
from tests.recorded import quickstart_model
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from winnow.learning import fsdp2
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding
from winnow.learning.shards import copy_to_host
from winnow.models.causal_lm import load_causal_lm

RANKS, RANK = 4, 1


class CudaAsMeta(TorchFunctionMode):
    """Puts what is asked for on CUDA on no device; buffers, which are moved in place, stay."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        moves = getattr(func, "__name__", "") == "__set__" and args[1].is_meta
        if moves and not args[0].is_meta:
            return None
        if func is not torch.device:
            args = tuple(map(_elsewhere, args))
            kwargs = {name: _elsewhere(value) for name, value in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))


def _elsewhere(value: Any) -> Any:
    is_cuda = isinstance(value, str | torch.device) and str(value).startswith("cuda")
    return torch.device("meta") if is_cuda else value


def test_offloaded_shards_stay_on_the_host_and_are_stepped_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = quickstart_model(torch.bfloat16)
    saved.save_pretrained(tmp_path)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(fsdp2, "cores_per_rank", lambda: 3)  # no rank sends its host
    pinned: list[torch.Tensor] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda own: pinned.append(own) or own)
    with fake_ranks(RANKS, RANK):
        host = init_device_mesh("cpu", (RANKS,))
        model = load_causal_lm(str(tmp_path), torch.bfloat16, torch.device("cpu"), hollow=True)
        with CudaAsMeta():
            mesh = init_device_mesh("cuda", (RANKS,))
            strategy = FSDP2Strategy(model, mesh, Sharding(offload=True), grad_clip=1.0)
            check_as_before_the_first_pass(strategy)
        assert strategy.device == torch.device("cuda", 0)
        assert strategy.step_threads == 3
        weights = dict(model.named_parameters())
        assert len(pinned) == len(weights)
        originals = dict(saved.named_parameters())
        for name, weight in weights.items():
            assert weight.device_mesh is mesh
            rows = originals[name].detach().chunk(RANKS)[RANK]
            assert torch.equal(own(weight), rows.float())

        strategy.device = torch.device("cpu")  # where the sums of gradients meet
        for weight in weights.values():
            weight.grad = torch.ones_like(weight.detach())
        stats = strategy.optimizer_step(1e-3)
        count = sum(own(weight).numel() for weight in weights.values())
        assert stats == {"grad_norm": pytest.approx(count**0.5), "skipped": 0.0}
        # Adam's first step is the rate, whatever the gradient.
        name = "model.norm.weight"
        rows = originals[name].detach().chunk(RANKS)[RANK].float()
        torch.testing.assert_close(own(weights[name]), rows - 1e-3)

        state = copy_to_host(strategy.state_dict(), host)
        assert {t.device_mesh for t in state["weights"].values()} == {host}
        blank = copy_to_host(strategy.blank_state(), host)
        strategy.load_state_dict(blank)
        assert not any(own(weight).any() for weight in weights.values())
        strategy.load_state_dict(state)
        torch.testing.assert_close(own(weights[name]), rows - 1e-3)
        assert {own(weight).device.type for weight in weights.values()} == {"cpu"}
        with CudaAsMeta():
            strategy.device = torch.device("cuda", 0)
            exported = dict(strategy.export_weights())
    # On their way to engines they are whole, on the GPU.
    assert {tensor.device.type for tensor in exported.values()} == {"meta"}
    assert {n: tuple(t.shape) for n, t in exported.items()} == {
        name: tuple(tensor.shape) for name, tensor in originals.items()
    }


def own(weight: Any) -> torch.Tensor:
    return cast(DTensor, weight).to_local().detach()


def check_as_before_the_first_pass(strategy: FSDP2Strategy) -> None:
    """FSDP2's own checks of parameters, without its streams."""
    for unit in strategy._fsdp_units():
        group = cast(Any, unit)._get_fsdp_state()._fsdp_param_group
        if group is not None:
            for parameter in group.fsdp_params:
                parameter.reset_sharded_param()
            group._validate_no_meta_params()
            group._validate_cpu_offload_params()
