"""What a sharded model keeps, hands out and takes in: states, exports, folders read in shards."""

from __future__ import annotations

import asyncio
import json
import math
import re
import shutil
from collections.abc import Callable
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
    alone,
    arrays,
    batch_of,
    exported,
    gradients_of,
    mesh_of,
    model_of,
    objective_of,
    place,
    shares_of,
    strategy_on_rank,
)
from tests.cuts import Cut
from tests.ranks import Ranks
from tests.recorded import VOCABULARY
from tests.small_models import digits_model
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from winnow.config.model import LoraAdapter
from winnow.data.sort_digits import build_tokenizer
from winnow.errors import ModelError
from winnow.learning.batch import MicroBatch, gather_tokens, micro_batches
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding, whole
from winnow.learning.shards import on_host, write_model, write_shards
from winnow.learning.strategy import LossResult, Strategy, local
from winnow.models.causal_lm import freeze, load_causal_lm, model_writer
from winnow.models.lora import adapter_writer, add_lora
from winnow.models.sharded_loading import as_saved
from winnow.models.value import load_reward_model, load_value_model
from winnow.runs.checkpoint import file_entry
from winnow.runs.remote_learner import LearnerWorker
from winnow.runs.scoring_ranks import scores_of
from winnow.workers.local import SharedStore

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


def poisoned(bad: float) -> tuple[dict[str, float], Arrays, Arrays, dict[str, float]]:
    strategy = strategy_on_rank("tied", EXACT, Layout())
    update(strategy, mine(strategy))
    before = exported(strategy)

    def loss(micro: MicroBatch, outputs: Any) -> LossResult:
        return LossResult(outputs["logprob"].sum() * (bad if dist.get_rank() == 2 else 1.0), {})

    strategy.forward_backward(mine(strategy), POLICY, loss)
    skipped = strategy.optimizer_step(LR)
    after = exported(strategy)
    return skipped, before, after, update(strategy, mine(strategy))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_on_one_rank_is_skipped_on_all(ranks: Ranks, bad: float) -> None:
    for skipped, before, after, following in ranks.run(poisoned, bad):
        assert skipped["skipped"] == 1.0
        assert not math.isfinite(skipped["grad_norm"])
        assert_equal(after, before)
        assert following["skipped"] == 0.0


def through_dcp(kind: str, folder: str) -> tuple[Arrays, Arrays, Arrays]:
    """Weights after three updates: at once; stopped after two, on two layouts."""
    strategy = strategy_on_rank(kind, EXACT, Layout())
    for _ in range(2):
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


@pytest.mark.parametrize("kind", ["tied", "lora"])
def test_training_goes_on_from_a_distributed_checkpoint_on_any_layout(
    ranks: Ranks, kind: str, tmp_path: Path
) -> None:
    for undisturbed, resumed, elsewhere in ranks.run(through_dcp, kind, str(tmp_path)):
        assert_equal(resumed, undisturbed)
        for name, wanted in undisturbed.items():
            np.testing.assert_allclose(elsewhere[name], wanted, atol=1e-12)


def from_single(path: str, kept: bool) -> Arrays:
    strategy = strategy_on_rank("tied", EXACT, Layout(sharding=Sharding(kept)))
    strategy.forward(mine(strategy), POLICY)
    strategy.load_state_dict(torch.load(path))
    update(strategy, mine(strategy))
    return exported(strategy)


@pytest.mark.parametrize("kept", [False, True])
def test_a_state_of_one_process_goes_on_sharded(ranks: Ranks, tmp_path: Path, kept: bool) -> None:
    strategy = alone("tied", EXACT)
    micro = [each for own in shares_of(batch_of("tied", EXACT), 4) for each in own if each.lengths]
    update(strategy, micro)
    torch.save(strategy.state_dict(), tmp_path / "state.pt")
    update(strategy, micro)
    wanted = exported(strategy)
    for found in ranks.run(from_single, str(tmp_path / "state.pt"), not kept):
        assert found.keys() == wanted.keys()
        for name in wanted:
            np.testing.assert_allclose(found[name], wanted[name], atol=1e-12)


