"""A reward model beside the rules: its scores, and what becomes of them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from tests.reward_models import classifier, classifier_folder
from tests.scoring import LIMIT, answer, rewards_of
from tests.scoring import ask as ask_any
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from winnow.builders.rewards import make_model_scorer
from winnow.config.judge import SequenceClassifier
from winnow.config.reward import RewardConfig
from winnow.config.root import Config, RunConfig
from winnow.errors import ModelError, RewardError
from winnow.models.folders import quiet_transformers
from winnow.rewards.rewards import Rewards
from winnow.types import Prompt

MESSAGES = ({"role": "system", "content": "sort"}, {"role": "user", "content": "5391:"})
PROMPT = Prompt("sort_digits:5391", np.array([8]), "5391:", "sort_digits", "1359", {}, MESSAGES)
ask = partial(ask_any, prompt=PROMPT)
ANSWERS = ["#1359", "#1395", "1|539;3|59;5|9;9|#1359", "", "9" * 60]


def service(
    folder: Path, *, deterministic: bool = True, tokens: int = 4096, **config: Any
) -> Rewards:
    """The real thing; keys of `reward.model` begin with `model_`."""
    own = {key.removeprefix("model_"): config.pop(key) for key in [*config] if "model_" in key}
    section = SequenceClassifier(path=str(folder), microbatch_tokens=tokens, **own)
    run, reward = RunConfig(deterministic=deterministic), RewardConfig(model=section, **config)
    model = make_model_scorer(Config(run=run, reward=reward), torch.device("cpu"))
    return rewards_of(reward, LIMIT, model=model)


def by_transformers(
    folder: Path, texts: Sequence[str], template: str | None = None, last: int = 0
) -> list[float]:
    """Scores of the conversations' last tokens, one by one, in transformers alone."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    found = []
    for text in texts:
        turns = [*MESSAGES, {"role": "assistant", "content": text}]
        ids = tokenizer.apply_chat_template(
            turns, chat_template=template, return_tensors="pt", return_dict=True
        )["input_ids"]
        with torch.no_grad():
            found.append(float(model(ids[:, -last:]).logits))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classifier_folder(tmp_path_factory.mktemp("classifier"))


@pytest.mark.parametrize("deterministic", [True, False])
def test_its_scores_are_those_of_transformers_own_class(folder: Path, deterministic: bool) -> None:
    found = [s.parts["model"] for s in ask(service(folder, deterministic=deterministic), ANSWERS)]
    assert found == pytest.approx(by_transformers(folder, ANSWERS), abs=1e-5)
    assert max(found) - min(found) > 0.1


def test_a_template_may_be_given_or_left_out(folder: Path) -> None:
    own = "{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %}"
    # A template may end the turn with the padding's token; that is not what is scored.
    ends = "{% for m in messages %}{{ m.content }}<|endoftext|>{% endfor %}"
    joined = "{{ messages[0].content }}\n{{ messages[1].content }}{{ messages[2].content }}"
    for given, same in ((own, own), (ends, ends), ("none", joined)):
        scores = ask(service(folder, model_chat_template=given), ANSWERS)
        wanted = pytest.approx(by_transformers(folder, ANSWERS, same), abs=1e-5)
        assert [score.parts["model"] for score in scores] == wanted


@pytest.mark.bits
def test_in_a_deterministic_run_neighbours_change_no_bit(folder: Path) -> None:
    texts = [*ANSWERS, *(f"{i}|#{i * 7}" for i in range(12))]
    alone = [ask(service(folder), [text])[0].parts["model"] for text in texts]
    assert [s.parts["model"] for s in ask(service(folder), texts)] == alone
    assert [s.parts["model"] for s in ask(service(folder), texts[::-1])] == alone[::-1]
    packed = [s.parts["model"] for s in ask(service(folder, deterministic=False), texts)]
    few = [s.parts["model"] for s in ask(service(folder, deterministic=False, tokens=50), texts)]
    assert packed == pytest.approx(alone, abs=1e-5)
    assert few == pytest.approx(alone, abs=1e-5)


