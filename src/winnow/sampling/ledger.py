"""The life of a group, as a synchronous state machine without input or output.

    admit -> dispatch -> finished | aborted | failed -> scored -> closed -> cut -> commit

A group is open until all its answers are scored (or one failed too often), then closed with
a verdict. A group that does not qualify ends there; a qualified one waits for a cut. Commit
is in admission order: a step trains on the earliest-admitted N groups that qualify, and may
be cut once every group before the N-th is closed, so that a group's fate depends on its
admission index only, never on when it finished.

A prompt's *turn* is its place among the prompts that the loader gave out. A prompt that is given
back keeps its turn when it comes again under another admission index. In admission order turns seed
the answers: if none goes on under other weights, a run learns the same tokens however many groups
were open when a step was cut.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from winnow.config.rollout import NoFilter, SamplingConfig
from winnow.sampling.accounting import StepAccounting, StepGroups, Tally, TokenAccount
from winnow.sampling.admission import ClosedPrefix, Outcome, QualifyRate, may_open_group
from winnow.sampling.filters import Verdict, make_filter
from winnow.sampling.groups import AnswerState, Dispatch, GroupState, LiveGroups
from winnow.types import Fate, Prompt, Score, Segment, Trajectory

Turns = tuple[Segment, ...]
"""Complete turns of a conversation, the policy's and the environment's."""


class Ledger:
    """The state of all live groups, and the token account. O(1) amortised per event."""

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
        self.target = config.groups_per_step
        """N"""
        self.bound = config.max_groups_per_step or 10 * config.groups_per_step
        """Groups looked at for one step: those admitted later than the last cut, carried ones
        included. No group is admitted beyond it, look-ahead or not."""
        self.version = 0
        """Version of the engines' weights."""
        self.learns = 0
        """Version of the weights that train the current step, which is the number of cut steps."""
        self.looked_at = 0
        """Groups inspected for the current step."""
        self.groups = LiveGroups()
        self.accounting = StepAccounting()
        self._n, self._with_baseline = n, with_baseline
        self._filter = make_filter(config.filter)
        self._in_order = config.commit == "admission_order"
        self._drop_failed_scores = drop_failed_scores
        self.next_id = self.next_turn = 0
        self.turns_again: deque[int] = deque()
        """Turns of the prompts given back, in the order in which they come again."""
        doubt = 0.0 if isinstance(config.filter, NoFilter) else 1.0
        self.prefix = ClosedPrefix(QualifyRate(config.rate_decay, doubt))
        self.queue: deque[int] = deque()
        """Qualified groups that a cut may take, in its order."""

    # Admission and dispatch

    def begin_step(self, version: int, learns: int | None = None) -> list[Prompt]:
        """Begin a step under weights `version`; return prompts of groups dropped as stale.

        Only `commit=completion_order` ever drops here: it lets later groups overtake.

        Args:
            learns: version of the weights that learn the step; None: the same.
        """
        assert self.may_keep_running or not self.groups.running, "abort what runs before"
        self.version, self.learns = version, version if learns is None else learns
        if self._in_order:
            return []
        oldest = version - self.config.max_staleness
        stale = [group for group in self.groups.uncommitted_groups() if group.version < oldest]
        for group in stale:
            self._drop(group, "stale")
        qualified = self.groups.qualified
        self.queue = deque(group_id for group_id in self.queue if group_id in qualified)
        self.looked_at -= len(stale)
        return self._queue_prompts_again({group.id: (group.turn, group.prompt) for group in stale})

    def may_admit(self) -> bool:
        """Return whether one more group may open (`admission.may_open_group`, and the bound)."""
        expected = self.prefix.rate.expected_qualified(self.groups.histories)
        return self.looked_at < self.bound and may_open_group(
            self.config, self.qualified, self.in_flight, expected, self.unlearnt_steps
        )

    def admit(self, prompt: Prompt) -> int:
        """Open a group for the loader's next prompt; its id is the admission index."""
        group_id, turn = self.next_id, self.next_turn
        if self.turns_again:
            turn = self.turns_again.popleft()
        else:
            self.next_turn += 1
        history = self.prefix.rate.history(prompt.uid)
        answers = [AnswerState() for _ in range(self._n + self._with_baseline)]
        n, unscored = self._n, len(answers)
        self.groups.add(
            GroupState(group_id, prompt, self.version, history, answers, n, unscored, turn=turn)
        )
        self.next_id += 1
        self.looked_at += 1
        self.tally.admitted += 1
        return group_id

    def dispatch(self) -> list[Dispatch]:
        """Return all answers to submit, in admission order, and mark them as running."""
        batch = self.groups.dispatch()
        for ask in batch:
            self.tally.resumed_answers += sum(each is not None for each in ask.begun.values())
        return batch

    # What the engine and the scorers report

    def record_progress(
        self, group_id: int, index: int, segment: Segment, earlier: Turns = ()
    ) -> None:
        """Record the tokens so far of an answer that continues; a restart resumes after them.

        Args:
            segment: of a conversation, its turn under way.
            earlier: its complete turns.
        """
        _, answer = self.groups.running_answer(group_id, index)
        self._record_tokens(answer, segment, earlier)

    def record_finished(self, group_id: int, index: int, trajectory: Trajectory) -> None:
        """Record a complete answer, whose score is pending."""
        group, answer = self.groups.return_answer(group_id, index)
        self._book_tokens(answer, trajectory.generated_tokens)
        answer.trajectory = trajectory
        answer.prefix, answer.earlier = None, ()
        self._settle_failed(group)

    def record_aborted(
        self, group_id: int, index: int, segment: Segment, earlier: Turns = (), *, stalled: bool
    ) -> None:
        """Record an unfinished answer that the engine gave up; it continues after `segment`.

        Args:
            stalled: it was aborted for lack of progress, which counts as an attempt.
        """
        self.tally.aborted_answers += 1
        self._requeue(group_id, index, (segment, earlier), stalled, "no progress")

    def record_failed(
        self, group_id: int, index: int, segment: Segment, error: str, earlier: Turns = ()
    ) -> None:
        """Retry an answer on which the engine or an environment failed, behind what is written."""
        self._requeue(group_id, index, (segment, earlier), True, error)

    def requeue_running(self, error: str = "") -> None:
        """Continue every running answer from its last known prefix, as the engine has lost it.

        Args:
            error: counts as a failed attempt of each; empty where the engine was replaced.
        """
        for group_id, index in self.groups.running_keys():
            self._requeue(group_id, index, None, bool(error), error)

    def record_score(self, group_id: int, index: int, score: Score) -> None:
        """Record a finished answer's score; the group closes with the last one.

        Ignored when the group has ended meanwhile.

        Raises:
            RewardError: the filter's metric is missing.
        """
        group = self.groups.open.get(group_id)
        if group is None:
            assert group_id < self.next_id
            return
        answer = group.answers[index]
        assert answer.trajectory is not None
        assert answer.score is None
        has_failed = score.error and (self._drop_failed_scores or score.outside)
        verdict: Verdict | None = None
        if group.unscored == 1 and not has_failed:
            # Judged before anything changes: it may raise.
            scores = [score if each is answer else each.score for each in group.sampled]
            verdict = self._filter([each for each in scores if each is not None])
        answer.score = score
        group.unscored -= 1
        if has_failed:
            self._fail(group, score.error)
        elif verdict is not None:
            self._close(group, verdict)

    # The cut

    def step_is_ready(self) -> bool:
        """Return whether a step can be cut: N groups in order, or all that the bound allows."""
        return len(self.queue) >= self.target or (
            self.looked_at >= self.bound and not self.groups.open
        )

    def extend_bound(self) -> None:
        """Allow as many groups again after a bound within which none qualified."""
        assert self.step_is_ready()
        assert not self.queue
        self.looked_at = 0
        self.tally.empty_bounds += 1

    def commit(self) -> StepGroups:
        """Cut a step: settle the groups it trains on, carry or drop all later ones.

        Call it when a cut is due; nothing may run unless `may_keep_running`. With max_staleness 0
        all later groups are dropped, closed ones included, and their prompts come back in
        admission order.
        """
        assert self.step_is_ready()
        assert self.may_keep_running or not self.groups.running
        cut = [self.queue.popleft() for _ in range(self.committable)]
        for group_id in cut:
            self.accounting.close_group(self.groups.qualified.pop(group_id), "trained", self.learns)
        short = len(cut) < self.target
        last = cut[-1] if self._in_order and not short else self.next_id - 1
        later = self.next_id - 1 - last if self._in_order else self.in_flight + self.qualified
        looked_at = self.looked_at - later
        returned = self._drop_after(last) if self.config.max_staleness == 0 else []
        self.looked_at = later if self.config.max_staleness else 0
        return self.accounting.close_step(
            self.learns,
            self.target,
            returned,
            looked_at,
            (self.qualified, self.in_flight),
            self.prefix.rate.rate,
        )

    # Looking

    @property
    def account(self) -> TokenAccount:
        """The token account."""
        return self.accounting.account

    @property
    def tally(self) -> Tally:
        """Counts since the last commit."""
        return self.accounting.tally

    @property
    def unlearnt_steps(self) -> int:
        """Number of cut steps whose weights the engines do not have yet."""
        return self.learns - self.version

    @property
    def may_keep_running(self) -> bool:
        """True if no group is dropped at a cut, so that the engine may run across it."""
        return self._in_order and self.config.max_staleness > 0

    @property
    def committable(self) -> int:
        """Qualified groups that a cut could take now."""
        return min(len(self.queue), self.target)

    @property
    def qualified(self) -> int:
        """Closed groups that qualify and wait for a cut."""
        return len(self.groups.qualified)

    @property
    def in_flight(self) -> int:
        """Open groups."""
        return len(self.groups.open)

    # Inside

    def _book_tokens(self, answer: AnswerState, length: int) -> bool:
        """Book the new tokens of an answer; return whether there are any."""
        new = length - answer.tokens
        if new <= 0:
            return False
        answer.tokens = length
        self.account.add_generated(new)
        return True

    def _record_tokens(self, answer: AnswerState, segment: Segment, earlier: Turns) -> None:
        written = len(segment) + sum(len(s) for s in earlier if s.source == "model")
        # A failing engine may give back less than it was sent.
        if len(earlier) > len(answer.earlier):
            answer.attempts = 0  # they are counted by turn
        if self._book_tokens(answer, written) or len(earlier) > len(answer.earlier):
            answer.prefix, answer.earlier = segment, earlier

    def _requeue(
        self, group_id: int, index: int, written: tuple[Segment, Turns] | None, attempt: bool,
        error: str,
    ) -> None:  # fmt: skip
        group, answer = self.groups.return_answer(group_id, index)
        if written is not None:
            self._record_tokens(answer, *written)
        if group.id in self.groups.failing:
            self._settle_failed(group)
        elif attempt and answer.attempts >= self.config.max_attempts:
            self._fail(group, error)
        else:
            answer.attempts += attempt
            self.tally.retried_answers += attempt
            self.groups.waiting.add(group.id)

    def _fail(self, group: GroupState, error: str) -> None:
        self.tally.failed += 1
        self.tally.last_error = error
        self._end_group(group, "failed")
        self.groups.failing[group.id] = group
        self._settle_failed(group)

    def _settle_failed(self, group: GroupState) -> None:
        if group.id in self.groups.failing and not group.running:
            self.accounting.close_group(self.groups.failing.pop(group.id), "failed", self.learns)

    def _close(self, group: GroupState, verdict: Verdict) -> None:
        self.accounting.count_verdict(group, verdict)
        if verdict == "qualified":
            self.groups.qualified[group.id] = group
            if not self._in_order:
                self.queue.append(group.id)
            self._end_group(group, "qualified")
        else:
            self._end_group(group, "not")
            self.accounting.close_group(group, verdict, self.learns)

    def _end_group(self, group: GroupState, outcome: Outcome) -> None:
        self.groups.remove(group)
        passed = self.prefix.close(group.id, group.prompt.uid, outcome)
        if self._in_order:
            self.queue.extend(passed)

    def _drop(self, group: GroupState, fate: Fate) -> None:
        if group.id in self.groups.open:
            self._end_group(group, "dropped")
        else:
            del self.groups.qualified[group.id]
        self.accounting.close_group(group, fate, self.learns)

    def _drop_after(self, last: int) -> list[Prompt]:
        # Those that closed without qualifying go back as well: otherwise a prompt would get
        # its second chance for being slow.
        ended = (settled for settled in self.accounting.settled if settled.group.id > last)
        dropped = {each.group.id: (each.turn, each.group.prompt) for each in ended}
        # The prefix ends here: groups that closed behind an open one must not reach p̂.
        self.prefix.skip_to(self.next_id)
        for group in self.groups.uncommitted_groups():
            dropped[group.id] = group.turn, group.prompt
            self._drop(group, "surplus")
        self.queue.clear()
        return self._queue_prompts_again(dropped)

    def _queue_prompts_again(self, dropped: Mapping[int, tuple[int, Prompt]]) -> list[Prompt]:
        """Return the prompts of dropped groups in admission order, and queue their turns first."""
        again = [dropped[group_id] for group_id in sorted(dropped)]
        self.turns_again.extendleft(turn for turn, _ in reversed(again))
        return [prompt for _, prompt in again]

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the whole state; exact at any time, mid-step too."""
        state = {name: getattr(self, name) for name in _STATE}
        return {name: _copy_state(value) for name, value in state.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state from `state_dict`."""
        older = {"learns": state["version"], "next_turn": state["next_id"], "turns_again": deque()}
        complete = {**older, **state}
        for name in _STATE:
            setattr(self, name, _copy_state(complete[name]))


_STATE = (
    *("version", "learns", "looked_at", "next_id"),
    *("next_turn", "turns_again"),
    *("queue", "prefix", "groups", "accounting"),
)
"""Attributes of a ledger that a checkpoint holds."""
_ATOMS = frozenset({int, float, str, bool, type(None)})


def _copy_state(value: Any) -> Any:
    """Copy containers and mutable dataclasses; share what is frozen."""
    kind: Any = type(value)
    if isinstance(value, dict):
        return {k: v if type(v) in _ATOMS else _copy_state(v) for k, v in value.items()}
    if isinstance(value, list | set | deque):
        return kind(map(_copy_state, value))
    if is_dataclass(value) and not kind.__dataclass_params__.frozen:
        names = (each.name for each in fields(kind) if each.init)
        return kind(**{name: _copy_state(getattr(value, name)) for name in names})
    return value
