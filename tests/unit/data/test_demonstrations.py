"""Which columns hold a demonstration, and which of its tokens are imitated."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.small_tokenizers import CHAT_TEMPLATE, train_bpe
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from winnow.config.data import DataConfig, Demonstrations
from winnow.data.demonstrations import DemonstrationSet, read_demonstrations
from winnow.errors import DataError

TEXTS = ["What is 2 and 3? It is 5, and 4 and 4 are 8. [user][assistant][system]\n"]
CHATML = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.role == 'assistant' %}</s>"
    "{% endif %}{{ '\\n' }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
OLD = "{{ 'old' if m.role == 'assistant' and not loop.last else m.content }}"
FORGETS = CHATML.replace("{{ m.content }}", OLD)
"""As templates that drop the thoughts of earlier answers."""
TURNS = [
    {"role": "system", "content": "Short."},
    {"role": "user", "content": "2 and 3?"},
    {"role": "assistant", "content": "It is 5"},
    {"role": "user", "content": "4 and 4?"},
    {"role": "assistant", "content": "8"},
]


def read(
    folder: Path, *rows: Any, chat: str | None = None, data: Any = None, **options: Any
) -> tuple[DemonstrationSet, list[list[tuple[str, str]]]]:
    """Read rows; returns, for each, its segments as source and text behind the prompt's."""
    file = folder / "demos.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    tokenizer = train_bpe(TEXTS, chat=chat, bos=chat == CHAT_TEMPLATE)
    config = Demonstrations.model_validate(options)
    stop = (tokenizer.eos_token_id, 0)
    found = read_demonstrations([str(file)], config, data or DataConfig(), tokenizer, stop)
    shown = []
    for prompt in found.prompts.prompts:
        parts = [("prompt", tokenizer.decode(prompt.token_ids))]
        parts += [(s.source, tokenizer.decode(s.token_ids)) for s in found.answers[prompt.uid]]
        shown.append(parts)
    return found, shown


SHAREGPT = {"from": "human", "value": "2 and 3?"}
QUESTION = [("prompt", "2 and 3?"), ("model", "It is 5</s>")]


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2 and 3?", "completion": "It is 5"},
        {"prompt": [TURNS[1]], "completion": [TURNS[2]], "answer": "5"},
        {"question": "2 and 3?", "answer": "It is 5", "source": "x"},
        {"problem": "2 and 3?", "solution": "It is 5", "answer": "5"},
        {"instruction": "2 and 3?", "output": "It is 5"},
        {"messages": TURNS[1:3], "prompt": "2 and 3?"},
        {"conversations": [SHAREGPT, {"from": "gpt", "value": "It is 5"}]},
    ],
)  # fmt: skip
def test_known_columns_are_found(tmp_path: Path, row: Any) -> None:
    _, (shown,) = read(tmp_path, row)
    assert shown == QUESTION


@pytest.mark.parametrize("images", [{"images": ["a.png"]}, {"image": {"path": "a.png"}}])
def test_images_are_refused(tmp_path: Path, images: Any) -> None:
    row = {"prompt": "2 and 3?", "completion": "It is 5"}
    read(tmp_path, row | {"image": "python:3.12", "images": []})
    with pytest.raises(DataError, match=r"jsonl row 1: images? .*absent: such rows are texts"):
        read(tmp_path, row | images)


def test_own_columns_are_named(tmp_path: Path) -> None:
    columns = {"prompt": "frage", "answer": "antwort"}
    _, (shown,) = read(tmp_path, {"frage": "2 and 3?", "antwort": "It is 5"}, columns=columns)
    assert shown == QUESTION
    _, (shown,) = read(tmp_path, {"chat": TURNS[1:3]}, columns={"messages": "chat"})
    assert shown == QUESTION


def test_each_answer_of_a_conversation_is_imitated_to_the_token_that_ends_it(
    tmp_path: Path,
) -> None:
    row = {"messages": TURNS}
    head = "[system]Short.\n[user]2 and 3?\n[assistant]"
    assert read(tmp_path, row, chat=CHATML)[1] == [
        [
            ("prompt", head),
            ("model", "It is 5</s>"),
            ("environment", "\n[user]4 and 4?\n[assistant]"),
            ("model", "8</s>"),
        ]
    ]
    last = [("prompt", f"{head}It is 5</s>\n[user]4 and 4?\n[assistant]"), ("model", "8</s>")]
    assert read(tmp_path, row, chat=CHATML, turns="last")[1] == [last]


