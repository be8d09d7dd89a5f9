"""The judge `reward/judge=engine`: a model on separate engines, and the client that calls them.

    Judge ─ messages ─► chat template, token ids ─► a free engine ─► EngineWorker.write
          ◄─ text, tokens, truncated or not ───────────────────────

A token's draw is a hash of the question, the judge's seed and its position. Its probabilities are
bitwise reproducible if nothing else is in the batch, which `one_by_one` ensures: then neither the
number of engines nor their other questions change a score.
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
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jinja2 import TemplateError

from winnow.builders.engines import check_engine_installed, engine_options, reword_judge_errors
from winnow.builders.processes import launcher
from winnow.config.judge import EngineJudge, NoRewardModel
from winnow.config.roles import Roles
from winnow.config.rollout import VllmEngineConfig
from winnow.config.root import Config
from winnow.config.trainer import LocalCluster
from winnow.data.tokenizer import load_tokenizer, make_decoder, stop_token_ids
from winnow.errors import ModelError
from winnow.http.client import RemoteError
from winnow.models.causal_lm import find_model
from winnow.models.fetch import may_be_hub_name
from winnow.models.folders import check_vocabulary, read_config, torch_dtype
from winnow.observe.files import one_line
from winnow.rewards.judge import Judge, JudgeClient, zero_counts
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
"""Starts the engines of the judge at the first call; returns a group for each."""
_FIELD = "reward.judge.path"


@dataclass(frozen=True)
class JudgeSpec:
    """Tokenizer and limits of the judge's model, without its weights."""

    section: EngineJudge
    path: str
    """Folder or hub name of the model, the latter with a revision."""
    folder: Path
    """The local folder of its weights."""
    dtype: str
    tokenizer: PreTrainedTokenizerBase
    stop_ids: tuple[int, ...]
    vocabulary: int
    """Number of ids that the tokenizer has."""
    longest: int
    """Maximum tokens of a question."""
    slots: int
    """Replies that an engine writes concurrently."""


def read_judge_spec(config: Config) -> JudgeSpec:
    """Read the tokenizer and the configuration of the judge's model.

    Raises:
        ModelError: there is no such model, it has no chat template, or its positions or its
            embedding are too small.
    """
    section, trust = config.reward.judge, config.model.trust_remote_code
    assert isinstance(section, EngineJudge)
    path = section.path
    if "/" in path and "@" not in path and may_be_hub_name(path) and not Path(path).exists():
        path = f"{path}@main"  # with a revision it is fetched to a folder
    tokenizer = load_tokenizer(path, trust, _FIELD)
    dtype = section.dtype or config.model.dtype
    where = find_model(path, _FIELD, torch_dtype(dtype), trust)
    if not tokenizer.chat_template:
        raise ModelError(
            f"{where}: its tokenizer has no chat template, which a judge needs; choose a chat "
            "model, or put its chat_template.jinja into the folder"
        )
    shape = read_config(where, trust).get_text_config()
    vocabulary = max(tokenizer.get_vocab().values()) + 1
    remedy = "choose a folder whose tokenizer belongs to its model"
    check_vocabulary(str(where), vocabulary, shape.vocab_size, remedy)
    positions, longest = getattr(shape, "max_position_embeddings", None), section.max_prompt_tokens
    if isinstance(positions, int):
        longest = min(longest, positions - section.max_tokens)
    if longest < 1:
        raise ModelError(
            f"reward.judge.max_tokens {section.max_tokens} leaves no room for a question in the "
            f"{positions} positions of {where}; lower it"
        )
    one_by_one = config.run.deterministic if section.one_by_one is None else section.one_by_one
    stop_ids = stop_token_ids(tokenizer, where.path)
    slots = 1 if one_by_one else section.engine.slots
    folder = Path(where.path)
    return JudgeSpec(section, path, folder, dtype, tokenizer, stop_ids, vocabulary, longest, slots)


