"""Files that are not served, kept for people to look at: another layout's (*.foreign), and damaged ones (*.damaged)."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from distserve_kvstore.disk.files import typed
from distserve_kvstore.disk.segment import SUFFIX

log = logging.getLogger(__name__)

FOREIGN, DAMAGED = ".foreign", ".damaged"
MAX_DAMAGED = 4  # files: the newest tell enough


def set_aside(path: Path, kind: str, reason: str, *, rename: bool = True) -> None:
    """It is no segment of ours from now on. rename: on the disk too, else it's only said. Raises DiskFailed."""
    to = path.with_name(path.name + kind)
    if not rename:
        log.error("%s is %s, nothing is served from it: %s", path, kind[1:], reason)
        return
    log.error(
        "%s is set aside as %s, nothing is served from it: %s; while no node uses the folder, "
        "`distserve kv prune %s --set-aside` removes such files",
        path,
        to.name,
        reason,
        shlex.quote(str(path.parent)),
    )
    with typed(path, "rename"):
        path.rename(to)


def files_set_aside(folder: Path, kinds: Sequence[str] = (FOREIGN, DAMAGED)) -> list[Path]:
    """Oldest first."""
    return sorted(path for kind in kinds for path in folder.glob(f"*{SUFFIX}{kind}"))


def remove_set_aside(folder: Path, kinds: Sequence[str] = (FOREIGN, DAMAGED)) -> int:
    """How many there were. Raises DiskFailed."""
    paths = files_set_aside(folder, kinds)
    for path in paths:
        _remove(path)
    return len(paths)


class SetAside:
    """Those files of an open folder, which take room that blocks may need: then the oldest go. Belongs to who appends.

    A file of another layout is never taken back when that layout is: what was deleted meanwhile could not be told from
    the rest of it."""

    def __init__(self, folder: Path, left_alone: Sequence[Path] = ()) -> None:
        """left_alone: segments that could not be read. They take room too, and stay."""
        self._folder = folder
        self._files = {path: _num_bytes(path) for path in files_set_aside(folder)}
        self._fixed_bytes = sum(_num_bytes(path) for path in left_alone)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        return self._fixed_bytes + sum(self._files.values())

    def damaged(self, path: Path, reason: str) -> None:
        """Sets it aside; of its kind only the newest stay. Raises DiskFailed."""
        set_aside(path, DAMAGED, reason)
        aside = path.with_name(path.name + DAMAGED)
        self._files[aside] = _num_bytes(aside)
        for old in self._of(DAMAGED)[:-MAX_DAMAGED]:
            self._drop(old)

    def remove(self, kind: str) -> None:
        """All of that kind. Raises DiskFailed."""
        for path in self._of(kind):
            self._drop(path)

    def remove_oldest(self) -> bool:
        """Whether there was one. Raises DiskFailed."""
        if not self._files:
            return False
        oldest = min(self._files)
        log.warning("%s, which was set aside, is removed: its room is needed for blocks", oldest)
        self._drop(oldest)
        return True

    def _of(self, kind: str) -> list[Path]:
        return sorted(path for path in self._files if path.suffix == kind)

    def _drop(self, path: Path) -> None:
        _remove(path)
        del self._files[path]


def _remove(path: Path) -> None:
    with typed(path, "remove"):
        path.unlink(missing_ok=True)


def _num_bytes(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
