"""Bad input that a run meets when it goes on, or that only a system can give: one line each.

The kinds of `test_bad_input.py` concern a new run; `docs/bad_input.md` lists both, with what the
command says. What each must say, word for word, is what stands there: a new kind, or another
wording, is written by `python -m tests.e2e.test_bad_input_resume docs/bad_input.md`, and read.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from benchmarks.kill import contents, differences
from tests.e2e import test_bad_input as first
from tests.e2e.test_bad_input import row, write_rows
from tests.small_models import digits_folder, digits_model, save
from tests.unprivileged import permissions_apply
from tests.winnow_command import Outcome, in_this_process

from winnow.data.sort_digits import build_tokenizer

pytestmark = pytest.mark.timeout(600)

BASE = "base"
"""A run of two steps; each case works on a copy that lost the second."""
SETTINGS = (
    *("model.path=model", "data.train_files=[good.jsonl]", "reward.function.path=fine.py"),
    *("trainer.save_every=1", "trainer.keep_last=null"),
)
STEP, NEXT = Path("checkpoints/step-1"), Path("checkpoints/step-2")
MANIFEST = "manifest.json"


@dataclass(frozen=True)
class Case:
    """What is done to a copy of the run or beside it, and the settings."""

    name: str
    spoil: Callable[[Path, Path], object] = lambda place, run: None
    """Gets the place and the run's folder."""
    settings: tuple[str, ...] = ()
    fresh: bool = False
    """A new run instead of one that goes on."""
    unprivileged: bool = False
    recipe: str = "mine.yaml"

    def command(self) -> list[str]:
        given = {setting.partition("=")[0] for setting in self.settings}
        usual = [setting for setting in SETTINGS if setting.partition("=")[0] not in given]
        return ["train", self.recipe, f"run.name={self.name}", *usual, *self.settings]


def cut(name: str, step: Path = STEP) -> Callable[[Path, Path], object]:
    """Half of a file of the checkpoint is gone."""

    def spoil(place: Path, run: Path) -> None:
        path = run / step / name
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return spoil


def flip(name: str, step: Path = STEP) -> Callable[[Path, Path], object]:
    """One bit of a file of the checkpoint is another."""

    def spoil(place: Path, run: Path) -> None:
        content = bytearray((run / step / name).read_bytes())
        # Of a manifest a digit of its checksum, so that it stays one.
        digest = content.find(b'"sha256": "') if name == MANIFEST else -1
        content[digest + 12 if digest >= 0 else len(content) // 2] ^= 1
        (run / step / name).write_bytes(content)

    return spoil


def remove(name: str, step: Path = STEP) -> Callable[[Path, Path], object]:
    """A file of the checkpoint is gone."""
    return lambda place, run: (run / step / name).unlink()


def edit(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path, Path], object]:
    """A file of the run, changed."""

    def spoil(place: Path, run: Path) -> None:
        (run / name).write_bytes(change((run / name).read_bytes()))

    return spoil


PARTS = {
    "manifest": MANIFEST,
    "state": "state.safetensors",
    "state-structure": "state.json",
    "weights": "model/model.safetensors",
    "tokenizer": "model/tokenizer.json",
    "tokenizer-config": "model/tokenizer_config.json",
    "model-config": "model/config.json",
    "generation-config": "model/generation_config.json",
    "recipe": "config.yaml",
}
"""Every file of a checkpoint."""
DAMAGES = {"cut": cut, "flipped": flip, "missing": remove}
ASKED = "run.resume=runs/{name}/checkpoints/step-1"


def named_checkpoint(name: str, spoil: Callable[[Path, Path], object]) -> Case:
    """The checkpoint is named, so that no other will do."""
    return Case(name, spoil, (ASKED.format(name=name),))


def damaged(part: str, file: str) -> Iterator[Case]:
    for kind, spoil in DAMAGES.items():
        yield named_checkpoint(f"{part}-{kind}", spoil(file))


