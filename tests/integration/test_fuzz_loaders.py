"""Whatever bytes come in, a loader gives a result or says on one line what is wrong with them.

Data files (JSONL, gzip, parquet), recipes and overrides, made up by Hypothesis: by pure chance,
out of pieces that matter, and by damaging a good file. Anything but a `WinnowError` fails.
"""

from __future__ import annotations

import gzip
import io
import json
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from winnow.config.data import DataConfig
from winnow.config.load import load_recipe
from winnow.config.root import Config
from winnow.config.schema import all_keys
from winnow.data.check import check
from winnow.data.prepare import PrepareRequest, prepare
from winnow.data.prompts import PromptRenderer
from winnow.data.sort_digits import build_tokenizer
from winnow.data.sources import read_rows
from winnow.errors import WinnowError

T = TypeVar("T")
EXAMPLES = int(os.environ.get("WINNOW_FUZZ_EXAMPLES", "10"))
"""Raise it for a long hunt: WINNOW_FUZZ_EXAMPLES=5000."""

fuzz = settings(
    max_examples=EXAMPLES,
    deadline=timedelta(seconds=20),
    derandomize="WINNOW_FUZZ_EXAMPLES" not in os.environ,
    database=None,
    suppress_health_check=list(HealthCheck),
)

GOOD: dict[str, Any] = {
    "data_source": "gsm8k",
    "prompt": [{"role": "user", "content": "1+1?"}],
    "ability": "math",
    "reward_model": {"style": "rule", "ground_truth": "2"},
    "extra_info": {"index": 0, "split": "train"},
}
NAMES = [*GOOD, "question", "answer", "problem", "solution", "images", "role", "content", ""]

