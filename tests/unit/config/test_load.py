"""From recipe and overrides to a configuration: composition, variants, help, round trip."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import Container
from tests.examples import examples

from winnow.config.algorithm import PpoClipLoss, ReinforceLoss
from winnow.config.base import Section
from winnow.config.data import DataConfig
from winnow.config.files import available_recipes
from winnow.config.judge import BuiltInParse, LabelsParse, NumberParse, OpenAiJudge
from winnow.config.load import (
    ABSENT,
    describe_config,
    differing_keys,
    dump_config,
    load_recipe,
    resolve_recipe,
)
from winnow.config.reward import CustomManager, RewardConfig
from winnow.config.rollout import BandFilter, VarianceFilter
from winnow.config.root import Config, RunConfig
from winnow.config.schema import all_keys, defaults, variants
from winnow.errors import ConfigError

Write = Callable[..., str]
TOY = "data: {task: sort_digits}\nwarm_start: sft\n"


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Writes a recipe file and returns its path."""

    def write(text: str, name: str = "mine.yaml") -> str:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def toy(write: Write) -> str:
    """The shortest recipe that can train."""
    return write(TOY, "toy.yaml")


def test_a_recipe_is_laid_over_the_defaults(write: Write) -> None:
    config = load_recipe(write(TOY + "optim:\n  lr: 1e-6\n  betas: [0.8, 0.9]\n"))
    assert config.optim.lr == 1e-6
    assert config.optim.betas == (0.8, 0.9)
    assert config.optim.weight_decay == Config().optim.weight_decay


def test_any_known_key_is_overridden_without_a_plus(toy: str) -> None:
    overrides = ["optim.lr=3e-4", "optim.grad_clip=null", "rollout.stop=['a b',c]", "run.seed=7"]
    config = load_recipe(toy, overrides)
    assert config.optim.lr == 3e-4
    assert config.optim.grad_clip is None
    assert config.rollout.stop == ("a b", "c")
    assert config.run.seed == 7


def test_a_plus_before_a_known_key_does_no_harm(toy: str) -> None:
    assert load_recipe(toy, ["+optim.lr=0.5", "++optim.eps=0.25"]).optim.lr == 0.5


def test_the_last_of_two_overrides_holds(toy: str) -> None:
    assert load_recipe(toy, ["optim.lr=0.1", "optim.lr=0.2"]).optim.lr == 0.2


def test_a_section_can_be_given_in_braces(toy: str) -> None:
    config = load_recipe(toy, ["optim={lr:0.1,warmup_steps:3}"])
    assert (config.optim.lr, config.optim.warmup_steps) == (0.1, 3)
    assert config.optim.weight_decay == Config().optim.weight_decay


def test_seed_alone_means_the_seed_of_the_run(toy: str) -> None:
    assert load_recipe(toy, ["seed=5"]).run.seed == 5


