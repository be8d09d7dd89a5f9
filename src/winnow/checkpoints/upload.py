"""A copy of a run's folder elsewhere, on whatever fsspec reaches: what a lost machine leaves.

After each checkpoint the new files of the run are copied to URL/NAME, a checkpoint's manifest
last, so that a checkpoint there counts only when it is whole. A machine without the run's folder
fetches it from there and goes on.
"""

from __future__ import annotations

import logging
from pathlib import Path, PurePosixPath

import fsspec

from winnow.checkpoints.checkpoint import MANIFEST, PATIENCE, Checkpoint, checkpoints_in
from winnow.checkpoints.state_file import SHARD_INDEX
from winnow.errors import CheckpointError
from winnow.observe.files import PARTIAL, atomic_folder, one_line

log = logging.getLogger(__name__)


class CheckpointUpload:
    """The copy of one run's folder under a URL.

    Raises:
        CheckpointError: nothing can be reached under the URL.
    """

    def __init__(self, url: str, folder: Path) -> None:
        self._url, self._folder = url, folder
        try:
            self._files, root = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise CheckpointError(
                f"trainer.checkpoint_url={url} cannot be used: {one_line(error)}; install the "
                "package it needs, or use another URL"
            ) from error
        self._root = PurePosixPath(root) / folder.name
        self._sent: dict[Path, tuple[int, int]] = {}
        self._failures = 0

    def push(self, checkpoint: Checkpoint) -> None:
        """Upload new files, and delete remote checkpoints that were deleted locally.

        Raises:
            CheckpointError: it failed for the third time in a row.
        """
        try:
            self._push()
        except Exception as error:  # each file system has errors of its own
            self._failures += 1
            message = f"cannot copy {checkpoint.path} to {self._url}: {one_line(error)}"
            if self._failures >= PATIENCE:
                raise CheckpointError(
                    f"{message}; fix the access, or set trainer.checkpoint_url=null"
                ) from error
            log.warning("%s; retrying at the next checkpoint", message)
        else:
            self._failures = 0

    def fetch(self) -> bool:
        """Download the run's folder; False when there is no copy.

        Raises:
            CheckpointError: the copy cannot be read.
        """
        try:
            if not self._files.exists(str(self._root / "config.yaml")):
                return False
            with atomic_folder(self._folder) as draft:
                for name in self._files.find(str(self._root)):
                    place = PurePosixPath(name).relative_to(self._root)
                    if ".." in place.parts:
                        raise ValueError(f"the key {name} points outside the run folder")
                    path = draft / place
                    path.parent.mkdir(parents=True, exist_ok=True)
                    self._files.get_file(name, str(path))
        except Exception as error:
            raise CheckpointError(
                f"cannot fetch {self._root} from {self._url}: {one_line(error)}; fix the access, "
                "or set trainer.checkpoint_url=null to start from scratch"
            ) from error
        return True

    def _push(self) -> None:
        local = checkpoints_in(self._folder / "checkpoints")
        for path in sorted(self._folder.rglob("*"), key=lambda path: path.name == MANIFEST):
            place = path.relative_to(self._folder)
            hidden = any(part[0] == "." and part != SHARD_INDEX for part in place.parts)
            if hidden or path.name.endswith(PARTIAL) or not path.is_file():
                continue
            status = path.stat()
            version = status.st_size, status.st_mtime_ns
            if self._sent.get(path) != version:
                target = self._root / place
                self._files.makedirs(str(target.parent), exist_ok=True)
                self._files.put_file(str(path), str(target))
                self._sent[path] = version
        names = {checkpoint.path.name for checkpoint in local}
        remote = self._root / "checkpoints"
        for name in self._files.ls(str(remote), detail=False, refresh=True):
            if PurePosixPath(name).name not in names:
                manifest = f"{name}/{MANIFEST}"
                if self._files.exists(manifest):  # first, so that the rest counts no more
                    self._files.rm_file(manifest)
                self._files.rm(name, recursive=True)
