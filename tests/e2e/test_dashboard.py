"""The dashboard in a real browser: beside a run that trains, and over what such a run leaves."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray
from tests.fault.quick_lab import QuickLab
from tests.forked import Server
from tests.pauses import go_on
from tests.services import listening

from winnow.checkpoints.strangers import mark_as_local
from winnow.dashboard.service import Dashboard
from winnow.data.sort_digits import EOS_ID, build_tokenizer, encode
from winnow.data.tokenizer import make_decoder
from winnow.evaluation.statistics import two_sided_bound
from winnow.models.vision import encode_png
from winnow.observe.jsonl import read_metrics
from winnow.observe.rollouts import RolloutGroup, write_rollouts
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page, expect, sync_playwright
else:
    sync_api = pytest.importorskip("playwright.sync_api")
    expect, sync_playwright = sync_api.expect, sync_api.sync_playwright

CHROMIUM = shutil.which("chromium") or "/usr/bin/chromium"
FLAGS = [
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
]
pytestmark = pytest.mark.slow
PAGES = {"overview": ".panel canvas", "answers": ".tokens", "tokens": ".panel canvas",
         "time": ".panel canvas", "system": ".panel canvas", "alarms": ".alarms",
         "plan": ".plan form", "config": ".config tr.changed"}  # fmt: skip
STEPS = 5
WIDER = """[...document.querySelectorAll('.panel')].filter(each => each.scrollWidth >
each.clientWidth).map(each => each.getAttribute('aria-label'))"""
LABELS = """(() => {
  const { fillText, clearRect, beginPath, lineTo, stroke } = CanvasRenderingContext2D.prototype
  Object.assign(CanvasRenderingContext2D.prototype, {
    clearRect(...all) {
      this.canvas.labels = []
      this.canvas.lines = []
      return clearRect.apply(this, all)
    },
    beginPath() { this.path = []; return beginPath.call(this) },
    lineTo(x, y) { this.path?.push(y); return lineTo.call(this, x, y) },
    stroke(...all) {
      this.canvas.lines?.push([this.lineWidth, this.path])
      return stroke.apply(this, all)
    },
    fillText(text, x, y) {
      (this.canvas.labels ??= []).push([text, y + this.getTransform().f])
      return fillText.call(this, text, x, y)
    },
  })
})()"""
"""Keeps the texts that a canvas shows, each with its height, and its lines by width as heights."""
DRAWN = """document.querySelector('.chart[aria-label=Entropy] canvas').lines.filter(each =>
each[1]?.length > 50).length"""
EVIL = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    if not Path(CHROMIUM).exists():
        pytest.skip("chromium is not installed")
    with sync_playwright() as started:
        opened = started.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield opened
        opened.close()


@dataclass
class Watched:
    """A page and all that went wrong on it."""

    page: Page
    url: str = ""
    faults: list[str] = field(default_factory=list)
    asked: set[str] = field(default_factory=set)

    def open(self, path: str) -> Page:
        """Open a page afresh."""
        self.page.goto("about:blank")
        self.page.goto(f"{self.url}/#/{path}")
        return self.page


@pytest.fixture(scope="module")
def window(browser: Browser) -> Watched:
    """One for all tests: chromium starts processes for each."""
    context = browser.new_context(viewport={"width": 1280, "height": 720})
    context.set_default_timeout(20_000)
    made = Watched(context.new_page())
    page = made.page
    page.add_init_script(LABELS)
    page.on("pageerror", lambda error: made.faults.append(str(error)))
    page.on("request", lambda request: made.asked.add(request.url))
    page.on(
        "console",
        lambda line: made.faults.append(line.text) if line.type in ("error", "warning") else None,
    )
    return made


@dataclass(frozen=True)
class Trained:
    """A run that was watched while it trained."""

    folder: Path
    is_answering: bool
    """After the run's end."""
    code: int


@pytest.fixture(scope="module")
def trained(window: Watched, home: Path, server: Server) -> Trained:
    """Train with --dashboard, whose page shows each step without being loaded again."""
    lab, out, name = QuickLab(home, server=server), home / "out.txt", "tiny"
    run = lab.start(
        *(name, f"trainer.steps={STEPS}", "observe.console=plain", "--dashboard"),
        "algorithm.correction.mode=recompute",
        pauses={1: 0.0, 2: 0.0}, out=out, err=out,
    )  # fmt: skip
    for step in (1, 2):
        driver = lab.stands_still(run, name, step)
        if step == 1:
            told = re.match(r"Dashboard: (http://127\.0\.0\.1:\d+)/#/(\S+)\n", out.read_text())
            assert told, out.read_text()
            window.url, path = told.groups()
            wait_for(window.url)
            page = window.open(path)
        expect(page.locator(".runs td.step").first).to_have_text(re.compile(rf"^{step}\b"))
        go_on(driver)
    code = run.wait(60)
    page.goto("about:blank")
    return Trained(lab.run(name), is_up(window.url), code)


