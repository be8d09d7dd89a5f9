"""The data of each page, made of parts of the runs' files; what was read is kept while it holds."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from pydantic import ValidationError

from winnow.checkpoints.strangers import is_local_run
from winnow.config.files import parse_layer, recorded_recipe
from winnow.config.roles import ROLES, Roles
from winnow.config.root import Config
from winnow.dashboard import answers
from winnow.dashboard.index import LENGTH_BINS, RATES, AnswerIndex, prompt_history
from winnow.dashboard.metrics_columns import FigureStore, MetricsColumns, read_tail, round_to
from winnow.dashboard.runs import (
    ABSENT,
    CONFIG,
    FileEntry,
    RunFiles,
    RunNotFoundError,
    RunSet,
    StampedCache,
    UnreadableError,
)
from winnow.dashboard.settings import describe_settings, differing_settings, plain_settings
from winnow.dashboard.timeline import LOG, TRACE, TraceWindows, read_log_tail, read_usage
from winnow.errors import ConfigError
from winnow.evaluation.plot import recipe_key
from winnow.observe import metrics
from winnow.observe.files import TOKENIZER, USAGE, one_line
from winnow.observe.jsonl import METRICS_FILE, evaluations
from winnow.observe.rollouts import IMAGES
from winnow.views.diagnosis import RULES, Diagnosis
from winnow.views.doctor import ROLLOUT_COLUMNS, findings_with_answers

KINDS = {"training": "rollouts", "held_out": "eval"}
"""Folders of answers by what they were written for."""
_LIVE_S, _LIVE_STEPS = 90.0, 3.0
"""A run that wrote nothing for so long, and for so many times its last step's, is not live."""
_FINDINGS = "findings.jsonl"
_POINTS = 1000
"""Points of a curve, where a page does not ask for another number."""
_MOST_COLUMNS = 400
"""Steps side by side in a histogram over time; of more, neighbours are summed."""
_MOST_CONFIG_BYTES = 100_000
"""Most bytes of a config.yaml, of which a run writes about 5,000: each is some 20 µs of reading."""
_MOST_IMAGE_BYTES = 64 << 20
_IMAGE = re.compile(rf"{IMAGES}/([0-9a-f]{{64}})\.png")