CHECKPOINTS = [
    *(case for part, file in PARTS.items() for case in damaged(part, file)),
    named_checkpoint(
        "manifest-of-another-format",
        edit(f"{STEP}/manifest.json", lambda text: text.replace(b'"format": 4', b'"format": 99')),
    ),
    named_checkpoint(
        "checkpoint-of-another-model",
        lambda place, run: _replace(run / STEP, place / "runs" / "other" / STEP),
    ),
    named_checkpoint(
        "checkpoint-of-another-run",
        lambda place, run: _replace(run / STEP, place / "runs" / "seeded" / STEP),
    ),
    named_checkpoint("checkpoint-gone", lambda place, run: shutil.rmtree(run / STEP)),
    Case("no-checkpoint-is-whole", cut("state.safetensors")),
    Case("two-checkpoints-and-none-is-whole", lambda place, run: _two_damaged(run)),
]


def _two_damaged(run: Path) -> None:
    cut("state.safetensors")(run, run)
    shutil.copytree(run / STEP, run / "checkpoints" / "step-2")
    (run / "checkpoints" / "step-2" / MANIFEST).unlink()


def _replace(folder: Path, other: Path) -> None:
    shutil.rmtree(folder)
    shutil.copytree(other, folder)


def _locked(place: Path, run: Path) -> None:
    descriptor = os.open(run / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, b"process 7 on node3", 0)
    _HELD.append(descriptor)


_HELD: list[int] = []


def _rows(count: int, digit: int = 1) -> Callable[[Path, Path], object]:
    def spoil(place: Path, run: Path) -> None:
        write_rows(place / "good.jsonl", [row(str(digit * 1000 + i)) for i in range(count)])

    return spoil


RUNS = [
    Case("another-value", settings=("rollout.n=5",)),
    Case("another-model", settings=("model.path=models/nan",)),
    Case("other-data-settings", settings=("data.max_prompt_tokens=9",)),
    Case(
        "many-other-values",
        settings=("rollout.n=5", "run.seed=3", "optim.lr=1", "trainer.steps=3", "trainer.epochs=2"),
    ),
    Case(
        "recipe-of-the-run-cut",
        edit("config.yaml", lambda text: text[: text.index(b"\n", text.index(b"name:")) + 5]),
    ),
    Case("recipe-of-the-run-empty", edit("config.yaml", lambda text: b"")),
    Case("metrics-cut", edit("metrics.jsonl", lambda text: text[:40])),
    Case("metrics-gone", lambda place, run: (run / "metrics.jsonl").unlink()),
    Case("metrics-other", edit("metrics.jsonl", lambda text: b"x" + text)),
    Case("data-changed", _rows(40, 2)),
    Case("data-shortened", _rows(39)),
    Case("data-gone", lambda place, run: (place / "good.jsonl").unlink()),
    Case("in-use", _locked),
    Case("more-data", settings=("data.train_files=[good.jsonl,more.jsonl]",)),
]


def row_after(name: str, file: str, line: bytes, *settings: str) -> Case:
    """A file with a good row, and then this line."""
    content = _prompt("12:") + line + b"\n"
    files = f"data.train_files=[{file}]"
    return Case(
        name, lambda place, run: (place / file).write_bytes(content), (files, *settings), fresh=True
    )


def _prompt(text: str) -> bytes:
    return json.dumps(row("12") | {"prompt": text}).encode() + b"\n"


def _parquet_of_bytes(place: Path, run: Path) -> None:
    table = pa.Table.from_pylist([row("12") for _ in range(3)])
    bad = pa.array([b"ok", b"\xff\xfe", b"ok"], pa.binary())
    text = pa.StringArray.from_buffers(3, bad.buffers()[1], bad.buffers()[2])
    i = table.schema.get_field_index("data_source")
    pq.write_table(table.set_column(i, "data_source", text), place / "bytes.parquet")


