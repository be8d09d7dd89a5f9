"""What a strategy promises of each kind of model: policies, adapters, critics, reward models.

Each is held against transformers' (and peft's) own classes, which read the same folder, run one
sequence at a time without packing, and take the gradient of a loss written anew here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel
from tests.contract.test_strategy import (
    CONFIGS,
    RAGGED,
    SIZES,
    TEMPERATURE,
    TOLERANCE,
    alone,
    assert_close,
    groups_of,
    own_norms,
    randomize,
    relative,
    take_whole_gradients,
)
from tests.contract.test_strategy import one_process as one_process
from tests.devices import DEVICE
from tests.written import answer, environment
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen2Config,
)

from winnow.config.model import LoraAdapter
from winnow.data.sort_digits import build_tokenizer
from winnow.errors import ConfigError, ModelError
from winnow.learning import strategy as strategies
from winnow.learning.batch import Batch, MicroBatch, gather_tokens, pack, split_update
from winnow.learning.runner import Output, Outputs
from winnow.learning.strategy import LossResult, Strategy
from winnow.models.causal_lm import decoder_layers, freeze, load_causal_lm
from winnow.models.folders import quiet_transformers
from winnow.models.fused_layers import fuse_layers
from winnow.models.lora import adapter_weights, adapter_writer, add_lora, load_lora
from winnow.models.value import load_reward_model, load_value_model


@dataclass(frozen=True)
class Case:
    """A kind of model: how we load it, how others do, and what of it is asked."""

    family: str
    load: Callable[[Path, torch.dtype], Any]
    """Ours, to be trained."""
    theirs: Callable[[Path, torch.dtype], nn.Module]
    outputs: frozenset[Output]


def load_policy(folder: Path, dtype: torch.dtype) -> Any:
    return load_causal_lm(str(folder / "base"), dtype, DEVICE)


def load_adapted(folder: Path, dtype: torch.dtype, adapter: str = "adapter") -> Any:
    model = load_policy(folder, dtype)
    load_lora(model, folder / adapter)
    return model


def load_scorer(folder: Path, dtype: torch.dtype) -> Any:
    return load_reward_model(str(folder / "scorer"), dtype, DEVICE).requires_grad_(True)


def their_policy(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=dtype, attn_implementation="sdpa"
    )


def their_adapted(folder: Path, dtype: torch.dtype, adapter: str = "adapter") -> Any:
    base = their_policy(folder, dtype)
    return PeftModel.from_pretrained(base, folder / adapter, is_trainable=True)


POLICY: frozenset[Output] = frozenset({"logprob", "entropy"})
CASES = {
    "policy tied": Case("qwen3", load_policy, their_policy, POLICY),
    "policy untied": Case("llama", load_policy, their_policy, POLICY),
    "policy qwen2": Case("qwen2", load_policy, their_policy, POLICY),
    "policy window": Case("window", load_policy, their_policy, POLICY),
    "lora tied": Case("qwen3", load_adapted, their_adapted, POLICY),
    "lora untied": Case("llama", load_adapted, their_adapted, POLICY),
    # Feed-forward layers without an adapter are fused, with weights that take no gradient.
    "lora attention": Case(
        "qwen3",
        partial(load_adapted, adapter="attention"),
        partial(their_adapted, adapter="attention"),
        POLICY,
    ),
    "value": Case(
        "qwen3",
        lambda folder, dtype: load_value_model(str(folder / "critic"), dtype, DEVICE),
        lambda folder, dtype: AutoModelForTokenClassification.from_pretrained(
            folder / "critic", dtype=dtype, attn_implementation="sdpa"
        ),
        frozenset({"value"}),
    ),
    "score": Case(
        "llama",
        load_scorer,
        lambda folder, dtype: AutoModelForSequenceClassification.from_pretrained(
            folder / "scorer", dtype=dtype, attn_implementation="sdpa"
        ),
        frozenset({"score"}),
    ),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(scope="session")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """For each family a random base, adapter, critic and reward model."""
    root = tmp_path_factory.mktemp("families")
    window: dict[str, Any] = {
        "use_sliding_window": True,
        "sliding_window": 5,
        "max_window_layers": 1,
    }
    configs = CONFIGS | {"window": Qwen2Config(**SIZES, **window)}
    classes = {
        "base": AutoModelForCausalLM,
        "critic": AutoModelForTokenClassification,
        "scorer": AutoModelForSequenceClassification,
    }
    for family, config in configs.items():
        for kind, auto in classes.items():
            config.num_labels = 1
            model = auto.from_config(config)
            randomize(dict(model.named_parameters()))
            model.save_pretrained(root / family / kind)
        for name, targets in (("adapter", "all-linear"), ("attention", ("q_proj", "v_proj"))):
            adapted = load_causal_lm(str(root / family / "base"), torch.float32, DEVICE)
            section = LoraAdapter(rank=3, alpha=5.0, target_modules=targets)  # type: ignore[arg-type]
            add_lora(adapted, section, seed=1)
            weights = dict(adapter_weights(adapted))
            randomize(weights)
            adapter_writer(adapted, build_tokenizer())(weights, root / family / name)
    return {family: root / family for family in configs}


def strategy_of(
    case: Case, families: dict[str, Path], dtype: torch.dtype, **options: Any
) -> Strategy:
    model = case.load(families[case.family], dtype)
    if dtype == torch.float64:
        fuse_layers(model)  # on a GPU, too: others compute norms in fp32
    return Strategy(model, temperature=TEMPERATURE, **options)


def batch_of(lengths: Sequence[Sequence[tuple[int, int]]], dtype: torch.dtype) -> Batch:
    """Answers by (prompt, answer) lengths, each token with a weight of its own."""
    batch = pack(groups_of(lengths))
    weights = np.random.default_rng(1).normal(size=len(batch.token_ids))
    batch.columns["weight"] = torch.from_numpy(weights).to(dtype)
    return batch


def loss(micro: MicroBatch, outputs: Outputs) -> LossResult:
    """A loss that no output can leave: each by its own nonlinearity and each token's weight."""
    weight = micro.columns["weight"]
    if "logprob" in outputs:
        terms = weight * (outputs["logprob"] + 0.3 * outputs["entropy"])
    elif "value" in outputs:
        terms = (outputs["value"] - weight).square() * micro.gen_mask
    else:
        terms = weight * outputs["score"].square()
    total = terms.sum() / micro.counts.tokens
    return LossResult(total, {"sum": total.detach() * micro.counts.tokens})


