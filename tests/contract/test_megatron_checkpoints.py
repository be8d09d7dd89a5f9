"""What Megatron's ranks save: read in any other layout and by FSDP2, and gone on from exactly.

States are compared bit by bit by the names of the Hugging Face model: each strategy that has read
a checkpoint writes another, and the two hold the same.
"""

from __future__ import annotations

import errno
import resource
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.contract.test_fsdp2 import (
    HYPERPARAMETERS,
    LR,
    POLICY,
    SHAPE,
    Arrays,
    batch_of,
    exported,
    model_of,
    objective_of,
    shares_of,
)
from tests.contract.test_fsdp2_state import assert_equal
from tests.forked import Server
from tests.megatron_layouts import use
from tests.ranks import Ranks
from tests.small_models import digits_model
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.device_mesh import init_device_mesh

from winnow.learning.fsdp2 import FSDP2Strategy, Sharding
from winnow.learning.shards import copy_to_host, read_shards, write_model, write_shards
from winnow.learning.strategy import local
from winnow.models.causal_lm import use_layout_attention

pytestmark = [
    pytest.mark.skipif(find_spec("megatron") is None, reason="needs megatron-core"),
    pytest.mark.filterwarnings("ignore:torch.distributed is disabled"),
]

Sizes = tuple[int, int, int] | None
"""Tensor, pipeline and expert parallel ranks; None for FSDP2."""
TYPES = {
    "tied": torch.float64,
    "untied": torch.bfloat16,
    "frozen": torch.float64,
    "experts": torch.float32,
}
"""Of the models; in bf16 what is saved are fp32 masters."""
SAVED: dict[str, Sizes] = {
    "tied": (2, 2, 1),
    "untied": (2, 2, 1),
    "frozen": (2, 1, 1),
    "experts": (2, 2, 2),
}
OTHERS: dict[str, dict[int, list[Sizes]]] = {
    "tied": {2: [(1, 2, 1)]},
    "untied": {4: [None]},
    "frozen": {4: [(1, 1, 1)]},
    "experts": {4: [(2, 1, 4), None]},
}
"""By the number of ranks; those that a layout leaves over hold copies (data parallelism)."""


def model(kind: str) -> Any:
    if kind != "experts":
        return model_of(kind, TYPES[kind])
    made: Any = digits_model(True, **SHAPE, num_experts=4)
    use_layout_attention(made)
    return made.eval()


@cache
def saving() -> dist.ProcessGroup:
    """The group of all ranks for what they save."""
    return cast(dist.ProcessGroup, dist.new_group())


def strategy_of(kind: str, sizes: Sizes) -> Any:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if sizes is None:
        return FSDP2Strategy(model(kind), mesh, Sharding(), **HYPERPARAMETERS)
    from winnow.learning.megatron import MegatronStrategy, RankLayout

    use(layout := RankLayout(*sizes))
    return MegatronStrategy(model(kind), mesh, layout, **HYPERPARAMETERS)


def update(strategy: Any, kind: str) -> None:
    dp = strategy.sharder.dp
    micro = shares_of(batch_of(kind, TYPES[kind]), dp.shares)[dp.share]
    strategy.forward_backward(micro, POLICY, objective_of(kind))
    strategy.optimizer_step(LR)


def read_into(strategy: Any, folder: str | Path) -> None:
    state = copy_to_host({"policy": strategy.blank_state()}, strategy.mesh)
    read_shards(state, Path(folder), saving())
    strategy.load_state_dict(state["policy"])


def write(strategy: Any, folder: str | Path) -> None:
    state = copy_to_host({"policy": strategy.state_dict()}, strategy.mesh)
    write_shards(state, Path(folder), saving())


def save_and_go_on(kind: str, sizes: Sizes, folder: str) -> tuple[Arrays, Arrays]:
    """Write a copy beside a second update and after it; the weights before and after."""
    strategy = strategy_of(kind, sizes)
    update(strategy, kind)
    at_save = exported(strategy)
    state = copy_to_host({"policy": strategy.state_dict()}, strategy.mesh)
    shards = copy_to_host(strategy.export_shards(), strategy.mesh)
    group, is_updated = saving(), threading.Event()

    def write_all() -> None:
        write_model(strategy.model, shards, Path(folder, "model"), group)
        is_updated.wait(60)
        write_shards(state, Path(folder, "state"), group)

    writing = threading.Thread(target=write_all)
    writing.start()
    update(strategy, kind)
    is_updated.set()
    writing.join()
    return at_save, exported(strategy)


def go_on(kind: str, sizes: Sizes, source: str, target: str) -> Arrays:
    """Read a checkpoint, write another, and learn; the weights after that."""
    strategy = strategy_of(kind, sizes)
    with torch.no_grad():
        for _, tensor in strategy.local_weights():
            local(tensor).zero_()  # copies, too, which have the weights from their owners
    read_into(strategy, source)
    strategy.load_state_dict(strategy.state_dict())  # live tensors, as a plan does
    write(strategy, target)
    update(strategy, kind)
    return exported(strategy)


