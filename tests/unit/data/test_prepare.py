"""`winnow data prepare` from files and URLs: what is written, counted and refused."""

from __future__ import annotations

import errno
import json
import shlex
from collections.abc import Callable
from fractions import Fraction
from importlib.util import find_spec
from itertools import permutations
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from winnow.cli.data import app
from winnow.config.load import parse_recipe
from winnow.data.prepare import PrepareReport, PrepareRequest, prepare
from winnow.data.published import add_dapo_instruction
from winnow.data.sort_digits import is_held_out, solution
from winnow.data.sources import read_rows
from winnow.errors import DataError
from winnow.rewards.scorers import SCORERS

WriteJsonl = Callable[..., str]
GSM8K = {"question": "How many?", "answer": "Two.\n#### 2"}


def test_the_file_has_verls_schema_and_is_read_back(
    prepare_file: Callable[..., PrepareReport], write_jsonl: WriteJsonl
) -> None:
    done = prepare_file("gsm8k", write_jsonl([GSM8K, {**GSM8K, "question": "And?"}]))
    found = (done.read, done.copies, done.written, done.instructions_removed)
    assert found == (2, 0, 2, 0)
    assert pq.read_table(done.out).to_pylist()[1] == {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": "And?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": 1, "split": "train", "question": "And?", "answer": "Two.\n#### 2"},
    }
    assert [row.ground_truth for row in read_rows([done.out])] == ["2", "2"]


def test_exact_copies_go_and_conflicting_labels_stay(
    prepare_file: Callable[..., PrepareReport], write_jsonl: WriteJsonl
) -> None:
    def row(label: str, index: int) -> dict[str, Any]:
        prompt = [{"role": "user", "content": add_dapo_instruction("1+1?")}]
        truth = {"ground_truth": label, "style": "rule"}
        info = {"index": f"id-{index}"}
        return {
            "data_source": "math_dapo", "prompt": prompt, "reward_model": truth, "extra_info": info
        }  # fmt: skip

    done = prepare_file(
        "dapo-math-17k", write_jsonl([row("2", i) for i in range(99)] + [row("3", 99)])
    )
    assert (done.read, done.copies, done.written) == (100, 98, 2)
    assert done.instructions_removed == 100
    rows = read_rows([done.out])
    assert [row.messages[0]["content"] for row in rows] == ["1+1?", "1+1?"]
    assert {row.data_source for row in rows} == {"math_dapo"}
    assert rows[1].extra["extra_info"] == {"index": 1, "split": "train", "original_index": "id-99"}


def test_the_dapo_instruction_can_be_put_around_every_question(
    prepare_file: Callable[..., PrepareReport], write_jsonl: WriteJsonl
) -> None:
    files = write_jsonl([{"problem": "p", "answer": 7}, {"problem": "q", "answer": "08"}])
    done = prepare_file("aime-2025", files, instruction="dapo")
    contents = [row.messages[0]["content"] for row in read_rows([done.out])]
    assert contents == [add_dapo_instruction("p"), add_dapo_instruction("q")]


@pytest.mark.parametrize(
    ("scheme", "package", "said"),
    [
        ("s3", "s3fs", "Install s3fs to access S3"),
        ("gs", "gcsfs", "Please install gcsfs to access Google Storage"),
    ],
)
def test_a_missing_file_system_package_is_named(
    scheme: str, package: str, said: str, prepare_file: Callable[..., PrepareReport]
) -> None:
    if find_spec(package):
        pytest.skip(f"{package} is installed")
    with pytest.raises(DataError) as caught:
        prepare_file("gsm8k", f"{scheme}://bucket/train.parquet")
    assert str(caught.value) == (
        f"{scheme}://bucket/train.parquet: its protocol needs a package: {said}"
    )


