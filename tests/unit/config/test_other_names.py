"""Names of other systems: each is answered as that system's own source asks for, all at once.

tests/fixtures/names has the expected answers, written from the sources of verl, TRL, OpenRLHF, Ray
and Hydra. `python -m tests.unit.config.test_other_names` prints how many of each list are answered.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from benchmarks.other_names import render_markdown
from tests.winnow_command import in_this_process

from winnow.config.load import _renamed_path, parse_recipe
from winnow.config.other_names import OURS, load_other_names
from winnow.config.schema import all_keys, variants
from winnow.errors import ConfigError

PAGE = Path(__file__).parents[3] / "docs/coming_from.md"
LISTS = Path(__file__).parents[2] / "fixtures/names"
SYSTEMS = {
    "verl.txt": "verl",
    "verl_new.txt": "verl|Ray|Hydra",
    "dapo_script.txt": "verl",
    "trl.txt": "TRL",
    "openrlhf.txt": "OpenRLHF",
}


def faults(*overrides: str) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse_recipe("quickstart", overrides)
    return str(caught.value).splitlines()


def wrong_answers(file: str) -> tuple[int, list[str]]:
    """The number of names in a list, and those that are not answered as it says."""
    lines = (LISTS / file).read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    ours = [typed for typed, expected, _ in rows if expected == "="]
    theirs = [row for row in rows if row[1] != "="]
    said = faults(*(typed for typed, *_ in rows))
    assert len(said) == len(rows) - len(ours)
    wrong = []
    for (typed, expected, _), line in zip(theirs, said, strict=True):
        assert line.startswith(typed.partition("=")[0].lstrip("+")), line
        remedy = line.partition("; ")[2]
        whose = rf"that is (?:[^;']* )?(?:{SYSTEMS[file]})\b[^;']*'s name(?:, and| for) "
        start = whose if remedy.startswith("that is") else "^(?:write )?"
        found = re.search(start + r"(?:(?P<kind>no setting|not in)|(?P<key>[a-z][^\s;]+))", remedy)
        kinds = {"no setting": "-", "not in": "!", None: "?"}
        answer = (found["key"] or kinds[found["kind"]]) if found else "?"
        if expected not in (answer, answer.partition("=")[0]):
            wrong.append(f"{typed}: {answer}, not {expected}")
    return len(rows), wrong


@pytest.mark.parametrize("file", SYSTEMS)
def test_each_name_of_a_list_is_answered_as_the_source_of_its_system_asks_for(file: str) -> None:
    assert wrong_answers(file)[1] == []


def test_every_answer_names_a_key_and_a_variant_that_exist_or_says_why_there_is_none() -> None:
    known = {key.spelling: key.field for key in all_keys()}
    for row in (row for rows in load_other_names().values() for row in rows):
        assert not row.system.startswith(f"{OURS} ") or row.name not in known, row
        key, _, value = row.ours.removesuffix(".*").partition("=")
        if key in ("-", "!", "?"):
            assert row.meaning or key == "?", row
        elif key == "cluster.runtime_env":
            assert row.for_subkey(["pip"])
        else:
            assert key in known, row
            assert not value or value in variants(known[key]) or not variants(known[key]), row


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("trainer.total_epochs=3", "1,791,700 (1 pass of the published script: at most 1,166"),
        ("+actor_rollout_ref.model.override_config.embd_pdrop=0.", "not in Winnow yet: changes"),
        ("actor_rollout_ref.model.lora.type=lora", "not in Winnow yet: further options"),
        ("actor_rollout_ref.rollout.no_such_key=1", "no counterpart in docs/coming_from.md"),
        ("num_examine=1", "verl's name for observe.examples"),
        ("temperature=1", "TRL and OpenRLHF's name for rollout.temperature"),
        ("algorithm.filter_groups.max_num_gen_batches=10", "times data.gen_batch_size"),
        ("algorithm.filter_groups.max_num_gen_batches=0", "endless there, cannot be said"),
        ("algorithm.filter_groups.metric=seq_final_reward", "after a KL no filter is possible"),
        ("actor_rollout_ref.actor.optim.lr_warmup_steps=10", "lr * (k - 1) / warm-up, ours at lr"),
        ("data.apply_chat_template_kwargs={enable_thinking: false}", "kwargs.enable_thinking"),
        (
            "algorithm.kl.reward.coef=0.0",
            "not a key of algorithm/kl/reward=none (set by the command",
        ),
        ("algorithm.kl.reward.coef=0.0", "no setting needed: algorithm/kl/reward=none is"),
        ("algorithm.kl.reward.coef=0.1", "choose algorithm/kl/reward=adaptive or"),
        ("sampling.filter.metric=seq_reward", "does not take 'seq_reward' (set by the command"),
        ("sampling.filter.metric=seq_reward", "; write sampling.filter.metric=reward (verl's"),
        ("sampling.filter.metric=acc", "; write sampling.filter.metric=accuracy"),
        ("sft.steps=10", "write trainer.steps"),
        ("trainer/strategy=deepspeed", "not in Winnow yet: DeepSpeed"),
        ("rollout/engine=sglang", "rollout.engine.url has no default"),
        ("algorithm=grpo", "choose algorithm/advantage=grpo"),
        ("trainer.total_epoch=3", "did you mean"),
    ],
)
def test_what_users_of_other_systems_type(override: str, words: str) -> None:
    assert words in faults(override)[0]


def test_a_variant_of_another_system_that_is_one_of_ours_runs_and_a_line_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        config = parse_recipe("quickstart", ["trainer/strategy=fsdp", "trainer.strategy.ranks=3"])
    assert (config.trainer.strategy.name, config.trainer.strategy.ranks) == ("fsdp2", 3)
    assert caplog.messages[0].startswith("trainer/strategy=fsdp runs as trainer/strategy=fsdp2 (")


RENAMED = """{Winnow 0.1: {optim.rate: optim.lr, algorithm.objective: algorithm/policy_loss.*,
optim.algorithm: '- | AdamW is what there is'}}"""
MINE = """{defaults: [quickstart], optim: {rate: 0.5}, critic: {optim: {lr: '${optim.rate}'}},
algorithm: {objective: {name: cispo, r_max: 3}}}"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A recipe of an earlier version, whose keys had other names."""
    (tmp_path / "names.yaml").write_text(RENAMED)
    (tmp_path / "mine.yaml").write_text(MINE)
    monkeypatch.setattr("winnow.config.other_names._TABLE", tmp_path / "names.yaml")
    load_other_names.cache_clear()
    yield str(tmp_path / "mine.yaml")
    load_other_names.cache_clear()
    _renamed_path.cache_clear()