def contents(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, whole."""
    reader = FileSystemReader(folder)
    found = {}
    for name, each in reader.read_metadata().state_dict_metadata.items():
        assert isinstance(each, TensorStorageMetadata)
        found[name] = torch.empty(each.size, dtype=each.properties.dtype)
    load(found, storage_reader=reader, no_dist=True)
    return found


def assert_same(found: Path, wanted: Path) -> None:
    ours, theirs = contents(found), contents(wanted)
    assert ours.keys() == theirs.keys()
    assert all(t.dtype == ours[name].dtype for name, t in theirs.items())
    assert [name for name, t in theirs.items() if not torch.equal(ours[name], t)] == []


@dataclass(frozen=True)
class Saved:
    """A checkpoint of four ranks, and the run that it is from."""

    kind: str
    folder: Path
    at_save: Arrays
    after: Arrays

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def check_update(self, found: Arrays) -> None:
        """Hold the weights after an update against those of the run, where others computed it."""
        limit = {torch.float64: 1e-10, torch.float32: 1e-5}.get(TYPES[self.kind])
        for name, weight in self.after.items():
            if limit is not None:  # bf16 rounds by as much as an update moves
                np.testing.assert_allclose(found[name], weight, atol=limit, err_msg=name)


def saved_by(ranks: Ranks, kind: str, sizes: Sizes, folder: Path) -> Saved:
    at_save, after = ranks.run(save_and_go_on, kind, sizes, str(folder))[0]
    assert any((at_save[name] != after[name]).any() for name in after)
    return Saved(kind, folder, at_save, after)


@pytest.fixture(scope="module", params=list(SAVED))
def saved(
    ranks: Ranks, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Saved:
    kind = request.param
    return saved_by(ranks, kind, SAVED[kind], tmp_path_factory.mktemp(kind))


@pytest.fixture(scope="module")
def groups(ranks: Ranks, server: Server) -> Iterator[dict[int, Ranks]]:
    with Ranks(2, server) as two:
        yield {4: ranks, 2: two}


def test_what_is_saved_is_what_was_there_before_the_next_update(saved: Saved) -> None:
    whole = contents(saved.state)
    learns = {name for name, p in model(saved.kind).named_parameters() if p.requires_grad}
    assert len(whole) == len(saved.at_save) + 3 * len(learns)
    for name, weight in saved.at_save.items():
        rounded = whole[f"policy.weights.{name}"].to(TYPES[saved.kind])
        np.testing.assert_array_equal(rounded.to(torch.float64), weight, err_msg=name)
    assert all(whole[f"policy.optimizer.{name}.step"] == 1.0 for name in learns)


def test_the_saved_model_is_the_folder_that_transformers_would_write(saved: Saved) -> None:
    whole = model(saved.kind)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(torch.from_numpy(saved.at_save[name]))
    whole.save_pretrained(saved.folder / "theirs")
    ours, theirs = (saved.folder / name / "model.safetensors" for name in ("model", "theirs"))
    assert ours.read_bytes() == theirs.read_bytes()


def test_a_run_goes_on_in_the_same_layout_with_the_same_bits(
    ranks: Ranks, saved: Saved, tmp_path: Path
) -> None:
    found = ranks.run(go_on, saved.kind, SAVED[saved.kind], str(saved.state), str(tmp_path))
    for weights in found:
        assert_equal(weights, saved.after)
    assert_same(tmp_path, saved.state)


def test_a_run_goes_on_in_other_layouts_and_sharded(
    groups: dict[int, Ranks], saved: Saved, tmp_path: Path
) -> None:
    for count, layouts in OTHERS[saved.kind].items():
        for sizes in layouts:
            target = tmp_path / f"{count} {sizes}"
            arguments = (saved.kind, sizes, str(saved.state), str(target))
            (weights, *_) = groups[count].run(go_on, *arguments)
            assert_same(target, saved.state)
            saved.check_update(weights)


@pytest.mark.parametrize("kind", ["tied", "experts"])
def test_megatron_goes_on_from_a_checkpoint_of_fsdp2(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    sharded, target = saved_by(ranks, kind, None, tmp_path), tmp_path / "pieces"
    (weights, *_) = ranks.run(go_on, kind, SAVED[kind], str(sharded.state), str(target))
    assert_same(target, sharded.state)
    sharded.check_update(weights)


def save_on_a_full_disk(kind: str, folder: str) -> list[int | None]:
    """Save where one rank's files may not grow, then where they may; the system's answers."""
    strategy = strategy_of(kind, SAVED[kind])
    usual, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    told: list[int | None] = []
    for turn, limit in enumerate((2000, usual)):
        if dist.get_rank() == 1:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, most))
        try:
            write(strategy, Path(folder, str(turn)))
            told.append(None)
        except OSError as error:
            told.append(error.errno)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (usual, most))
    return told


def test_a_disk_that_is_full_on_one_rank_is_told_on_all_and_the_next_save_holds(
    ranks: Ranks, tmp_path: Path
) -> None:
    assert ranks.run(save_on_a_full_disk, "untied", str(tmp_path)) == [[errno.EFBIG, None]] * 4
    assert not (tmp_path / "0/.metadata").exists()
    assert contents(tmp_path / "1")
