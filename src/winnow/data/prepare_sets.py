"""The data sets that `winnow data prepare` knows by name: where they lie and what is in them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from winnow.errors import DataError

GENERATED = ("sort_digits", "countdown", "reasoning_gym/TASK")
_GYM = "reasoning_gym/"


@dataclass(frozen=True)
class NamedSet:
    """A data set on the hub."""

    name: str
    repo: str
    licence: str
    files: Mapping[str, tuple[str, ...]]
    """For each split, patterns of file names: the first one that finds any counts."""
    data_source: str
    """Given to rows that have none; routes to a scorer."""
    own_sources: tuple[str, ...]
    """Patterns, in lower case, of the `data_source`s that rows of this set may have already."""
    truth: Literal["gsm8k", "math", "integer", "text", "tests"]
    """How the ground truth is written: after `####`, in the last box, as an integer from 0 to
    999, as it stands, or as Python tests."""
    kept: tuple[str, ...] = ()
    """Columns that go into `extra_info`."""
    renamed: frozenset[str] = frozenset()
    """Own sources that say too little and become `data_source`."""
    dapo_scored: bool = True
    """Whether the answer is asked for on a line `Answer:`."""

    def split(self, wanted: str | None) -> str:
        """The split that is wanted, or else the first.

        Raises:
            DataError: there is no such split.
        """
        splits = list(self.files)
        if wanted is not None and wanted not in splits:
            raise DataError(
                f"--split is {wanted}, but {self.name} has {' and '.join(splits)}; choose one"
            )
        return wanted or splits[0]


_SETS = (
    NamedSet(
        name="gsm8k",
        repo="openai/gsm8k",
        licence="MIT",
        files={"train": ("main/train-*.parquet",), "test": ("main/test-*.parquet",)},
        data_source="openai/gsm8k",
        own_sources=("gsm8k", "openai/gsm8k"),
        truth="gsm8k",
        kept=("question", "answer"),
        dapo_scored=False,
    ),
    # Every row in one file a split, as verl takes it; EleutherAI/hendrycks_math holds the same
    # problems in 14 files, and the original hendrycks/competition_math is off the hub.
    NamedSet(
        name="math",
        repo="DigitalLearningGmbH/MATH-lighteval",
        licence="MIT",
        files={"train": ("data/train-*.parquet",), "test": ("data/test-*.parquet",)},
        data_source="MATH",
        own_sources=(
            "math",
            "math-500*",
            "huggingfaceh4/math-500",
            "lighteval/math",
            "digitallearninggmbh/math-lighteval",
        ),
        truth="math",
        kept=("level", "type", "subject", "unique_id"),
    ),
    NamedSet(
        name="dapo-math-17k",
        repo="BytedTsinghua-SIA/DAPO-Math-17k",
        licence="Apache-2.0",
        files={"train": ("data/dapo-math-17k.parquet", "data/*.parquet")},
        data_source="math_dapo",
        own_sources=("math_dapo*", "dapo_math*", "dapo-math*", "dapo-17k*"),
        truth="text",
    ),
    # The DAPO authors' own file: 30 problems, each 32 times.
    NamedSet(
        name="aime-2024",
        repo="BytedTsinghua-SIA/AIME-2024",
        licence="Apache-2.0",
        files={"test": ("data/aime-2024.parquet", "data/*.parquet")},
        data_source="aime-2024",
        own_sources=("math_dapo", "aime-2024*", "aime_2024*", "aime2024*", "aime24*"),
        truth="integer",
        kept=("ID", "id", "url"),
        renamed=frozenset({"math_dapo"}),
    ),
    NamedSet(
        name="aime-2025",
        repo="math-ai/aime25",
        licence="Apache-2.0",
        files={"test": ("test.jsonl", "test*.parquet", "data/test*.parquet")},
        data_source="aime-2025",
        own_sources=("math_dapo", "aime-2025*", "aime_2025*", "aime2025*", "aime25*"),
        truth="integer",
        kept=("ID", "id", "url"),
        renamed=frozenset({"math_dapo"}),
    ),
    # AMC 12 of 2022 and 2023; answers are written as numbers such as 142.0.
    NamedSet(
        name="amc",
        repo="AI-MO/aimo-validation-amc",
        licence="Apache-2.0",
        files={"test": ("data/train-*.parquet", "data/*.parquet")},
        data_source="amc",
        own_sources=("amc*", "ai-mo/aimo-validation-amc", "math-ai/amc23"),
        truth="text",
        kept=("id", "url"),
    ),
    NamedSet(
        name="humaneval",
        repo="openai/openai_humaneval",
        licence="MIT",
        files={"test": ("openai_humaneval/test-*.parquet",)},
        data_source="humaneval",
        own_sources=("humaneval*",),
        truth="tests",
        kept=("task_id", "canonical_solution"),
        dapo_scored=False,
    ),
    # The 427 problems that people went over; of the 974 many are ambiguous.
    NamedSet(
        name="mbpp",
        repo="google-research-datasets/mbpp",
        licence="CC-BY-4.0",
        files={
            "train": ("sanitized/train-*.parquet",),
            "test": ("sanitized/test-*.parquet",),
        },
        data_source="mbpp",
        own_sources=("mbpp*",),
        truth="tests",
        kept=("task_id", "code", "canonical_solution"),
        dapo_scored=False,
    ),
)
SETS: Mapping[str, NamedSet] = {named.name: named for named in _SETS}
NAMES = (*SETS, *GENERATED)


def is_generated(name: str) -> bool:
    """Whether a set is made on the spot."""
    return name in GENERATED[:-1] or name.startswith(_GYM)


def named_set(name: str) -> NamedSet:
    """The set of a name.

    Raises:
        DataError: there is none.
    """
    if name not in SETS:
        raise DataError(f"{name} is no data set that can be prepared; there are {', '.join(NAMES)}")
    return SETS[name]
