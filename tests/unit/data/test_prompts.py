"""Rows as the policy sees them: templates, ids, the length limit."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
from tests.small_tokenizers import CHAT_TEMPLATE, train_bpe
from transformers import PreTrainedTokenizerBase

from winnow.config.data import DataConfig
from winnow.data.prompts import PromptRenderer, PromptSet
from winnow.data.sort_digits import build_tokenizer
from winnow.data.sources import Row
from winnow.errors import ConfigError, DataError, ModelError, WinnowError

TEXTS = ["What is 1 + 1?", "Solve it. Answer: 2", "[user][assistant][system]"]


def row(number: int, *contents: str, source: str = "math", roles: str = "user") -> Row:
    messages = tuple({"role": roles, "content": content} for content in contents)
    return Row(f"f.jsonl:{number}", f"f.jsonl row {number}", source, messages, "2", {"k": number})


def render(tokenizer: PreTrainedTokenizerBase, *rows: Row, **config: Any) -> PromptSet:
    return PromptRenderer(tokenizer, DataConfig(**config)).render(rows)


def error_of(
    kind: type[WinnowError], tokenizer: PreTrainedTokenizerBase, *rows: Row, **config: Any
) -> str:
    with pytest.raises(kind) as caught:
        render(tokenizer, *rows, **config)
    return str(caught.value)


def test_a_row_becomes_a_prompt_with_all_it_had(bpe: PreTrainedTokenizerBase) -> None:
    (prompt,) = render(bpe, row(4, "What is 1 + 1?")).prompts
    assert (prompt.uid, prompt.data_source, prompt.ground_truth) == ("f.jsonl:4", "math", "2")
    assert prompt.text == "What is 1 + 1?"
    assert prompt.token_ids.tolist() == bpe("What is 1 + 1?")["input_ids"]
    assert prompt.extra == {"k": 4}


def test_the_chat_template_opens_the_answer_and_can_be_left_out() -> None:
    tokenizer = train_bpe(TEXTS, chat=CHAT_TEMPLATE)
    question = row(1, "1 + 1?")
    assert render(tokenizer, question).prompt(0).text == "<s>[user]1 + 1?[assistant]"
    assert render(tokenizer, question, chat_template="none").prompt(0).text == "1 + 1?"


@pytest.mark.parametrize(
    ("chat", "text"), [(None, "1 + 1?"), (None, "<s>1 + 1?"), (CHAT_TEMPLATE, "1 + 1?")]
)
@pytest.mark.parametrize("eos_too", [False, True])
def test_the_begin_token_stands_once_in_front_and_no_end_token_behind(
    chat: str | None, eos_too: bool, text: str
) -> None:
    tokenizer = train_bpe(TEXTS, bos=True, eos_too=eos_too, chat=chat)
    ids = render(tokenizer, row(1, text)).prompt(0).token_ids.tolist()
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids


def test_a_begin_token_that_the_tokenizer_does_not_add_is_not_added() -> None:
    tokenizer = train_bpe(TEXTS)
    assert tokenizer.bos_token_id not in render(tokenizer, row(1, "1 + 1?")).prompt(0).token_ids


@pytest.mark.parametrize(
    ("templates", "text"),
    [
        ({}, "1 {x}?"),
        ({"MATH": "Q: {prompt} A:"}, "Q: 1 {x}? A:"),
        ({"*": "all {prompt}"}, "all 1 {x}?"),
        ({"*": "all {prompt}", "math": "{prompt}, {prompt} {other}"}, "1 {x}?, 1 {x}? {other}"),
        ({"gsm8k": "no {prompt}"}, "1 {x}?"),
    ],
)
def test_a_template_is_chosen_by_source_whatever_its_case(
    templates: dict[str, str], text: str, bpe: PreTrainedTokenizerBase
) -> None:
    rendered = render(bpe, row(1, "1 {x}?", source="Math"), prompt_template=templates)
    assert rendered.prompt(0).text == text


def test_a_template_goes_around_the_last_user_message_only(bpe: PreTrainedTokenizerBase) -> None:
    messages = tuple(
        {"role": role, "content": content}
        for role, content in [("user", "a"), ("assistant", "b"), ("user", "c"), ("system", "d")]
    )
    asked = Row("f:1", "f row 1", "math", messages, "2")
    text = render(bpe, asked, prompt_template={"*": "<{prompt}>"}).prompt(0).text
    assert text == "a\nb\n<c>\nd"


def test_two_templates_for_one_source_are_refused(bpe: PreTrainedTokenizerBase) -> None:
    templates = {"math": "{prompt}", "Math": "{prompt}!"}
    message = error_of(ConfigError, bpe, row(1, "a"), prompt_template=templates)
    assert message == "data.prompt_template.Math is set twice, in different case; keep one"


def test_a_template_needs_a_user_message(bpe: PreTrainedTokenizerBase) -> None:
    asked = row(3, "a", roles="system")
    assert render(bpe, asked).size == 1
    assert error_of(DataError, bpe, asked, prompt_template={"*": "{prompt}"}) == (
        "f.jsonl row 3: no message has the role user, which data.prompt_template needs; "
        "add one, or remove the template"
    )


CHAT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
THINKS = CHAT + "{% if enable_thinking %}think{% endif %}"


def test_variables_of_the_chat_template_and_a_system_prompt_reach_each_prompt() -> None:
    tokenizer = train_bpe(TEXTS, chat=THINKS)
    turns = ({"role": "system", "content": "rule"}, {"role": "user", "content": "a"})
    asked = Row("f.jsonl:1", "f.jsonl row 1", "math", turns, "2")
    on = {"chat_template_kwargs": {"enable_thinking": True}}
    for settings, text in [
        ({}, "<system>rule<user>a<assistant>"),
        (on, "<system>rule<user>a<assistant>think"),
        ({"system_prompt": "other"}, "<system>other<user>a<assistant>"),
        ({"chat_template": "none", "system_prompt": "other"}, "other\na"),
    ]:
        assert render(tokenizer, asked, **settings).prompt(0).text == text
    alone = render(
        tokenizer, row(1, "a"), system_prompt="other", prompt_template={"*": "{prompt}!"}
    )
    assert alone.prompt(0).text == "<system>other<user>a!<assistant>"


def test_a_chat_template_may_be_given_as_text_or_file(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("[{{ messages[-1].content }}]")
    for given in (str(file), "[{{ messages[-1].content }}]"):
        for tokenizer in (train_bpe(TEXTS), train_bpe(TEXTS, chat=CHAT)):
            assert render(tokenizer, row(1, "a"), chat_template=given).prompt(0).text == "[a]"
    for own, settings, message in [
        (CHAT, {"chat_template": "none.jinja"}, "data.chat_template none.jinja: No such file or "
         "directory; give auto, none, a template in Jinja, or the file that holds it"),
        (CHAT, {"chat_template_kwargs": {"enable_thinking": False}}, "data.chat_template_kwargs."
         "enable_thinking: the chat template has no variable of that name; remove it, or set "
         "another template in data.chat_template"),
    ]:  # fmt: skip
        assert error_of(ConfigError, train_bpe(TEXTS, chat=own), row(1, "a"), **settings) == message
    message = error_of(ModelError, train_bpe(TEXTS), row(1, "a"), chat_template="{{ x.y }}")
    assert message == (
        "f.jsonl row 1: data.chat_template fails: 'x' is undefined; fix it, or set "
        "data.chat_template=none"
    )


def test_a_chat_template_without_an_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("winnow.data.prompts.TEMPLATE_S", 0.05)
    turn = "{% for i in range(99999) %}"
    tokenizer = train_bpe(TEXTS, chat=turn + turn + turn + "{% endfor %}{% endfor %}{% endfor %}")
    before = signal.getsignal(signal.SIGVTALRM)
    message = error_of(ModelError, tokenizer, row(1, "a"), row(2, "b"))
    assert message == (
        "f.jsonl row 1: the tokenizer's chat template fails: it did not finish within 0.05 s; fix "
        "it, or set data.chat_template=none"
    )
    assert signal.getsignal(signal.SIGVTALRM) == before
    assert signal.getitimer(signal.ITIMER_VIRTUAL) == (0, 0)
    # Longer than the limit together, each of them short.
    slow = train_bpe(TEXTS, chat="{% for i in range(30000) %}{% endfor %}a")
    assert render(slow, *[row(i, "a") for i in range(150)]).size == 150


DIGITS = build_tokenizer()


def test_longer_prompts_are_filtered_and_counted() -> None:
    rendered = render(DIGITS, row(1, "12345"), row(2, "123"), row(3, "1234"), max_prompt_tokens=4)
    assert [prompt.uid for prompt in rendered.prompts] == ["f.jsonl:2", "f.jsonl:3"]
    assert (rendered.size, rendered.filtered, rendered.cut) == (2, 1, 0)


@pytest.mark.parametrize(
    ("side", "text"), [("left", "45678"), ("right", "12345"), ("middle", "12678")]
)
def test_longer_prompts_are_cut_on_the_side_named(side: str, text: str) -> None:
    rendered = render(
        DIGITS, row(1, "12345678"), row(2, "9"), overlong_prompts=side, max_prompt_tokens=5
    )
    assert [prompt.text for prompt in rendered.prompts] == [text, "9"]
    assert DIGITS.decode(rendered.prompt(0).token_ids) == text
    assert (rendered.size, rendered.filtered, rendered.cut) == (2, 0, 1)


def test_a_fingerprint_changes_with_what_a_file_asks_and_with_nothing_else() -> None:
    base = render(DIGITS, row(1, "12"), row(2, "34")).fingerprints
    assert list(base) == ["f.jsonl"]
    assert render(DIGITS, row(1, "12"), row(2, "34"), max_prompt_tokens=9).fingerprints == base
    assert render(DIGITS, row(1, "12"), row(2, "35")).fingerprints != base
    assert render(DIGITS, row(2, "34"), row(1, "12")).fingerprints != base
    assert render(DIGITS, row(1, "12")).fingerprints != base
    assert render(DIGITS, row(1, "12", source="x"), row(2, "34")).fingerprints != base
