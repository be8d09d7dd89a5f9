"""The generated task `calc`, and the calculator that users may take as a tool."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

from winnow.config.data import CalcTask, DataConfig
from winnow.config.model import DemonstrationConfig
from winnow.data.calc import CalcRows, build_tokenizer, demonstrations, encode
from winnow.data.chat_template import ChatTemplate, TurnTokenizer
from winnow.data.loader import evaluation_prompts, training_prompts
from winnow.data.sort_digits import EOS_ID, is_held_out
from winnow.environments.calculator import calc
from winnow.errors import DataError

TOKENIZER = build_tokenizer()
DATA = DataConfig(task=CalcTask())


def test_held_out_problems_are_never_trained_on_and_rows_are_found_by_uid() -> None:
    source, held_out = training_prompts(DATA, TOKENIZER, 1), evaluation_prompts(DATA, TOKENIZER)
    asked = [source.prompt(index) for index in range(2000)]
    assert not any(is_held_out(prompt.uid.removeprefix("calc:")) for prompt in asked)
    assert len({prompt.uid for prompt in held_out.prompts}) == 200
    assert all(is_held_out(prompt.uid.removeprefix("calc:")) for prompt in held_out.prompts)
    assert source.find(asked[7].uid).ground_truth == asked[7].ground_truth
    # These are written down: another version must not change a recipe's data.
    assert [prompt.uid for prompt in asked[:3]] == ["calc:23*74", "calc:21*61", "calc:91*76"]
    for uid in ("37*48", "calc:37*4", "calc:37*100", "calc:a*48", held_out.prompts[0].uid):
        with pytest.raises(KeyError, match=re.escape(uid)):
            source.find(uid)
    with pytest.raises(DataError, match="eval_problems is 9, but factors 2-4 give only"):
        CalcRows(CalcTask(min_factor=2, max_factor=4, eval_problems=9), 0).held_out()


def test_demonstrations_are_spelled_as_the_chat_template_spells_conversations() -> None:
    config = DemonstrationConfig(guess_share=0.5, step_error=0.0, guess_noise=300)
    turns = TurnTokenizer(ChatTemplate(TOKENIZER, DATA), TOKENIZER, [EOS_ID])
    calls = 0
    for demo in demonstrations(50, config, CalcTask(), 64, np.random.default_rng(0)):
        text = TOKENIZER.decode(demo.prompt_ids, skip_special_tokens=True)
        question = [{"role": "user", "content": text}]
        assert turns.prompt_ids(question).tolist() == demo.prompt_ids.tolist()
        assert not is_held_out(text)
        spelled = [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in demo.turns]
        assert TOKENIZER("".join(spelled))["input_ids"] == encode("".join(spelled)).tolist()
        if len(spelled) == 1:
            assert re.fullmatch(r"=\d+", spelled[0])
            continue
        calls += 1
        assert spelled == [f"<call>{text}</call>", calc(text), f"={calc(text)}"]
        reply = turns.reply_ids([{"role": "tool", "content": spelled[1]}])
        assert reply.tolist() == demo.turns[1].tolist()
    assert 15 < calls < 35
    wrong = DemonstrationConfig(guess_share=0.0, step_error=1.0)
    (demo,) = demonstrations(1, wrong, CalcTask(), 64, np.random.default_rng(0))
    copies = [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in demo.turns]
    for one, other in pairwise([TOKENIZER.decode(demo.prompt_ids[1:-1]), copies[0][6:-7]]):
        assert all((a == b) == (a == "*") for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(
    ("expression", "result"),
    [("37*48", "1776"), ("12+3*4-5", "19"), (" -2 * 3 - 4*5*6", "-126"), ("007", "7")],
)
def test_the_calculator_works_out_sums_and_products(expression: str, result: str) -> None:
    assert calc(expression) == result


@pytest.mark.parametrize("text", ["", "2**9", "2--3", "1/2", "__import__('os')", "9*" * 200 + "9"])
def test_the_calculator_evaluates_nothing_else(text: str) -> None:
    with pytest.raises(ValueError, match="no sum or product of whole numbers"):
        calc(text)