def template(name: str, text: str) -> Case:
    def spoil(place: Path, run: Path) -> None:
        tokenizer = build_tokenizer()
        tokenizer.chat_template = text
        save(digits_model(), tokenizer, place / "models" / name)

    settings = (f"model.path=models/{name}", "data.chat_template=auto")
    return Case(name, spoil, settings, fresh=True)


def _without_eos(place: Path, run: Path) -> None:
    tokenizer = build_tokenizer()
    tokenizer.eos_token = None
    save(digits_model(), tokenizer, place / "models" / "without-eos")


def _infinite(place: Path, run: Path) -> None:
    model = digits_model()
    with torch.no_grad():
        model.model.norm.weight[1] = float("inf")
    save(model, build_tokenizer(), place / "models" / "infinite")


def reward(name: str, body: str, *settings: str) -> Case:
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):"

    def spoil(place: Path, run: Path) -> None:
        (place / f"{name}.py").write_text(f"import os, time\n{head}\n    {body}\n")

    return Case(name, spoil, (f"reward.function.path={name}.py", *settings), fresh=True)


BOMB = "l0: &l0 [a, a]\n" + "".join(
    f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


def recipe(name: str, **files: str | bytes) -> Case:
    def spoil(place: Path, run: Path) -> None:
        for stem, text in files.items():
            content = text if isinstance(text, bytes) else text.encode()
            (place / f"{stem}.yaml").write_bytes(content)

    return Case(name, spoil, fresh=True, recipe=f"{next(iter(files))}.yaml")


APART = ("reward.workers=null",)
FEW_ANSWERS = "rollout.n=2", "sampling.groups_per_step=2"
FRESH = [
    row_after("not-utf-8", "a.jsonl", b'{"data_source": "\xff"}'),
    row_after("half-a-character", "b.jsonl", b'{"data_source": "\\ud800"}'),
    row_after("nested-too-deep", "c.jsonl", b"[" * 100_000),
    row_after("number-too-long", "d.jsonl", b"9" * 10_000),
    Case("parquet-not-utf-8", _parquet_of_bytes, ("data.train_files=[bytes.parquet]",), fresh=True),
    row_after(
        "gigantic-row", "gigantic.jsonl", _prompt("1" * 200_000), "data.overlong_prompts=error"
    ),
    Case(
        "gigantic-row-alone",
        lambda place, run: (place / "gigantic-only.jsonl").write_bytes(_prompt("12:" * 100_000)),
        ("data.train_files=[gigantic-only.jsonl]",),
        fresh=True,
    ),
    template("template-raises", "{{ raise_exception('roles must alternate') }}"),
    template("template-syntax", "{% for m in messages %}"),
    template("template-empty", "{% if false %}x{% endif %}"),
    template("template-unknown-name", "{{ nobody.content }}"),
    Case("tokenizer-without-eos", _without_eos, ("model.path=models/without-eos",), fresh=True),
    Case("infinite-weights", _infinite, ("model.path=models/infinite",), fresh=True),
    Case("rate-that-explodes", settings=("optim.lr=1e30", "trainer.steps=9"), fresh=True),
    reward("scorer-says-nothing", "pass"),
    reward("scorer-says-a-list", "return [1.0, 0.0]"),
    reward("scorer-says-infinity", "return float('inf')"),
    reward("scorer-says-an-object", "return object()"),
    reward("scorer-says-odd-parts", "return {'score': 1.0, 'acc': 'yes'}"),
    # Each of these answers ends a process.
    reward("scorer-runs-out-of-memory", "raise MemoryError('too much')", *APART, *FEW_ANSWERS),
    reward("scorer-recurses", "return compute_score(data_source, solution_str, '')", *APART),
    recipe("includes-itself", loop="defaults: [loop]\n"),
    recipe("includes-in-a-circle", one="defaults: [two]\n", two="defaults: [one]\n"),
    recipe("refers-in-a-circle", ring="run: {seed: '${rollout.n}'}\nrollout: {n: '${run.seed}'}\n"),
    recipe("recipe-not-utf-8", latin=b"run: {name: caf\xe9}\n"),
    recipe("recipe-of-bytes", binary=b"\x00\x01\x02"),
    recipe("recipe-is-a-list", listed="- rollout\n- trainer\n"),
    recipe("recipe-bomb", bomb=BOMB),
    recipe("recipe-key-twice", twice="trainer: {steps: 1}\ntrainer: {steps: 2}\n"),
]


def _forbidden(name: str, path: str, *settings: str) -> Case:
    """What may not be written to, or in a file of data or of a state not be read either."""

    def spoil(place: Path, run: Path) -> None:
        forbidden = place / path.format(run=f"runs/{name}")
        if forbidden.suffix == "" and not forbidden.exists():
            forbidden.mkdir()
        forbidden.chmod(0o555 if forbidden.is_dir() else 0)

    return Case(name, spoil, settings, fresh="{run}" not in path, unprivileged=True)


FORBIDDEN = [
    _forbidden("runs-not-writable", "elsewhere", "run.dir=elsewhere"),
    _forbidden("data-not-readable", "secret.jsonl", "data.train_files=[secret.jsonl]"),
    _forbidden("run-not-writable", "{run}"),
    _forbidden("metrics-not-writable", "{run}/metrics.jsonl"),
    _forbidden("rollouts-not-writable", "{run}/rollouts"),
    _forbidden("checkpoints-not-writable", "{run}/checkpoints"),
    _forbidden(
        "state-not-readable",
        f"{{run}}/{STEP}/state.safetensors",
        ASKED.format(name="state-not-readable"),
    ),
    _forbidden("lock-not-writable", "{run}/.lock"),
    _forbidden("log-not-writable", "{run}/log.txt"),
]
CASES = [*CHECKPOINTS, *RUNS, *FRESH, *FORBIDDEN]


def make_place(place: Path) -> Path:
    """Good data, a good model, and finished runs of two steps, of which one has another model."""
    place.mkdir(exist_ok=True)
    (place / "mine.yaml").write_text(first.RECIPE)
    write_rows(place / "good.jsonl", [row(str(1000 + i)) for i in range(40)])
    write_rows(place / "more.jsonl", [row(str(2000 + i)) for i in range(40)])
    write_rows(place / "secret.jsonl", [row(str(2000 + i)) for i in range(40)])
    first.write_models(place)
    first.write_rewards(place)
    digits_folder(place / "wide", hidden_size=32)
    for name, more in ((BASE, ()), ("other", ("model.path=wide",)), ("seeded", ("run.seed=5",))):
        in_this_process(*Case(name, settings=more).command(), folder=place).check()
    return place


def prepare(case: Case, place: Path) -> Path:
    """The case's own run, and what spoils it."""
    run = place / "runs" / case.name
    if not case.fresh:
        shutil.copytree(place / "runs" / BASE, run)
        shutil.rmtree(run / "checkpoints" / "step-2")
    case.spoil(place, run)
    return run


def ask(case: Case, place: Path) -> Outcome:
    """Run the command, which the modes of files bind where it is to be unprivileged."""
    with permissions_apply() if case.unprivileged else contextlib.nullcontext():
        return in_this_process(*case.command(), folder=place)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("resume"))


