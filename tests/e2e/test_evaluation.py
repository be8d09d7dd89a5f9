"""`winnow eval` and `winnow compare` on a small model with random weights, as a user types them.

Its answers are noise; a reward file that goes by their letters makes some of them right.
"""

from __future__ import annotations

import json
import os
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from benchmarks.kill import wait_for
from tests.forked import Server
from tests.small_models import digits_folder, qwen_folder
from tests.winnow_command import Outcome, winnow

from winnow.commands import evaluate as evaluation_command
from winnow.observe.rollouts import read_rollouts

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    said = solution_str[:1]
    if solution_str[:2] == "00":
        raise RuntimeError("cannot judge 00")
    right = said != "" and said in ground_truth
    return {"score": float(right), "pred": said if said.isdigit() else ""}
"""
ASKED = [
    *("reward.function.path=reward.py", "reward.workers=0", "evaluation.n=6", "run.threads=1"),
    *("evaluation.max_response_tokens=12", "observe.console=plain"),
]
"""Settings of every evaluation here."""
N, PROBLEMS = 6, {"easy": 8, "hard": 5}
TRUTHS = {"easy": "0123456", "hard": "7", "openai/gsm8k": "7"}


def rows_file(path: Path, source: str, count: int, copies: int = 1, first: int = 1000) -> None:
    with path.open("w") as file:
        for number in range(first, first + count):
            row = {
                "data_source": source,
                "prompt": [{"role": "user", "content": f"{number}:"}],
                "reward_model": {"style": "rule", "ground_truth": TRUTHS[source]},
            }
            file.write(f"{json.dumps(row)}\n" * copies)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("place")
    digits_folder(folder / "model")
    (folder / "reward.py").write_text(REWARD)
    for source, count in PROBLEMS.items():
        rows_file(folder / f"{source}.jsonl", source, count)
    rows_file(folder / "copies.jsonl", "easy", PROBLEMS["easy"], copies=2)
    rows_file(folder / "others.jsonl", "easy", 4, first=5000)
    return folder


def asked(place: Path, out: str, *more: str, data: tuple[str, ...] = ("easy.jsonl",)) -> Outcome:
    files = [word for file in data for word in ("--data", file)]
    return winnow(place, "eval", "model", *files, "--out", out, *ASKED, *more)


def rows_of(place: Path, out: str, outcome: str = "held_out") -> list[dict[str, Any]]:
    rows = read_rollouts(place / out / "answers.parquet").to_pylist()
    return [row for row in rows if row["outcome"] == outcome]


def report_of(place: Path, out: str) -> dict[str, Any]:
    body: dict[str, Any] = json.loads((place / out / "report.json").read_text())
    return body


@pytest.fixture(scope="module")
def both(place: Path) -> Outcome:
    """Both files asked, with greedy answers beside the sampled ones."""
    return asked(place, "both", "evaluation.greedy=true", data=("easy.jsonl", "hard.jsonl")).check()


def test_every_answer_has_a_row_with_its_text_and_score(place: Path, both: Outcome) -> None:
    rows = rows_of(place, "both")
    assert len(rows) == N * sum(PROBLEMS.values())
    assert len(rows_of(place, "both", "held_out_greedy")) == sum(PROBLEMS.values())
    assert len({row["problem"] for row in rows}) == sum(PROBLEMS.values())
    assert {row["prompt_uid"] for row in rows} >= {"easy.jsonl:1", "hard.jsonl:5"}
    for row in rows:
        failed = row["response"][:2] == "00"
        right = not failed and row["response"][:1] in TRUTHS[row["data_source"]]
        assert row["accuracy"] == float(right and row["response"] != "")
        assert ("cannot judge 00" in row["scorer_error"]) == failed
        assert row["response_tokens"] <= 12
        assert row["finish_reason"] == "stop" or row["response_tokens"] == 12
    assert any(row["accuracy"] for row in rows)
    assert not all(row["accuracy"] for row in rows)


def test_the_figures_are_those_of_the_rows(place: Path, both: Outcome) -> None:
    report = report_of(place, "both")
    for source, count in PROBLEMS.items():
        rows = [row for row in rows_of(place, "both") if row["data_source"] == source]
        right: dict[str, float] = defaultdict(float)
        for row in rows:
            right[row["problem"]] += row["accuracy"]
        cut = [row["finish_reason"] == "length" for row in rows]
        figures = report["sources"][source]
        assert (figures["problems"], figures["answers"]) == (count, N)
        for name, wanted in (
            (f"avg@{N}", sum(right.values()) / N / count),
            (f"pass@{N}", sum(map(bool, right.values())) / count),
            ("truncated", sum(cut) / len(rows)),
            ("tokens", sum(row["response_tokens"] for row in rows) / len(rows)),
        ):
            assert figures[name]["mean"] == pytest.approx(wanted), name


def test_two_evaluations_are_compared_on_what_both_answered(place: Path, both: Outcome) -> None:
    asked(place, "greedy", "evaluation.temperature=0", "evaluation.n=1").check()
    said = winnow(place, "compare", "both", "greedy", "--json").check()
    body = json.loads(said.out)
    assert (body["shared_problems"], list(body["sources"])) == (PROBLEMS["easy"], ["easy"])
    figures = body["sources"]["easy"]
    assert figures["a"] == pytest.approx(
        report_of(place, "both")["sources"]["easy"]["avg@6"]["mean"]
    )
    assert figures["b"] == report_of(place, "greedy")["sources"]["easy"]["avg@1"]["mean"]
    failed = [
        sum(bool(row["scorer_error"]) for row in rows_of(place, o)) for o in ("both", "greedy")
    ]
    assert failed[0] > 0
    assert body["notes"] == [
        "5 problems are only in A and are left out.",
        *(
            f"Scoring failed for {number} answers of {name}, which count as wrong."
            for name, number in zip("AB", failed, strict=True)
            if number
        ),
        "The evaluations were sampled differently: n is 6 in A, 1 in B.",
        "The evaluations were sampled differently: temperature is 1.0 in A, 0.0 in B.",
    ]
    shown = winnow(place, "compare", "both/answers.parquet", "greedy").check().out
    assert " ".join(body["verdict"].split()) in " ".join(shown.split())


DATA = "--data easy.jsonl"
TOO_LONG = f"eval model {DATA} {' '.join(ASKED)} evaluation.max_response_tokens=300"
WRONG = {
    "eval model --out new": "no held-out prompts; pass --data FILE, or set data.eval_files",
    "eval model --recipe aime2024": "no such file; create it with `winnow data prepare aime-2024`",
    f"eval model --recipe aime1824 {DATA}": "recipe 'aime1824' not found; give the path of a",
    f"eval model {DATA} --out both": "both/answers.parquet already exists; choose another folder",
    f"eval model {DATA} --out reward.py": "reward.py already exists; choose another folder with",
    f"eval model {DATA} --step 3": "--step is 3, but model is a model, not a run; drop --step",
    f"eval both {DATA}": "both is neither a run folder (no config.yaml) nor a model folder (no",
    f"eval model {DATA} evaluation.max_response_tokens=12": "no scorer",
    TOO_LONG: "evaluation.max_response_tokens 300 does not fit the model's 256 positions",
    "compare both others": "have no problem in common: the data or data.prompt_template differs",
}


@pytest.mark.parametrize("words", WRONG)
def test_wrong_input_is_answered_in_one_line(words: str, place: Path, both: Outcome) -> None:
    if "others" in words:
        asked(place, "others", data=("others.jsonl",)).check()
    said = winnow(place, *words.split())
    assert said.code == 2, said
    (line,) = said.err.splitlines()
    assert line.startswith("winnow: ")
    assert WRONG[words] in line
    assert not (place / "evals").exists(), "nothing is left of it"


@pytest.fixture(scope="module")
def run(place: Path) -> str:
    """A run of two steps on the model, each with a checkpoint."""
    recipe = [
        *("model.path=model", "data.train_files=[easy.jsonl]", "data.eval_files=[hard.jsonl]"),
        *("rollout.n=2", "rollout.max_response_tokens=12", "sampling.groups_per_step=4"),
        *("sampling/filter=none", "trainer.mini_batch_groups=null", "trainer.steps=2"),
        *("trainer.save_every=1", "trainer.keep_last=2", "optim.warmup_steps=0", "run.name=short"),
        *("warm_start=none", "data/task=none", "reward.overlong.enabled=false"),
        *ASKED[:3], *ASKED[4:],
    ]  # fmt: skip
    winnow(place, "train", "quickstart", *recipe).check()
    return "runs/short"


def test_a_run_brings_its_recipe_and_a_checkpoint_is_the_run_at_a_step(
    place: Path, run: str
) -> None:
    said = winnow(place, "eval", run, "--step", "1").check()
    assert "short, step 1: 5 held-out prompts" in said.out
    again = winnow(place, "eval", run, "--step", "1", "--data", "easy.jsonl")
    assert (again.code, again.out) == (2, "")
    assert "already exists; choose another folder with --out" in again.err
    by_step = read_rollouts(place / run / "eval/checkpoint-1.parquet").to_pylist()
    winnow(place, "eval", f"{run}/checkpoints/step-1", "--out", "by-folder").check()
    by_folder = read_rollouts(place / "by-folder/answers.parquet").to_pylist()
    assert by_folder == by_step
    assert {row["data_source"] for row in by_step} == {"hard"}
    wrong = winnow(place, "eval", f"{run}/checkpoints/step-1", "--step", "2")
    assert (wrong.code, wrong.out) == (2, "")
    assert "--step is 2, but runs/short/checkpoints/step-1 is of step 1" in wrong.err
    wrong = winnow(place, "eval", run, "--step", "7")
    assert "runs/short has no checkpoint of step 7; there are: 1, 2" in wrong.err


def test_a_run_can_be_asked_by_another_recipe_and_on_other_data(place: Path, run: str) -> None:
    (place / "own.yaml").write_text("evaluation: {n: 3, temperature: 0.5}\nrun: {seed: 4}\n")
    said = winnow(
        place, "eval", run, "--recipe", "own.yaml", "--data", "easy.jsonl", "--out", "by-recipe",
        *ASKED[:2], *ASKED[3:], "model.dtype=bfloat16",
    ).check()  # fmt: skip
    assert "short, step 2: 8 held-out prompts, temperature 0.5, at most 12 tokens" in said.out
    body = report_of(place, "by-recipe")
    assert (body["settings"]["n"], body["settings"]["seed"]) == (3, 4)
    assert (body["step"], body["data"]) == (2, ["easy.jsonl"])


def test_answers_of_a_model_without_a_place_for_them_go_to_evals(
    place: Path, tmp_path: Path
) -> None:
    os.symlink(place / "model", tmp_path / "model")
    rows_file(tmp_path / "easy.jsonl", "easy", 2)
    (tmp_path / "reward.py").write_text(REWARD)
    for _ in range(2):  # within a second, perhaps
        winnow(tmp_path, "eval", "model", "--data", "easy.jsonl", *ASKED).check()
    made = sorted((tmp_path / "evals").iterdir())
    assert len(made) == 2
    assert all(folder.name.startswith("model-") for folder in made)
    said = winnow(tmp_path, "compare", *(f"evals/{folder.name}" for folder in made)).check()
    assert "did equally well on each of the 2 problems" in " ".join(said.out.split())


def test_an_instruction_that_a_row_holds_already_is_refused(place: Path, tmp_path: Path) -> None:
    words = "0123456789 0123456789 0123456789"
    file = tmp_path / "instructed.jsonl"
    row = {"data_source": "easy", "prompt": f"{words} 12:", "reward_model": {"ground_truth": "1"}}
    file.write_text(json.dumps(row) + "\n")
    template = f"data.prompt_template={{easy:'{words} {{prompt}}'}}"
    said = asked(place, "never", template, data=(str(file),))
    assert said.code == 2
    assert (
        "instructed.jsonl:1: the row already contains the instruction of data.prompt_template"
        in said.err
    )
    assert not (place / "never").exists()


def test_aime_2024_asks_real_problems_with_the_published_instruction(
    place: Path, shared_data: Path
) -> None:
    qwen_folder(place / "qwen", "qwen2", ["a b c"], chat=True)
    file = shared_data / "math/aime24_aime25_math500.parquet"
    said = winnow(
        place, "eval", "qwen", "--recipe", "aime2024", "--data", str(file), "--out", "aime",
        *("evaluation.n=2", "evaluation.max_prompts=3", "evaluation.max_response_tokens=8"),
    ).check()  # fmt: skip
    assert "3 held-out prompts, temperature 1, top_p 0.7, at most 8 tokens" in said.out
    (first, *_) = rows_of(place, "aime")
    assert first["prompt"].startswith("<|user|>Solve the following math problem step by step.")
    assert first["prompt"].endswith('its own line after "Answer:".\n<|assistant|>')


def test_a_stop_ends_an_evaluation_and_leaves_nothing(place: Path, server: Server) -> None:
    long = ["evaluation.n=64", "evaluation.max_response_tokens=240", "rollout.engine.slots=8"]
    words = "eval", "model", "--data", "easy.jsonl", "--out", "broken", *ASKED, *long
    out, err = place / "out.txt", place / "err.txt"
    out.unlink(missing_ok=True)  # of a first try
    process = server.start("winnow.cli.main", words, folder=place, out=out, err=err)
    assert wait_for(process, lambda: out.exists() and "8 held-out prompts" in out.read_text()), (
        err.read_text()
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(200) == 75
    assert err.read_text() == "winnow: interrupted; this evaluation was discarded\n"
    assert not (place / "broken").exists()


def test_ctrl_c_between_answers_and_figures_leaves_neither(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(file: Path, _: bytes) -> None:
        assert file.with_name("answers.parquet").is_file()
        raise KeyboardInterrupt

    monkeypatch.setattr(evaluation_command, "write_atomic", interrupted)
    said = asked(place, "between")
    assert (said.code, said.err) == (
        130,
        "winnow: interrupted; this evaluation was discarded\n",
    )
    assert not (place / "between").exists()


def test_a_source_without_a_right_answer_is_told_with_what_became_of_the_answers(
    place: Path, both: Outcome
) -> None:
    assert "is right;" not in both.out
    rows_file(place / "gsm8k.jsonl", "openai/gsm8k", 2)
    out = asked(place, "gsm8k", "reward.function.path=null", data=("gsm8k.jsonl",)).check().out
    rows = rows_of(place, "gsm8k")
    cut_off = sum(row["finish_reason"] == "length" for row in rows)
    unread = sum("####" not in row["response"] for row in rows)
    assert 0 < cut_off < len(rows) == unread
    assert (
        f"openai/gsm8k: none of {len(rows)} answers is right; {cut_off} were cut off, and in "
        f"{unread} the scorer found nothing to compare. gsm8k: Give 1 if the number after the "
        "last `####` is right and the only one offered, else 0."
    ) in " ".join(out.split())


def test_answers_that_could_not_be_scored_are_kept_and_said_to_be(place: Path) -> None:
    (place / "failing.py").write_text("def compute_score(*_, **__):\n    raise RuntimeError\n")
    said = asked(place, "unscored", "reward.function.path=failing.py")
    assert said.code == 2
    (line,) = said.err.splitlines()
    assert line.endswith("; the answers are kept in unscored/answers.parquet")
    assert len(rows_of(place, "unscored")) == N * PROBLEMS["easy"]
    assert not (place / "unscored/report.json").exists()
