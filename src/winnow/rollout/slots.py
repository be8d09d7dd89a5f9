"""The rows of the embedded engine: what each has written and how it goes on.

Live rows are always [0, R): a tick works on slices, and a row that leaves is replaced by the
last one. Shapes: `S` longest context and answer of a row, in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from winnow.rollout.draw import RowParams
from winnow.rollout.engine import AnswerRequest, GroupRequest
from winnow.rollout.kv_cache import PromptBlock
from winnow.types import IntArray, Segment, VersionSpan

EMPTY = Segment(np.zeros(0, np.int64), np.zeros(0, np.float32), ())


@dataclass(eq=False)
class PendingAnswer:
    """An answer on its way: queued, or in a row."""

    group: GroupRequest
    request: AnswerRequest
    block: PromptBlock | None = None
    """Where its context was prefilled, until it has a row."""
    block_row: int = 0

    @property
    def prefix(self) -> Segment:
        """What was written before."""
        return self.request.prefix or EMPTY

    @property
    def context(self) -> IntArray:
        """Prompt and prefix: what the next token is drawn from."""
        if self.request.prefix is None:
            return self.group.prompt_ids
        return np.concatenate([self.group.prompt_ids, self.prefix.token_ids])


class Slots:
    """Token ids, log-probs and sampling parameters of the rows, as tensors on the device."""

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self.answers: list[PendingAnswer] = []
        self.ids = torch.zeros(count, 0, dtype=torch.long, device=device)
        """[count, S] context and answer."""
        self.logprobs = torch.zeros(count, 0, device=device)
        """[count, S] nats; 0 on the prompt."""
        self._numbers = torch.zeros(4, count, dtype=torch.long, device=device)
        self.at, self.limit, self.start, self.seed = self._numbers
        """[count] each: place of the newest token; the last place allowed; where the answer
        begins; key of its random numbers."""
        self.lengths = np.zeros(count, np.int64)
        """`at` + 1, known to the host without asking the device."""
        self.params = RowParams(count, device)
        self.rows = torch.arange(count, device=device)

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def free(self) -> int:
        """Rows without an answer."""
        return self.count - len(self.answers)

    def place(self, answers: Sequence[PendingAnswer]) -> Tensor:
        """Give answers the next rows; returns their indices, a slice of [0, count)."""
        first = len(self.answers)
        here = slice(first, first + len(answers))
        contexts = [answer.context for answer in answers]
        lengths = np.array([len(context) for context in contexts])
        starts = np.array([len(a.group.prompt_ids) for a in answers])
        limits = starts + np.array([a.group.sampling.max_tokens for a in answers]) - 1
        self._reserve(int(limits.max()) + 1)
        width = int(lengths.max())
        ids = np.zeros((len(answers), width), np.int64)
        logprobs = np.zeros((len(answers), width), np.float32)
        for i, (answer, context) in enumerate(zip(answers, contexts, strict=True)):
            ids[i, : len(context)] = context
            logprobs[i, starts[i] : len(context)] = answer.prefix.logprobs
        self.ids[here, :width] = torch.from_numpy(ids).to(self.device)
        self.logprobs[here, :width] = torch.from_numpy(logprobs).to(self.device)
        seeds = np.array([a.request.seed for a in answers], np.uint64).astype(np.int64)
        numbers = np.stack([lengths - 1, limits, starts, seeds])
        self._numbers[:, here] = torch.from_numpy(numbers).to(self.device)
        self.lengths[here] = lengths
        self.params.put(here, [answer.group.sampling for answer in answers])
        self.answers.extend(answers)
        self.params.refresh(len(self.answers))
        return self.rows[here]

    def _reserve(self, length: int) -> None:
        grow = length - self.ids.shape[1]
        if grow > 0:
            self.ids, self.logprobs = pad(self.ids, (0, grow)), pad(self.logprobs, (0, grow))

    def append(self, ids: Tensor, logprobs: Tensor) -> None:
        """Write one more token [R] and its log-prob [R] in each live row."""
        count = len(self.answers)
        rows, at = self.rows[:count], self.at[:count]
        at += 1
        self.lengths[:count] += 1
        self.ids[rows, at] = ids
        self.logprobs[rows, at] = logprobs

    def written(self, row: int, version: int) -> Segment:
        """Everything a row's answer has so far, its prefix included; new tokens are `version`'s."""
        answer = self.answers[row]
        begin, end = len(answer.group.prompt_ids), int(self.lengths[row])
        spans = answer.prefix.spans
        if end - begin > len(answer.prefix):
            if spans and spans[-1].version == version:
                spans = spans[:-1]
            spans = (*spans, VersionSpan(version, end - begin))
        # Copies: the row is written over by the next answer.
        return Segment(
            np.array(self.ids[row, begin:end].cpu().numpy()),
            np.array(self.logprobs[row, begin:end].cpu().numpy()),
            spans,
        )

    def leave(self, rows: Sequence[int]) -> tuple[Tensor, Tensor, int] | None:
        """Free rows and move the last ones into the holes.

        Returns:
            Source rows, target rows and the longest length moved, for the cache to follow;
            None when nothing moved.
        """
        gone, live = set(rows), len(self.answers) - len(rows)
        target = [row for row in sorted(gone) if row < live]
        source = [row for row in range(live, len(self.answers)) if row not in gone]
        moved = None
        if target:
            here = torch.tensor(source, device=self.device)
            there = torch.tensor(target, device=self.device)
            moved = here, there, int(self.lengths[source].max())
            self.ids[there] = self.ids[here]
            self.logprobs[there] = self.logprobs[here]
            self._numbers[:, there] = self._numbers[:, here]
            self.lengths[target] = self.lengths[source]
            self.params.move(here, there)
            for old, new in zip(source, target, strict=True):
                self.answers[new] = self.answers[old]
        del self.answers[live:]
        self.params.refresh(live)
        return moved
