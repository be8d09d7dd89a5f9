"""What a sharded model keeps, hands out and takes in: states, exports, folders read in shards."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable
from ctypes import CDLL
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from tests.contract.test_fsdp2 import (
    LR,
    OUTPUTS,
    POLICY,
    Arrays,
    Layout,
    arrays,
    batch_of,
    exported,
    mesh_of,
    model_of,
    objective_of,
    place,
    shares_of,
    strategy_on_rank,
)
from tests.ranks import Ranks
from tests.recorded import VOCABULARY
from tests.small_models import digits_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from winnow.config.model import LoraAdapter
from winnow.errors import ModelError
from winnow.learning.batch import MicroBatch
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding, cores_per_rank
from winnow.learning.shards import copy_to_host, write_model
from winnow.learning.strategy import LossResult, Strategy, local
from winnow.models.causal_lm import freeze, load_causal_lm
from winnow.models.lora import add_lora
from winnow.models.sharded_loading import to_saved_layout
from winnow.models.value import load_reward_model, load_value_model
from winnow.ranks.workers import scores_of

EXACT = torch.float64
CPU = torch.device("cpu")


def mine(strategy: FSDP2Strategy, kind: str = "tied") -> list[MicroBatch]:
    size = sequence.size() if (sequence := strategy._sequence) else 1
    shares = shares_of(batch_of(kind, EXACT), strategy.mesh.size() // size)
    return shares[place(strategy.mesh) // size]


def update(strategy: Any, micro: list[MicroBatch], kind: str = "tied") -> dict[str, float]:
    asked = OUTPUTS.get(kind, POLICY)
    stats = strategy.forward_backward(micro, asked, objective_of(kind))
    return stats | strategy.optimizer_step(LR)  # type: ignore[no-any-return]


def assert_equal(found: Arrays, wanted: Arrays) -> None:
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_array_equal(found[name], array, err_msg=name)


def poisoned() -> tuple[dict[str, float], Arrays, Arrays, dict[str, float]]:
    strategy = strategy_on_rank("tied", EXACT, Layout())
    update(strategy, mine(strategy))
    before = exported(strategy)

    def loss(micro: MicroBatch, outputs: Any) -> LossResult:
        return LossResult(
            outputs["logprob"].sum() * (math.nan if dist.get_rank() == 2 else 1.0), {}
        )

    strategy.forward_backward(mine(strategy), POLICY, loss)
    skipped = strategy.optimizer_step(LR)
    after = exported(strategy)
    return skipped, before, after, update(strategy, mine(strategy))


def test_what_is_not_finite_on_one_rank_is_skipped_on_all(ranks: Ranks) -> None:
    for skipped, before, after, following in ranks.run(poisoned):
        assert skipped["skipped"] == 1.0
        assert not math.isfinite(skipped["grad_norm"])
        assert_equal(after, before)
        assert following["skipped"] == 0.0


def through_dcp(kind: str, folder: str) -> tuple[Arrays, Arrays, Arrays]:
    """Weights after two updates: at once; stopped after one, on two layouts."""
    strategy = strategy_on_rank(kind, EXACT, Layout())
    update(strategy, mine(strategy, kind), kind)
    dcp.save(strategy.state_dict(), checkpoint_id=folder)
    update(strategy, mine(strategy, kind), kind)
    found = [exported(strategy)]
    for layout in (Layout(), Layout((2, 2), Sharding(offload=True), sequence=2)):
        resumed = strategy_on_rank(kind, EXACT, layout)
        # It has answered, and must not answer from what it had gathered then.
        resumed.forward(mine(resumed, kind), OUTPUTS.get(kind, POLICY))
        state = resumed.blank_state()
        dcp.load(state, checkpoint_id=folder)
        resumed.load_state_dict(state)
        update(resumed, mine(resumed, kind), kind)
        found.append(exported(resumed))
    return found[0], found[1], found[2]


def test_training_goes_on_from_a_distributed_checkpoint_on_any_layout(
    ranks: Ranks, tmp_path: Path
) -> None:
    for undisturbed, resumed, elsewhere in ranks.run(through_dcp, "lora", str(tmp_path)):
        assert_equal(resumed, undisturbed)
        for name, wanted in undisturbed.items():
            np.testing.assert_allclose(elsewhere[name], wanted, atol=1e-12)


HYBRID = Layout((2, 2), Sharding(offload=True))


def write_on_rank(kind: str, dtype: torch.dtype, folder: str, size: int) -> Any:
    """Write a model on shards and on replicas; this rank's files, and the weights."""
    found = []
    for name, layout in {"shards": Layout(), "replicas": HYBRID}.items():
        strategy = strategy_on_rank(kind, dtype, layout)
        group = dist.new_group()
        with patch("winnow.learning.shards.MODEL_FILE_BYTES", size):
            shards = copy_to_host(strategy.export_shards(), strategy.mesh)
            try:
                written = write_model(strategy.model, shards, Path(folder, name), group)
            except OSError as error:
                return type(error).__name__
        dist.barrier()
        found.append([path.name for path in written])
    return found, exported(strategy)


