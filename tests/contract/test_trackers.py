"""Trackers keep a contract: what each real package has kept, offline, is read back.

Weights & Biases and SwanLab write a file of protocol buffers in LevelDB's log format for a later
upload; the others write what their own page shows.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from tests.recipes import recipe

from winnow.config.root import Config, TrackerName
from winnow.models.vision import encode_png
from winnow.observe.files import RunFolder
from winnow.observe.rollouts import RolloutGroup, write_rollouts
from winnow.observe.sinks import RunInfo, Sinks
from winnow.observe.trackers import make_trackers
from winnow.types import Answer, Group, Prompt, Score, Segment, Trajectory, VersionSpan

STEPS, PLANNED = 4, 9
"""The last step, when the data is used up, and the one that was planned."""
HELD_OUT = "eval/openai/gsm8k/avg@4"
RECORDS = {
    0: {HELD_OUT: 0.25},
    1: {"score/reward/mean": -0.5, "sampling/groups/trained": 8},
    2: {"score/reward/mean": math.nan, "sampling/groups/trained": 7},
    3: {"score/reward/mean": 0.5, "sampling/groups/trained": 6, HELD_OUT: 0.5},
    4: {"score/reward/mean": 0.75, "sampling/groups/trained": 5},
}
IMAGES = tuple(encode_png(np.full((size, 8, 3), 90, np.uint8), 8) for size in (8, 16))
"""The first group with text shows none of them, the second both."""
PROMPT, ANSWER = "What is 2 | 3?\n<think>", "a \\frac{1}{2} | b"
OPTIONS = (
    *("observe.tracking.project=digits", "observe.tracking.group=seeds", "optim.lr=0.003"),
    *("observe.tracking.tags=[first,second]", "observe.tracking.answers=3"),
    *("observe.wandb.mode=offline", "observe.swanlab.mode=offline"),
    "observe.tracking.answers_every=4",
)


@dataclass
class Seen:
    """What a tracker has of a run."""

    curves: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    """The recipe, flat."""
    tables: dict[tuple[str, int], str] = field(default_factory=dict)
    """Sample answers by name and step, as one text."""
    about: str = ""
    """Names, group and tags."""
    ends: list[str] = field(default_factory=list)
    """How each part of the run ended there, where it keeps that."""

    def add(self, name: str, step: int, value: float) -> None:
        """Note a point of a curve."""
        self.curves.setdefault(name, []).append((step, value))


def records_in(file: Path, kind: type[Any]) -> Iterator[Any]:
    """Read the protocol buffers of a file in LevelDB's log format."""
    content, place, block, part = file.read_bytes(), 7, 32768, b""
    while place + 7 <= len(content):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, state = struct.unpack("<IHB", content[place : place + 7])
        part += content[place + 7 : place + 7 + length]
        place += 7 + length
        if state in (1, 4):
            yield kind.FromString(part)
            part = b""