def test_hdfs_without_java_says_what_it_needs(
    prepare_file: Callable[..., PrepareReport], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("JAVA_HOME", "HADOOP_HOME", "ARROW_LIBHDFS_DIR"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(DataError, match=r"hdfs://host/f\.parquet: cannot be read: ") as caught:
        prepare_file("gsm8k", "hdfs://host/f.parquet")
    assert "\n" not in str(caught.value)
    if "libjvm" in str(caught.value) or "libhdfs" in str(caught.value):
        assert str(caught.value).endswith("set JAVA_HOME, HADOOP_HOME and CLASSPATH")


def test_sort_digits_is_generated_and_training_never_meets_the_test(
    prepare_file: Callable[..., PrepareReport],
) -> None:
    done = prepare_file("sort_digits", rows=300, seed=5)
    digits = [row.extra["extra_info"]["digits"] for row in read_rows([done.out])]
    assert done.read == 300 == done.written + done.copies
    assert not any(map(is_held_out, digits))
    first = read_rows([done.out])[0]
    assert (first.data_source, first.ground_truth) == ("sort_digits", solution(digits[0]))
    test = prepare_file("sort_digits", split="test")
    assert test.written == 400
    assert all(is_held_out(row.extra["extra_info"]["digits"]) for row in read_rows([test.out]))


def test_a_bad_row_leaves_the_file_that_was_there(
    prepare_file: Callable[..., PrepareReport], write_jsonl: WriteJsonl
) -> None:
    before = Path(prepare_file("gsm8k", write_jsonl([GSM8K])).out).read_bytes()
    bad = write_jsonl([GSM8K, {"question": "q", "answer": "none"}], "bad.jsonl")
    with pytest.raises(DataError, match=r"bad\.jsonl row 2: answer is the text 'none'"):
        prepare_file("gsm8k", bad)
    out = Path(bad).with_name("out.parquet")
    assert out.read_bytes() == before
    assert sorted(path.name for path in out.parent.iterdir()) == [
        "bad.jsonl", "out.parquet", "rows.jsonl",
    ]  # fmt: skip


def test_a_full_disk_is_told_with_a_remedy_that_fits(
    prepare_file: Callable[..., PrepareReport],
    write_jsonl: WriteJsonl,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    path = write_jsonl([GSM8K])
    monkeypatch.setattr("winnow.observe.files.fsync_path", full)
    with pytest.raises(DataError) as caught:
        prepare_file("gsm8k", path)
    monkeypatch.undo()
    assert str(caught.value).endswith(
        "out.parquet: No space left on device; choose another file with --out"
    )


def test_what_does_not_go_together_is_refused_before_any_work(
    prepare_file: Callable[..., PrepareReport], tmp_path: Path
) -> None:
    for options, message in [
        ({"name": "gsm9k"}, "gsm9k is not a known data set; available: gsm8k, math, "),
        ({"split": "dev"}, "--split is dev, but gsm8k has train and test; choose one"),
        ({"name": "aime-2024", "split": "train"}, "--split is train, but aime-2024 has test"),
        ({"rows": 5}, "--rows is 5, but only sort_digits, countdown, reasoning_gym/TASK are gen"),
        ({"name": "sort_digits", "rows": 0}, "--rows is 0; it must be at least 1"),
        ({"seed": 0}, "--seed is 0, but only sort_digits, countdown, reasoning_gym/TASK are gen"),
        ({"name": "humaneval", "instruction": "dapo"}, "--instruction is dapo, but humaneval is"),
        ({"name": "countdown", "instruction": "dapo"}, "countdown is generated; leave out --fr"),
        ({"name": "reasoning_gym/x", "files": ("a",)}, "reasoning_gym/x is generated; leave out"),
        ({"name": "reasoning_gym/x"}, "reasoning_gym/x: reasoning-gym has no such task; see its"),
        ({"instruction": "x"}, "--instruction is x; it must be none or dapo"),
        ({"instruction": "dapo"}, "--instruction is dapo, but gsm8k is not scored by its line"),
        (
            {"files": ("a",), "revision": "v1"},
            "--revision is for the hub and conflicts with --from",
        ),
        ({"out": "s3://b/f.parquet"}, "--out is s3://b/f.parquet; it must be a local path that"),
        ({"out": "f.jsonl"}, "--out is f.jsonl; it must be a local path that ends in"),
        ({"name": "sort_digits", "files": ("a",)}, "sort_digits is generated; leave out --from"),
        ({"name": "sort_digits", "split": "dev"}, "--split is dev, but sort_digits has train"),
    ]:
        with pytest.raises(DataError) as caught:
            prepare(
                PrepareRequest(**{"name": "gsm8k", "out": str(tmp_path / "o.parquet"), **options})
            )
        assert str(caught.value).startswith(message)
        assert "\n" not in str(caught.value)
    (tmp_path / "folder.parquet").mkdir()
    with pytest.raises(DataError, match="it must be a local path that ends"):
        prepare_file("gsm8k", "a", out=str(tmp_path / "folder.parquet"))
    with pytest.raises(DataError, match="no such file; check the path"):
        prepare_file("gsm8k", str(tmp_path / "none.jsonl"))


@pytest.mark.parametrize(
    ("name", "row", "words"),
    [
        (
            "math",
            {"problem": "p", "answer": "2"},
            ("data_source MATH has NO built-in scorer", "reward.scorers.MATH=dapo_math"),
        ),
        (
            "humaneval",
            {"prompt": "def f():\n", "test": "def check(c): ...", "entry_point": "f"},
            ("reward.scorers.humaneval=SCORER",),  # left to the user
        ),
    ],
)
def test_a_source_without_scorer_is_said_loudly(
    name: str,
    row: dict[str, Any],
    words: tuple[str, ...],
    write_jsonl: WriteJsonl,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("winnow.rewards.routing.ROUTES", {"gsm8k": "gsm8k"})
    out = str(tmp_path / "o.parquet")
    result = CliRunner().invoke(app, ["prepare", name, "--from", write_jsonl([row]), "--out", out])
    assert [each for each in words if each not in result.output] == []


def test_amc_answers_are_numbers_without_a_point(
    prepare_file: Callable[..., PrepareReport], write_jsonl: WriteJsonl
) -> None:
    rows = [
        {"id": 0, "problem": "p", "answer": 142.0, "url": "u"},
        {"id": 1, "problem": "q", "answer": 0.5, "url": "v"},
    ]
    done = prepare_file("amc", write_jsonl(rows))
    assert (done.split, done.data_sources) == ("test", {"amc": 2})
    assert [row.ground_truth for row in read_rows([done.out])] == ["142", "0.5"]


def test_mbpp_rows_of_the_hub_show_their_asserts(
    prepare_file: Callable[..., PrepareReport], write_jsonl: WriteJsonl
) -> None:
    row = {
        "task_id": 2, "prompt": "Write f.", "code": "def f(): return 1",
        "test_imports": ["import math"], "test_list": ["assert f() == 1", "assert f() != 2"],
    }  # fmt: skip
    (written,) = read_rows([prepare_file("mbpp", write_jsonl([row])).out])
    assert json.loads(written.ground_truth) == {
        "test_list": ["assert f() == 1", "assert f() != 2"], "prompt": "import math"
    }  # fmt: skip
    asked = written.messages[0]["content"]
    assert asked.startswith(
        "Write f.\n\nThe code must pass these tests:\n\n```python\nimport math\n"
    )
    assert "assert f() == 1\nassert f() != 2\n```" in asked
    assert written.extra["extra_info"]["code"] == "def f(): return 1"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": ""}, "prompt is an empty text; it must be a text"),
        ({"test_list": []}, "test_list is missing; it must be a list of Python asserts"),
        ({"test_list": [1]}, "test_list is the list [1]; it must be a list of texts"),
        ({"test_imports": "os"}, "test_imports is the text 'os'; it must be a list of texts"),
    ],
)
def test_a_programming_problem_without_tests_is_named(
    change: dict[str, Any],
    message: str,
    prepare_file: Callable[..., PrepareReport],
    write_jsonl: WriteJsonl,
) -> None:
    row = {"prompt": "Write f.", "test_imports": [], "test_list": ["assert f()"], **change}
    with pytest.raises(DataError) as caught:
        prepare_file("mbpp", write_jsonl([row]))
    assert str(caught.value).endswith(f"rows.jsonl row 1: {message}")


def test_countdown_problems_can_be_solved_and_the_splits_share_none(
    prepare_file: Callable[..., PrepareReport],
) -> None:
    splits = {}
    for split in ("train", "test"):
        done = prepare_file("countdown", split=split, rows=150, seed=4)
        rows = read_rows([done.out])
        assert (done.written, done.copies) == (len(rows), 150 - len(rows))
        truths = [json.loads(row.ground_truth) for row in rows]
        splits[split] = {(t["target"], tuple(sorted(t["numbers"]))) for t in truths}
        for row, truth in zip(rows, truths, strict=True):
            assert 10 <= truth["target"] <= 99
            assert len(truth["numbers"]) in (3, 4)
            assert _can_make(truth["target"], [Fraction(n) for n in truth["numbers"]])
            asked = f"Make {truth['target']} from the numbers {truth['numbers']}. "
            assert row.messages[0]["content"].startswith(asked.replace("[", "").replace("]", ""))
    assert not splits["train"] & splits["test"]
    again = read_rows([prepare_file("countdown", rows=150, seed=4).out])
    assert {json.loads(row.ground_truth)["target"] for row in again} == {
        target for target, _ in splits["train"]
    }
    other = prepare_file("countdown", rows=150, seed=5)
    assert read_rows([other.out])[0].ground_truth != again[0].ground_truth


def _can_make(target: int, numbers: list[Fraction]) -> bool:
    if len(numbers) == 1:
        return numbers[0] == target
    for a, b in permutations(range(len(numbers)), 2):
        rest = [n for i, n in enumerate(numbers) if i not in (a, b)]
        x, y = numbers[a], numbers[b]
        values = [x + y, x - y, x * y, *([x / y] if y else [])]
        if any(_can_make(target, [*rest, value]) for value in values):
            return True
    return False


def test_a_task_of_reasoning_gym_is_written_with_all_that_judges_it(
    prepare_file: Callable[..., PrepareReport],
) -> None:
    for split in ("train", "test"):
        done = prepare_file("reasoning_gym/sudoku", split=split, rows=4, seed=1)
        assert done.data_sources == {"reasoning_gym/sudoku": 4}
        for row in read_rows([done.out]):
            said = f"<answer>\n{row.ground_truth}\n</answer>"
            for text, accuracy in ((said, 1), (said.replace("1", "2"), 0)):
                asked = row.data_source, text, row.ground_truth, row.extra
                assert SCORERS["reasoning_gym"].score(*asked).accuracy == accuracy


def test_the_command_for_puzzles_takes_the_template_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, ["prepare", "countdown", "--rows", "3"])
    assert result.exit_code == 0, result.output
    assert "data_source countdown is scored by countdown." in result.output
    (command,) = (line for line in result.output.splitlines() if "winnow train" in line)
    words = shlex.split(command)
    data = parse_recipe(words[2], words[3:]).data
    assert data.train_files == ("data/countdown-train.parquet",)
    assert data.prompt_template == {"*": "{prompt}"}
