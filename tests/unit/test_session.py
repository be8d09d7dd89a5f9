"""`winnow.Session`: gradients against Hugging Face's own forward pass, steps, and its state."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.pages import ROOT, code_blocks
from tests.small_models import digits_model
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers import AutoModelForCausalLM

import winnow
from winnow.data.sort_digits import build_tokenizer
from winnow.errors import CheckpointError, ConfigError, WinnowError
from winnow.models.causal_lm import save_model

TEMPERATURE = 0.7
SETTINGS = [
    *("rollout.max_response_tokens=8", f"rollout.temperature={TEMPERATURE}", "optim.lr=1e-2"),
    *("rollout.engine.slots=4", "run.threads=1", "run.device=cpu"),
    *("algorithm.policy_loss.clip_high=0.28", "algorithm.policy_loss.dual_clip=null"),
]
LossFunction = Callable[[list[Tensor]], Tensor]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    folder = tmp_path_factory.mktemp("model")
    save_model(digits_model(initializer_range=0.3), build_tokenizer(), folder)
    return folder


@pytest.fixture
def session(folder: Path) -> Iterator[winnow.Session]:
    with winnow.Session(folder, SETTINGS) as session:
        yield session


def answers(session: winnow.Session) -> list[winnow.Completion]:
    return [answer for group in session.sample(["31:", "5204:"], n=3) for answer in group]


def gradients(session: winnow.Session) -> dict[str, Tensor]:
    named = session._strategy.trained()
    return {name: weight.grad.clone() for name, weight in named if weight.grad is not None}


def spread(logprobs: list[Tensor]) -> Tensor:
    """A loss of all samples at once, which is no sum over them."""
    return torch.stack([each.sum() for each in logprobs]).var() + torch.cat(logprobs).mean().exp()


@pytest.mark.parametrize("microbatch_tokens", [1, 4096])
def test_gradients_are_those_of_a_plain_forward_pass(
    folder: Path, microbatch_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def norm(self: Any, states: Tensor) -> Tensor:  # transformers' rounds to fp32
        return rms_norm(states, states.shape[-1:], self.weight, self.variance_epsilon)

    monkeypatch.setattr("transformers.models.qwen3.modeling_qwen3.Qwen3RMSNorm.forward", norm)
    settings = [*SETTINGS, f"trainer.microbatch_tokens={microbatch_tokens}"]
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    with winnow.Session(folder, settings) as session:
        samples = answers(session)
        session._policy.model.double()
        value = session.forward_backward(samples, spread)
        found = gradients(session)
    logprobs = []
    for sample in samples:
        ids = torch.from_numpy(np.concatenate([sample.prompt_ids, sample.token_ids]))
        logits = reference(ids[None]).logits[0, len(sample.prompt_ids) - 1 : -1] / TEMPERATURE
        written = torch.from_numpy(sample.token_ids)
        logprobs.append(logits.log_softmax(-1)[torch.arange(len(written)), written])
    expected = spread(logprobs)
    expected.backward()
    assert value == pytest.approx(expected.item(), abs=1e-9)
    for name, weight in reference.named_parameters():
        torch.testing.assert_close(found[name], weight.grad, rtol=0, atol=1e-9)


def test_the_loss_of_the_settings_is_the_function_that_it_names(session: winnow.Session) -> None:
    samples, advantages = answers(session), [1.0, -2.0, 0.5, 0.0, 3.0, -1.0]
    session.forward_backward(samples, advantages=advantages)
    session.optim_step()  # the ratio is 1 before

    def clipped(logprobs: list[Tensor]) -> Tensor:
        tokens = []
        for now, sample, advantage in zip(logprobs, samples, advantages, strict=True):
            r = (now - torch.from_numpy(sample.logprobs)).exp()
            tokens.append(-torch.minimum(r * advantage, r.clamp(0.8, 1.28) * advantage))
        return torch.cat(tokens).mean()

    value = session.forward_backward(samples, clipped)
    expected = gradients(session)
    session._strategy._optimizer.zero_grad()
    array = np.array(advantages)
    assert session.forward_backward(samples, advantages=array) == pytest.approx(value)
    torch.testing.assert_close(gradients(session), expected, rtol=1e-4, atol=1e-6)
    session.forward_backward(samples, clipped)  # gradients add up
    doubled = {name: 2 * gradient for name, gradient in expected.items()}
    torch.testing.assert_close(gradients(session), doubled, rtol=1e-4, atol=1e-6)


def test_samples_have_the_log_probs_of_the_newest_weights(session: winnow.Session) -> None:
    for _ in range(3):
        samples = answers(session)
        assert [len(sample.prompt_ids) for sample in samples] == [3, 3, 3, 5, 5, 5]

        def compared(logprobs: list[Tensor], samples: list[winnow.Completion] = samples) -> Tensor:
            for now, sample in zip(logprobs, samples, strict=True):
                np.testing.assert_allclose(now.detach(), sample.logprobs, atol=1e-4)
            return torch.cat(logprobs).sum()

        session.forward_backward(samples, compared)
        assert session.optim_step() > 0


@pytest.mark.parametrize("settings", [[], ["model.dtype=bfloat16"], ["model/adapter=lora"]])
def test_a_state_goes_on_with_the_same_bits(
    folder: Path, tmp_path: Path, settings: list[str]
) -> None:
    def go_on(session: winnow.Session) -> tuple[list[list[int]], float, dict[str, Tensor]]:
        for _ in range(2):
            samples = answers(session)
            session.forward_backward(samples, spread)
            norm = session.optim_step()
        weights = dict(session._strategy.export_weights())
        return (
            [s.token_ids.tolist() for s in samples],
            norm,
            {n: w.clone() for n, w in weights.items()},
        )

    with winnow.Session(folder, [*SETTINGS, *settings]) as session:
        go_on(session)
        path = session.save_state(tmp_path)
        assert path == tmp_path / "step-2"
        expected = go_on(session)
        session.forward_backward(answers(session), spread)  # dropped by what follows
        session.load_state(path)
        again = go_on(session)
    with winnow.Session(folder, [*SETTINGS, *settings, "run.seed=7"]) as session:
        session.load_state(path)
        elsewhere = go_on(session)
        assert session.steps == 4
    for found in (again, elsewhere):
        assert found[:2] == expected[:2]
        torch.testing.assert_close(found[2], expected[2], rtol=0, atol=0)
    with winnow.LLM(path / "model", SETTINGS) as llm:
        assert llm.generate(["31:"], temperature=0)


def test_what_the_page_shows_runs(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs/session.md").read_text("utf-8")
    (shown,) = [block for kind, block in code_blocks(text) if kind == "python"]
    exec(shown.replace("FOLDER", str(folder)), {})
    assert (tmp_path / "states/step-1/model/config.json").is_file()


def test_what_a_session_cannot_do_is_refused(
    session: winnow.Session, folder: Path, tmp_path: Path
) -> None:
    samples = answers(session)
    with pytest.raises(ConfigError, match="must have tokens, got none in 0 samples"):
        session.forward_backward([], spread)
    for wrong in ({}, {"loss": spread, "advantages": [0.0] * 6}, {"advantages": [1.0]}):
        with pytest.raises(ConfigError, match="either a loss or one advantage a sample"):
            session.forward_backward(samples, **wrong)
    for no_scalar in (lambda logprobs: 1.0, torch.cat, lambda logprobs: torch.zeros(())):
        with pytest.raises(ConfigError, match="must return a scalar tensor"):
            session.forward_backward(samples, no_scalar)
    with pytest.raises(CheckpointError, match=r"manifest\.json cannot be read"):
        session.load_state(tmp_path)
    with pytest.raises(ConfigError, match="the recipe names no model"):
        winnow.Session("gsm8k", SETTINGS)
    for setting in ("trainer/strategy=fsdp2", "algorithm/kl/loss=fixed"):
        with pytest.raises(ConfigError, match="trains one model in its process"):
            winnow.Session(folder, [*SETTINGS, setting])
    whole = ["trainer/strategy=single", "algorithm/kl/loss=none", "algorithm/kl/reward=none"]
    winnow.Session(folder, [*SETTINGS, *whole]).close()  # the remedy that the error names
    session.close()
    with pytest.raises(WinnowError, match="this Session is closed"):
        session.optim_step()
