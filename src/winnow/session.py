"""A training loop of your own: a model that samples answers and learns from a loss of yours.

    prompts ─sample─► completions ─► rewards, filters, advantages: yours
                                        │
        optim_step ◄── gradients ◄── forward_backward(completions, loss)

Model, engine and optimizer are those of a run in one process: packed samples, an engine that shares
the model's weights. What a run's recipe says of steps, groups, filters and advantages is the
loop's. `examples/rl_loop.py` is DAPO on one page.

Shapes: `T` packed tokens, `B` samples, `L` tokens of a sample's answer. Log-probs are in nats.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from winnow.api import LLM, Completion, Prompts
from winnow.builders.run import rollout_sampling
from winnow.checkpoints import checkpoint
from winnow.checkpoints.opening import pin_microbatch_tokens
from winnow.config.load import dump_config
from winnow.config.roles import needs_reference
from winnow.config.trainer import WholeModels
from winnow.errors import CheckpointError, ConfigError
from winnow.learning.batch import Batch, MicroBatch, pack
from winnow.learning.policy import Policy
from winnow.learning.runner import Output, Outputs
from winnow.learning.strategy import LossResult, Strategy, run_pass
from winnow.models.causal_lm import model_writer
from winnow.ranks.learner import make_objective, policy_options
from winnow.rollout.weights import WeightUpdate
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory

LossFunction = Callable[[list[Tensor]], Tensor]
"""Takes the log-probs of each sample's answer, [L] each, and returns a scalar."""
_LOGPROB: frozenset[Output] = frozenset({"logprob"})


class Session(LLM):
    """A model that samples and learns in this process, one call at a time.

    Example::

        with winnow.Session("FOLDER") as session:
            [answers] = session.sample(["5391:"], n=8)
            session.forward_backward(answers, lambda logprobs: -torch.cat(logprobs).mean())
            session.optim_step(lr=1e-5)

    Of the settings `model`, `rollout`, `optim` and `trainer.microbatch_tokens` apply, and those of
    the loss (`algorithm.policy_loss`, `algorithm.aggregation`, `algorithm.entropy_coef`) where it
    is called by advantages.

    Args:
        model: as for `LLM`.
        overrides: as for `LLM`.
        trust: as for `LLM`.

    Raises:
        ConfigError: the settings ask for ranks, or for a KL to a reference model.
        WinnowError: as for `LLM`.
    """

    _trains = True

    def __init__(
        self, model: str | Path, overrides: Sequence[str] = (), trust: bool = False
    ) -> None:
        super().__init__(model, overrides, trust)
        self._config = config = pin_microbatch_tokens(self._config)
        policy, strategy = self._policy, config.trainer.strategy
        if not isinstance(strategy, WholeModels) or needs_reference(config.algorithm):
            self.close()
            raise ConfigError(
                f"a Session trains one model in its process, got trainer/strategy={strategy.name} "
                f"and algorithm.kl={config.algorithm.kl.model_dump()}; pass "
                "'trainer/strategy=single', 'algorithm/kl/loss=none' and 'algorithm/kl/reward=none'"
            )
        options = policy_options(config, policy.vocabulary)
        self._strategy = Strategy(policy.model, compiles=strategy.compile, **options)
        objective = replace(make_objective(config), old="behav", reports_mismatch=False)
        self._role = Policy(self._strategy, objective)
        self.rng = np.random.default_rng(config.run.seed)
        """Random numbers of `run.seed` for the loop and for `sample`; saved with the state."""
        self.steps = 0
        """The number of optimizer steps so far."""

    def sample(self, prompts: Prompts, n: int | None = None) -> list[list[Completion]]:
        """Sample n answers to each prompt, others at each call, as `rollout` of the settings says.

        Args:
            prompts: as for `generate`, which is for evaluation: it draws no random number of `rng`.
            n: `rollout.n` by default.

        Raises:
            WinnowError: as for `generate`.
        """
        rollout, seed = self._config.rollout, int(self.rng.integers(1 << 63))
        sampling = rollout_sampling(rollout, self._policy)
        return self._answer(prompts, rollout.n if n is None else n, sampling, seed)

    def forward_backward(
        self,
        samples: Sequence[Completion],
        loss: LossFunction | None = None,
        *,
        advantages: Sequence[float] | None = None,
    ) -> float:
        """Add the gradient of a loss of these samples to those since the last step.

        Its samples are packed and run in micro-batches, which change nothing in the gradient. A
        `loss` of your own costs one more forward pass than that of the settings.

        Args:
            samples: [B] answers of `sample`; or of others, as `Completion`s with token ids.
            loss: your function of the log-probs under `softmax(logits / rollout.temperature)`,
                by the current weights; it is called once, with all samples.
            advantages: [B]; in the place of a function for `algorithm/policy_loss` of the settings,
                with the samples' own log-probs as those of the old policy.

        Returns:
            The loss.

        Raises:
            ConfigError: there is no sample, neither or both of loss and advantages, another number
                of advantages than of samples, or the function returns no scalar of its log-probs.
        """
        if not any(len(sample.token_ids) for sample in samples):
            raise ConfigError(f"samples must have tokens, got none in {len(samples)} samples")
        count = None if advantages is None else len(advantages)
        if (loss is None) == (count is None) or count not in (None, len(samples)):
            raise ConfigError(
                "forward_backward takes either a loss or one advantage a sample, got loss="
                f"{loss} and {count or 0} advantages for {len(samples)} samples"
            )
        strategy, batch, objective = self._strategy, _pack(samples), self._role.objective
        groups, tokens = range(batch.n_groups), self._config.trainer.token_budget
        if loss is not None:
            value = _differentiate(strategy, batch, loss, tokens)
            micro = strategy.sharder.cut_update(batch, groups, tokens)
            strategy.forward_backward(micro, _LOGPROB, _linear_loss)
            return value
        weights = torch.tensor(advantages, dtype=batch.behav.dtype)
        batch.columns["advantages"] = weights.repeat_interleave(batch.offsets.diff())
        batch.columns["old"] = batch.behav
        keys, seed = torch.arange(batch.n_samples), int(self.rng.integers(1 << 63))
        self._role.select_tokens(batch, groups, keys, seed)
        micro = strategy.sharder.cut_update(batch, groups, tokens)
        return strategy.forward_backward(micro, objective.outputs, objective)["loss"]

    def optim_step(self, lr: float | None = None) -> float:
        """Step AdamW along the gradients added up since the last step, and clear them.

        Args:
            lr: `optim.lr` by default; the other settings of `optim` but its schedule hold, too.

        Returns:
            The norm of the gradients before they are clipped to `optim.grad_clip`. If it is not
            finite, no weight has changed.
        """
        self._require_open()
        figures = self._strategy.optimizer_step(self._config.optim.lr if lr is None else lr)
        self.steps += 1
        self._publish()
        return figures["grad_norm"]

    def save_state(self, folder: str | Path) -> Path:
        """Save weights, optimizer and random numbers to `folder/step-N`, N being `steps`.

        `model/` in it is a Hugging Face folder. Gradients that wait for a step are not saved.

        Returns:
            The path, for `load_state`.

        Raises:
            CheckpointError: the disk refuses; nothing new is left behind.
        """
        policy, strategy = self._policy, self._strategy
        random, weights = self.rng.bit_generator.state, dict(strategy.export_weights())
        state = {"session": {"policy": strategy.state_dict(), "random": random}}
        write = model_writer(policy.model, policy.tokenizer)
        snapshot = checkpoint.Snapshot(state, lambda path: write(weights, path))
        facts = checkpoint.Manifest(self.steps, machine=checkpoint.describe_machine(policy.device))
        recipe = dump_config(self._config)
        return checkpoint.save_checkpoint(Path(folder), facts, snapshot, recipe).path

    def load_state(self, path: str | Path) -> None:
        """Restore what `save_state` saved: the calls that follow have the same bits.

        Gradients that wait for a step are dropped.

        Args:
            path: as `save_state` returned it.

        Raises:
            CheckpointError: it is damaged, no state of a session, or one of another model.
        """
        self._require_open()
        saved = checkpoint.Checkpoint(Path(path), 0)
        steps, state = checkpoint.verify(saved).step, checkpoint.load_state(saved).get("session")
        if state is None:
            raise CheckpointError(
                f"{path} is of a run, not of a session; use Session('RUN FOLDER')"
            )
        self._strategy.load_state_dict(state["policy"])
        self.rng.bit_generator.state, self.steps = state["random"], steps
        self._publish()

    def _publish(self) -> None:
        """Tell the engine that the weights that it shares have changed."""
        self._run_coroutine(self._engine.load_weights(WeightUpdate(self.steps)))