def spoken(case: Case, place: Path) -> tuple[Outcome, dict[str, bytes]]:
    """What a case says, after which the data are as before, and what the run's folder held."""
    data = {path: path.read_bytes() for path in place.glob("*.jsonl")}
    run = prepare(case, place)
    held = {} if case.unprivileged else contents(run)
    try:
        said = ask(case, place)
    finally:
        while _HELD:
            os.close(_HELD.pop())
        for path, content in data.items():
            path.write_bytes(content)
            path.chmod(0o644)
    return said, held


def open_files(folder: Path) -> list[Path]:
    """What this process has open there."""
    files = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            files.append(link.readlink())
    return [file for file in files if file.is_relative_to(folder)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_input_is_answered_in_one_line_and_nothing_is_lost(case: Case, place: Path) -> None:
    said, held = spoken(case, place)
    assert said.code == 2, said
    assert said.err == f"winnow: {said.err[8:-1]}\n"
    assert first.stable(said, place) == first.DOCUMENTED.get(case.name), "see this file's head"
    assert "Traceback" not in said.out + said.err
    assert open_files(place / "runs" / case.name) == []
    if case in CHECKPOINTS:
        left = contents(place / "runs" / case.name)
        assert {name for name in held | left if held.get(name) != left.get(name)} <= {
            ".lock",
            "log.txt",
        }
    if case in RUNS:
        wanted, left = (contents(place / "runs" / name / STEP) for name in (BASE, case.name))
        assert wanted == left, "the checkpoint is touched"


def reason(file: str, damage: str) -> str:
    """What is said of a damaged file."""
    if damage == "missing":
        return "cannot be read: No such file or directory"
    if file == MANIFEST and damage == "cut":
        return "cannot be read: not a manifest"
    return "is damaged (checksum differs)"


# `CHECKPOINTS` has every file with every damage.
@pytest.mark.parametrize(
    ("file", "damage"), [(MANIFEST, "cut"), ("state.json", "flipped"), ("config.yaml", "missing")]
)
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_and_costs_no_bit(
    file: str, damage: str, place: Path
) -> None:
    case = Case(f"{Path(file).name}-{damage}-of-two")
    run = place / "runs" / case.name
    shutil.copytree(place / "runs" / BASE, run)
    DAMAGES[damage](file, NEXT)(place, run)
    said = ask(case, place)
    assert (said.code, said.err) == (0, "")
    warnings = [line for line in "".join(said.out).splitlines() if "Warning" in line]
    assert warnings == [
        f"Warning: runs/{case.name}/{NEXT}/{file} {reason(file, damage)}; continuing from step 1"
    ]
    assert f"Continuing runs/{case.name} after step 1 of 2\n" in said.out
    assert differences(place / "runs" / BASE, run, steps=2) == []


def test_every_kind_is_documented_once_and_every_file_of_a_checkpoint_damaged(place: Path) -> None:
    names = [case.name for case in [*first.CASES, *CASES]]
    assert len(set(names)) == len(names)
    assert list(first.DOCUMENTED) == names
    assert set(contents(place / "runs" / BASE / NEXT)) == set(PARTS.values())


def main(target: Path) -> None:
    """Write the table of every kind and what it says."""
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        place = first.make_place(Path(scratch) / "new")
        rows += [
            (bad.name, first.stable(in_this_process(*bad.argv, folder=place), place))
            for bad in first.CASES
        ]
        place = make_place(Path(scratch) / "old")
        rows += [(case.name, first.stable(spoken(case, place)[0], place)) for case in CASES]
    lines = [f"| {name} | {'<br>'.join(f'`{line}`' for line in said)} |" for name, said in rows]
    target.write_text(HEAD.format(kinds=len(rows)) + "\n".join(lines) + "\n", encoding="utf-8")


HEAD = """# Bad input

What `winnow` prints for {kinds} kinds of bad input: on standard error, after `winnow: `, with exit
code 2. `(…)` stands for a library's message. Generated by

```sh
python -m tests.e2e.test_bad_input_resume docs/bad_input.md
```

and compared with the program word for word by `tests/e2e/test_bad_input.py` (the first part) and
`tests/e2e/test_bad_input_resume.py`. The second damages every file of a checkpoint in three ways.
With an older checkpoint the run continues from that, with
`Warning: runs/NAME/checkpoints/step-2/FILE is damaged (checksum differs); continuing from step 1`,
and ends with the bits of an uninterrupted run; without one it stops and changes nothing.

| kind | message |
|---|---|
"""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