def test_a_key_of_an_earlier_version_sets_the_one_of_now_and_one_line_says_so(
    mine: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(2):
        config = parse_recipe(mine, ["algorithm/objective=dppo_tv"])
    assert (config.optim.lr, config.critic.optim.lr) == (0.5, 0.5)
    assert config.algorithm.policy_loss.name == "dppo_tv"
    assert [line.partition("; the next version removes")[0] for line in caplog.messages] == [
        "optim.rate was renamed to optim.lr",
        "algorithm.objective.name was renamed to algorithm.policy_loss.name",
        "algorithm.objective.r_max was renamed to algorithm.policy_loss.r_max",
        "algorithm.objective was renamed to algorithm.policy_loss",
    ]
    assert faults("optim.algorithm=adam")[0].endswith(
        "that is Winnow 0.1's name, and no setting needed: AdamW is what there is"
    )


def test_all_flags_of_another_system_are_answered_at_once(tmp_path: Path) -> None:
    flags = ["--num_generations", "8", "--algo.kl.init_coef=0.1", "--rollout.top_p", "0.9"]
    hydra = ["--cfg", "job", "--resolve", "--config-name=x", "beta=0", "optim.lr=1", "--jobs", "1"]
    said = in_this_process("train", "grpo", *flags, *hydra, folder=tmp_path)
    assert (said.code, said.out) == (2, "")
    lines = said.err.splitlines()
    for line, words in zip(
        lines,
        [
            "no such option: --num_generations; that is TRL's name for rollout.n, given as KEY=",
            "no such option: --algo.kl.init_coef; that is OpenRLHF's name for algorithm.kl.reward",
            "no such option: --rollout.top_p; that is OpenRLHF's name for rollout.top_p, given as",
            "no such option: --cfg; that is Hydra's name, and no setting needed: `winnow",
            "no such option: --resolve; that is Hydra's name",
            "no such option: --config-name; that is Hydra's name",
            "beta is not a known key; that is TRL's name for algorithm/kl/loss=none",
        ],
        strict=True,
    ):
        assert words in line
    assert list(tmp_path.iterdir()) == []


def test_the_page_of_the_docs_is_the_table() -> None:
    assert PAGE.read_text(encoding="utf-8") == render_markdown()
    assert OURS in {row.system for rows in load_other_names().values() for row in rows}


if __name__ == "__main__":
    for name in SYSTEMS:
        count, wrong = wrong_answers(name)
        print(f"{name}: {count - len(wrong)} of {count}", *wrong, sep="\n  ")
