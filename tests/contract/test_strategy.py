"""What every strategy promises, on small random models with grouped-query attention.

An implementation joins by a line in `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from tests.devices import DEVICE
from tests.objectives import policy_objective
from tests.written import answer, written
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from winnow.errors import CheckpointError
from winnow.learning.batch import Batch, pack, split_update
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding, whole
from winnow.learning.strategy import LossResult, Strategy
from winnow.models.causal_lm import load_causal_lm
from winnow.types import Group, Prompt

VOCABULARY, TOKENIZER = 40, 37
TEMPERATURE = 0.8
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10 if DEVICE.type == "cpu" else 1e-6}
"""transformers computes cosines of positions in fp32, and a GPU rounds them in another way."""
BOTH = frozenset({"logprob", "entropy"})
OBJECTIVE = policy_objective("ppo_clip", {"clip_high": 0.28}, entropy_coef=0.01)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
}


@dataclass(frozen=True)
class Implementation:
    """How to make a strategy from a folder, and how to look at its gradients."""

    make: Callable[..., Strategy]
    gradients: Callable[[Any], dict[str, Tensor]]


def make_single(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Strategy:
    options = {"temperature": TEMPERATURE, "vocab_size": TOKENIZER, **options}
    return Strategy(load_causal_lm(str(folder), dtype, DEVICE), **options)


def take_gradients(strategy: Strategy | FSDP2Strategy) -> dict[str, Tensor]:
    """The gradients gathered so far, which are cleared."""
    named = dict(strategy.model.named_parameters())
    gradients = {n: p.grad.clone() for n, p in named.items() if p.grad is not None}
    strategy.model.zero_grad()
    return gradients


class Alone(FSDP2Strategy):
    """Sharded over this process alone; its state is shown whole."""

    def state_dict(self) -> dict[str, Any]:
        return joined(super().state_dict())  # type: ignore[no-any-return]


def joined(state: Any) -> Any:
    if isinstance(state, Tensor):
        return whole(state, DEVICE)
    return {name: joined(value) for name, value in state.items()}


def alone(model: Any, **options: Any) -> Alone:
    if not dist.is_initialized():
        backend = "gloo" if DEVICE.type == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    options = {"temperature": TEMPERATURE, "vocab_size": TOKENIZER, **options}
    return Alone(model, init_device_mesh(DEVICE.type, (1,)), Sharding(), **options)


def make_alone(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Alone:
    return alone(load_causal_lm(str(folder), dtype, DEVICE), **options)


def take_whole_gradients(strategy: Alone) -> dict[str, Tensor]:
    gradients = take_gradients(strategy)
    return {name: whole(gradient, DEVICE) for name, gradient in gradients.items()}


@pytest.fixture(scope="module", autouse=True)
def one_process() -> Iterator[None]:
    """Nobody else should find the group that `make_alone` made."""
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


IMPLEMENTATIONS = {
    "single": Implementation(make_single, take_gradients),
    "fsdp2": Implementation(make_alone, take_whole_gradients),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Implementation:
    return IMPLEMENTATIONS[request.param]


CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=True),
}


def randomize(tensors: dict[str, Tensor]) -> None:
    generator = torch.Generator().manual_seed(7)
    for tensor in tensors.values():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.data.copy_(1 + 0.2 * noise if tensor.ndim == 1 else 0.3 * noise)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models, whose norms are random too, written as Hugging Face folders."""
    root = tmp_path_factory.mktemp("models")
    for name, config in CONFIGS.items():
        model = AutoModelForCausalLM.from_config(config)
        randomize(dict(model.named_parameters()))
        model.save_pretrained(root / name)
    return {path.name: path for path in root.iterdir()}


def groups_of(lengths: Iterable[Sequence[tuple[int, int]]], seed: int = 0) -> list[Group]:
    """Groups of answers by (prompt, answer) lengths; a group has the first one's prompt."""
    rng = np.random.default_rng(seed)
    groups = []
    for i, answers in enumerate(lengths):
        prompt = rng.integers(0, TOKENIZER, answers[0][0])
        made = []
        for _, n in answers:
            ids = rng.integers(0, TOKENIZER, n).tolist()
            segment = written(ids, rng.normal(-3.5, 0.3, n).tolist())
            made.append(answer(segment, reward=float(rng.normal())))
        groups.append(Group(i, Prompt(str(i), prompt, "", "", None), tuple(made)))
    return groups


RAGGED = [[(3, 9), (3, 1), (3, 14)], [(1, 2), (1, 30)], [(6, 7), (6, 8), (6, 9), (6, 10)]]


