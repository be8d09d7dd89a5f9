"""What a tokenizer writes, and a folder for temporary files that takes none of it."""

from __future__ import annotations

import contextlib
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from winnow.data.tasks.sort_digits import build_tokenizer
from winnow.errors import ModelError
from winnow.models.causal_lm import tokenizer_files, write_files


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_tokenizer_is_written_as_it_saves_itself(tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    files = tokenizer_files(tokenizer)
    write_files(files, tmp_path / "ours")
    tokenizer.save_pretrained(tmp_path / "its")
    names = {path.name for path in (tmp_path / "its").iterdir()}
    assert {path.name for path in (tmp_path / "ours").iterdir()} == names >= {"tokenizer.json"}
    for name in names:
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "its" / name).read_bytes()


@pytest.mark.parametrize("size", [0, 300])  # Python's own file is refused, then the library's
def test_a_full_folder_for_temporary_files_is_one_line_and_nothing_stays_there(
    size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tokenizer = build_tokenizer()
    with largest_file(size), pytest.raises(ModelError) as caught:
        tokenizer_files(tokenizer)
    assert str(caught.value) == (
        "cannot write the tokenizer to the folder for temporary files: File too large; "
        "free some space there, or choose another one with TMPDIR=FOLDER"
    )
    assert list(tmp_path.iterdir()) == []