def theirs_of(case: Case, families: dict[str, Path], dtype: torch.dtype) -> Any:
    with quiet_transformers():
        model = case.theirs(families[case.family], dtype).eval()
    if dtype == torch.float64:
        own_norms(model)
    return model


def their_outputs(model: Any, case: Case, ids: Tensor, prompt: int) -> dict[Output, Tensor]:
    """Of one sequence, per token, aligned as ours."""
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    if logits.dtype == torch.bfloat16:
        logits = logits.float()
    if "score" in case.outputs:
        blank = logits.new_zeros(len(ids))
        return {"score": torch.cat([blank[:-1], logits])}
    blank = logits.new_zeros(prompt)
    if "value" in case.outputs:
        return {"value": torch.cat([blank, logits[prompt - 1 : -1, 0]])}
    logp = (logits[prompt - 1 : -1] / TEMPERATURE).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    chosen = logp.gather(1, ids[prompt:, None])[:, 0]
    return {"logprob": torch.cat([blank, chosen]), "entropy": torch.cat([blank, entropy])}


def their_gradients(
    case: Case, families: dict[str, Path], batch: Batch, dtype: torch.dtype
) -> tuple[dict[str, Tensor], dict[Output, Tensor]]:
    """One sequence at a time, unpacked, backward through all of them at once."""
    model = theirs_of(case, families, dtype)
    parts: list[dict[Output, Tensor]] = []
    total = torch.zeros((), dtype=torch.float64)
    for b, prompt in enumerate(batch.prompt_lengths.tolist()):
        where = slice(int(batch.offsets[b]), int(batch.offsets[b + 1]))
        outputs = their_outputs(model, case, batch.token_ids[where], prompt)
        parts.append({name: value.detach() for name, value in outputs.items()})
        weight = batch.columns["weight"][where]
        if "score" in outputs:
            total = total + weight[-1] * outputs["score"][-1] ** 2
        elif "value" in outputs:
            total = total + ((outputs["value"] - weight)[prompt:] ** 2).sum()
        else:
            mixed = outputs["logprob"] + 0.3 * outputs["entropy"]
            total = total + (weight * mixed)[prompt:].sum()
    (total / int(batch.loss_mask.sum())).backward()
    gradients = {
        name.removeprefix("base_model.model."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    joined = {name: torch.cat([part[name] for part in parts]) for name in case.outputs}
    return gradients, joined


def gradients_of(strategy: Strategy, micro: Sequence[MicroBatch], case: Case) -> dict[str, Tensor]:
    """The gradients, which are cleared; of half precision those of the fp32 masters."""
    strategy.forward_backward(micro, case.outputs, loss)
    masters = strategy._masters
    gradients = {n: m.grad.clone() for n, m in masters.items() if m.grad is not None}
    strategy._optimizer.zero_grad()
    return gradients


def whole(batch: Batch, budget: int = 10_000) -> list[MicroBatch]:
    shares = DEVICE.type == "cpu"
    every = range(batch.n_groups)
    return split_update(batch, every, budget, shares_prompts=shares).micro_batches(0)


def first_layer(model: Any) -> Any:
    """The model without its other layers."""
    del model.model.layers[1:]
    return model


def missing_compiler(x: Tensor) -> Tensor:
    raise RuntimeError("Cannot find a working triton installation")


def train(strategy: Strategy, case: Case, updates: int = 2) -> None:
    micro = whole(batch_of(RAGGED, torch.float32))
    for _ in range(updates):
        strategy.forward_backward(micro, case.outputs, loss)
        assert strategy.optimizer_step(1e-2)["skipped"] == 0.0


def bits_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


@pytest.fixture
def graphs() -> Iterator[Counter[str]]:
    """What was compiled in this test."""
    torch._dynamo.reset()
    counters.clear()
    yield counters["stats"]
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("dtype", "checkpointing"), [(torch.float32, True), (torch.float64, False)]
)
def test_outputs_and_gradients_are_those_of_hugging_face_for_each_sequence_alone(
    case: Case, families: dict[str, Path], dtype: torch.dtype, checkpointing: bool
) -> None:
    batch = batch_of(RAGGED, dtype)
    strategy = strategy_of(case, families, dtype, gradient_checkpointing=checkpointing)
    micro = whole(batch)
    gradients, outputs = their_gradients(case, families, batch, dtype)
    found = strategy.forward(micro, case.outputs)
    for name, wanted in outputs.items():
        ours = gather_tokens(batch, micro, [each[name] for each in found])
        assert relative(ours, wanted) <= TOLERANCE[dtype]
        assert torch.equal(ours == 0, wanted == 0)
    assert_close(gradients_of(strategy, micro, case), gradients, TOLERANCE[dtype])


@pytest.mark.parametrize("name", ["policy untied", "value"])
def test_a_conversation_rendered_anew_learns_what_its_contexts_do(
    name: str, families: dict[str, Path]
) -> None:
    case, dtype = CASES[name], torch.float64
    alone = batch_of([[(3, 9)], [(6, 7)], [(2, 5)]], dtype)
    first, second, third = groups_of([[(3, 9)], [(6, 7)], [(2, 5)]])
    segments = [each.answers[0].trajectory.segments[0] for each in (first, second, third)]
    anew = environment(second.prompt.token_ids.tolist(), restarts=True)
    joined = answer(segments[0], anew, segments[1], reward=1.0)
    batch = pack([replace(first, answers=(joined,)), third])
    batch.columns["weight"] = alone.columns["weight"]
    gradients, outputs = their_gradients(case, families, alone, dtype)
    strategy = strategy_of(case, families, dtype)
    found = strategy.forward(whole(batch), case.outputs)
    for output, expected in outputs.items():
        ours = gather_tokens(batch, whole(batch), [each[output] for each in found])
        assert relative(ours, expected) <= TOLERANCE[dtype]
    assert_close(gradients_of(strategy, whole(batch), case), gradients, TOLERANCE[dtype])


@pytest.mark.parametrize(
    ("name", "checkpointing", "backend"),
    [
        ("policy tied", False, "inductor"),
        # Traced all the same; code in C++ takes seconds of CPU a time.
        ("lora tied", True, "eager"),
        ("value", True, "eager"),
    ],
)
def test_compiled_blocks_learn_the_same_of_any_length_under_the_same_names(
    name: str,
    checkpointing: bool,
    backend: str,
    families: dict[str, Path],
    graphs: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=backend))
    case = CASES[name]
    if backend == "inductor":
        case = replace(case, load=lambda *place: first_layer(load_policy(*place)))
    made = partial(strategy_of, case, families, torch.float32, gradient_checkpointing=checkpointing)
    monkeypatch.setattr(strategies, "fuse_layers", lambda model: 0)  # as eager blocks are on a GPU
    eager, compiled = made(), made(compiles=True)
    for number, lengths in enumerate((RAGGED, RAGGED[:2], RAGGED[1:])):
        micro = whole(batch_of(lengths, torch.float32), 40)
        found, wanted = (gradients_of(each, micro, case) for each in (compiled, eager))
        assert_close(found, wanted, 2e-6)
        if not number:
            traced = graphs["unique_graphs"]
    assert 1 < traced == graphs["unique_graphs"]  # the probe is one
    ours, theirs = (each.forward(micro, case.outputs) for each in (compiled, eager))
    for one, other in zip(ours, theirs, strict=True):
        assert all(relative(one[n], other[n]) <= 1e-6 for n in case.outputs)
    assert graphs["unique_graphs"] > traced
    exported, names = (dict(each.export_weights()) for each in (compiled, eager))
    assert exported.keys() == names.keys()
    assert compiled.state_dict()["weights"].keys() == eager.state_dict()["weights"].keys()
    for layer in decoder_layers(compiled.model):  # an engine that shares it has its own code
        assert "forward" not in vars(layer)


