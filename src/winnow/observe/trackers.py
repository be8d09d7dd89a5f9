"""Trackers: TensorBoard, Weights & Biases, MLflow, Trackio and SwanLab show what a run records.

Each gets the record of every step, the resolved recipe as hyper-parameters, and tables of sample
answers. A tracker runs in its own thread (`winnow.observe.sinks.BackgroundSink`), where it
also reads the answers, from the run's rollouts/ and eval/: the loop hands over numbers alone.

RUN/trackers/NAME.json names the tracker's run and the last step that it has. A resumed run goes on
in the same one, and a step that the tracker has already is not sent again, because none of them
but TensorBoard takes one back.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pyarrow.parquet as pq
import yaml

from winnow.config.load import config_to_dict, flatten
from winnow.config.root import Config, ObserveConfig, TrackerName
from winnow.errors import ConfigError, WinnowError
from winnow.observe.files import RunFolder, one_line, write_atomic
from winnow.observe.metrics import EVAL, REWARD, TRAINED_ACCURACY, Record
from winnow.observe.rollouts import turn_heading
from winnow.observe.sinks import BackgroundSink, RunInfo, Warn

Rows = list[dict[str, Any]]
"""Sample answers: prompt, image N (a path), response, part/NAME, reward, accuracy, outcome."""
_SHOWN = ("prompt", "response", "reward", "accuracy", "outcome")
_IMAGE = "image "
"""Start of the names of columns with images."""
_MOST_METRICS, _MOST_PARAMS, _LONGEST_PARAM, _MOST_TABLES = 1000, 100, 6000, 50
"""Bounds of MLflow: of a request, of a value, and of the tables that its page lists."""


class Tracker(ABC):
    """The part that all trackers share: which run it is, which steps are sent, sample answers.

    Args:
        folder: the run's folder.
    """

    name: TrackerName
    where_to_look = ""
    """Command or address that shows the run, where the tracker does not print it itself."""
    purges_repeated_steps = False
    """True where it drops the steps that a resumed run repeats, and takes them anew."""

    def __init__(self, folder: RunFolder, config: Config) -> None:
        self.folder, self.options, self.tracking = folder, config.observe, config.observe.tracking
        self.run_name, self.recipe = self.tracking.name or folder.name, config_to_dict(config)
        self._state_file = folder.trackers / f"{self.name}.json"
        self._id, self._last = "", -1
        self._is_open = self._is_complete = False

    def start(self, info: RunInfo) -> None:
        """Start the tracker's run, or resume the one of this run."""
        state = self._read_state()
        self._last = -1 if self.purges_repeated_steps else state.get("step", -1)
        self.folder.trackers.mkdir(exist_ok=True)
        # Without a checkpoint the evaluation before the first step is made again, too.
        first = info.first_step if info.first_step > 1 else 0
        self._id = self.open(state.get("id"), first)
        self._is_open = True
        self._write_state()

    def log(self, step: int, record: Record) -> None:
        """Send a step, unless it was sent before."""
        if step <= self._last:
            return
        self.write(step, record, self._read_sample_tables(step, record))
        self._last = step
        self._write_state()

    def mark_complete(self) -> None:
        """Record that the run reached its last step."""
        self._is_complete = True

    def close(self) -> None:
        """End the tracker's run, as complete if the run reached its last step."""
        if self._is_open:
            self._is_open = False
            self.end(self._is_complete)

    @abstractmethod
    def open(self, run_id: str | None, first_step: int) -> str:
        """Begin a run, or continue `run_id`; return its id."""

    @abstractmethod
    def write(self, step: int, record: Record, tables: Mapping[str, Rows]) -> None:
        """Send the figures of a step, and tables of sample answers by name."""

    @abstractmethod
    def end(self, is_done: bool) -> None:
        """End the tracker's run; unless `is_done` it may go on later."""

    def init_arguments(self) -> dict[str, Any]:
        """Return the arguments that each tracker's `init` takes."""
        tracking = self.tracking
        named = {"project": tracking.project, "name": self.run_name, "group": tracking.group}
        return {**named, "config": self.recipe}

    def flat_recipe(self) -> dict[str, str | int | float | bool]:
        """Return the recipe as flat hyper-parameters, such as `optim.lr`."""
        return {
            key: value if isinstance(value, str | int | float) else json.dumps(value)
            for key, value in flatten(self.recipe).items()
        }

    def _read_state(self) -> dict[str, Any]:
        if not self._state_file.is_file():
            return {}
        try:
            return dict(json.loads(self._state_file.read_text()))
        except (TypeError, ValueError) as error:
            raise WinnowError(
                f"{self._state_file} is damaged ({one_line(error)}); delete it to start a new "
                "tracker run"
            ) from error

    def _write_state(self) -> None:
        write_atomic(self._state_file, json.dumps({"id": self._id, "step": self._last}).encode())

    def _read_sample_tables(self, step: int, record: Record) -> dict[str, Rows]:
        """Read the sample answers that are due: of training now and then, of each evaluation."""
        folder, every = self.folder, self.tracking.answers_every
        files = {}
        if step == 1 or (step and step % every == 0):
            files["answers/train"] = folder.rollout_file(step)
        if any(name.startswith(EVAL) for name in record):
            files["answers/held_out"] = folder.eval_file(step)
        tables = {
            name: read_sample_answers(file, self.tracking.answers) for name, file in files.items()
        }
        return {name: rows for name, rows in tables.items() if rows}