def exported_on_rank(kind: str) -> Arrays:
    return exported(strategy_on_rank(kind, EXACT, Layout()))


@pytest.mark.parametrize("kind", ["untied", "lora", "frozen", "critic"])
def test_weights_are_exported_whole_on_every_rank(ranks: Ranks, kind: str) -> None:
    wanted = exported(Strategy(model_of(kind, EXACT)))
    for found in ranks.run(exported_on_rank, kind):
        if kind == "lora":
            assert list(found) == list(wanted)
            for name in wanted:
                np.testing.assert_allclose(found[name], wanted[name], atol=1e-12)
        else:
            assert_equal(found, wanted)


def without_adapter_first() -> tuple[Arrays, Arrays, list[bool]]:
    """Gradients where the pass without the adapter came first, and where there was none."""
    found = []
    for is_first in (True, False):
        strategy = strategy_on_rank("lora", EXACT, Layout())
        micro = mine(strategy, "lora")
        if is_first:
            with strategy.adapter_off():
                off = strategy.forward(micro, POLICY)
            on = strategy.forward(micro, POLICY)
        strategy.forward_backward(micro, POLICY, objective_of("lora"))
        found.append(arrays(gradients_of(strategy)))
    moved = [bool((a["logprob"] != b["logprob"]).any()) for a, b in zip(off, on, strict=True)]
    return found[0], found[1], moved


def test_an_adapter_learns_after_a_pass_without_it(ranks: Ranks) -> None:
    for after, without, moved in ranks.run(without_adapter_first):
        assert without
        assert_equal(after, without)
        assert any(moved)


def answer_frozen(kind: str) -> tuple[Arrays, dict[str, float], int]:
    """This rank's part of the outputs, what a step in vain says, and optimizer states."""
    model = model_of(kind, torch.float32).requires_grad_(False)
    strategy = FSDP2Strategy(model, mesh_of((1, 4)), Sharding(), vocab_size=VOCABULARY)
    batch, micro = batch_of(kind, torch.float32), mine(strategy, kind)
    found = strategy.forward(micro, OUTPUTS.get(kind, POLICY))
    outputs = {
        name: gather_tokens(batch, micro, [each[name] for each in found])
        for name in OUTPUTS.get(kind, POLICY)
    }
    stats = strategy.optimizer_step(1.0)
    return arrays(outputs), stats, len(strategy.state_dict()["optimizer"])


@pytest.mark.parametrize("kind", ["tied", "reward model"])
def test_a_frozen_model_answers_on_ranks_as_it_does_alone(ranks: Ranks, kind: str) -> None:
    model = model_of(kind, torch.float32).requires_grad_(False)
    alone = Strategy(model, vocab_size=VOCABULARY)
    batch = batch_of(kind, torch.float32)
    micro = micro_batches(batch, range(batch.n_groups), 9999)
    (wanted,) = alone.forward(micro, OUTPUTS.get(kind, POLICY))
    found = ranks.run(answer_frozen, kind)
    for name, values in wanted.items():
        together = sum(outputs[name] for outputs, _, _ in found)
        there = arrays({name: gather_tokens(batch, micro, [values])})[name]
        assert np.abs(there).max() > 0.5
        np.testing.assert_allclose(together, there, atol=1e-5)
    for _, stats, states in found:
        assert (stats, states) == ({"grad_norm": 0.0, "skipped": 0.0}, 0)


HYBRID = Layout((2, 2), Sharding(offload=True))


def write_on_rank(kind: str, dtype: torch.dtype, folder: str, size: int) -> Any:
    """Write a model on shards, on replicas and from pieces; this rank's files, and the weights."""
    found = []
    for name, layout in {"shards": Layout(), "replicas": HYBRID, "pieces": Layout()}.items():
        strategy = strategy_on_rank(kind, dtype, layout)
        group = dist.new_group()
        with patch("winnow.learning.shards.MODEL_FILE_BYTES", size):
            shards = on_host(strategy.export_shards(), strategy.mesh)
            if name == "pieces":
                wholes = {n: whole(tensor, CPU) for n, tensor in shards.items()}
                pieces = Cut.of(dist.get_rank(), 2, 2).weights(wholes)
                assert sum(local(piece).numel() == 0 for piece in pieces.values()) > 9
                shards = on_host(pieces, strategy.mesh)
            try:
                written = write_model(strategy.model, shards, Path(folder, name), group)
            except OSError as error:
                return type(error).__name__
        dist.barrier()
        found.append([path.name for path in written])
    return found, exported(strategy)