@pytest.mark.parametrize(
    ("kind", "dtype", "size"),
    [("tied", torch.bfloat16, 1 << 30), ("experts", torch.float32, 10_000)],
)
def test_ranks_write_a_folder_that_anyone_can_load(
    ranks: Ranks, tmp_path: Path, kind: str, dtype: torch.dtype, size: int
) -> None:
    answers = ranks.run(write_on_rank, kind, dtype, str(tmp_path), size)
    model: Any = model_of(kind, dtype)
    for turn, name in enumerate(("shards", "replicas")):
        folder = tmp_path / name
        written = sorted(file for (found, _) in answers for file in found[turn])
        assert written == sorted(path.name for path in folder.iterdir())
        assert (len(written) > 4) == (size == 10_000)
        if size > 10_000:
            model.save_pretrained(tmp_path / "theirs")
            theirs, ours = tmp_path / "theirs/model.safetensors", folder / "model.safetensors"
            assert ours.read_bytes() == theirs.read_bytes()
        model.config.save_pretrained(folder)
        loaded = load_causal_lm(str(folder), dtype, CPU)
        assert {tensor.dtype for tensor in load_files(folder).values()} == {dtype}
        weights = answers[0][1]
        pieces = to_saved_layout(
            model, {n: torch.from_numpy(array) for n, array in weights.items()}
        )
        assert_equal(by_name(arrays(dict(loaded.named_parameters()))), by_name(weights))
        assert_equal(arrays(load_files(folder)), by_name(arrays(pieces)))
        if size == 10_000:
            busy = [bool(found[turn]) for found, _ in answers]
            assert busy == [True] * 4, "every rank puts files together"
            assert max(path.stat().st_size for path in folder.glob("*.safetensors")) < 20_000


def by_name(given: Arrays) -> Arrays:
    return dict(sorted(given.items()))


def load_files(folder: Path) -> dict[str, Tensor]:
    """The tensors of a folder's files, in the order of the model."""
    found: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = json.loads(index.read_text())["weight_map"]
        assert {n: (folder / f).is_file() for n, f in names.items()} == dict.fromkeys(found, True)
    return dict(sorted(found.items()))


def write_few_rows(folder: str) -> None:
    mesh = init_device_mesh("cpu", (4,))
    rows = {"two": torch.arange(6.0).view(2, 3), "nine": torch.arange(9.0).bfloat16()}
    shards: dict[str, Tensor] = {n: distribute_tensor(t, mesh, [Shard(0)]) for n, t in rows.items()}
    assert dist.get_rank() < 2 or not local(shards["two"]).numel()
    shards["alike"] = torch.ones(1)
    write_model(digits_model(), shards, Path(folder), dist.new_group())


def test_a_weight_with_fewer_rows_than_ranks_is_written_whole(ranks: Ranks, tmp_path: Path) -> None:
    ranks.run(write_few_rows, str(tmp_path))
    found = load_file(tmp_path / "model.safetensors")
    assert found["two"].tolist() == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert found["nine"].tolist() == list(range(9))
    assert found["nine"].dtype == torch.bfloat16
    assert found["alike"].tolist() == [1.0]


