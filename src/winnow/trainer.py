"""`winnow.Trainer`: a run as an object, made of Python values, functions and settings.

    trainer = winnow.Trainer(model="FOLDER", data=rows, reward=function, lr=2e-5, steps=50)
    for step in trainer:
        print(step.number, step.figures["score/reward/mean"])

It is the run of `winnow train` with the same recipe and settings, in this process: the same bits,
the same folder, which `winnow resume` continues. Rows are written there as data files. Functions
and classes are named in the recipe by their files; those that no file can be imported for, such as
lambdas and a notebook's, are called in this process, and such a run is continued from here alone.
The run has a thread for itself, so a running event loop does not matter.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypedDict, Unpack, cast, get_type_hints

from winnow.api import LLM, Completion, RunRecord, open_run, run_path
from winnow.config.judge import RESERVED_PARTS
from winnow.config.load import Setting, load_recipe, parse_recipe
from winnow.errors import ConfigError, DataError
from winnow.observe.files import INPUTS, RunFolder, unused_path, write_atomic
from winnow.user_code import PROGRAM, place_of, program_objects

if TYPE_CHECKING:
    from winnow.evaluation.report import Report

Rows = str | os.PathLike[str] | Iterable[Any]
"""A data file, files, or rows: dicts, or a `datasets.Dataset`; images may be Pillow's."""
UserCode = Callable[..., Any] | str | os.PathLike[str]
"""A function or class, or its place FILE.py:NAME."""
Callback = Callable[["TrainerStep"], object]
_PLACE = "winnow.Trainer"


class Settings(TypedDict, total=False):
    """The settings of a `Trainer` that have a keyword, each with its key in recipes."""

    lr: Annotated[float, "optim.lr"]
    steps: Annotated[int, "trainer.steps"]
    epochs: Annotated[float | None, "trainer.data_epochs"]
    groups_per_step: Annotated[int, "sampling.groups_per_step"]
    mini_batch_groups: Annotated[int, "trainer.mini_batch_groups"]
    microbatch_tokens: Annotated[int, "trainer.microbatch_tokens"]
    n: Annotated[int, "rollout.n"]
    temperature: Annotated[float, "rollout.temperature"]
    max_prompt_tokens: Annotated[int, "data.max_prompt_tokens"]
    max_response_tokens: Annotated[int, "rollout.max_response_tokens"]
    eval_every: Annotated[int | None, "evaluation.every"]
    save_every: Annotated[int | None, "trainer.save_every"]
    dtype: Annotated[Literal["float32", "bfloat16"], "model.dtype"]
    threads: Annotated[int | None, "run.threads"]
    seed: Annotated[int, "run.seed"]
    name: Annotated[str | None, "run.name"]
    dir: Annotated[str, "run.dir"]
    console: Annotated[Literal["auto", "plain", "off"], "observe.console"]


@dataclass(frozen=True)
class StepGroup:
    """The answers to one prompt whose group closed in a step."""

    prompt: str | None
    """Text of the prompt; None where the run kept none (`observe.rollout_text_tokens`)."""
    outcome: str
    """Fate of the group: trained, all right, all wrong, …"""
    answers: list[str | None]
    """[G]"""
    rewards: list[float]
    """[G]"""
    accuracies: list[float]
    """[G] 0..1"""
    advantages: list[float | None]
    """[G] None where the group was not trained."""


@dataclass(frozen=True)
class TrainerStep:
    """A step that is learned, recorded and, where due, evaluated and saved."""

    number: int
    figures: Mapping[str, float]
    """Metrics by name, as metrics.jsonl has them; docs/metrics.md lists them."""
    run: RunRecord
    stop: Callable[[], None]
    """Requests the end of the run: it saves this step, and continues from it another time."""

    @cached_property
    def groups(self) -> list[StepGroup]:
        """The groups that closed in this step, trained or not, in the order of their prompts."""
        groups: dict[int, list[dict[str, Any]]] = {}
        for row in self.run.rollouts(self.number).to_pylist():
            groups.setdefault(row["group"], []).append(row)
        columns = "response", "reward", "accuracy", "advantage"
        return [
            StepGroup(first["prompt"], first["outcome"], *([r[c] for r in rows] for c in columns))
            for rows in groups.values()
            for first in rows[:1]
        ]


