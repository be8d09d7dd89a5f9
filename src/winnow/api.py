"""Winnow from Python: `import winnow`, then `winnow.train`, `winnow.LLM`, `winnow.score`.

What the command line does, for scripts and notebooks. Settings are those of recipes, in the same
words: `winnow.train("gsm8k", ["model.path=FOLDER", "optim.lr=1e-6"])`. Nothing here needs an event
loop, and all of it works where one is running already, as in a notebook.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from winnow.config.base import TEMPERATURES
from winnow.config.files import available_recipes, resolve_evaluation_recipe
from winnow.config.load import dump_config, load_recipe, parse_recipe
from winnow.config.root import Config, RunConfig
from winnow.errors import ConfigError, WinnowError
from winnow.observe.files import RunFolder, recipe_stem, unused_path
from winnow.observe.jsonl import read_metrics
from winnow.types import FinishReason, FloatArray, IntArray, Prompt, Score
from winnow.workers.threads import block_on

if TYPE_CHECKING:
    import pyarrow as pa

    from winnow.data.sources import Row
    from winnow.rollout.engine import SamplingParams

T = TypeVar("T")
Prompts = Sequence[str | Sequence[Mapping[str, Any]]]
"""Texts, or conversations of messages with `role` and `content`."""

load_config = load_recipe


@dataclass(frozen=True)
class RunRecord:
    """The files of a run that is under way or over, as Python reads them."""

    path: Path

    @property
    def config(self) -> Config:
        """The resolved recipe."""
        return parse_recipe(str(RunFolder.open(self.path).config))

    @property
    def metrics(self) -> list[dict[str, float]]:
        """Figures of each step, by name; step 0 is before the first update."""
        return read_metrics(RunFolder.open(self.path).metrics)

    def rollouts(self, step: int | None = None) -> pa.Table:
        """Read the answers of a step, or of all steps: a row for each, with its fate and scores.

        Raises:
            WinnowError: that step has none.
        """
        from winnow.observe.rollouts import read_rollouts

        folder = RunFolder.open(self.path)
        return read_rollouts(folder.rollouts if step is None else folder.rollout_file(step))

    @property
    def model(self) -> Path:
        """The folder of the newest checkpoint's model.

        Raises:
            WinnowError: the run has saved none yet.
        """
        from winnow.checkpoints.checkpoint import find_checkpoint

        return find_checkpoint(self.path, None).model


def open_run(path: str | Path) -> RunRecord:
    """Open the folder of a run.

    Raises:
        WinnowError: it holds none.
    """
    return RunRecord(RunFolder.open(path).path)


def train(recipe: str | Path | Config, overrides: Sequence[str] = ()) -> RunRecord:
    """Train a recipe to its end, in a process of its own, as `winnow train` does.

    What the run prints appears here. An interrupt (Ctrl-C, a notebook's stop) lets it save before
    it is raised again; the same call with the same `run.name` goes on from there.

    Args:
        recipe: the name of a shipped recipe, a YAML file, or a configuration of `load_config`.
        overrides: settings over the recipe's, in Hydra's grammar, such as `optim.lr=1e-6`.

    Raises:
        ConfigError: the recipe or a setting is wrong.
        WinnowError: the run failed; its last lines say why.
    """
    with contextlib.ExitStack() as held:
        if isinstance(recipe, Config):
            folder = held.enter_context(tempfile.TemporaryDirectory(prefix="winnow-"))
            text, recipe = dump_config(recipe), Path(folder) / "python.yaml"
            recipe.write_text(text)
        words = [str(recipe), *overrides]
        path, is_new = run_path(load_recipe(str(recipe), overrides).run, str(recipe))
        words += [f"run.name={path.name}"] * is_new
        start = sys.executable, "-m", "winnow.cli.main", "train", "--parent", str(os.getpid())
        child = subprocess.Popen([*start, *words], process_group=0)
        code = _wait_for_run(child)
    if code:
        raise WinnowError(f"the run failed with exit code {code}; see its last lines above")
    return open_run(path)


def run_path(run: RunConfig, recipe: str) -> tuple[Path, bool]:
    """Return the folder of a run, and whether its name is chosen here, before the run would."""
    if run.resume not in ("auto", "never"):
        from winnow.checkpoints.opening import split_run_and_checkpoint

        return split_run_and_checkpoint("run.resume", run.resume)[0], False
    if run.name is not None:
        return Path(run.dir) / run.name, False
    return unused_path(Path(run.dir), recipe_stem(recipe)), True


def _wait_for_run(child: subprocess.Popen[bytes]) -> int:
    """Wait for a run; the first interrupt lets it save, the second kills it."""
    try:
        return child.wait()
    except KeyboardInterrupt:
        child.send_signal(signal.SIGINT)
        try:
            child.wait()
        except KeyboardInterrupt:
            child.kill()
            child.wait()
        raise


@dataclass(frozen=True, eq=False)
class Completion:
    """One answer to a prompt."""

    text: str
    token_ids: IntArray
    """[L]"""
    logprobs: FloatArray
    """[L] nats, under softmax(logits / temperature), what was left out of a draw included."""
    finish_reason: FinishReason
    """stop, or length where `max_tokens` ended it."""
    prompt_ids: IntArray
    """[P] the prompt's tokens, chat template included."""


class LLM:
    """A model that writes answers, with the embedded rollout engine, in this process.

    Example::

        with winnow.LLM("runs/quickstart-1") as llm:
            [[answer]] = llm.generate(["5391:"], temperature=0)

    Args:
        model: folder of a model or of a run (its newest checkpoint then), a hub name, or the name
            of a shipped recipe: the model that it trains, and its settings.
        overrides: settings, such as `model.dtype=bfloat16` or `rollout.engine.slots=64`.
        trust: run the code that a stranger's run names; one that you began here needs none.

    Raises:
        WinnowError: there is no such model, or it does not fit the settings.
    """

    _trains = False
    """True if the model is also trained in this process."""

    def __init__(
        self, model: str | Path, overrides: Sequence[str] = (), trust: bool = False
    ) -> None:
        from winnow.builders.engines import make_local_engine
        from winnow.builders.run import prepare_device
        from winnow.checkpoints.checkpoint import find_checkpoint
        from winnow.checkpoints.strangers import require_trusted_start
        from winnow.ranks.models import load_policy

        path, recipe = str(model), resolve_evaluation_recipe("default")
        if (Path(model) / "config.yaml").is_file():
            path = str(find_checkpoint(Path(model), None).model)
            recipe = str(RunFolder(Path(model)).config)
        elif path in available_recipes() and not Path(model).exists():
            recipe = path
        self._config = config = parse_recipe(recipe, overrides)
        require_trusted_start(config, recipe, overrides, trust)
        device = prepare_device(config.run, config.model.cache_dir)
        path = _first_model(config) if recipe == path else path
        self._policy = load_policy(config, path, device)
        self._engine = make_local_engine(config, self._policy, self._trains)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._asked = 0

    def generate(
        self,
        prompts: Prompts,
        n: int = 1,
        *,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_p: float = 1.0,
        top_k: int = 0,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> list[list[Completion]]:
        """Write n answers to each prompt; the same arguments give the same answers.

        Args:
            prompts: texts, or conversations of messages with `role` and `content`; the model's
                chat template goes around both, if it has one.
            max_tokens: `rollout.max_response_tokens` of the settings by default, and at most that.
            temperature: 0 is greedy.
            stop: strings that end an answer.

        Raises:
            ConfigError: an argument is out of its range.
            WinnowError: a prompt is too long, this is closed, or the engine fails.
        """
        from winnow.rollout.engine import SamplingParams

        _check_sampling(n, temperature, top_p, top_k)
        limit = self._config.rollout.max_response_tokens
        if max_tokens is not None and not 0 < max_tokens <= limit:
            raise ConfigError(
                f"max_tokens must be in [1, {limit}], got {max_tokens}; change it, or pass "
                f"'rollout.max_response_tokens={max(max_tokens, 1)}' to LLM"
            )
        sampling = SamplingParams(
            max_tokens or limit,
            temperature,
            top_p,
            top_k,
            stop_token_ids=self._policy.stop_ids,
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
        )
        return self._answer(prompts, n, sampling, seed)

    def _answer(
        self, prompts: Prompts, n: int, sampling: SamplingParams, seed: int
    ) -> list[list[Completion]]:
        """Write n answers to each prompt."""
        from winnow.data.prompts import PromptRenderer
        from winnow.rollout.engine import generate, group_request

        self._require_open()
        if isinstance(prompts, str) or any(isinstance(prompt, Mapping) for prompt in prompts):
            raise TypeError("prompts must be a list, got a single text or conversation")
        rows = [self._make_row(number, prompt) for number, prompt in enumerate(prompts)]
        data = self._config.data.model_copy(update={"overlong_prompts": "error"})
        renderer = PromptRenderer(self._policy.tokenizer, data, vision=self._policy.vision)
        rendered = renderer.render(rows).prompts
        first, self._asked = self._asked, self._asked + len(rendered)
        requests = [
            group_request(first + i, prompt, dict.fromkeys(range(n)), sampling, seed, turn=i)
            for i, prompt in enumerate(rendered)
        ]
        try:
            found = self._run_coroutine(generate(self._engine, requests))
        except BaseException:
            self._run_coroutine(self._engine.abort([request.group_id for request in requests]))
            self._run_coroutine(self._engine.events())
            raise
        decode = self._policy.decode
        answers = (
            Completion(decode(t.token_ids), t.token_ids, t.logprobs, t.finish_reason, r.prompt_ids)
            for r in requests
            for t in (found[r.group_id, i] for i in range(n))
        )
        return [[next(answers) for _ in range(n)] for _ in requests]

    def close(self) -> None:
        """Release what the engine holds."""
        if self._thread.is_alive():
            self._run_coroutine(self._engine.close())
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @staticmethod
    def _make_row(number: int, prompt: str | Sequence[Mapping[str, Any]]) -> Row:
        from winnow.data.sources import Row

        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        for message in said or [{}]:
            if not all(isinstance(message.get(key), str) for key in ("role", "content")):
                raise ConfigError(
                    f"prompts[{number}] must have messages with role and content as text, "
                    f"got {message}"
                )
        return Row(f"prompts:{number}", f"prompts[{number}]", "python", tuple(map(dict, said)), "")

    def _require_open(self) -> None:
        if not self._thread.is_alive():
            raise WinnowError(f"this {type(self).__name__} is closed; create a new one")

    def _run_coroutine(self, work: Coroutine[Any, Any, T]) -> T:
        return block_on(work, self._loop)


def _first_model(config: Config) -> str:
    """Return the model that a recipe trains; its warm start is made if it is not cached."""
    from rich.console import Console

    from winnow.builders.warm_start import make_warm_start
    from winnow.config.model import SftWarmStart
    from winnow.observe.console import make_console

    if isinstance(config.warm_start, SftWarmStart):
        sink = make_console(config.observe.console, Console())
        return str(make_warm_start(config, False, sink))
    if config.model.source is None:
        raise ConfigError("the recipe names no model; pass 'model.path=FOLDER'")
    return config.model.source


def _check_sampling(n: int, temperature: float, top_p: float, top_k: int) -> None:
    least, most = TEMPERATURES
    is_drawn = least <= temperature <= most
    for name, value, is_fine, allowed in (
        ("n", n, n >= 1, "at least 1"),
        ("temperature", temperature, temperature == 0 or is_drawn, f"0 or {least:g} to {most:g}"),
        ("top_p", top_p, 0 < top_p <= 1, "above 0 and at most 1, which keeps all tokens"),
        ("top_k", top_k, top_k >= 0, "at least 0, which keeps all tokens"),
    ):
        if not is_fine:
            raise ConfigError(f"{name} must be {allowed}, got {value}")


def score(
    answers: Sequence[str],
    truth: Any,
    *,
    source: str | None = None,
    function: str | None = None,
    prompt: str = "",
    extra_info: Mapping[str, Any] | None = None,
    recipe: str | None = None,
    overrides: Sequence[str] = (),
) -> list[Score]:
    """Score answers to one prompt as a run would: same scorers, limits and sandbox.

    Args:
        truth: what the scorer compares with.
        source: data source, which chooses the scorer, such as `math_dapo`; may be left out where a
            function scores.
        function: FILE.py or FILE.py:NAME with a reward function of yours.
        extra_info: what the scorer gets beside the truth.
        recipe: its section `reward` scores; None is the defaults.
        overrides: settings, such as `reward.timeout_s=2`.

    Raises:
        RewardError: nothing scores this source, or the function cannot be loaded. An answer whose
            scoring fails is no error: `Score.error` says why.
    """
    from concurrent.futures import ThreadPoolExecutor

    import numpy as np

    from winnow.builders.rewards import make_rewards
    from winnow.types import Segment, Trajectory

    if isinstance(answers, str):
        raise TypeError("answers must be a list of text, got a single text")
    if source is None and function is None and recipe is None:
        raise ConfigError("score needs a source, a function or a recipe, got none of them")
    path, _, name = (function or "").partition(":")
    words = [f"reward.function.path={path}"] if path else []
    config = parse_recipe(recipe, [*words, *([f"reward.function.name={name}"] if name else []),
                                   "reward.on_failure=wrong", *overrides])  # fmt: skip
    nothing: IntArray = np.zeros(0, np.int64)
    extra = {"extra_info": dict(extra_info or {})}
    asked = Prompt("python", nothing, prompt, source or "python", truth, extra)
    silent = Trajectory((Segment(nothing, nothing.astype(np.float32), ()),), "stop")
    with contextlib.closing(make_rewards(config, "cpu")) as rewards:
        rewards.check_sources([asked.data_source])
        rewards.check_prompt(asked)

        async def all_scores() -> list[Score]:
            given = (rewards.score(asked, silent, text, training=True) for text in answers)
            return list(await asyncio.gather(*given))

        with ThreadPoolExecutor(1) as thread:  # as this one may have a loop already
            return thread.submit(asyncio.run, all_scores()).result()


def advantages(
    rewards: Sequence[float], groups: Sequence[int], estimator: str = "grpo", **options: Any
) -> list[float]:
    """Return the advantage of each answer, by an estimator that needs rewards alone.

    Args:
        rewards: of the answers, [B].
        groups: [B]; equal numbers are answers to one prompt.
        estimator: as in a recipe's `algorithm/advantage`; `winnow.algorithms.advantages` has those
            that need more than rewards.
        options: the estimator's settings, over their defaults in recipes.

    Raises:
        ConfigError: there is no such estimator, it needs more, an option is wrong, or the lengths
            differ.
    """
    import torch

    from winnow.algorithms.advantages import ESTIMATORS, AdvantageInputs, estimate

    if len(rewards) != len(groups):
        raise ConfigError(
            f"rewards and groups must have the same length, got {len(rewards)} and {len(groups)}"
        )
    words = [f"algorithm/advantage={estimator}"]
    words += [f"algorithm.advantage.{key}={value}" for key, value in options.items()]
    section = parse_recipe(None, words).algorithm.advantage
    found = ESTIMATORS.get(section.name)
    if found is None or found.needs:
        needs = " and ".join(sorted(found.needs)) if found else "code of its own"
        raise ConfigError(
            f"estimator={estimator} also needs {needs}; call it from winnow.algorithms.advantages"
        )
    count, values = len(rewards), torch.tensor(rewards, dtype=torch.float64)
    ones = torch.ones(count, dtype=torch.bool)
    inputs = AdvantageInputs(
        values, torch.tensor(groups), torch.arange(count + 1), ones, ones, values
    )
    samples = estimate(found, inputs, section.model_dump(exclude={"name"})).samples
    return [float(value) for value in samples]
