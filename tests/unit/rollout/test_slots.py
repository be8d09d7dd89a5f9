"""The rows of the embedded engine, without a model."""

from __future__ import annotations

import numpy as np
import torch

from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.rollout.slots import PrefilledAnswer, PromptBlock, Slots

PLAIN, NUCLEUS = SamplingParams(5), SamplingParams(5, top_p=0.5)


def pending(number: int, sampling: SamplingParams, greedy: bool = False) -> PrefilledAnswer:
    answer = AnswerRequest(0, number, greedy=greedy)
    return PrefilledAnswer(GroupRequest(number, np.arange(3), (answer,), sampling, number), answer)


def test_settings_that_no_row_has_any_more_are_forgotten() -> None:
    keys = torch.zeros(1, 1, 4, 2)
    block = PromptBlock([(keys, keys)])
    slots = Slots(4, torch.float32, torch.device("cpu"))
    slots.place([pending(0, NUCLEUS), pending(1, PLAIN)], block)
    slots.place([pending(2, PLAIN, greedy=True), pending(3, PLAIN)], block)
    for gone, numbers in ((0, [3, 1, 2]), (2, [3, 1]), (0, [1])):
        slots.leave([gone])
        assert [answer.group.group_id for answer in slots.answers] == numbers
        used = [slots.kinds[kind] for kind in slots.kind[: len(slots)].tolist()]
        assert used == [a.group.sampling_of(a.request) for a in slots.answers]
        assert set(slots.kinds) == set(used)