def test_references_between_keys_are_resolved(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINNOW_TEST_DIR", "/there")
    overrides = ["optim.warmup_steps=${trainer.steps}", "run.dir=${oc.env:WINNOW_TEST_DIR}/runs"]
    config = load_recipe(toy, overrides)
    assert config.optim.warmup_steps == config.trainer.steps
    assert config.run.dir == "/there/runs"


def test_plain_words_of_yaml_mean_what_they_mean_on_the_command_line(write: Write) -> None:
    config = load_recipe(write(TOY + "observe: {console: off}\nrun: {name: 2024-01-01}\n"))
    assert config.observe.console == "off"
    assert config.run.name == "2024-01-01"


@pytest.mark.parametrize("typed", ["2024", "1e3", "true", "0.10", "007"])
def test_a_text_key_keeps_numbers_as_they_were_typed(typed: str, toy: str) -> None:
    assert load_recipe(toy, [f"run.name={typed}"]).run.name == typed


# Variants


@pytest.mark.parametrize(
    "override",
    [
        "algorithm/policy_loss=reinforce",
        "algorithm.policy_loss=reinforce",
        "algorithm.policy_loss.name=reinforce",
        "algorithm.policy_loss={name:reinforce}",
        "algorithm={policy_loss:{name:reinforce}}",
        "algorithm={policy_loss:reinforce}",
    ],
)
def test_a_variant_is_chosen_in_each_spelling_and_old_keys_are_dropped(
    override: str, write: Write
) -> None:
    recipe = write(TOY + "algorithm: {policy_loss: {clip_low: 0.1}}")
    assert load_recipe(recipe, [override]).algorithm.policy_loss == ReinforceLoss()


@pytest.mark.parametrize(
    "text",
    [
        "policy_loss: {name: reinforce}",
        "policy_loss: reinforce",
        "policy_loss:\n    name: reinforce",
    ],
)
def test_a_recipe_chooses_a_variant_and_drops_what_it_inherits(text: str, write: Write) -> None:
    write(TOY + "algorithm: {policy_loss: {clip_low: 0.1}}", "base.yaml")
    recipe = write(f"defaults: [base]\nalgorithm:\n  {text}\n")
    assert load_recipe(recipe).algorithm.policy_loss == ReinforceLoss()


def test_naming_the_variant_that_is_there_keeps_its_keys(write: Write) -> None:
    recipe = write(TOY + "algorithm: {policy_loss: {name: ppo_clip, clip_low: 0.1}}")
    kept = PpoClipLoss(clip_low=0.1)
    assert load_recipe(recipe).algorithm.policy_loss == kept
    named = load_recipe(recipe, ["algorithm.policy_loss.name=ppo_clip"])
    assert named.algorithm.policy_loss == kept


@pytest.mark.parametrize("text", ["ppo_clip", "{name: ppo_clip}"])
def test_a_file_that_names_the_variant_it_inherits_keeps_its_keys(text: str, write: Write) -> None:
    write(TOY + "algorithm: {policy_loss: {clip_low: 0.1}}", "base.yaml")
    recipe = write(f"defaults: [base]\nalgorithm: {{policy_loss: {text}}}\n")
    assert load_recipe(recipe).algorithm.policy_loss == PpoClipLoss(clip_low=0.1)


def test_choosing_the_group_starts_the_variant_anew(write: Write) -> None:
    recipe = write(TOY + "algorithm: {policy_loss: {clip_low: 0.1}}")
    chosen = load_recipe(recipe, ["algorithm/policy_loss=ppo_clip"])
    assert chosen.algorithm.policy_loss == PpoClipLoss()


def test_keys_of_a_chosen_variant_are_set_whatever_the_order(toy: str) -> None:
    overrides = ["sampling.filter.low=0.2", "sampling/filter=band"]
    for order in (overrides, overrides[::-1]):
        assert load_recipe(toy, order).sampling.filter == BandFilter(low=0.2)
    braces = load_recipe(toy, ["sampling.filter={name:band,low:0.2}"])
    assert braces.sampling.filter == BandFilter(low=0.2)


def test_the_last_of_two_choices_holds(toy: str) -> None:
    overrides = ["sampling/filter=band", "sampling.filter.name=none", "sampling/filter=variance"]
    assert load_recipe(toy, overrides).sampling.filter == VarianceFilter()


SAMPLE_MEAN = ["algorithm.aggregation=seq-mean-token-mean"]
COMPLETED = {
    **dict.fromkeys(("gspo", "sapo", "gmpo"), SAMPLE_MEAN),
    "batch": ["reward.function.path=f.py"],
    "dapo": ["reward.overlong.enabled=true"],
}
"""Other keys that a variant asks for."""


def test_every_variant_can_be_chosen(toy: str) -> None:
    by_path = {key.path: variants(key.field) for key in all_keys()}

    def chosen(union: tuple[str, ...], name: str) -> tuple[list[str], dict[str, Any]]:
        fields = by_path[union][name].model_fields.items()
        needed: dict[str, Any] = {
            k: "http://h:1" if "url" in k else "p:P" for k, f in fields if f.is_required()
        }
        if name == "labels":  # a table whose default is empty, and must not stay so
            needed["labels"] = {"yes": 1.0}
        values = [f"{'.'.join(union)}.{k}={str(v).replace(chr(39), '')}" for k, v in needed.items()]
        return [f"{'/'.join(union)}={name}", *values], needed

    for key in all_keys():
        around = [] if key.variant is None else chosen(*key.variant)[0]
        for name, variant in by_path[key.path].items():
            overrides, needed = chosen(key.path, name)
            overrides += COMPLETED.get(name, [])
            config = resolve_recipe(toy, [*around, *overrides])
            node: Section = config
            for part in key.path:
                node = getattr(node, part)
            assert node == variant(**needed)


JUDGE = "name: openai, base_url: 'http://h:1', model: M"
ASKED = ["reward/judge=openai", "reward.judge.base_url=http://h:1", "reward.judge.model=M"]


@pytest.mark.parametrize(
    ("typed", "overrides", "expected"),
    [
        ("", ["reward.judge.parse.labels.a=5", "reward/judge/parse=labels", *ASKED],
         LabelsParse(labels={"a": 5})),
        (f"{{{JUDGE}, parse: {{name: number, highest: 9}}}}", [], NumberParse(highest=9)),
        (f"{{{JUDGE}, parse: {{name: number, highest: 9}}}}", ["reward.judge.parse.lowest=2"],
         NumberParse(lowest=2, highest=9)),
        (f"{{{JUDGE}, parse: {{name: number, highest: 9}}}}", ["reward.judge.parse.name=built_in"],
         BuiltInParse()),
        (f"{{{JUDGE}, parse: number}}", ["reward/judge=none"], None),
    ],
)  # fmt: skip
def test_a_union_within_a_variant_is_replaced_whole_too(
    typed: str, overrides: list[str], expected: Section | None, write: Write
) -> None:
    recipe = write(TOY + (f"reward: {{judge: {typed}}}\n" if typed else ""))
    judge = load_recipe(recipe, overrides).reward.judge
    assert (judge.parse if isinstance(judge, OpenAiJudge) else None) == expected


# Tables


def test_entries_of_a_table_are_added_with_and_without_a_plus(write: Write) -> None:
    recipe = write(TOY + "reward: {scorers: {a: gsm8k}}")
    overrides = ["+reward.scorers.b=gsm8k", "reward.scorers.c-1=math_dapo", "reward.scorers.d=7"]
    scorers = load_recipe(recipe, overrides).reward.scorers
    assert scorers == {"a": "gsm8k", "b": "gsm8k", "c-1": "math_dapo", "d": "7"}


def test_entries_of_a_table_are_removed_with_a_tilde(write: Write) -> None:
    recipe = write(TOY + "reward: {scorers: {a: gsm8k, b: gsm8k}}")
    assert load_recipe(recipe, ["~reward.scorers.a"]).reward.scorers == {"b": "gsm8k"}
    assert load_recipe(recipe, ["~reward.scorers"]).reward.scorers == {}


def test_a_table_takes_names_that_no_key_may_have(toy: str) -> None:
    overrides = [
        "data.prompt_template={*:'Q: {prompt}',openai/gsm8k:'{prompt} A: $x',7:'{prompt}'}"
    ]
    template = load_recipe(toy, overrides).data.prompt_template
    assert template == {"*": "Q: {prompt}", "openai/gsm8k": "{prompt} A: $x", "7": "{prompt}"}


def test_a_file_adds_to_the_table_of_the_file_it_includes(write: Write) -> None:
    write(TOY + "reward: {scorers: {a: gsm8k, b: x.y}}", "base.yaml")
    recipe = write("defaults: [base]\nreward: {scorers: {b: gsm8k, c.d: gsm8k}}")
    scorers = load_recipe(recipe).reward.scorers
    assert scorers == {"a": "gsm8k", "b": "gsm8k", "c.d": "gsm8k"}


# Includes


def test_an_entry_with_keys_keeps_those_that_are_not_given_anew(write: Write) -> None:
    write("defaults: [quickstart]\nreward: {parts: {form: {scorer: think_answer, weight: 2}}}",
          "base.yaml")  # fmt: skip
    recipe = write("defaults: [base]\nreward: {parts: {form: {weight: 0.5}}}")
    for overrides in ([], ["reward.parts.form.in_evaluation=true", "reward.parts.b.scorer=gsm8k"]):
        parts = load_recipe(recipe, overrides).reward.parts
        assert (parts["form"].scorer, parts["form"].weight) == ("think_answer", 0.5)
        assert (parts["form"].in_evaluation, "b" in parts) == (bool(overrides), bool(overrides))


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("reward.parts.f.weight=1", "reward.parts.f.scorer has no default; add reward"),
        (
            "reward.parts.f=gsm8k",
            "reward.parts.f must be keys (scorer, weight, in_evaluation), got",
        ),
        ("reward.parts={f: {scorer: gsm8k, wieght: 1}}", "reward.parts.f.wieght is no known key"),
        ("reward.parts={f: {scorer: gsm8k, weight: x}}", "reward.parts.f.weight must be a number,"),
        ("reward.parts={f: {scorer: gsm8k, weight: inf}}", "reward.parts.f.weight must be a "),
        ("reward.parts.task.scorer=gsm8k", "reward.parts.task must be none of accuracy, reward, "),
        ("reward.parts.f-g.scorer=gsm8k", "reward.parts.f-g must be a name of letters, digits "),
        ("reward.cosine.limit_tokens=-3", "reward.cosine.limit_tokens must be a whole number of "),
        ("reward.manager=team", "reward.manager must be one of auto, naive, parallel, batch, "),
        (
            "reward/manager=remote",
            "reward.manager.url has no default; add reward.manager.url=VALUE",
        ),
    ],
)
def test_what_is_no_part_and_no_manager_is_refused_in_one_line(
    override: str, says: str, toy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe(toy, [override])
    assert str(caught.value).startswith(says)
    assert "\n" not in str(caught.value)


def test_a_recipe_includes_shipped_ones_and_files_beside_it(write: Write, tmp_path: Path) -> None:
    write("defaults: [quickstart]\noptim: {lr: 0.25}", "base.yml")
    (tmp_path / "sub").mkdir()
    write("rollout: {n: 3}", "sub/more.yaml")
    recipe = write("defaults:\n  - base\n  - sub/more.yaml\ntrainer: {steps: 9}")
    config = load_recipe(recipe, ["run.name=a"])
    assert (config.optim.lr, config.rollout.n, config.trainer.steps) == (0.25, 3, 9)
    assert config.optim.schedule == "linear"


def test_a_reference_leads_through_a_table_that_is_one_itself(write: Write) -> None:
    tables = (
        "data: {prompt_template: {a: '{prompt}'}}\nreward: {scorers: '${data.prompt_template}'}"
    )
    recipe = write(f"defaults: [quickstart]\n{tables}\nrun: {{dir: '${{reward.scorers.a}}'}}\n")
    assert resolve_recipe(recipe).run.dir == "{prompt}"


def test_a_file_without_the_ending_of_yaml_is_no_include(write: Write, tmp_path: Path) -> None:
    (tmp_path / "quickstart").write_text("not: a recipe", encoding="utf-8")
    assert load_recipe(write("defaults: [quickstart]")) == load_recipe("quickstart")


def test_own_keys_come_last_unless_self_says_otherwise(write: Write) -> None:
    write(TOY + "optim: {lr: 0.1}", "base.yaml")
    last = write("defaults: [base]\noptim: {lr: 0.2}", "last.yaml")
    first = write("defaults: [_self_, base]\noptim: {lr: 0.2}", "first.yaml")
    assert load_recipe(last).optim.lr == 0.2
    assert load_recipe(first).optim.lr == 0.1


def test_defaults_may_choose_variants_as_hydra_writes_them(write: Write) -> None:
    write(TOY, "base.yaml")
    recipe = write("defaults:\n  - base\n  - override /sampling/filter: band\n  - _self_\n")
    assert load_recipe(recipe).sampling.filter == BandFilter()


def test_two_files_may_include_the_same_third(write: Write) -> None:
    write(TOY, "base.yaml")
    write("defaults: [base]\nrollout: {n: 3}", "left.yaml")
    write("defaults: [base]\noptim: {lr: 0.3}", "right.yaml")
    config = load_recipe(write("defaults: [left, right]"))
    assert (config.rollout.n, config.optim.lr) == (3, 0.3)


# Round trip


def test_a_dumped_configuration_loads_back_equal(write: Write) -> None:
    for recipe in available_recipes():
        config = resolve_recipe(recipe, ["run.name=a", "optim.lr=1e-7"])
        assert resolve_recipe(write(dump_config(config))) == config


TRICKY = st.text(max_size=12) | st.sampled_from(
    ["${x}", "\\${x}", "\\\\${x}", "null", "1e3", "off"]
)


@examples(15)
@given(text=TRICKY, key=TRICKY, number=st.floats(0, 1e300))
def test_any_text_survives_a_dump(
    text: str, key: str, number: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    manager = CustomManager(path="a:B", kwargs={key: [text, number, True, None, {key: text}]})
    config = Config(
        run=RunConfig(dir=text),
        data=DataConfig(train_files=(text,)),
        # "none" is no name of a scorer: it leaves the source to a judge, which this recipe lacks.
        reward=RewardConfig(manager=manager, scorers={key: text.replace("none", "None")}),
    )
    path = tmp_path_factory.mktemp("dump") / "config.yaml"
    path.write_text(dump_config(config), encoding="utf-8")
    if "???" in (text, key):
        return
    assert resolve_recipe(str(path)) == config


# Help and comparison


def test_every_key_has_a_meaning_and_says_what_it_takes(toy: str) -> None:
    rows = describe_config(resolve_recipe(toy))
    assert [row.key for row in rows if not row.meaning] == []
    assert [row.key for row in rows if not row.type or "winnow" in row.type] == []


def test_help_shows_the_values_of_the_recipe_and_the_keys_of_other_variants() -> None:
    rows = describe_config(resolve_recipe("quickstart", ["optim.lr=0.5"]))
    needed = {row.key: row.default for row in rows}["reward.judge.model"]
    assert needed == "???"
    assert not any("Undefined" in row.default for row in rows)
    table = {(row.key, row.variant): row for row in rows}
    assert table["optim.lr", ""].default == "0.5"
    assert table["optim.lr", ""].type == "a number greater than 0"
    assert table["optim.lr", ""].meaning == "Peak learning rate."
    assert table["sampling/filter", ""].type == "one of none, variance, band, custom"
    assert table["sampling/filter", ""].default == "variance"
    assert table["sampling.filter.low", "sampling/filter=band"].default == "0.0"
    assert table["optim.betas", ""].type == "a list of 2 numbers in [0, 1)"
    assert table["model.path", ""].default == "null"


def test_help_narrows_to_a_prefix() -> None:
    config = resolve_recipe("quickstart")
    assert {row.key.split(".")[0] for row in describe_config(config, "optim")} == {"optim"}
    assert [row.key for row in describe_config(config, "optim.lr")] == ["optim.lr"]
    union = describe_config(config, "algorithm/policy_loss")
    assert union[0].key == "algorithm/policy_loss"
    with pytest.raises(ConfigError, match=r"no key starts with 'optin'; did you mean optim\?"):
        describe_config(config, "optin")


def test_help_covers_every_key_of_the_sections(toy: str) -> None:
    def leaves(tree: dict[str, object], prefix: str = "") -> set[str]:
        keys: set[str] = set()
        for key, value in tree.items():
            nested = isinstance(value, dict) and value
            keys |= leaves(value, f"{prefix}{key}.") if nested else {prefix + key}  # type: ignore[arg-type]
        return keys

    listed = {row.key.replace("/", ".") for row in describe_config(resolve_recipe(toy))}
    missing = {key for key in leaves(defaults(Config)) if key not in listed}
    assert {key for key in missing if not key.endswith(".name")} == set()


def test_differing_keys_are_named_with_both_values(toy: str) -> None:
    a = load_recipe(toy)
    b = load_recipe(toy, ["optim.lr=0.5", "sampling/filter=band", "reward.scorers.x=gsm8k"])
    assert differing_keys(a, a) == []
    differences = {key: (left, right) for key, left, right in differing_keys(a, b)}
    assert differences["optim.lr"] == (1e-6, 0.5)
    assert differences["sampling.filter.name"] == ("variance", "band")
    assert differences["sampling.filter.low"] == (ABSENT, 0.0)
    assert differences["reward.scorers.x"] == (ABSENT, "gsm8k")


# Hydra in the same process


def test_neither_hydra_nor_torch_is_imported_before_a_recipe_is_loaded() -> None:
    code = "import sys, winnow.config.load; assert not {'hydra', 'torch'} & set(sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr


def test_loading_leaves_hydra_and_omegaconf_as_they_were(toy: str) -> None:
    store = ConfigStore.instance()
    before = store.repo, dict(store.repo), Container.resolve_parse_tree
    load_recipe(toy, ["optim.lr=0.5", "run.dir=${run.resume}"])
    with pytest.raises(ConfigError, match="not found"):
        load_recipe(toy, ["optim.lr=${nowhere}"])
    assert (store.repo, dict(store.repo), Container.resolve_parse_tree) == before
    assert not GlobalHydra.instance().is_initialized()


KEYS = st.sampled_from(sorted({key.spelling for key in all_keys()})) | st.sampled_from(
    ["optim", "data", "warm_start.name", "reward.scorers.x", "optim.betas.0", "hydra", "a/b", ""]
)
TYPED = """
1 -1 0 1.5 1e-3 true null none inf nan '' [] [1,2] [a,b] {} {a:1} {name:band} {name:{a:1}}
${optim.lr} ${x} '${' ${oc.env:NOPE} ??? band sft reinforce 1,2 range(3) int(x) [ {
"""
VALUES = st.text(max_size=8) | st.sampled_from(TYPED.split())
OVERRIDES = st.builds("{}{}={}".format, st.sampled_from(["", "", "", "+", "~"]), KEYS, VALUES)


def is_config_or_clear_error(load: Callable[[], Config]) -> bool:
    """Any other exception than a `ConfigError` of printable lines passes through."""
    try:
        return isinstance(load(), Config)
    except ConfigError as error:
        return all(line.strip() and line.isprintable() for line in str(error).split("\n"))


@given(overrides=st.lists(OVERRIDES | st.text(max_size=15), max_size=4))
def test_any_override_gives_a_configuration_or_a_clear_error(overrides: list[str]) -> None:
    assert is_config_or_clear_error(lambda: load_recipe("quickstart", overrides))


@given(
    text=st.text(max_size=60)
    | st.lists(
        st.sampled_from(
            ["optim:", " lr: 1", "- a", "data: {", "}", "\t", "&a", "*a", "? x", "!!set"]
        )
    ).map("\n".join)
)
def test_any_file_gives_a_configuration_or_a_clear_error(
    text: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    assert is_config_or_clear_error(lambda: resolve_recipe(str(path)))