class Trainer:
    """A run of reinforcement learning from Python values.

    Example::

        def right(completions, answer, **columns):  # TRL's signature; or verl's, or Winnow's
            return [float(a in c) for c, a in zip(completions, answer)]

        trainer = winnow.Trainer(model="FOLDER", data=[{"prompt": "1+1=", "answer": "2"}],
                                 reward=right, lr=2e-5, steps=10, name="sums")
        trainer.train()

    The same program continues a run that has a `name`, with the same bits. Ctrl-C and SIGTERM end
    `train` after the run was saved, by KeyboardInterrupt and by exit code 75.

    Args:
        model: folder or hub name, with the machine's default of threads; None: that of the recipe.
        data: rows to train on, or their files; None: those of the recipe.
        reward: function, in verl's, TRL's or Winnow's signature, sync or async, or its file, or a
            list of these, whose weighted sum is the reward and, where the recipe filters groups by
            accuracy, what they are filtered by. The first says what is right (`acc`, or a score
            above 0), the others are `reward.parts` of their names. None: the recipe's.
        recipe: name or file of the recipe; what is not set here is as there.
        reward_weights: a number for each of a list of rewards; all 1 by default.
        eval_data: held-out rows, or their files.
        environment: a class with `reset` and `step`, or a list of functions as tools.
        callbacks: are called with each `TrainerStep`.
        overrides: further settings, such as `optim.schedule=linear`; they come last.
        settings: keywords of `Settings`.

    Raises:
        ConfigError: the recipe or a setting is wrong.
        DataError: a row is no dict, or holds what no data file can.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        data: Rows | None = None,
        reward: UserCode | Sequence[UserCode] | None = None,
        *,
        recipe: str = "dapo",
        reward_weights: Sequence[float] | None = None,
        eval_data: Rows | None = None,
        environment: UserCode | Sequence[UserCode] | None = None,
        callbacks: Sequence[Callback] = (),
        overrides: Sequence[str] = (),
        **settings: Unpack[Settings],
    ) -> None:
        self._objects: dict[str, Any] = {}
        self._inputs: dict[Path, bytes] = {}
        self._recipe, self._callbacks = recipe, tuple(callbacks)
        hints = get_type_hints(Settings, include_extras=True)
        keys = {name: hint.__metadata__[0] for name, hint in hints.items()}
        typed = {keys.get(name, name): value for name, value in settings.items()}
        words = self._reward_settings(reward, reward_weights)
        if model is not None:
            words |= {"model.path": os.fspath(model), "warm_start": "none", "run.threads": None}
        if data is not None:
            words |= {"data.task": "none", "run.description": []}
        if isinstance(environment, list | tuple):
            words |= {"environment": "tools", "environment.tools": [*map(self._place, environment)]}
        elif environment is not None:
            place = self._place(cast("UserCode", environment))
            words |= {"environment": "custom", "environment.path": place}
        base = parse_recipe(recipe, [*_settings(words), *_settings(typed), *overrides])
        self.path, is_new = run_path(base.run, recipe)
        if is_new:
            words["run.name"] = self.path.name
        if data is not None:
            words["data.train_files"] = self._files("data", data)
        if eval_data is not None:
            words["data.eval_files"] = self._files("eval_data", eval_data)
        if base.reward.parts and getattr(base.sampling.filter, "metric", "") == "accuracy":
            words["sampling.filter.metric"] = "reward"
        config = load_recipe(recipe, [*_settings(words), *_settings(typed), *overrides])
        self.config = config
        if config.trainer.max_restarts:
            raise ConfigError(
                f"trainer.max_restarts={config.trainer.max_restarts} restarts the process of "
                "`winnow train`, and a Trainer's is your program; set it to 0"
            )
        self._write_inputs()

    def _write_inputs(self) -> None:
        for file, content in self._inputs.items():
            write_atomic(file, content)

    def _files(self, argument: str, rows: Rows) -> list[str]:
        """Return data files; rows become a new one, named by its content."""
        if isinstance(rows, str | os.PathLike):
            return [os.fspath(rows)]
        if isinstance(rows, Mapping) or hasattr(rows, "iloc"):
            raise DataError(
                f"{argument} must be a list of dicts, a Dataset or files, got a "
                f"{type(rows).__name__}; give one of its splits, or its rows"
            )
        records = [*rows]
        if records and all(isinstance(each, str | os.PathLike) for each in records):
            return [*map(os.fspath, records)]
        lines = [_json_line(record, f"{argument}[{i}]") for i, record in enumerate(records)]
        if not lines:
            raise DataError(f"{argument} has no rows; give at least one")
        content = "".join(lines).encode()
        digest = hashlib.blake2b(content, digest_size=6).hexdigest()
        file = self.path.absolute() / INPUTS / digest / f"{argument}.jsonl"
        self._inputs[file] = content
        return [str(file)]

    def _reward_settings(
        self, reward: UserCode | Sequence[UserCode] | None, weights: Sequence[float] | None
    ) -> dict[str, Any]:
        rewards = reward if isinstance(reward, list | tuple) else [reward] * (reward is not None)
        if len(rewards) != len(weights or rewards):
            raise ConfigError(
                f"reward_weights has {len(weights or ())} numbers for {len(rewards)} reward "
                "functions; give one for each"
            )
        words: dict[str, Any] = {}
        for number, each in enumerate(rewards):
            place, _, name = self._place(each).rpartition(":")
            is_taken = f"reward.parts.{name}.path" in words or name in RESERVED_PARTS
            part = f"reward.parts.{name}_{number + 1}" if is_taken else f"reward.parts.{name}"
            key, weight = part if number else "reward.function", f"{part}.weight"
            words |= {f"{key}.path": place, f"{key}.name": name}
            if weights:
                words[weight if number else "reward.weights.task"] = weights[number]
        return words

    def _place(self, code: UserCode) -> str:
        """Return the place of a user's code, which is this program where there is no other."""
        if isinstance(code, str | os.PathLike):
            text = os.fspath(code)
            return f"{text}:compute_score" if text.endswith(".py") else text
        place = place_of(code)
        if ":" in place:
            return place
        others = [name for name, each in self._objects.items() if each is not code]
        name = f"{place}_{len(self._objects) + 1}" if place in others else place
        self._objects[name] = code
        return f"{PROGRAM}:{name}"

    @property
    def run(self) -> RunRecord:
        """The files of the run: figures, answers, model.

        Raises:
            WinnowError: it has not begun.
        """
        return open_run(self.path)

    def train(self) -> RunRecord:
        """Train to the last step, or to a callback's `step.stop()`.

        Raises:
            WinnowError: the run cannot begin or continue; its files are in its folder.
        """
        for _ in self:
            pass
        return self.run

    def __iter__(self) -> Iterator[TrainerStep]:
        """Train, and yield each step; the next one begins when it is asked for.

        Leaving the loop stops the run, which is saved and continues another time; if the save
        fails, a line on stderr says so.
        """
        from winnow.run.shutdown import EXIT_INTERRUPTED

        is_stopped = False

        def stop() -> None:
            nonlocal is_stopped
            is_stopped = True
            work.stop.request_stop(signal.SIGTERM, "step.stop()")

        work = _Work(self._train, self._objects)
        done = work.next()
        try:
            while done is not None:
                number, figures = done
                step = TrainerStep(number, figures, self.run, stop)
                for callback in self._callbacks:
                    callback(step)
                yield step
                done = None
                done = work.next()
        finally:
            if done is not None:  # the loop was left
                stop()
                work.next()
                if error := work.outcome.exception():  # lost if a loop's generator raised it
                    print(f"winnow: {error}", file=sys.stderr)
        if (code := work.outcome.result()) and not is_stopped:
            raise KeyboardInterrupt if code == EXIT_INTERRUPTED else SystemExit(code)

    def _train(self, work: _Work) -> int:
        from rich.console import Console

        from winnow.builders.preflight import check_requirements
        from winnow.checkpoints.strangers import require_trusted_start
        from winnow.commands.train import TrainOptions, run_training
        from winnow.run.supervisor import Heartbeat

        self._write_inputs()  # again, as a start that fails removes the run's folder
        check_requirements(self.config)
        require_trusted_start(self.config, self._recipe, (), trusts=False)
        options = TrainOptions(
            *(self._recipe, False, Console(), work.stop, Heartbeat(None), time.monotonic()),
            on_step=lambda step, record: work.hand_over((step, record)),
        )
        return run_training(self.config, options)

    def evaluate(self, data: Rows | None = None, overrides: Sequence[str] = ()) -> Report:
        """Evaluate the newest checkpoint on held-out rows, as `winnow eval` does.

        Answers and figures are stored in a folder of the run's eval/.

        Args:
            data: instead of `eval_data`.
            overrides: settings, such as `evaluation.n=16`.

        Raises:
            WinnowError: there are no rows or no checkpoint, or these do not fit the settings.
        """
        from rich.console import Console

        from winnow.commands.evaluate import EvalRequest, run_evaluation

        files = () if data is None else self._files("eval_data", data)
        self._write_inputs()
        out = unused_path(RunFolder(self.path).evaluations, "asked")
        request = EvalRequest(str(self.path), tuple(overrides), tuple(files), out=str(out))
        console = Console(quiet=self.config.observe.console == "off")
        work = _Work(lambda work: run_evaluation(request, console, work.stop), self._objects)
        work.next()
        return cast("Report", work.outcome.result())

    def generate(
        self, prompts: Sequence[str | Sequence[Mapping[str, Any]]], n: int = 1, **sampling: Any
    ) -> list[list[Completion]]:
        """Write n answers to each prompt with the newest checkpoint, as `winnow.LLM` does.

        Args:
            sampling: keywords of `LLM.generate`, such as `temperature=0`.

        Raises:
            WinnowError: there is no checkpoint yet, or an argument is out of its range.
        """
        with LLM(self.run.path) as llm:
            return llm.generate(prompts, n, **sampling)

    def push_to_hub(self, repo: str, *, private: bool = False, revision: str | None = None) -> str:
        """Upload the newest checkpoint's model with a model card; return the commit's address.

        Args:
            repo: OWNER/NAME, made if it is not there.
            private: make a new repository private.
            revision: branch to upload to, made if it is not there; None is the main one.

        Raises:
            WinnowError: the run has saved no model, or the hub refuses.
        """
        from winnow.commands.export import run_export
        from winnow.commands.push import HubTarget

        target = unused_path(self.path, "export")
        hub = HubTarget(repo, private, revision)
        return run_export(str(self.path), str(target), None, hub=hub)


