"""The instructions that published files wrap around their questions: taken off, or put on.

Winnow's recipes say how to ask (`data.prompt_template`), so a question is best stored bare; and
a question is the same question with and without them.
"""

from __future__ import annotations

DAPO_BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'

_AROUND = (
    (DAPO_BEFORE, DAPO_AFTER),
    # verl's own preprocessing of gsm8k and MATH.
    ("", 'Let\'s think step by step and output the final answer after "####".'),
    ("", "Let's think step by step and output the final answer within \\boxed{}."),
)


def bare(prompt: str) -> str:
    """A prompt without a known instruction, and without white space at its ends."""
    prompt = prompt.strip()
    for before, after in _AROUND:
        if prompt.startswith(before) and prompt.endswith(after):
            return prompt[len(before) : len(prompt) - len(after)].strip()
    return prompt


def with_dapo_instruction(question: str) -> str:
    """A bare question as the published DAPO files ask it."""
    return f"{DAPO_BEFORE}{question}{DAPO_AFTER}"