def test_a_file_that_one_rank_cannot_write_is_told_on_all(ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "shards" / "model.safetensors").mkdir(parents=True)
    told = ranks.run(write_on_rank, "tied", torch.float32, str(tmp_path), 1 << 30)
    assert told == ["IsADirectoryError"] * 4
    assert [path.name for path in (tmp_path / "shards").iterdir()] == ["model.safetensors"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models as folders, of one file or several."""
    root = tmp_path_factory.mktemp("folders")
    for kind in ("tied", "untied", "critic", "reward model", "experts"):
        model: Any = model_of(kind, torch.float32)
        size = "20KB" if kind == "untied" else "5GB"
        model.save_pretrained(root / kind, max_shard_size=size)
    return {path.name: path for path in root.iterdir()}


LOADERS: dict[str, tuple[Any, str]] = {
    "tied": (load_causal_lm, "tied"),
    "untied": (load_causal_lm, "untied"),
    "experts": (load_causal_lm, "experts"),
    "critic": (load_value_model, "critic"),
    "new critic": (load_value_model, "tied"),
}


def prepared(model: Any, kind: str, change: str) -> nn.Module:
    if change == "lora":
        add_lora(model, LoraAdapter(rank=2), seed=4)
    if change == "frozen":
        freeze(model, ["*.layers.0.*"])
    return model  # type: ignore[no-any-return]


def both_ways(
    kind: str, folder: str, dtype: torch.dtype, change: str, offload: bool
) -> tuple[list[Arrays], list[Arrays], list[Any]]:
    """Weights and outputs of a model loaded whole, and of one read in shards."""
    load, _ = LOADERS[kind]
    mesh = mesh_of((2, 2) if offload else (1, 4))
    sharding = Sharding(offload=offload)
    made = []
    for hollow in (False, True):
        model = prepared(load(folder, dtype, CPU, hollow=hollow), kind, change)
        made.append(FSDP2Strategy(model, mesh, sharding, vocab_size=VOCABULARY))
    name = {"new critic": "critic"}.get(kind, kind)
    asked = OUTPUTS.get(name, POLICY)
    micro = shares_of(batch_of(name, dtype), 4)[place(mesh)]
    outputs, weights, stats = [], [], []
    for strategy in made:
        found = strategy.forward(micro, asked)
        outputs.append(arrays({f"{i} {n}": v for i, f in enumerate(found) for n, v in f.items()}))
        stats.append(update(strategy, micro, name))
        weights.append(exported(strategy))
    return weights, outputs, stats


@pytest.mark.parametrize(
    ("kind", "dtype", "change", "offload"),
    [
        ("tied", torch.bfloat16, "lora", False),
        ("untied", torch.bfloat16, "frozen", True),
        ("critic", torch.bfloat16, "", False),
        ("new critic", torch.float32, "", True),
        ("experts", torch.float32, "", False),
    ],
)
def test_a_model_read_in_shards_is_the_one_that_is_loaded_whole(
    ranks: Ranks,
    folders: dict[str, Path],
    kind: str,
    dtype: torch.dtype,
    change: str,
    offload: bool,
) -> None:
    folder = folders[LOADERS[kind][1]]
    assert (len(list(folder.glob("*.safetensors"))) > 1) == (kind == "untied")
    arguments = (kind, str(folder), dtype, change, offload)
    for weights, outputs, stats in ranks.run(both_ways, *arguments):
        assert_equal(weights[1], weights[0])
        assert_equal(outputs[1], outputs[0])
        assert stats[1:] == stats[:1]


CONVERSATIONS = [np.arange(3, 3 + length) % VOCABULARY for length in (9, 2, 31, 5, 17, 10, 64)]
"""More than fit evenly on any number of ranks, and of one some ranks get none."""
LAYOUTS = [((1, 4), False), ((2, 2), False), ((1, 4), True)]
"""Replicas, shards; and whether weights lie in the host's memory."""


def scored(strategy: Strategy) -> list[list[float]]:
    """Of all together, of each alone, of five, of one, with all that a rank may be left without."""
    asked = [(7, 9999), (7, 1), (7, 40), (5, 1), (1, 9999)]
    return [scores_of(strategy, CONVERSATIONS[:count], budget) for count, budget in asked]


def scored_on_rank(folder: str) -> list[list[list[float]]]:
    found = []
    for shape, offload in LAYOUTS:
        model = load_reward_model(folder, torch.float32, CPU, hollow=True)
        assert max(p.untyped_storage().nbytes() for p in model.parameters()) <= 8
        found.append(scored(FSDP2Strategy(model, mesh_of(shape), Sharding(offload=offload))))
    return found


@pytest.mark.bits
def test_a_reward_model_scores_on_ranks_as_alone(ranks: Ranks, folders: dict[str, Path]) -> None:
    folder = str(folders["reward model"])
    wanted = scored(Strategy(load_reward_model(folder, torch.float32, CPU)))
    assert len({round(score, 3) for score in wanted[1]}) == len(CONVERSATIONS)
    for of_rank in ranks.run(scored_on_rank, folder):
        for layout, found in zip(LAYOUTS, of_rank, strict=True):
            assert found[1] == wanted[1], layout  # run alone, wherever: the same bits
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours == pytest.approx(theirs, rel=0, abs=3e-6), layout


def start_peak() -> float:
    """Have this process's peak be that from now on; MiB that it has now."""
    CDLL(None).malloc_trim(0)  # what earlier tests left free would hide what is taken
    Path("/proc/self/clear_refs").write_text("5")
    return resident("VmRSS")


def memory_of_loading(folder: str) -> tuple[float, float]:
    """MiB: what reading a model in shards took of this process at most, and what it keeps."""
    mesh = mesh_of((1, 4))
    before = start_peak()
    hollow = load_causal_lm(folder, torch.float32, CPU, hollow=True)
    strategy = FSDP2Strategy(hollow, mesh, Sharding())
    kept = sum(local(parameter).nbytes for parameter in strategy.model.parameters())
    return resident("VmHWM") - before, kept / 2**20


def resident(key: str) -> float:
    found = re.search(rf"{key}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) / 1024


def test_no_rank_ever_holds_a_model_that_is_read_in_shards(ranks: Ranks, tmp_path: Path) -> None:
    model = digits_model(vocab_size=1 << 17, hidden_size=256)
    model.save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").stat().st_size / 2**20
    assert whole > 128
    for peak, kept in ranks.run(memory_of_loading, str(tmp_path)):
        assert kept == pytest.approx(whole / 4, rel=0.01)
        # Its rows, and the pages of the file where they are.
        assert peak < 0.75 * whole


WEIGHTS, INDEX, NORM = "model.safetensors", "model.safetensors.index.json", "model.norm.weight"


def holds(file: str, text: str) -> Callable[[Path], Any]:
    return lambda folder: (folder / file).write_text(text)


def indexed(text: str) -> Callable[[Path], Any]:
    """The index of a model in several files, of which there is none."""

    def damage(folder: Path) -> None:
        (folder / WEIGHTS).unlink()
        (folder / INDEX).write_text(text)

    return damage


def rewritten(change: Callable[[dict[str, Tensor]], Any]) -> Callable[[Path], Any]:
    def damage(folder: Path) -> None:
        weights = load_file(folder / WEIGHTS)
        change(weights)
        save_file(weights, folder / WEIGHTS)

    return damage


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: os.truncate(folder / WEIGHTS, 900), "cannot read model.safetensors"),
        (lambda folder: (folder / WEIGHTS).unlink(), "has no model.safetensors"),
        (indexed("{}"), f"cannot read {INDEX}: 'weight_map'"),
        (
            indexed('{"weight_map": {"' + NORM + '": "model-1.safetensors"}}'),
            "cannot read model-1.s",
        ),
        (rewritten(lambda weights: weights.pop(NORM)), rf"missing \(1, such as {NORM}\)"),
        (
            rewritten(lambda weights: weights.update({NORM: torch.ones(7)})),
            rf"weights are of another shape \(1, such as {NORM}\)",
        ),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (holds("config.json", "{"), "cannot read its config"),
        (shutil.rmtree, "is not a local folder|cannot read its config"),
    ],
)
def test_a_folder_that_cannot_be_read_in_shards_is_told_in_one_line(
    folders: dict[str, Path], tmp_path: Path, damage: Callable[[Path], Any], told: str
) -> None:
    shutil.copytree(folders["tied"], tmp_path / "model")
    load_causal_lm(str(tmp_path / "model"), torch.float32, CPU, hollow=True)
    damage(tmp_path / "model")
    with pytest.raises(ModelError, match=told) as raised:
        load_causal_lm(str(tmp_path / "model"), torch.float32, CPU, hollow=True)
    assert "\n" not in str(raised.value)
    assert "model.path" in str(raised.value)


def test_ranks_share_the_cores_of_their_machine(ranks: Ranks) -> None:
    each = max(len(os.sched_getaffinity(0)) // ranks.world, 1)
    assert ranks.run(cores_per_rank) == [each] * ranks.world
