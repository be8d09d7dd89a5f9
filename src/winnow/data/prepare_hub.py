"""Files of a data set on the Hugging Face hub, or on a server that speaks its protocol.

Everything is taken from the one commit that the revision named when we asked. Downloads land in
the hub's usual cache. `HF_ENDPOINT` names another server, `HF_TOKEN` who asks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from winnow.data.wording import said
from winnow.errors import DataError

_INSTEAD = "or download the file yourself and name it with --from"


@dataclass(frozen=True)
class HubFiles:
    """Downloaded files."""

    commit: str
    names: tuple[str, ...]
    """In the repository."""
    paths: tuple[str, ...]
    """In the cache, in the same order."""


def download(repo: str, patterns: Sequence[str], revision: str = "main") -> HubFiles:
    """The files of a data set that match the first pattern to match any.

    Raises:
        DataError: the hub cannot be reached or refuses, or has no such file.
    """
    place = f"hub data set {repo} at {revision}"
    try:
        commit, held = _listing(repo, revision)
    # The client raises its own errors and those of the HTTP library below, which has changed.
    except Exception as error:
        raise DataError(f"{place}: {_reason(error)}, {_INSTEAD}") from error
    found = [[name for name in held if fnmatchcase(name, pattern)] for pattern in patterns]
    names = next((matching for matching in found if matching), [])
    if not names:
        some = ", ".join(held[:5]) or "none"
        raise DataError(
            f"{place}: no file like {' or '.join(patterns)} (it has {some}"
            f"{', …' if len(held) > 5 else ''}); choose a --revision that has one, {_INSTEAD}"
        )
    try:
        paths = _fetched(repo, names, commit)
    except Exception as error:
        raise DataError(f"{place}: {_reason(error)}, {_INSTEAD}") from error
    return HubFiles(commit, tuple(names), tuple(paths))


def _listing(repo: str, revision: str) -> tuple[str, list[str]]:
    """The commit that a revision names, and its files."""
    from huggingface_hub import HfApi

    info = HfApi().dataset_info(repo, revision=revision, timeout=30)
    return info.sha or revision, sorted(file.rfilename for file in info.siblings or ())


def _fetched(repo: str, names: Sequence[str], commit: str) -> list[str]:
    from huggingface_hub import hf_hub_download

    return [hf_hub_download(repo, name, repo_type="dataset", revision=commit) for name in names]


def _reason(error: Exception) -> str:
    """What went wrong and what may help, on one line."""
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
