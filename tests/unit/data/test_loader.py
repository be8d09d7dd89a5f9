"""The endless walk over prompts, and that it can stop and go on anywhere."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.config.data import DataConfig, SortDigitsTask
from winnow.data.loader import (
    GeneratedPrompts,
    PromptLoader,
    PromptSource,
    evaluation_prompts,
    training_prompts,
)
from winnow.data.prompts import PromptSet
from winnow.data.sort_digits import build_tokenizer, is_held_out
from winnow.errors import CheckpointError, DataError
from winnow.types import Prompt

TOKENIZER = build_tokenizer()
TASK = DataConfig(task=SortDigitsTask())


def prompts(count: int, name: str = "f.jsonl", shift: int = 0) -> PromptSet:
    made = tuple(
        Prompt(f"{name}:{i}", np.array([i + shift]), str(i), "math", "2") for i in range(count)
    )
    return PromptSet(made)


def merged(*sets: PromptSet) -> PromptSet:
    return PromptSet(tuple(p for s in sets for p in s.prompts))


def take(loader: PromptLoader, count: int) -> list[str]:
    return [loader.next().uid for _ in range(count)]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    restored: dict[str, Any] = json.loads(json.dumps(state))
    return restored


@pytest.fixture(scope="module")
def generated() -> PromptSource:
    """The endless source."""
    return training_prompts(TASK, TOKENIZER, seed=1)


def test_each_epoch_brings_every_prompt_once_in_an_order_of_its_own_and_of_the_seed() -> None:
    loader = PromptLoader(prompts(20), seed=3)
    epochs = [take(loader, 20) for _ in range(4)]
    again, other = (take(PromptLoader(prompts(20), seed), 80) for seed in (3, 4))
    assert again == [uid for epoch in epochs for uid in epoch] != other
    assert loader.state_dict()["epoch"] == 4
    assert all(len(set(epoch)) == 20 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4


def test_the_passes_over_the_data_are_a_figure_where_it_ends(generated: PromptSource) -> None:
    loader = PromptLoader(prompts(4), seed=1)
    told = []
    for _ in range(6):
        told.append(loader.figures()["data/epoch"])
        loader.next()
    assert told == [0, 0.25, 0.5, 0.75, 1, 1.25]
    assert PromptLoader(generated, seed=1).figures() == {}


def test_without_shuffling_prompts_come_in_the_order_of_their_rows() -> None:
    loader = PromptLoader(prompts(3), seed=3, shuffle=False)
    assert take(loader, 5) == ["f.jsonl:0", "f.jsonl:1", "f.jsonl:2", "f.jsonl:0", "f.jsonl:1"]


def test_so_many_rows_are_taken_by_the_seed_or_the_first(
    write_jsonl: Callable[..., str], generated: PromptSource
) -> None:
    path = write_jsonl([{"question": str(i), "answer": f"#### {i}"} for i in range(50)])

    def taken(seed: int, **settings: Any) -> list[int]:
        config = DataConfig(train_files=(path,), max_train_prompts=9, **settings)
        found = training_prompts(config, TOKENIZER, seed)
        return [int(found.prompt(i).ground_truth) for i in range(found.size or 0)]

    assert taken(0, shuffle=False) == list(range(9))
    assert taken(0) == taken(0) == sorted(set(taken(0)))
    assert len(taken(0)) == 9
    assert len({tuple(taken(seed)) for seed in range(5)}) == 5
    assert {row for seed in range(40) for row in taken(seed)} == set(range(50))
    limited = DataConfig(task=SortDigitsTask(), max_train_prompts=3)
    of_a_task = training_prompts(limited, TOKENIZER, seed=1)
    assert of_a_task.size == 3
    first = [generated.prompt(i).uid for i in range(3)]
    assert [of_a_task.prompt(i).uid for i in range(3)] == first


def test_what_is_given_back_comes_first_in_the_same_order() -> None:
    loader = PromptLoader(prompts(10), seed=3)
    taken = [loader.next() for _ in range(6)]
    rest = take(PromptLoader(prompts(10), seed=3), 12)[6:]
    loader.give_back(taken[3:])
    loader.give_back(taken[:2])
    expected = [p.uid for p in [*taken[:2], *taken[3:]]]
    assert take(loader, 11) == expected + rest


# What a run does with a loader: take so many, or give back so many of the last taken.
ACTIONS = st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=12)


@given(
    actions=ACTIONS,
    after=ACTIONS,
    size=st.integers(1, 9) | st.none(),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
)
def test_a_loader_restored_at_any_point_goes_on_the_same(
    actions: list[tuple[bool, int]],
    after: list[tuple[bool, int]],
    size: int | None,
    seed: int,
    shuffle: bool,
) -> None:
    def source() -> PromptSource:
        return prompts(size) if size else training_prompts(TASK, TOKENIZER, seed)

    def act(loader: PromptLoader, script: list[tuple[bool, int]]) -> list[str]:
        seen: list[Prompt] = []
        for give_back, count in script:
            if give_back and count:
                loader.give_back(seen[-count:])
            else:
                seen += [loader.next() for _ in range(count)]
        return [prompt.uid for prompt in seen]

    loader = PromptLoader(source(), seed, shuffle)
    act(loader, actions)
    restored = PromptLoader(source(), seed, shuffle)
    restored.load_state_dict(through_json(loader.state_dict()))
    assert restored.state_dict() == loader.state_dict()
    assert act(restored, after) == act(loader, after)
    assert take(restored, 20) == take(loader, 20)


@given(st.integers(1, 8), st.lists(st.integers(1, 5), max_size=8))
def test_giving_back_never_loses_or_doubles_a_prompt(size: int, counts: list[int]) -> None:
    loader = PromptLoader(prompts(size), seed=1)
    for count in counts:
        loader.give_back([loader.next() for _ in range(count)])
    assert Counter(take(loader, 3 * size)) == Counter({f"f.jsonl:{i}": 3 for i in range(size)})


def error_of(was: PromptSource, now: PromptSource, seed: int = 1, shuffle: bool = True) -> str:
    loader = PromptLoader(was, seed=1)
    loader.give_back([loader.next()])
    with pytest.raises(CheckpointError) as caught:
        PromptLoader(now, seed, shuffle).load_state_dict(through_json(loader.state_dict()))
    return str(caught.value)


A, B = prompts(3, "a.jsonl"), prompts(3, "b.jsonl")


@pytest.mark.parametrize(
    ("was", "now", "message"),
    [
        (A, prompts(4, "a.jsonl"), "a.jsonl: the prompts differ from those the checkpoint was "
         "saved with; restore data.train_files, the tokenizer and the section data, or start a "
         "new run"),
        (A, prompts(3, "a.jsonl", shift=1), "a.jsonl: the prompts differ from those"),
        (A, B, "a.jsonl: the prompts differ from those"),
        (A, merged(A, B), "b.jsonl: the prompts differ from those"),
        (merged(A, B), merged(B, A), "the data came in the order a.jsonl, b.jsonl when the "
         "checkpoint was saved and comes as b.jsonl, a.jsonl now; restore the order, or start a "
         "new run"),
    ],
)  # fmt: skip
def test_a_state_of_other_data_is_refused(was: PromptSet, now: PromptSet, message: str) -> None:
    assert error_of(was, now).startswith(message)


def test_a_state_of_another_order_is_refused() -> None:
    assert error_of(A, A, seed=2) == (
        "run.seed was 1 when the checkpoint was saved and is 2 now, which changes the order of "
        "the prompts; set it back, or start a new run"
    )
    assert error_of(A, A, shuffle=False).startswith("data.shuffle was True when the checkpoint ")


def test_a_state_with_an_unknown_prompt_is_refused_and_changes_nothing() -> None:
    loader = PromptLoader(A, seed=1)
    take(loader, 2)
    before = loader.state_dict()
    with pytest.raises(CheckpointError) as caught:
        loader.load_state_dict({**before, "position": 0, "returned": ["a.jsonl:99"]})
    assert str(caught.value) == (
        "the checkpoint holds the prompt a.jsonl:99, which the data no longer has; restore the "
        "data, or start a new run"
    )
    assert loader.state_dict() == before


def test_a_recipe_without_training_data_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        training_prompts(DataConfig(), TOKENIZER, 1)
    assert str(caught.value) == (
        "data.train_files is empty and data/task=none; name the files to train on"
    )


def test_a_task_brings_its_held_out_problems_for_evaluation() -> None:
    config = DataConfig(task=SortDigitsTask(eval_problems=30))
    held_out = evaluation_prompts(config, TOKENIZER)
    assert held_out.size == 30
    assert all(is_held_out(p.text.removesuffix(":")) for p in held_out.prompts)
    assert evaluation_prompts(DataConfig(), TOKENIZER).size == 0


def test_a_generated_prompt_must_fit_too() -> None:
    config = DataConfig(task=SortDigitsTask(), max_prompt_tokens=2)
    source = training_prompts(config, TOKENIZER, 1)
    assert isinstance(source, GeneratedPrompts)
    with pytest.raises(DataError, match="none of the 1 prompts fits"):
        source.prompt(0)


class CountingTokenizer:
    """A tokenizer that counts how often it is asked."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return TOKENIZER(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(TOKENIZER, name)


def test_a_generated_prompt_is_tokenized_once() -> None:
    tokenizer: Any = CountingTokenizer()
    source = training_prompts(TASK, tokenizer, 1)
    before = tokenizer.calls
    made = [source.prompt(index) for index in range(5)]
    assert tokenizer.calls == before + 5
    assert [source.find(prompt.uid).text for prompt in made] == [prompt.text for prompt in made]
    assert tokenizer.calls == before + 10
