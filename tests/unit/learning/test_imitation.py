"""Imitation against a plain loop in float64, and however its sequences are packed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from tests.small_models import digits_model
from tests.written import answer, environment, written
from transformers import GPT2Config, GPT2LMHeadModel

from winnow.errors import TrainingError
from winnow.learning.batch import pack, split_update
from winnow.learning.imitation import Imitator, imitation_loss
from winnow.learning.strategy import Strategy
from winnow.models.causal_lm import use_layout_attention
from winnow.observe.metrics import Metrics, Stopwatch
from winnow.types import Group, Prompt

LENGTHS = ((3, 5), (1, 1), (7, 2, 4, 6), (2, 9))
"""Tokens of a prompt, an answer, and of what follows it: not imitated, an answer."""


def groups() -> list[Group]:
    rng = np.random.default_rng(0)
    found = []
    for number, (start, *rest) in enumerate(LENGTHS):
        segments = tuple(
            (environment if place % 2 else written)(rng.integers(3, 29, n).tolist())
            for place, n in enumerate(rest)
        )
        prompt = Prompt(str(number), rng.integers(3, 29, start), "", "", None)
        found.append(Group(number, prompt, (answer(*segments),)))
    return found


def double_model() -> Any:
    """A GPT-2, all of which transformers computes in the type of its weights."""
    torch.manual_seed(0)
    shape = {"vocab_size": 29, "n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**shape, initializer_range=0.3)).double().eval()


def by_loop() -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers' own model, one sequence at a time."""
    model, terms = double_model(), []
    for group in groups():
        trajectory = group.answers[0].trajectory
        ids = np.concatenate([group.prompt.token_ids, trajectory.token_ids])
        wanted = np.concatenate([np.zeros(len(group.prompt.token_ids), bool), trajectory.gen_mask])
        logits = model(torch.from_numpy(ids)[None]).logits[0]
        for place in np.flatnonzero(wanted):
            terms.append(-logits[place - 1].log_softmax(-1)[ids[place]])
    loss = torch.stack(terms).mean()
    loss.backward()
    return float(loss), {n: p.grad for n, p in model.named_parameters()}


def gradients(strategy: Strategy) -> dict[str, torch.Tensor]:
    named = strategy.model.named_parameters()
    return {name: p.grad.clone() for name, p in named if p.grad is not None}


def by_strategy(
    order: Sequence[int], max_tokens: int, ranks: int
) -> tuple[float, dict[str, torch.Tensor]]:
    model = double_model()
    use_layout_attention(model)
    strategy = Strategy(model)
    shown = groups()
    batch = pack([shown[i] for i in order])
    shares = split_update(batch, range(batch.n_groups), max_tokens, ranks)
    parts = [shares.micro_batches(rank) for rank in range(ranks)]
    total = 0.0
    for micro in parts:
        held = [each for each in micro if each.lengths]
        stats = strategy.forward_backward(held, frozenset({"logprob"}), imitation_loss)
        total += stats.get("loss", 0.0)
    return total, gradients(strategy)


@pytest.mark.parametrize(
    ("order", "max_tokens", "ranks"),
    [((0, 1, 2, 3), 1000, 1), ((0, 1, 2, 3), 1, 1), ((3, 1, 0, 2), 20, 1), ((2, 0, 3, 1), 12, 3)],
)
def test_loss_and_gradient_are_those_of_a_loop_however_they_are_packed(
    order: Sequence[int], max_tokens: int, ranks: int
) -> None:
    loss, wanted = by_loop()
    found_loss, found = by_strategy(order, max_tokens, ranks)
    assert found_loss == pytest.approx(loss, rel=1e-12)
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-13, msg=name)


def imitator(**options: Any) -> Imitator:
    model = digits_model(num_hidden_layers=2)
    use_layout_attention(model)
    return Imitator(Strategy(model, **options), 16, lambda step: 0.02, max_skipped_updates=2)


def test_steps_lower_the_loss_that_is_held_out() -> None:
    learner, shown = imitator(), groups()
    before = learner.held_out(shown)
    metrics = Metrics()
    for step in range(1, 6):
        learned = learner.learn(shown, step, metrics, Stopwatch())
    figures = metrics.record()
    assert learner.held_out(shown) < figures["sft/loss"] < before
    assert figures["sft/tokens"] == 5 * (5 + 1 + 2 + 6 + 9)
    assert figures["sft/updates"] == 5
    assert learned.packed_tokens == sum(map(sum, LENGTHS))
    assert learned.prompt_lengths.tolist() == [3, 1, 7, 2]


def test_gradients_that_are_not_finite_stop_it_and_the_count_outlives_a_step() -> None:
    learner, shown = imitator(), groups()
    with torch.no_grad():
        learner.strategy.model.lm_head.weight[5] = float("nan")  # type: ignore[union-attr, operator]
    learner.learn(shown, 1, Metrics(), Stopwatch())
    resumed = imitator()
    resumed.strategy.model.load_state_dict(learner.strategy.model.state_dict())
    resumed.load_state_dict(learner.state_dict())
    with pytest.raises(TrainingError, match=r"step 2: 2 updates in a row.*lower optim.lr"):
        resumed.learn(shown, 2, Metrics(), Stopwatch())
