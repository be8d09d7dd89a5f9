"""Write known data sets as parquet files in verl's schema: from the hub, from files, or generated.

Copies go: two rows are copies if data source, messages and ground truth are the same, white
space at the ends and known instructions aside. The file appears as a whole or not at all.
"""

from __future__ import annotations

import fnmatch
import io
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from winnow.config.data import DataConfig, ReasoningGymTask, SortDigitsTask
from winnow.data.columns import excerpt
from winnow.data.hub import fetch_file, list_files
from winnow.data.images import open_images, read_image
from winnow.data.loader import make_task_rows
from winnow.data.published import (
    SETS,
    add_dapo_instruction,
    convert_row,
    foreign_source,
    strip_instructions,
)
from winnow.data.sources import Row, folder_of, read_records
from winnow.errors import DataError, WinnowError
from winnow.observe.files import write_atomic

_GYM = "reasoning_gym/"
GENERATED = ("sort_digits", "countdown", f"{_GYM}TASK")
_PROBLEMS = {"train": 10_000, "test": 400}
# A task of reasoning-gym may take a second for a problem.
_GYM_PROBLEMS = {"train": 1_000, "test": 200}
_INSTEAD = "or download the file yourself and name it with --from"


@dataclass(frozen=True)
class PrepareRequest:
    """The options of `winnow data prepare`."""

    name: str
    split: str | None = None
    """None: the first that the set has."""
    files: tuple[str, ...] = ()
    """Paths or fsspec URLs instead of the hub."""
    out: str | None = None
    """None: `data/NAME.parquet`, with the split where there are several."""
    revision: str = "main"
    instruction: str = "none"
    """`none`: bare questions; `dapo`: asked as the published DAPO files do."""
    rows: int | None = None
    """Problems of a generated set."""
    seed: int | None = None
    """Seed of a generated set."""

    @property
    def is_generated(self) -> bool:
        """True for a set that is made on the spot."""
        return self.name in GENERATED or self.name.startswith(_GYM)


@dataclass
class PrepareReport:
    """The outcome of `winnow data prepare`, in counts."""

    name: str
    split: str
    out: str
    origin: str = ""
    """The files, the hub commit or the seed that the rows came from."""
    read: int = 0
    copies: int = 0
    """Rows left out because one like them was there."""
    instructions_removed: int = 0
    """Rows, copies included, that came with an instruction around their question."""
    other_sources: Counter[str] = field(default_factory=Counter)
    """Rows left out because they belong to another set, by data source."""
    data_sources: Counter[str] = field(default_factory=Counter)
    """Rows written, by data source."""
    ability: str = ""
    """The subject of the problems, such as `math` or `code`."""

    @property
    def written(self) -> int:
        """Rows written."""
        return self.data_sources.total()


def prepare(request: PrepareRequest) -> PrepareReport:
    """Read, convert and write a data set.

    Raises:
        DataError: something asked for does not exist, or a row is not usable.
    """
    _check_request(request)
    splits = list(_PROBLEMS if request.is_generated else SETS[request.name].files)
    split = request.split or splits[0]
    if split not in splits:
        choices = " and ".join(splits)
        raise DataError(f"--split is {split}, but {request.name} has {choices}; choose one")
    done = PrepareReport(request.name, split, _output_path(request, split, len(splits) > 1))
    rows = _generate(request, done) if request.is_generated else _read_published(request, done)
    unique: dict[tuple[object, ...], Row] = {}
    for row in rows:
        done.read += 1
        conversation = tuple((message["role"], message["content"]) for message in row.messages)
        unique.setdefault((row.data_source, conversation, row.ground_truth, row.images), row)
    done.copies = done.read - len(unique)
    done.read += done.other_sources.total()
    if not unique:
        raise _no_rows_error(done)
    done.data_sources.update(row.data_source for row in unique.values())
    _save(done, list(unique.values()), request.instruction)
    return done


def _check_request(request: PrepareRequest) -> None:
    """Refuse options that are wrong or conflict, before any work."""
    name, instruction = request.name, request.instruction
    if instruction not in ("none", "dapo"):
        raise DataError(f"--instruction is {instruction}; it must be none or dapo")
    if request.rows is not None and request.rows < 1:
        raise DataError(f"--rows is {request.rows}; it must be at least 1")
    if request.is_generated:
        if request.files or instruction != "none" or request.revision != "main":
            raise DataError(f"{name} is generated; leave out --from, --revision and --instruction")
        return
    if name not in SETS:
        choices = ", ".join((*SETS, *GENERATED))
        raise DataError(f"{name} is not a known data set; available: {choices}")
    for value, option in ((request.rows, "--rows"), (request.seed, "--seed")):
        if value is not None:
            names = ", ".join(GENERATED)
            raise DataError(f"{option} is {value}, but only {names} are generated; remove it")
    if instruction == "dapo" and not SETS[name].dapo_scored:
        raise DataError(
            f"--instruction is dapo, but {name} is not scored by its line Answer:; remove it"
        )
    if request.files and request.revision != "main":
        raise DataError("--revision is for the hub and conflicts with --from; give one of them")


def _output_path(request: PrepareRequest, split: str, several: bool) -> str:
    """Choose the output path, and check before any work that it is a local parquet file."""
    stem = request.name.replace("/", "-")
    out = request.out or f"data/{stem}{f'-{split}' if several else ''}.parquet"
    if "://" in out or not out.endswith(".parquet") or Path(out).expanduser().is_dir():
        raise DataError(f"--out is {out}; it must be a local path that ends in .parquet")
    return out


