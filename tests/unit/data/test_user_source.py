"""A user's own source of prompts: checked, rendered and resumed as files are."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path
from typing import Any

import pytest

from winnow.config.data import CustomTask, DataConfig, SortDigitsTask
from winnow.data import user_source
from winnow.data.loader import PromptLoader, PromptSource, evaluation_prompts, training_prompts
from winnow.data.sort_digits import build_tokenizer
from winnow.data.user_source import UserSampler
from winnow.errors import CheckpointError, DataError
from winnow.types import Answer, Group, Prompt, Score, Trajectory

TOKENIZER = build_tokenizer()
# The example of the module's docstring, for a tokenizer that knows digits alone.
EXAMPLE = "from random import Random\n" + textwrap.dedent(
    str(user_source.__doc__).partition("Example:\n")[2].partition("A run keeps")[0]
)
FINITE = """
def rows(count=5):
    truth = {"ground_truth": "1"}
    return [
        {"data_source": f"s{i % 2}", "prompt": f"{i}:", "reward_model": truth, "level": i}
        for i in range(count)
    ]
"""


def recipe(tmp_path: Path, code: str, name: str, **options: Any) -> DataConfig:
    file = tmp_path / f"mine{len(list(tmp_path.iterdir()))}.py"  # a file is imported once
    file.write_text(code)
    task = CustomTask(path=f"{file}:{name}", options=options)
    return DataConfig(task=task, max_prompt_tokens=12)


def source(tmp_path: Path, code: str, name: str, **options: Any) -> PromptSource:
    return training_prompts(recipe(tmp_path, code, name, **options), TOKENIZER, seed=1)


def error_of(tmp_path: Path, code: str, name: str = "rows", **options: Any) -> str:
    with pytest.raises(DataError) as caught:
        source(tmp_path, code, name, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value).replace(str(tmp_path), "")


def test_the_example_never_ends_and_a_resumed_run_goes_on_at_the_same_row(tmp_path: Path) -> None:
    made = source(tmp_path, EXAMPLE, "Sums", largest=9)
    assert made.size is None
    assert made.data_sources == {"sums"}
    loader = PromptLoader(made, seed=1)
    taken = [loader.next() for _ in range(7)]
    assert all(eval(p.text.removesuffix("=")) == int(p.ground_truth) for p in taken)
    loader.give_back(taken[-2:])
    state = json.loads(json.dumps(loader.state_dict()))
    again = PromptLoader(source(tmp_path, EXAMPLE, "Sums", largest=9), seed=1)
    again.load_state_dict(state)
    later, same = ([each.next() for _ in range(20)] for each in (loader, again))
    assert [p.uid for p in later] == [f"Sums:{i}" for i in range(5, 25)] == [p.uid for p in same]
    assert [p.text for p in later] == [p.text for p in same]
    other = PromptLoader(source(tmp_path, EXAMPLE, "Sums", largest=10), seed=1)
    with pytest.raises(CheckpointError, match="Sums: the prompts differ from those"):
        other.load_state_dict(state)


def test_held_out_rows_of_the_source_are_evaluated_on(tmp_path: Path) -> None:
    config = recipe(tmp_path, EXAMPLE, "Sums")
    held_out = evaluation_prompts(config, TOKENIZER)
    assert held_out.size == 100
    assert held_out.prompt(3).uid == "Sums.held_out:3"
    finite = recipe(tmp_path, FINITE, "rows")
    assert evaluation_prompts(finite, TOKENIZER).size == 0


def test_a_row_that_is_too_long_gives_way_to_one_further_on(tmp_path: Path) -> None:
    code = """
    class Rows:
        def __getitem__(self, index):
            prompt = "1" * (99 if index == 1 else 3)
            return {"data_source": "s", "prompt": prompt, "reward_model": {"ground_truth": "1"}}
    """
    made = source(tmp_path, textwrap.dedent(code), "Rows")
    replaced = made.prompt(1)
    assert replaced.text == "111"
    assert made.find(replaced.uid).uid == replaced.uid != "Rows:1"
    with pytest.raises(KeyError):
        made.find("Other:1")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("rows = lambda: 7", "returns a int, which has no rows by index; give it __getitem__("),
        ("rows = list", "has no rows; return at least one"),
        ("rows = lambda: [3]", "row 0: must be a dict with columns, got a int; see docs/data.md"),
        (
            "rows = lambda: [{'prompt': '1'}]",
            "row 0: no known column holds the ground truth; columns: prompt; name the column",
        ),
        (
            "rows = lambda: [{'data_source': 's', 'prompt': [], 'reward_model': "
            "{'ground_truth': 1}}]",
            "row 0: prompt is an empty list; it must be a text or a list of messages",
        ),
        ("rows = lambda: 1 / 0", "fails with ZeroDivisionError: division by zero; correct the co"),
        (
            "class rows:\n def __getitem__(self, i): return {}[i]",
            "row 0 fails with KeyError: 0; co",
        ),
        ("other = 1\ndef f(): 1", "has no callable rows; give one of f"),
    ],
)
def test_a_source_that_fails_is_told_in_one_line(tmp_path: Path, code: str, message: str) -> None:
    said = error_of(tmp_path, code)
    assert said.startswith("data.task.path /mine0.py:rows ")
    assert message in said


SAMPLER = """
class Chooses:
    def __init__(self, prompts, seed, step=1):
        self.n, self.at, self.step, self.seen = len(prompts), seed, step, []
    def next(self):
        self.at = (self.at + self.step) % self.n
        return self.at
    def update(self, results):
        self.seen += [(index, [score.reward for score in scores]) for index, scores in results]
        self.step = 1 + len(self.seen) % 3
    def state_dict(self):
        return {"at": self.at, "step": self.step, "seen": self.seen}
    def load_state_dict(self, state):
        self.at, self.step, self.seen = state["at"], state["step"], state["seen"]

