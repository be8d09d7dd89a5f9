"""Reading of data files, local or remote, into records; `winnow.data.sources` checks them.

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
    """Yield each record of a file with its number from 1; blank lines count but are skipped.

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

    protocol = path.partition("://")[0].rpartition("::")[2]
    try:
        with fsspec.open(path, "rb") as stream:
            return bytes(stream.read())
    except FileNotFoundError as error:
        raise DataError(f"{path}: no such file; check the URL") from error
    except ImportError as error:
        raise DataError(
            f"{path}: {protocol}:// needs a package that is not installed; {said(error)}"
        ) from error
    # Each file system has a family of errors of its own (botocore's, aiohttp's, httpx's).
    except Exception as error:
        reason = said(error)
        remedy = "check the URL, the network and your credentials for it"
        if "libjvm" in reason or "libhdfs" in reason:
            remedy = "install Java and a Hadoop client; set JAVA_HOME, HADOOP_HOME and CLASSPATH"
        raise DataError(f"{path}: cannot be read: {reason}; {remedy}") from error


def _lines(path: str, content: bytes) -> Iterator[tuple[int, Any]]:
    if path.endswith(".gz"):
        try:
            content = gzip.decompress(content)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(
                f"{path}: not a whole gzip file ({said(error)}); download or write it again"
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
            reason = error.msg if isinstance(error, json.JSONDecodeError) else said(error)
            raise DataError(
                f"{path} row {number}: not valid JSON ({reason}); write one JSON object a line"
            ) from error
        yield number, record


def _parquet(path: str, content: bytes) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa

    number = 0
    for batch in _batches(path, content):
        names = batch.schema.names
        repeated = next((name for name in names if names.count(name) > 1), None)
        if repeated is not None:
            raise DataError(f"{path}: two columns are called {repeated!r}; rename one of them")
        try:
            records = batch.to_pylist()
        # Dates out of Python's range, text that is not UTF-8, and whatever a type may hold that
        # Python cannot.
        except (pa.ArrowException, ValueError, OverflowError, TypeError, LookupError) as error:
            raise _bad_value(path, batch, number, error) from error
        for record in records:
            number += 1
            yield number, record


def _batches(path: str, content: bytes) -> Iterator[Any]:
    """Yield a file's rows in batches: many copies of a row take little space while packed."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        yield from pq.ParquetFile(io.BytesIO(content)).iter_batches(batch_size=1024)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(
            f"{path}: not a readable parquet file ({said(error)}); download or write it again"
        ) from error


def _bad_value(path: str, batch: Any, before: int, error: Exception) -> DataError:
    """Name the value of a batch that Python cannot take."""
    for i in range(batch.num_rows):
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            try:
                column[i].as_py()
            except UnicodeDecodeError:
                fault = "is not valid UTF-8; write the file again in UTF-8"
            except type(error):
                fault = f"holds a value of type {column.type} that cannot be read; write it as text"
            else:
                continue
            return DataError(f"{path} row {before + i + 1}: {excerpt(name)} {fault}")
    return DataError(f"{path}: not a readable parquet file ({said(error)}); write it again")


def excerpt(text: str, characters: int = 100) -> str:
    """Cut a text to its beginning, on one line and safe to print."""
    text = " ".join(text[: 10 * characters].split())
    cut = text if len(text) <= characters else f"{text[: characters - 1]}…"
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in cut)


def said(error: BaseException) -> str:
    """Quote the first line of another library's error, or else name its type."""
    lines = str(error).strip().splitlines()
    return (excerpt(lines[0], 300) if lines else "") or type(error).__name__
