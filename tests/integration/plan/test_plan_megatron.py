"""A plan of Megatron's ranks, stage by stage, against numbers worked out by hand."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest
import torch.distributed as dist
from tests.integration.plan.test_plan import (
    ATTENTION,
    HEADS,
    LAYERS,
    RECIPE,
    SHAPE,
    SHORT,
    H,
    M,
    S,
    T,
    V,
    roles_of,
)
from tests.small_models import described

from winnow.config.load import load_recipe
from winnow.errors import ConfigError, ModelError
from winnow.plan.estimate import GIB, Machine, find_gpu
from winnow.plan.plan import PlanRequest, list_changes, make_plan
from winnow.plan.rank import PolicyRun, run_rank

pytestmark = pytest.mark.skipif(
    find_spec("megatron") is None, reason="needs megatron-core"
)  # to import it takes seconds, in each process that collects

TENSOR, STAGES = 2, 2
BLOCKS = 100_000  # bytes, as what is small is rounded up
LAYOUT = (
    *SHORT,
    "model.gradient_checkpointing=true",
    "trainer/strategy=megatron",
    f"trainer.strategy.tensor={TENSOR}",
    f"trainer.strategy.pipeline={STAGES}",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return described(tmp_path_factory.mktemp("model"), **SHAPE)


def planned(folder: str, stage: int, ranks: int, *overrides: str) -> PolicyRun:
    given = [*LAYOUT, f"trainer.strategy.ranks={ranks}", f"model.path={folder}", *overrides]
    return run_rank(load_recipe(RECIPE, given), folder, stage=stage)


@pytest.fixture(scope="module")
def stages(folder: str) -> list[PolicyRun]:
    return [planned(folder, stage, TENSOR * STAGES) for stage in range(STAGES)]


def test_a_rank_holds_its_part_of_weights_gradients_masters_and_moments(
    stages: list[PolicyRun],
) -> None:
    layers = LAYERS // STAGES * (ATTENTION + 3 * H * M) // TENSOR
    norms = LAYERS // STAGES * (2 * H + 2 * H // HEADS)
    for rank, rest in zip(stages, (0, H), strict=True):  # the last stage has a norm more
        own, roles = layers + norms + V * H // TENSOR + rest, roles_of(rank)
        assert 2 * own <= roles["weights"] <= 2 * own + BLOCKS
        assert 12 * own <= roles["optimizer state"] <= 12 * own + BLOCKS
        # Those of a pass's last parameters may be on their way to fp32.
        assert 4 * own <= roles["gradients"] <= 4 * own + BLOCKS
        assert rank.parameters == {
            "policy": LAYERS * (ATTENTION + 3 * H * M + 2 * H + 2 * H // HEADS) + 2 * V * H + H
        }
    assert not dist.is_initialized()


def test_data_parallel_ranks_share_masters_and_moments(tmp_path: Path) -> None:
    # Of many tensors each rank gets half of the weights, of few it may get more.
    larger = described(tmp_path, **SHAPE | {"num_hidden_layers": 4 * STAGES})
    alone, shared = (roles_of(planned(larger, 0, n * TENSOR * STAGES)) for n in (1, 2))
    assert shared["gradients"] == alone["gradients"]
    assert shared["optimizer state"] == pytest.approx(alone["optimizer state"] / 2, rel=0.1)


def test_the_first_stage_keeps_inputs_of_as_many_micro_batches_as_there_are_stages(
    tmp_path: Path,
) -> None:
    deeper = described(tmp_path, **SHAPE | {"num_hidden_layers": 2 * STAGES})

    def inputs(rank: PolicyRun) -> int:
        part = (T // TENSOR, 1, H)
        held = rank.tracker.peak("policy update").storages
        return sum(h.shape == part and h.role == "activations" for h, _ in held)

    first, second = (inputs(planned(deeper, stage, TENSOR * STAGES)) for stage in range(STAGES))
    assert first - second >= (STAGES - 1) * 2


def test_flop_of_all_stages_are_those_of_the_model(stages: list[PolicyRun]) -> None:
    work = [rank.tracker.phases["policy update"].work for rank in stages]
    found = sum(flop * times for each in work for (flop, _, _), times in each.items())
    assert found == pytest.approx(flop_of(ATTENTION + 3 * H * M), rel=0.03)


def flop_of(layer: int) -> float:
    """An update's FLOP over a tensor rank of each stage, where a token goes through `layer`.

    Half of the positions are seen in the mean. Layers run once more, as do logits.
    """
    attended = LAYERS * 4 * H * T * (T + 1) / 2 * 4.5
    return 2 * (8 * LAYERS * layer * T + 2 * S * H * V * 4 + attended) / TENSOR


def test_tokens_are_gathered_before_each_matrix_pair(stages: list[PolicyRun]) -> None:
    sent = stages[0].tracker.phases["policy update"].sent
    # Two pairs a layer: forwards, again, and backwards for the inputs and for the outputs.
    whole = 2 * T * H * 2 * (LAYERS // STAGES) * 2
    assert sent["allgather_base"] == pytest.approx(4 * whole, rel=0.15)
    assert sent["send"] == sent["recv"] == 2 * T * H * 2 // TENSOR


def test_experts_get_as_many_tokens_each(tmp_path: Path) -> None:
    layout = ("trainer.strategy.expert=2", "trainer.strategy.pipeline=1")
    mixture = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
    mixture |= {"num_experts": 8, "moe_intermediate_size": M // 2}
    own = described(tmp_path, **SHAPE, **mixture, num_experts_per_tok=2)
    phase = planned(own, 0, 2, *layout).tracker.phases["policy update"]
    # Half of a rank's tokens, there and back, forwards twice and backwards.
    tokens = T // TENSOR * 2 * 2 * H
    assert phase.sent["alltoall_base"] == pytest.approx(2 * LAYERS * 6 * tokens, rel=0.1)
    found = sum(each * times for (each, _, _), times in phase.work.items())
    assert found == pytest.approx(flop_of(ATTENTION + H * 8 + 2 * 3 * H * M // 2), rel=0.02)


def test_a_plan_of_stages_says_what_their_bubble_takes(folder: str) -> None:
    small = ("sampling.groups_per_step=8", "rollout.n=4", "trainer.mini_batch_groups=4")
    own = (f"model.path={folder}", *LAYOUT, "trainer.strategy.ranks=4", *small)
    machine = Machine(*find_gpu("h100"), nodes=1, per_node=4)
    plan = make_plan(PlanRequest(RECIPE, own, machine))
    assert "trainer.strategy.ranks=4" in plan["overrides"]
    learning = plan["learning"]
    rounds, updates = learning["micro_batches"], 2
    assert learning["bubble"] == pytest.approx(updates / (rounds + updates))
    assert plan["faults"] == []
    assert plan["run"]["hours"] > 0
    # Masters and two moments, once, and the model.
    size = plan["parameters"]["policy"]
    assert plan["transfers"]["checkpoint_gib"] == pytest.approx(14 * size / GIB)
    with pytest.raises(ConfigError, match=r"have 3 GPUs, and 4 ranks of the policy take 4"):
        make_plan(PlanRequest(RECIPE, own, Machine(*find_gpu("h100"), 1, 3)))
    eight = "trainer.strategy.ranks=8"
    cut = (*own, eight, "trainer.strategy.tensor=8", "trainer.strategy.pipeline=1")
    with pytest.raises(ModelError, match=r"trainer\.strategy\.tensor=8 does not divide"):
        make_plan(PlanRequest(RECIPE, cut, Machine(*find_gpu("h100"), 1, 8)))


def test_changes_of_a_layout_are_tried() -> None:
    found = list_changes(
        load_recipe(RECIPE, [*LAYOUT, f"trainer.strategy.ranks={TENSOR * STAGES}"])
    )
    assert found[:4] == [
        [f"trainer.strategy.{key}={n}"] for key in ("tensor", "pipeline") for n in (4, 8)
    ]