text = st.text(max_size=12)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text | st.sampled_from(NAMES),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES) | text, inner, max_size=3)
        | st.lists(st.fixed_dictionaries({"role": inner, "content": inner}), max_size=2)
    ),
    max_leaves=6,
)
records = st.builds(
    lambda changes, gone: {k: v for k, v in {**GOOD, **changes}.items() if k not in gone},
    st.dictionaries(st.sampled_from(NAMES), json_values, max_size=3),
    st.sets(st.sampled_from(NAMES), max_size=4),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(scope="module")
def renderer() -> PromptRenderer:
    return PromptRenderer(build_tokenizer(), DataConfig())


def result_or_clear_error(act: Callable[[], T]) -> T | None:
    """What `act` gives, or None if it says what is wrong: lines for people, and no more."""
    try:
        return act()
    except WinnowError as error:
        said = str(error)
        assert said.strip()
        assert "Traceback" not in said
        assert said.encode()  # it can be printed
        for line in said.split("\n"):
            assert line.strip()
            assert len(line) < 2_000
            assert all(character.isprintable() for character in line), repr(line)
        return None


def use_data(path: Path, renderer: PromptRenderer) -> None:
    """All that reads data files: training, `data check` and `data prepare`."""
    rows = result_or_clear_error(lambda: read_rows([str(path)]))
    if rows is not None:
        prompts = result_or_clear_error(lambda: renderer.render(rows))
        assert prompts is None or prompts.size <= len(rows)
    report = result_or_clear_error(lambda: check(str(path), lambda _: None, evaluation=str(path)))
    assert (report is None) == (rows is None)
    if report is not None:
        json.dumps(report, ensure_ascii=False).encode()
    for name in ("gsm8k", "math", "aime-2024"):
        out = str(path.parent / "prepared.parquet")
        request = PrepareRequest(name, files=(str(path),), out=out)
        done = result_or_clear_error(lambda request=request: prepare(request))
        if done is not None:
            assert len(read_rows([out])) == done.written


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """A file with bytes changed, cut off or put in."""
    where = st.integers(0, len(content))
    changes = st.lists(st.tuples(where, st.binary(max_size=6), st.integers(0, 6)), max_size=6)

    def change(edits: list[tuple[int, bytes, int]], end: int) -> bytes:
        made = bytearray(content)
        for at, new, gone in edits:
            made[at : at + gone] = new
        return bytes(made[:end])

    return st.builds(change, changes, where | st.just(10**9))


def parquet_bytes(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()


GOOD_JSONL = "".join(json.dumps(GOOD) + "\n" for _ in range(3)).encode()
GOOD_GZIP = gzip.compress(GOOD_JSONL, mtime=0)
GOOD_PARQUET = parquet_bytes(pa.Table.from_pylist([GOOD] * 3))


@fuzz
@given(content=st.binary(max_size=200) | text.map(str.encode) | damaged(GOOD_JSONL))
@example(content=b"\xef\xbb\xbf" + GOOD_JSONL)
@example(content=b"[" * 100_000)
@example(content=b'{"a": ' * 100_000)
@example(content=b'{"prompt": ' + b"9" * 5_000 + b"}")
@example(content=b'{"data_source": "\\ud800", "prompt": "a"}')
@example(content=json.dumps({**GOOD, "prompt": "a" * 1_000_000}).encode())
def test_any_bytes_in_a_jsonl_file(content: bytes, folder: Path, renderer: PromptRenderer) -> None:
    path = folder / "rows.jsonl"
    path.write_bytes(content)
    use_data(path, renderer)


@fuzz
@given(rows=st.lists(records | json_values, min_size=1, max_size=3))
@example(rows=[{"question": "a\x1b[31m\nb", "answer": "a\nb\r#### \u2028"}])
@example(rows=[{**GOOD, "data_source": "a\nb\x07"}])
@example(rows=[{**GOOD, "reward_model": {"ground_truth": float("nan")}}])
@example(rows=[{"problem": "?", "solution": "\\boxed{" * 3_000}])
def test_any_json_in_a_jsonl_file(rows: list[Any], folder: Path, renderer: PromptRenderer) -> None:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    use_data(path, renderer)


@pytest.mark.parametrize(("name", "good"), [("a.jsonl.gz", GOOD_GZIP), ("a.parquet", GOOD_PARQUET)])
@fuzz
@given(data=st.data())
def test_any_bytes_in_a_packed_file(
    name: str, good: bytes, data: st.DataObject, folder: Path, renderer: PromptRenderer
) -> None:
    path = folder / name
    path.write_bytes(data.draw(st.binary(max_size=100) | damaged(good)))
    use_data(path, renderer)


COLUMNS = [
    pa.array(["1+1?"]),
    pa.array([None], pa.string()),
    pa.array([None], pa.null()),
    pa.array([b"\xff\xfe"], pa.binary()),
    pa.array([b"\xff\xfe"], pa.binary()).view(pa.string()),
    pa.array([2**63 - 1], pa.timestamp("ns")),
    pa.array([2**63 - 1], pa.timestamp("us")),
    pa.array([-(2**31)], pa.int32()).view(pa.date32()),
    pa.array([0], pa.timestamp("us", tz="Nowhere/Land")),
    pa.array([2**63 - 1], pa.duration("s")),
    pa.array([float("nan")]),
    pa.array([1]).cast(pa.decimal128(38, 10)),
    pa.array([[("a", 1), ("a", 2)]], pa.map_(pa.string(), pa.int64())),
    pa.array([{"role": "user", "content": "a"}]),
    pa.array([[{"role": "user", "content": "a"}]]),
    pa.array([[{"role": None, "content": 3}]]),
    pa.array([{"ground_truth": "2", "style": None}]),
    pa.array([{"ground_truth": [1.5]}]),
    pa.array(["gsm8k"]).dictionary_encode(),
    pa.array([[[]]], pa.list_(pa.list_(pa.int8()))),
]
"""Columns of every kind that parquet holds, some with values that Python has no room for."""


@fuzz
@given(
    table=st.lists(
        st.tuples(st.sampled_from([*NAMES, "a\nb"]), st.integers(0, len(COLUMNS) - 1)),
        min_size=1,
        max_size=5,
    )
)
@example(table=[("prompt", 0), ("prompt", 0)])
def test_any_columns_in_a_parquet_file(
    table: list[tuple[str, int]], folder: Path, renderer: PromptRenderer
) -> None:
    arrays = [COLUMNS[i] for _, i in table]
    path = folder / "columns.parquet"
    path.write_bytes(parquet_bytes(pa.table(arrays, names=[name for name, _ in table])))
    use_data(path, renderer)


SECTIONS = list(Config.model_fields)
recipe_keys = st.sampled_from([*SECTIONS, "defaults", "name", "lr", "train_files", "n", "steps"])
recipe_trees = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | text
    | st.sampled_from(["quickstart", "???", "${run.seed}", "${", "null", "1e-6", "variance"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(recipe_keys, inner, max_size=4),
    max_leaves=8,
)  # fmt: skip
GOOD_RECIPE = (
    b"defaults:\n  - quickstart\noptim: {lr: 1e-5}\n# a note\nsampling:\n  filter:\n"
    b"    name: variance\nrun: &a\n  seed: 3\nmodel:\n  path: 'x'\n"
)


# Keys as Winnow knows them, with values that they may not take.
PATHS = [key.path for key in all_keys()]


def tree_of(leaves: list[tuple[tuple[str, ...], Any]]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in leaves:
        here = tree
        for part in path[:-1]:
            inner = here.setdefault(part, {})
            here = inner if isinstance(inner, dict) else here
        here[path[-1]] = value
    return tree


known_trees = st.lists(st.tuples(st.sampled_from(PATHS), recipe_trees), max_size=4).map(tree_of)


def use_recipe(content: bytes, folder: Path) -> None:
    path = folder / "recipe.yaml"
    path.write_bytes(content)
    result_or_clear_error(lambda: load_recipe(str(path)))


@fuzz
@given(content=st.binary(max_size=80) | text.map(str.encode) | damaged(GOOD_RECIPE))
@example(content=b"a: &a [*a]\n")
@example(content=b"a: &a {b: *a}\noptim: *a\n")
@example(content=b"? [1, 2]\n: 3\n")
@example(content=b"<<: 3\n")
@example(content=b"--- a\n--- b\n")
@example(content=b"optim: !!python/object/apply:os.system [echo]\n")
@example(content=b"optim: " + b"[" * 5_000)
@example(content=b"optim: {lr: " + b"9" * 5_000 + b"}\n")
@example(content=b"run: {seed: 2001-99-99}\n")
@example(content=b"run: {seed: !!timestamp x}\n")
def test_any_bytes_in_a_recipe(content: bytes, folder: Path) -> None:
    use_recipe(content, folder)


@fuzz
@given(tree=known_trees | st.dictionaries(recipe_keys | text, recipe_trees, max_size=4))
@example(tree={"data": {"train_files": "\x1f"}})
def test_any_tree_in_a_recipe(tree: dict[str, Any], folder: Path) -> None:
    use_recipe(yaml.safe_dump(tree, allow_unicode=True).encode("utf-8", "surrogatepass"), folder)


PIECES = [
    "optim.lr", "run.seed", "data.train_files", "sampling/filter", "sampling.filter.name", "data",
    "=", "=", "=", "+", "++", "~", "@", "[", "]", "{", "}", ",", ":", "'", '"', "\\", "${", "null",
    "true", "1e-5", "-1", "nan", "inf", "range(1,3)", "choice(a,b)", "glob(*)", "sort(3,2)", " ",
    "\n", "\t", "variance", "???", "{name:band}", "{name:{a:1}}", "${oc.env:NOPE}",
    "${run.seed}", "\u2028", "\x00",
]  # fmt: skip
pieces = st.lists(st.sampled_from(PIECES) | text, max_size=7).map("".join)
known_overrides = st.builds(
    lambda path, between, value: between.join(path) + "=" + value,
    st.sampled_from(PATHS),
    st.sampled_from([".", ".", "/"]),
    pieces | recipe_trees.map(str),
)
overrides = pieces | text | known_overrides


@fuzz
@given(given_overrides=st.lists(overrides, max_size=3))
@example(given_overrides=["optim.lr=" + "[" * 400])
@example(given_overrides=["run.seed=" + "9" * 5_000])
@example(given_overrides=["run.name=\ud800"])
@example(given_overrides=["run.name=${run.name}"])
def test_any_override(given_overrides: list[str]) -> None:
    config = result_or_clear_error(lambda: load_recipe("quickstart", given_overrides))
    assert config is None or isinstance(config, Config)
