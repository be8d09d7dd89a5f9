"""The token account: each generated token is booked once, when its group's life ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

Fate = Literal["trained", "all_right", "all_wrong", "surplus", "stale", "failed"]
FATES: tuple[Fate, ...] = get_args(Fate)


@dataclass(frozen=True)
class TokenCounts:
    """A reading of the account: totals, or what one step added.

    `generated` = the six fates + `in_progress` (a step adds a negative number there when it
    settles more than it generates). Truncation and baseline are flags beside the fates, not
    further ones.
    """

    generated: int = 0
    trained: int = 0
    all_right: int = 0
    all_wrong: int = 0
    surplus: int = 0
    stale: int = 0
    failed: int = 0
    in_progress: int = 0
    truncated_tokens: int = 0
    """Tokens of settled sampled answers that the response limit ended."""
    truncated_answers: int = 0
    baseline_tokens: int = 0
    """Tokens of settled groups' greedy answers."""

    @property
    def settled(self) -> int:
        """Tokens with a fate."""
        return sum(getattr(self, fate) for fate in FATES)

    def minus(self, earlier: TokenCounts) -> TokenCounts:
        """What was added since an earlier reading."""
        before = asdict(earlier)
        return TokenCounts(**{name: now - before[name] for name, now in asdict(self).items()})


@dataclass
class TokenAccount:
    """Books tokens; `check` holds after every entry."""

    generated: int = 0
    in_progress: int = 0
    """Tokens of groups whose life has not ended: unfinished, unscored, or waiting."""
    truncated_tokens: int = 0
    truncated_answers: int = 0
    baseline_tokens: int = 0
    booked: dict[Fate, int] = field(default_factory=lambda: dict.fromkeys(FATES, 0))

    def write(self, tokens: int) -> None:
        """The policy wrote these."""
        assert tokens >= 0
        self.generated += tokens
        self.in_progress += tokens
        self.check()

    def settle(
        self,
        fate: Fate,
        tokens: int,
        truncated_tokens: int,
        truncated_answers: int,
        baseline_tokens: int,
    ) -> None:
        """A group's life ended; all its tokens share its fate, those beside `tokens` are of it."""
        self.booked[fate] += tokens
        self.in_progress -= tokens
        self.truncated_tokens += truncated_tokens
        self.truncated_answers += truncated_answers
        self.baseline_tokens += baseline_tokens
        self.check()

    def check(self) -> None:
        """The invariant: generated = Σ fates + in progress."""
        assert self.in_progress >= 0
        assert self.generated == sum(self.booked.values()) + self.in_progress

    def read(self) -> TokenCounts:
        """The totals now."""
        return TokenCounts(
            generated=self.generated,
            in_progress=self.in_progress,
            truncated_tokens=self.truncated_tokens,
            truncated_answers=self.truncated_answers,
            baseline_tokens=self.baseline_tokens,
            **self.booked,
        )

    def state_dict(self) -> dict[str, Any]:
        """The totals as plain values."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Become what `state_dict` described."""
        self.generated = state["generated"]
        self.in_progress = state["in_progress"]
        self.truncated_tokens = state["truncated_tokens"]
        self.truncated_answers = state["truncated_answers"]
        self.baseline_tokens = state["baseline_tokens"]
        self.booked = dict(state["booked"])
        self.check()
