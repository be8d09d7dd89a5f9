"""What a user gets for wrong input: one line with field, value and remedy, exit code 2, no mess."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from tests.small_models import digits_folder, digits_model, save
from tests.winnow_command import Outcome, in_own_process, in_this_process

from winnow.data.sort_digits import build_tokenizer

pytestmark = pytest.mark.timeout(600)

RECIPE = """
rollout: {n: 4, max_response_tokens: 8, engine: {slots: 64}}
sampling: {groups_per_step: 4}
trainer: {steps: 2, mini_batch_groups: 2}
evaluation: {before: false}
run: {threads: 1}
"""
NEVER_STARTED = {"config.yaml", "log.txt", "metrics.jsonl", ".lock", "tokenizer.json", "model.json"}
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
    (place / "rows.csv").write_text("a,b\n")
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
    wide = digits_model(hidden_size=32).config
    damaged("other-shape", wide.save_pretrained)
    deep = digits_model(num_hidden_layers=2).config
    damaged("too-deep", deep.save_pretrained)
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
    taken = bad("taken", "reward.function.path=fine.py", says="")
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
    (r"(cannot load its tokenizer|cannot load its weights): .*;", r"\1: (…);"),
    (r"(chat template fails|fails with SyntaxError): .*;", r"\1: (…);"),
    (r"cannot be called with (.*?) \(.*\);", r"cannot be called with \1 (…);"),
    # Scorers are many, and more come; docs/rewards.md lists them.
    (r"(name one of|there are) sort_digits(?:, [a-z0-9_]+)+", r"\1 sort_digits, …"),
    (r"metrics\.jsonl has \d+ bytes (.*) at \d+,", r"metrics.jsonl has N bytes \1 at N,"),
)


def stable(said: Outcome, place: Path) -> tuple[str, ...]:
    """The lines of an error without what differs from machine to machine."""
    lines = said.err.replace(f"{place}/", "").splitlines()
    for pattern, instead in _UNSTABLE:
        lines = [re.sub(pattern, instead, line) for line in lines]
    return tuple(line.removeprefix("winnow: ") for line in lines)


@dataclass(frozen=True)
class Bad:
    """A command line that must fail, and the whole of what it must say (a pattern)."""

    name: str
    arguments: tuple[str, ...]
    says: tuple[str, ...]
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


def bad(name: str, *arguments: str, says: str | tuple[str, ...]) -> Bad:
    return Bad(name, arguments, (says,) if isinstance(says, str) else says)


def plain(text: str) -> str:
    """A text to be found as it is."""
    return re.escape(text)


RECIPES = [
    bad(
        "unknown-key", "optim.learning_rate=1",
        says=plain("optim.learning_rate is no known key (set by the command line); did you mean ")
        + r".*optim\.lr.*\?",
    ),
    bad(
        "wrong-type", "trainer.steps=many",
        says=plain("trainer.steps must be a whole number of at least 1, got 'many' ")
        + r"\(set by the command line\)",
    ),
    bad(
        "out-of-range", "rollout.top_p=1.7", "rollout.n=0",
        says=(
            plain("rollout.n must be a whole number of at least 1, got 0 ") + ".*",
            plain("rollout.top_p must be ") + ".*" + plain("got 1.7 ") + ".*",
        ),
    ),
    bad(
        "wrong-choice", "algorithm.aggregation=mean",
        says=plain("algorithm.aggregation must be one of ") + ".*token-mean.*'mean'.*",
    ),
    bad(
        "wrong-grammar", "rollout.stop=[a",
        says=r".*rollout\.stop=\[a.*",
    ),
    bad(
        "groups-of-one", "rollout.n=1",
        says=plain("rollout.n=1 makes groups of one, in which sampling/filter=variance has nothing "
        "to compare and algorithm/advantage=grpo nothing to be relative to; set rollout.n to 2 or "
        "more, or choose sampling/filter=none"),
    ),
    bad(
        "long-buffer", "reward.overlong.enabled=true", "reward.overlong.buffer_tokens=9",
        says=plain("reward.overlong.buffer_tokens=9 is longer than rollout.max_response_tokens=8; "
        "make it at most 8, or raise the limit"),
    ),
    bad(
        "uneven", "trainer.mini_batch_groups=3",
        says=plain("sampling.groups_per_step=4 cannot be cut into mini-batches of "
        "trainer.mini_batch_groups=3 groups; use a divisor, such as 2"),
    ),
    bad(
        "two-at-once", "trainer.mini_batch_groups=3", "rollout.n=1",
        says=("rollout.n=1 makes groups of one.*", r"sampling\.groups_per_step=4 cannot be cut.*"),
    ),
    bad(
        "shares-of-nothing", "reward/judge=openai", "reward.judge.model=m",
        "reward.judge.base_url=http://127.0.0.1:1/v1", "reward.processes=40",
        says=plain("reward.processes=40 share reward.judge.max_concurrent=32, which leaves some of "
        "them nothing; set reward.processes to 32 or less, or raise the limit"),
    ),
    bad(
        "cut-support", "rollout.top_p=0.9",
        says=plain("rollout.top_p=0.9 cut tokens that the trained policy still counts, and "
        "rollout.support=error refuses that; set rollout.support=ignore to train all the same, or "
        "sample from the whole vocabulary (top_p=1, top_k=0, min_p=0)"),
    ),
    bad(
        "no-data", "data.train_files=[]",
        says=plain("data.train_files is empty and data/task=none, so there is nothing to train on; "
        "set data.train_files=[FILE.parquet], or data/task=sort_digits"),
    ),
    bad(
        "no-model", "model.path=null",
        says=plain("model.path is null and warm_start=none, so there is no model; "
        "set model.path=FOLDER, or warm_start=sft"),
    ),
    bad(
        "uneven-stages", "trainer/strategy=megatron", "trainer.strategy.ranks=3",
        "trainer.strategy.pipeline=2",
        says=plain("trainer.strategy.ranks=3 cannot be cut into groups of "
        "trainer.strategy.tensor=1 x trainer.strategy.pipeline=2 ranks; use a multiple of 2"),
    ),
    bad(
        "megatron-on-a-cpu", "trainer/strategy=megatron", "run.device=cpu",
        says=plain("trainer/strategy=megatron computes on GPUs alone, and its ranks have "
        "device=cpu here; choose trainer/strategy=fsdp2, or a machine with GPUs and "
        "run.device=auto"),
    ),
    bad(
        "metric", "sampling.filter.metric=elegance",
        says=plain("sampling.filter.metric is elegance, which no scorer of these data sources "
        "gives; there are accuracy, reward, task, task_reward"),
    ),
]  # fmt: skip

DATA = [
    bad(
        "missing-file", "data.train_files=[nowhere.parquet]",
        says=plain("nowhere.parquet: no such file; check the path"),
    ),
    bad(
        "folder-as-file", "data.train_files=[a-folder]",
        says=plain("a-folder: is a folder; name the data files in it"),
    ),
    bad(
        "other-format", "data.train_files=[rows.csv]",
        says=plain("rows.csv: not a known format; data files end in .parquet, ") + ".*",
    ),
    bad(
        "same-file-twice", "data.train_files=[good.jsonl,good.jsonl]",
        says=plain("good.jsonl: given twice; name each data file once"),
    ),
    *(
        bad(
            f"empty-{file}", f"data.train_files=[{file}]",
            says=plain(f"{file}: the file is empty; download or write it again"),
        )
        for file in ("empty.jsonl", "empty.parquet")
    ),
    *(
        bad(
            f"rowless-{file}", f"data.train_files=[{file}]",
            says=plain(f"{file}: the file has no rows; leave it out or write it again"),
        )
        for file in ("blank.jsonl", "no-rows.parquet")
    ),
    bad(
        "cut-jsonl", "data.train_files=[good.jsonl,cut.jsonl]",
        says=plain("cut.jsonl row 2: not valid JSON in UTF-8 (")
        + r".*\); write one JSON object a line",
    ),
    bad(
        "cut-parquet", "data.train_files=[cut.parquet]",
        says=plain("cut.parquet: not a readable parquet file (")
        + r".*\); download or write it again",
    ),
    bad(
        "cut-evaluation", "data.eval_files=[cut.parquet]",
        says=plain("cut.parquet: not a readable parquet file (") + ".*",
    ),
    bad(
        "row-without-truth", "data.train_files=[no-truth.jsonl]",
        says=plain("no-truth.jsonl row 41: reward_model is missing; it must be an object with the "
        "key ground_truth"),
    ),
    bad(
        "row-without-prompt", "data.train_files=[no-prompt.parquet]",
        says=plain("no-prompt.parquet row 1: prompt is missing; it must be a text or a list of "
        "messages; data.prompt_key names the column"),
    ),
    bad(
        "nothing-fits", "data.max_prompt_tokens=4",
        says=plain("good.jsonl: none of the 40 prompts fits into data.max_prompt_tokens=4 "
        "(shortest 5 tokens, longest 5); raise it, or set data.overlong_prompts to left, right or "
        "middle to cut them"),
    ),
    bad(
        "one-too-long", "data.max_prompt_tokens=4", "data.overlong_prompts=error",
        says=plain("good.jsonl row 1: the prompt has 5 tokens, data.max_prompt_tokens is 4; raise "
        "it, or set data.overlong_prompts to filter, left, right or middle"),
    ),
    bad(
        "unknown-source", "data.train_files=[klingon.jsonl]",
        says=plain("data_source klingon has no scorer; name one of sort_digits, gsm8k, ")
        + ".*" + plain("in reward.scorers, or your own function in reward.function.path"),
    ),
    bad(
        "unknown-source-held-out", "data.eval_files=[klingon.jsonl]",
        says=plain("data_source klingon has no scorer; ") + ".*",
    ),
    bad(
        "template-without-place", "data.prompt_template={sort_digits: sort it}",
        says=r"data\.prompt_template must say \{prompt\} where the message goes.*",
    ),
]  # fmt: skip


def failing(file: str, error: str, line: int | None = 2) -> str:
    place = rf" at \S+/{file}:{line}" if line else ""
    return (
        plain("scoring failed for 16 of 16 answers (100%), reward.max_failure_share is 0.2; the ")
        + f"first failure: {plain(error)}{place}"
        + r" \(prompt good\.jsonl:\d+\); mend the scorer \(its traceback is in the log\)"
    )


REWARDS = [
    bad(
        "scorer-raises", "reward.function.path=raises.py",
        says=failing("raises.py", "ZeroDivisionError: division by zero"),
    ),
    bad(
        "scorer-raises-later", "reward.function.path=later.py",
        says=failing("later.py", "OSError: no judge"),
    ),
    bad(
        "scorer-exits", "reward.function.path=exits.py",
        says=failing("exits.py", "SystemExit: 3"),
    ),
    bad(
        "scorer-says-nan", "reward.function.path=nan.py",
        says=failing("nan.py", "ValueError: the scorer returned nan as reward", None),
    ),
    bad(
        "scorer-says-text", "reward.function.path=text.py",
        says=failing("text.py", "TypeError: score must be a number, got str; return a float, or a "
        "dict with the key score", None),
    ),
    bad(
        "scorer-without-score", "reward.function.path=keyless.py",
        says=failing("keyless.py", "ValueError: the dict returned has no key score, only acc",
        None),
    ),
    bad(
        "failure-is-fatal", "reward.function.path=raises.py", "reward.on_failure=fatal",
        says=plain("scoring an answer to prompt good.jsonl:") + r"\d+"
        + plain(" failed and reward.on_failure is fatal: ZeroDivisionError: division by zero at ")
        + r"\S+/raises\.py:2; mend the scorer, or set reward\.on_failure to wrong",
    ),
    bad(
        "metric-nobody-returns", "reward.function.path=fine.py", "sampling.filter.metric=style",
        says=plain("sampling.filter.metric is style, but the score has no such number; it has "
        "accuracy, reward, task, task_reward"),
    ),
    bad(
        "no-reward-file", "reward.function.path=nowhere.py",
        says=plain("reward.function.path nowhere.py: no such file; give the Python file that "
        "holds it"),
    ),
    bad(
        "reward-syntax", "reward.function.path=syntax.py",
        says=plain("reward.function.path syntax.py, line 1: importing it fails with SyntaxError: ")
        + ".*" + plain("; correct the file"),
    ),
    bad(
        "reward-import", "reward.function.path=imports.py",
        says=plain("reward.function.path imports.py, line 2: importing it fails with "
        "ModuleNotFoundError: No module named 'nowhere_to_be_found'; correct the file"),
    ),
    bad(
        "reward-without-function", "reward.function.path=nameless.py",
        says=plain("reward.function.path nameless.py has no callable compute_score; give one of "
        "score"),
    ),
    bad(
        "reward-with-other-arguments", "reward.function.path=narrow.py",
        says=plain("reward.function.path narrow.py: compute_score(text) cannot be called with "
        "data_source, solution_str, ground_truth, extra_info (") + ".*"
        + plain("); change its arguments, or reward.function.kwargs"),
    ),
    bad(
        "unknown-scorer", "reward.scorers={sort_digits: magic}",
        says=plain("reward.scorers.sort_digits is magic, which is no scorer; there are ") + ".*",
    ),
]  # fmt: skip


def model(name: str, says: str) -> Bad:
    path = f"models/{name}"
    return bad(name, f"model.path={path}", says=plain(f"model.path {path}: ") + says)


MODELS = [
    model("nowhere", plain("no such folder; give a Hugging Face model folder or a hub name")),
    model(
        "no-tokenizer",
        plain("the folder has no tokenizer (such as tokenizer.json); copy the tokenizer's files "
        "from where the model comes from into it"),
    ),
    model("cut-tokenizer", plain("cannot load its tokenizer: ") + ".*; mend its files"),
    model("no-config", ".*config.json.*"),
    model("cut-config", r"cannot load its tokenizer: .*not a valid JSON file; mend its files"),
    model(
        "no-weights",
        plain("cannot load its weights: Error no file named model.safetensors")
        + ".*; give a complete Hugging Face folder",
    ),
    model(
        "cut-weights",
        plain("cannot load its weights: ")
        + ".*; give a complete Hugging Face folder",
    ),
    model(
        "other-shape",
        r"weights are of another shape \(\d+, such as model\.\S+\); "
        r"give a folder whose weights belong to its config\.json",
    ),
    model(
        "too-deep",
        r"weights are missing \(11, such as model\.layers\.1\.\S+\); "
        r"give a folder whose weights belong to its config\.json",
    ),
    model(
        "too-small",
        plain("the tokenizer has 29 tokens, the model only 20; give the tokenizer that belongs to "
        "the model in model.tokenizer"),
    ),
    model(
        "nan", plain("model.embed_tokens.weight holds NaN or infinity; use another model")
    ),
]  # fmt: skip

FOLDERS = [
    bad(
        "name-taken", "run.name=taken", "run.resume=never",
        says=plain("run.name=taken: runs/taken holds a run already; choose another run.name, or "
        "delete that folder"),
    ),
    bad(
        "name-of-another-recipe", "run.name=taken", "reward.function.path=fine.py", "rollout.n=5",
        says=plain("runs/taken was trained with another recipe: rollout.n was 4 and is 5; set that "
        "back, or choose another run.name for a new run (run.fork begins one from this run's "
        "state)"),
    ),
    bad(
        "resume-of-nothing", "run.resume=runs/never",
        says=plain("run.resume=runs/never is neither a run's folder nor a checkpoint in one; give "
        "runs/NAME or runs/NAME/checkpoints/step-N, or auto or never"),
    ),
    bad(
        "file-in-the-way", "run.dir=a-file",
        says=plain("cannot write a-file/file-in-the-way: Not a directory; check the path, or "
        "choose another folder with run.dir=FOLDER"),
    ),
    bad(
        "name-with-slash", "run.name=a/b",
        says=plain("run.name must name one folder (not empty, no slash, no dot in front), got "
        "'a/b' (set by the command line)"),
    ),
    Bad(
        "unknown-recipe", (), (plain("there is no recipe 'quikstart'; did you mean quickstart? ")
        + ".*",), ("train", "quikstart"),
    ),
    Bad(
        "nothing-to-fine-tune", ("model.path=model", "data.train_files=[good.jsonl]"),
        (plain("warm_start is none: there is nothing to fine-tune; choose warm_start=sft"),),
        ("sft", "mine.yaml"),
    ),
    Bad(
        "cache-not-writable",
        ("warm_start.cache_dir=a-file", "run.threads=1", "run.name=cache-not-writable"),
        (plain("cannot keep the warm start in a-file/warm-starts: Not a directory; choose another "
        "folder in warm_start.cache_dir or WINNOW_CACHE"),),
        ("train", "quickstart"),
    ),
    Bad(
        "eval-of-nothing", (), (plain("runs/never is not a run's folder (no config.yaml); look "
        "in runs/"),), ("eval", "runs/never"),
    ),
    Bad(
        "eval-before-a-checkpoint", (), (r"runs/begun has .*checkpoint.*; there are: none",),
        ("eval", "runs/begun"),
    ),
    Bad(
        "export-of-nothing", (), (plain("a-folder is not a run's folder (no config.yaml); look in "
        "runs/"),), ("export", "a-folder", "new-folder"),
    ),
    Bad(
        "unknown-command", (), (plain("no such command 'trian'. Did you mean 'train'? see `winnow "
        "--help`"),), ("trian",),
    ),
    Bad(
        "unknown-option", (), (plain("no such option: --frehs (Possible options: --fresh); see "
        "`winnow train --help`"),),
        ("train", "mine.yaml", "--frehs"),
    ),
    Bad(
        "missing-argument", (), (plain("missing argument 'target'; see `winnow export --help`"),),
        ("export", "runs/begun"),
    ),
    Bad(
        "help-for-an-unknown-section", (), ("no key starts with .*optimizer.*",),
        ("train", "mine.yaml", "--help-config", "optimizer"),
    ),
]  # fmt: skip
CASES = [*RECIPES, *DATA, *REWARDS, *MODELS, *FOLDERS]
IN_THEIR_OWN_PROCESS = {
    "unknown-key", "cut-parquet", "scorer-raises", "cut-weights", "too-deep", "eval-of-nothing",
}  # fmt: skip


def files_below(folder: Path) -> dict[Path, int]:
    return {
        path: path.stat().st_size for path in folder.rglob("*") if "__pycache__" not in str(path)
    }


def named(cases: list[Bad]) -> list[Any]:
    return [pytest.param(case, id=case.name) for case in cases]


def check(case: Bad, place: Path, run: Callable[..., Outcome]) -> None:
    before = files_below(place)
    said = run(*case.argv, folder=place)
    assert said.code == 2, said
    lines = said.err.splitlines()
    assert len(lines) == len(case.says), said.err
    for line, pattern in zip(lines, case.says, strict=True):
        assert re.fullmatch(f"winnow: {pattern}", line), line
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


def test_the_table_has_no_two_cases_of_one_name() -> None:
    assert len({case.name for case in CASES}) == len(CASES) >= 50
    assert {case.name for case in CASES} >= IN_THEIR_OWN_PROCESS


@pytest.mark.parametrize("case", named(CASES))
def test_wrong_input_is_answered_in_one_line_a_fault(case: Bad, place: Path) -> None:
    shutil.rmtree(place / "runs" / case.name, ignore_errors=True)
    check(case, place, in_this_process)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", named([case for case in CASES if case.name in IN_THEIR_OWN_PROCESS])
)
def test_a_command_of_its_own_says_the_same_and_no_library_talks_between(
    case: Bad, place: Path
) -> None:
    shutil.rmtree(place / "runs" / case.name, ignore_errors=True)
    check(case, place, in_own_process)


def test_the_traceback_of_a_scorer_is_in_the_log(place: Path) -> None:
    name = "look-in-the-log"
    case = bad(name, "reward.function.path=raises.py", says="")
    in_this_process(*case.argv, folder=place)
    log = (place / "runs" / name / "log.txt").read_text()
    assert 'raises.py", line 2, in compute_score' in log
    assert "ZeroDivisionError: division by zero" in log


def test_a_few_failing_scores_do_not_stop_a_run(place: Path) -> None:
    (place / "moody.py").write_text(
        "calls = 0\n"
        "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    global calls\n"
        "    calls += 1\n"
        "    return 1 / 0 if calls % 10 == 0 else float(calls % 2)\n"
    )
    case = bad("moody", "reward.function.path=moody.py", says="")
    said = in_this_process(*case.argv, folder=place).check()
    assert "moody: done" in said.out
    assert "scoring failed for" in (place / "runs" / "moody" / "log.txt").read_text()


def test_export_leaves_a_folder_alone_that_is_there(place: Path) -> None:
    case = bad("good-run", "reward.function.path=fine.py", says="")
    in_this_process(*case.argv, folder=place).check()
    said = in_this_process("export", "runs/good-run", "a-folder", folder=place)
    assert (said.code, said.out) == (2, "")
    assert said.err == "winnow: a-folder exists already; name a folder that does not\n"
    assert not list((place / "a-folder").iterdir())
    said = in_this_process("eval", "runs/good-run", "--step", "7", folder=place)
    assert said.code == 2
    assert re.fullmatch(
        r"winnow: runs/good-run has .*checkpoint of step 7; there are: 2\n", said.err
    )
    said = in_this_process("eval", "runs/good-run", folder=place)
    assert said.code == 2
    assert said.err.startswith("winnow: no held-out prompts: give --data FILE")


def test_a_damaged_checkpoint_is_named(place: Path) -> None:
    case = bad("damaged", "reward.function.path=fine.py", says="")
    in_this_process(*case.argv, folder=place).check()
    weights = next((place / "runs" / "damaged").rglob("model.safetensors"))
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    for command in (["eval", "runs/damaged"], ["export", "runs/damaged", "new-folder"]):
        said = in_this_process(*command, folder=place)
        assert said.code == 2
        assert re.fullmatch(r"winnow: \S+/model\.safetensors is damaged .*\n", said.err)
    assert not (place / "new-folder").exists()
