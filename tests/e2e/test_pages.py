"""The documentation typed as it stands: each command of each page, its Python, the notebook.

A page is typed in a folder of its own, in which the files that it speaks of lie: small models under
the names `FOLDER` and `OTHER_FOLDER`, small data, finished runs. `SMALL` is appended to commands
that train, as far as they do not say the like themselves. Commands that start processes run in one
that is forked from the session's server, so that none of them has to import torch. What is not run
stands in `tests.pages`, with reasons; a command that is neither there nor succeeds here fails.
"""

from __future__ import annotations

import json
import re
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tests.faulty_http import serving
from tests.forked import Forked, Server
from tests.generate_server import GenerateServers
from tests.hubs import Hub
from tests.integration.data.test_prepare_hub import publish
from tests.judges import judging
from tests.pages import PAGES, ROOT, Typed, code_blocks, typed, write_shown_files
from tests.reward_models import classifier_folder
from tests.small_models import byte_level_bpe, digits_model, save
from tests.winnow_command import Outcome, in_this_process, python

import winnow

pytestmark = pytest.mark.slow
ELSEWHERE = {"extending.md": "test_extending.py"}
"""Pages that another test types whole, and looks closer at what comes out."""
SMALL = (
    *("trainer.steps=2", "trainer.save_every=1", "trainer.keep_last=null", "optim.warmup_steps=0"),
    *("sampling/filter=none", "sampling.groups_per_step=2", "trainer.mini_batch_groups=2"),
    *("rollout.n=2", "rollout.max_response_tokens=16", "reward.overlong.buffer_tokens=4"),
    *("evaluation.n=1", "evaluation.max_prompts=2", "evaluation.greedy=false", "run.threads=1"),
    *("rollout.engine.slots=8", "observe.console=plain", "reward.timeout_s=200"),
)
SMALL_TASK = ("data.task.min_digits=2", "data.task.max_digits=3", "data.task.eval_problems=2")
SMALL_START = ("warm_start.steps=20",)
QUICKSTART = (*SMALL, *SMALL_TASK, *SMALL_START, "rollout.max_response_tokens=48")
"""Of a model that `winnow.LLM` can ask."""
SMALL_DEMONSTRATIONS = (
    *("trainer.steps=2", "trainer.data_epochs=null", "sft.batch_size=2", "run.threads=1"),
    *("evaluation.max_prompts=2", "rollout.max_response_tokens=16", "observe.console=plain"),
)
SMALL_EVALUATION = ("evaluation.max_prompts=2", "evaluation.max_response_tokens=16")
SHORTER = {
    "max_response_tokens=128": "max_response_tokens=16",
    "max_response_tokens=2048": "max_response_tokens=16",
    "model.path=Qwen2.5-32B": "model.path=FOLDER",
    "strategy.ranks=4": "strategy.ranks=2",
    "strategy.ranks=8": "strategy.ranks=2",
    "strategy.sequence=4": "strategy.sequence=2",
    "engine.processes=2": "engine.processes=1",
    "reward.processes=4": "reward.processes=1",
    "optim.lr=5e-7,1e-6,2e-6": "optim.lr=5e-7,2e-6",
    "seed=0,1": "seed=0",
    "trainer.profile.steps=[3,4]": "trainer.profile.steps=[2]",
    "trainer.steps=4": "trainer.steps=2",
    "trainer.steps=80": "trainer.steps=2",
    "bfloat16": "float32",
}
"""What pages say in commands that train, and what is typed instead."""
ANSWERS = {"doctor runs/NAME": 1, "--function shares.py": 2}
"""Exit codes that are an answer: something critical is found, a scoring failed."""
MADE = {
    "first_run.md": ("runs/short", "after/report.json", "model/config.json", "first.png"),
    "README.md": ("mine", "both.svg"),
}
"""Some of what the commands of a page leave behind."""
RECIPE = """
defaults: [gsm8k]
model: {path: FOLDER}
data: {train_files: [train.jsonl], eval_files: [test.jsonl]}
"""
OWN_ENGINE = """
from winnow.rollout.embedded.torch_engine import TorchEngine


class Mine(TorchEngine):
    def __init__(self, *, model, slots, **given):
        super().__init__(model, slots, 4096, **given)
"""
SAME = {
    "winnow train quickstart optim.lr=2e-4,4e-4 -m": "sweeps.md",
    "winnow check-engine URL --model FOLDER": "http_engine.md",
}
"""Commands that stand in another way on another page, and are run for that."""
STARTS = re.compile(r"processes=|fsdp2|trainer/mode=|(--multirun|-m)( |$)|--dashboard")
"""Commands that start processes."""
WANTED = re.compile(r"\b(?:runs|other)/[\w*-]+")


