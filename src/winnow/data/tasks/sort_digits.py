"""The generated task `sort_digits`: sort a string of digits, character by character.

A problem is asked as `5391:`; the worked form is selection sort, `1|539;3|59;5|9;9|#1359`.
Problems whose crc32 modulo 10 is 0 are held out for evaluation and never trained on.
Demonstrations for a warm start lie in `winnow.data.tasks.demonstrations`.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from winnow.config.data import SortDigitsTask
from winnow.data.sources import Row
from winnow.errors import DataError
from winnow.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

DATA_SOURCE = "sort_digits"
PAD, EOS, UNKNOWN = "<pad>", "<eos>", "<unk>"
DIGITS = "0123456789"
MARKS = ":|;#?"
# Room for later tasks. One character each, so that any text of known characters comes back
# from its ids unchanged.
RESERVED = "abcdefghijk"
VOCABULARY = (PAD, EOS, UNKNOWN, *DIGITS, *MARKS, *RESERVED)
PAD_ID, EOS_ID, UNKNOWN_ID = 0, 1, 2
_IDS = {token: i for i, token in enumerate(VOCABULARY)}
_EVALUATION_SEED = "evaluation"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a Hugging Face tokenizer of 29 tokens, one a character; it adds none by itself."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel(dict(_IDS), unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        clean_up_tokenization_spaces=False,
    )


def encode(text: str) -> IntArray:
    """[L] the ids that `build_tokenizer()` gives to a text without special tokens."""
    return np.array([_IDS.get(character, UNKNOWN_ID) for character in text], dtype=np.int64)


def is_held_out(digits: str) -> bool:
    """Return whether a problem is kept for evaluation."""
    return zlib.crc32(digits.encode()) % 10 == 0


def prompt_text(digits: str) -> str:
    """Write a problem as it is asked."""
    return f"{digits}:"


def solution(digits: str) -> str:
    """Sort the digits of a problem: its ground truth."""
    return "".join(sorted(digits))


def row(digits: str) -> Row:
    """Make a problem a row of data; its uid is the same whenever the problem comes round."""
    return Row(
        uid=f"{DATA_SOURCE}:{digits}",
        origin=f"{DATA_SOURCE} {digits}",
        data_source=DATA_SOURCE,
        messages=({"role": "user", "content": prompt_text(digits)},),
        ground_truth=solution(digits),
        extra={"extra_info": {"digits": digits}},
    )


class SortDigitsStream:
    """The endless training problems of a seed, a `RowStream`. A row depends on its index alone."""

    data_sources = frozenset({DATA_SOURCE})

    def __init__(self, task: SortDigitsTask, seed: int) -> None:
        self._task, self._seed = task, seed
        digits = f"{task.min_digits}-{task.max_digits} digits, seed {seed}"
        self.fingerprints = {DATA_SOURCE: digits}

    def digits(self, index: int) -> str:
        """Return the problem at `index`; problems may come round again."""
        candidates = _candidates(self._task, f"{self._seed}/{index}")
        return next(digits for digits in candidates if not is_held_out(digits))

    def row(self, index: int) -> Row:
        """Return the row at `index`."""
        return row(self.digits(index))

    def candidates(self, index: int) -> Iterator[Row]:
        return iter([self.row(index)])  # alone: they are all of a length

    def candidates_of(self, uid: str) -> Iterator[Row]:
        digits = uid.removeprefix(f"{DATA_SOURCE}:")
        fits = self._task.min_digits <= len(digits) <= self._task.max_digits
        if digits == uid or not fits or set(digits) - set(DIGITS) or is_held_out(digits):
            raise KeyError(uid)
        return iter([row(digits)])


def held_out_problems(task: SortDigitsTask, count: int) -> list[str]:
    """Return the first `count` of the one fixed list of different held-out problems.

    Raises:
        DataError: there are not so many.
    """
    found: dict[str, None] = {}
    candidates = _candidates(task, _EVALUATION_SEED)
    for _ in range(20_000 + 200 * count):
        if len(found) == count:
            break
        digits = next(candidates)
        if is_held_out(digits):
            found[digits] = None
    else:
        raise DataError(
            f"data.task.eval_problems is {count}, but {task.min_digits} to {task.max_digits} "
            f"digits give only about {len(found)} held-out problems; lower it, or raise "
            "data.task.max_digits"
        )
    return list(found)


def _candidates(task: SortDigitsTask, key: str) -> Iterator[str]:
    """Random digit strings, lengths equally likely. A hash, so that no library's generator
    can change the data."""
    lengths = task.max_digits - task.min_digits + 1
    attempt = 0
    while True:
        digest = hashlib.blake2b(f"{key}/{attempt}".encode(), digest_size=16).digest()
        number = int.from_bytes(digest, "big")
        length = task.min_digits + number % lengths
        yield f"{number // lengths % 10**length:0{length}d}"
        attempt += 1