def flat(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a tree by their keys."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from flat(inner, f"{key}.{name}" if key else name)
    else:
        yield key, value


def of_tensorboard(run: RunFolder, known: str) -> Seen:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events, seen = EventAccumulator(known, size_guidance={"tensors": 0}), Seen(about=known)
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            seen.add(name, event.step, event.value)
    for name in events.Tags()["tensors"]:
        for event in events.Tensors(name):
            text = event.tensor_proto.string_val[0].decode()
            seen.tables[name.removesuffix("/text_summary"), event.step] = text
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    data = events.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    for key, value in HParamsPluginData.FromString(data).session_start_info.hparams.items():
        seen.settings[key] = getattr(value, value.WhichOneof("kind"))
    return seen


def of_wandb(run: RunFolder, known: str) -> Seen:
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record

    wandb.teardown()  # as at a process's end: waits until its own process has written everything
    seen = Seen()
    for file in sorted(run.trackers.glob("wandb/offline-run-*/*.wandb")):
        assert file.name == f"run-{known}.wandb"
        for record in records_in(file, Record):
            if record.HasField("run"):
                told = record.run
                assert told.run_id == known
                seen.about = f"{told.project} {told.display_name} {told.run_group} {told.tags}"
                tree = {item.key: json.loads(item.value_json) for item in told.config.update}
                seen.settings = dict(flat(tree))
            if record.HasField("exit"):
                seen.ends.append(str(record.exit.exit_code))
            if record.HasField("history"):
                step = record.history.step.num
                for item in record.history.item:
                    name, *part = item.nested_key
                    value = json.loads(item.value_json)
                    if part == ["path"]:
                        table = json.loads((file.parent / "files" / value).read_text())
                        seen.tables[name, step] = str(table)
                    elif not part and name[0] != "_":
                        seen.add(name, step, value)
    return seen


def of_mlflow(run: RunFolder, known: str) -> Seen:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.path.parent}/mlflow/mlflow.db")
    found = client.get_run(known)
    experiment = client.get_experiment(found.info.experiment_id).name
    about = f"{experiment} {found.info.run_name} {found.data.tags} {found.info.status}"
    seen = Seen(about=about, settings=dict(found.data.params), ends=[found.info.status])
    for name in found.data.metrics:
        for point in client.get_metric_history(known, name):
            seen.add(name.replace("_at_", "@"), point.step, point.value)
    for listed in json.loads(found.data.tags["mlflow.loggedArtifacts"]):
        name, _, step = listed["path"].removesuffix(".json").rpartition("-")
        file = found.info.artifact_uri.removeprefix("file://") + "/" + listed["path"]
        seen.tables[name, int(step)] = str(json.loads(Path(file).read_text()))
    return seen


def of_trackio(run: RunFolder, known: str) -> Seen:
    seen = Seen()
    with sqlite3.connect(Path(os.environ["TRACKIO_DIR"]) / "digits.db") as rows:
        for name, step, text in rows.execute(
            "SELECT run_name, step, metrics FROM metrics WHERE run_id = ?", [known]
        ):
            seen.about = f"digits {name}"
            for key, value in json.loads(text).items():
                if isinstance(value, dict):
                    seen.tables[key, step] = str(value["_value"])
                else:
                    seen.add(key, step, float(value))
        ((text,),) = rows.execute("SELECT config FROM configs WHERE run_id = ?", [known])
    seen.settings = dict(flat(json.loads(text)))
    seen.about += str(seen.settings)
    return seen


def of_swanlab(run: RunFolder, known: str) -> Seen:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    seen = Seen()
    for file in sorted(run.trackers.glob("swanlab/run-*/*.swanlab")):
        assert file.name == f"run-{known}.swanlab"
        texts = [*(file.parent / "media").rglob("*.txt")]
        for record in records_in(file, Record):
            if record.HasField("start"):
                told = record.start
                assert told.id == known
                seen.about = f"{told.project} {told.name} {told.group} {[*told.tags]}"
            if record.HasField("finish"):
                seen.ends.append(str(record.finish.state))
            if record.HasField("scalar"):
                seen.add(record.scalar.key, record.scalar.step, record.scalar.value.number)
            if record.HasField("media"):
                names = {item.filename for item in record.media.value.items}
                shown = "".join(path.read_text() for path in texts if path.name in names)
                seen.tables[record.media.key, record.media.step] = shown
        config = yaml.safe_load((file.parent / "files/config.yaml").read_text())
        seen.settings = dict(flat({key: entry["value"] for key, entry in config.items()}))
    return seen


READERS: dict[str, Callable[[RunFolder, str], Seen]] = {
    "tensorboard": of_tensorboard,
    "wandb": of_wandb,
    "mlflow": of_mlflow,
    "trackio": of_trackio,
    "swanlab": of_swanlab,
}


@dataclass
class Tracked:
    """A run that was tracked, stopped after step 3, and resumed from its checkpoint of step 2."""

    folder: RunFolder
    name: str
    ids: list[str]
    """The tracker's run, in each of the two parts."""
    first: Seen
    seen: Seen
    said: list[str]


def answer(number: int) -> Answer:
    ids = np.arange(3)
    segment = Segment(ids, np.full(3, -0.5, dtype=np.float32), (VersionSpan(0, 3),))
    reply = Segment(ids, np.zeros(3, np.float32), (), "environment")
    segments = (replace(segment, reward=0.75), reply, segment) if number == 1 else (segment,)
    return Answer(Trajectory(segments, "stop"), Score(number / 8, 0.0, {"task": number / 4}, {}))