@pytest.mark.parametrize(
    ("kind", "dtype", "size"),
    [
        ("tied", torch.bfloat16, 1 << 30),
        ("untied", torch.float32, 10_000),
        ("experts", torch.bfloat16, 1 << 30),
        ("experts", torch.float32, 10_000),
    ],
)
def test_ranks_write_a_folder_that_anyone_can_load(
    ranks: Ranks, tmp_path: Path, kind: str, dtype: torch.dtype, size: int
) -> None:
    answers = ranks.run(write_on_rank, kind, dtype, str(tmp_path), size)
    model: Any = model_of(kind, dtype)
    for turn, name in enumerate(("shards", "replicas", "pieces")):
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
        pieces = as_saved(model, {n: torch.from_numpy(array) for n, array in weights.items()})
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


def checkpoint_on_rank(kind: str, folder: str) -> Any:
    """Have a rank of production write a checkpoint; what it says it has written."""
    strategy, worker = (
        strategy_on_rank(kind, torch.float32, Layout()),
        object.__new__(LearnerWorker),
    )
    worker._strategies, worker._host_mesh = {"policy": strategy}, strategy.mesh
    worker._rank, worker._ranks, worker._saving = dist.get_rank(), 4, dist.new_group()
    worker._store, worker._save_model = SharedStore("learner", worker._rank), None
    worker._is_first, worker._model = worker._rank == 0, {}
    if worker._is_first:
        writer: Any = adapter_writer if kind == "lora" else model_writer
        worker._save_model = writer(strategy.model, build_tokenizer())
    with patch("winnow.learning.shards.MODEL_FILE_BYTES", 10_000):
        worker.copy()
        written = asyncio.run(worker.write(folder))
    return written, exported(strategy)


@pytest.mark.parametrize("kind", ["untied", "lora"])
def test_what_ranks_wrote_is_all_there_and_known_to_them(
    ranks: Ranks, tmp_path: Path, kind: str
) -> None:
    """In files so small that transformers would take them for those of an earlier save."""
    answers = ranks.run(checkpoint_on_rank, kind, str(tmp_path))
    told: dict[str, Any] = {}
    for written, _ in answers:
        assert not told.keys() & written.keys()
        told |= written
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert told == {str(path.relative_to(tmp_path)): file_entry(path) for path in found}
    assert {"ranks/.metadata", "model/tokenizer.json"} < told.keys()
    if kind == "untied":
        assert len(list((tmp_path / "model").glob("model-*.safetensors"))) == 4
        loaded = load_causal_lm(str(tmp_path / "model"), torch.float32, CPU)
        assert_equal(arrays(dict(loaded.named_parameters())), answers[0][1])


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
        ("tied", torch.float32, "", False),
        ("tied", torch.bfloat16, "lora", False),
        ("untied", torch.bfloat16, "frozen", True),
        ("critic", torch.bfloat16, "", False),
        ("new critic", torch.float32, "", True),
        ("experts", torch.float32, "", False),
        ("experts", torch.bfloat16, "frozen", True),
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
LAYOUTS = [((1, 2), False), ((1, 4), False), ((2, 2), False), ((4, 1), False), ((1, 4), True)]
"""Replicas, shards; and whether weights lie in the host's memory."""


def scored(strategy: Strategy) -> list[list[float]]:
    """Of all together, of each alone, of five, of one, with all that a rank may be left without."""
    asked = [(7, 9999), (7, 1), (7, 40), (5, 1), (1, 9999)]
    return [scores_of(strategy, CONVERSATIONS[:count], budget) for count, budget in asked]


