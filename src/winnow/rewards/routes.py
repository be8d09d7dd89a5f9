"""The data sources that have a scorer without anybody naming one.

A name ends in `*` where a set has variants; case does not matter.
"""

from __future__ import annotations

from collections.abc import Mapping

_SOURCES: Mapping[str, tuple[str, ...]] = {
    "sort_digits": ("sort_digits",),
    "gsm8k": ("gsm8k", "openai/gsm8k"),
    # Asked for, trained and published by the line `Answer:`.
    "dapo_math": ("math_dapo*", "dapo_math*", "dapo-math*", "dapo-17k*", "aime*"),
    "math_verify": (
        "math",
        "math-500*",
        "math_500*",
        "math500*",
        "HuggingFaceH4/MATH-500",
        "lighteval/MATH*",
        "DigitalLearningGmbH/MATH-lighteval",
        "hendrycks/competition_math",
        "EleutherAI/hendrycks_math*",
        "numina*",
        "AI-MO/NuminaMath*",
        "amc*",
        "AI-MO/aimo-validation-amc",
        "math-ai/amc23",
        "olympiadbench*",
        "minerva*",
    ),
    "geometry3k": ("geometry3k*", "geo3k*", "hiyouga/geometry3k"),
    "search_qa_em": (
        "searchR1_*",
        "nq",
        "nq_*",
        "triviaqa*",
        "popqa*",
        "hotpotqa*",
        "2wikimultihopqa*",
        "musique*",
        "bamboogle*",
    ),
    "multiple_choice": (
        "multiple_choice*",
        "mmlu*",
        "cais/mmlu*",
        "TIGER-Lab/MMLU-Pro*",
        "gpqa*",
        "Idavidrein/gpqa*",
        "ai2_arc*",
        "allenai/ai2_arc*",
        "commonsense_qa*",
        "openbookqa*",
    ),
    "code": (
        "apps*",
        "codeparrot/apps",
        "taco*",
        "BAAI/TACO",
        "codecontests*",
        "code_contests*",
        "deepmind/code_contests",
        "codeforces*",
        "humaneval*",
        "openai_humaneval*",
        "openai/openai_humaneval",
        "mbpp*",
        "google-research-datasets/mbpp",
    ),
    "countdown": ("countdown*", "Jiayi-Pan/Countdown-Tasks-3to4"),
    "reasoning_gym": ("reasoning_gym", "reasoning_gym/*"),
}

ROUTES: Mapping[str, str] = {
    source: scorer for scorer, sources in _SOURCES.items() for source in sources
}
"""Scorer by source."""