def test_an_answer_that_a_template_does_not_end_is_ended(tmp_path: Path) -> None:
    _, (shown,) = read(tmp_path, {"messages": TURNS[1:3]}, chat=CHAT_TEMPLATE)
    assert shown == [("prompt", "<s>[user]2 and 3?[assistant]"), ("model", "It is 5</s>")]


def test_answers_get_no_space_that_a_tokenizer_puts_in_front_of_a_text(tmp_path: Path) -> None:
    plain = Tokenizer(models.WordLevel({"</s>": 0, "[U]": 1, "[A]": 2}, unk_token="</s>"))
    # As those of Llama 2 and Mistral.
    marks = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    plain.normalizer = normalizers.Sequence(marks)
    plain.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    trainer = trainers.WordLevelTrainer(special_tokens=["</s>"], show_progress=False)
    plain.train_from_iterator(["[U] two [A] It is five", " a b"], trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '[U] ' if m.role == 'user' else ' ' }}{{ m.content }}"
        "{{ ' [A]' if m.role == 'user' else '</s>' }}{% endfor %}"
    )
    file = tmp_path / "demos.jsonl"
    said = [{"role": "user", "content": "two"}, {"role": "assistant", "content": "It is five"}]
    file.write_text(json.dumps({"messages": said}))
    found = read_demonstrations([str(file)], Demonstrations(), DataConfig(), tokenizer, (0,))
    (prompt,) = found.prompts.prompts
    (answer,) = found.answers[prompt.uid]
    wanted = tokenizer.apply_chat_template(said, return_dict=False)
    assert [*prompt.token_ids, *answer.token_ids] == wanted
    assert tokenizer.convert_ids_to_tokens(answer.token_ids) == ["▁It", "▁is", "▁five", "</s>"]


def test_all_of_a_message_reaches_the_template(tmp_path: Path) -> None:
    chat = CHATML.replace("{{ m.content }}", "{{ m.thoughts }}{{ m.content }}")
    said = [TURNS[1] | {"thoughts": None}, TURNS[2] | {"thoughts": "2, 3."}]
    _, (shown,) = read(tmp_path, {"messages": said}, chat=chat)
    assert shown[1] == ("model", "2, 3.It is 5</s>")


def test_prompts_are_those_of_training(tmp_path: Path) -> None:
    data = DataConfig(prompt_template={"*": "Q: {prompt}"}, system_prompt="Be brief.")
    _, (shown,) = read(tmp_path, {"messages": TURNS[1:3]}, chat=CHATML, data=data)
    assert shown == [
        ("prompt", "[system]Be brief.\n[user]Q: 2 and 3?\n[assistant]"),
        ("model", "It is 5</s>"),
    ]


def test_answers_that_a_template_writes_anew_are_imitated_only_as_the_last(tmp_path: Path) -> None:
    row = {"messages": TURNS}
    for chat in (FORGETS, None):
        with pytest.raises(DataError, match=r"demos.jsonl row 1: .*set sft.turns=last"):
            read(tmp_path, row, chat=chat)
        assert read(tmp_path, row, chat=chat, turns="last")[1][0][-1] == ("model", "8</s>")


def test_long_demonstrations_are_left_out_and_counted(tmp_path: Path) -> None:
    short, long = ({"prompt": "2", "completion": "3" * n} for n in (1, 50))
    found, _ = read(tmp_path, short, long, max_tokens=10)
    assert (found.prompts.size, found.prompts.filtered) == (1, 1)
    assert read(tmp_path, short, max_tokens=3)[0].prompts.size == 1, "prompt, answer and its end"
    with pytest.raises(DataError, match=r"none of 1 demonstrations fits into sft.max_tokens=10"):
        read(tmp_path, long, max_tokens=10)


@pytest.mark.parametrize(
    ("row", "fault"),
    [
        ({"text": "5"}, "no known columns of a demonstration in text; name them"),
        ({"messages": TURNS[:2]}, "the last message must be of role"),
        ({"messages": TURNS[2:3]}, "the last message must be of role"),
        (
            {"messages": [{"role": "user"}]},
            r"messages\[0\] is the object .* an object with role",
        ),
        ({"prompt": "2", "completion": ""}, "completion is an empty text"),
        ({"prompt": None, "completion": "3"}, "prompt is missing"),
    ],
)
def test_rows_that_are_no_demonstrations_are_told(tmp_path: Path, row: Any, fault: str) -> None:
    with pytest.raises(DataError, match=f"demos.jsonl row 1: {fault}"):
        read(tmp_path, row)