def _read_published(request: PrepareRequest, done: PrepareReport) -> Iterator[Row]:
    """Read the rows of a published set, and count what is taken off and left out."""
    named = SETS[request.name]
    paths: Sequence[str] = request.files
    done.origin, done.ability = ", ".join(paths), named.ability
    if not paths:
        commit, files = download_first_match(named.repo, named.files[done.split], request.revision)
        paths = list(files.values())
        done.origin = f"{named.repo} at {commit[:12]} ({', '.join(files)}; {named.licence})"
    for path in paths:
        for number, record in read_records(path):
            other = foreign_source(record, named)
            if other is not None:
                done.other_sources[other] += 1
                continue
            converted = convert_row(record, f"{path} row {number}", named, folder_of(path))
            row, removed = strip_instructions(converted)
            done.instructions_removed += removed
            for _ in open_images(row.images, row.origin, DataConfig()):
                pass
            yield row


def _generate(request: PrepareRequest, done: PrepareReport) -> Iterator[Row]:
    """Make the rows of a generated set: the same ones for the same seed."""
    test, seed, name = done.split == "test", request.seed or 0, request.name
    done.ability = name.partition("/")[0]
    done.origin = "generated, held out from training" if test else f"generated with seed {seed}"
    count = request.rows or (_GYM_PROBLEMS if name.startswith(_GYM) else _PROBLEMS)[done.split]
    if name == "countdown":
        from winnow.data import countdown

        return countdown.generate_rows(seed, count, test)
    section: SortDigitsTask | ReasoningGymTask = SortDigitsTask(eval_problems=count)
    if name != "sort_digits":
        section = ReasoningGymTask(task=name.removeprefix(_GYM), eval_problems=count)
    task = make_task_rows(DataConfig(task=section), seed)
    assert task is not None
    if test:
        return iter(task.held_out())
    return (next(task.candidates(index)) for index in range(count))


def _no_rows_error(done: PrepareReport) -> DataError:
    if not done.other_sources:
        return DataError(f"{done.origin}: has no rows; choose another file")
    seen = [f"{excerpt(name, 60)} ({count:,})" for name, count in done.other_sources.items()]
    some = ", ".join(seen[:5]) + (", …" if len(seen) > 5 else "")
    return DataError(
        f"{done.origin}: no row belongs to {done.name}; their data_source is {some}; choose "
        "another set or another file"
    )


def _save(done: PrepareReport, rows: Sequence[Row], instruction: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    notes = dict.fromkeys(key for row in rows for key in row.extra.get("extra_info", {}))
    text = pa.string()
    info = {"index": pa.int64(), "split": text, **dict.fromkeys(notes, text)}
    schema = pa.schema(
        {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct(info),
        }
    )
    if any(row.images for row in rows):
        images = pa.list_(pa.struct({"bytes": pa.binary(), "path": text}))
        schema = schema.append(pa.field("images", images))
    after = SETS[done.name].instruction if done.name in SETS else ""
    records = [
        {
            "data_source": row.data_source,
            "prompt": _build_prompt(row, instruction, after),
            "ability": done.ability,
            "reward_model": {"style": "rule", "ground_truth": row.ground_truth},
            "extra_info": {**row.extra.get("extra_info", {}), "index": i, "split": done.split},
            "images": [{"bytes": read_image(image)} for image in row.images],
        }
        for i, row in enumerate(rows)
    ]
    buffer = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(records, schema), buffer)
    try:
        write_atomic(Path(done.out).expanduser(), buffer.getvalue())
    except WinnowError as error:
        reason = getattr(error.__cause__, "strerror", error)
        raise DataError(
            f"cannot write {done.out}: {reason}; choose another file with --out"
        ) from error


def _build_prompt(row: Row, instruction: str, after: str) -> list[dict[str, str]]:
    prompt = [{"role": m["role"], "content": m["content"]} for m in row.messages]
    last = next((message for message in reversed(prompt) if message["role"] == "user"), None)
    if instruction == "dapo" and last is not None:
        last["content"] = add_dapo_instruction(last["content"])
    elif last is not None:
        last["content"] += after
    return prompt


def download_first_match(
    repo: str, patterns: Sequence[str], revision: str = "main"
) -> tuple[str, dict[str, str]]:
    """Fetch the files of a hub data set that match the first pattern to match any.

    All are taken from the one commit that the revision names now, and land in the hub's usual
    cache. `HF_ENDPOINT` names another server, `HF_TOKEN` who asks.

    Returns:
        The commit, and by the files' names in the repository their paths in the cache.

    Raises:
        DataError: the hub cannot be reached or refuses, or has no such file.
    """
    place = f"hub data set {repo} at {revision}"
    try:
        listing = list_files(place, repo, revision)
        matches = (fnmatch.filter(listing.files, pattern) for pattern in patterns)
        names = next((matching for matching in matches if matching), [])
        pins = {name: f"hf://datasets/{repo}@{listing.commit}/{name}" for name in names}
        paths = {name: str(fetch_file(place, pin)) for name, pin in pins.items()}
    except DataError as error:
        raise DataError(f"{error}, {_INSTEAD}") from error
    if not paths:
        some = ", ".join(listing.files[:5]) or "none"
        some += ", …" if len(listing.files) > 5 else ""
        raise DataError(
            f"{place}: no file matches {' or '.join(patterns)} (it has {some}); choose another "
            f"--revision, {_INSTEAD}"
        )
    return listing.commit, paths
