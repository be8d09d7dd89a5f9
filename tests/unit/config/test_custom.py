"""A user's own code is named by its place, wherever a variant can be chosen."""

from __future__ import annotations

from pathlib import Path

import pytest

from winnow.config.load import dump_config, load_recipe, resolve_recipe
from winnow.errors import ConfigError


@pytest.mark.parametrize(
    "group",
    [
        "algorithm/policy_loss",
        "algorithm/advantage",
        "sampling/filter",
        "rollout/engine",
        "data/task",
    ],
)
def test_a_user_s_own_code_is_chosen_like_a_variant_of_ours(group: str, tmp_path: Path) -> None:
    key = group.replace("/", ".")
    options = "{steps: 3, share: 0.5, on: true, text: '3'}"
    config = resolve_recipe(
        "quickstart",
        [f"{group}=custom", f"{key}.path=mine.py:made", f"{key}.options={options}"],
    )
    section, name = group.split("/")
    chosen = getattr(getattr(config, section), name)
    assert (chosen.name, chosen.path) == ("custom", "mine.py:made")
    assert chosen.options == {"steps": 3, "share": 0.5, "on": True, "text": "3"}
    assert isinstance(chosen.options["on"], bool)
    written = tmp_path / "again.yaml"
    written.write_text(dump_config(config))
    assert resolve_recipe(str(written)) == config


def test_sinks_of_a_user_are_a_list_of_places_with_options() -> None:
    sinks = "observe.sinks=[{path: mine.py:Table},{path: a.b:Line, options: {width: 3}}]"
    table, line = load_recipe("quickstart", [sinks]).observe.sinks
    assert (table.path, table.options) == ("mine.py:Table", {})
    assert (line.path, line.options) == ("a.b:Line", {"width": 3})


@pytest.mark.parametrize("place", ["mine.py", "mine.py:", ":made", "mine.py:two words"])
def test_a_place_without_file_or_name_is_refused(place: str) -> None:
    chosen = ["sampling/filter=custom", f"sampling.filter.path='{place}'"]
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", chosen)
    assert str(caught.value) == (
        f"sampling.filter.path must be FILE.py:NAME or package.module:NAME, got '{place}' "
        "(set by the command line)"
    )


def test_an_engine_of_a_user_s_own_has_no_processes() -> None:
    place = ["rollout/engine=custom", "rollout.engine.path=mine.py:Mine"]
    assert load_recipe("quickstart", place).rollout.engine.processes == 0
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", [*place, "rollout.engine.processes=2"])
    assert str(caught.value) == (
        "rollout.engine.processes is no key of rollout/engine=custom (set by the command line); "
        "choose rollout/engine=torch or rollout/engine=vllm, or leave the key out"
    )


@pytest.mark.parametrize(
    "words",
    [
        ["observe.trackers=[tensorboard,{name: wandb, mode: offline, entity: us}]"],
        [
            "observe.wandb.entity=us",
            "observe.trackers=[tensorboard,wandb]",
            "observe.wandb.mode=offline",
        ],
    ],
)
def test_trackers_are_names_and_their_options_stand_with_them_or_apart(
    words: list[str], tmp_path: Path
) -> None:
    observe = load_recipe("quickstart", words).observe
    assert observe.trackers == ("tensorboard", "wandb")
    assert (observe.wandb.mode, observe.wandb.entity) == ("offline", "us")
    file = tmp_path / "mine.yaml"
    file.write_text(
        "defaults: [quickstart]\n"
        "observe: {trackers: [tensorboard, {name: wandb, mode: offline, entity: us}]}\n"
    )
    assert load_recipe(str(file)).observe == observe


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("trackers=[{name: wandb, modus: x}]", "observe.wandb.modus is no known key (set by"),
        ("trackers=[{name: wandb, mode: x}]", "observe.wandb.mode must be one of online, offline"),
        ("trackers=[{name: wndb, mode: x}]", "observe.wndb.mode is no known key (set by the comm"),
        ("trackers=[wndb]", "observe.trackers must be a list of one of tensorboard, wandb, mlflow"),
        ("trackers=[{mode: offline}]", "observe.trackers must be a list of one of tensorboard"),
        ("trackers=[wandb,wandb]", "observe.trackers must name each tracker once, got"),
        ("mlflow.uri='http://me:secret@host'", "observe.mlflow.uri must hold no user and password"),
    ],
)
def test_a_tracker_that_cannot_be_is_refused_in_one_line(word: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_recipe("quickstart", [f"observe.{word}"])
    assert str(caught.value).startswith(message)
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