def scored_on_rank(folder: str, dtype: torch.dtype) -> list[list[list[float]]]:
    found = []
    for shape, offload in LAYOUTS:
        model = load_reward_model(folder, dtype, CPU, hollow=True)
        assert max(p.untyped_storage().nbytes() for p in model.parameters()) <= 8
        found.append(scored(FSDP2Strategy(model, mesh_of(shape), Sharding(offload=offload))))
    return found


@pytest.mark.parametrize(("dtype", "tolerance"), [(EXACT, 3e-7), (torch.float32, 3e-6)])
def test_a_reward_model_scores_on_ranks_as_alone(
    ranks: Ranks, folders: dict[str, Path], dtype: torch.dtype, tolerance: float
) -> None:
    folder = str(folders["reward model"])
    wanted = scored(Strategy(load_reward_model(folder, dtype, CPU)))
    assert len({round(score, 3) for score in wanted[1]}) == len(CONVERSATIONS)
    for of_rank in ranks.run(scored_on_rank, folder, dtype):
        for layout, found in zip(LAYOUTS, of_rank, strict=True):
            assert found[1] == wanted[1], layout  # run alone, wherever: the same bits
            for ours, theirs in zip(found, wanted, strict=True):
                assert ours == pytest.approx(theirs, rel=0, abs=tolerance), layout


def memory_of_loading(folder: str) -> tuple[float, float]:
    """MiB: what reading a model in shards took of this process at most, and what it keeps."""
    mesh = mesh_of((1, 4))
    Path("/proc/self/clear_refs").write_text("5")  # the peak is that from now on
    before = resident("VmRSS")
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


def memory_of_saving(folder: str, size: int) -> float:
    """MiB that a copy of a model and its files took of this process at most."""
    hollow = load_causal_lm(folder, torch.float32, CPU, hollow=True)
    strategy = FSDP2Strategy(hollow, mesh_of((1, 4)), Sharding())
    group = dist.new_group()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    with patch("winnow.learning.shards.MODEL_FILE_BYTES", size):
        state = on_host({"policy": strategy.state_dict()}, strategy.mesh)
        shards = on_host(strategy.export_shards(), strategy.mesh)
        write_shards(state, Path(folder, "ranks"), group)
        state.clear()
        write_model(strategy.model, shards, Path(folder, "model"), group)
    return resident("VmHWM") - before


def test_no_rank_takes_more_memory_for_a_checkpoint_than_the_others(
    ranks: Ranks, tmp_path: Path
) -> None:
    model = digits_model(hidden_size=512, intermediate_size=2048, num_hidden_layers=8)
    model.save_pretrained(tmp_path)
    whole = (tmp_path / "model.safetensors").stat().st_size
    assert whole > 90 << 20
    peaks = ranks.run(memory_of_saving, str(tmp_path), whole // 8)
    assert max(peaks) < 1.2 * sum(peaks) / 4
    found = dict(sorted(load_files(tmp_path / "model").items()))
    wanted = dict(sorted(load_file(tmp_path / "model.safetensors").items()))
    assert_equal(arrays(found), arrays(wanted))


def break_file(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def lose_file(folder: Path) -> None:
    (folder / "model.safetensors").unlink()


def break_index(folder: Path) -> None:
    lose_file(folder)
    (folder / "model.safetensors.index.json").write_text("{}")


def lose_part(folder: Path) -> None:
    lose_file(folder)
    index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def lose_weight(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.pop("model.norm.weight"))


def misshape(folder: Path) -> None:
    rewrite(folder, lambda weights: weights.update({"model.norm.weight": torch.ones(7)}))


def rewrite(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (break_file, "cannot read model.safetensors"),
        (lose_file, "has no model.safetensors"),
        (break_index, "cannot read model.safetensors.index.json: 'weight_map'"),
        (lose_part, "cannot read model-00001-of-00002.safetensors"),
        (lose_weight, r"weights are missing \(1, such as model.norm.weight\)"),
        (misshape, r"weights are of another shape \(1, such as model.norm.weight\)"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "config.json").write_text("{"), "cannot read its config"),
        (shutil.rmtree, "no folder of this machine|cannot read its config"),
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
