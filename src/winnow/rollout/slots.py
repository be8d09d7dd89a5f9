"""The rows of the embedded engine: token ids, log-probs and sampling settings of each answer.

Live rows are always [0, R): a tick works on slices, and a row that leaves is replaced by the
last one. Shapes: `S` longest context and answer of a row, in tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from winnow.rollout.draw import RowParams
from winnow.rollout.engine import EMPTY, AnswerRequest, GroupRequest
from winnow.rollout.kv_cache import PromptBlock
from winnow.types import IntArray, Segment, VersionSpan


@dataclass(eq=False)
class PendingAnswer:
    """An answer on its way: queued, or in a row."""

    group: GroupRequest
    request: AnswerRequest
    block: PromptBlock | None = None
    """The block in which its context was prefilled, until it has a row."""
    block_row: int = 0
    spans: tuple[VersionSpan, ...] = field(init=False)
    """Spans of tokens that earlier weights wrote."""

    def __post_init__(self) -> None:
        self.spans = self.prefix.spans

    @property
    def prefix(self) -> Segment:
        """Tokens that were written before."""
        return self.request.prefix or EMPTY

    @property
    def context(self) -> IntArray:
        """Prompt and prefix, from which the next token is drawn."""
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
        self.with_stop_strings: list[int] = []
        """Live rows whose answers stop strings may end."""
        self.rows = torch.arange(count, device=device)

    def __len__(self) -> int:
        return len(self.answers)

    @property
    def free(self) -> int:
        """Rows without an answer."""
        return self.count - len(self.answers)

    def place(self, answers: Sequence[PendingAnswer]) -> slice:
        """Give answers the next rows; returns these."""
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
        self.params.put(here, [a.group.sampling_of(a.request) for a in answers])
        self.answers.extend(answers)
        self._refresh()
        return here

    def _refresh(self) -> None:
        self.params.keep(len(self.answers))
        self.with_stop_strings = [r for r, a in enumerate(self.answers) if a.group.sampling.stop]

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

    def tails(self, rows: Sequence[int], width: int) -> list[list[int]]:
        """The newest ids of rows, at most `width` of each and none of the prompt."""
        here = torch.tensor(rows, device=self.device)
        back = torch.arange(1 - width, 1, device=self.device)
        places = (self.at[here, None] + back).clamp_(min=0)
        ids = self.ids[here].gather(1, places).tolist()
        answers = [self._answer_length(row) for row in rows]
        return [row_ids[-min(n, width) :] for row_ids, n in zip(ids, answers, strict=True)]

    def _answer_length(self, row: int) -> int:
        return int(self.lengths[row]) - len(self.answers[row].group.prompt_ids)

    def written(self, rows: Sequence[int], version: int) -> list[Segment]:
        """Return rows' answers so far, prefixes included; new tokens are `version`'s."""
        here = torch.tensor(rows, dtype=torch.long, device=self.device)
        ids, logprobs = self.ids[here].cpu().numpy(), self.logprobs[here].cpu().numpy()
        segments = []
        for place, row in enumerate(rows):
            end = int(self.lengths[row])
            part = place, slice(end - self._answer_length(row), end)
            # Copies: a view would keep the whole block alive.
            spans = self._spans(row, version)
            segments.append(Segment(ids[part].copy(), logprobs[part].copy(), spans))
        return segments

    def close_spans(self, version: int) -> None:
        """Book all tokens written so far as `version`'s, before another version follows."""
        for row, answer in enumerate(self.answers):
            answer.spans = self._spans(row, version)

    def _spans(self, row: int, version: int) -> tuple[VersionSpan, ...]:
        answer, length = self.answers[row], self._answer_length(row)
        spans = answer.spans
        if length <= (spans[-1].stop if spans else len(answer.prefix)):
            return spans
        if spans and spans[-1].version == version:
            spans = spans[:-1]
        return (*spans, VersionSpan(version, length))

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
        self._refresh()
        return moved
