"""Games of TextArena and environments of Gymnasium, as they are; and rows of seeds."""

from __future__ import annotations

import sys

import pytest
from tests.recipes import recipe

from winnow.config.data import EpisodesTask
from winnow.data.episodes import EpisodeRows
from winnow.environments import Turn
from winnow.environments.gymnasium import GymnasiumEpisode
from winnow.environments.textarena import TextArenaGame
from winnow.errors import ConfigError

pytest.importorskip("textarena")
pytest.importorskip("gymnasium")
PRESSES = [Turn(f"[{button}]") for button in ("red", "blue", "red", "green", "red", "red")]


def game(id="GuessTheNumber-v0", seed=3, **options):
    made = TextArenaGame(id, options)
    return made, made.reset({"seed": seed, "data_source": "x"})


def episode(id="FrozenLake-v1", actions=(), **options):
    made = GymnasiumEpisode(id, options, actions)
    return made, made.reset({"seed": 3, "data_source": "x"})


def test_a_game_says_what_is_new_and_rewards_its_end():
    guess, first = game()
    assert "between 1 and 20" in first
    replies = {n: guess.step(Turn(f"[{n}]")) for n in (5, 21)}
    assert replies[5].observation == "The target number is higher."
    assert "outside the range" in replies[21].observation
    assert "[21]" not in replies[21].observation
    last = guess.step(Turn("I do not know."))
    assert (last.done, last.metrics["invalid_move"], last.metrics["success"]) == (True, 1, 0)
    assert 0 < last.reward < 1
    secret = guess._game.game_number
    won = game()[0].step(Turn(str(secret)))  # brackets are added, as textarena's wrapper does
    assert (won.done, won.reward, won.metrics["success"]) == (True, 1.0, 1.0)


def test_a_games_chances_depend_on_its_seed_and_turns_alone():
    alone, _ = game("Bandit-v0")
    replies = [alone.step(turn).observation for turn in PRESSES]
    first, _ = game("Bandit-v0")
    second, _ = game("Bandit-v0", seed=4)
    between = [(first.step(turn).observation, second.step(turn).observation) for turn in PRESSES]
    assert [mine for mine, _ in between] == replies
    assert [other for _, other in between] != replies


def test_a_reward_that_is_a_text_counts_as_none():
    countdown, _ = game("Countdown-v0")
    countdown.step(Turn("?"))
    assert (last := countdown.step(Turn("?"))).done
    assert last.reward == 0.0


@pytest.mark.parametrize(
    ("make", "row", "line"),
    [
        (lambda: TextArenaGame("Gues-v0", {}), {}, "textarena has no such game"),
        (lambda: TextArenaGame("TicTacToe-v0", {}), {"seed": 1}, "a game of several players"),
        (lambda: TextArenaGame("Bandit-v0", {"x": 1}), {"seed": 1}, r"options.*argument 'x'"),
        (lambda: TextArenaGame("Bandit-v0", {}), {}, "a row of x has no seed.*data/task=episodes"),
        (lambda: GymnasiumEpisode("Lake-v1", {}, ()), {}, "environment.id is Lake-v1: .*exist"),
        (lambda: GymnasiumEpisode("FrozenLake-v1", {"x": 1}, ()), {}, "argument 'x'"),
        (lambda: GymnasiumEpisode("Pendulum-v1", {}, ()), {}, "are Box.*, not Discrete"),
        (lambda: GymnasiumEpisode("Taxi-v4", {}, ("go",)), {}, "actions has 1 names, .* has 6"),
    ],
)
def test_what_cannot_be_played_is_refused_in_one_line(make, row, line):
    with pytest.raises(ConfigError, match=line) as refused:
        make().reset({"data_source": "x", **row})
    assert "\n" not in str(refused.value)


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ConfigError, match=r"textarena, .*pip install 'winnow-rl\[textarena\]'"):
        game()


def test_an_episode_is_a_picture_and_actions_go_by_name_or_number():
    lake, first = episode(is_slippery=False)
    assert "[left] or [0], [down] or [1]" in first
    assert first.endswith("<red S>FFF\nFHFH\nFFFH\nHFFG")
    by_name = lake.step(Turn("To the goal: not [up] but [Right]"))
    assert by_name.observation.endswith("S<red F>FF\nFHFH\nFFFH\nHFFG")
    assert not lake.step(Turn("[0]")).done
    for text in ("", "right", "[jump]", "[4]"):
        assert lake.step(Turn(text)).observation.startswith(
            "This is no action. Write one of [left]"
        )
    last = [lake.step(Turn(f"[{n}]")) for n in (1, 1, 2, 2, 1, 2)][-1]
    assert (last.done, last.reward, last.metrics["terminated"]) == (True, 1.0, 1.0)


def test_an_episode_without_a_picture_or_names_has_numbers_and_ends_at_its_limit():
    _, first = episode("Blackjack-v1", natural=True)
    assert first.endswith("(7, 10, 0)")
    taxi, first = episode("Taxi-v4", max_episode_steps=2)
    assert "<blue R>" in first
    steps = [taxi.step(Turn("[north]")), taxi.step(Turn("[5]"))]
    assert [(each.reward, each.done) for each in steps] == [(-1.0, False), (-10.0, True)]
    assert steps[1].metrics["truncated"] == 1.0
    _, first = episode("CartPole-v1", actions=("west", "east"))
    assert "[west] or [0], [east] or [1]" in first


def test_seeds_for_evaluation_are_not_trained_on():
    rows = EpisodeRows(EpisodesTask(train_episodes=50, eval_episodes=20))
    train = [next(rows.candidates(index)).extra["seed"] for index in range(rows.size)]
    held_out = [row.extra["seed"] for row in rows.held_out()]
    assert len({*train, *held_out}) == 70
    (again,) = rows.candidates_of("episodes:7")
    assert again.extra["seed"] == 7


def test_environments_that_need_no_data_get_seeds_and_give_the_reward():
    config = recipe(
        "dapo-math", "environment=textarena", "environment.id=Bandit-v0", "model.path=x"
    )
    assert (config.data.task.name, config.reward.manager.name) == ("episodes", "environment")
    files = recipe(
        *("dapo-math", "environment=gymnasium", "environment.id=Taxi-v4", "model.path=x"),
        "data.train_files=[seeds.jsonl]",
    )
    assert (files.data.task.name, files.reward.manager.name) == ("none", "auto")
