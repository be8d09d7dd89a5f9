"""The generated task: its texts, its tokenizer, its stream and its held-out problems."""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from winnow.config.data import SortDigitsTask
from winnow.data.sort_digits import (
    EOS_ID,
    UNKNOWN_ID,
    VOCABULARY,
    SortDigitsRows,
    build_tokenizer,
    encode,
    is_held_out,
    prompt_text,
)
from winnow.data.tokenizer import load_tokenizer
from winnow.errors import DataError

TOKENIZER = build_tokenizer()
KNOWN_TEXT = st.text(alphabet="".join(VOCABULARY[3:]), min_size=1, max_size=60)


@given(KNOWN_TEXT)
def test_a_text_comes_back_from_its_ids_and_both_encoders_agree(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert ids == encode(text).tolist()
    assert TOKENIZER.decode(ids) == text


@given(st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=20))
def test_an_unknown_character_is_one_unknown_token(text: str) -> None:
    expected = [VOCABULARY.index(c) if c in VOCABULARY else UNKNOWN_ID for c in text]
    assert TOKENIZER(text)["input_ids"] == encode(text).tolist() == expected


def test_the_tokenizer_is_the_same_after_saving_and_loading(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    text = prompt_text("5391") + "1|539;3|59;5|9;9|#1359"
    assert loaded(text)["input_ids"] == encode(text).tolist()
    assert loaded.eos_token_id == EOS_ID
    assert loaded.decode([*encode(text), EOS_ID], skip_special_tokens=True) == text
    assert loaded.chat_template is None


def digits(rows: SortDigitsRows, index: int) -> str:
    return next(rows.candidates(index)).text.removesuffix(":")


def test_a_row_depends_on_seed_and_index_alone() -> None:
    task = SortDigitsTask()
    first = [digits(SortDigitsRows(task, 1), i) for i in range(50)]
    assert [digits(SortDigitsRows(task, 1), i) for i in reversed(range(50))] == first[::-1]
    assert [digits(SortDigitsRows(task, 2), i) for i in range(50)] != first
    # These are written down: another version must not change a recipe's data.
    assert first[:5] == ["581959", "9534057", "0054", "8175", "9032"]


def test_training_problems_have_all_lengths_equally_and_are_never_held_out() -> None:
    stream = SortDigitsRows(SortDigitsTask(), 3)
    problems = [digits(stream, i) for i in range(5000)]
    lengths, counts = np.unique([len(p) for p in problems], return_counts=True)
    assert lengths.tolist() == [4, 5, 6, 7, 8]
    assert counts.min() > 900
    assert not any(zlib.crc32(p.encode()) % 10 == 0 for p in problems)
    assert all({p[at] for p in problems} == set("0123456789") for at in range(4))


def test_a_row_is_found_again_by_its_uid() -> None:
    stream = SortDigitsRows(SortDigitsTask(), 1)
    row = next(stream.candidates(7))
    again = next(stream.candidates_of(row.uid))
    assert row.uid == "sort_digits:" + digits(stream, 7)
    assert (again.uid, again.messages, again.ground_truth) == (
        row.uid,
        row.messages,
        row.ground_truth,
    )
    assert row.messages == ({"role": "user", "content": digits(stream, 7) + ":"},)


@pytest.mark.parametrize("uid", ["5391", "sort_digits:53a1", "sort_digits:539", "rows.jsonl:1"])
def test_a_uid_of_no_training_problem_is_not_found(uid: str) -> None:
    with pytest.raises(KeyError, match=re.escape(uid)):
        SortDigitsRows(SortDigitsTask(), 1).candidates_of(uid)


def test_held_out_problems_are_always_the_same_ones_first() -> None:
    many, few = (
        [row.text[:-1] for row in SortDigitsRows(SortDigitsTask(eval_problems=n), 0).held_out()]
        for n in (500, 20)
    )
    assert few == many[:20]
    assert len(set(many)) == 500
    assert all(is_held_out(problem) for problem in many)


def test_asking_for_more_held_out_problems_than_there_are_is_refused() -> None:
    with pytest.raises(DataError) as caught:
        SortDigitsRows(SortDigitsTask(min_digits=2, max_digits=2, eval_problems=400), 0).held_out()
    there = sum(is_held_out(f"{i:02d}") for i in range(100))
    assert str(caught.value) == (
        f"data.task.eval_problems is 400, but 2-2 digits give only about {there} held-out "
        "problems; lower it, or raise data.task.max_digits"
    )