def is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/api/runs", trust_env=False, timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def wait_for(url: str) -> None:
    give_up = time.monotonic() + 60
    while not is_up(url):
        assert time.monotonic() < give_up
        time.sleep(0.05)


@pytest.fixture(scope="module")
def runs(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the run, and a copy of it, some of whose texts are made to do harm."""
    folder = tmp_path_factory.mktemp("runs")
    shutil.copytree(trained.folder, folder / "tiny")
    (folder / "tiny" / "findings.jsonl").write_text("{}\n{}\n")
    evil = folder / "evil <b>run<"
    shutil.copytree(trained.folder, evil)
    path = evil / "rollouts" / "step-2.parquet"
    table = pq.read_table(path)
    for name in ("prompt", "response", "pred", "prompt_uid", "scorer_error", "data_source"):
        at = table.column_names.index(name)
        table = table.set_column(at, name, pa.array([EVIL] * len(table)))
    pq.write_table(table.drop_columns(["token_ids"]), path)
    with (evil / "log.txt").open("a") as log:
        log.write(f"2026-01-01 00:00:00,000 WARNING winnow.x: {EVIL}\n")
    config = evil / "config.yaml"
    config.write_text(config.read_text() + f"evil: {json.dumps(EVIL)}\n")
    (folder / "torn").mkdir()
    (folder / "torn" / "config.yaml").write_text("run: {name: [")
    return folder


@pytest.fixture
def look(window: Watched, runs: Path) -> Iterator[Watched]:
    """A page over the finished runs; at the end nothing may have gone wrong on it."""
    window.faults.clear()
    window.asked.clear()
    with listening(Dashboard([str(runs)])) as window.url:
        yield window
        window.page.goto("about:blank")
    assert window.faults == []
    ours = window.url, "about:", "data:"
    assert {each for each in window.asked if not each.startswith(ours)} == set()


def test_a_run_is_seen_live_and_its_dashboard_ends_with_it(trained: Trained) -> None:
    assert trained.code == 0
    assert not trained.is_answering
    assert (trained.folder / "tokenizer.json").is_file()
    assert json.loads((trained.folder / "model.json").read_text())["num_hidden_layers"] > 0


def test_the_trainers_log_probs_are_kept_beside_the_samplers(trained: Trained) -> None:
    record = read_metrics(trained.folder / "metrics.jsonl")[1]
    rows = pq.read_table(trained.folder / "rollouts" / "step-1.parquet").to_pylist()
    learnt = [row for row in rows if row["outcome"] == "trained"]
    total = sum(row["mismatch"] * row["response_tokens"] for row in learnt)
    mean = total / sum(row["response_tokens"] for row in learnt)
    assert mean == pytest.approx(record["mismatch/abs_delta"], rel=1e-4)
    shown = [row for row in learnt if row["token_ids"] is not None]
    assert shown
    for row in shown:
        distances = np.abs(np.subtract(row["logprobs"], row["trainer_logprobs"]))
        assert np.mean(distances) == pytest.approx(row["mismatch"], abs=1e-7)
        assert row["versions"] == [0] * row["response_tokens"]
        assert len(row["entropies"]) == row["response_tokens"]
        assert min(row["entropies"]) > 0
    # The step's updates tell it, too, a little later each: all but the first.
    entropies = np.concatenate([row["entropies"] for row in shown])
    assert np.mean(entropies) == pytest.approx(record["actor/entropy"], rel=0.05)


def test_pages_fit_the_screen_and_ask_nobody_else(look: Watched) -> None:
    for name, there in PAGES.items():
        page = look.open(f"{name}?run=tiny&runs=tiny")
        page.wait_for_selector(there)
        page.wait_for_selector(".connection.live")
        assert page.evaluate("document.documentElement.scrollWidth") <= 1280, name
        assert page.locator(".problem").count() == (1 if name == "overview" else 0)  # of torn
    page = look.open("overview?runs=tiny&runs=evil%20%3Cb%3Erun%3C")
    page.locator("tr:has(.interval)").evaluate(
        "row => { row.cells[0].textContent = 'organisation/a-long-name'; "
        "row.cells[6].textContent = '< 0.001' }"
    )
    assert page.evaluate(WIDER) == []


def test_answers_are_reached_by_clicks_and_keys_and_by_their_address(look: Watched) -> None:
    page = look.open("overview?runs=tiny")
    page.get_by_role("link", name="Answers", exact=True).first.click()
    rows = page.locator(".groups tbody tr")
    rows.nth(2).click()
    chosen = page.locator(".groups tr[aria-selected=true] .prompt")
    expect(chosen).to_have_text(rows.nth(2).locator(".prompt").inner_text())
    for key in "jjjkjk":  # faster than the page is drawn
        page.keyboard.press(key)
    expect(chosen).to_have_text(rows.nth(4).locator(".prompt").inner_text())
    page.wait_for_selector(".tokens span")
    page.keyboard.press("l")
    page.wait_for_selector("section[aria-label='Answer 2']")
    page.keyboard.press("[")
    step = page.get_by_label("Step", exact=True)
    expect(step).to_have_value(str(STEPS - 1))
    page.wait_for_selector("section[aria-label='Answer 1'] .tokens span")
    page.keyboard.press("c")
    told = page.get_by_text(re.compile("entropy of the trainer|Entropies of tokens are kept"))
    told.wait_for()
    address = page.url
    page.reload()
    told.wait_for()
    assert page.url == address
    expect(step).to_have_value(str(STEPS - 1))
    page.keyboard.press("?")
    page.get_by_role("dialog", name="Keys").wait_for()
    page.keyboard.press("Escape")
    page.keyboard.press("4")
    page.get_by_role("heading", name="Who waited for whom").wait_for()


def test_answers_to_one_prompt_stand_beside_those_of_another_run(look: Watched) -> None:
    page = look.open("answers?run=tiny&kind=held_out&step=0")
    prompt = page.locator(".group .head h2")
    prompt.wait_for()
    page.get_by_label("Beside").select_option("evil <b>run<")
    other = page.get_by_role("region", name="Beside: evil <b>run<")
    texts = "e => e.textContent"
    other.locator(".tokens span").first.wait_for()
    first = page.locator(".beside > section").first.locator(".tokens")
    assert other.locator(".tokens").evaluate(texts) == first.evaluate(texts)  # it is a copy


def test_titles_of_charts_explain_them_to_mouse_and_keyboard(look: Watched) -> None:
    page = look.open("overview?runs=tiny")
    title = page.get_by_role("button", name="Entropy", exact=True)
    title.hover()
    words = page.get_by_role("tooltip")
    expect(words).to_contain_text("Healthy: falls slowly while accuracy rises")
    page.mouse.move(0, 0)
    expect(words).to_have_count(0)
    page.get_by_role("button", name="Gradient norm", exact=True).focus()
    expect(words).to_contain_text("gradient norm before clipping")
    page.keyboard.press("Escape")
    expect(words).to_have_count(0)


def test_tokens_show_their_numbers_and_special_ones_are_marked(look: Watched) -> None:
    page = look.open("answers?run=tiny&step=1")
    page.locator(".groups tr:has(.fate.trained):not(:has(.dim))").first.click()
    expect(page.locator(".group.stale")).to_have_count(0)
    page.locator(".tokens span").first.hover()
    readout = page.locator(".readout").inner_text()
    assert re.search(
        r"log-prob .?\d+\.\d{3} +p [01]\S* +trainer .?\d+\.\d{3} +entropy \d\.\d{3}", readout
    )
    page.keyboard.press("c")
    page.get_by_text(re.compile("entropy of the trainer")).wait_for()
    assert page.locator(".tokens span[style*='heat-violet']").count() > 0
    assert "version 0" in readout
    file = pq.read_table(Path(look_runs(look)) / "tiny" / "rollouts" / "step-1.parquet")
    kept = [row for row in file.to_pylist() if row["response"] is not None]
    shown = page.locator(".tokens").evaluate(
        "e => [...e.querySelectorAll('span:not(.special)')].map(s => s.textContent).join('')"
    )
    assert shown in {row["response"] for row in kept}
    page.get_by_role("radio", name="Version").click()
    page.locator(".swatch").first.wait_for()
    page.get_by_role("radio", name="Sampler").click()
    page.locator(".ramp.difference").wait_for()


def test_what_is_read_stays_while_the_run_goes_on(look: Watched) -> None:
    runs = Path(look_runs(look))
    folder = runs / "growing"
    shutil.copytree(runs / "tiny", folder)
    special = next(
        each["id"]
        for each in json.loads((folder / "tokenizer.json").read_text())["added_tokens"]
        if each["special"]
    )
    last = folder / "rollouts" / f"step-{STEPS}.parquet"
    coming = last.read_bytes()
    last.unlink()
    path = folder / "rollouts" / f"step-{STEPS - 1}.parquet"
    table = pq.read_table(path)
    ids = pa.array([[special, 7]] * len(table), pa.list_(pa.int32()))
    pq.write_table(
        table.set_column(table.column_names.index("prompt_ids"), "prompt_ids", ids), path
    )
    page = look.open("answers?run=growing")
    rows = page.locator(".groups tbody tr")
    rows.nth(1).click()
    head = page.locator(".group .head h2")
    expect(head).to_contain_text(rows.nth(1).locator(".prompt").inner_text().rstrip(":"))
    expect(page.locator(".group.stale")).to_have_count(0)
    prompt = page.get_by_role("region", name="Prompt")
    expect(prompt.locator(".special")).to_have_count(1)
    read = page.locator(".tokens").last.inner_text()
    last.write_bytes(coming)
    page.get_by_text(f"of {STEPS}", exact=True).wait_for()
    expect(page.get_by_label("Step", exact=True)).to_have_value(str(STEPS - 1))
    assert page.locator(".tokens").last.inner_text() == read
    page.get_by_role("button", name="Newest").click()
    expect(page.get_by_label("Step", exact=True)).to_have_value(str(STEPS))
    page.goto("about:blank")
    shutil.rmtree(folder)


def look_runs(look: Watched) -> str:
    """The folder of the runs that a page shows."""
    place = httpx.get(f"{look.url}/api/runs", trust_env=False).json()["runs"][0]["place"]
    return str(Path(place).parent)


def test_a_conversation_is_shown_turn_by_turn_with_its_tokens(look: Watched) -> None:
    folder = Path(look_runs(look)) / "talk"
    shutil.copytree(folder.with_name("tiny"), folder)
    config = folder / "config.yaml"
    config.write_text(
        re.sub("(?s)\nenvironment:.*?\n(?=\\w)", "\n", config.read_text())
        + 'environment: {name: tools, tools: ["t.py:f"], calls: "(?P<digits>[0-9]+);"}\n'
    )

    def part(text: str, *spans: VersionSpan, **more: Any) -> Segment:
        ids = np.append(encode(text), EOS_ID)
        return Segment(ids, np.full(len(ids), -2.0 if spans else 0.0, np.float32), spans, **more)

    first = part("1|539;#", VersionSpan(0, 8), reward=0.5, figures={"calls": 1, "malformed": 2})
    image = encode_png(np.zeros((8, 8, 3), np.uint8), 8)
    talk = (
        first,
        part("359", source="environment", images=(image,)),
        part("#1359", VersionSpan(0, 6)),
    )
    answers = [Answer(Trajectory(each, "stop"), Score(1.0, 1.0)) for each in (talk, talk[2:])]
    prompt = Prompt("row", encode("5391:"), "5391:", "sort_digits", "1359", images=(image,))
    entry = RolloutGroup(Group(0, prompt, tuple(answers)), "surplus")
    decode = make_decoder(build_tokenizer())
    write_rollouts(
        folder / "rollouts" / "step-1.parquet", 1, [entry], version=0, text_groups=[0],
        decode=decode,
    )  # fmt: skip
    mark_as_local(folder)  # only then its regular expression is used
    page = look.open("answers?run=talk&step=1")
    turns = page.locator(".turns li")
    expect(turns).to_have_count(3)
    expect(turns.nth(0).locator("header")).to_have_text(
        re.compile("model *8 tokens *1 call *2 malformed *reward 0.50")
    )
    expect(turns.nth(1).locator("header")).to_have_text(re.compile("environment *4 tokens$"))
    for place in (page.locator("section[aria-label=Prompt]"), turns.nth(1)):
        expect(place.locator(".thumbs img.tiny")).to_have_js_property("naturalWidth", 8)
    assert "".join(turns.nth(0).locator(".call").all_inner_texts()) == "539;"
    assert turns.nth(1).locator("pre").inner_text() == "359<eos>"
    assert [turns.nth(n).locator("span[style*=heat]").count() for n in range(3)] == [8, 0, 6]
    turns.nth(1).locator("pre span").first.hover()
    page.get_by_text("not written by the model").wait_for()
    page.set_viewport_size({"width": 390, "height": 844})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    page.set_viewport_size({"width": 1280, "height": 720})
    page.keyboard.press("l")
    page.wait_for_selector("section[aria-label='Answer 2'] .tokens span")
    expect(turns).to_have_count(0)
    page.goto("about:blank")
    shutil.rmtree(folder)


def test_answers_are_filtered_and_searched(look: Watched) -> None:
    page = look.open("answers?run=tiny&step=1")
    rows = page.locator(".groups tbody tr")
    rows.first.wait_for()
    every = rows.count()
    page.get_by_role("radio", name=re.compile("All wrong")).click()
    expect(rows).not_to_have_count(every)
    assert all(text.startswith("0/") for text in rows.locator("td:nth-child(3)").all_inner_texts())
    assert "filter=wrong" in page.url
    page.get_by_role("radio", name=re.compile("^All ?\\d")).click()
    prompt = rows.first.locator(".prompt").inner_text()
    page.keyboard.press("/")
    page.keyboard.type(prompt)
    page.keyboard.press("Enter")
    page.get_by_text("with “").wait_for()
    assert prompt in rows.locator(".prompt").all_inner_texts()
    assert rows.count() < every


def test_runs_are_searched_sorted_hidden_and_pinned_and_keep_their_colours(look: Watched) -> None:
    folder = Path(look_runs(look))
    names = [f"sweep-{n:02}" for n in range(12)]
    for n, name in enumerate(names):
        (folder / name).mkdir()
        text = (folder / "tiny" / "config.yaml").read_text()
        (folder / name / "config.yaml").write_text(f"{text}new: {{x: {n}}}\n")
        shutil.copy(folder / "tiny" / "metrics.jsonl", folder / name)
    page = look.open("overview?q=SWEEP&runs=sweep-03&runs=sweep-05")
    shown = page.locator(".runs td.name")
    expect(shown).to_have_text(names)

    def colors() -> dict[str, str]:
        """The colours of the runs that are drawn."""
        dots = page.locator(".runs tr.chosen .dot")
        dots.first.wait_for()
        return dict(dots.evaluate_all(
            "all => all.map(each => [each.parentElement.textContent, each.style.background])"
        ))  # fmt: skip

    before = colors()
    page.get_by_role("button", name="new.x").click()
    page.get_by_role("button", name="new.x ↑").click()
    expect(shown).to_have_text(names[::-1])
    page.get_by_label("sweep-00").check()
    expect(page.locator(".runs tr.chosen")).to_have_count(3)
    assert colors().items() > before.items()
    page.get_by_label("Draw all").check()
    expect(page.locator(".legend").first.locator("span")).to_have_count(12)
    assert colors().items() > before.items()
    assert len(set(colors().values())) == 12
    row = page.get_by_role("row", name="sweep-07")
    row.get_by_label("Hide").click()
    expect(shown).to_have_count(11)
    page.get_by_role("row", name="sweep-02").get_by_label("Pin").click()
    page.reload()
    expect(shown).to_have_count(11)
    expect(shown.first).to_have_text("sweep-02")
    page.get_by_role("button", name="With 1 hidden").click()
    row.get_by_label("Hide").click()
    page.get_by_role("radio", name="Live").click()
    expect(shown).to_have_count(0)
    page.goto("about:blank")
    for name in names:
        shutil.rmtree(folder / name)


def test_seeds_are_one_line_and_row_and_runs_are_filtered_by_recipe_and_setting(
    look: Watched,
) -> None:
    folder = Path(look_runs(look))
    own = (folder / "tiny" / "config.yaml").read_text().partition("\n")[2]
    accuracies = {"a-0": [0.2, 0.4, 0.6], "a-1": [0.4, 0.6], "b-0": [0.5]}
    for name, values in accuracies.items():
        (folder / name).mkdir()
        config = own.replace("name: tiny", f"name: {name}").replace("seed: 0", f"seed: {name[-1]}")
        rate = "8.0e-4" if name == "b-0" else "2.0e-4"
        config = re.sub("\n  lr: .*", f"\n  lr: {rate}", config)
        head = "# Written by winnow 0.1.0" + " from the recipe dapo" * (name != "b-0")
        (folder / name / "config.yaml").write_text(f"{head}\n{config}")
        lines = ({"step": n, "sampling/accuracy": v} for n, v in enumerate(values, 1))
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / name / "metrics.jsonl").write_text(text)
    query = "&".join(f"runs={name}" for name in accuracies)
    page = look.open(f"overview?{query}&seeds=mean&smooth=0&chart=accuracy")
    rows = page.locator(".runs tr.chosen")
    expect(rows.locator("td.name")).to_have_text(["▸a 2 seeds", "b-0"])
    expect(rows.first.locator("td.accuracy")).to_have_text("60.0 % ± 0.0 %")
    page.get_by_label("Seeds of a").click()
    expect(rows.locator("td.name")).to_have_text(["▾a 2 seeds", "a-0", "a-1", "b-0"])
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV").click()
    table = [line.split(",") for line in saved.value.path().read_text().splitlines()[1:]]
    assert [row[0] for row in table] == ['"a (2 seeds)"'] * 3 + ['"b-0"']
    figures = [float(row[3]) for row in table]
    assert figures == pytest.approx([0.3, 0.5, 0.6, 0.5])  # the last is of a-0 alone
    half = two_sided_bound(0.05, 1) * np.std([0.2, 0.4], ddof=1) / 2**0.5
    assert [float(row[4] or 0) for row in table] == pytest.approx([half, half, 0, 0], rel=1e-4)
    page.get_by_label("Group seeds").uncheck()
    shown = page.locator(".runs tbody td.name")
    for search, names in [
        ("lr=2e-4", ["a-0", "a-1"]),
        ("optim.lr>2e-4 accuracy<=0.5 b-", ["b-0"]),
        ("recipe!=dapo seed=0 step<3", ["b-0"]),
        ("OPTIM.LR=0.0002 a-1", ["a-1"]),
        ("lr=2e-5", []),
    ]:
        page.get_by_label("Search runs").fill(search)
        expect(shown).to_have_text(names)
    page.get_by_label("Search runs").fill("")
    page.get_by_role("combobox", name="Recipe").select_option("dapo")
    expect(shown).to_have_text(["a-0", "a-1"])
    page.goto("about:blank")
    for name in accuracies:
        shutil.rmtree(folder / name)


def test_all_settings_of_a_run_are_shown_beside_its_recipe_and_another_run(look: Watched) -> None:
    folder = Path(look_runs(look))
    shutil.copytree(folder / "tiny", folder / "other")
    text = (folder / "tiny" / "config.yaml").read_text()
    own = re.sub("\noptim:\n  lr: .*", "\noptim:\n  lr: 0.5", text)
    (folder / "other" / "config.yaml").write_text(own)
    page = look.open("config?run=tiny&other=other")
    changed = page.locator("tr.changed")
    changed.first.wait_for()
    steps = page.get_by_role("row", name="trainer.steps ")
    expect(steps.locator("td")).to_have_text(["trainer.steps", str(STEPS), str(STEPS), "20", "100"])
    expect(steps).to_have_class("changed")
    page.get_by_role("radio", name=re.compile("1 that differ from other")).click()
    expect(page.locator(".settings code")).to_have_text(["optim.lr"])
    expect(page.locator("td.apart")).to_have_text("0.5")
    page.get_by_role("radio", name=re.compile("^All")).click()
    page.get_by_label("Search settings").fill("peak learning rate")
    page.locator(".settings code").first.wait_for()
    assert "optim.lr" in page.locator(".settings code").all_inner_texts()
    assert page.evaluate(WIDER) == []
    page.goto("about:blank")
    shutil.rmtree(folder / "other")


def test_a_tooltip_names_the_lines_near_the_pointer_and_the_first_page_is_of_the_live_run(
    look: Watched,
) -> None:
    folder = Path(look_runs(look))
    names = [f"live-{n:02}" for n in range(12)]
    for n, name in enumerate(names):
        (folder / name).mkdir()
        text = (folder / "tiny" / "config.yaml").read_text()
        longer = re.sub(r"\n  steps: \d+\n", "\n  steps: 99\n", text.split("\ntrainer:")[1])
        head = text.split("\ntrainer:")[0]
        (folder / name / "config.yaml").write_text(f"{head}\ntrainer:{longer}")
        line = json.dumps({"step": 1, "sampling/accuracy": n / 11})
        (folder / name / "metrics.jsonl").write_text(f"{line}\n")
        if n != 4:
            os.utime(folder / name / "metrics.jsonl", (time.time() - 900 - n,) * 2)
    page = look.open("")
    expect(page.locator(".runs tr.chosen td.name")).to_have_text("live-04")
    page = look.open("overview?chart=accuracy&" + "&".join(f"runs={name}" for name in names))
    canvas = page.locator(".chart[aria-label='Accuracy in training'] canvas")
    canvas.wait_for()
    box = canvas.bounding_box()
    assert box
    canvas.hover(position={"x": box["width"] - 20, "y": 20})
    canvas.hover(position={"x": box["width"] - 18, "y": 22})
    expect(page.locator(".tip-row")).to_have_count(9)
    expect(page.locator(".tip-row").last).to_have_text("and 4 more, farther from the pointer")
    expect(page.locator(".tip-row span").first).to_have_text("live-11")
    page.goto("about:blank")
    for name in names:
        shutil.rmtree(folder / name)


def test_two_runs_are_compared_beside_their_curves(look: Watched) -> None:
    page = look.open("overview?runs=tiny")
    page.get_by_text("Choose two runs").wait_for()
    expect(page.locator(".badge").last).to_have_text("2")
    page.get_by_label("evil").check()
    page.get_by_text("No difference: A and B did equally well").wait_for()
    page.get_by_text("95 %: +0.0 to +0.0").wait_for()
    expect(page.locator(".settings code")).to_have_text(["evil"])
    page.get_by_role("button", name="Larger").first.click()
    page.wait_for_selector(".large canvas")
    with page.expect_download() as saved:
        page.get_by_role("button", name="CSV").click()
    rows = saved.value.path().read_text().splitlines()
    evaluations = list((Path(look_runs(look)) / "tiny" / "eval").iterdir())
    assert (rows[0], len(rows)) == ("run,figure,step,value", 1 + 2 * len(evaluations))
    with page.expect_download() as saved:
        page.get_by_role("button", name="PNG").click()
    assert saved.value.suggested_filename == "Held-out accuracy.png"
    assert saved.value.path().read_bytes().startswith(b"\x89PNG")
    page.get_by_role("radio", name="Tokens").click()
    assert "x=tokens" in page.url
    page.go_back()
    expect(page.locator(".large")).to_have_count(0)


def test_axes_have_round_numbers_and_no_label_twice(look: Watched) -> None:
    folder = Path(look_runs(look)) / "long"
    shutil.copytree(folder.with_name("tiny"), folder)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(5001):
            figures = {"accuracy": step / 5000, "tokens/trained": 7, "tokens/generated": 7}
            record = {f"sampling/{name}": value for name, value in figures.items()}
            record |= {"actor/entropy": 2e-5 + 1e-9 * step, "time/step_s": 72.2 + step % 3 / 10}
            file.write(json.dumps({"step": step, **record}) + "\n")

    def labels(chart: str) -> tuple[list[str], list[str]]:
        """The labels to the left of a chart, from below, and those beneath it."""
        canvas = page.locator(f".chart[aria-label='{chart}'] canvas")
        canvas.wait_for()
        drawn = canvas.evaluate("each => each.labels")
        bottom = max(y for _, y in drawn)
        left = sorted((-y, text) for text, y in drawn if y < bottom)
        return [text for _, text in left], [text for text, y in drawn if y == bottom]

    page = look.open("overview?runs=long")
    thousands = ["0", *(f"{n},000" for n in range(1, 6))]
    assert labels("Accuracy in training") == ([f"{n} %" for n in range(0, 101, 25)], thousands)
    assert labels("Entropy")[0] == [f"{n / 10}e−5" for n in (20, 22, 24, 26)]  # noqa: RUF001
    assert labels("Time of a step")[0] == [f"72.{n} s" for n in range(20, 41, 5)]
    page = look.open("tokens?run=long")
    assert labels("Tokens by use and step")[1] == [str(n) for n in range(0, 5001, 500)]
    page.goto("about:blank")
    shutil.rmtree(folder)


@pytest.mark.real
def test_thirty_runs_of_5000_steps_are_drawn_as_their_files_have_them(
    window: Watched, tmp_path: Path
) -> None:
    steps, names = 5000, [f"sweep-{n:02}" for n in range(30)]
    values = 0.01 * np.random.default_rng(0).random((30, steps)) + np.linspace(0, 1, steps)
    values[7, 1234] = 3.0  # one spike in 5,000 steps
    for n, name in enumerate(names):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text(f"optim: {{lr: {n + 1}}}\n")
        more = {f"score/parts/{each}/mean": 0.5 for each in range(20)}
        records = ({"step": at, "actor/entropy": value, **more}
                   for at, value in enumerate(values[n].tolist(), start=1))  # fmt: skip
        text = "".join(json.dumps(each) + "\n" for each in records)
        (tmp_path / name / "metrics.jsonl").write_text(text)

    def drawn(run: str) -> dict[float, NDArray[np.float64]]:
        """The curves of a run by width: 1 as it is, 2 smoothed."""
        page = window.open(f"overview?runs={run}&smooth=0.05")
        canvas = page.locator(".chart[aria-label=Entropy] canvas")
        canvas.wait_for()
        texts = [(text, y) for text, y in canvas.evaluate("each => each.labels")]
        bottom = max(y for _, y in texts)
        left = [(float(text), y) for text, y in texts if y < bottom]
        scale = np.polyfit([y for _, y in left], [value for value, _ in left], 1)
        lines = canvas.evaluate("each => each.lines")
        return {width: np.polyval(scale, ys) for width, ys in lines if ys and len(ys) > 50}

    window.faults.clear()
    window.page.set_default_timeout(120_000)
    with listening(Dashboard([str(tmp_path)])) as window.url:
        page = window.open("overview")
        shown = page.locator(".runs td.name")
        expect(shown).to_have_count(30, timeout=120_000)
        page.get_by_role("button", name="optim.lr").click()
        page.get_by_role("button", name="optim.lr ↑").click()
        expect(shown).to_have_text(names[::-1])
        page.get_by_role("row", name="sweep-03").get_by_label("Pin").click()
        page.get_by_role("row", name="sweep-05").get_by_label("Hide").click()
        expect(shown).to_have_count(29)
        expect(shown.first).to_have_text("sweep-03")
        page.get_by_label("Search runs").fill("optim.lr=8")
        expect(shown).to_have_text(["sweep-07"])
        page.get_by_label("Search runs").fill("")
        page.get_by_label("Draw all").check()
        expect(page.locator(".legend").first.locator("span")).to_have_count(29)
        # Each of the 29 as it is, and smoothed.
        page.wait_for_function(f"() => {DRAWN} === 58")
        page.locator(".chart[aria-label=Entropy]").hover()
        tip = page.locator(".tip:visible")
        expect(tip.locator(".tip-row")).to_have_count(
            9, timeout=120_000
        )  # eight, and how many more
        expect(tip.locator(".tip-row").first).to_contain_text(re.compile(r"steps \d+ to \d+"))
        raw = drawn("sweep-07")[1]
        assert (raw.max(), raw[-1]) == pytest.approx((3.0, values[7, -1]), abs=0.05)
        weights = (1 - 1 / (0.05 * steps)) ** np.arange(steps)[::-1]
        smoothed = float(np.average(values[0], weights=weights))
        assert smoothed < 0.96
        assert drawn("sweep-00")[2][-1] == pytest.approx(smoothed, abs=0.015)
        page.get_by_role("button", name="Larger").nth(4).click()
        with page.expect_download() as saved:
            page.get_by_role("button", name="CSV").click()
        rows = [line.split(",") for line in saved.value.path().read_text().splitlines()[1:]]
        assert [int(row[2]) for row in rows] == [*range(1, steps + 1)]
        assert [float(row[3]) for row in rows] == pytest.approx(values[0].tolist(), abs=1e-5)
        page.get_by_role("link", name="System", exact=True).click()
        page.get_by_text("No warnings").wait_for()
        page.goto("about:blank")
    window.page.set_default_timeout(20_000)
    assert window.faults == []


def test_what_a_model_wrote_is_shown_as_text_wherever_it_stands(look: Watched) -> None:
    name = "evil%20%3Cb%3Erun%3C"
    for path in ("answers?step=2&", "system?level=all&", "overview?runs=tiny&runs=" + name + "&"):
        page = look.open(f"{path}run={name}")
        page.get_by_text("onerror").first.wait_for()
        page.wait_for_timeout(100)
        assert page.title() != "owned"
        assert page.locator("main img").count() == 0
        assert page.locator("main script").count() == 0
    page = look.open(f"answers?step=2&run={name}")
    assert page.locator("pre.text").last.inner_text() == EVIL


def test_alarms_are_shown_with_their_remedy_and_lead_to_the_answers(look: Watched) -> None:
    page = look.open("alarms?run=tiny")
    page.get_by_text(re.compile(f"findings? in {STEPS} steps")).wait_for()
    assert page.get_by_role("region", name="reward_flat_wrong").count() == 0
    folder = Path(look_runs(look)) / "tiny"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    flat = {"score/task_reward/min": -1, "score/task_reward/max": -1, "sampling/accuracy": 0}
    before = (folder / "metrics.jsonl").read_bytes()
    sick = "".join(json.dumps({**line, **flat}) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(sick)
    found = page.get_by_role("region", name="reward_flat_wrong")  # without loading it again
    for text in ("every answer of the last 5 steps has the reward -1", "winnow reward try"):
        found.get_by_text(text).wait_for()
    found.get_by_role("link", name=f"Answers of step {STEPS}").click()
    expect(page.get_by_label("Step", exact=True)).to_have_value(str(STEPS))
    assert "filter=wrong" in page.url
    page.keyboard.press("6")
    found.wait_for()
    page.goto("about:blank")
    (folder / "metrics.jsonl").write_bytes(before)


def test_a_run_is_planned_on_other_gpus_by_its_page(look: Watched) -> None:
    page = look.open("plan?run=tiny")
    page.set_default_timeout(300_000)
    nodes, start = page.get_by_label("Nodes"), page.get_by_role("button", name="Plan", exact=True)
    nodes.fill("2")
    page.get_by_label("Kind of GPU").select_option("l4")
    page.get_by_label("Price per GPU-hour").fill("2")
    page.get_by_role("radio", name="The run's lengths").click()
    start.click()
    page.get_by_text("running one of 16 ranks on fake tensors").wait_for()
    page.get_by_role("region", name="It fits").wait_for()
    expect(nodes).to_have_value("2")
    for name in ("lockstep", "checkpoint_seconds", "rows", "gpu_hours", "cost"):
        page.get_by_role("cell", name=name, exact=True).wait_for()
    for column in ("at least", "expected"):
        page.get_by_role("columnheader", name=column, exact=True).first.wait_for()
        bar = re.compile(rf"^{column}: .*policy update .* rollout_seconds")
        page.get_by_role("img", name=bar).wait_for()
    hours = page.get_by_role("row", name=re.compile("^gpu_hours"))
    texts = hours.get_by_role("cell").all_inner_texts()[1:]
    least, expected = (float(text.replace(" e\u2212", "e-")) for text in texts)
    assert 0 < least < expected
    assert page.get_by_role("list", name="roles_gib").get_by_role("listitem").count() > 3
    assert page.evaluate(WIDER) == []


def test_the_page_says_when_the_dashboard_is_gone(window: Watched, runs: Path) -> None:
    with listening(Dashboard([str(runs)])) as window.url:
        page = window.open("overview?runs=tiny")
        page.wait_for_selector(".connection.live")
    page.wait_for_selector(".connection.lost")
    page.keyboard.press("5")
    page.get_by_text("does not answer").first.wait_for()
