"""Reading of data files, local or remote, into checked rows.

Formats are recognised by name: `.parquet`, `.csv` (whose values all stay texts), and one JSON
object a line in `.jsonl`, `.json`, `.jsonl.gz`, `.json.gz`. A path with `://` is opened by fsspec.
A row is checked when it is read, so that a fault is met before training and is named by its file,
row and field. Rows count from 1. `winnow.data.columns` knows which columns count, and
`winnow.data.prompts` turns a row's messages into tokens.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from winnow.config.data import DataConfig
from winnow.data.columns import (
    Layout,
    Record,
    describe_value,
    detect_layout,
    error_line,
    excerpt,
    field_error,
)
from winnow.data.hub import FORMATS, fetch_file, is_on_hub, parse_repo, pin_files
from winnow.data.images import IMAGE_KEYS, IMAGE_MARK, Source, parse_image
from winnow.errors import DataError

Message = Mapping[str, Any]
_TABLES = ".parquet", ".csv"
MOST_BYTES_A_LINE = 64 << 20
"""Most bytes of a JSON line."""
_MISSING = "no such file; check the path"
_IMAGE_TEXT = re.compile(r"^data:image/|\.(?:png|jpe?g|webp|gif|bmp)$", re.IGNORECASE)
_FORMAT = re.compile(r"\.(?:parquet|jsonl?(?:\.gz)?|csv)$")


@dataclass(frozen=True, eq=False)
class Row:
    """A checked row: a prompt that is not yet rendered."""

    uid: str
    """File name and row number: `extra_info.index` is not reliably unique."""
    origin: str
    """The same for a person to read, such as `train.parquet row 7`."""
    data_source: str
    messages: tuple[Message, ...]
    """With `role` and `content` at least."""
    ground_truth: Any
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Every other column; also the ground truth's under its name and, where it is a list of
    messages, the prompt under `prompt`, as TRL's reward functions get them."""
    layout: str = ""
    """The columns that were taken, for the user."""
    images: tuple[Source, ...] = ()
    """If there are any, each `<image>` in the messages stands for one of them."""

    @property
    def text(self) -> str:
        """The contents of its messages, a line or more for each."""
        return "\n".join(message["content"] for message in self.messages)


def read_rows(paths: Sequence[str], config: DataConfig | None = None) -> list[Row]:
    """Read and check the rows of all files, in order; `config` says which columns count.

    Raises:
        DataError: a file or a row is not usable.
    """
    config = config or DataConfig()
    paths = resolve_files(paths, config)
    short = [path.rstrip("/").rpartition("/")[2] for path in paths]
    rows: list[Row] = []
    for path, name in zip(paths, short, strict=True):
        # Files of one name in different folders need the whole path to distinguish their rows.
        file = name if short.count(name) == 1 else path
        source = parse_repo(path) or _FORMAT.sub("", name)
        layout: Layout | None = None
        for number, record in read_records(path):
            origin = f"{path} row {number}"
            layout = layout or detect_layout(record, config, origin, source)
            rows.append(to_row(record, origin, f"{file}:{number}", layout, folder_of(path)))
        if layout is None:
            raise DataError(f"{path}: the file has no rows; remove it or write it again")
    return rows


def folder_of(path: str) -> Path | None:
    """Return the folder of a local file, where its relative paths start; None for a URL."""
    return None if "://" in path else Path(path).expanduser().absolute().parent


def resolve_files(paths: Sequence[str], config: DataConfig) -> list[str]:
    """Return the files that are named, those of the hub at their commit.

    Raises:
        DataError: one is given twice, or the hub has none of the name.
    """
    repeated = next((path for path, count in Counter(paths).items() if count > 1), None)
    if repeated is not None:
        raise DataError(f"{repeated}: listed twice; list each data file once")
    return [
        file
        for path in paths
        for file in (config.hub_files.get(path) or pin_files(path) if is_on_hub(path) else (path,))
    ]