def keep_answers(folder: RunFolder) -> None:
    """Write the answers of a step and of an evaluation: two groups with text, one without."""
    groups = [
        Group(
            number,
            Prompt(
                *(f"row-{number}", np.arange(4), f"{number} {PROMPT}", "sums", "1"),
                images=IMAGES[:number],
            ),
            tuple(answer(4 * number + index) for index in range(3)),
        )
        for number in range(3)
    ]
    for step in RECORDS:
        for file in (folder.rollout_file(step), folder.eval_file(step)):
            write_rollouts(
                file,
                step,
                [RolloutGroup(group, "held_out") for group in groups],
                version=0,
                text_groups={0, 2},
                decode=lambda ids: ANSWER,
            )


def track(config: Config, folder: RunFolder, first: int, last: int) -> tuple[str, list[str]]:
    """Tell the tracker of steps, as a run does; its id for the run, and what it had to say."""
    said: list[str] = []
    sinks = Sinks(make_trackers(config, folder, said.append))
    sinks.start(RunInfo(folder.name, PLANNED, first))
    for step in range(first if first > 1 else 0, last + 1):
        sinks.log(step, RECORDS[step])
    if last == STEPS:
        sinks.mark_complete()
    sinks.close()
    (name,) = config.observe.trackers
    return json.loads((folder.trackers / f"{name}.json").read_text())["id"], said


@pytest.fixture(scope="module", params=get_args(TrackerName))
def tracked(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, trackio_folder: Path
) -> Tracked:
    name: str = request.param
    home = tmp_path_factory.mktemp(name)
    with pytest.MonkeyPatch.context() as patch:
        for variable in ("MLFLOW_TRACKING_URI", "WANDB_ERROR_REPORTING"):
            patch.delenv(variable, raising=False)
        config = recipe("quickstart", *OPTIONS, f"observe.trackers=[{name}]")
        folder = RunFolder.create(home, "seed-1", "quickstart")
        keep_answers(folder)
        known, said = track(config, folder, 1, 3)
        before = READERS[name](folder, known)
        if name == "wandb":  # names the folder of a part by the second
            time.sleep(1.0)
        again, more = track(config, folder, 3, STEPS)
        return Tracked(
            folder, name, [known, again], before, READERS[name](folder, again), said + more
        )


def points(seen: Seen, name: str) -> list[tuple[int, float]]:
    return sorted(seen.curves[name])


def test_every_figure_of_every_step_is_a_point_of_a_curve(tracked: Tracked) -> None:
    for name in ("score/reward/mean", "sampling/groups/trained", HELD_OUT):
        wanted = [(step, record[name]) for step, record in RECORDS.items() if name in record]
        found = points(tracked.seen, name)
        assert [step for step, _ in found] == [step for step, _ in wanted], name
        assert np.allclose([v for _, v in found], [v for _, v in wanted], equal_nan=True), name


def test_a_resumed_run_goes_on_in_the_same_run_and_doubles_no_step(tracked: Tracked) -> None:
    assert len({*tracked.ids}) == 1
    before = [step for step, _ in points(tracked.first, "sampling/groups/trained")]
    after = [step for step, _ in points(tracked.seen, "sampling/groups/trained")]
    assert (before, after) == ([1, 2, 3], [1, 2, 3, 4])


def test_the_resolved_recipe_is_there_as_hyper_parameters(tracked: Tracked) -> None:
    settings = tracked.seen.settings
    assert float(settings["optim.lr"]) == 0.003
    assert settings["algorithm.advantage.name"] == "grpo"
    assert len(settings) > 150