def learnable(groups: Sequence[Group]) -> Batch:
    """A batch with its columns; `old` is near what the sampler said, for clips to bind."""
    batch = pack(groups)
    per_sample = torch.tensor([hash_of(group) for group in groups for _ in group.answers])
    noise = torch.tensor([math.sin(t * 12.9898) for t in batch.token_ids.tolist()]).double()
    lengths = batch.offsets.diff()
    batch.columns["old"] = batch.behav.double() + 0.2 * noise
    batch.columns["advantages"] = per_sample.repeat_interleave(lengths) + noise
    return batch


def hash_of(group: Group) -> float:
    return math.sin(1.0 + group.id)


def every(batch: Batch, budget: int = 64) -> list[Any]:
    shares, every = DEVICE.type == "cpu", range(batch.n_groups)
    return split_update(batch, every, budget, shares_prompts=shares).micro_batches(0)


def set_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    columns = {name: column.to(dtype) for name, column in batch.columns.items()}
    return replace(batch, columns=columns)


def relative(a: Tensor, b: Tensor) -> float:
    a, b = a.cpu().double(), b.cpu().double()
    return float((a - b).norm() / b.norm().clamp(min=1e-30))


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == wanted.keys()
    errors = {name: relative(found[name], wanted[name]) for name in wanted}
    assert max(errors.values()) <= tolerance, errors