class _Work:
    """Work in a thread for itself, which may run an event loop, and what it hands over.

    Args:
        work: gets this object; it begins with the first `next`, and `hand_over` waits for another.
        objects: the program's, by the names in the recipe.
    """

    def __init__(self, work: Callable[[_Work], Any], objects: Mapping[str, Any]) -> None:
        from winnow.run.shutdown import ShutdownSignal
        from winnow.workers.threads import start_thread

        program_objects.update(objects)
        self.stop, self.outcome = ShutdownSignal(), Future[Any]()
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._asked = threading.Semaphore(0)

        def run() -> None:
            self._asked.acquire()
            try:
                self.outcome.set_result(work(self))
            except BaseException as error:  # raised where the outcome is asked for
                self.outcome.set_exception(error)
            self._items.put(None)

        start_thread(run, "winnow-trainer")

    def hand_over(self, item: Any) -> None:
        """Hand over an item, and wait until the next is asked for."""
        self._items.put(item)
        self._asked.acquire()

    def next(self) -> Any:
        """Wait for the next item; None at the end. A signal to stop lets the work end first."""
        from winnow.run.shutdown import Stopped

        self._asked.release()
        with self.stop.listening():
            while True:
                try:
                    return self._items.get()
                except Stopped:  # the work is not interruptible yet, but soon
                    continue
                except KeyboardInterrupt:  # a second one; the work still ends as the first asked
                    self._asked.release()
                    raise


def _settings(values: Mapping[str, Any]) -> list[Setting]:
    return [Setting(tuple(key.split(".")), value, _PLACE) for key, value in values.items()]


def _json_line(record: Any, origin: str) -> str:
    """Return a row as a line of a JSONL file; images as PNG in data: URLs.

    Raises:
        DataError: it is no dict, or holds what JSON cannot.
    """
    if not isinstance(record, Mapping):
        raise DataError(f"{origin} must be a dict with columns, got a {type(record).__name__}")
    try:
        return json.dumps(dict(record), default=_to_json, ensure_ascii=False) + "\n"
    except (TypeError, ValueError, OSError) as error:
        raise DataError(f"{origin}: {error}; leave the column out, or make it text") from error


def _to_json(value: Any) -> Any:
    if hasattr(value, "getbands"):  # of Pillow
        value.save(buffer := io.BytesIO(), "PNG")
        value = buffer.getvalue()
    if isinstance(value, bytes):
        return f"data:image/png;base64,{base64.b64encode(value).decode()}"
    if hasattr(value, "tolist"):  # of NumPy or torch
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is not a value of a data file")