def test_sample_answers_show_prompt_answer_parts_and_score(tracked: Tracked) -> None:
    tables = {key: text for key, text in tracked.seen.tables.items() if key[0] != "recipe"}
    assert {*tables} == {
        ("answers/train", 1),
        ("answers/train", 4),
        ("answers/held_out", 0),
        ("answers/held_out", 3),
    }
    for table in tables.values():
        # Two groups have text: the first answer of each, then the second of the first.
        assert [table.count(f"{group} What is 2") for group in range(3)] == [2, 0, 1]
        assert table.count("frac{1}{2}") == 5  # one is a conversation of three turns
        for heading in ("[1 model, 3 tokens, reward 0.75]", "[2 environment, 3 tokens]"):
            assert table.count(heading) == 1
        if tracked.name in ("tensorboard", "swanlab"):  # as Markdown
            assert "What is 2 \\| 3?<br>&lt;think>" in table
        # As the package's own objects, which keep a copy, or by their paths.
        count, mark = {"wandb": (2, "'Image'"), "trackio": (2, "trackio.image")}.get(
            tracked.name, (1, f"images/{IMAGES[0].digest}.png")
        )
        assert (table.count(mark), "image 2" in table) == (count, True)
        for word in ("part/task", "reward", "0.125", "0.25", "held_out"):
            assert word in table


def test_project_name_group_and_tags_are_told(tracked: Tracked) -> None:
    wanted = ["seed-1"] if tracked.name == "tensorboard" else ["seed-1", "digits", "seeds"]
    if tracked.name != "tensorboard":
        wanted += ["first", "second"]
    for word in wanted:
        assert word in tracked.seen.about


WHERE = {
    "tensorboard": "tensorboard --logdir {runs}",
    "wandb": "wandb sync {runs}/seed-1/trackers/wandb/offline-run-",
    "mlflow": "mlflow ui --backend-store-uri sqlite:///{runs}/mlflow/mlflow.db",
}


ENDS = {
    "wandb": (["1"], ["1", "0"]),
    "mlflow": (["KILLED"], ["FINISHED"]),
    "swanlab": (["3"], ["3", "1"]),
}


def test_a_run_that_was_stopped_is_not_taken_for_one_that_is_complete(tracked: Tracked) -> None:
    """Also where it is complete before the step that was planned."""
    assert (tracked.first.ends, tracked.seen.ends) == ENDS.get(tracked.name, ([], []))


def test_it_is_told_where_to_look_and_there_is_no_warning(tracked: Tracked) -> None:
    said = [text for text in tracked.said if not text.startswith("Warning")]
    assert said == tracked.said
    assert len(said) == 2 * (tracked.name in WHERE)
    where = WHERE.get(tracked.name, "").format(runs=tracked.folder.path.parent)
    assert all(text.startswith(f"observe.trackers: {tracked.name}: {where}") for text in said)


def test_a_process_that_is_forked_has_no_thread_of_a_tracker(tracked: Tracked) -> None:
    """Telemetry that starts its threads again in each child has made sandboxes fail."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writer, bytes([len(os.listdir("/proc/self/task"))]))
        os._exit(0)
    os.waitpid(pid, 0)
    assert os.read(reader, 1) == bytes([1])


def test_another_run_of_the_same_name_is_a_run_of_its_own_there(
    tracked: Tracked, tmp_path: Path
) -> None:
    """The folder says which run is continued, not the name."""
    folder = RunFolder(tmp_path / tracked.folder.name)
    folder.path.mkdir()
    database = f"sqlite:///{tracked.folder.path.parent}/mlflow/mlflow.db"
    uri = f"observe.mlflow.uri='{database}'"
    config = recipe("quickstart", *OPTIONS, f"observe.trackers=[{tracked.name}]", uri)
    known, _ = track(config, folder, 1, 1)
    assert known not in tracked.ids


def test_a_note_that_is_damaged_is_named(tmp_path: Path) -> None:
    config = recipe("quickstart", *OPTIONS, "observe.trackers=[tensorboard]")
    for number, text in enumerate(('{"id": ', "3")):
        folder = RunFolder.create(tmp_path, f"seed-{number}", "quickstart")
        folder.trackers.mkdir()
        note = folder.trackers / "tensorboard.json"
        note.write_text(text)
        sinks = Sinks(make_trackers(config, folder, (said := []).append))
        sinks.start(RunInfo(folder.name, PLANNED, 1))
        sinks.close()
        assert any(f"{note} is damaged" in line and "delete it" in line for line in said), said
