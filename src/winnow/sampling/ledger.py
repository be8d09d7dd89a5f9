"""The life of a group, as a synchronous state machine without input or output.

    admit -> dispatch -> finished | aborted | failed -> scored -> closed -> cut -> commit

A group is open until all its answers are scored (or one failed too often), then closed with
a verdict. A group that does not qualify ends there; a qualified one waits for a cut. Commit
is in admission order: a step trains on the earliest-admitted N groups that qualify, and may
be cut once every group before the N-th is closed, so that a group's fate depends on its
admission index only, never on when it finished.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

from winnow.config.rollout import NoFilter, SamplingConfig
from winnow.sampling.account import Fate, TokenAccount
from winnow.sampling.accounting import StepAccounting
from winnow.sampling.admission import AdmissionRule, QualifyRate
from winnow.sampling.filters import Verdict, judge
from winnow.sampling.live_groups import Dispatch, LiveGroups
from winnow.sampling.prefix import ClosedPrefix, Outcome
from winnow.sampling.report import StepGroups, Tally
from winnow.sampling.states import AnswerState, GroupState
from winnow.types import Prompt, Score, Segment, Trajectory


class Ledger:
    """All groups that live, and the token account. O(1) amortised per event."""

    def __init__(
        self,
        config: SamplingConfig,
        n: int,
        *,
        with_baseline: bool = False,
        drop_failed_scores: bool = False,
    ) -> None:
        """Begin without groups.

        Args:
            config: the rules.
            n: sampled answers a group.
            with_baseline: a group has a greedy answer too, at index n. It is written, scored and
                retried like the others, and closes with them; no filter or statistic sees it.
            drop_failed_scores: a failed scoring fails its group (`reward.on_failure`).
        """
        self.config = config
        self.wanted = config.groups_per_step
        """N"""
        self.bound = config.max_groups_per_step or 10 * config.groups_per_step
        """Groups looked at for one step: those admitted later than the last cut, carried ones
        included. No group is admitted beyond it, look-ahead or not."""
        self.version = 0
        self.looked_at = 0
        """For this step so far."""
        self.short_steps = 0
        self.lives = LiveGroups()
        self.books = StepAccounting()
        self._n, self._with_baseline = n, with_baseline
        self._rule = AdmissionRule.of(config)
        self._in_order = config.commit == "admission_order"
        self._drop_failed_scores = drop_failed_scores
        self._next_id = 0
        self._prefix = ClosedPrefix(
            config.rate_decay, filtered=not isinstance(config.filter, NoFilter)
        )
        self._queue: deque[int] = deque()  # qualified groups that a cut may take, in its order

    # Admission and dispatch

    def begin_step(self, version: int) -> list[Prompt]:
        """Weights `version` write from now on; returns prompts of groups dropped as stale.

        Only `commit=completion_order` ever drops here: it lets later groups overtake.
        """
        assert self.may_keep_running or not self.lives.running, "abort what runs before"
        self.version = version
        if self._in_order:
            return []
        oldest = version - self.config.max_staleness
        stale = [life for life in self.lives.waiting_for_cut() if life.version < oldest]
        for life in stale:
            self._drop(life, "stale")
        qualified = self.lives.qualified
        self._queue = deque(group_id for group_id in self._queue if group_id in qualified)
        self.looked_at -= len(stale)
        return [life.prompt for life in stale]

    def may_admit(self) -> bool:
        """Whether one more group may open (`AdmissionRule`, and the bound)."""
        return self.looked_at < self.bound and self._rule.allows(
            self.qualified, self.in_flight, self.lives.expected.total(self.rate)
        )

    def admit(self, prompt: Prompt) -> int:
        """Open a group for a prompt; its id is the admission index."""
        group_id = self._next_id
        history = self.rate.history(prompt.uid)
        life = GroupState.opened(
            group_id, prompt, self.version, history, self._n, with_baseline=self._with_baseline
        )
        self.lives.enter(life)
        self._next_id += 1
        self.looked_at += 1
        self.tally.admitted += 1
        return group_id

    def dispatch(self) -> list[Dispatch]:
        """What the engine must be given now, in admission order; it counts as running."""
        batch = self.lives.dispatch()
        for ask in batch:
            self.tally.resumed_answers += sum(p is not None for p in ask.prefixes.values())
        return batch

    # What the engine and the scorers report

    def wrote(self, group_id: int, index: int, segment: Segment) -> None:
        """An answer that goes on has this by now: it is booked, and where a restart resumes."""
        answer = self.lives.at_engine(group_id, index)
        if self._write(answer, len(segment)):
            answer.prefix = segment

    def finished(self, group_id: int, index: int, trajectory: Trajectory) -> None:
        """An answer is complete; it awaits its score."""
        life, answer = self.lives.come_back(group_id, index)
        self._write(answer, trajectory.generated_tokens)
        answer.trajectory = trajectory
        answer.prefix = None
        self._bury(life)

    def aborted(self, group_id: int, index: int, segment: Segment, *, stalled: bool) -> None:
        """An answer came back unfinished; it will go on behind `segment`.

        `stalled`: it was taken back for want of progress, which counts as an attempt.
        """
        self.tally.aborted_answers += 1
        self._unfinished(group_id, index, segment, stalled, "no progress")

    def failed(self, group_id: int, index: int, segment: Segment | None, error: str) -> None:
        """The engine failed on an answer; it is retried behind what is written of it."""
        self._unfinished(group_id, index, segment, True, error)

    def lose_running(self, error: str) -> None:
        """The engine forgot every answer that it had: each counts as failed once more."""
        for group_id, index in self.lives.with_engine():
            self.failed(group_id, index, None, error)

    def forget_engine(self) -> None:
        """The engine is another one: what ran goes on behind the last known prefix."""
        for group_id, index in self.lives.with_engine():
            self._unfinished(group_id, index, None, False, "")

    def scored(self, group_id: int, index: int, score: Score) -> None:
        """A finished answer has its score; with the last one the group closes.

        Ignored when the group has ended meanwhile.

        Raises:
            RewardError: the filter's metric is missing.
        """
        life = self.lives.open.get(group_id)
        if life is None:
            assert group_id < self._next_id
            return
        answer = life.answers[index]
        assert answer.trajectory is not None
        assert answer.score is None
        if score.error and (self._drop_failed_scores or score.outside):
            answer.score = score
            life.unscored -= 1
            self._doom(life, score.error)
        elif life.unscored == 1:
            # Judged before anything changes: it may raise.
            scores = [score if each is answer else each.score for each in life.sampled]
            verdict = judge([each for each in scores if each is not None], self.config.filter)
            answer.score = score
            life.unscored = 0
            self._close(life, verdict)
        else:
            answer.score = score
            life.unscored -= 1

    # The cut

    def cut_is_due(self) -> bool:
        """Whether a step can be cut: N groups in commit order, or all that the bound allows."""
        return len(self._queue) >= self.wanted or (
            self.looked_at >= self.bound and not self.lives.open
        )

    def pass_bound(self) -> None:
        """The bound was met and nothing qualified: look at as many groups again."""
        assert self.cut_is_due()
        assert not self._queue
        self.looked_at = 0
        self.tally.empty_bounds += 1

    def commit(self) -> StepGroups:
        """Take the step: settle what is trained, carry or drop everything later.

        Call it when a cut is due; nothing may run unless `may_keep_running`. With max_staleness 0
        all later groups are dropped, closed ones included, and their prompts come back in
        admission order.
        """
        assert self.cut_is_due()
        assert self.may_keep_running or not self.lives.running
        cut = [self._queue.popleft() for _ in range(self.committable)]
        for group_id in cut:
            self.books.settle(self.lives.qualified.pop(group_id), "trained", self.version)
        short = len(cut) < self.wanted
        last = cut[-1] if self._in_order and not short else self._next_id - 1
        later = self._next_id - 1 - last if self._in_order else self.in_flight + self.qualified
        looked_at = self.looked_at - later
        returned = self._drop_later(last) if self.config.max_staleness == 0 else []
        self.looked_at = later if self.config.max_staleness else 0
        self.short_steps += short
        return self.books.close(
            self.version,
            self.wanted,
            returned,
            looked_at,
            (self.qualified, self.in_flight),
            self.rate.rate,
        )

    # Looking

    @property
    def rate(self) -> QualifyRate:
        """p̂"""
        return self._prefix.rate

    @property
    def account(self) -> TokenAccount:
        """Where each token went."""
        return self.books.account

    @property
    def tally(self) -> Tally:
        """Counts since the last commit."""
        return self.books.tally

    @property
    def may_keep_running(self) -> bool:
        """Whether no group is dropped at a cut, so that the engine may go on writing across it."""
        return self._in_order and self.config.max_staleness > 0

    @property
    def committable(self) -> int:
        """Qualified groups that a cut could take now."""
        return min(len(self._queue), self.wanted)

    @property
    def qualified(self) -> int:
        """Closed groups that qualify and wait for a cut."""
        return len(self.lives.qualified)

    @property
    def in_flight(self) -> int:
        """Open groups."""
        return len(self.lives.open)

    # Inside

    def _write(self, answer: AnswerState, length: int) -> bool:
        """Book what is new of an answer; whether anything is."""
        new = length - answer.tokens
        if new <= 0:
            return False
        answer.tokens = length
        self.account.write(new)
        return True

    def _unfinished(
        self, group_id: int, index: int, segment: Segment | None, attempt: bool, error: str
    ) -> None:
        life, answer = self.lives.come_back(group_id, index)
        # A failing engine may give back less than it was sent.
        if segment is not None and self._write(answer, len(segment)):
            answer.prefix = segment
        if life.id in self.lives.doomed:
            self._bury(life)
        elif attempt and answer.attempts >= self.config.max_attempts:
            self._doom(life, error)
        else:
            answer.attempts += attempt
            self.tally.retried_answers += attempt
            self.lives.waiting.add(life.id)

    def _doom(self, life: GroupState, error: str) -> None:
        self.tally.failed += 1
        self.tally.last_error = error
        self._leave(life, "failed")
        self.lives.doomed[life.id] = life
        self._bury(life)

    def _bury(self, life: GroupState) -> None:
        if life.id in self.lives.doomed and not life.running:
            self.books.settle(self.lives.doomed.pop(life.id), "failed", self.version)

    def _close(self, life: GroupState, verdict: Verdict) -> None:
        self.books.judged(life, verdict)
        if verdict == "qualified":
            self.lives.qualified[life.id] = life
            if not self._in_order:
                self._queue.append(life.id)
            self._leave(life, "qualified")
        else:
            self._leave(life, "not")
            self.books.settle(life, verdict, self.version)

    def _leave(self, life: GroupState, outcome: Outcome) -> None:
        self.lives.leave(life)
        passed = self._prefix.close(life.id, life.prompt.uid, outcome)
        if self._in_order:
            self._queue.extend(passed)

    def _drop(self, life: GroupState, fate: Fate) -> None:
        if life.id in self.lives.open:
            self._leave(life, "dropped")
        else:
            del self.lives.qualified[life.id]
        self.books.settle(life, fate, self.version)

    def _drop_later(self, last: int) -> list[Prompt]:
        # Those that closed without qualifying go back as well: otherwise a prompt would get
        # its second chance for being slow.
        settled = (s.group for s in self.books.settled if s.group.id > last)
        prompts = {group.id: group.prompt for group in settled}
        # The prefix ends here: groups that closed behind an open one must not reach p̂.
        self._prefix.skip_to(self._next_id)
        for life in self.lives.waiting_for_cut():
            prompts[life.id] = life.prompt
            self._drop(life, "surplus")
        self._queue.clear()
        return [prompts[group_id] for group_id in sorted(prompts)]

    # State

    def state_dict(self) -> dict[str, Any]:
        """Everything, as plain Python and numpy; exact at any moment, mid-step too."""
        return {
            "version": self.version,
            "looked_at": self.looked_at,
            "short_steps": self.short_steps,
            "next_id": self._next_id,
            "queue": list(self._queue),
            "prefix": self._prefix.state_dict(),
            "lives": self.lives.state_dict(),
            "books": self.books.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        self.version = state["version"]
        self.looked_at = state["looked_at"]
        self.short_steps = state["short_steps"]
        self._next_id = state["next_id"]
        self._queue = deque(state["queue"])
        self._prefix.load_state_dict(state["prefix"])
        self.lives.load_state_dict(state["lives"])
        self.books.load_state_dict(state["books"])