def _differentiate(strategy: Strategy, batch: Batch, loss: LossFunction, tokens: int) -> float:
    """Fill the column `gradient` [T] with a loss's derivatives by log-probs; returns the loss."""
    values = run_pass(strategy, batch, _LOGPROB, tokens)["logprob"]
    logprobs = values[batch.gen_mask].requires_grad_()
    lengths = (batch.offsets.diff() - batch.prompt_lengths).tolist()
    value = loss(list(torch.split(logprobs, lengths)))
    if not (isinstance(value, Tensor) and value.numel() == 1 and value.requires_grad):
        raise ConfigError(f"loss must return a scalar tensor made of the log-probs, got {value}")
    (gradient,) = torch.autograd.grad(value, logprobs)
    batch.columns["gradient"] = torch.zeros_like(values).masked_scatter(batch.gen_mask, gradient)
    return float(value.detach())


def _linear_loss(micro: MicroBatch, outputs: Outputs) -> LossResult:
    """Return a loss with the column `gradient` as derivatives by the log-probs."""
    return LossResult((outputs["logprob"] * micro.columns["gradient"]).sum(), {})


def _pack(samples: Sequence[Completion]) -> Batch:
    """Pack samples; neighbours with the same prompt are a group."""
    groups, unscored = list[Group](), Score(0.0, 0.0)
    for _, group in groupby(samples, lambda sample: sample.prompt_ids.tobytes()):
        answers = []
        for sample in group:
            segment = Segment(sample.token_ids, sample.logprobs, ())
            answers.append(Answer(Trajectory((segment,), sample.finish_reason), unscored))
        prompt = Prompt(str(len(groups)), sample.prompt_ids, "", "", None)
        groups.append(Group(len(groups), prompt, tuple(answers)))
    return pack(groups)
