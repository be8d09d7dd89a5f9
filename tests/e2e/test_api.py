"""`import winnow`: what it offers, on a run of the quickstart's task."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from benchmarks.kill import SETTINGS, wait_for
from tests.forked import Server
from tests.winnow_command import python
from tests.winnow_command import winnow as in_winnow

import winnow
from winnow.errors import ConfigError, DataError, RewardError, WinnowError

SMALL = [
    *(word for word in SETTINGS if "console" not in word),
    *("trainer.steps=2", "trainer.save_every=1", "trainer.keep_last=null", "observe.console=plain"),
]


@pytest.fixture(scope="module")
def run(home: Path) -> winnow.RunRecord:
    """A run that is over."""
    in_winnow(home, "train", "quickstart", "run.name=first", *SMALL).check()
    return winnow.open_run(home / "runs/first")


@pytest.fixture(scope="module")
def llm(run: winnow.RunRecord) -> winnow.LLM:
    return winnow.LLM(run.path)


def test_importing_winnow_imports_nothing_else() -> None:
    program = "import sys, winnow; print([m for m in sys.modules if m.startswith('winnow')])"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert said.stdout.strip() == "['winnow']"
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        winnow.trian  # type: ignore[attr-defined]  # noqa: B018


def test_a_runs_record_is_read(run: winnow.RunRecord) -> None:
    assert [record["step"] for record in run.metrics][-1] == run.config.trainer.steps
    assert run.rollouts(1).num_rows < run.rollouts().num_rows
    assert (run.model / "config.json").is_file()
    with pytest.raises(WinnowError, match="no rollouts at"):
        run.rollouts(10_000)
    with pytest.raises(WinnowError, match="is not a run's folder"):
        winnow.open_run(run.path / "rollouts")


def test_the_same_arguments_give_the_same_answers_in_any_company(llm: winnow.LLM) -> None:
    both = llm.generate(["31:", "213:"], n=3, max_tokens=12)
    assert [len(answers) for answers in both] == [3, 3]
    again = llm.generate(["31:", "213:"], n=3, max_tokens=12)
    assert [[c.text for c in answers] for answers in again] == [
        [c.text for c in answers] for answers in both
    ]
    (fewer,) = llm.generate(["31:"], n=2, max_tokens=12)
    assert [c.text for c in fewer] == [c.text for c in both[0][:2]]
    other = llm.generate(["31:", "213:"], n=3, max_tokens=12, seed=1)
    assert [[c.text for c in answers] for answers in other] != [
        [c.text for c in answers] for answers in both
    ]
    for answer in (answer for answers in both for answer in answers):
        assert answer.token_ids.shape == answer.logprobs.shape
        assert len(answer.token_ids) <= 12
        assert (answer.logprobs <= 0).all()


@pytest.mark.bits
def test_greedy_answers_are_alike_and_stop_strings_end_them(llm: winnow.LLM) -> None:
    ((first, second),) = llm.generate(["213:"], n=2, temperature=0)
    assert first.text == second.text
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-5)  # rows of one batch
    stop = first.text[2]
    ((cut,),) = llm.generate(["213:"], temperature=0, stop=[stop])
    assert cut.text == first.text[: first.text.index(stop) + 1]
    assert cut.finish_reason == "stop"
    ((short,),) = llm.generate([[{"role": "user", "content": "213:"}]], temperature=0, max_tokens=1)
    assert (short.text, short.finish_reason) == (first.text[0], "length")


def test_it_works_where_a_loop_runs_already(llm: winnow.LLM) -> None:
    async def in_a_notebook() -> tuple[str, float]:
        ((answer,),) = llm.generate(["21:"], temperature=0)
        (score,) = winnow.score(["#12"], "12", source="sort_digits")
        return answer.text, score.accuracy

    assert asyncio.run(in_a_notebook())[1] == 1.0


def test_prompts_that_do_not_fit_are_refused_and_the_engine_goes_on(llm: winnow.LLM) -> None:
    with pytest.raises(DataError, match=r"prompts\[1\]: the prompt has"):
        llm.generate(["21:", "1" * 5000 + ":"])
    assert llm.generate([]) == []
    with pytest.raises(ConfigError, match=r"max_tokens must be in \[1, 32\], got 1000000"):
        llm.generate(["21:"], max_tokens=10**6)
    for wrong in ({"n": 0}, {"temperature": 1e-9}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}):
        ((name, value),) = wrong.items()
        with pytest.raises(ConfigError, match=rf"{name} must be .*, got {value}"):
            llm.generate(["21:"], **wrong)  # type: ignore[arg-type]
    for single in ("21:", [{"role": "user", "content": "21:"}]):
        with pytest.raises(TypeError, match="must be a list"):
            llm.generate(single)  # type: ignore[arg-type]
    for talk in ([{"role": "user"}], [{"role": "user", "content": ["21:"]}], []):
        with pytest.raises(ConfigError, match=r"prompts\[0\] must have messages with role and"):
            llm.generate([talk])
    assert llm.generate(["21:"])


def test_an_engine_that_is_closed_is_closed(run: winnow.RunRecord) -> None:
    with winnow.LLM(run.path) as llm:
        llm.generate(["21:"], max_tokens=2)
    llm.close()
    with pytest.raises(WinnowError, match="is closed"):
        llm.generate(["21:"])


def test_scores_are_those_of_a_run(tmp_path: Path) -> None:
    right, wrong = winnow.score(["Answer: 4", "5"], "4", source="math_dapo")
    assert (right.reward, right.accuracy, wrong.reward, wrong.accuracy) == (1, 1, -1, 0)
    file = tmp_path / "mine.py"
    file.write_text(
        "def longer(data_source, solution_str, ground_truth, extra_info):\n"
        "    if not solution_str: raise ValueError('nothing said')\n"
        "    return {'score': len(solution_str) / extra_info['most'], 'acc': 0.5}\n"
    )
    function = f"{file}:longer"
    half, failed = winnow.score(["ab", ""], None, function=function, extra_info={"most": 4})
    assert (half.reward, half.accuracy) == (0.5, 0.5)
    assert "nothing said" in failed.error
    with pytest.raises(ConfigError, match="needs a source, a function or a recipe"):
        winnow.score(["x"], "y")
    with pytest.raises(RewardError, match="no_such_source"):
        winnow.score(["x"], "y", source="no_such_source")
    with pytest.raises(TypeError, match="must be a list"):
        winnow.score("x", "y", source="math_dapo")


def test_advantages_by_hand() -> None:
    groups = [7, 7, 7, 2, 2]
    assert winnow.advantages([1, 0, 0, 1, 1], groups, "rloo") == pytest.approx(
        [1, -0.5, -0.5, 0, 0]
    )
    dr_grpo = winnow.advantages([1, 0, 0, 1, 1], groups, std_normalization="none")
    assert dr_grpo == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0, 0])
    with pytest.raises(ConfigError, match="must have the same length, got 3 and 2"):
        winnow.advantages([1, 0, 0], [7, 7])
    with pytest.raises(ConfigError, match="estimator=gae also needs values"):
        winnow.advantages([1.0], [0], "gae")
    with pytest.raises(ConfigError, match=r"std_normalization must be one of"):
        winnow.advantages([1.0], [0], std_normalization="some")


def test_a_run_that_cannot_begin_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"optim\.rl is not a known key"):
        winnow.train("quickstart", ["optim.rl=1"])


def test_a_recipe_with_a_dot_in_its_name_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[list[str]] = []
    monkeypatch.setattr("subprocess.Popen", lambda words, **options: started.append(words))
    with pytest.raises(AttributeError):  # nothing to wait for
        winnow.train("dapo_qwen2.5_32b", [f"run.dir={tmp_path}"])
    assert started[0][-1].startswith("run.name=dapo_qwen2.5_32b-20")


GOING_ON = """
import winnow

