"""What every strategy promises, on small random models with grouped-query attention.

An implementation joins by a line in `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from tests.examples import examples
from tests.objectives import policy_objective
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

from winnow.errors import CheckpointError, ModelError
from winnow.learning.batch import Batch, all_micro_batches, gather_tokens, micro_batches, pack
from winnow.learning.fsdp2 import FSDP2Strategy, Sharding, whole
from winnow.learning.strategy import LossResult, Strategy
from winnow.models.causal_lm import load_causal_lm
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan

VOCABULARY, TOKENIZER = 40, 37
TEMPERATURE = 0.8
CPU = torch.device("cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
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
    return Strategy(load_causal_lm(str(folder), dtype, CPU), **options)


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
        return whole(state, CPU)
    return {name: joined(value) for name, value in state.items()}


def make_alone(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Alone:
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    options = {"temperature": TEMPERATURE, "vocab_size": TOKENIZER, **options}
    model = load_causal_lm(str(folder), dtype, CPU)
    return Alone(model, init_device_mesh("cpu", (1,)), Sharding(), **options)


def take_whole_gradients(strategy: Alone) -> dict[str, Tensor]:
    gradients = take_gradients(strategy)
    return {name: whole(gradient, CPU) for name, gradient in gradients.items()}


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


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Random models, whose norms are random too, written as Hugging Face folders."""
    from transformers import (
        LlamaConfig,
        LlamaForCausalLM,
        Qwen2Config,
        Qwen2ForCausalLM,
        Qwen3Config,
        Qwen3ForCausalLM,
    )

    window = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
    models = {
        "qwen3": Qwen3ForCausalLM(Qwen3Config(**SIZES, head_dim=8, tie_word_embeddings=True)),
        "qwen2": Qwen2ForCausalLM(Qwen2Config(**SIZES, tie_word_embeddings=True)),
        "llama": LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=False)),
        "window": Qwen2ForCausalLM(Qwen2Config(**SIZES, **window)),
    }
    folder = tmp_path_factory.mktemp("models")
    for name, model in models.items():
        generator = torch.Generator().manual_seed(len(name))
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.data = 1 + 0.2 * noise if parameter.ndim == 1 else 0.3 * noise
        model.save_pretrained(folder / name)
    return {name: folder / name for name in models}


def groups_of(lengths: Iterable[Sequence[tuple[int, int]]], seed: int = 0) -> list[Group]:
    """Groups of answers by (prompt, answer) lengths; a group has the first one's prompt."""
    rng = np.random.default_rng(seed)
    groups = []
    for i, answers in enumerate(lengths):
        prompt = rng.integers(0, TOKENIZER, answers[0][0])
        made = []
        for _, n in answers:
            segment = Segment(
                rng.integers(0, TOKENIZER, n),
                rng.normal(-3.5, 0.3, n).astype(np.float32),
                (VersionSpan(0, n),),
            )
            made.append(Answer(Trajectory((segment,), "stop"), Score(float(rng.normal()), 0.0)))
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
    return micro_batches(batch, range(batch.n_groups), budget)


def set_dtype(batch: Batch, dtype: torch.dtype) -> Batch:
    columns = {name: column.to(dtype) for name, column in batch.columns.items()}
    return replace(batch, columns=columns)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm().clamp(min=1e-30))


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


def reference(
    folder: Path, batch: Batch, dtype: torch.dtype, attention: str
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies [T] by transformers alone, one sequence at a time."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    if dtype == torch.float64:
        own_norms(model)
    logps, entropies = [], []
    for start, stop in zip(batch.offsets[:-1], batch.offsets[1:], strict=True):
        ids = batch.token_ids[start:stop]
        with torch.no_grad():
            logits = model(ids[None]).logits[0, :-1, :TOKENIZER] / TEMPERATURE
        logp = logits.log_softmax(-1)
        zero = logp.new_zeros(1)
        logps.append(torch.cat([zero, logp.gather(1, ids[1:, None])[:, 0]]))
        entropies.append(torch.cat([zero, -(logp.exp() * logp).sum(-1)]))
    mask = batch.gen_mask
    return torch.cat(logps) * mask, torch.cat(entropies) * mask


@pytest.mark.parametrize(
    ("name", "dtype", "attention"),
    [
        *((name, torch.float32, "eager") for name in ("qwen3", "qwen2", "llama", "window")),
        # Eager attention takes its softmax in fp32.
        *((name, torch.float64, "sdpa") for name in ("qwen3", "window")),
    ],
)
@pytest.mark.parametrize("checkpointing", [False, True])
def test_packed_log_probs_are_those_of_transformers_for_each_sequence_alone(
    implementation: Implementation,
    folders: dict[str, Path],
    name: str,
    dtype: torch.dtype,
    attention: str,
    checkpointing: bool,
) -> None:
    batch = pack(groups_of(RAGGED))
    strategy = implementation.make(folders[name], dtype, gradient_checkpointing=checkpointing)
    micro = all_micro_batches(batch, 40)
    found = strategy.forward(micro, BOTH)
    logp, entropy = reference(folders[name], batch, dtype, attention)
    tolerance = TOLERANCE[dtype]
    for key, wanted in (("logprob", logp), ("entropy", entropy)):
        values = gather_tokens(batch, micro, [outputs[key] for outputs in found])
        torch.testing.assert_close(values, wanted, atol=tolerance, rtol=0)
        assert not values[~batch.gen_mask].any()


@pytest.mark.parametrize("name", ["qwen3", "llama", "window"])
def test_bf16_is_near_fp32(
    implementation: Implementation, folders: dict[str, Path], name: str
) -> None:
    batch = pack(groups_of(RAGGED))
    micro = all_micro_batches(batch, 1000)
    exact, rounded = (
        implementation.make(folders[name], dtype).forward(micro, BOTH)[0]["logprob"]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert rounded.dtype == torch.float32
    assert float((exact - rounded).abs().mean()) < 0.1


@pytest.mark.parametrize("dtype", TOLERANCE)
@examples(6, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 5), st.lists(st.integers(1, 24), min_size=1, max_size=4)),
        min_size=1,
        max_size=4,
    ),
    budget=st.integers(1, 120),
    order=st.randoms(use_true_random=False),
)
def test_gradients_do_not_depend_on_split_packing_or_order(
    implementation: Implementation,
    folders: dict[str, Path],
    dtype: torch.dtype,
    lengths: list[tuple[int, list[int]]],
    budget: int,
    order: Any,
) -> None:
    strategy = shared_strategy(implementation, folders["qwen3"], dtype)
    # Two tokens give queries and keys no gradient at all; a longer sample makes one to compare.
    lengths = [*lengths, (2, [12])]
    groups = groups_of([[(prompt, n) for n in answers] for prompt, answers in lengths])
    shuffled = [replace(g, answers=tuple(order.sample(g.answers, len(g.answers)))) for g in groups]
    order.shuffle(shuffled)
    gradients = []
    for arranged, max_tokens in ((groups, 10_000), (shuffled, budget)):
        micro = every(set_dtype(learnable(arranged), dtype), max_tokens)
        order.shuffle(micro)
        stats = strategy.forward_backward(micro, BOTH, OBJECTIVE)
        gradients.append((implementation.gradients(strategy), stats))
    (whole, whole_stats), (split, split_stats) = gradients
    assert_close(split, whole, TOLERANCE[dtype])
    for key, value in whole_stats.items():
        assert split_stats[key] == pytest.approx(value, abs=1e-4)