def to_row(
    record: Record, origin: str, uid: str, layout: Layout, folder: Path | None = None
) -> Row:
    """Check a record of a layout.

    Args:
        folder: relative paths of images start there.

    Raises:
        DataError: a column is missing or holds something else.
    """
    source = record.get(layout.source) if layout.source else None
    source = layout.default_source if source in (None, "") and layout.default_source else source
    if not isinstance(source, str) or not source.strip():
        name = layout.source or "data_source"
        raise field_error(origin, name, source, "a name that routes the answer to a scorer")
    truth = layout.read_truth(record, origin)
    column, images = layout.images, record.get(layout.images)
    single = record.get("image")
    # A text may be anything, such as the image of a container.
    is_text = isinstance(single, str) and not _IMAGE_TEXT.search(single)
    if images is None and single is not None and not is_text and column == Layout.images:
        column, images = "image", single
    used = {layout.source, layout.prompt, column}
    extra = {key: value for key, value in record.items() if key not in used}
    if isinstance(record.get(layout.prompt), list):
        extra["prompt"] = record[layout.prompt]
    if layout.is_verl:
        rest = {k: value for k, value in extra.pop("reward_model").items() if k != "ground_truth"}
        extra |= {"reward_model": rest} if rest else {}
    elif layout.name == "GSM8K":
        extra = {"ability": "math", **extra}
        info = {"question": record[layout.prompt], "answer": record[layout.truth or ""]}
        extra["extra_info"] = info
    verl_info = extra.get("extra_info")
    if isinstance(verl_info, Mapping) and verl_info.get("need_tools_kwargs"):
        kwargs = verl_info.get("tools_kwargs")
        if not isinstance(kwargs, Mapping) or not kwargs:
            expected = "an object with the arguments of each tool, as need_tools_kwargs is true"
            raise field_error(origin, "extra_info.tools_kwargs", kwargs, expected)
    messages, parts = _messages(record, origin, layout.prompt)
    stored = images if isinstance(images, list | tuple) else [] if images is None else [images]
    in_parts = [part for part in parts if part is not None]
    images, count = [*in_parts, *stored], sum(m["content"].count(IMAGE_MARK) for m in messages)
    if images and not count and not layout.is_verl:  # TRL's rows have no marks
        count = len(images)
        at = next((i for i, m in enumerate(messages) if m["role"] == "user"), 0)
        content = IMAGE_MARK * count + messages[at]["content"]
        messages[at] = {**messages[at], "content": content}
    has_images = parts or record.get(column) is not None
    if has_images and (count != len(images) or (stored and in_parts)):
        raise DataError(
            f"{origin}: {layout.prompt} has {count} <image> or parts of the type image, "
            f"{len(in_parts)} of them with an image, and {column} has {len(stored)}; give an image "
            "for each, all in the column or all in parts"
        )
    sources = tuple(parse_image(v, origin, f"image {i}", folder) for i, v in enumerate(images, 1))
    return Row(uid, origin, source.strip(), tuple(messages), truth, extra, str(layout), sources)


def _messages(record: Record, origin: str, prompt_key: str) -> tuple[list[Message], list[Any]]:
    """Return a record's messages as texts, and the images of their parts; None: in the column."""
    images = list[Any]()
    prompt = record.get(prompt_key)
    if isinstance(prompt, str) and prompt:
        return [{"role": "user", "content": prompt}], images
    if not isinstance(prompt, list) or not prompt:
        remedy = "" if prompt_key in record else "; data.prompt_key names the column"
        raise field_error(origin, prompt_key, prompt, f"a text or a list of messages{remedy}")
    messages: list[Message] = []
    for i, message in enumerate(prompt):
        place = f"{prompt_key}[{i}]"
        if not isinstance(message, dict):
            raise field_error(origin, place, message, "an object with role and content")
        if isinstance(message.get("content"), list):
            text = _join_parts(message["content"], images, origin, f"{place}.content")
            message = {**message, "content": text}
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise field_error(origin, f"{place}.{key}", message.get(key), "a text")
        # Parquet gives every message each key that any of them has.
        messages.append({key: value for key, value in message.items() if value is not None})
    if messages[-1]["role"] == "assistant":
        raise DataError(
            f"{origin}: {prompt_key} ends with an assistant message; remove that message from "
            "the rows, as the policy generates it"
        )
    return messages, images


def _join_parts(parts: Sequence[Any], images: list[Any], origin: str, name: str) -> str:
    """Return the parts of a message as text, and add their images to `images`."""
    texts = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in ("image", "image_url"):
            images.append(next((part[key] for key in IMAGE_KEYS if part.get(key)), None))
        elif kind != "text" or not isinstance(part.get("text"), str):
            raise field_error(origin, f"{name}[{i}]", part, "an object of the type text or image")
        texts.append(part["text"] if kind == "text" else IMAGE_MARK)
    return "".join(texts)


def check_files_exist(paths: Sequence[str]) -> None:
    """Refuse local files that are not there, before anything of a run is made.

    Raises:
        DataError: one is missing.
    """
    for path in paths:
        if "://" not in path and not Path(path).expanduser().exists():
            raise DataError(f"{path}: {_MISSING}")


