"""Files that are not served, kept for people to look at: another layout's (*.foreign), and damaged ones (*.damaged)."""

from __future__ import annotations

import logging
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
        "%s is set aside as %s, nothing is served from it: %s; `distserve kv prune` removes such files",
        path,
        to.name,
        reason,
    )
    with typed(path, "rename"):
        path.rename(to)


def files_set_aside(folder: Path, kinds: Sequence[str] = (FOREIGN, DAMAGED)) -> list[Path]:
    """Oldest first."""
    return sorted(path for kind in kinds for path in folder.glob(f"*{SUFFIX}{kind}"))


def limit_set_aside(folder: Path) -> None:
    """Only the newest damaged files stay. Raises DiskFailed."""
    _remove(files_set_aside(folder, (DAMAGED,))[:-MAX_DAMAGED])


def remove_set_aside(folder: Path, kinds: Sequence[str] = (FOREIGN, DAMAGED)) -> int:
    """How many there were. Raises DiskFailed."""
    return _remove(files_set_aside(folder, kinds))


def _remove(paths: Sequence[Path]) -> int:
    for path in paths:
        with typed(path, "remove"):
            path.unlink(missing_ok=True)
    return len(paths)
