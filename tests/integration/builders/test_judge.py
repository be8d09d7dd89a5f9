"""A judge's engines in real processes: what they write, and that nothing else has a part in it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.hubs import Hub
from tests.judges import DIGITS, judge_folder
from tests.processes import children, gone
from tests.recipes import recipe
from tests.scoring import PROMPT
from transformers import AutoModelForCausalLM, AutoTokenizer

from winnow.builders.judge import (
    EngineJudgeClient,
    make_engine_judge,
    make_judge_worker,
    read_judge_spec,
)
from winnow.builders.rewards import make_rewards
from winnow.config.root import Config
from winnow.errors import ConfigError, ModelError, RewardError
from winnow.rewards.judge import Judge
from winnow.rewards.task import Failure
from winnow.workers.host import RankInfo

pytestmark = pytest.mark.usefixtures("forked_workers")
ASKED = [f"{number}|{number % 7}#" * (1 + number % 3) for number in range(12)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return judge_folder(tmp_path_factory.mktemp("judge") / "judge")


def config_of(folder: Path, *settings: str) -> Config:
    asked = "reward/judge=engine", f"reward.judge.path={folder}", "run.threads=1", *DIGITS
    return recipe("quickstart", *asked, *settings)


def judge_of(folder: Path, *settings: str) -> Judge:
    """A judge with processes of its own."""
    return make_engine_judge(config_of(folder, *settings), None)


@pytest.fixture(scope="module")
def judge(folder: Path, forked_workers: None) -> Iterator[Judge]:
    """A judge on two engines."""
    before = children()
    made = judge_of(folder, "reward.judge.engine.processes=2")
    yield made
    made.close()
    assert gone(children() - before)


def verdicts(judge: Judge, answers: Sequence[str]) -> list[float | Failure]:
    async def ask() -> list[float | Failure]:
        return list(
            await asyncio.gather(*(judge.begin_scoring(PROMPT, answer) for answer in answers))
        )

    return asyncio.run(ask())


def replies(judge: Judge, **changes: Any) -> list[str]:
    """What is written to each of `ASKED`, all of which are asked at once."""
    client = judge._client

    def body(answer: str) -> dict[str, Any]:
        messages = judge._prompt.messages(PROMPT, answer)
        return {"messages": messages, **client.settings(), **changes}

    waiting = [client.submit(client.fetch_reply(body(answer))) for answer in ASKED]
    return [each.result().text for each in waiting]


def test_a_judgement_is_what_transformers_writes_greedily_in_the_chat_template(
    judge: Judge, folder: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    wanted = []
    for answer in ASKED:
        turns = [{"role": "user", "content": f"{PROMPT.text}{answer}"}]
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt")
        with torch.no_grad():
            out = model.generate(ids["input_ids"], max_new_tokens=24, do_sample=False)
        new = out[0, ids["input_ids"].shape[1] :]
        wanted.append(tokenizer.decode(new, skip_special_tokens=True))
    assert replies(judge, temperature=0.0) == wanted
    assert len(set(wanted)) > 3


def test_a_score_depends_on_question_and_seed_alone(judge: Judge, folder: Path) -> None:
    together = replies(judge)
    assert len(set(together)) == len(ASKED)
    assert replies(judge) == together
    assert all(a != b for a, b in zip(replies(judge, seed=1), together, strict=True))
    scores = verdicts(judge, ASKED)
    assert [verdicts(judge, [answer])[0] for answer in reversed(ASKED)] == scores[::-1]
    assert most_at_once(judge) == [1, 1]
    batched = judge_of(folder, "reward.judge.one_by_one=false")
    try:
        assert most_at_once(batched) == [len(ASKED)]
        assert replies(batched) == together
    finally:
        batched.close()


def most_at_once(judge: Judge) -> list[int]:
    """The most judgements that each engine was asked for at the same time."""
    with pytest.MonkeyPatch.context() as patch:
        groups = judge._client._groups  # type: ignore[attr-defined]
        counts = [counted(group, patch) for group in groups]
        replies(judge)
    return [each["most"] for each in counts]


def counted(group: Any, patch: pytest.MonkeyPatch) -> Counter[str]:
    """Counts of the calls to a group that are under way now, and were at most."""
    counts: Counter[str] = Counter()
    ask = group.call_rank

    async def call(*args: Any) -> Any:
        counts["now"] += 1
        counts["most"] = max(counts.values())
        try:
            return await ask(*args)
        finally:
            counts["now"] -= 1

    patch.setattr(group, "call_rank", call)
    return counts


def test_figures_and_progress_count_what_was_written(judge: Judge) -> None:
    judge.figures()
    before = judge.scored
    assert len(verdicts(judge, ["1", "1", "2"])) == 3
    figures = judge.figures()
    assert figures["judge/requests"] - figures["judge/unparsed"] == 2  # equal questions are one
    assert figures["judge/tokens"] > 2 * len(PROMPT.text)
    assert figures["judge/retries"] == 0
    assert judge.scored > before


def test_what_cannot_be_judged_is_a_failure_in_one_line(judge: Judge, folder: Path) -> None:
    (said,) = verdicts(judge, ["9" * 400])
    assert isinstance(said, Failure)
    assert said.line.startswith("the judge: a question of 406 tokens exceeds the limit of 232, fro")
    few = read_judge_spec(config_of(folder, "reward.judge.max_prompt_tokens=4"))
    with pytest.raises(RewardError, match=r"exceeds the limit of 4, .* on prompt sort_digits:5391"):
        Judge(few.section, client=EngineJudgeClient(few, [])).check(PROMPT)


def test_a_reply_at_the_limit_is_told_to_be_cut_off(judge: Judge) -> None:
    client, messages = judge._client, [{"role": "user", "content": "1"}]
    body = {"messages": messages, **client.settings(), "max_tokens": 2}
    said = client.submit(client.fetch_reply(body)).result()
    assert said.is_cut
    assert said.tokens == 2 + 2


@pytest.mark.parametrize(
    ("made", "settings", "says"),
    [
        ({"template": ""}, (), "its tokenizer has no chat template, which a judge needs"),
        ({"vocab_size": 20}, (), "the tokenizer has 29 tokens, the model only 20; choose a folder"),
        (
            {},
            ("reward.judge.max_tokens=256",),
            "reward.judge.max_tokens 256 leaves no",
        ),
        (None, (), "reward.judge.path {}: no such folder; give a Hugging Face model folder"),
    ],
)
def test_a_model_that_cannot_judge_is_refused_in_one_line(
    made: dict[str, Any] | None, settings: tuple[str, ...], says: str, tmp_path: Path
) -> None:
    path = tmp_path / "m"
    if made is not None:
        judge_folder(path, **made)
    with pytest.raises(ModelError) as told:
        read_judge_spec(config_of(path, *settings))
    assert says.format(path) in str(told.value)
    assert "\n" not in str(told.value)


def test_a_judge_of_the_hub_is_known_by_its_files(folder: Path, hub: Hub) -> None:
    (folder / "generation_config.json").write_text('{"eos_token_id": [1, 5]}')
    files = {p.name: p.read_bytes() for p in folder.iterdir()}
    (folder / "generation_config.json").unlink()
    hub.repos = {"owner/judge": files}
    model = read_judge_spec(config_of(Path("owner/judge")))
    assert set(model.stop_ids) >= {1, 5}
    assert {path.name for path in model.folder.iterdir()} >= {"config.json", "model.safetensors"}
    extra = "reward/judge/engine=vllm", "+reward.judge.engine.extra.quantization=fp8"
    places = [
        EngineJudgeClient(read_judge_spec(config_of(where, *more)), []).cache_scope
        for where, more in ((folder, ()), (Path("owner/judge"), ()), (folder, extra[:1]))
    ]
    places.append(EngineJudgeClient(read_judge_spec(config_of(folder, *extra)), []).cache_scope)
    assert len({repr(place) for place in places}) == 4


def test_engines_end_where_another_scorer_cannot_be_made(folder: Path) -> None:
    before = children()
    config = config_of(folder, "reward.function.path=/nowhere/own.py")
    with pytest.raises(RewardError, match=r"/nowhere/own\.py"):
        make_rewards(config, torch.device("cpu"), str)
    assert gone(children() - before)


def test_what_an_engine_refuses_names_the_judges_settings(folder: Path) -> None:
    config = config_of(folder, "reward.judge.engine.cache_gib=1e-9")
    with pytest.raises(ConfigError) as told:
        make_judge_worker(RankInfo(0, 1, "127.0.0.1", 1, None), config)
    assert str(told.value).startswith("a KV cache of 1e-09 GiB (reward.judge.engine.cache_gib or")
    assert str(told.value).endswith("raise it, or lower reward.judge.max_tokens")
