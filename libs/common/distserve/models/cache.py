"""The cache of models: whole folders or nothing, one writer at a time.

<cache>/models/NAME              complete, with its manifest (distserve.json)
<cache>/models/.NAME.partial     being made by the holder of the lock; left by a killed one, removed by the next
<cache>/models/.NAME.lock        held (flock) while NAME is made
"""

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from distserve.errors import DeadlineExceeded
from distserve.machine import cache_folder

MANIFEST = "distserve.json"

# Raised whenever the same source gives other files, so that older copies are made again.
FORMAT = 1

_LOCK_TIMEOUT_S = 1800.0
_LOCK_POLL_S = 0.2


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """What a cached folder is, where it came from and what made it."""

    name: str
    source: str  # requirement of the package, or the file's name
    source_sha256: str
    format: int
    versions: dict[str, str]  # package -> version, of what did the conversion
    files: dict[str, int]  # name -> bytes
    license: str = ""


def models_folder(cache: Path | None) -> Path:
    return (cache or cache_folder()).absolute() / "models"


def is_complete(folder: Path, source_sha256: str) -> bool:
    """Whether `folder` was made from that source by this format and has every file in its full size. Reads no
    weights."""
    manifest = read_manifest(folder)
    return (
        manifest is not None
        and manifest.source_sha256 == source_sha256
        and manifest.format == FORMAT
        and all(_size(folder / name) == size for name, size in manifest.files.items())
    )


def read_manifest(folder: Path) -> Manifest | None:
    try:
        return msgspec.json.decode((folder / MANIFEST).read_bytes(), type=Manifest)
    except (OSError, msgspec.DecodeError):
        return None


def write_manifest(folder: Path, **values: Any) -> None:
    """Record the folder's files as they are now, and `values` (Manifest's other fields)."""
    paths = [p for p in sorted(folder.rglob("*")) if p.is_file() and p != folder / MANIFEST]
    files = {str(p.relative_to(folder)): p.stat().st_size for p in paths}
    manifest = Manifest(format=FORMAT, files=files, **values)
    (folder / MANIFEST).write_bytes(msgspec.json.format(msgspec.json.encode(manifest)) + b"\n")


@contextmanager
def making(folder: Path, report: Callable[[str], None]) -> Iterator[Path]:
    """Hold the lock of `folder` and yield an empty scratch folder beside it, removed at the end.

    Raises DeadlineExceeded if another process holds the lock for half an hour. The lock goes with its process.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.partial"
    with (folder.parent / f".{folder.name}.lock").open("a") as lock:
        _acquire(lock.fileno(), folder, report)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        try:
            yield partial
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def publish(made: Path, folder: Path) -> None:
    """Put the complete folder `made`, inside making()'s scratch folder, in its place. An older copy goes."""
    for path in made.rglob("*"):
        if path.is_file():
            path.chmod(0o644)  # safetensors makes its files private; a cache may be shared
            with path.open("rb") as file:
                os.fsync(file.fileno())
    if folder.exists():
        folder.rename(made.parent / "replaced")
    made.rename(folder)


def _acquire(fd: int, folder: Path, report: Callable[[str], None]) -> None:
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    told = False
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if time.monotonic() > deadline:
            raise DeadlineExceeded(
                f"another process has been making {folder} for {_LOCK_TIMEOUT_S:.0f} s", path=str(folder)
            )
        if not told:
            report(f"waiting for another process that is making {folder}")
            told = True
        time.sleep(_LOCK_POLL_S)


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return -1
