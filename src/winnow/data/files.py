"""Records out of data files, local or remote: what is in them is checked by others.

Formats are told apart by name: `.parquet`, and one JSON object a line in `.jsonl`, `.json`,
`.jsonl.gz`, `.json.gz`. A path with `://` is opened by fsspec.
"""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from winnow.errors import DataError

_LINES = (".jsonl", ".json", ".jsonl.gz", ".json.gz")
_PARQUET = ".parquet"


def read_records(path: str) -> Iterator[tuple[int, Any]]:
    """Each record of a file with its number, counted from 1; blank lines count but are skipped.

    Raises:
        DataError: the file is missing, empty or damaged, or of no known format.
    """
    if Path(path).expanduser().is_dir():
        raise DataError(f"{path}: is a folder; name the data files in it")
    if not path.endswith((*_LINES, _PARQUET)):
        formats = ", ".join((_PARQUET, *_LINES))
        raise DataError(f"{path}: not a known format; data files end in {formats}")
    content = _read(path)
    if not content:
        raise DataError(f"{path}: the file is empty; download or write it again")
    yield from _parquet(path, content) if path.endswith(_PARQUET) else _lines(path, content)


def _read(path: str) -> bytes:
    if "://" in path:
        return _read_remote(path)
    file = Path(path).expanduser()
    try:
        return file.read_bytes()
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the path") from error
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; check its permissions"
        ) from error


def _read_remote(path: str) -> bytes:
    import fsspec

    try:
        with fsspec.open(path, "rb") as stream:
            return bytes(stream.read())
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the URL") from error
    except (OSError, ValueError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(
            f"{path}: cannot be read: {reason}; check the URL, and that the file system's package "
            "for fsspec is installed (s3fs, gcsfs, …)"
        ) from error


def _lines(path: str, content: bytes) -> Iterator[tuple[int, Any]]:
    if path.endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path}: not a whole gzip file ({error}); download or write it again"
            ) from error
    for number, line in enumerate(content.split(b"\n"), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line.decode("utf-8"))
            if b"\\ud" in line.lower():
                # An escape may name half a character, which no tokenizer can take.
                json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{path} row {number}: an escape \\ud… without its other half; write the "
                "character itself, in UTF-8"
            ) from error
        except UnicodeDecodeError as error:
            raise DataError(
                f"{path} row {number}: not valid UTF-8 (byte {error.start + 1} of the line); "
                "write the file again in UTF-8"
            ) from error
        except (ValueError, RecursionError) as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else str(error)
            raise DataError(
                f"{path} row {number}: not valid JSON ({reason}); write one JSON object a line"
            ) from error
        yield number, record


def _parquet(path: str, content: bytes) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        table = pq.read_table(io.BytesIO(content))
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise DataError(
            f"{path}: not a readable parquet file ({reason}); download or write it again"
        ) from error
    number = 0
    for batch in table.to_batches(max_chunksize=1024):
        try:
            records = batch.to_pylist()
        except UnicodeDecodeError:
            _name_bad_text(path, batch, number)
            raise
        for record in records:
            number += 1
            yield number, record


def _name_bad_text(path: str, batch: Any, before: int) -> None:
    """Find the first text in a batch that is not UTF-8."""
    for i in range(batch.num_rows):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column[i].as_py()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{path} row {before + i + 1}: {name} is not valid UTF-8; "
                    "write the file again in UTF-8"
                ) from error