config = winnow.load_config("quickstart", ["run.name=taken"])
try:
    winnow.train(config)
except winnow.errors.WinnowError as error:
    print(error)
run = winnow.train("quickstart", {settings})
print(run.path, run.metrics[-1]["step"])
"""


def test_a_run_that_is_gone_on_with_is_the_one_that_comes_back(
    run: winnow.RunRecord, home: Path, server: Server
) -> None:
    (home / "runs/taken").mkdir()
    (home / "runs/taken/mine.txt").touch()
    settings = [*SMALL, f"run.resume={run.path}", "trainer.steps=3"]
    said = python(server, GOING_ON.format(settings=settings), home).check().out
    assert "the run failed with exit code 2" in said
    assert said.endswith(f"{run.path} 3\n")


def test_the_first_interrupt_lets_a_run_save_and_the_second_kills_it(tmp_path: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "def save(*_):\n"
        "    open('told', 'w').close()\n"
        "    time.sleep(float(sys.argv[1]))\n"
        "    sys.exit(open('saved', 'w').close())\n"
        "signal.signal(signal.SIGINT, save)\n"
        "open('ready', 'w').close()\n"
        "time.sleep(60)\n"
    )
    caller = (
        "import subprocess, sys\n"
        "from winnow.api import _wait_for_run\n"
        "child = subprocess.Popen([sys.executable, '-c', *sys.argv[1:]], process_group=0)\n"
        "print(child.pid, flush=True)\n"
        "_wait_for_run(child)\n"
    )
    for seconds, signals, is_saved in ((0.2, 1, True), (60, 2, False)):
        folder = tmp_path / str(signals)
        folder.mkdir()
        words = [sys.executable, "-c", caller, program, str(seconds)]
        asking = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for mark in ("ready", "told")[:signals]:
            assert wait_for(asking, (folder / mark).exists)
            asking.send_signal(signal.SIGINT)
        said, error = asking.communicate(timeout=60)
        assert b"KeyboardInterrupt" in error
        assert (folder / "saved").exists() == is_saved
        with pytest.raises(ProcessLookupError):
            os.kill(int(said), 0)