_SHARED: dict[Any, Strategy] = {}


def shared_strategy(implementation: Implementation, folder: Path, dtype: torch.dtype) -> Strategy:
    """One strategy for all examples, which only gather gradients."""
    key = (id(implementation), folder, dtype)
    if key not in _SHARED:
        _SHARED[key] = implementation.make(folder, dtype)
    return _SHARED[key]


@pytest.mark.parametrize("name", ["qwen3", "window"])
def test_gradient_checkpointing_gives_the_same_gradients(
    implementation: Implementation, folders: dict[str, Path], name: str
) -> None:
    micro = every(learnable(groups_of(RAGGED)))
    plain, recomputed = (
        gradients_of(implementation, folders[name], micro, gradient_checkpointing=flag)
        for flag in (False, True)
    )
    assert_close(recomputed, plain, 1e-6)


def test_compiled_blocks_are_sharded_as_others_are(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    micro = every(learnable(groups_of(RAGGED)))
    fsdp2 = IMPLEMENTATIONS["fsdp2"]
    plain, compiled = (
        gradients_of(fsdp2, folders["qwen3"], micro, compiles=c, gradient_checkpointing=c)
        for c in (False, True)
    )
    assert_close(compiled, plain, 1e-5)
    assert counters["stats"]["unique_graphs"] > 1


def gradients_of(
    implementation: Implementation, folder: Path, micro: Sequence[Any], **options: Any
) -> dict[str, Tensor]:
    strategy = implementation.make(folder, **options)
    strategy.forward_backward(micro, BOTH, OBJECTIVE)
    return implementation.gradients(strategy)


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


def test_a_gradient_within_the_bound_is_not_clipped(
    implementation: Implementation, folders: dict[str, Path]
) -> None:
    micro = every(learnable(groups_of(RAGGED)))
    after = []
    for clip in (None, 1e6):
        strategy = implementation.make(folders["llama"], grad_clip=clip)
        strategy.forward_backward(micro, BOTH, OBJECTIVE)
        strategy.optimizer_step(1e-3)
        after.append(weights_of(strategy))
    assert all(torch.equal(after[0][name], after[1][name]) for name in after[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
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


@pytest.mark.parametrize("name", ["qwen3", "llama"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
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
    with pytest.raises(CheckpointError, match=r"not of this model: .*k_(norm|proj)"):
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


def test_an_adapter_that_is_not_there_cannot_be_exported(
    implementation: Implementation, folders: dict[str, Path]
) -> None:
    with pytest.raises(ModelError, match="has none"):
        next(iter(implementation.make(folders["qwen3"]).export_weights(adapter_only=True)))


def test_bf16_weights_keep_what_is_less_than_their_step(
    implementation: Implementation, folders: dict[str, Path]
) -> None:
    strategy = implementation.make(folders["qwen3"], torch.bfloat16, grad_clip=None)
    micro = every(learnable(groups_of(RAGGED)))
    before = weights_of(strategy)["model.layers.0.self_attn.q_norm.weight"]
    master = "model.layers.0.self_attn.q_norm.weight"
    moved = []
    for _ in range(60):
        strategy.forward_backward(micro, frozenset({"logprob"}), imitation)
        strategy.optimizer_step(2e-4)
        moved.append(float((strategy.state_dict()["weights"][master] - before.float()).abs().max()))
    after = weights_of(strategy)[master]
    assert after.dtype == torch.bfloat16
    assert 0 < moved[0] < 2e-3 < moved[-1]
    assert not torch.equal(after, before)


def imitation(micro: Any, outputs: Any) -> LossResult:
    return LossResult(-outputs["logprob"].sum() / micro.counts.tokens, {})
