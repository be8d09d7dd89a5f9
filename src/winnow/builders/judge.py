"""A judge on engines of the run's own (`reward/judge=engine`): their start, and what asks them.

    Judge ─ messages ─► chat template, token ids ─► an engine with room ─► EngineWorker.write
          ◄─ text, tokens, cut or not ─────────────────────────────────────

A token's draw is a hash of the question, the judge's seed and its position. Its probabilities are
the same to the last bit as long as nothing is written beside the judgement, which `one_by_one` sees
to: then neither the number of engines nor what else they judge changes a score.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
from asyncio import Queue
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jinja2 import TemplateError

from winnow.builders.engines import check_engine, engine_options, name_judge, vllm_options
from winnow.builders.processes import launcher
from winnow.config.judge import EngineJudge, NoRewardModel
from winnow.config.roles import Roles
from winnow.config.rollout import VllmEngineConfig
from winnow.config.root import Config
from winnow.data.tokenizer import decoder, load_tokenizer, stop_token_ids
from winnow.errors import ModelError
from winnow.http.client import RemoteError
from winnow.models.causal_lm import find_model
from winnow.models.fetch import may_be_hub_name
from winnow.models.folders import check_vocabulary, read_config, torch_dtype
from winnow.observe.files import one_line
from winnow.rewards.judge import Judge, JudgeClient, no_counts
from winnow.rewards.judge_cache import JudgeReply
from winnow.rollout.engine import AnswerRequest, GroupRequest, SamplingParams
from winnow.types import IntArray

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from winnow.rollout.remote_engine import EngineWorker
    from winnow.workers.group import WorkerGroup
    from winnow.workers.host import RankInfo

T = TypeVar("T")
StartEngines = Callable[[], Sequence["WorkerGroup"]]
"""Starts a judge's engines, unless they have been, each a group."""
_FIELD = "reward.judge.path"


@dataclass(frozen=True)
class JudgeModel:
    """A judge's tokenizer, and what its engines and its questions follow."""

    section: EngineJudge
    path: str
    """Its place, with a revision where it is on the hub."""
    folder: Path
    """The folder of its weights here."""
    dtype: str
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    vocabulary: int
    """Ids below it are the tokenizer's."""
    longest: int
    """Most tokens of a question."""
    slots: int
    """Judgements that an engine writes at once."""


def read_judge(config: Config) -> JudgeModel:
    """Read what there is to know of a judge without its weights.

    Raises:
        ModelError: there is no such model, it has no chat template, or its positions or its
            embedding are too few.
    """
    section, trust = config.reward.judge, config.model.trust_remote_code
    assert isinstance(section, EngineJudge)
    path = section.path
    if "/" in path and "@" not in path and may_be_hub_name(path) and not Path(path).exists():
        path = f"{path}@main"  # in a folder, where its files can be looked at
    tokenizer = load_tokenizer(path, trust, _FIELD)
    dtype = section.dtype or config.model.dtype
    where = find_model(path, _FIELD, torch_dtype(dtype), trust)
    if not tokenizer.chat_template:
        raise ModelError(
            f"{where}: its tokenizer has no chat template, in which a judge is asked; give a model "
            "that was made to chat, or put its chat_template.jinja into the folder"
        )
    shape = read_config(where, trust).get_text_config()
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    remedy = "give a folder whose tokenizer belongs to its model"
    check_vocabulary(str(where), vocabulary, shape.vocab_size, remedy)
    positions, longest = getattr(shape, "max_position_embeddings", None), section.max_prompt_tokens
    if isinstance(positions, int):
        longest = min(longest, positions - section.max_tokens)
    if longest < 1:
        raise ModelError(
            f"reward.judge.max_tokens {section.max_tokens} leaves no room for a question in the "
            f"{positions} positions of {where}; lower it"
        )
    alone = config.run.deterministic if section.one_by_one is None else section.one_by_one
    stop_ids = stop_token_ids(tokenizer, where.path)
    slots = 1 if alone else section.engine.slots
    folder = Path(where.path)
    return JudgeModel(section, path, folder, dtype, tokenizer, stop_ids, vocabulary, longest, slots)


def make_judge_worker(rank: RankInfo, config: Config) -> EngineWorker:
    """Make one of a judge's engines; a worker of a `WorkerGroup`.

    Raises:
        ConfigError, ModelError: it cannot be made; in the words of `reward.judge`.
    """
    with name_judge():
        model = read_judge(config)
        section, engine = model.section, model.section.engine
        arguments = engine_options(engine, model.vocabulary, model.longest + section.max_tokens)
        arguments |= vllm_options(engine) | {
            "model": model.path,
            "dtype": model.dtype,
            "trust_remote_code": config.model.trust_remote_code,
            "slots": model.slots,
        }
        if not isinstance(engine, VllmEngineConfig):
            from winnow.rollout.remote_engine import TorchEngineWorker

            return TorchEngineWorker(rank, **arguments)
        from winnow.rollout.vllm.worker import make_vllm_worker

        # What an earlier question left would be summed up apart from the rest.
        arguments["prefix_caching"] = engine.prefix_caching and model.slots > 1
        worker: EngineWorker = make_vllm_worker(rank, **arguments)
        return worker


