"""Files of data sets on the hub, named by a URL and pinned to a commit.

| URL | names |
|---|---|
| `hf://datasets/OWNER/NAME/PATH.parquet` | a file; the path may hold `*` |
| `hf://datasets/OWNER/NAME/CONFIG/SPLIT` | the files of a split, as the data set's card says |
| `hf://datasets/OWNER/NAME/SPLIT` | the same, where there is one configuration or a default |
| `hf://datasets/OWNER/NAME` | the split train |

`datasets/` may be left out, and `@REVISION` may stand behind NAME, as in fsspec's URLs of the hub.
Where the card names no files, a split's are those that have its name as a word of their path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from winnow.data.columns import excerpt
from winnow.errors import DataError
from winnow.models.fetch import explain_hub_error

FORMATS = (".parquet", ".jsonl", ".json", ".jsonl.gz", ".json.gz", ".csv")
_URL = re.compile(r"hf://(?:datasets/)?([^/@]+/[^/@]+)(?:@([^/]+))?(?:/(.+))?")
_REMEDY = "name a file (PATH or a pattern with *), CONFIG/SPLIT or SPLIT"


class Listing(NamedTuple):
    """The files of a data set at a commit."""

    commit: str
    files: list[str]
    configs: Sequence[Mapping[str, Any]]
    """Configurations as the card has them."""


def is_on_hub(path: str) -> bool:
    """Return whether a path is a URL of the hub."""
    return path.startswith("hf://")


def parse_repo(url: str) -> str | None:
    """Return the data set that a URL names; None for paths and other URLs."""
    match = _URL.fullmatch(url)
    return match[1] if match else None


def pin_files(url: str) -> tuple[str, ...]:
    """Find the files that a URL names now, as URLs with the commit.

    Raises:
        DataError: there is no such data set, split or file, or the hub cannot be asked.
    """
    match = _URL.fullmatch(url)
    if match is None:
        raise DataError(f"{url}: is not a data set URL; write hf://datasets/OWNER/NAME/PATH")
    repo, revision, rest = match[1], match[2] or "main", match[3] or "train"
    listing = list_files(url, repo, revision)
    paths = [file for file in listing.files if file.endswith(FORMATS)]
    if rest.endswith(FORMATS) or "*" in rest:
        files = [file for file in paths if fnmatchcase(file, rest)]
    else:
        rows = [file for file in paths if not file.endswith(".csv")]  # else a copy of the same rows
        files = _split_files(url, listing.configs, rows or paths, rest)
    if not files:
        some = ", ".join(excerpt(name, 60) for name in listing.files[:5]) or "none"
        tail = ", …" if len(listing.files) > 5 else ""
        raise DataError(f"{url}: no file of a known format; it has {some}{tail}; {_REMEDY}")
    return tuple(f"hf://datasets/{repo}@{listing.commit}/{file}" for file in files)


def _split_files(
    url: str, configs: Sequence[Mapping[str, Any]], files: Sequence[str], rest: str
) -> list[str]:
    """Return the files of CONFIG/SPLIT or SPLIT."""
    config, _, split = rest.rpartition("/")
    if not configs:
        inside = [file for file in files if file.startswith(f"{config}/" if config else "")]
        word = re.compile(rf"(?:^|[/._-]){re.escape(split)}(?:[/._-]|$)")
        return [file for file in inside if word.search(file)]
    by_name = {str(each.get("config_name", "default")): each for each in configs}
    default = [name for name, each in by_name.items() if each.get("default") or name == "default"]
    name = config or (default or list(by_name))[0]
    if name not in by_name or (not config and not default and len(by_name) > 1):
        raise DataError(f"{url}: has the configurations {', '.join(by_name)}; {_REMEDY}")
    entries = by_name[name].get("data_files", [])
    patterns: dict[str, list[str]] = {}
    for entry in entries if isinstance(entries, list) else [entries]:
        mapping = entry if isinstance(entry, Mapping) else {"split": "train", "path": entry}
        paths = mapping.get("path", [])
        split_paths = patterns.setdefault(str(mapping.get("split", "train")), [])
        split_paths += paths if isinstance(paths, list) else [paths]
    if split not in patterns:
        raise DataError(f"{url}: {name} has the splits {', '.join(patterns)}; {_REMEDY}")
    return [file for file in files if any(fnmatchcase(file, each) for each in patterns[split])]


def list_files(label: str, repo: str, revision: str) -> Listing:
    """Ask the hub for the files of a data set.

    Args:
        place: names it in messages.

    Raises:
        DataError: the hub cannot be reached or refuses.
    """
    from huggingface_hub import HfApi

    try:
        info = HfApi().dataset_info(repo, revision=revision, timeout=30)
    # The client raises its own errors and those of the HTTP library below, which has changed.
    except Exception as error:
        raise DataError(f"{label}: {explain_hub_error(error)}") from error
    files = sorted(file.rfilename for file in info.siblings or ())
    card = vars(info.card_data) if info.card_data else {}
    configs = card.get("configs")
    return Listing(info.sha or revision, files, configs if isinstance(configs, list) else [])


def fetch_file(label: str, url: str) -> Path:
    """Return the copy of a pinned file in the hub's usual cache, fetched if it is not there.

    Raises:
        DataError: it cannot be fetched.
    """
    from huggingface_hub import hf_hub_download

    match = _URL.fullmatch(url)
    assert match is not None
    try:
        repo, revision, file = match.groups()
        return Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision))
    except Exception as error:
        raise DataError(f"{label}: {explain_hub_error(error)}") from error