def read_records(path: str) -> Iterator[tuple[int, Record]]:
    """Yield each record of a file with its number from 1; blank lines count but are skipped.

    Raises:
        DataError: the file is missing, empty or damaged, of no known format, or a record of it has
            no columns.
    """
    if Path(path).expanduser().is_dir():
        raise DataError(f"{path}: is a folder; name the data files in it")
    if not path.endswith(FORMATS):
        raise DataError(f"{path}: unknown format; data files end in {', '.join(FORMATS)}")
    content = _read_bytes(path)
    if not content:
        raise DataError(f"{path}: the file is empty; download or write it again")
    records = _read_table(path, content) if path.endswith(_TABLES) else _parse_lines(path, content)
    for number, record in records:
        if not isinstance(record, dict):
            raise DataError(
                f"{path} row {number}: must be an object with columns, got "
                f"{describe_value(record)}; write one JSON object a line"
            )
        yield number, record


def _read_bytes(path: str) -> bytes:
    if is_on_hub(path):
        path = str(fetch_file(path, path))
    try:
        if "://" not in path:
            return Path(path).expanduser().read_bytes()
        import fsspec

        with fsspec.open(path, "rb") as stream:
            return bytes(stream.read())
    except FileNotFoundError as error:
        raise DataError(f"{path}: {_MISSING}") from error
    except ImportError as error:
        raise DataError(f"{path}: its protocol needs a package: {error_line(error)}") from error
    # Each file system has its family of errors (botocore's, aiohttp's, httpx's).
    except Exception as error:
        reason = getattr(error, "strerror", None) or error_line(error)
        remedy = "check the path, the network and your permission to read it"
        if path.startswith("hdfs://"):
            remedy = "install Java and a Hadoop client; set JAVA_HOME, HADOOP_HOME and CLASSPATH"
        raise DataError(f"{path}: cannot be read: {reason}; {remedy}") from error


def _parse_lines(path: str, content: bytes) -> Iterator[tuple[int, Any]]:
    for number, line in enumerate(_read_lines(path, content), start=1):
        if not line.strip():
            continue
        try:
            # Windows programs write a byte order mark in front of a file.
            record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
            if b"\\ud" in line.lower():
                # An escape may name half a character, which no tokenizer can take.
                json.dumps(record, ensure_ascii=False).encode()
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else error_line(error)
            raise DataError(
                f"{path} row {number}: not valid JSON in UTF-8 ({reason}); write one JSON object "
                "a line"
            ) from error
        yield number, record


def _read_lines(path: str, content: bytes) -> Iterator[bytes]:
    """Yield the lines of a file; a gzipped one, of which a few bytes may be very many, as read."""
    stream: io.BufferedIOBase = io.BytesIO(content)
    if path.endswith(".gz"):
        stream = gzip.GzipFile(fileobj=stream)
    number = 0
    try:
        while line := stream.readline(MOST_BYTES_A_LINE + 1):
            number += 1
            if len(line) > MOST_BYTES_A_LINE:
                raise DataError(
                    f"{path} row {number}: longer than {MOST_BYTES_A_LINE >> 20} MiB; write one "
                    "JSON object a line"
                )
            yield line
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(
            f"{path}: not a whole gzip file ({error_line(error)}); download or write it again"
        ) from error


def _read_table(path: str, content: bytes) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa

    # Dates out of Python's range, text that is not UTF-8, and whatever a type may hold that
    # Python cannot.
    faults = (pa.ArrowException, ValueError, OverflowError, TypeError, LookupError)
    number = 0
    for batch in _read_batches(path, content):
        names = batch.schema.names
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise DataError(f"{path}: two columns are called {repeated!r}; rename one of them")
        try:
            records = batch.to_pylist()
        except faults as error:
            place = _locate_bad_value(batch, number, faults)
            raise DataError(
                f"{path}{place} cannot be read ({error_line(error)}); write it as text, in UTF-8"
            ) from error
        for record in records:
            number += 1
            yield number, record


def _read_batches(path: str, content: bytes) -> Iterator[Any]:
    """Yield a file's rows in batches: many copies of a row take little space while packed."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from pyarrow import csv

    kind = path.rpartition(".")[2]
    try:
        if kind == "csv":
            # Numbers stay as they are written: a truth of 007 or 1e5 is a text.
            lines = csv.ParseOptions(newlines_in_values=True)
            names = csv.open_csv(io.BytesIO(content), parse_options=lines).schema.names
            texts = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
            table = csv.read_csv(io.BytesIO(content), None, lines, texts)
            yield from table.to_batches(max_chunksize=1024)
            return
        yield from pq.ParquetFile(io.BytesIO(content)).iter_batches(batch_size=1024)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path}: not a readable {kind} file ({error_line(error)}); download or write it again"
        ) from error


def _locate_bad_value(batch: Any, before: int, faults: tuple[type[Exception], ...]) -> str:
    """Say where the value of a batch stands that Python cannot take."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for number, value in enumerate(column, start=before + 1):
            try:
                value.as_py()
            except faults:
                return f" row {number}: {excerpt(name)} of type {column.type}"
    return ""