def write_files(folder: Path) -> None:
    """The data and programs that pages speak of."""
    rows = [
        {
            "question": f"What is {n} + 1?", "answer": f"#### {n + 1}",
            "ask": f"Add 1 to {n}.", "extra_info": {"answer": str(n + 1)}, "kind": "gsm8k",
        }
        for n in range(8)
    ]  # fmt: skip
    for name in ("train.jsonl", "test.jsonl"):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    verl = [
        {
            "data_source": "math_dapo", "reward_model": {"ground_truth": str(n + 1)},
            "prompt": [{"role": "user", "content": f"What is {n} + 1?"}],
        }
        for n in range(8)
    ]  # fmt: skip
    for name in ("train.parquet", "test.parquet", "dapo_math_17k.parquet"):
        pq.write_table(pa.Table.from_pylist(verl), folder / name)
    for name in ("demos.jsonl", "held_out.jsonl"):
        told = [{"prompt": f"{n} + 1 =", "completion": str(n + 1)} for n in range(8)]
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in told))
    for name in ("recipe.yaml", "my-recipe.yaml"):
        (folder / name).write_text(RECIPE)
    (folder / "mine.py").write_text(OWN_ENGINE)
    (folder / "FILE.py").write_text("def compute_score(*row, **more):\n    return 1.0\n")
    for _, code in code_blocks((ROOT / "docs/extending.md").read_text("utf-8")):
        if name := re.match(r"# (\w+\.py)\n", code):
            (folder / name[1]).write_text(code)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with models, data, a run, and evaluations of it."""
    home = tmp_path_factory.mktemp("home")
    write_files(home)
    texts = [file.read_text() for file in ROOT.glob("src/winnow/recipes/*.yaml")]
    tokenizer = byte_level_bpe(texts, chat=True)
    tokenizer.chat_template += "{% if enable_thinking %}{% endif %}"
    shape = {"vocab_size": len(tokenizer), "eos_token_id": 0, "max_position_embeddings": 4096}
    for name, scale in (("FOLDER", 1.0), ("OTHER_FOLDER", 1.1)):
        model = digits_model(**shape, initializer_range=0.3, tie_word_embeddings=False)
        for parameter in model.parameters():
            parameter.data.mul_(scale)
        save(model, tokenizer, home / name)
    (home / "chat.jinja").write_text(tokenizer.chat_template)
    classifier_folder(home / "CLASSIFIER", max_position_embeddings=2048)
    words = ("train", "quickstart", "run.name=first", *QUICKSTART)
    in_this_process(*words, folder=home, environment=cache(home)).check()
    for step, name in (("1", "A"), ("2", "B")):
        words = ("eval", "runs/first", "--step", step, "--out", name, *SMALL_EVALUATION)
        in_this_process(*words, folder=home).check()
    return home


def cache(home: Path) -> dict[str, str]:
    return {"WINNOW_CACHE": str(home / "cache"), "HF_HUB_OFFLINE": "0", "HF_TOKEN": "write"}


class Reader:
    """Types the commands of a page, in a folder of its own.

    Args:
        home: what is there for all pages.
        server: forks processes for commands that start others, and for services.
    """

    def __init__(self, page: Path, home: Path, folder: Path, server: Server) -> None:
        self.text, self.home, self.folder = page.read_text("utf-8"), home, folder
        self._server, self._count, self._services = server, 0, dict[str, Forked]()
        for file in home.iterdir():
            if file.name not in ("runs", "cache"):
                (folder / file.name).symlink_to(file)
        write_shown_files(self.text, folder)
        made = {f"runs/{name}" for name in re.findall(r"run\.name=(\w+)", self.text)}
        for name in {*WANTED.findall(self.text)} - made:
            if not (folder / name.replace("*", "1")).exists():
                shutil.copytree(home / "runs/first", folder / name.replace("*", "1"))

    def type(self, command: Typed, address: str) -> Outcome:
        """Run a command to its end; of a service, to its address and until Ctrl-C.

        Args:
            address: of the server that the command may speak of.
        """
        words = [self._in_place(word, address) for word in command.words[1:]]
        for word in [word for word in words if word.startswith("runs/") and "*" in word]:
            at = words.index(word)
            words[at : at + 1] = [str(found) for found in sorted(self.folder.glob(word))]
        if words[0] == "export" and (self.folder / words[2]).exists():
            words[2] = f"exported-{self._count}"
        words += [word for word in additions(words) if not says(words, word)]
        environment = cache(self.home) | {k: v.replace("…", "key") for k, v in command.environment}
        self._count += 1
        if not is_service(words) and not STARTS.search(" ".join(words)):
            return in_this_process(*words, folder=self.folder, environment=environment)
        out, err = (self.folder / f"{self._count}.{end}" for end in ("out", "err"))
        out.touch()
        started = self._server.start(
            "winnow.cli.main", words, folder=self.folder, environment=environment,
            out=out, err=err, spares=8,
        )  # fmt: skip
        if is_service(words):
            end = time.monotonic() + 60
            while not (found := re.search(r"http://[\w.]+:\d+", out.read_text())):
                assert started.poll() is None, err.read_text()
                assert time.monotonic() < end
                time.sleep(0.02)
            self._services[found[0].replace("0.0.0.0", "127.0.0.1")] = started
            return Outcome(0, out.read_text(), err.read_text())
        return Outcome(started.wait(120), out.read_text(), err.read_text())

    def close(self) -> None:
        """End services, which must have been well until then."""
        for service in self._services.values():
            service.send_signal(signal.SIGINT)
            assert service.wait(30) == 130

    @property
    def service(self) -> str:
        """Address of a service that this page has started."""
        return next(iter(self._services), "")

    def _in_place(self, word: str, address: str) -> str:
        """What a reader types in the place of a word that stands for something."""
        word = re.sub(r"s3://bucket/models/qwen", f"file://{self.folder}/FOLDER", word)
        word = re.sub(r"s3://bucket", f"file://{self.folder}", word, flags=re.IGNORECASE)
        word = re.sub(r"https?://(HOST|[\w.]+:(?:8000|8090|8080))(?=/v1|$)", address, word)
        word = re.sub(r"step-(\d+|N)|@80$", lambda m: m[0].rstrip("0123456789N") + "1", word)
        alone = {"RECIPE": "recipe.yaml", "MODEL": "FOLDER", "URL": address, "FILE": "train.jsonl"}
        alone["START"] = "FOLDER"
        alone |= dict.fromkeys(("12", "10", "80"), "1") | {"8090": "0", "6080": "2", "16": "1"}
        word = alone.get(word, word)
        word = re.sub(r"pypi://\S+|FILE\.gguf", "FOLDER", word)  # tests/e2e/test_real_model.py
        word = word.replace("[FILE]", "[train.jsonl]")
        for long, short in SHORTER.items():
            word = word.replace(long, short)
        return word.replace("reward.model.path=FOLDER", "reward.model.path=CLASSIFIER")


def is_service(words: list[str]) -> bool:
    """Whether the command stays until it is stopped."""
    return words[0] == "dashboard" or "serve" in words[:2]


def additions(words: list[str]) -> tuple[str, ...]:
    """What makes a command small."""
    if words[0] == "train" and "--help-config" not in words:
        is_digits = words[1] in ("quickstart", "dapo")
        is_warm = is_digits or words[1].startswith("quickstart")
        task = SMALL_TASK if is_digits and "data/task" not in str(words) else ()
        start = SMALL_START if is_warm and "warm_start=" not in str(words) else ()
        workers = ("reward.workers=0",) if "reward.function" in str(words) else ()
        model = ("model.path=FOLDER",) if "smollm2" in words else ()
        return *SMALL, *task, *start, *workers, *model
    if is_service(words):
        return () if "--port" in words else ("--port", "0")
    if words[:2] == ["plan", "dapo_qwen2.5_32b"]:  # as many ranks as fit, of a small model
        return "cluster=local", "trainer/strategy=single", "rollout/engine=torch"
    if words[0] == "plan" and words[1].endswith(".yaml"):  # at full size: test_guides.py
        return ("model.path=FOLDER",)
    short = {"sft": SMALL_DEMONSTRATIONS, "eval": SMALL_EVALUATION, "reward": ("reward.workers=0",)}
    return short.get(words[0], ())


def says(words: list[str], setting: str) -> bool:
    """Whether a command has a word on it of its own."""
    key = re.sub(r"/", ".", setting.partition("=")[0])
    told = [re.sub(r"/", ".", word.partition("=")[0]).lstrip("+") for word in words]
    slots = key == "rollout.engine.slots" and "rollout.engine" in told
    return slots or (key in told and "=" in setting)


@pytest.fixture
def engines(tmp_path: Path, server: Server) -> Iterator[Callable[[str], str]]:
    """Starts a server that writes with a model, as vLLM's does; gives its address."""
    started = []

    def start(model: str) -> str:
        address, process = GenerateServers(tmp_path, server).start(
            tmp_path / "page" / model, "--longest=2048"
        )
        started.append(process)
        return address

    yield start
    for process in started:
        process.kill()
        process.wait()