class JudgeEngines(JudgeClient):
    """Asks a judge's engines, on the loop of their groups.

    Args:
        groups: the engines, each a group.
    """

    def __init__(self, model: JudgeModel, groups: Sequence[WorkerGroup]) -> None:
        self._model, self._groups = model, groups
        engine = model.section.engine
        # Not the folder's name alone: other weights may come to lie there.
        files = sorted(file for file in model.folder.glob("*") if file.is_file())
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        extra = engine.extra if isinstance(engine, VllmEngineConfig) else {}
        alone = model.slots == 1
        self.place = [model.path, model.dtype, engine.name, dict(extra), alone, stats]
        self.counts = no_counts()
        self._decode = decoder(model.tokenizer)
        self._numbers = itertools.count()
        self._room: Queue[WorkerGroup] = Queue()  # each engine as often as it takes a judgement
        for group in [*groups] * model.slots:
            self._room.put_nowait(group)
        self.release: Callable[[], None] = lambda: None
        """Ends engines that were started for this client alone."""

    def settings(self) -> dict[str, Any]:
        return self._model.section.model_dump(include={"temperature", "max_tokens", "seed"})

    def check(self, messages: list[dict[str, str]]) -> None:
        self._encode(messages)

    async def reply(self, body: Mapping[str, Any]) -> JudgeReply:
        try:
            ids = self._encode(body["messages"])
        except ValueError as error:
            raise RemoteError(str(error)) from error
        question = json.dumps([body["messages"], body["seed"]]).encode()
        seed = int.from_bytes(hashlib.sha256(question).digest()[:8], "little")
        sampling = SamplingParams(
            body["max_tokens"], body["temperature"], stop_token_ids=self._model.stop_ids
        )
        number = next(self._numbers)
        request = GroupRequest(number, ids, (AnswerRequest(0, seed),), sampling, number)
        group = await self._room.get()
        self.counts["requests"] += 1
        try:
            event = await group.call_rank(0, "write", request)
        finally:
            self._room.put_nowait(group)
        tokens = len(ids) + len(event.segment)
        self.counts["tokens"] += tokens
        written = self._decode(event.segment.token_ids)
        return JudgeReply(written, tokens, event.finish_reason == "length")

    def progress(self) -> int:
        return sum(each or 0 for group in self._groups for each in group.progress)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return self._groups[0].submit(work)

    def close(self) -> None:
        self.release()

    def _encode(self, messages: list[dict[str, str]]) -> IntArray:
        """Return the ids of a question.

        Raises:
            ValueError: the template fails, or it is too long; in one line.
        """
        tokenizer: Any = self._model.tokenizer
        try:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            encoded = tokenizer(text, add_special_tokens=False, verbose=False)
        except (TemplateError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise ValueError(
                f"the chat template or the tokenizer of {_FIELD} {self._model.section.path} fails "
                f"({one_line(error)})"
            ) from error
        ids = np.array(encoded["input_ids"])
        if len(ids) > self._model.longest:
            raise ValueError(
                f"a question of {len(ids)} tokens is longer than the {self._model.longest} of "
                "reward.judge.max_prompt_tokens, or of the model's positions less "
                "reward.judge.max_tokens,"
            )
        return ids.astype(np.int64)


def make_judge(config: Config, engines: StartEngines | None) -> Judge:
    """Make a judge whose model is on engines; close it.

    Args:
        engines: starts them; None: they are started here, for this judge alone.

    Raises:
        ConfigError, ModelError: the model or an engine is not usable.
        RewardError: the cache cannot be used.
    """
    model = read_judge(config)
    with contextlib.ExitStack() as stack:
        groups = (
            stack.enter_context(_start_engines(config, model)) if engines is None else engines()
        )
        client = JudgeEngines(model, groups)
        judge = Judge(model.section, client=client)
        client.release = stack.pop_all().close
    return judge


@contextlib.contextmanager
def _start_engines(config: Config, model: JudgeModel) -> Iterator[Sequence[WorkerGroup]]:
    """Start a judge's engines on this machine, and nothing else of a recipe."""
    from winnow.workers.group import WorkerGroups

    reward = config.reward.model_copy(update={"model": NoRewardModel()})
    alone = Config(run=config.run, model=config.model, reward=reward)
    check_engine(alone)
    roles = Roles(alone)
    with (
        contextlib.closing(WorkerGroups()) as groups,
        launcher(alone, roles, groups, False) as launch,
    ):
        numbers = range(roles["judge"].count)
        yield groups.start(
            *(launch(roles["judge"], {"config": alone}, number) for number in numbers)
        )
