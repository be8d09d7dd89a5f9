"""`winnow eval` from its words to the table: load, ask, score, write, show.

Ctrl-C or SIGTERM ends it with nothing written: answers that are finished first are the short
ones, so figures of a part would flatter.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

import winnow
from winnow.config.root import Config
from winnow.config.trainer import EvaluationConfig
from winnow.errors import DataError, ModelError, RewardError
from winnow.evaluation.evaluator import Evaluated, Evaluator
from winnow.evaluation.progress import ProgressLine, watched
from winnow.evaluation.report import Report
from winnow.evaluation.tables import print_report
from winnow.observe.files import write_atomic
from winnow.rewards.routing import Router
from winnow.rollout.engine import WeightUpdate
from winnow.runs.build import make_evaluator, use_machine
from winnow.runs.evaluation_subject import (
    SCORED,
    EvalRequest,
    Subject,
    check_not_asked_twice,
    subject_of,
)
from winnow.runs.loading import load_policy
from winnow.runs.rewarding import make_rewards
from winnow.runs.shutdown import ShutdownSignal, Stopped
from winnow.runs.topology import make_engine


def run_evaluation(request: EvalRequest, console: Console) -> Report:
    """Evaluate a model, write answers and figures, and print the figures.

    Raises:
        WinnowError: no such run, checkpoint or model, or nothing to evaluate on.
        Stopped: a signal ended it; nothing of it is left.
    """
    stop = ShutdownSignal(notice="")
    with stop.listening():
        return _evaluation(request, console, stop)


def _evaluation(request: EvalRequest, console: Console, stop: ShutdownSignal) -> Report:
    subject = subject_of(request)
    began = time.monotonic()
    with _nothing_left_of(subject):
        found, evaluator = _ask(subject, console, stop)
        seconds = time.monotonic() - began
        report = Report.of(found)
        about = _about(subject, evaluator, seconds)
        write_atomic(subject.report, report.as_json(about))
    print_report(report, console)
    if evaluator.left_out:
        console.print(
            f"{evaluator.left_out:,} rows are left out: longer than data.max_prompt_tokens",
            markup=False,
        )
    for line in (f"answers  {subject.answers}", f"figures  {subject.report}"):
        console.print(Text(line), soft_wrap=True)
    return report


@contextlib.contextmanager
def _nothing_left_of(subject: Subject) -> Iterator[None]:
    """A stop takes the answers away, too; where scoring fails too often, it is said of them."""
    had_folder = subject.answers.parent.exists()
    try:
        yield
    except (KeyboardInterrupt, Stopped):
        for file in (subject.answers, subject.report):
            file.unlink(missing_ok=True)
        if not had_folder and subject.answers.parent.exists():
            subject.answers.parent.rmdir()
        raise
    except RewardError as error:
        if not subject.answers.exists():
            raise
        raise RewardError(f"{error}; the answers are kept in {subject.answers}") from error


def _ask(subject: Subject, console: Console, stop: ShutdownSignal) -> tuple[Evaluated, Evaluator]:
    config = subject.config
    device = use_machine(config)
    with _limits_named_as_given(config.evaluation):
        policy = load_policy(config, subject.model, device)
    engine = make_engine(config, policy)
    line = ProgressLine(console, config.observe.console)

    async def ask(evaluator: Evaluator) -> Evaluated:
        await engine.load_weights(WeightUpdate(version=subject.step))
        return await watched(evaluator, subject.step, line)

    with contextlib.closing(make_rewards(config, device, policy.decode, False)) as rewards:
        with _limits_named_as_given(config.evaluation):
            evaluator = make_evaluator(
                _with_all_texts(config), policy, engine, lambda _: subject.answers, rewards
            )
        if not evaluator.prompts:
            raise DataError("no held-out prompts: give --data FILE, or data.eval_files=[FILE]")
        check_not_asked_twice(config.data, [(p.uid, p.text) for p in evaluator.prompts])
        console.print(Text(_title(subject, evaluator), style="bold"), soft_wrap=True)
        with line.shown():
            return stop.run(lambda: ask(evaluator)), evaluator


def _with_all_texts(config: Config) -> Config:
    """Every answer is kept with its text; in a run only some are."""
    rows = 2**63 - 1
    observe = config.observe.model_copy(update={"rollout_text_groups": rows})
    return config.model_copy(update={"observe": observe})


@contextlib.contextmanager
def _limits_named_as_given(config: EvaluationConfig) -> Iterator[None]:
    """A limit that does not fit is told by the key that set it."""
    try:
        yield
    except ModelError as error:
        if config.max_response_tokens is None:
            raise
        own = "evaluation.max_response_tokens"
        raise ModelError(str(error).replace("rollout.max_response_tokens", own)) from error


def _about(subject: Subject, evaluator: Evaluator, seconds: float) -> dict[str, Any]:
    config = subject.config
    asked = config.evaluation
    return {
        "title": subject.title,
        "model": subject.model,
        "step": subject.step,
        "winnow": winnow.__version__,
        "data": list(config.data.eval_files) or config.data.task.name,
        "settings": {
            "n": asked.n,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "top_k": asked.top_k,
            "max_response_tokens": config.rollout.max_response_tokens,
            "seed": config.run.seed,
            "chat_template": config.data.chat_template,
            **_scoring(config, sorted({prompt.data_source for prompt in evaluator.prompts})),
        },
        "rows_left_out": evaluator.left_out,
        "generated_tokens": evaluator.progress.tokens,
        "seconds": round(seconds, 3),
    }


def _scoring(config: Config, sources: Sequence[str]) -> dict[str, str]:
    """What scored the answers; a scorer for each source, which comparisons have in common."""
    reward = config.reward
    function = reward.function
    found: dict[str, str] = {
        f"{SCORED}manager": reward.manager.name,
        f"{SCORED}judge": reward.judge.name,
    }
    for source in sources:
        if function.path is not None:
            name = f"{function.path}:{function.name}"
        else:
            try:
                name = Router(reward.scorers).scorer(source).name
            except RewardError:  # a manager that scores by itself needs none
                name = reward.manager.name
        found[f"{SCORED}scorer of {source}"] = name
    return found


def _title(subject: Subject, evaluator: Evaluator) -> str:
    asked = subject.config.evaluation
    how = [f"{len(evaluator.prompts):,} held-out prompts", f"temperature {asked.temperature:g}"]
    how += [f"top_p {asked.top_p:g}"] if asked.top_p < 1 else []
    how += [f"top_k {asked.top_k}"] if asked.top_k else []
    limit = subject.config.rollout.max_response_tokens
    return f"{subject.title}: {', '.join(how)}, at most {limit:,} tokens"
