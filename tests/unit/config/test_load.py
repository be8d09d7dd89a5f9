"""From recipe and overrides to a configuration: composition, variants, help, round trip."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import Container
from tests.examples import examples

from winnow.config.algorithm import PpoClipLoss, ReinforceLoss
from winnow.config.base import Section
from winnow.config.data import DataConfig
from winnow.config.files import recipe_name, recorded_recipe
from winnow.config.judge import BuiltInParse, LabelsParse, NumberParse, OpenAiJudge
from winnow.config.load import (
    ABSENT,
    describe_config,
    differing_keys,
    dump_config,
    flatten,
    load_recipe,
    parse_recipe,
    recipe_values,
)
from winnow.config.reward import CustomManager, RewardConfig
from winnow.config.rollout import BandFilter
from winnow.config.root import Config, RunConfig
from winnow.config.schema import all_keys, default_values, variants
from winnow.errors import ConfigError, WinnowError
from winnow.version import __version__

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


BASE = (
    TOY
    + """
algorithm: {policy_loss: {clip_low: 0.1}}
optim: {lr: 0.1}
reward: {scorers: {a: gsm8k, b: x.y}}
"""
)
LOSS, FILTER, SCORERS = "algorithm.policy_loss", "sampling.filter", "reward.scorers"
BRACES = "{*:'Q: {prompt}',openai/gsm8k:'{prompt} A: $x',7:'{prompt}'}"
COMPOSED: list[tuple[str, list[str], str, object]] = [
    # What the recipe says beside or after `defaults`, overrides, and a key with its value.
    ("", ["optim.lr=3e-4"], "optim.lr", 3e-4),
    ("", ["optim.grad_clip=null"], "optim.grad_clip", None),
    ("", ["rollout.stop=['a b',c]"], "rollout.stop", ("a b", "c")),
    ("", ["+optim.lr=0.5"], "optim.lr", 0.5),
    ("", ["++optim.lr=0.5"], "optim.lr", 0.5),
    ("", ["optim.lr=0.3", "optim.lr=0.2"], "optim.lr", 0.2),
    ("", ["optim={lr:0.3,warmup_steps:3}"], "optim.warmup_steps", 3),
    ("", ["optim={lr:0.3,warmup_steps:3}"], "optim.weight_decay", 0.1),
    ("", ["seed=5"], "run.seed", 5),
    ("", ["rollout/engine=custom", "rollout.engine.path=a.py:A"], "rollout.engine.processes", 0),
    ("optim: {lr: 0.2}", [], "optim.lr", 0.2),
    ("defaults: [_self_, base]\noptim: {lr: 0.2}", [], "optim.lr", 0.1),
    # Words of YAML mean what they mean on the command line.
    ("observe: {console: off}", [], "observe.console", "off"),
    ("run: {name: 2024-01-01}", [], "run.name", "2024-01-01"),
    *(
        ("", [f"run.name={typed}"], "run.name", typed)
        for typed in ("2024", "1e3", "true", "0.10", "007")
    ),
    # A variant that is chosen drops the keys of the one before; naming the one there keeps them.
    *(
        ("", [override], LOSS, ReinforceLoss())
        for override in (
            "algorithm/policy_loss=reinforce",
            "algorithm.policy_loss=reinforce",
            "algorithm.policy_loss.name=reinforce",
            "algorithm.policy_loss={name:reinforce}",
            "algorithm={policy_loss:{name:reinforce}}",
            "algorithm={policy_loss:reinforce}",
        )
    ),
    ("algorithm: {policy_loss: {name: reinforce}}", [], LOSS, ReinforceLoss()),
    ("algorithm: {policy_loss: reinforce}", [], LOSS, ReinforceLoss()),
    ("algorithm: {policy_loss: {name: ppo_clip}}", [], LOSS, PpoClipLoss(clip_low=0.1)),
    ("algorithm: {policy_loss: ppo_clip}", [], LOSS, PpoClipLoss(clip_low=0.1)),
    ("", ["algorithm.policy_loss.name=ppo_clip"], LOSS, PpoClipLoss(clip_low=0.1)),
    ("", ["algorithm/policy_loss=ppo_clip"], LOSS, PpoClipLoss()),
    ("", ["sampling/filter=band", "sampling.filter.name=none"], "sampling.filter.name", "none"),
    ("", ["sampling.filter.low=0.2", "sampling/filter=band"], FILTER, BandFilter(low=0.2)),
    ("", ["sampling/filter=band", "sampling.filter.low=0.2"], FILTER, BandFilter(low=0.2)),
    ("", ["sampling.filter={name:band,low:0.2}"], FILTER, BandFilter(low=0.2)),
    ("defaults: [base, override /sampling/filter: band, _self_]", [], FILTER, BandFilter()),
    # Tables take entries with and without a plus, of names that no key may have.
    ("", [f"+{SCORERS}.c=gsm8k", f"{SCORERS}.d-1=math_dapo", f"{SCORERS}.e=7"], SCORERS,
     {"a": "gsm8k", "b": "x.y", "c": "gsm8k", "d-1": "math_dapo", "e": "7"}),
    ("", [f"~{SCORERS}.a"], SCORERS, {"b": "x.y"}),
    ("", [f"~{SCORERS}"], SCORERS, {}),
    ("reward: {scorers: {b: gsm8k, c.d: gsm8k}}", [], SCORERS,
     {"a": "gsm8k", "b": "gsm8k", "c.d": "gsm8k"}),
    ("", [f"data.prompt_template={BRACES}"], "data.prompt_template",
     {"*": "Q: {prompt}", "openai/gsm8k": "{prompt} A: $x", "7": "{prompt}"}),
]  # fmt: skip


@pytest.mark.parametrize(("text", "overrides", "key", "value"), COMPOSED)
def test_included_keys_own_keys_and_overrides_are_composed(
    text: str, overrides: list[str], key: str, value: object, write: Write
) -> None:
    write(BASE, "base.yaml")
    text = text if "defaults" in text else f"defaults: [base]\n{text}"
    found: Any = load_recipe(write(text), overrides)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == value


def test_references_between_keys_are_resolved(toy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WINNOW_TEST_DIR", "/there")
    overrides = ["optim.warmup_steps=${trainer.steps}", "run.dir=${oc.env:WINNOW_TEST_DIR}/runs"]
    config = load_recipe(toy, overrides)
    assert config.optim.warmup_steps == config.trainer.steps
    assert config.run.dir == "/there/runs"


SECRET = "sk-0123456789"


def test_text_from_the_environment_stays_a_reference_and_numbers_and_choices_do_not(
    toy: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {"KEY": SECRET, "STEPS": "3", "WHERE": "cpu"}.items():
        monkeypatch.setenv(f"WINNOW_TEST_{name}", value)
    kwargs = "reward.function.kwargs"
    overrides = [
        f"{kwargs}.key=${{oc.env:WINNOW_TEST_KEY}}",
        f"{kwargs}.again='Bearer ${{{kwargs}.key}}'",
        f"{kwargs}.list=['${{{kwargs}.key}}']",
        "trainer.steps=${oc.env:WINNOW_TEST_STEPS}",
        "run.device=${oc.env:WINNOW_TEST_WHERE}",
    ]
    config = load_recipe(toy, overrides)
    assert config.reward.function.kwargs["again"] == f"Bearer {SECRET}"
    changed = config.model_copy(
        update={"run": config.run.model_copy(update={"name": SECRET[:3], "resume": "never"})}
    )
    text = dump_config(changed)
    assert SECRET not in text
    kept = yaml.safe_load(text)
    assert kept["reward"]["function"]["kwargs"] == {
        "key": "${oc.env:WINNOW_TEST_KEY}",
        "again": "Bearer ${reward.function.kwargs.key}",
        "list": ["${reward.function.kwargs.key}"],
    }
    assert (kept["trainer"]["steps"], kept["run"]["device"]) == (3, "cpu")
    (tmp_path / "again.yaml").write_text(text)
    assert load_recipe(str(tmp_path / "again.yaml")) == changed
    monkeypatch.setenv("WINNOW_TEST_KEY", "another-key")
    assert load_recipe(str(tmp_path / "again.yaml")).reward.function.kwargs["key"] == "another-key"
    helped = {row.key: row.default for row in describe_config(config, "reward.function")}
    assert SECRET not in str(helped)


@pytest.mark.parametrize(
    "overrides",
    [
        ["optim.lr={}"],
        ["run.device={}"],
        ["data.sampler={}"],
        ["data.columns.prompt={}", "data.prompt_key=other"],
    ],
)
def test_errors_do_not_quote_text_from_the_environment(
    overrides: list[str], toy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WINNOW_TEST_KEY", SECRET * 10)
    with pytest.raises(ConfigError, match=r"\$\{oc.env:WINNOW_TEST_KEY\}") as caught:
        load_recipe(toy, [each.format("${oc.env:WINNOW_TEST_KEY}") for each in overrides])
    assert SECRET not in str(caught.value)


# Variants


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
            k: "http://h:1" if "url" in k else "P-v0" if k == "id" else "p:P"
            for k, f in fields
            if f.is_required()
        }
        if name == "labels":  # a table whose default is empty, and must not stay so
            needed["labels"] = {"yes": 1.0}
        if union[-1] == "environment" and name == "tools":
            needed["tools"] = ["p:P"]
        values = [f"{'.'.join(union)}.{k}={str(v).replace(chr(39), '')}" for k, v in needed.items()]
        return [f"{'/'.join(union)}={name}", *values], needed

    for key in all_keys():
        around = [] if key.variant is None else chosen(*key.variant)[0]
        for name, variant in by_path[key.path].items():
            overrides, needed = chosen(key.path, name)
            overrides += COMPLETED.get(name, [])
            config = parse_recipe(toy, [*around, *overrides])
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


# Includes


def test_an_entry_with_keys_keeps_those_that_are_not_given_anew(write: Write) -> None:
    write("defaults: [quickstart]\nreward: {parts: {form: {scorer: think_answer, weight: 2}}}",
          "base.yaml")  # fmt: skip
    recipe = write("defaults: [base]\nreward: {parts: {form: {weight: 0.5}}}")
    for overrides in ([], ["reward.parts.form.in_evaluation=true", "reward.parts.b.scorer=gsm8k"]):
        parts = load_recipe(recipe, overrides).reward.parts
        assert (parts["form"].scorer, parts["form"].weight) == ("think_answer", 0.5)
        assert (parts["form"].in_evaluation, "b" in parts) == (bool(overrides), bool(overrides))


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
    assert parse_recipe(recipe).run.dir == "{prompt}"


def test_two_files_may_include_the_same_third(write: Write) -> None:
    write(TOY, "base.yaml")
    write("defaults: [base]\nrollout: {n: 3}", "left.yaml")
    write("defaults: [base]\noptim: {lr: 0.3}", "right.yaml")
    config = load_recipe(write("defaults: [left, right]"))
    assert (config.rollout.n, config.optim.lr) == (3, 0.3)


# Code and trackers of a user's own


@pytest.mark.parametrize(
    "group", [*(f"algorithm/{name}" for name in ("policy_loss", "advantage")), "sampling/filter",
              "rollout/engine", "data/task"]
)  # fmt: skip
def test_a_user_s_own_code_is_chosen_like_a_variant_of_ours(group: str, write: Write) -> None:
    section, name = group.split("/")
    own = [f"{group}=custom", f"{section}.{name}.path=mine.py:made"]
    own.append(f"{section}.{name}.options={{steps: 3, share: 0.5, on: true, text: '3'}}")
    config = parse_recipe("quickstart", own)
    chosen = getattr(getattr(config, section), name)
    assert (chosen.name, chosen.path) == ("custom", "mine.py:made")
    assert chosen.options == {"steps": 3, "share": 0.5, "on": True, "text": "3"}
    assert isinstance(chosen.options["on"], bool)
    assert parse_recipe(write(dump_config(config))) == config


TRACKERS = "trackers: [tensorboard, {name: wandb, mode: offline, entity: us}]"
WANDB = ["observe.wandb.entity=us", "observe.wandb.mode=offline"]


@pytest.mark.parametrize(
    ("text", "overrides"),
    [
        (f"observe: {{{TRACKERS}}}", []),
        ("", [f"observe.{TRACKERS.replace(': [', '=[')}"]),
        ("", [WANDB[0], "observe.trackers=[tensorboard,wandb]", WANDB[1]]),
    ],
)
def test_trackers_are_names_and_their_options_stand_with_them_or_apart(
    text: str, overrides: list[str], write: Write
) -> None:
    observe = load_recipe(write(TOY + text), overrides).observe
    assert observe.trackers == ("tensorboard", "wandb")
    assert (observe.wandb.mode, observe.wandb.entity) == ("offline", "us")


# Round trip


def test_a_dumped_configuration_loads_back_equal(write: Write) -> None:
    for recipe in ("quickstart", "ppo", "dapo_async", "dapo_megatron_qwen3_30b_a3b", "sft"):
        config = parse_recipe(recipe, ["run.name=a", "optim.lr=1e-7"])
        assert parse_recipe(write(dump_config(config))) == config


def test_a_dumped_configuration_has_the_version_and_one_of_a_newer_is_refused(write: Write) -> None:
    config = parse_recipe("quickstart")
    head, _, rest = dump_config(config).partition("\n")
    assert head == f"# Written by winnow {__version__}"
    assert parse_recipe(write(f"# Written by winnow 0.0.99\n{rest}")) == config
    with pytest.raises(WinnowError, match=r"mine.yaml was written by winnow 99.1, and this is "):
        parse_recipe(write(f"# Written by winnow 99.1\n{rest}"))


def test_the_name_of_the_recipe_goes_with_a_run_and_is_no_setting(write: Write) -> None:
    config = parse_recipe("quickstart")
    text = dump_config(config, recipe_name("quickstart"))
    assert text.startswith(f"# Written by winnow {__version__} from the recipe quickstart\nrun:")
    saved = write(text, "config.yaml")
    assert (recipe_name(saved), recorded_recipe(text.encode())) == ("quickstart", "quickstart")
    assert parse_recipe(saved) == config
    assert recipe_name(write("", "my maths.yaml")) == "my maths.yaml"
    assert recipe_name("two\nlines.yaml") is None
    assert recipe_name("somewhere/dapo") == "./dapo"  # not the shipped one
    unnamed = dump_config(config, recipe_name(write(dump_config(config), "older.yaml")))
    assert recorded_recipe(unnamed.encode()) is None


def test_a_recipe_s_values_are_under_the_variants_of_a_configuration(write: Write) -> None:
    overrides = ["model.path=x", "data.train_files=[y]", "algorithm/policy_loss=reinforce"]
    config = parse_recipe("dapo_qwen2.5_32b", overrides)
    tree = yaml.safe_load(dump_config(config))
    values, defaults = recipe_values("dapo_qwen2.5_32b", tree), recipe_values(None, tree)
    assert (values["trainer.steps"], defaults["trainer.steps"]) == (625, 100)
    assert values["model.path"].startswith("${oc.env:HOME")  # not the home of who asks
    assert "algorithm.policy_loss.clip_high" not in values.keys() | defaults.keys()
    changed = {key for key, value in flatten(tree).items() if values[key] != value}
    assert changed == {"model.path", "data.train_files"}
    unset = write("model:\n  path: ???\noptim:\n  lr: ${model.path}\n")
    assert recipe_values(unset, {})["optim.lr"] == "${model.path}"


TRICKY = st.text(max_size=12) | st.sampled_from(
    ["${x}", "\\${x}", "\\\\${x}", "null", "1e3", "off"]
)


@examples(8)
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
    assert parse_recipe(str(path)) == config


# Help and comparison


def test_every_key_has_a_meaning_and_says_what_it_takes(toy: str) -> None:
    rows = describe_config(parse_recipe(toy))
    assert [row.key for row in rows if not row.meaning] == []
    assert [row.key for row in rows if not row.type or "winnow" in row.type] == []


def test_help_shows_the_values_of_the_recipe_and_the_keys_of_other_variants() -> None:
    rows = describe_config(parse_recipe("quickstart", ["optim.lr=0.5"]))
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
    assert table["trainer.save_every", ""].meaning.endswith("the end. May change on resuming.")


def test_help_narrows_to_a_prefix() -> None:
    config = parse_recipe("quickstart")
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

    listed = {row.key.replace("/", ".") for row in describe_config(parse_recipe(toy))}
    missing = {key for key in leaves(default_values(Config)) if key not in listed}
    assert {key for key in missing if not key.endswith(".name")} == set()


def test_a_key_of_several_variants_has_one_mark_of_where_it_may_change() -> None:
    marks = {(key.path, key.change) for key in all_keys()}
    assert len(marks) == len({path for path, _ in marks})


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


def test_loading_leaves_hydra_and_omegaconf_as_they_were(toy: str) -> None:
    store = ConfigStore.instance()
    before = store.repo, dict(store.repo), Container.resolve_parse_tree
    load_recipe(toy, ["optim.lr=0.5", "run.dir=${run.resume}"])
    with pytest.raises(ConfigError, match="not found"):
        load_recipe(toy, ["optim.lr=${nowhere}"])
    assert (store.repo, dict(store.repo), Container.resolve_parse_tree) == before
    assert not GlobalHydra.instance().is_initialized()