def test_answers_that_wait_together_are_run_together(folder: Path) -> None:
    for deterministic, calls in ((False, [5]), (True, [1] * 5)):
        one = service(folder, deterministic=deterministic)
        model: Any = one.pipeline._models[0]
        model.forward = Mock(side_effect=model.forward)
        ask(one, ANSWERS)
        assert [len(call.args[0]) for call in model.forward.call_args_list] == calls
        assert one.count_offloaded() == 5


def test_a_source_may_be_left_to_the_model_alone(folder: Path) -> None:
    one = service(folder, scorers={"sort_digits": "none"}, model_weight=2.0)
    one.check_sources(["sort_digits"])
    one.require_metric("model", ["sort_digits"])
    (score,) = ask(one, ["#1359"])
    (said,) = by_transformers(folder, ["#1359"])
    assert (score.parts, score.accuracy) == ({"model": pytest.approx(said, rel=1e-5)}, 0.0)
    assert score.reward == pytest.approx(2.0 * said, rel=1e-5)
    with pytest.raises(RewardError) as caught:
        one.require_metric("accuracy", ["sort_digits", "gsm8k"])
    assert str(caught.value) == (
        "sampling.filter.metric is accuracy, which no scorer of these data sources returns; "
        "available: model, reward"
    )
    one.check_sources(["gsm8k"], held_out=True)
    with pytest.raises(RewardError, match=r"^reward\.scorers routes sort_digits to none, and a "):
        one.check_sources(["gsm8k", "sort_digits"], held_out=True)


def test_what_the_model_cannot_score_counts_as_wrong(folder: Path) -> None:
    long = service(folder, model_max_tokens=30, model_wrong_score=-7.0)
    short, failed = ask(long, ["", "9" * 60])
    assert (short.error, list(short.parts)) == ("", ["task", "model"])
    assert failed.error.startswith("the reward model: ")
    assert "the reward model's limit is 30; lower rollout.max_response_tokens" in failed.error
    assert (failed.reward, failed.parts) == (-8.0, {"task": -1.0, "model": -7.0})
    assert long.failure_report.count == 1


def test_a_long_conversation_may_lose_its_beginning(folder: Path) -> None:
    (cut,) = ask(service(folder, model_max_tokens=30, model_overlong="left"), ["9" * 60])
    (said,) = by_transformers(folder, ["9" * 60], last=30)
    assert cut.parts["model"] == pytest.approx(said, abs=1e-5)
    assert by_transformers(folder, ["9" * 60]) != pytest.approx([said], abs=1e-5)


def with_head_of(value: float, folder: Path) -> None:
    classifier_folder(folder)
    model = classifier()
    with torch.no_grad():
        model.score.weight.fill_(value)
    with quiet_transformers():
        model.save_pretrained(folder)


def test_a_score_that_is_no_number_is_a_failure(tmp_path: Path) -> None:
    with_head_of(3e38, tmp_path)  # finite, unlike what comes of it
    (score,) = ask(service(tmp_path), ["#1359"])
    assert score.error in (
        f"the reward model: its score is {value}" for value in ("inf", "-inf", "nan")
    )
    assert (score.reward, score.parts) == (-1.0, {"task": -1.0, "model": 0.0})