def test_compiled_blocks_are_sharded_as_others_are(
    families: dict[str, Path], graphs: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    case, found = CASES["policy tied"], []
    for chosen in (False, True):
        options = {"compiles": chosen, "gradient_checkpointing": chosen}
        strategy = alone(first_layer(load_policy(families["qwen3"], torch.float32)), **options)
        strategy.forward_backward(whole(batch_of(RAGGED, torch.float32)), case.outputs, loss)
        found.append(take_whole_gradients(strategy))
    assert_close(found[1], found[0], 1e-5)
    assert graphs["unique_graphs"] > 1


@pytest.mark.host
def test_blocks_of_dense_models_are_compiled_by_default_on_cuda_alone(
    families: dict[str, Path],
    graphs: Counter[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))

    def is_compiled(folder: Path, kernels: str) -> bool:
        kind = type("OnDevice", (Strategy,), {"kernels": kernels})
        strategy = kind(load_policy(folder, torch.float32), compiles=None)
        return strategy._compiled is not None

    assert is_compiled(families["qwen3"], "cuda")
    assert not is_compiled(families["qwen3"], "cpu")
    monkeypatch.setattr(torch, "compile", lambda *_, **__: missing_compiler)
    assert not is_compiled(families["qwen3"], "cuda")
    assert "blocks run uncompiled: trainer.strategy.compile=true needs" in caplog.text


@pytest.mark.host
def test_without_a_compiler_one_line_says_what_is_needed(
    families: dict[str, Path], graphs: Counter[str]
) -> None:
    from torch._inductor import config
    from torch._inductor.utils import fresh_cache

    absent = config.patch({"cpp.cxx": ("/nowhere/g++",)})
    # A compiler may have been there before, and have left its code.
    with absent, fresh_cache(), pytest.raises(ConfigError) as told:
        strategy_of(CASES["policy tied"], families, torch.float32, compiles=True)
    line = str(told.value)
    assert line.startswith("trainer.strategy.compile=true needs a C++ compiler (g++, or CXX) and ")
    assert line.endswith("; install them or set it to false")
    assert "\n" not in line


@pytest.mark.parametrize(
    ("name", "fp32_head"),
    [("policy tied", True), ("policy untied", False), ("lora tied", False), ("lora untied", True)],
)
def test_bf16_gradients_are_as_near_to_the_exact_ones_as_hugging_faces(
    families: dict[str, Path], name: str, fp32_head: bool
) -> None:
    case = CASES[name]
    exact, _ = their_gradients(case, families, batch_of(RAGGED, torch.float32), torch.float32)
    batch = batch_of(RAGGED, torch.float32)
    rounded, _ = their_gradients(case, families, batch, torch.bfloat16)
    strategy = strategy_of(case, families, torch.bfloat16, fp32_head=fp32_head)
    ours = gradients_of(strategy, whole(batch), case)
    assert ours.keys() == exact.keys()
    assert {gradient.dtype for gradient in ours.values()} == {torch.float32}
    errors = [
        sum(relative(found[n], exact[n]) for n in exact) / len(exact) for found in (ours, rounded)
    ]
    assert 0 < errors[0] <= 1.3 * errors[1] < 0.2


@pytest.mark.parametrize(("dtype", "budget"), [(torch.float64, 25), (torch.bfloat16, 1)])
def test_gradients_do_not_depend_on_split_or_order(
    case: Case, families: dict[str, Path], dtype: torch.dtype, budget: int
) -> None:
    strategy = strategy_of(case, families, dtype)
    exact = torch.float32 if dtype == torch.bfloat16 else dtype
    batch = batch_of(RAGGED, exact)
    at_once = gradients_of(strategy, whole(batch), case)
    split = gradients_of(strategy, whole(batch, budget)[::-1], case)
    # In bf16 each micro-batch rounds its own sums.
    assert_close(split, at_once, TOLERANCE.get(dtype, 0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_adapter_trains_alone_and_is_all_that_is_kept(
    families: dict[str, Path], dtype: torch.dtype
) -> None:
    case = CASES["lora tied"]
    strategy = strategy_of(case, families, dtype)
    before = bits_of(strategy.model)
    train(strategy, case)
    after = bits_of(strategy.model)
    moved = {n for n in before if not torch.equal(before[n], after[n])}
    assert moved == {n for n in before if "lora_" in n}
    state = strategy.state_dict()
    assert state["weights"].keys() == state["optimizer"].keys() == moved
    # Seven linear layers in each of two blocks, each with A and B.
    assert len(moved) == 28


@pytest.mark.bits
def test_without_its_adapter_a_policy_is_the_one_it_started_as(families: dict[str, Path]) -> None:
    case, folder = CASES["lora tied"], families["qwen3"]
    strategy = strategy_of(case, families, torch.float32)
    freeze(strategy.model, ["*.layers.0.*"])
    trained = {n for n, p in strategy.model.named_parameters() if p.requires_grad}
    start = Strategy(load_policy(folder, torch.float32), temperature=TEMPERATURE)
    micro = whole(batch_of(RAGGED, torch.float32))
    (adapted,) = strategy.forward(micro, POLICY)
    (wanted,) = start.forward(micro, POLICY)
    with strategy.adapter_off():
        (off,) = strategy.forward(micro, POLICY)
    with pytest.raises(KeyError), strategy.adapter_off():
        raise KeyError
    (again,) = strategy.forward(micro, POLICY)
    assert torch.equal(off["logprob"], wanted["logprob"])
    assert torch.equal(again["logprob"], adapted["logprob"])
    assert float((adapted["logprob"] - wanted["logprob"]).abs().max()) > 0.1
    assert {n for n, p in strategy.model.named_parameters() if p.requires_grad} == trained
    with pytest.raises(ModelError, match="has none"), start.adapter_off():
        pass


@pytest.mark.parametrize(
    ("name", "dtype"), [("lora tied", torch.float64), ("lora untied", torch.float32)]
)
def test_exported_merged_or_alone_an_adapter_answers_alike_elsewhere(
    families: dict[str, Path], name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    case, folder = CASES[name], families[CASES[name].family]
    strategy = strategy_of(case, families, dtype)
    train(strategy, case)
    merged = dict(strategy.export_weights())
    plain = their_policy(folder, dtype)
    assert merged.keys() == dict(plain.named_parameters()).keys()
    plain.load_state_dict(merged, strict=False)
    alone = dict(strategy.export_weights(adapter_only=True))
    adapter_writer(strategy.model, build_tokenizer())(alone, tmp_path)
    adapted = PeftModel.from_pretrained(their_policy(folder, dtype), tmp_path)
    base = their_policy(folder, dtype)
    ids = torch.arange(1, 21)[None]
    for model in (plain, adapted, base):
        own_norms(model) if dtype == torch.float64 else None
    with torch.no_grad():
        logits = [model.eval()(ids).logits for model in (plain, adapted, base)]
    ours = Strategy(strategy.model)
    micro = whole(batch_of([[(1, 19)]], dtype))
    micro = [replace(each, token_ids=ids[0]) for each in micro]
    (found,) = ours.forward(micro, frozenset({"logprob"}))
    for given in logits[:2]:
        wanted = given[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        assert relative(found["logprob"][1:], wanted) <= TOLERANCE[dtype]
    assert relative(logits[1], logits[0]) <= TOLERANCE[dtype]
    assert relative(logits[2], logits[0]) > 0.05


@pytest.mark.bits
def test_dropout_of_an_adapter_acts_in_training_alone_and_by_seed(
    families: dict[str, Path],
) -> None:
    model = load_policy(families["qwen3"], torch.float32)
    add_lora(model, LoraAdapter(rank=2, alpha=4.0, dropout=0.5), seed=3)
    strategy = Strategy(model, gradient_checkpointing=True)
    randomize(dict(strategy.export_weights(adapter_only=True)))
    micro = whole(batch_of(RAGGED, torch.float32))
    (first,), (second,) = (strategy.forward(micro, POLICY) for _ in range(2))
    assert torch.equal(first["logprob"], second["logprob"])
    case = CASES["lora tied"]

    def gradients(seed: int) -> dict[str, Tensor]:
        torch.manual_seed(seed)
        return gradients_of(strategy, micro, case)

    once, again, other = gradients(0), gradients(0), gradients(1)
    assert all(torch.equal(once[n], again[n]) for n in once)
    assert max(relative(other[n], once[n]) for n in once) > 0.01
    assert not any(module.training for module in model.modules())
