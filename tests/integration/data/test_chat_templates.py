"""Tokens of replies against whole renderings, by the chat templates of many models.

The templates are those in the wheel of trl, which is downloaded into the user's cache and not
installed. Each gets a tokenizer whose special tokens are those that it spells.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from winnow.config.data import DataConfig
from winnow.data.chat_template import ChatTemplate, TurnTokenizer
from winnow.errors import ModelError

pytestmark = pytest.mark.real
TRL = "trl==1.16.0"
BAR = "\N{FULLWIDTH VERTICAL LINE}"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = re.compile(
    rf"<[|{BAR}][^<>|{BAR}\n'\"]+[|{BAR}]>|</?(?:think|tool_call|tool_response|s)>"
    r"|<(?:start|end)_of_turn>|<turn\|>|<\|turn>|<end_of_utterance>|\[/?INST\]|\[TOOL_[A-Z]+\]"
)
STOPS = (
    *("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|return|>", "<|call|>", "<|end|>", "</s>"),
    *(f"<{BAR}end▁of▁sentence{BAR}>", "<end_of_turn>", "<end_of_utterance>"),
    "<|END_OF_TURN_TOKEN|>",
    *("<turn|>", "<|endoftext|>"),
)
GLM_STOPS = "<|user|>", "<|observation|>", "<|endoftext|>"
PARAMETERS = {name: {"type": "integer", "description": name} for name in "ab"}
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add.",
        "parameters": {"type": "object", "properties": PARAMETERS, "required": ["a", "b"]},
    },
}
Message = dict[str, Any]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def said(text: str, reasoning: str = "", calls: Sequence[int] = ()) -> Message:
    """A turn of the policy, with a call for each number."""
    message: Message = {"role": "assistant", "content": text}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        functions = [{"name": "add", "arguments": {"a": number, "b": 2}} for number in calls]
        pairs = zip(calls, functions, strict=True)
        message["tool_calls"] = [
            {"type": "function", "id": f"call{number:05d}", "function": f} for number, f in pairs
        ]
    return message


def result(number: int, text: str) -> Message:
    return {"role": "tool", "name": "add", "tool_call_id": f"call{number:05d}", "content": text}


CONVERSATIONS: Mapping[str, Sequence[tuple[Message, Sequence[Message]]]] = {
    "user": [(said("three"), [user("sure?")]), (said("yes"), [user("and\n\n 5?")])],
    "tool": [(said("", calls=[1]), [result(1, "3")]), (said("", calls=[4]), [result(4, "6\n")])],
    "tools": [(said("", calls=[1, 4]), [result(1, "3"), result(4, "6")])],
    "reasoning": [(said("three", "hm"), [user("sure?")]), (said("yes", "so"), [user("and 5?")])],
    "special": [(said("three"), [user("sure? SPECIAL")])],
}
"""Turns with the replies to them; SPECIAL stands for the special tokens, spelled."""


def tokenizer_of(template: str) -> PreTrainedTokenizerFast:
    specials = sorted({*SPECIAL.findall(template), "<s>", "</s>"})
    model = Tokenizer(models.BPE())
    # As in recent models, line breaks are a piece of their own whatever follows.
    words = pre_tokenizers.Split(Regex(r"[\r\n]+|[^\S\r\n]?\w+|[^\w\s]+|\s"), "isolated")
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([words, bytes_of])
    model.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", *specials],
        show_progress=False,
    )
    model.train_from_iterator([template, Path(__file__).read_text()], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=model,
        pad_token="<pad>",
        bos_token=next((name for name in specials if "begin" in name), "<s>"),
        eos_token="</s>",
        chat_template=template,
    )


def difference(name: str, template: str, conversation: str) -> str:
    """Compare the ids that a conversation grows by with those of whole renderings.

    A turn of the policy is what the template makes of it at the end of a conversation.
    """
    own = tokenizer_of(template)
    specials = {*own.added_tokens_encoder}
    stops = set(GLM_STOPS if name.startswith("glm") else STOPS) & specials
    if "<|return|>" in stops:  # of which <|end|> ends a message, not a turn
        stops -= {"<|end|>"}
    stop_ids = own.convert_tokens_to_ids(sorted(stops))
    chat = ChatTemplate(own, DataConfig(), [ADD] if conversation.startswith("tool") else [])
    turns = TurnTokenizer(chat, own, stop_ids)
    messages = [user("1+2?")]
    context, rewritten = turns.prompt_ids(messages), False
    for turn, reply in CONVERSATIONS[conversation]:
        text = chat.render([*messages, turn], "a turn", answered=True)
        ids = np.array(own(text, add_special_tokens=False)["input_ids"])
        before = turns.prompt_ids(messages)
        shared = min(len(ids), len(before))
        differing = np.flatnonzero(ids[:shared] != before[:shared])
        rest = ids[differing[0] if len(differing) else shared :]
        (ends,) = np.isin(rest, stop_ids).nonzero()
        if not len(ends):
            return "refused"
        context = np.concatenate([context, rest[: ends[0] + 1]])
        spelling = "".join(specials)
        spelled = [{**m, "content": m["content"].replace("SPECIAL", spelling)} for m in reply]
        tail = turns.reply_ids(spelled)
        counts = [np.isin(turns.reply_ids(each), stop_ids).sum() for each in (reply, spelled)]
        if counts[0] != counts[1]:
            return "INJECTED"
        messages += [turn, *spelled]
        truth = turns.prompt_ids(messages)
        if not np.array_equal(truth, np.concatenate([context, tail])):
            rewritten = True
            if np.array_equal(truth[: len(context)], context):
                return "WRONG"
        context = np.concatenate([context, tail])
    return "rewritten" if rewritten else "exact"


@pytest.fixture(scope="module")
def templates() -> dict[str, str]:
    """By name; the wheel is downloaded once a machine."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "winnow-tests"
    if not [*cache.glob("trl-*.whl")]:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", TRL, "-d", cache]
        subprocess.run(command, check=True, timeout=200)
    (wheel,) = cache.glob("trl-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = [Path(name) for name in archive.namelist() if name.endswith(".jinja")]
        texts = {each.stem: archive.read(str(each)).decode() for each in names}
    return {"chatml": CHATML, **dict(sorted(texts.items()))}


def test_replies_are_what_whole_renderings_have_or_the_template_rewrites(
    templates: dict[str, str],
) -> None:
    counts = Counter[str]()
    print(f"\n{'template':34}" + "".join(f"{name:>11}" for name in CONVERSATIONS))
    for name, template in templates.items():
        row = []
        for conversation in CONVERSATIONS:
            try:
                row.append(difference(name, template, conversation))
            except ModelError:
                row.append("refused")
        counts.update(row)
        print(f"{name:34}" + "".join(f"{each:>11}" for each in row))
    print(", ".join(f"{name} {count}" for name, count in counts.most_common()))
    assert not {"WRONG", "INJECTED"} & {*counts}
    assert counts["exact"] > counts.total() / 2
