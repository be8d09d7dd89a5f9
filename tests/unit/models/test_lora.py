"""What a user may ask of an adapter, and what is refused."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from tests.small_models import digits_folder
from transformers import AutoModelForCausalLM

from winnow.config.load import load_recipe
from winnow.config.model import LoraAdapter, ModelConfig
from winnow.config.roles import Roles
from winnow.data.sort_digits import build_tokenizer
from winnow.errors import ModelError
from winnow.learning.learner import Learner
from winnow.models import fetch
from winnow.models.causal_lm import (
    find_model,
    head_logits,
    hidden_states,
    load_causal_lm,
    output_head,
)
from winnow.models.folders import ADAPTER_CONFIG, has_adapter
from winnow.models.lora import (
    ADAPTER_WEIGHTS,
    adapter_base,
    adapter_weights,
    adapter_writer,
    add_lora,
    load_lora,
    merge,
    saved_adapter,
)
from winnow.models.packed_attention import PackedLayout
from winnow.models.sharded_loading import saved_weights
from winnow.ranks.learner import make_learner
from winnow.ranks.models import load_policy_model, start_notes

CPU = torch.device("cpu")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return digits_folder(tmp_path / "base")


def model_of(base: Path) -> Any:
    return load_causal_lm(str(base), torch.float32, CPU)


def merged(adapter: Path, dtype: torch.dtype) -> str:
    return find_model(str(adapter), "model.path", dtype).path


def adapter_of(base: Path, folder: Path, **options: Any) -> Path:
    model = model_of(base)
    add_lora(model, LoraAdapter(**{"rank": 2, **options}), seed=0)
    weights = {name: torch.ones_like(tensor) for name, tensor in adapter_weights(model)}
    adapter_writer(model, build_tokenizer())(weights, folder)
    return folder


def test_listed_layers_alone_get_an_adapter(base: Path) -> None:
    model = model_of(base)
    add_lora(model, LoraAdapter(rank=2, target_modules=("q_proj", "layers.0.mlp.up_proj")), 0)
    layers = {name.rpartition(".lora_")[0] for name, _ in adapter_weights(model)}
    prefix = "base_model.model.model.layers.0"
    assert layers == {f"{prefix}.self_attn.q_proj", f"{prefix}.mlp.up_proj"}


@pytest.mark.parametrize(
    ("target", "fault"),
    [
        ("lm_head", "is the head"),
        ("q_porj", "is no linear layer"),
        ("embed_tokens", "is no linear layer"),
    ],
)
def test_targets_that_cannot_have_one_are_refused_with_those_that_can(
    base: Path, target: str, fault: str
) -> None:
    adapter = LoraAdapter(target_modules=("q_proj", target))
    known = "down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj"
    with pytest.raises(ModelError, match=rf"target_modules: {target} {fault}.*{known}"):
        add_lora(model_of(base), adapter, 0)


@pytest.mark.parametrize("rslora", [False, True])
def test_the_update_is_scaled_by_alpha_and_rank(base: Path, rslora: bool) -> None:
    model = model_of(base)
    add_lora(model, LoraAdapter(rank=4, alpha=6.0, rslora=rslora), 0)
    before = model_of(base).state_dict()["model.layers.0.self_attn.q_proj.weight"]
    for _, tensor in adapter_weights(model):
        tensor.fill_(0.5)
    merge(model)
    after = model.state_dict()["model.layers.0.self_attn.q_proj.weight"]
    scale = 6.0 / 2.0 if rslora else 6.0 / 4.0
    torch.testing.assert_close(after - before, torch.full_like(before, scale * 4 * 0.25))
    assert not has_adapter(model)
    assert model.state_dict().keys() == model_of(base).state_dict().keys()


def test_an_adapter_of_a_folder_has_its_own_shape(base: Path, tmp_path: Path) -> None:
    model: Any = model_of(base)
    targets = ("q_proj", "v_proj")
    add_lora(model, LoraAdapter(rank=3, alpha=5.0, rslora=True, target_modules=targets), 0)
    model.peft_config["default"].save_pretrained(tmp_path / "adapter")
    given = LoraAdapter(publish="adapter")
    found = saved_adapter(tmp_path / "adapter", given)
    assert (found.rank, found.alpha, found.rslora) == (3, 5.0, True)
    assert found.target_modules == targets
    assert found.publish == "adapter"
    assert saved_adapter(base, given) is given
    (tmp_path / "adapter" / ADAPTER_CONFIG).write_text("{}")
    with pytest.raises(ModelError, match=r"adapter_config\.json is damaged"):
        saved_adapter(tmp_path / "adapter", given)


def test_an_adapter_says_which_model_it_belongs_to(base: Path, tmp_path: Path) -> None:
    adapter = adapter_of(base, tmp_path / "adapter")
    assert adapter_base(adapter) == str(base)
    assert adapter_base(base) is None
    base.rename(tmp_path / "elsewhere")
    with pytest.raises(ModelError, match=f"an adapter of {base}, which does not exist; restore it"):
        adapter_base(adapter)
    assert adapter_base(adapter, "elsewhere") == "elsewhere"
    path = adapter / ADAPTER_CONFIG
    given = json.loads(path.read_text())
    path.write_text(json.dumps(given | {"base_model_name_or_path": None}))
    with pytest.raises(ModelError, match="has no base_model_name_or_path"):
        adapter_base(adapter)
    path.write_text("{")
    with pytest.raises(ModelError, match="is damaged"):
        adapter_base(adapter)


def test_an_adapter_of_another_shape_or_a_damaged_one_is_refused(
    base: Path, tmp_path: Path
) -> None:
    adapter = adapter_of(base, tmp_path / "adapter")
    wider = model_of(base)
    add_lora(wider, LoraAdapter(rank=5), 0)
    with pytest.raises(ModelError, match=r"does not match this model \(14 weights differ"):
        load_lora(wider, adapter)
    fewer = model_of(base)
    add_lora(fewer, LoraAdapter(rank=2, target_modules=("q_proj",)), 0)
    with pytest.raises(ModelError, match=r"does not match this model \(12 weights differ"):
        load_lora(fewer, adapter)
    (adapter / ADAPTER_WEIGHTS).write_bytes(b"not safetensors")
    with pytest.raises(ModelError, match="cannot load its adapter"):
        load_lora(model_of(base), adapter)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WINNOW_MODEL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fetch, "_local_folders", {})
    return tmp_path / "cache"


def logits(model: Any) -> torch.Tensor:
    ids = torch.arange(3, 20)
    layout = PackedLayout((17,), ids.device)
    with torch.no_grad():
        return head_logits(output_head(model), hidden_states(model, ids, torch.arange(17), layout))


def peft_logits(adapter: Path) -> torch.Tensor:
    """As peft itself computes them."""
    base = AutoModelForCausalLM.from_pretrained(adapter_base(adapter))
    with torch.no_grad():
        found: Any = PeftModel.from_pretrained(base, adapter)(torch.arange(3, 20)[None])
    return found.logits[0]


@pytest.mark.parametrize("written", ["{}/adapter", "file://{}/adapter", "~/adapter"])
def test_a_run_may_start_from_an_adapters_folder(
    base: Path, cache: Path, tmp_path: Path, written: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    adapter = adapter_of(base, tmp_path / "adapter", alpha=0.5)
    path = written.format(tmp_path)
    expected = peft_logits(adapter)
    goes_on = ModelConfig(path=path, adapter=LoraAdapter(rank=7))
    model = load_policy_model(goes_on, path, CPU, seed=5)
    assert all(bool((tensor == 1).all()) for _, tensor in adapter_weights(model))
    assert {p.shape[0] for n, p in model.named_parameters() if "lora_A" in n} == {2}
    assert all(p.requires_grad == (".lora_" in n) for n, p in model.named_parameters())
    torch.testing.assert_close(logits(model), expected)
    assert "trained on with its own rank" in start_notes(goes_on, path)[0]
    merged = ModelConfig(path=path)
    for _ in range(2):
        model = load_policy_model(merged, path, CPU, seed=5)
        assert not has_adapter(model)
        torch.testing.assert_close(logits(model), expected)
    assert all(p.requires_grad for p in model.parameters())
    assert "is merged into a copy" in start_notes(merged, path)[0]
    assert len([*cache.glob("merged-*")]) == 1, "made once"
    hollow = load_causal_lm(path, torch.float32, CPU, hollow=True)
    rows = saved_weights(hollow)
    assert rows is not None
    name = "model.layers.0.self_attn.q_proj.weight"
    torch.testing.assert_close(rows.part(name, [slice(0, 16)]), model.state_dict()[name])


def test_merged_weights_follow_the_adapter_and_its_base(
    base: Path, cache: Path, tmp_path: Path
) -> None:
    adapter = adapter_of(base, tmp_path / "adapter")
    first = merged(adapter, torch.float32)
    assert merged(adapter, torch.float32) == first
    assert merged(adapter, torch.bfloat16) != first
    weights = load_file(adapter / ADAPTER_WEIGHTS)
    save_file({n: 2 * tensor for n, tensor in weights.items()}, adapter / ADAPTER_WEIGHTS)
    second = merged(adapter, torch.float32)
    assert second != first
    digits_folder(base, initializer_range=0.5)
    assert merged(adapter, torch.float32) not in (first, second)


@pytest.mark.parametrize(
    ("option", "value"),
    [("use_dora", True), ("modules_to_save", ["lm_head"]), ("bias", "all"), ("peft_type", "IA3")],
)
def test_adapters_that_are_more_than_lora_are_refused(
    base: Path, cache: Path, tmp_path: Path, option: str, value: object
) -> None:
    adapter = adapter_of(base, tmp_path / "adapter")
    path = adapter / ADAPTER_CONFIG
    path.write_text(json.dumps(json.loads(path.read_text()) | {option: value}))
    for section in (ModelConfig(), ModelConfig(adapter=LoraAdapter())):
        with pytest.raises(ModelError, match=rf"the adapter has {option}.*merge it with peft"):
            load_policy_model(section, str(adapter), CPU, seed=5)


def test_an_adapter_names_its_base_on_the_hub_with_the_commit(base: Path, tmp_path: Path) -> None:
    model = model_of(base)
    model.name_or_path = "owner/digits@" + "0" * 40
    add_lora(model, LoraAdapter(rank=2), seed=0)
    adapter_writer(model, build_tokenizer())(dict(adapter_weights(model)), tmp_path / "adapter")
    said = json.loads((tmp_path / "adapter" / ADAPTER_CONFIG).read_text())
    assert (said["base_model_name_or_path"], said["revision"]) == ("owner/digits", "0" * 40)
    assert adapter_base(tmp_path / "adapter") == model.name_or_path


def test_without_peft_the_remedy_is_named(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ModelError, match=r"needs peft.*pip install 'winnow-rl\[peft\]'"):
        add_lora(model_of(base), LoraAdapter(), 0)


def test_kl_of_a_run_from_an_adapter_is_measured_from_its_start(
    base: Path, cache: Path, tmp_path: Path
) -> None:
    adapter = adapter_of(base, tmp_path / "adapter", alpha=0.5)
    words = ["warm_start=none", f"model.path={adapter}", "model/adapter=lora"]
    config = load_recipe("quickstart", [*words, "algorithm/kl/loss=fixed"])
    model = load_policy_model(config.model, str(adapter), CPU, seed=5)
    expected = logits(model)
    learner = make_learner(config, Roles(config), model, 29, str(adapter)).learner
    assert isinstance(learner, Learner)
    assert learner._reference is not None
    torch.testing.assert_close(logits(learner._reference.model), expected)
    assert not has_adapter(learner._reference.model)


def test_a_mixture_has_its_adapter_outside_of_the_experts(tmp_path: Path) -> None:
    shape = {"num_hidden_layers": 2, "mlp_only_layers": [1]}
    base = digits_folder(tmp_path / "base", experts=True, **shape)
    adapter = adapter_of(base, tmp_path / "adapter")
    model = model_of(base)
    load_lora(model, adapter)
    names = {name.rpartition(".lora_")[0] for name, _ in adapter_weights(model)}
    assert {name.rpartition(".")[2] for name in names} == {"q_proj", "k_proj", "v_proj", "o_proj"}
    merged = model_of(Path(find_model(str(adapter), "model.path", torch.float32).path))
    assert not torch.equal(
        *(
            m.get_submodule("model.layers.0.self_attn.q_proj").weight
            for m in (merged, model_of(base))
        )
    )
    with pytest.raises(ModelError, match=r"are experts, .*; choose from k_proj, o"):
        add_lora(model_of(base), LoraAdapter(target_modules=("gate_proj", "up_proj")), 0)