def own_norms(model: nn.Module) -> None:
    """Norms in the model's own precision: transformers computes them in fp32 whatever it is."""
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):

            def forward(x: Tensor, norm: Any = module) -> Tensor:
                return (
                    norm.weight
                    * x
                    / (x.pow(2).mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()
                )

            module.forward = forward  # type: ignore[method-assign]


def weights_of(strategy: Strategy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in strategy.export_weights()}


def test_two_updates_are_adamw_by_hand(
    implementation: Implementation, folders: dict[str, Path]
) -> None:
    betas, eps, decay, clip = (0.9, 0.98), 1e-8, 0.1, 0.5
    options = {"betas": betas, "eps": eps, "weight_decay": decay, "grad_clip": clip}
    strategy = implementation.make(folders["qwen2"], torch.float64, **options)
    twin = implementation.make(folders["qwen2"], torch.float64, **options)
    micro = every(set_dtype(learnable(groups_of(RAGGED)), torch.float64))
    wanted = weights_of(strategy)
    first = {n: torch.zeros_like(t) for n, t in wanted.items()}
    second = {n: torch.zeros_like(t) for n, t in wanted.items()}
    for step, lr in ((1, 1e-2), (2, 3e-3)):
        twin.forward_backward(micro, BOTH, OBJECTIVE)
        gradients = implementation.gradients(twin)
        norm = math.sqrt(sum(float(g.square().sum()) for g in gradients.values()))
        assert norm > clip
        strategy.forward_backward(micro, BOTH, OBJECTIVE)
        stats = strategy.optimizer_step(lr)
        assert stats == {"grad_norm": pytest.approx(norm), "skipped": 0.0}
        for name, weight in wanted.items():
            gradient = gradients[name] * clip / norm
            first[name] = betas[0] * first[name] + (1 - betas[0]) * gradient
            second[name] = betas[1] * second[name] + (1 - betas[1]) * gradient**2
            ahead = first[name] / (1 - betas[0] ** step)
            size = (second[name] / (1 - betas[1] ** step)).sqrt() + eps
            wanted[name] = weight * (1 - lr * decay) - lr * ahead / size
        assert_close(weights_of(strategy), wanted, 1e-10)
        twin.load_state_dict(strategy.state_dict())


@pytest.mark.parametrize(("dtype", "bad"), [(torch.float32, math.inf), (torch.bfloat16, math.nan)])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_reported(
    implementation: Implementation, folders: dict[str, Path], dtype: torch.dtype, bad: float
) -> None:
    strategy = implementation.make(folders["qwen3"], dtype)
    micro = every(learnable(groups_of(RAGGED)))
    strategy.forward_backward(micro, BOTH, OBJECTIVE)
    strategy.optimizer_step(1e-3)
    before = copied(strategy.state_dict())

    def poisoned(micro: Any, outputs: Any) -> LossResult:
        return LossResult(outputs["logprob"].sum() * bad, {})

    strategy.forward_backward(micro, BOTH, poisoned)
    stats = strategy.optimizer_step(1e-3)
    assert stats["skipped"] == 1.0
    assert not math.isfinite(stats["grad_norm"])
    assert_same_state(strategy.state_dict(), before)
    strategy.forward_backward(micro, BOTH, OBJECTIVE)
    assert strategy.optimizer_step(1e-3)["skipped"] == 0.0


def copied(state: Any) -> Any:
    if isinstance(state, Tensor):
        return state.clone()
    return {name: copied(value) for name, value in state.items()}


def assert_same_state(a: Any, b: Any) -> None:
    if isinstance(a, Tensor):
        assert torch.equal(a, b)
        return
    assert a.keys() == b.keys()
    for name in a:
        assert_same_state(a[name], b[name])


@pytest.mark.bits
@pytest.mark.parametrize(("name", "dtype"), [("qwen3", torch.float32), ("llama", torch.bfloat16)])
def test_training_continues_with_the_same_bits_from_a_state(
    implementation: Implementation,
    folders: dict[str, Path],
    name: str,
    dtype: torch.dtype,
    tmp_path: Path,
) -> None:
    strategy = implementation.make(folders[name], dtype, weight_decay=0.1)
    micro = every(learnable(groups_of(RAGGED)))

    def update(trained: Strategy) -> None:
        trained.forward_backward(micro, BOTH, OBJECTIVE)
        trained.optimizer_step(1e-2)

    update(strategy)
    torch.save(strategy.state_dict(), tmp_path / "state.pt")
    update(strategy)
    resumed = implementation.make(folders[name], dtype, weight_decay=0.1)
    resumed.load_state_dict(torch.load(tmp_path / "state.pt"))
    update(resumed)
    assert_same_state(resumed.state_dict(), strategy.state_dict())


def test_a_state_of_another_model_is_refused_by_name(
    implementation: Implementation, folders: dict[str, Path]
) -> None:
    strategy = implementation.make(folders["qwen2"])
    before = copied(strategy.state_dict())
    with pytest.raises(CheckpointError, match=r"does not match this model: .*k_(norm|proj)"):
        strategy.load_state_dict(implementation.make(folders["qwen3"]).state_dict())
    wide = copied(strategy.state_dict())
    wide["weights"]["model.norm.weight"] = torch.ones(33)
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight: \[33\].*\[32\]"):
        strategy.load_state_dict(wide)
    other = implementation.make(folders["qwen2"], torch.float64)
    with pytest.raises(CheckpointError, match=r"float64.*float32"):
        strategy.load_state_dict(other.state_dict())
    assert_same_state(strategy.state_dict(), before)


@pytest.mark.parametrize(("name", "tied"), [("qwen3", True), ("llama", False)])
@pytest.mark.bits
def test_exported_weights_load_as_a_hugging_face_model(
    implementation: Implementation,
    folders: dict[str, Path],
    name: str,
    tied: bool,
    tmp_path: Path,
) -> None:
    from safetensors.torch import save_file

    strategy = implementation.make(folders[name])
    batch = learnable(groups_of(RAGGED))
    micro = every(batch, 1000)
    strategy.forward_backward(micro, BOTH, OBJECTIVE)
    strategy.optimizer_step(1e-2)
    weights = dict(strategy.export_weights())
    assert ("lm_head.weight" in weights) is not tied
    save_file({n: t.contiguous() for n, t in weights.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((folders[name] / "config.json").read_text())
    reloaded = implementation.make(tmp_path)
    (mine,), (theirs,) = strategy.forward(micro, BOTH), reloaded.forward(micro, BOTH)
    assert torch.equal(mine["logprob"], theirs["logprob"])
    half = dict(strategy.export_weights(torch.bfloat16))
    assert half.keys() == weights.keys()
    assert {tensor.dtype for tensor in half.values()} == {torch.bfloat16}


def test_bf16_weights_keep_what_is_less_than_their_step(
    implementation: Implementation, folders: dict[str, Path]
) -> None:
    strategy = implementation.make(folders["qwen3"], torch.bfloat16, grad_clip=None)
    micro = every(learnable(groups_of(RAGGED)))
    before = weights_of(strategy)["model.layers.0.self_attn.q_norm.weight"]
    master = "model.layers.0.self_attn.q_norm.weight"
    moved = []
    for _ in range(8):
        strategy.forward_backward(micro, frozenset({"logprob"}), imitation)
        strategy.optimizer_step(4e-4)
        moved.append(float((strategy.state_dict()["weights"][master] - before.float()).abs().max()))
    after = weights_of(strategy)[master]
    assert after.dtype == torch.bfloat16
    assert 0 < moved[0] < 2e-3 < moved[-1]
    assert not torch.equal(after, before)


def imitation(micro: Any, outputs: Any) -> LossResult:
    return LossResult(-outputs["logprob"].sum() / micro.counts.tokens, {})