class Half:
    def __init__(self, prompts, seed): ...
    def next(self): ...
    def update(self, results): ...

class Wild(Chooses):
    def next(self):
        return self.n

class Broken(Chooses):
    def update(self, results):
        return results[9]
"""


def ordered(tmp_path: Path, name: str, seed: int = 0, **options: int) -> PromptLoader:
    (tmp_path / "order.py").write_text(SAMPLER)
    given: dict[str, Any] = {"sampler": f"{tmp_path}/order.py:{name}", "sampler_options": options}
    config = DataConfig(task=SortDigitsTask(), max_train_prompts=7, **given)
    source = training_prompts(config, TOKENIZER, seed=1)
    return PromptLoader(source, 0, order=UserSampler(config, source, seed))


def closed(prompt: Prompt, *rewards: float) -> Group:
    trajectory = Trajectory((), "stop")
    answers = tuple(Answer(trajectory, Score(reward, reward)) for reward in rewards)
    return Group(0, prompt, answers)


def test_a_sampler_chooses_hears_the_scores_and_goes_on_where_it_was(tmp_path: Path) -> None:
    loader = ordered(tmp_path, "Chooses", seed=2, step=2)
    first = [loader.next() for _ in range(5)]
    expected = [loader._source.prompt(i).uid for i in (4, 6, 1, 3, 5)]
    assert [prompt.uid for prompt in first] == expected
    loader.report_settled([closed(first[1], 1.0, 0.0), closed(first[0])])
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["order"]["seen"] == [[6, [1.0, 0.0]], [4, []]]
    kept = loader.state_dict()
    after = [loader.next().uid for _ in range(9)]
    loader.report_settled([closed(first[2], 1.0)])
    assert len(kept["order"]["seen"]) == 2, "the state is a copy"
    again = ordered(tmp_path, "Chooses", seed=5)
    again.load_state_dict(state)
    assert [again.next().uid for _ in range(9)] == after


def test_a_sampler_that_does_not_fit_is_told_in_one_line(tmp_path: Path) -> None:
    place = f"data.sampler {tmp_path}/order.py"
    with pytest.raises(DataError) as caught:
        ordered(tmp_path, "Half")
    assert str(caught.value) == (
        f"{place}:Half has no method state_dict, load_state_dict; see docs/extending.md"
    )
    with pytest.raises(DataError) as caught:
        ordered(tmp_path, "Wild").next()
    assert str(caught.value) == (
        f"{place}:Wild: next() must return an integer from 0 to 6, got 7; correct the code"
    )
    with pytest.raises(DataError, match="Broken fails with IndexError: list index out of range"):
        ordered(tmp_path, "Broken").report_settled([])
    config = DataConfig(task=SortDigitsTask(), sampler=f"{tmp_path}/order.py:Chooses")
    with pytest.raises(DataError, match=r"data/task=sort_digits is endless; set data.max_train_"):
        UserSampler(config, training_prompts(config, TOKENIZER, 0), 0)