def read_sample_answers(file: Path, number: int) -> Rows:
    """Read up to `number` answers whose text is kept: the first of each group, then the second.

    Of a conversation, the response has a line before each turn. Images are paths in the run's
    folder, each in a column.
    """
    if not number or not file.is_file():
        return []
    parquet = pq.ParquetFile(file)
    names = [n for n in parquet.schema_arrow.names if n in _SHOWN or n.startswith("part/")]
    newer = {"turns", "images"} & {*parquet.schema_arrow.names}  # absent in older files
    table = parquet.read(columns=[*names, *newer, "group", "answer"])
    rows = table.filter(pc.is_valid(table["response"])).to_pylist()
    chosen = sorted(rows, key=lambda row: (row["answer"], row["group"]))[:number]
    chosen.sort(key=lambda row: (row["group"], row["answer"]))
    most = max((len(row.get("images") or ()) for row in chosen), default=0)
    images = [f"{_IMAGE}{number}" for number in range(1, most + 1)]
    for row in chosen:
        row |= dict.fromkeys(images) | dict(zip(images, row.get("images") or (), strict=False))
        if row.get("turns"):
            texts = (f"[{turn_heading(n, t)}]\n{t['text']}" for n, t in enumerate(row["turns"], 1))
            row["response"] = "\n".join(texts)
    order = sorted(names, key=lambda n: _SHOWN.index(n) if n in _SHOWN else 1.5)
    order[1:1] = images
    return [{name: row[name] for name in order} for row in chosen]


class Tensorboard(Tracker):
    """Event files; steps that a resumed run repeats are purged."""

    name = "tensorboard"
    purges_repeated_steps = True

    def open(self, run_id: str | None, first_step: int) -> str:
        from torch.utils.tensorboard import SummaryWriter
        from torch.utils.tensorboard.summary import hparams

        base = self.options.tensorboard.dir
        folder = Path(base) / self.run_name if base else self.folder.trackers / "tensorboard"
        purge = None if run_id is None else first_step
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge)
        if run_id is None:
            start, session, _ = hparams(
                self.flat_recipe(), dict.fromkeys((REWARD, TRAINED_ACCURACY), 0.0)
            )
            for summary in (start, session):
                self._writer.file_writer.add_summary(summary)
            recipe = yaml.safe_dump(self.recipe, sort_keys=False)
            self._writer.add_text("recipe", f"```yaml\n{recipe}```")
        self.where_to_look = f"tensorboard --logdir {folder.parent if base else folder.parents[2]}"
        return str(folder)

    def write(self, step: int, record: Record, tables: Mapping[str, Rows]) -> None:
        for name, value in record.items():
            self._writer.add_scalar(name, value, step)
        for name, rows in tables.items():
            self._writer.add_text(name, _markdown_table(rows), step)
        self._writer.flush()

    def end(self, is_done: bool) -> None:
        self._writer.close()


