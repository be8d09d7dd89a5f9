"""Known data sets as parquet files in verl's schema: from the hub, from files, or generated.

Copies go: two rows are copies if data source, messages and ground truth are the same, white
space at the ends and known instructions aside. The file appears as a whole or not at all.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from winnow.data.prepare_generated import generated
from winnow.data.prepare_hub import download
from winnow.data.prepare_instruction import with_dapo_instruction
from winnow.data.prepare_rows import Item, foreign_source, nothing_belongs, to_item
from winnow.data.prepare_sets import GENERATED, NamedSet, is_generated, named_set
from winnow.data.sources import read_objects
from winnow.errors import DataError, WinnowError
from winnow.observe.files import write_atomic

INSTRUCTIONS = ("none", "dapo")


@dataclass(frozen=True)
class Request:
    """What is to be prepared."""

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
    """Of a generated set."""
    seed: int | None = None
    """Of a generated set."""


@dataclass(frozen=True)
class Prepared:
    """What was done."""

    name: str
    split: str
    origin: str
    """Where the rows came from, for a person."""
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
    """Of the rows written."""
    abilities: frozenset[str]
    """Of the rows written, such as `math` or `code`."""


def prepare(request: Request) -> Prepared:
    """Read, convert and write a data set.

    Raises:
        DataError: something asked for does not exist, or a row is not usable.
    """
    if request.instruction not in INSTRUCTIONS:
        raise DataError(f"--instruction is {request.instruction}; it must be none or dapo")
    if request.rows is not None and request.rows < 1:
        raise DataError(f"--rows is {request.rows}; it must be at least 1")
    if is_generated(request.name):
        return _generate(request)
    named = named_set(request.name)
    for given, option in ((request.rows, "--rows"), (request.seed, "--seed")):
        if given is not None:
            raise DataError(
                f"{option} is {given}, but only {', '.join(GENERATED)} are generated; leave it out"
            )
    if request.instruction == "dapo" and not named.dapo_scored:
        raise DataError(
            f"--instruction is dapo, but {named.name} is not scored by a line Answer:; leave it "
            + ("out (the recipe gsm8k says how to ask)" if named.truth == "gsm8k" else "out")
        )
    if request.files and request.revision != "main":
        raise DataError("--revision chooses from the hub and --from does not; give one of the two")
    split = named.split(request.split)
    out = _target(request, split, len(named.files) > 1)
    if request.files:
        paths, origin = request.files, ", ".join(request.files)
    else:
        got = download(named.repo, named.files[split], request.revision)
        paths = got.paths
        origin = f"{named.repo} at {got.commit[:12]} ({', '.join(got.names)}; {named.licence})"
    others: Counter[str] = Counter()
    items = _items(paths, named, others)
    return _write(request, split, origin, out, items, others, named)


def _items(paths: Sequence[str], named: NamedSet, others: Counter[str]) -> Iterator[Item]:
    for path in paths:
        for number, record in read_objects(path):
            other = foreign_source(record, named)
            if other is None:
                yield to_item(record, path, number, named)
            else:
                others[other] += 1


def _generate(request: Request) -> Prepared:
    if request.files or request.instruction != "none" or request.revision != "main":
        raise DataError(
            f"{request.name} is generated; leave out --from, --revision and --instruction"
        )
    split = request.split or "train"
    if split not in ("train", "test"):
        raise DataError(f"--split is {split}, but {request.name} has train and test; choose one")
    out = _target(request, split, True)
    items, origin = generated(request.name, split == "test", request.rows, request.seed or 0)
    return _write(request, split, origin, out, items, Counter(), None)


def _write(
    request: Request,
    split: str,
    origin: str,
    out: str,
    items: Iterator[Item],
    others: Counter[str],
    named: NamedSet | None,
) -> Prepared:
    unique: dict[tuple[object, ...], Item] = {}
    read = removed = 0
    for item in items:
        read += 1
        removed += item.instruction_removed
        unique.setdefault(item.identity, item)
    if not unique and named is not None and others:
        raise nothing_belongs(named, origin, others)
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
    """Where to write, seen to be a parquet file on this machine before any work is done."""
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
    prompt = [
        {
            "role": role,
            "content": with_dapo_instruction(content)
            if instruction == "dapo" and i == last
            else content,
        }
        for i, (role, content) in enumerate(item.messages)
    ]
    return {
        "data_source": item.data_source,
        "prompt": prompt,
        "ability": item.ability,
        "reward_model": {"style": "rule", "ground_truth": item.ground_truth},
        "extra_info": {**item.notes, "index": index, "split": split},
    }
