"""Routes of the dashboard: who may ask, what is told of damaged files, and what changes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from starlette.testclient import TestClient
from tests.integration.dashboard.conftest import answer, group, write_step
from tests.services import listening

from winnow.dashboard.metrics_columns import MetricsColumns
from winnow.dashboard.pages import Pages
from winnow.dashboard.runs import RunSet
from winnow.dashboard.service import STATIC, Dashboard
from winnow.observe.files import RunFolder
from winnow.observe.rollouts import RolloutGroup
from winnow.views.diagnosis import RULES
from winnow.views.doctor import diagnose_run

MakeRun = Callable[[str], RunFolder]
ROOT = Path(__file__).parents[3]
FRONTEND = ROOT / "frontend"
HERE = "http://127.0.0.1"


def client(*places: Path, token: str | None = None, host: str = HERE) -> TestClient:
    return TestClient(Dashboard([str(each) for each in places], token).app, base_url=host)


def get(asked: httpx.Client, path: str) -> Any:
    answer = asked.get(path)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_runs_are_listed_with_their_last_figures(make_run: MakeRun) -> None:
    folder = make_run("a")
    (folder.path.parent / "b").mkdir()
    (folder.path.parent / "b" / "config.yaml").write_text("run: [")
    (folder.path.parent / "loop").symlink_to("loop")
    a, b = get(client(folder.path.parent), "/api/runs")["runs"]
    assert (a["name"], a["step"], a["steps"], a["state"]) == ("a", 4, 4, "done")
    assert (a["accuracy"], a["held_out"], a["problem"]) == (1.0, {"sums": 0.5}, None)
    assert b["problem"].startswith("recipe config.yaml of b, line 1: ")


def test_a_live_run_has_a_number_of_alarms_and_the_time_left(make_run: MakeRun) -> None:
    folder = make_run("a")
    asked = client(folder.path)

    def told() -> list[float | None]:
        (row,) = get(asked, "/api/runs")["runs"]
        return [row[name] for name in ("alarms", "step_s", "left_s")]

    assert told() == [0, 1.5, None]  # it is done
    folder.config.write_text(folder.config.read_text().replace("steps: 4", "steps: 9"))
    folder.findings.write_text("{}\n{}\n")
    with folder.metrics.open("a") as file:
        file.write('{"step": 5, "time/step_s": 4.0}\n')
    assert told() == [2, 2.0, 8.0]  # 4 steps of (4 * 1.5 + 4) / 5 seconds
    os.utime(folder.metrics, (time.time() - 200,) * 2)
    assert told() == [2, 2.0, None]
    pages = Pages(RunSet([str(folder.path)]))
    before = pages.folder_stamps()
    folder.usage.write_text('{"time_s": 1, "over_s": 2}\n')  # which a run that hangs writes, too
    assert told() == [2, 2.0, None]
    assert pages.folder_stamps() == before
    folder.metrics.unlink()
    folder.log.write_text("")  # it is live, in its warm-up
    assert told() == [2, None, None]


def test_usage_over_time_comes_as_columns_without_its_damaged_lines(make_run: MakeRun) -> None:
    folder = make_run("a")
    assert get(client(folder.path), "/api/run/system?run=a")["usage"] == {}
    lines = (
        '{"time_s": 8, "over_s": 2}',
        "{",
        '{"time_s": 10, "over_s": 2, "gpu/0/busy": 0.5}',
        '{"time',
    )
    folder.usage.write_text("\n".join(lines))
    usage = get(client(folder.path), "/api/run/system?run=a")["usage"]
    assert usage == {"time_s": [8, 10], "over_s": [2, 2], "gpu/0/busy": [None, 0.5]}


def test_metrics_are_explained_in_the_words_of_the_list(make_run: MakeRun) -> None:
    names = "actor/clip_low", "actor/clip_high", "no/such", "eval/a/b/pass@1"
    asked = "&".join(f"names={name}" for name in names)
    rows = get(client(make_run("a").path), f"/api/words?{asked}")
    assert [row["name"] for row in rows] == ["actor/clip_{low,high}", "eval/SOURCE/pass@K"]
    assert rows[0]["healthy"].startswith("above 0 with several updates")


def test_settings_that_differ_are_listed_by_their_full_names(make_run: MakeRun) -> None:
    a, b = make_run("a"), make_run("b")
    b.config.write_text(b.config.read_text().replace("0.001", "0.002") + "new: {x: [1, 2]}\n")
    asked = client(a.path, b.path)
    found = get(asked, "/api/difference?a=a&b=b")
    assert found == [
        {"key": "run.name", "a": "a", "b": "b"},
        {"key": "optim.lr", "a": 0.001, "b": 0.002},
        {"key": "new.x", "a": None, "b": "[1, 2]"},
    ]
    assert [each["settings"] for each in get(asked, "/api/runs")["runs"]] == [
        {"optim.lr": 0.001, "new.x": None}, {"optim.lr": 0.002, "new.x": "[1, 2]"},
    ]  # fmt: skip


def test_runs_that_differ_in_the_seed_alone_are_of_one_group(make_run: MakeRun) -> None:
    a, b, c = (make_run(name) for name in "abc")
    head = "# Written by winnow 0.1.0"
    a.save_config(f"{head} from the recipe dapo\n{a.config.read_text()}")
    b.save_config(b.config.read_text().replace("seed: 3", "seed: 4"))
    c.save_config(f"{head}\n{c.config.read_text().replace('0.001', '0.002')}")
    rows = get(client(a.path.parent), "/api/runs")["runs"]
    assert [row["recipe"] for row in rows] == ["dapo", None, None]
    first, *others = (row["group"] for row in rows)
    assert [each == first for each in others] == [True, False]


def test_settings_stand_beside_their_defaults_and_the_recipe_s(make_run: MakeRun) -> None:
    folder = make_run("a")
    assert get(client(folder.path), "/api/run/settings?run=a")["recipe_values"] is None
    own = folder.config.read_text()
    folder.save_config(f"# Written by winnow 0.1.0 from the recipe dapo\n{own}new: {{x: 1}}\n")
    told = get(client(folder.path), "/api/run/settings?run=a")
    kinds = "values", "recipe_values", "defaults"
    assert [told[kind]["optim.lr"] for kind in kinds] == [0.001, 0.0004, 1e-6]
    assert told["meanings"]["optim.lr"].startswith("Peak learning rate")
    assert [told[kind].get("new.x") for kind in (*kinds, "meanings")] == [1, None, None, ""]
    assert told["recipe"] == "dapo"


@pytest.mark.parametrize(
    ("path", "status", "told"),
    [
        ("run/steps?run=nobody", 404, "run nobody does not exist"),
        ("run/steps?run=" + quote("../../etc", safe=""), 404, "run ../../etc does not exist"),
        ("series?runs=a&runs=..", 404, "run .. does not exist"),
        ("run/groups?run=a&kind=training&step=99", 422, "a has no rollouts/step-99.parquet"),
        ("run/groups?run=a&kind=../..&step=1", 422, "kind must be one of training, held_out"),
        ("run/groups?run=a&kind=training&step=1/../2", 422, "step must be an integer"),
        ("run/groups?run=a&kind=training", 422, "step is missing"),
        ("run/group?run=a&kind=training&step=1&group=99999", 422, "has no group 99999"),
        ("run/timeline?run=a", 422, "a has no trace.json"),
        ("comparison?a=a&b=nobody", 404, "run nobody does not exist"),
    ],
)
def test_what_is_not_there_is_told_in_a_line(
    path: str, status: int, told: str, make_run: MakeRun
) -> None:
    answer = client(make_run("a").path).get(f"/api/{path}")
    assert answer.status_code == status
    assert told in answer.json()["error"]


@pytest.mark.parametrize("path", ["/../pages.py", "/%2e%2e/pages.py", "/assets/../../runs.py"])
def test_no_file_beside_the_front_end_is_given_out(path: str, make_run: MakeRun) -> None:
    assert client(make_run("a").path).get(path).status_code == 404


PAGES = (
    *("series?runs=odd&names=*", "names?runs=odd", "difference?a=a&b=odd", "comparison?a=a&b=odd"),
    *("run/steps?run=odd", "run/groups?run=odd&kind=training&step=2", "run/spread?run=odd"),
    "run/group?run=odd&kind=training&step=2&group=2",
    "run/search?run=odd&kind=training&step=2&q=x",
    *("run/prompt?run=odd&kind=training&uid=row-1", "run/timeline?run=odd", "run/system?run=odd"),
    "run/alarms?run=odd",
)
NAMES = ("metrics.jsonl", "config.yaml", "trace.json", "log.txt", "rollouts/step-2.parquet",
         "tokenizer.json")  # fmt: skip
BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{after}: &{after} [{', '.join([f'*{each}'] * 9)}]\n"
    for each, after in zip("abcdefghi", "bcdefghij", strict=True)
)
PIPE = None
"""In the place of a file: a pipe that nobody writes to."""


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("name", "content"), [
    *((name, content) for name in NAMES
      for content in (PIPE, b"\x00\xff{[", b'{"step": "x"}\n[]\n')),
    *(("config.yaml", each.encode()) for each in (
        "[" * 60_000, BOMB, "a: &a [*a]",
        "trainer: {steps: [1]}\nrollout: {max_response_tokens: x}",
        "trainer: {steps: .nan}", "a: " + "[1, " * 60_000, "rollout: {max_response_tokens: -1}")),
    ("metrics.jsonl", b'{"step":1,"a":' + b"[" * 200_000 + b"\n"),
    ("metrics.jsonl", b'{"step":1,"a":1' + b"0" * 400 + b'}\n{"step":2,"non_finite":{"a":[]}}\n'),
    ("metrics.jsonl", b'{"step":1,"time/step_s":1e308}\n{"step":2,"time/step_s":1e308}\n'),
    ("trace.json", b'{"name":"step 1","ph":"i","ts":5}\n{"ph":"X"}\n'
                   b'{"name":"step 2","ph":"i","ts":9}\n'),
    ("rollouts/step-2.parquet", b"PAR1"),
])  # fmt: skip
def test_an_odd_file_costs_its_own_run_a_page_and_no_other_run(
    name: str, content: bytes | None, make_run: MakeRun
) -> None:
    make_run("a")
    odd = make_run("odd").path
    (odd / name).unlink(missing_ok=True)
    if content is None:
        os.mkfifo(odd / name)
    else:
        (odd / name).write_bytes(content)
    asked = client(odd.parent)
    healthy, row = get(asked, "/api/runs")["runs"]
    assert (healthy["name"], healthy["step"], healthy["problem"]) == ("a", 4, None)
    assert row["problem"] is None or name in row["problem"]
    for page in PAGES:
        reply = asked.get(f"/api/{page}")
        assert reply.status_code in (200, 422), f"{page}: {reply.text}"
        if reply.status_code == 422:
            line = reply.json()["error"]
            assert name.split("/")[-1] in line or "no group" in line or "has no" in line
            assert "\n" not in line


def test_the_run_shown_first_is_live_or_has_a_record_and_others_say_why_they_have_none(
    make_run: MakeRun,
) -> None:
    begun = {name: make_run(name) for name in ("a", "b", "c", "d")}
    for age, folder in enumerate(reversed(begun.values()), 1):
        folder.config.write_text(folder.config.read_text().replace("steps: 4", "steps: 9"))
        folder.log.write_text("2026-01-02 03:04:05,678 INFO winnow.x: warm-up: step 90 of 400\n")
        for path in (folder.log, folder.metrics):
            os.utime(path, (time.time() - 200 * age,) * 2)
    for name in ("a", "d"):
        begun[name].metrics.unlink()
    with begun["a"].config.open("a") as config:
        config.write("warm_start: {name: sft, steps: 400}\n")
    asked = client(begun["a"].path.parent)
    found = get(asked, "/api/runs")
    assert found["first"] == "c"
    last = "; the last line of its log: warm-up: step 90 of 400"
    assert [each["waiting"] for each in found["runs"]] == [
        "a stopped in its warm-up of 400 steps" + last, None, None,
        "d stopped in its first step" + last,
    ]  # fmt: skip
    begun["a"].log.touch()
    found = get(asked, "/api/runs")
    assert found["first"] == "a"
    assert found["runs"][0]["waiting"] == "a is still in its warm-up of 400 steps" + last


def test_pages_that_stay_open_leave_room_for_others(make_run: MakeRun) -> None:
    dashboard = Dashboard([str(make_run("a").path)])
    dashboard.max_connections = 6
    with listening(dashboard) as url, httpx.Client(trust_env=False, base_url=url) as asked:
        with ExitStack() as opened:
            pages = [opened.enter_context(asked.stream("GET", "/api/events")) for _ in range(3)]
            lines = [page.iter_lines() for page in pages]
            assert [next(each)[:6] for each in lines] == ["data: "] * 3
            refused = asked.get("/api/events")
            assert refused.status_code == 503
            assert refused.json()["error"].startswith("3 pages are open, which")
            assert get(asked, "/api/runs")["runs"]
        while dashboard._streams:  # until it notices
            time.sleep(0.05)


def test_a_run_named_many_times_is_read_once(
    make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, read = client(make_run("a").path), []
    curves = MetricsColumns.curves
    monkeypatch.setattr(
        MetricsColumns, "curves", lambda self, *more: (read.append(more), curves(self, *more))[1]
    )
    assert list(get(asked, "/api/series?names=*&points=2" + "&runs=a" * 3000)) == ["a"]
    assert [more for more in read if more[0]] == [(["*"], 2)]  # 4 steps, of which 2 share a point


def test_alarms_are_those_of_the_doctor_while_a_run_grows_and_after_it_was_cut_back(
    make_run: MakeRun,
) -> None:
    folder = make_run("a")
    folder.metrics.write_text('{"step": 0}\n' + folder.metrics.read_text())
    asked = client(folder.path)
    flat = {"score/task_reward/min": -1, "score/task_reward/max": -1, "sampling/accuracy": 0}

    def write(step: int) -> None:
        with folder.metrics.open("a") as file:
            file.write(json.dumps({"step": step, **flat, "scoring/failed": step}) + "\n")

    def told() -> list[Any]:
        page, (steps, by_doctor, needs) = get(asked, "/api/run/alarms?run=a"), diagnose_run(folder)
        found = page["findings"]
        assert (page["steps"], found) == (steps, [asdict(each) for each in by_doctor])
        assert {rule["name"]: rule["need"] for rule in page["rules"] if rule["need"]} == needs
        assert len(page["rules"]) == len(RULES)
        return [(each["name"], each["first_step"], each["last_step"]) for each in found]

    assert told() == []
    seen = []
    for step in range(5, 12):
        write(step)
        seen.append(told())
    assert seen[0] == [("reward_flat_wrong", 5, 5), ("scoring_fails", 5, 5)]
    assert seen[-1] == [("reward_flat_wrong", 5, 11), ("scoring_fails", 5, 11)]
    evidence = get(asked, "/api/run/alarms?run=a")["findings"][0]["evidence"]
    assert "the last 5 steps has the reward -1" in evidence
    assert "wrong groups" not in evidence  # the newest answers have none
    wrong = [RolloutGroup(group(1, "row-9", answer(1, 0.0), answer(1, 0.0)), "all_wrong")]
    write_step(folder.path, 12, wrong, "rollouts")
    assert told()[:2] == [("reward_flat_wrong", 5, 12), ("filtered", 12, 12)]
    (folder.rollouts / "step-12.parquet").unlink()
    assert told() == seen[-1]
    lines = folder.metrics.read_text().splitlines(keepends=True)
    folder.metrics.write_text("".join(lines[:4]))
    assert told() == []


def test_without_a_token_only_this_machine_is_answered(make_run: MakeRun) -> None:
    run = make_run("a").path
    assert client(run, host="http://localhost:8040").get("/api/runs").status_code == 200
    assert client(run, host="http://[::1]").get("/api/runs").status_code == 200
    for path in ("/", "/api/runs"):
        assert client(run, host="http://evil.example").get(path).status_code == 421
        assert client(run).post(path).status_code == 405


def test_with_a_token_each_client_needs_it(make_run: MakeRun) -> None:
    asked = client(make_run("a").path, token="s3cret", host="http://gpu.example")
    assert asked.get("/api/runs").status_code == 401
    assert asked.get("/api/runs", headers={"Authorization": "Bearer s3cret"}).status_code == 200
    assert asked.get("/api/runs", headers={"Cookie": "winnow-token=no"}).status_code == 401
    assert "password" in asked.get("/").text
    assert "Wrong token" in asked.get("/?token=wrong").text
    opened = asked.get("/?token=s3cret", follow_redirects=False)
    assert (opened.status_code, opened.headers["location"]) == (303, "/")
    assert "httponly" in opened.headers["set-cookie"].lower()
    assert get(asked, "/api/runs")["runs"]  # by the cookie
    assert "s3cret" not in asked.get("/").text


def test_each_reply_forbids_what_the_pages_do_not_need(make_run: MakeRun) -> None:
    asked = client(make_run("a").path)
    for path in ("/", "/api/runs", "/api/run/steps?run=x", "/icon.svg"):
        headers = asked.get(path).headers
        policy = dict(each.strip().split(" ", 1) for each in
                      headers["content-security-policy"].split(";"))  # fmt: skip
        assert policy["default-src"] == "'none'"
        assert policy["script-src"] == policy["style-src"] == policy["connect-src"] == "'self'"
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"


def test_an_image_is_served_by_its_digest_and_no_other_file_is(make_run: MakeRun) -> None:
    run = make_run("a").path
    (run / "images").mkdir()
    good, bad = hashlib.sha256(b"png").hexdigest(), "0" * 64
    (run / f"images/{good}.png").write_bytes(b"png")
    (run / f"images/{bad}.png").symlink_to(run / "config.yaml")
    asked = client(run, token="s3cret", host="http://gpu.example")
    where = "/api/run/image?run=a&name=" + quote(f"images/{good}.png", safe="")
    assert asked.get(where).status_code == 401
    asked.headers["Authorization"] = "Bearer s3cret"
    image = asked.get(where)
    assert (image.content, image.headers["content-type"]) == (b"png", "image/png")
    assert image.headers["cache-control"] == "private, max-age=31536000, immutable"
    assert image.headers["x-content-type-options"] == "nosniff"
    others = (
        *("config.yaml", "../config.yaml", "images/../config.yaml", f"{good}.png", ""),
        *(
            f"images/{good}.png/",
            f"images/{good}.png\n",
            f"/images/{good}.png",
            f"images/{bad}.png",
        ),
        f"images/{'1' * 64}.png",
    )
    for name in others:
        refused = asked.get("/api/run/image?run=a&name=" + quote(name, safe=""))
        assert (refused.status_code, refused.headers["cache-control"]) == (422, "no-store"), name
        assert [*refused.json()] == ["error"]


def test_events_name_the_run_that_changed(make_run: MakeRun) -> None:
    a = make_run("a")
    make_run("b")

    async def told() -> list[Any]:
        dashboard = Dashboard([str(a.path.parent)])
        events = dashboard._change_events()
        found = [json.loads((await anext(events)).removeprefix("data: "))]
        with a.metrics.open("a") as file:
            file.write('{"step":5}\n')
        found.append(json.loads((await anext(events)).removeprefix("data: ")))
        dashboard.close()
        assert [each async for each in events] == []
        return found

    assert asyncio.run(asyncio.wait_for(told(), 60)) == [
        {"changed": [], "gone": []}, {"changed": ["a"], "gone": []},
    ]  # fmt: skip


def test_the_front_end_was_built_of_these_sources() -> None:
    single = ["index.html", "package.json", "package-lock.json", "tsconfig.json", "vite.config.ts"]
    found = [path for folder in ("src", "public") for path in (FRONTEND / folder).rglob("*")]
    names = [str(path.relative_to(FRONTEND)) for path in found if path.is_file()]
    digest = hashlib.sha256()
    for name in sorted([*single, *names]):
        digest.update(f"{name}\n".encode() + (FRONTEND / name).read_bytes())
    built = (STATIC / "sources.sha256").read_text().strip()
    assert built == digest.hexdigest(), "run `make dashboard`, and commit what it builds"


def test_the_lock_of_the_front_end_names_no_address_and_the_bundle_its_licences() -> None:
    assert '"resolved"' not in (FRONTEND / "package-lock.json").read_text()
    told = (STATIC / "LICENSES.txt").read_text()
    needed = json.loads((FRONTEND / "package.json").read_text())["dependencies"]
    for name in (*needed, "zrender", "tslib"):
        assert f"\n{name} " in f"\n{told}", name