ran: set[Typed] = set()
"""Commands of earlier pages: one that trains, or stays until it is stopped, is run once."""


@pytest.mark.parametrize(
    "page", [page for page in PAGES if page.name not in ELSEWHERE], ids=lambda page: page.name
)
def test_every_command_of_a_page_runs_or_is_listed_with_a_reason(
    page: Path,
    home: Path,
    tmp_path: Path,
    server: Server,
    hub: Hub,
    engines: Callable[[str], str],
) -> None:
    publish(hub)
    (tmp_path / "page").mkdir()
    told = typed(page.read_text("utf-8"))
    with ExitStack() as stack:
        judge = stack.enter_context(serving([judging()])).url
        reader = stack.enter_context(closing(Reader(page, home, tmp_path / "page", server)))
        for command in sorted(told, key=lambda each: "serve" not in each.words):  # services first
            line = " ".join(command.words)
            if command.why_not_run:
                print(f"not run: {line}\n    {command.why_not_run}")
                continue
            assert command.words[0] == "winnow", f"{page.name}: {line} is neither run nor listed"
            if line in SAME:
                continue
            again = command.words[1] == "train" and "run.name" not in line
            if command in ran and (again or is_service(list(command.words[1:]))):
                continue
            ran.add(command)
            address = judge if "judge" in line else reader.service
            if model := re.search(r"check-engine .*--model (\w+)|eval .*engine.url|=http ", line):
                step = "runs/served/checkpoints/step-1/model"
                address = engines(model[1] or (step if "eval" in line else "FOLDER"))
            done = reader.type(command, address)
            expected = next((code for said, code in ANSWERS.items() if said in line), 0)
            assert done.code in (0, expected), f"{line}\n{done.out}\n{done.err}"
    for name in MADE.get(page.name, ()):
        assert (tmp_path / "page" / name).exists(), name