class LogTracker(Tracker):
    """A tracker whose run takes figures and sample answers of a step in one call of `log`."""

    _run: Any
    _show: Callable[[Rows], Any]
    """Makes the object of its package that shows sample answers."""

    def write(self, step: int, record: Record, tables: Mapping[str, Rows]) -> None:
        shown = {name: self._show(rows) for name, rows in tables.items()}
        self._run.log({**record, **shown}, step=step)

    def _make_table(self, table: Any, image: Any, rows: Rows) -> Any:
        """Make the package's table, with its images in the place of their paths."""
        for row in rows:
            for name in (name for name in row if name.startswith(_IMAGE) and row[name]):
                row[name] = image(str(self.folder.path / row[name]))
        return table(**_table_arguments(rows))

    def end(self, is_done: bool) -> None:
        self._run.finish()


class Wandb(LogTracker):
    """Weights & Biases. A step that its server has already is ignored there."""

    name = "wandb"

    def open(self, run_id: str | None, first_step: int) -> str:
        # Its own telemetry, which starts threads, and again in each process that is forked.
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        options = self.options.wandb
        self._show = partial(self._make_table, wandb.Table, wandb.Image)
        self._run = wandb.init(
            **self.init_arguments(),
            entity=options.entity,
            mode=options.mode,
            tags=self.tracking.tags,
            id=run_id or uuid.uuid4().hex[:8],
            resume="allow",
            dir=str(self.folder.trackers),
            # Its own console would be drawn over ours, and it would ask for a key in between.
            settings=wandb.Settings(console="off", silent=True),
        )
        self.where_to_look = self._run.url or f"wandb sync {Path(self._run.dir).parent}"
        return str(self._run.id)

    def end(self, is_done: bool) -> None:
        self._run.finish(exit_code=0 if is_done else 1)


class Mlflow(Tracker):
    """MLflow, without its global active run. `@` is no character of its names: avg_at_8."""

    name = "mlflow"

    def open(self, run_id: str | None, first_step: int) -> str:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._metric, folder = Metric, self.folder.path.absolute().parent / "mlflow"
        uri = mlflow_uri(self.options, folder)
        is_local = uri == _local_database(folder)
        if is_local:
            folder.mkdir(exist_ok=True)
            self.where_to_look = f"mlflow ui --backend-store-uri {uri}"
        self._client, tracking = MlflowClient(tracking_uri=uri), self.tracking
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        experiment = self._client.get_experiment_by_name(tracking.project)
        place = str(folder / "artifacts") if is_local else None
        number = experiment.experiment_id if experiment else None
        number = number or self._client.create_experiment(tracking.project, place)
        run_id = str(self._client.create_run(number, run_name=self.run_name).info.run_id)
        settings = self.flat_recipe().items()
        params = [Param(_mlflow_name(key), str(value)[:_LONGEST_PARAM]) for key, value in settings]
        for begin in range(0, len(params), _MOST_PARAMS):
            self._client.log_batch(run_id, params=params[begin : begin + _MOST_PARAMS])
        labels = {"group": tracking.group or "", "tags": ",".join(tracking.tags)}
        self._client.log_batch(run_id, tags=[RunTag(k, v) for k, v in labels.items() if v])
        return run_id

    def write(self, step: int, record: Record, tables: Mapping[str, Rows]) -> None:
        now = int(time.time() * 1000)
        metrics = [self._metric(_mlflow_name(n), float(v), now, step) for n, v in record.items()]
        for begin in range(0, len(metrics), _MOST_METRICS):
            self._client.log_batch(self._id, metrics=metrics[begin : begin + _MOST_METRICS])
        for name, rows in tables.items():
            file = f"{name}-{step}.json"
            self._client.log_dict(self._id, _table_arguments(rows), file)
            # So that its page shows the file as a table, as `mlflow.log_table` does with pandas.
            tag = "mlflow.loggedArtifacts"
            listed = json.loads(self._client.get_run(self._id).data.tags.get(tag, "[]"))
            listed = [*listed, {"path": file, "type": "table"}][-_MOST_TABLES:]
            self._client.set_tag(self._id, tag, json.dumps(listed))

    def end(self, is_done: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if is_done else "KILLED")