class RunPages:
    """The pages of one run.

    Args:
        files: of the run.
        figures: of the runs that share its memory.
    """

    def __init__(self, files: RunFiles, figures: FigureStore | None = None) -> None:
        self.files, self._figures = files, figures or FigureStore()
        self._timeline = TraceWindows(files)
        self._cache = StampedCache()
        self._indexes: dict[str, AnswerIndex] = {}
        self._lock = Lock()

    def columns(self) -> MetricsColumns:
        """Return the figures as they stand in the file now.

        Raises:
            UnreadableError: the file cannot be read.
        """
        return self._figures.read(self.files)

    def config(self, root: Mapping[str, FileEntry] | None = None) -> dict[str, Any]:
        """Return the settings of the run by their full names: `{"optim.lr": 0.001, …}`.

        Raises:
            UnreadableError: config.yaml is missing or damaged.
        """
        stamp = (root or self.files.entries()).get(CONFIG, ABSENT).stamp
        return self._cache.get("flat", stamp, lambda: plain_settings(self._tree(stamp)))

    def settings(self) -> dict[str, Any]:
        """Return the settings of the run with their meanings, the defaults and its recipe's.

        Raises:
            UnreadableError: config.yaml is missing or damaged.
        """
        stamp = self.files.entries().get(CONFIG, ABSENT).stamp
        return self._cache.get("settings", stamp, lambda: describe_settings(*self._config(stamp)))

    def _config(self, stamp: str) -> tuple[dict[str, Any], str | None]:
        config = self._cache.get(CONFIG, stamp, self._read_config)
        if isinstance(config, str):
            raise UnreadableError(config)
        return config

    def _tree(self, stamp: str) -> dict[str, Any]:
        return self._config(stamp)[0]

    def _group(self, stamp: str) -> str:
        return sha256(recipe_key(self._tree(stamp)).encode()).hexdigest()[:16]

    def summary(self) -> dict[str, Any]:
        """Return a row of the list of runs, from the last lines of metrics.jsonl.

        `waiting` says of a run without a record why it has none; `alarms` counts what its rules
        have found; `left_s` are the seconds to its last step, at the pace of its last ones;
        `group` is the same for runs that differ in the seed alone.

        Raises:
            UnreadableError: a file is damaged.
        """
        root = self.files.entries()
        config, stamp = self.config(root), root.get(CONFIG, ABSENT).stamp
        figures = root.get(METRICS_FILE, ABSENT)
        record, step_s = self._cache.get(
            METRICS_FILE, figures.stamp, lambda: read_tail(self.files, figures.size)
        )
        findings = root.get(_FINDINGS, ABSENT)
        alarms = self._cache.get(
            _FINDINGS,
            findings.stamp,
            lambda: self.files.read(_FINDINGS).count(b"\n") if findings.size else 0,
        )
        held_out = {source: round_to(each.accuracy) for source, each in evaluations(record).items()}
        times = (root.get(n, ABSENT).changed_s for n in (METRICS_FILE, LOG, TRACE))
        changed = max((each for each in times if each is not None), default=None)
        steps = _positive_int(config, "trainer.steps", 0)
        step = int(record.get("step", 0))
        patience_s = max(_LIVE_S, _LIVE_STEPS * record.get(metrics.STEP_S, 0.0))
        is_live = changed is not None and time.time() - changed < patience_s
        state = "done" if steps and step >= steps else "live" if is_live else "idle"
        is_paced = state == "live" and steps > 0
        left_s = step_s * (steps - step) if is_paced and step_s is not None else None
        return {
            "name": self.files.name,
            "place": self.files.root,
            "recipe": self._config(stamp)[1],
            "group": self._cache.get("group", stamp, lambda: self._group(stamp)),
            "step": step,
            "steps": steps,
            "state": state,
            "step_s": round_to(step_s),
            "left_s": round_to(left_s),
            "alarms": alarms,
            "waiting": None if record else self._wait_reason(root, config, is_live),
            "changed_s": changed,
            "accuracy": round_to(record.get(metrics.ACCURACY)),
            "held_out": held_out,
            "problem": None,
        }

    def _wait_reason(
        self, root: dict[str, FileEntry], config: dict[str, Any], is_live: bool
    ) -> str:
        """Describe where a run without metrics is, or where it stopped."""
        # The tokenizer is written when the model is loaded.
        is_warm = config.get("warm_start.name") != "sft" or TOKENIZER in root
        place = "first step" if is_warm else f"warm-up of {config.get('warm_start.steps')} steps"
        lines = read_log_tail(self.files, root.get(LOG))["lines"]
        last = f"; the last line of its log: {lines[-1]['text'].splitlines()[0]}" if lines else ""
        return f"{self.files.name} {'is still' if is_live else 'stopped'} in its {place}{last}"

    def steps(self) -> dict[str, Any]:
        """List the steps that have answers, for training and held-out ones.

        Raises:
            UnreadableError: a folder cannot be listed.
        """
        return {kind: list(self.files.steps(folder)) for kind, folder in KINDS.items()}

    def groups(self, kind: str, step: int) -> dict[str, Any]:
        """Return the table of a step's groups.

        Raises:
            UnreadableError: the step has no file, or a damaged one.
        """
        name = self.answers_file(kind, step)
        with self.files.explain_errors(name):
            return answers.group_table(self.files, name)

    def search_texts(self, kind: str, step: int, text: str) -> dict[str, Any]:
        """Search the texts of a step.

        Raises:
            UnreadableError: the step has no file, or a damaged one.
        """
        return answers.search_texts(self.files, self.answers_file(kind, step), text)

    def group(self, kind: str, step: int, group: int) -> dict[str, Any]:
        """Return a group's answers, and why tokens are not shown where they are not.

        Raises:
            UnreadableError: there is no such group, or a damaged file.
        """
        why = None
        try:
            pieces = self._token_texts()
        except UnreadableError as error:
            pieces, why = None, str(error)
        name = self.answers_file(kind, step)
        with self.files.explain_errors(name):
            rows = answers.read_group_answers(self.files, name, group, pieces, self._calls())
        return {"answers": rows, "meanings": answers.TOKEN_COLUMNS, "without_tokens": why}

    def image(self, name: str) -> bytes:
        """Read an image of the run's answers by its name in their rows, `images/DIGEST.png`.

        Raises:
            UnreadableError: there is none, or its content is not that of the digest.
        """
        match = _IMAGE.fullmatch(name)
        content = self.files.read(name, 0, _MOST_IMAGE_BYTES) if match else b""
        if match is None or sha256(content).hexdigest() != match[1]:
            raise UnreadableError(f"{name[:80]} is no image of {self.files.name}, or is damaged")
        return content

    def prompt_history(self, kind: str, prompt_uid: str) -> dict[str, Any]:
        """Follow a prompt over the steps that are read so far.

        Raises:
            UnreadableError: the folder cannot be listed.
        """
        digests, total, is_done = self._answer_index(kind).snapshot()
        rows = prompt_history(digests, prompt_uid)
        return {"rows": rows, "read": len(digests), "steps": total, "is_done": is_done}

    def histograms(self) -> dict[str, Any]:
        """Return pass rates and lengths over the steps, as counts by class.

        Raises:
            UnreadableError: the folder cannot be listed.
        """
        index = self._answer_index("training")
        digests, total, is_done = index.snapshot()
        steps = list(digests)
        every = -(-len(steps) // _MOST_COLUMNS) or 1
        blocks = [steps[at : at + every] for at in range(0, len(steps), every)]

        def sums(what: str) -> list[list[int]]:
            return [
                np.sum([getattr(digests[step], what) for step in block], axis=0).tolist()
                for block in blocks
            ]

        longest = index.longest
        return {
            "steps": [block[0] for block in blocks],
            "every": every,
            "rates": sums("rates"),
            "rate_names": RATES,
            "lengths": sums("lengths"),
            "length_edges": [
                -(-n * (longest + 1) // LENGTH_BINS) for n in range(LENGTH_BINS + 1)
            ],
            "read": len(digests),
            "of": total,
            "is_done": is_done,
            "problems": list(index.problems.values()),
        }  # fmt: skip

    def timeline(self, step: int | None) -> dict[str, Any]:
        """Return the tracks of a step, the last one by default.

        Raises:
            UnreadableError: trace.json is missing or damaged.
        """
        entry = self.files.entries().get(TRACE)
        if entry is None:
            raise UnreadableError(
                f"{self.files.name} has no {TRACE}: observe.trace is false, or no step has "
                "finished yet"
            )
        with self.files.explain_errors(TRACE):
            self._timeline.refresh(entry.size)
            steps = self._timeline.steps
            step = (steps[-1] if steps else 0) if step is None else step
            return {"step": step, "steps": steps, **self._timeline.window(step)}

    def alarms(self) -> dict[str, Any]:
        """Return what the rules of `winnow doctor` find, all rules with what those need that are
        not checked so far, and the last step they looked at.

        Raises:
            UnreadableError: a file is damaged.
        """
        stamp = self.files.entries().get(CONFIG, ABSENT).stamp
        columns, tree = self.columns(), self._tree(stamp)
        steps = max(columns.steps, default=0)
        newest = max(self.files.steps(KINDS["training"]), default=0)

        def read_rows() -> list[dict[str, Any]]:
            with self.files.parquet(self.answers_file("training", newest)) as file:
                return list(file.read(columns=ROLLOUT_COLUMNS).to_pylist())

        with self._lock:
            key = f"{stamp} {columns.reading}"
            diagnosis = self._cache.get("diagnosis", key, lambda: Diagnosis(tree))
            for step, record in columns.records(diagnosis.records):
                diagnosis.add(step, record)
            findings = findings_with_answers(diagnosis, steps, newest, read_rows)
            needs = diagnosis.unmet_needs()
        return {
            "findings": [asdict(each) for each in findings],
            "steps": steps,
            "rules": [
                {"name": each.name, "cause": each.cause, "need": needs.get(each.name)}
                for each in RULES
            ],
            "problems": columns.problems,
        }

    def system(self) -> dict[str, Any]:
        """Return processes, what they used over time, starts, checkpoints, the log, and lines that
        could not be read.

        Raises:
            UnreadableError: a file is damaged.
        """
        root = self.files.entries()
        tree = self._tree(root.get(CONFIG, ABSENT).stamp)
        starts: list[dict[str, Any]] = []
        if TRACE in root:
            with self.files.explain_errors(TRACE):
                self._timeline.refresh(root[TRACE].size)
                starts = self._timeline.starts
        names = [*(name for name in self.files.entries("checkpoints") if name.startswith("step-"))]
        saved = sorted(int(name[5:]) for name in names if name[5:].isdecimal())
        machine = self._manifest(saved[-1]).get("machine") if saved else None
        return {
            "processes": list(_list_processes(tree, self.config())),
            "starts": starts,
            "checkpoints": saved,
            "machine": machine if isinstance(machine, dict) else {},
            "log": read_log_tail(self.files, root.get(LOG)),
            "usage": read_usage(self.files, root.get(USAGE, ABSENT)),
            "problems": self.columns().problems,
        }

    def _manifest(self, step: int) -> dict[str, Any]:
        name = f"checkpoints/step-{step}/manifest.json"

        def make() -> Any:
            with self.files.explain_errors(name):
                return json.loads(self.files.read(name), parse_constant=str)

        manifest = self._cache.get("manifest", name, make)
        return manifest if isinstance(manifest, dict) else {}

    def _read_config(self) -> tuple[dict[str, Any], str | None] | str:
        """Read the configuration and its recipe's name, or return an invalid one's error message,
        which is cached, too."""
        content = self.files.read(CONFIG, 0, _MOST_CONFIG_BYTES + 1)
        if len(content) > _MOST_CONFIG_BYTES:
            return f"{CONFIG} of {self.files.name} has more than {_MOST_CONFIG_BYTES:,} bytes"
        try:
            tree = parse_layer(content, f"{CONFIG} of {self.files.name}").tree
            return tree, recorded_recipe(content)
        except ConfigError as error:
            return str(error)

    def answers_file(self, kind: str, step: int) -> str:
        """Name the file of a step's answers.

        Raises:
            UnreadableError: there is no such kind.
        """
        return f"{_answers_folder(kind)}/step-{step}.parquet"

    def _answer_index(self, kind: str) -> AnswerIndex:
        with self._lock:
            if kind not in self._indexes:
                longest = _positive_int(self.config(), "rollout.max_response_tokens", 1024)
                self._indexes[kind] = AnswerIndex(self.files, _answers_folder(kind), longest)
            return self._indexes[kind]

    def _calls(self) -> str:
        """Return the recipe's `environment.calls`; the default where that cannot be read, or is not
        this user's: a regular expression may take for ever."""
        try:
            calls = self.config().get("environment.calls")
            is_trusted = self.files.is_local and is_local_run(Path(self.files.root))
            return calls if is_trusted and isinstance(calls, str) and re.compile(calls) else "auto"
        except (UnreadableError, re.error):
            return "auto"

    def _token_texts(self) -> answers.TokenTexts:
        root = self.files.entries()
        if TOKENIZER in root:
            name, stamp = TOKENIZER, root[TOKENIZER].stamp
        else:  # a run of an older winnow
            saved = [n for n in self.files.entries("checkpoints") if n.startswith("step-")]
            if not saved:
                raise UnreadableError(
                    f"{self.files.name} has no {TOKENIZER}, so tokens are not shown"
                )
            name = stamp = f"checkpoints/{max(saved, key=len)}/model/{TOKENIZER}"

        def make() -> answers.TokenTexts:
            try:
                return answers.TokenTexts(self.files.read(name))
            except ValueError as error:
                raise UnreadableError(f"{name} of {self.files.name}: {one_line(error)}") from error

        return self._cache.get("pieces", stamp, make)


class Pages:
    """The pages about several runs.

    Args:
        runs: those that are shown.
    """

    def __init__(self, runs: RunSet) -> None:
        self.runs = runs
        self._readers: dict[str, RunPages] = {}
        self._figures = FigureStore()
        self._cache, self._lock = StampedCache(), Lock()

    def by_name(self) -> dict[str, RunPages]:
        """Return the pages of each run, by its name.

        Raises:
            UnreadableError: a place cannot be listed.
        """
        runs = self.runs.discover()
        with self._lock:
            before = self._readers
            self._readers = {
                name: before[name]
                if name in before and before[name].files is files
                else RunPages(files, self._figures)
                for name, files in runs.items()
            }
            return self._readers

    def select(self, names: Iterable[str]) -> list[RunPages]:
        """Return the pages of some runs.

        Raises:
            RunNotFoundError: there is no such run.
        """
        everything = self.by_name()
        requested = list(names)
        for name in requested:
            if name not in everything:
                raise RunNotFoundError(f"run {name} does not exist or was removed; choose another")
        return [everything[name] for name in requested]

    def overview(self) -> dict[str, Any]:
        """Return a row for each run, and the run to show first: a live one, else the newest.

        A run that cannot be read has a line that says why. Runs without metrics come last.
        `settings` are those in which the runs differ, but for names, folders and descriptions.
        """

        def rank(row: Mapping[str, Any]) -> tuple[bool, bool, float]:
            return row["state"] == "live", not row["waiting"], row["changed_s"] or 0.0

        rows, configs = [], {}
        for name, reader in self.by_name().items():
            try:
                with reader.files.explain_errors("a file"):
                    rows.append(reader.summary())
                    configs[name] = reader.config()
            except UnreadableError as error:
                rows.append({"name": name, "place": reader.files.root, "problem": str(error)})
        readable = [row for row in rows if not row["problem"]]
        places = "run.name", "run.dir", "run.description"
        differing = [key for key in differing_settings(configs.values()) if key not in places]
        for row in readable:
            row["settings"] = {key: configs[row["name"]].get(key) for key in differing}
        return {"runs": rows, "first": max(readable, key=rank)["name"] if readable else None}

    def folder_stamps(self) -> dict[str, str]:
        """Return a text for each run that changes when its folder does, usage.jsonl apart: that is
        written as long as the process lives, whatever the run does.
        """
        return {
            name: " ".join(
                f"{key}:{each.stamp}"
                for key, each in sorted(files.entries().items())
                if key != USAGE
            )
            for name, files in self.runs.discover().items()
        }

    def curves(self, names: Sequence[str], figures: Sequence[str], points: int | None) -> str:
        """Return figures of several runs as JSON; of one that is unreadable, a line that says why.

        Args:
            points: about so many a curve, for the run with most steps; all have steps as far apart.

        Raises:
            RunNotFoundError: there is no such run.
        """
        columns, problems = {}, {}
        for reader in self.select(names):
            name = reader.files.name
            try:
                columns[name] = reader.columns()
                problems[name] = columns[name].problems
            except UnreadableError as error:
                columns[name], problems[name] = MetricsColumns(reader.files), [str(error)]
        most = max((each.n_rows for each in columns.values()), default=0)
        every = max(-(-most // max(points or _POINTS, 1)), 1)
        parts = (
            f'{json.dumps(name)}:{{"problems":{json.dumps(problems[name])},'
            f"{each.curves_json(figures, every)[1:]}"
            for name, each in columns.items()
        )
        return f"{{{','.join(parts)}}}"

    def compare_settings(self, a: str, b: str) -> list[dict[str, Any]]:
        """List the settings in which two runs differ.

        Raises:
            RunNotFoundError: there is no such run.
            UnreadableError: a config.yaml is damaged.
        """
        config_a, config_b = (reader.config() for reader in self.select((a, b)))
        return [
            {"key": key, "a": config_a.get(key), "b": config_b.get(key)}
            for key in differing_settings((config_a, config_b))
        ]

    def compare_answers(self, a: str, b: str, step: int | None) -> dict[str, Any]:
        """Compare two runs on the held-out problems of a step, the last common one by default.

        Returns:
            Figures as of `winnow compare --json`, with `step` and `steps`, those in common;
            `sources` is empty where there is none.

        Raises:
            RunNotFoundError: there is no such run.
            WinnowError: a file is damaged, or they answered different problems.
        """
        readers = self.select((a, b))
        entries = [reader.files.steps(KINDS["held_out"]) for reader in readers]
        common = sorted(set(entries[0]) & set(entries[1]))
        if not common:
            return {"step": None, "steps": [], "sources": {}, "notes": [], "verdict": None}
        step = step if step in common else common[-1]
        stamp = " ".join(each[step].stamp for each in entries)
        figures = self._cache.get(f"{a}\n{b}\n{step}", stamp, lambda: _compare_step(readers, step))
        return {"step": step, "steps": common, **figures}


def _compare_step(readers: Sequence[RunPages], step: int) -> dict[str, Any]:
    from winnow.evaluation.compare import compare, comparison_json, parse_answers

    read = []
    for reader in readers:
        name = f"{KINDS['held_out']}/step-{step}.parquet"
        with reader.files.parquet(name) as file:
            read.append(parse_answers(Path(reader.files.name) / name, file.read()))
    return comparison_json(compare(*read))


def _answers_folder(kind: str) -> str:
    if kind not in KINDS:
        raise UnreadableError(f"kind must be one of {', '.join(KINDS)}, got {kind[:40]}")
    return KINDS[kind]


def _positive_int(config: Mapping[str, Any], key: str, default: int) -> int:
    """Return a positive number of a recipe; the default where it has none, or something else."""
    value = config.get(key)
    return value if type(value) is int and 0 < value < 1 << 31 else default


def _list_processes(tree: Mapping[str, Any], flat: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield the kinds of process that a recipe asks for, and how many of each."""
    yield {"name": "driver", "count": 1, "field": None}
    try:
        roles = list(Roles(Config.model_validate(tree)))
    except (ValidationError, OverflowError):  # another version's, or values of the environment
        counts = ((role, flat.get(role.key)) for role in ROLES)
        roles = [replace(role, count=n) for role, n in counts if isinstance(n, int) and n > 0]
    for role in roles:
        yield {"name": role.plural_title, "count": role.count, "field": role.key}
