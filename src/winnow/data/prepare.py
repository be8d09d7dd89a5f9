"""Write known data sets as parquet files in verl's schema: from the hub, from files, or generated.

Copies go: two rows are copies if data source, messages and ground truth are the same, white
space at the ends and known instructions aside. The file appears as a whole or not at all.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path

from winnow.config.data import ReasoningGymTask, SortDigitsTask
from winnow.data.files import excerpt, said
from winnow.data.published import (
    SETS,
    Item,
    NamedSet,
    foreign_source,
    to_item,
    with_dapo_instruction,
)
from winnow.data.sources import Row, read_objects
from winnow.errors import DataError, WinnowError
from winnow.observe.files import write_atomic

_GYM = "reasoning_gym/"
GENERATED = ("sort_digits", "countdown", f"{_GYM}TASK")
_TRAIN_PROBLEMS, _TEST_PROBLEMS = 10_000, 400
# A task of reasoning-gym may take a second for a problem.
_TRAIN_GYM, _TEST_GYM = 1_000, 200
_INSTEAD = "or download the file yourself and name it with --from"


@dataclass(frozen=True)
class Request:
    """The words of `winnow data prepare`."""

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


@dataclass(frozen=True)
class Prepared:
    """The outcome of `winnow data prepare`, in counts."""

    name: str
    split: str
    origin: str
    """The files, the hub commit or the seed that the rows came from."""
    out: str
    read: int
    copies: int
    """Rows left out because one like them was there."""
    instructions_removed: int
    """Rows, copies included, that came with an instruction around their question."""
    other_sources: Mapping[str, int]
    """Rows left out because they belong to another set, by data source."""
    written: int
    data_sources: Mapping[str, int]
    """Rows written, by data source."""
    abilities: frozenset[str]
    """Abilities of the rows written, such as `math` or `code`."""


def prepare(request: Request) -> Prepared:
    """Read, convert and write a data set.

    Raises:
        DataError: something asked for does not exist, or a row is not usable.
    """
    if request.instruction not in ("none", "dapo"):
        raise DataError(f"--instruction is {request.instruction}; it must be none or dapo")
    if request.rows is not None and request.rows < 1:
        raise DataError(f"--rows is {request.rows}; it must be at least 1")
    if request.name in GENERATED[:-1] or request.name.startswith(_GYM):
        return _generate(request)
    if request.name not in SETS:
        known = ", ".join((*SETS, *GENERATED))
        raise DataError(f"{request.name} is no data set that can be prepared; there are {known}")
    named = SETS[request.name]
    _check_options(request, named)
    split = _split(request, list(named.files), " and ".join(named.files))
    out = _target(request, split, len(named.files) > 1)
    if request.files:
        paths, origin = request.files, ", ".join(request.files)
    else:
        got = download(named.repo, named.files[split], request.revision)
        paths = got.paths
        origin = f"{named.repo} at {got.commit[:12]} ({', '.join(got.names)}; {named.licence})"
    others: Counter[str] = Counter()
    return _write(request, split, origin, out, _items(paths, named, others), others)


def _check_options(request: Request, named: NamedSet) -> None:
    for given, option in ((request.rows, "--rows"), (request.seed, "--seed")):
        if given is not None:
            raise DataError(
                f"{option} is {given}, but only {', '.join(GENERATED)} are generated; leave it out"
            )
    if request.instruction == "dapo" and not named.dapo_scored:
        how = " (the recipe gsm8k says how to ask)" if request.name == "gsm8k" else ""
        raise DataError(
            f"--instruction is dapo, but {request.name} is not scored by a line Answer:; "
            f"leave it out{how}"
        )
    if request.files and request.revision != "main":
        raise DataError("--revision chooses from the hub and --from does not; give one of the two")


def _split(request: Request, splits: Sequence[str], said_as: str) -> str:
    if request.split is not None and request.split not in splits:
        raise DataError(f"--split is {request.split}, but {request.name} has {said_as}; choose one")
    return request.split or splits[0]


def _items(paths: Sequence[str], named: NamedSet, others: Counter[str]) -> Iterator[Item]:
    for path in paths:
        for number, record in read_objects(path):
            other = foreign_source(record, named)
            if other is None:
                yield to_item(record, f"{path} row {number}", named)
            else:
                others[other] += 1


def _generate(request: Request) -> Prepared:
    """Write a set that is made on the spot: the same rows for the same seed."""
    if request.files or request.instruction != "none" or request.revision != "main":
        raise DataError(
            f"{request.name} is generated; leave out --from, --revision and --instruction"
        )
    split = _split(request, ("train", "test"), "train and test")
    out = _target(request, split, True)
    test, seed = split == "test", request.seed or 0
    origin = "generated, held out from training" if test else f"generated with seed {seed}"
    if request.name.startswith(_GYM):
        count = request.rows or (_TEST_GYM if test else _TRAIN_GYM)
    else:
        count = request.rows or (_TEST_PROBLEMS if test else _TRAIN_PROBLEMS)
    rows = _generated_rows(request.name, test, seed, count)
    return _write(request, split, origin, out, map(_generated_item, rows), Counter())


def _generated_rows(name: str, test: bool, seed: int, count: int) -> Iterator[Row]:
    if name == "countdown":
        from winnow.data.tasks import countdown

        return countdown.rows(seed, count, test)
    if name == "sort_digits":
        from winnow.data.tasks import sort_digits

        task = SortDigitsTask()
        if test:
            return map(sort_digits.row, sort_digits.held_out_problems(task, count))
        stream = sort_digits.SortDigitsStream(task, seed)
        return (stream.row(i) for i in range(count))
    from winnow.data.tasks import procedural

    settings = ReasoningGymTask(task=name.removeprefix(_GYM), eval_problems=count)
    if test:
        return iter(procedural.held_out_rows(settings))
    return procedural.training_rows(settings, seed, count)


def _generated_item(row: Row) -> Item:
    messages = tuple((message["role"], message["content"]) for message in row.messages)
    notes = row.extra.get("extra_info", {})
    ability = row.data_source.partition("/")[0]
    return Item(row.data_source, messages, row.ground_truth, notes, ability=ability)


def _write(
    request: Request,
    split: str,
    origin: str,
    out: str,
    items: Iterator[Item],
    others: Counter[str],
) -> Prepared:
    unique: dict[tuple[object, ...], Item] = {}
    read = removed = 0
    for item in items:
        read += 1
        removed += item.instruction_removed
        unique.setdefault(item.identity, item)
    if not unique and others:
        seen = [f"{excerpt(name, 60)} ({count:,})" for name, count in others.items()]
        some = ", ".join(seen[:5]) + (", …" if len(seen) > 5 else "")
        raise DataError(
            f"{origin}: no row belongs to {request.name}; their data_source is {some}; choose "
            "another set or another file"
        )
    if not unique:
        raise DataError(f"{origin}: there are no rows; choose another file")
    _save(out, list(unique.values()), split, request.instruction)
    return Prepared(
        name=request.name,
        split=split,
        origin=origin,
        out=out,
        read=read + others.total(),
        copies=read - len(unique),
        instructions_removed=removed,
        other_sources=dict(others),
        written=len(unique),
        data_sources=dict(Counter(item.data_source for item in unique.values())),
        abilities=frozenset(item.ability for item in unique.values()),
    )


def _target(request: Request, split: str, several: bool) -> str:
    """Choose where to write, and check before any work that it is a parquet file here."""
    stem = request.name.replace("/", "-")
    name = f"{stem}-{split}" if several else stem
    out = request.out or f"data/{name}.parquet"
    if "://" in out:
        raise DataError(f"--out is {out}; it must be a file on this machine: copy it from there")
    if not out.endswith(".parquet"):
        raise DataError(f"--out is {out}; it must end in .parquet")
    if Path(out).expanduser().is_dir():
        raise DataError(f"--out is {out}, which is a folder; name a file in it")
    return out


def _save(out: str, items: list[Item], split: str, instruction: str) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    notes = list(dict.fromkeys(key for item in items for key in item.notes))
    text = pa.string()
    schema = pa.schema(
        {
            "data_source": text,
            "prompt": pa.list_(pa.struct({"role": text, "content": text})),
            "ability": text,
            "reward_model": pa.struct({"style": text, "ground_truth": text}),
            "extra_info": pa.struct(
                {"index": pa.int64(), "split": text, **dict.fromkeys(notes, text)}
            ),
        }
    )
    buffer = io.BytesIO()
    with pq.ParquetWriter(buffer, schema) as writer:
        numbered = enumerate(items)
        while some := list(islice(numbered, 10_000)):
            records = [_record(i, item, split, instruction) for i, item in some]
            writer.write_table(pa.Table.from_pylist(records, schema))
    path = Path(out).expanduser()
    try:
        write_atomic(path, buffer.getvalue())
    except WinnowError as error:
        cause = error.__cause__
        reason = cause.strerror if isinstance(cause, OSError) else str(error)
        raise DataError(f"cannot write {out}: {reason}; choose another file with --out") from error


def _record(index: int, item: Item, split: str, instruction: str) -> dict[str, object]:
    last = max((i for i, (role, _) in enumerate(item.messages) if role == "user"), default=-1)
    prompt = [{"role": role, "content": content} for role, content in item.messages]
    if instruction == "dapo" and last >= 0:
        prompt[last]["content"] = with_dapo_instruction(prompt[last]["content"])
    return {
        "data_source": item.data_source,
        "prompt": prompt,
        "ability": item.ability,
        "reward_model": {"style": "rule", "ground_truth": item.ground_truth},
        "extra_info": {**item.notes, "index": index, "split": split},
    }


@dataclass(frozen=True)
class HubFiles:
    """Downloaded files of a data set on the hub."""

    commit: str
    names: tuple[str, ...]
    """In the repository."""
    paths: tuple[str, ...]
    """In the cache, in the same order."""


def download(repo: str, patterns: Sequence[str], revision: str = "main") -> HubFiles:
    """Fetch the files of a hub data set that match the first pattern to match any.

    All are taken from the one commit that the revision names now, and land in the hub's usual
    cache. `HF_ENDPOINT` names another server, `HF_TOKEN` who asks.

    Raises:
        DataError: the hub cannot be reached or refuses, or has no such file.
    """
    from huggingface_hub import HfApi, hf_hub_download

    place = f"hub data set {repo} at {revision}"
    try:
        info = HfApi().dataset_info(repo, revision=revision, timeout=30)
        commit = info.sha or revision
        held = sorted(file.rfilename for file in info.siblings or ())
        found = [[name for name in held if fnmatchcase(name, pattern)] for pattern in patterns]
        names = next((matching for matching in found if matching), [])
        paths = [hf_hub_download(repo, n, repo_type="dataset", revision=commit) for n in names]
    # The client raises its own errors and those of the HTTP library below, which has changed.
    except Exception as error:
        raise DataError(f"{place}: {_reason(error)}, {_INSTEAD}") from error
    if not names:
        some = ", ".join(held[:5]) or "none"
        raise DataError(
            f"{place}: no file like {' or '.join(patterns)} (it has {some}"
            f"{', …' if len(held) > 5 else ''}); choose a --revision that has one, {_INSTEAD}"
        )
    return HubFiles(commit, tuple(names), tuple(paths))


def _reason(error: Exception) -> str:
    """Say what went wrong and what may help, on one line."""
    from huggingface_hub import constants, errors

    endpoint = constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError):
        return "asks for permission first; accept its terms on the hub and set HF_TOKEN"
    if isinstance(error, errors.RevisionNotFoundError):
        return "has no such revision; choose another --revision"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"is not on {endpoint}, or not for you; check HF_ENDPOINT and HF_TOKEN"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set; unset it"
    if isinstance(error, errors.HfHubHTTPError) and error.response is not None:
        return f"{endpoint} answers {error.response.status_code}; try again later"
    return (
        f"cannot be had from {endpoint} ({said(error)}); check the network, HF_ENDPOINT and the "
        "disk under HF_HOME"
    )