class Trackio(LogTracker):
    """Trackio, which finds a run again by its name; a new one never joins an old one."""

    name = "trackio"

    def open(self, run_id: str | None, first_step: int) -> str:
        import trackio

        options = self.options.trackio
        self._show = partial(self._make_table, trackio.Table, trackio.Image)
        self._run = trackio.init(
            **self.init_arguments(),
            space_id=options.space_id,
            private=options.private,
            resume="never" if run_id is None else "allow",
            embed=False,
            auto_log_cpu=False,
        )
        return str(self._run.id)


class Swanlab(LogTracker):
    """SwanLab; it has no tables, so each sample answer is a text."""

    name = "swanlab"

    def open(self, run_id: str | None, first_step: int) -> str:
        import swanlab

        options = self.options.swanlab
        self._show = lambda rows: [swanlab.Text(_markdown_table([row])) for row in rows]
        run_id = run_id or uuid.uuid4().hex[:16]
        self._run = swanlab.init(
            **self.init_arguments(),
            workspace=options.workspace,
            mode=options.mode,
            tags=[*self.tracking.tags] or None,
            id=run_id,
            resume="allow",
            log_dir=str(self.folder.trackers / "swanlab"),
            # It asks for no key on the terminal, and leaves what is printed alone.
            settings=swanlab.Settings(
                interactive=False, terminal=swanlab.Settings.Terminal(proxy_type="none")
            ),
        )
        return run_id

    def end(self, is_done: bool) -> None:
        self._run.finish(state="success" if is_done else "aborted")


TRACKERS: dict[TrackerName, type[Tracker]] = {
    each.name: each for each in (Tensorboard, Wandb, Mlflow, Trackio, Swanlab)
}


def make_trackers(config: Config, folder: RunFolder, warn: Warn) -> list[BackgroundSink]:
    """Make the sinks of `observe.trackers`, each in its own thread."""
    names, tracking = config.observe.trackers, config.observe.tracking
    makers = {name: partial(TRACKERS[name], folder, config) for name in names}
    return [BackgroundSink(f"observe.trackers: {n}", makers[n], tracking, warn) for n in names]


def check_tracker_packages(config: Config) -> None:
    """Check that the packages of the trackers are installed, without importing them.

    Raises:
        ConfigError: one is not installed.
    """
    for name in config.observe.trackers:
        needed: dict[str, str] = {name: name}
        if name == "mlflow" and mlflow_uri(config.observe, Path()).startswith("sqlite:"):
            needed |= {"sqlalchemy": "SQLAlchemy", "alembic": "alembic"}
        for module, package in needed.items():
            spec = importlib.util.find_spec(module)
            if spec is None or spec.origin is None:  # or a folder that happens to be called so
                raise ConfigError(
                    f"observe.trackers names {name}, and {package} is not installed; "
                    f"pip install 'winnow-rl[{name}]', or leave {name} out"
                )


def mlflow_uri(config: ObserveConfig, folder: Path) -> str:
    """Return where MLflow's runs go: as set, as its variable says, or a data base in `folder`."""
    uri = config.mlflow.uri or os.environ.get("MLFLOW_TRACKING_URI")
    return uri or _local_database(folder)


def _local_database(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


def _mlflow_name(name: str) -> str:
    return re.sub(r"[^\w\-. :/]", "_", name.replace("@", "_at_"))


def _table_arguments(rows: Rows) -> dict[str, Any]:
    return {"columns": [*rows[0]], "data": [[*row.values()] for row in rows]}


def _markdown_table(rows: Rows) -> str:
    """Write sample answers as a table of Markdown; one alone stands upright."""
    cells = [[_markdown_cell(value) for value in row.values()] for row in rows]
    if len(rows) == 1:
        cells = [[name, cell] for name, cell in zip(rows[0], cells[0], strict=True)]
        head = ["", ""]
    else:
        head = [*rows[0]]
    lines = [head, ["---"] * len(head), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown_cell(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else "" if value is None else str(value)
    for mark, shown in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("\n", "<br>")):
        text = text.replace(mark, shown)
    return text