@pytest.mark.bits
def test_what_comes_while_ranks_score_goes_together_into_the_next_call(folder: Path) -> None:
    one = service(folder)
    model = one.pipeline._models[0]
    here, begun, go_on, sizes = model.forward, asyncio.Event(), asyncio.Event(), list[int]()

    async def asking(sequences: Sequence[Any]) -> Sequence[float]:
        sizes.append(len(sequences))
        begun.set()
        await go_on.wait()
        if len(sequences) == 3:
            raise MemoryError("no room")
        return await here(sequences)

    model.forward, model.takes_time, model.one_by_one = asking, True, False

    async def together() -> list[Any]:
        def of(texts: Sequence[str]) -> Any:
            asked = (one.score(PROMPT, answer(1), text, True) for text in texts)
            return asyncio.gather(*asked, return_exceptions=True)

        first = asyncio.ensure_future(of(ANSWERS[:2]))
        await begun.wait()
        next_ones, given_up = of(ANSWERS[2:]), of(ANSWERS[:1])
        await asyncio.sleep(0)
        given_up.cancel()
        go_on.set()
        with pytest.raises(asyncio.CancelledError):
            await given_up
        return [await first, await next_ones, await of(ANSWERS[:1])]

    assert one.takes_time(["sort_digits"])
    for _ in range(2):  # each in a loop of its own
        begun, go_on = asyncio.Event(), asyncio.Event()
        scored, broken, again = asyncio.run(together())
        wanted = by_transformers(folder, ANSWERS[:2])
        assert [s.parts["model"] for s in scored] == pytest.approx(wanted, abs=1e-5)
        assert [type(each) for each in broken] == [MemoryError] * 3
        # Alone, not beside another: the last bits depend on the company.
        assert again[0].parts["model"] == pytest.approx(wanted[0], abs=1e-5)
    assert sizes == [2, 3, 1] * 2


def no_head(folder: Path) -> None:
    classifier_folder(folder)
    causal = AutoModelForCausalLM.from_config(classifier().config)
    with quiet_transformers():
        causal.save_pretrained(folder)


RAISES = "{{ raise_exception('no system role') }}"
BAD: list[tuple[Any, dict[str, Any], str]] = [
    (no_head, {}, r"weights are missing \(1, such as score\.weight\)"),
    (lambda f: classifier_folder(f, num_labels=3), {}, "its head has 3 labels"),
    (lambda f: classifier_folder(f, tokenizer=False), {}, "the folder has no tokenizer"),
    (lambda f: classifier_folder(f, template=None), {}, "its tokenizer has no chat template; set "
     "reward.model.chat_template=none"),
    (lambda f: classifier_folder(f, template=RAISES), {}, "no answer to prompt sort_digits:5391 "
     "could be scored: its chat template fails: no system role; fix it, or set "),
    (classifier_folder, {"model_chat_template": "{% if %}"}, "its chat template fails: "),
    (classifier_folder, {"model_max_tokens": 257}, r"^reward\.model\.max_tokens 257 does not fit "
     r"the model's 256 positions \(.*\); lower it"),
    (classifier_folder, {"model_max_tokens": 5}, "no answer to prompt sort_digits:5391 could be "
     r"scored: \d+ tokens with the prompt, the reward model's limit is 5; lower "),
    (lambda f: classifier_folder(f, vocab_size=100), {}, r"the tokenizer has \d+ tokens, the model "
     "only 100"),
    (partial(with_head_of, float("nan")), {}, "score.weight holds NaN or infinity"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "settings", "says"), BAD)
def test_a_model_that_cannot_score_is_refused_before_training(
    make: Any, settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    make(tmp_path)
    with pytest.raises(ModelError, match=says) as caught:
        service(tmp_path, **settings).check_prompt(PROMPT)
    assert str(caught.value).startswith("reward.model.")
    assert "\n" not in str(caught.value)


def test_a_tokenizer_may_lie_elsewhere(folder: Path, tmp_path: Path) -> None:
    classifier_folder(tmp_path / "bare", tokenizer=False)
    with pytest.raises(ModelError, match=r"^reward\.model\.tokenizer .*no such folder"):
        service(tmp_path / "bare", model_tokenizer=str(tmp_path / "nowhere"))
    (score,) = ask(service(tmp_path / "bare", model_tokenizer=str(folder)), ["#1"])
    assert score.parts["model"] == pytest.approx(by_transformers(folder, ["#1"])[0], abs=1e-5)