def make_judge_worker(rank: RankInfo, config: Config) -> EngineWorker:
    """Make the worker of an engine of the judge.

    Raises:
        ConfigError, ModelError: it cannot be made; the error names keys of `reward.judge`.
    """
    with reword_judge_errors():
        model = read_judge_spec(config)
        section, engine = model.section, model.section.engine
        longest = model.longest + section.max_tokens
        arguments = engine_options(engine, model.vocabulary, longest) | {
            "model": model.path,
            "dtype": model.dtype,
            "trust_remote_code": config.model.trust_remote_code,
            "slots": model.slots,
        }
        if not isinstance(engine, VllmEngineConfig):
            from winnow.rollout.remote_engine import TorchEngineWorker

            return TorchEngineWorker(rank, **arguments)
        from winnow.rollout.vllm.worker import make_vllm_worker

        # A cached prefix is attended to in another order of sums, which changes bits.
        arguments["prefix_caching"] = engine.prefix_caching and model.slots > 1
        worker: EngineWorker = make_vllm_worker(rank, **arguments)
        return worker


class EngineJudgeClient(JudgeClient):
    """Sends questions to the engines of the judge, on the event loop of their groups.

    Args:
        groups: one for each engine.
    """

    def __init__(self, model: JudgeSpec, groups: Sequence[WorkerGroup]) -> None:
        self._model, self._groups = model, groups
        engine = model.section.engine
        # Sizes and times of files, as a folder may get other weights.
        files = sorted(file for file in model.folder.glob("*") if file.is_file())
        stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
        extra = engine.extra if isinstance(engine, VllmEngineConfig) else {}
        one_by_one = model.slots == 1
        self.cache_scope = [model.path, model.dtype, engine.name, dict(extra), one_by_one, stats]
        self.counts = zero_counts()
        self._decode = make_decoder(model.tokenizer)
        self._numbers = itertools.count()
        self._free: Queue[WorkerGroup] = Queue()  # an engine, once for each free slot
        for group in [*groups] * model.slots:
            self._free.put_nowait(group)
        self.release: Callable[[], None] = lambda: None
        """Ends engines that were started for this client only."""

    def settings(self) -> dict[str, Any]:
        return self._model.section.model_dump(include={"temperature", "max_tokens", "seed"})

    def check(self, messages: list[dict[str, str]]) -> None:
        self._encode(messages)

    async def fetch_reply(self, body: Mapping[str, Any]) -> JudgeReply:
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
        group = await self._free.get()
        self.counts["requests"] += 1
        try:
            event = await group.call_rank(0, "write_answer", request)
        finally:
            self._free.put_nowait(group)
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
        """Return the token ids of a question.

        Raises:
            ValueError: the template fails, or the question is too long; in one line.
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
                f"a question of {len(ids)} tokens exceeds the limit of {self._model.longest}, from "
                "reward.judge.max_prompt_tokens or the model's positions less "
                "reward.judge.max_tokens,"
            )
        return ids.astype(np.int64)


def make_engine_judge(config: Config, engines: StartEngines | None) -> Judge:
    """Make a judge whose model is on engines; the caller closes it.

    Args:
        engines: starts the engines; None starts them here, for this judge only.

    Raises:
        ConfigError, ModelError: the model or an engine is not usable.
        RewardError: the cache is not usable.
    """
    model = read_judge_spec(config)
    with contextlib.ExitStack() as stack:
        if engines is None:
            engines = partial(stack.enter_context, _start_judge_engines(config, model))
        client = EngineJudgeClient(model, engines())
        judge = Judge(model.section, client=client)
        client.release = stack.pop_all().close
    return judge


@contextlib.contextmanager
def _start_judge_engines(config: Config, model: JudgeSpec) -> Iterator[Sequence[WorkerGroup]]:
    """Start the engines of the judge, without other processes of the recipe; they end with the
    block."""
    from winnow.workers.group import WorkerGroups

    reward = config.reward.model_copy(update={"model": NoRewardModel()})
    cluster = LocalCluster(start_timeout_s=config.cluster.start_timeout_s)
    config = Config(run=config.run, model=config.model, reward=reward, cluster=cluster)
    check_engine_installed(config.cluster, config.rollout.engine, reward.judge)
    roles, arguments = Roles(config), {"config": config}
    role = roles["judge"]
    with (
        contextlib.closing(WorkerGroups()) as groups,
        launcher(config, roles, groups, trains=False) as launch,
    ):
        yield groups.start(*(launch(role, arguments, number) for number in range(role.count)))