def test_what_pages_show_in_python_runs(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    page = (ROOT / "docs/reading_a_run.md").read_text("utf-8")
    (shown,) = [text for kind, text in code_blocks(page) if kind == "python"]
    exec(shown.replace("step=3", "step=2"), {})
    (api, *_) = [
        text
        for kind, text in code_blocks((ROOT / "docs/python.md").read_text("utf-8"))
        if kind == "python"
    ]
    given = {"run": winnow.open_run("runs/first")}
    exec(api.replace("run = winnow.train", "(lambda *a: 0)"), given)
    assert given["score"].accuracy in (0.0, 1.0)  # type: ignore[attr-defined]


def test_the_notebook_runs(home: Path, server: Server) -> None:
    """Its cells one after the other, where an event loop runs, as in its kernel."""
    notebook = json.loads((ROOT / "examples/first_steps.ipynb").read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] for cell in cells)
    first, *others = ("".join(cell["source"]) for cell in cells)
    words = ", ".join(f'"{word}"' for word in QUICKSTART)
    program = [first.replace('"trainer.steps=8"', words)]
    program += [cell.replace("step=8", "step=2") for cell in others]
    *lines, shown = "\n".join(program).splitlines()
    said = python(server, "\n".join([*lines, f"print(*map(len, ({shown})))"]), home).check()
    assert said.out.splitlines()[-1] == "4 4"  # rewards and advantages
    assert (home / "runs/notebook/checkpoints/step-2").is_dir()
