"""States of ranks that hold any rectangles of a model's tensors: written, and read in others."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.contract.test_fsdp2 import model_of
from tests.cuts import Cut
from tests.ranks import Ranks
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from winnow.errors import CheckpointError
from winnow.learning.shards import State, copy_to_host, read_shards, write_shards
from winnow.learning.strategy import local, tensors_of

MOMENTS = "exp_avg", "exp_avg_sq"


def whole_state(kind: str) -> State:
    """Weights and moments without a number twice, the same in every process."""
    weights = {n: t.detach().clone() for n, t in tensors_of(model_of(kind, torch.float32)).items()}
    optimizer = {}
    generator = torch.Generator().manual_seed(5)
    for name, tensor in weights.items():
        tensor += torch.randn(tensor.shape, generator=generator)
        moments = {key: torch.randn(tensor.shape, generator=generator) for key in MOMENTS}
        optimizer[name] = {"step": torch.tensor(3.0), **moments}
    return {"weights": weights, "optimizer": optimizer}


@cache
def groups() -> dict[int, Any]:
    return {size: dist.new_group(list(range(size))) for size in (1, 2, 4)}


def flat(state: State) -> dict[str, Tensor]:
    """Every tensor of a state by its path, whole where it is a DTensor."""
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= {f"{key}.{name}": tensor for name, tensor in flat(value).items()}
        else:
            found[key] = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def differing(found: State, wanted: State) -> tuple[int, list[str]]:
    """How many tensors were compared, and the names of those with other bits."""
    ours, theirs = flat(found), flat(wanted)
    assert ours.keys() == theirs.keys()
    pairs = {name: (local(tensor), local(theirs[name])) for name, tensor in ours.items()}
    return len(pairs), [name for name, (a, b) in pairs.items() if not torch.equal(a, b)]


def blank(state: State) -> State:
    """Room for a state, of zeros, which none of its numbers is."""
    return {k: blank(v) if isinstance(v, dict) else torch.zeros_like(v) for k, v in state.items()}


def without_steps(folder: str) -> Any:
    """What a rank has of a checkpoint before the first step, and of one where a name has none."""
    whole, group = whole_state("untied"), groups()[4]
    saved = {"weights": whole["weights"], "optimizer": {}}
    found, mesh = [], init_device_mesh("cpu", (4,))
    cut = Cut.of(dist.get_rank(), 2, 2)
    for turn in range(2):
        at = Path(folder, str(turn))
        write_shards(copy_to_host({"policy": cut.state(saved)}, mesh), at, group)
        state = {"policy": blank(cut.state(whole))}
        read_shards(state, at, group)
        found.append((list(state["policy"]["optimizer"]), list(cut.state(saved)["optimizer"])))
        assert differing(state["policy"], cut.state(saved))[1] == []
        saved["optimizer"] = {n: m for n, m in whole["optimizer"].items() if "layers.1" in n}
    return found


def test_what_has_made_no_step_has_no_moments_after_reading(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(without_steps, str(tmp_path))
    assert [first for first, _ in answers] == [([], [])] * 4
    for found, wanted in (second for _, second in answers):
        assert found == wanted
    assert [bool(found) for _, (found, _) in answers] == [False, False, True, True]


def lose_on_one(folder: Path, state: State) -> Path:
    return folder.with_name("elsewhere") if dist.get_rank() == 2 else folder


def change(name: str, act: Callable[[Path], Any]) -> Callable[[Path, State], Path]:
    def damage(folder: Path, state: State) -> Path:
        if dist.get_rank() == 0:
            act(folder / name)
        dist.barrier()
        return folder

    return damage


def grow(folder: Path, state: State) -> Path:
    if dist.get_rank() == 3:
        state["policy"]["weights"]["model.norm.weight"] = torch.ones(7)
    return folder


def add(folder: Path, state: State) -> Path:
    if dist.get_rank() == 1:
        state["policy"]["weights"]["model.extra.weight"] = torch.ones(7)
    return folder


DAMAGES: dict[str, tuple[Callable[[Path, State], Path], str]] = {
    "no folder on one rank": (lose_on_one, "No such file"),
    "a short index": (change(".metadata", lambda p: p.write_bytes(p.read_bytes()[:-9])), "trunc"),
    "no index": (change(".metadata", Path.unlink), "No such file"),
    "an index of something else": (change(".metadata", lambda p: p.write_bytes(b"N.")), "NoneType"),
    "a short file": (change("__1_0.distcp", lambda p: p.write_bytes(p.read_bytes()[:-999])), ""),
    "no file": (change("__3_0.distcp", Path.unlink), "No such file"),
    "another shape on one rank": (grow, "Size mismatch"),
    "another name on one rank": (add, "Missing key in checkpoint state_dict: policy.weights.model"),
}


def read_damaged(folder: str) -> list[tuple[str, str]]:
    """What each kind of damage is told as on this rank."""
    group, cut = groups()[4], Cut.of(dist.get_rank(), 2, 2)
    state = copy_to_host(
        {"policy": cut.state(whole_state("untied"))}, init_device_mesh("cpu", (4,))
    )
    told = []
    for number, (damage, _) in enumerate(DAMAGES.values()):
        place = Path(folder, str(number))
        write_shards(state, place, group)
        taken = {"policy": {key: dict(value) for key, value in state["policy"].items()}}
        try:
            read_shards(taken, damage(place, taken), group)
        except CheckpointError as error:
            told.append((type(error).__name__, str(error)))
        dist.barrier(group)
    return told


def test_what_cannot_be_read_on_one_rank_is_told_on_all(ranks: Ranks, tmp_path: Path) -> None:
    answers = ranks.run(read_damaged, str(tmp_path), timeout_s=60.0)
    assert answers == answers[:1] * 4
    assert len(answers[0]) == len(DAMAGES)
    for (name, (_, reason)), (_, text) in zip(DAMAGES.items(), answers[0], strict=True):
        assert reason in text, name
        assert text.startswith(str(tmp_path)), name
        assert " cannot be read: " in text
        assert text.endswith("; use another checkpoint")
        assert "\n" not in text
