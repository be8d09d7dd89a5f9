"""DAPO on one page: a model of 0.1 M weights learns to sort digits, on a CPU, in minutes.

    python examples/rl_loop.py                           # from the quickstart's warm start
    python examples/rl_loop.py --state states/step-48    # goes on from a state that it saved

`train_step` is the algorithm; the four parts of DAPO (arXiv 2503.14476) are numbered below.
The session samples, takes gradients of a loss, and steps; all else is here to be changed.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

import winnow

Options = argparse.Namespace
DEFAULTS = {"steps": 12, "groups": 64, "min_digits": 4, "max_digits": 6, "limit": 128}


@dataclass(frozen=True)
class Group:
    """Answers to one problem."""

    digits: str
    answers: list[winnow.Completion]

    @property
    def right(self) -> list[bool]:
        """True for the answers that end with the sorted digits."""
        return [is_right(answer, self.digits) for answer in self.answers]


def draw_digits(rng: np.random.Generator, options: Options, held_out: bool = False) -> str:
    """Draw a problem; one in ten is held out, by its checksum."""
    while True:
        length = rng.integers(options.min_digits, options.max_digits + 1)
        digits = "".join(map(str, rng.integers(0, 10, length)))
        if (zlib.crc32(digits.encode()) % 10 == 0) == held_out:
            return digits


def is_right(answer: winnow.Completion, digits: str) -> bool:
    """Return whether an answer was ended by the model, with `#` and the sorted digits."""
    result = answer.text.rpartition("#")[2]
    return answer.finish_reason == "stop" and result == "".join(sorted(digits))


def shaped_reward(answer: winnow.Completion, digits: str, limit: int) -> float:
    """Return +1 or -1, less a penalty that grows to 1 over the last tokens before the limit.

    Part 1, overlong reward shaping: answers get shorter before they are cut off.
    """
    buffer = limit * 3 // 8
    excess = len(answer.token_ids) - (limit - buffer)
    return (1.0 if is_right(answer, digits) else -1.0) - min(max(excess / buffer, 0.0), 1.0)


def sample_groups(session: winnow.Session, options: Options) -> tuple[list[Group], int]:
    """Sample until a step has its groups; returns them, and how many were sampled for them.

    Part 2, dynamic sampling: where all answers are right, or all wrong, advantages are 0.
    """
    groups, sampled = list[Group](), 0
    while missing := options.groups - len(groups):
        problems = [draw_digits(session.rng, options) for _ in range(missing)]
        answers = session.sample([f"{digits}:" for digits in problems], n=8)
        groups += [g for g in map(Group, problems, answers) if 0 < sum(g.right) < len(g.right)]
        sampled += missing
    return groups, sampled


def dapo_loss(
    samples: list[winnow.Completion], advantages: list[float]
) -> Callable[[list[torch.Tensor]], torch.Tensor]:
    """Return an update's loss as a function of the current log-probs of its samples.

    Part 3, decoupled clip: the upper bound is wider, so that rare tokens can become likely.
    Part 4, token-level loss: the mean is over the tokens of all samples together.
    """

    def loss(logprobs: list[torch.Tensor]) -> torch.Tensor:
        tokens = []
        for now, sample, advantage in zip(logprobs, samples, advantages, strict=True):
            ratio = torch.exp(now - torch.from_numpy(sample.logprobs))
            clipped = ratio.clamp(1 - 0.2, 1 + 0.28)
            tokens.append(-torch.minimum(ratio * advantage, clipped * advantage))
        return torch.cat(tokens).mean()

    return loss


def train_step(session: winnow.Session, options: Options) -> str:
    """Sample groups and take four updates on them; returns a line of figures."""
    groups, sampled = sample_groups(session, options)
    rewards = [[shaped_reward(a, g.digits, options.limit) for a in g.answers] for g in groups]
    numbers = [number for number, group in enumerate(rewards) for _ in group]
    advantages = winnow.advantages(np.ravel(rewards).tolist(), numbers, "grpo")
    advantages_of = np.reshape(advantages, np.shape(rewards)).tolist()
    for update in np.array_split(session.rng.permutation(len(groups)), 4):
        samples = [answer for place in update for answer in groups[place].answers]
        weights = [weight for place in update for weight in advantages_of[place]]
        session.forward_backward(samples, dapo_loss(samples, weights))
        norm = session.optim_step(options.lr)
    return (
        f"right {np.mean([group.right for group in groups]):.3f}, reward {np.mean(rewards):+.3f}, "
        f"{len(groups)} of {sampled} groups used, norm of the last gradient {norm:.2f}"
    )


def evaluate(session: winnow.Session, options: Options) -> float:
    """Return the share of 400 held-out problems whose sampled answer is right."""
    rng = np.random.default_rng(0)
    problems = [draw_digits(rng, options, held_out=True) for _ in range(400)]
    answers = session.generate([f"{digits}:" for digits in problems])
    right = [is_right(a, digits) for (a,), digits in zip(answers, problems, strict=True)]
    return float(np.mean(right))


def main(words: list[str] | None = None) -> tuple[float, float]:
    """Train; returns the accuracy on held-out problems before and after."""
    parser = argparse.ArgumentParser(description="DAPO on one page.")
    parser.add_argument("--model", default="quickstart", help="a recipe, or a model's folder")
    parser.add_argument("--state", help="a state to go on from")
    parser.add_argument("--lr", type=float, default=4e-4)
    for name, value in DEFAULTS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=value)
    parser.add_argument("settings", nargs="*", help="of the session, such as run.seed=1")
    options = parser.parse_args(words)
    limit = f"rollout.max_response_tokens={options.limit}"
    with winnow.Session(options.model, [limit, *options.settings]) as session:
        if options.state:
            session.load_state(options.state)
        before = evaluate(session, options)
        print(f"held-out accuracy {before:.3f}")
        for step in range(1, options.steps + 1):
            print(f"step {step}: {train_step(session, options)}")
        after = evaluate(session, options)
        print(f"held-out accuracy {after:.3f}; the state is in {session.save_state('states')}")
    return before, after


if __name__ == "__main__":
    main()
