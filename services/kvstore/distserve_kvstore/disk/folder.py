"""A folder of blocks has one owner at a time, and says what its blocks are."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
from contextlib import suppress
from pathlib import Path

import msgspec

from distserve.errors import ConfigError
from distserve.kv.layout import fingerprint
from distserve.messages import KVLayout
from distserve_kvstore.disk.files import sync_folder, typed
from distserve_kvstore.disk.format import MAX_SEGMENT_HEADER, VERSION, Damaged, Foreign, parse_segment_header
from distserve_kvstore.disk.segment import SUFFIX

log = logging.getLogger(__name__)

LOCK, MANIFEST = "lock", "manifest.json"


class FolderLock:
    """Held by one process; the kernel lets go of it when that ends, however it ends."""

    def __init__(self, folder: Path, node: str) -> None:
        """Makes the folder. Raises ConfigError, which names who has it, or DiskFailed."""
        path = folder / LOCK
        with typed(path, "open"):
            folder.mkdir(parents=True, exist_ok=True)
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
        try:
            with typed(path, "lock"):
                self._take(folder)
        except BaseException:
            os.close(self._fd)
            raise
        with suppress(OSError):  # only who is told by it misses it
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, json.dumps({"node": node, "pid": os.getpid()}).encode(), 0)

    def _take(self, folder: Path) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            if e.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise ConfigError(
                f"{folder} is in use by {_owner(self._fd)}; each node needs a folder of its own (kvstore.folder)",
                key="kvstore.folder",
                value=str(folder),
                expected="a folder that no other node uses",
            ) from None

    def close(self) -> None:
        """Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _owner(fd: int) -> str:
    try:
        owner = json.loads(os.pread(fd, 4096, 0))
        return f"node {owner['node'] or 'without a name'} (pid {owner['pid']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another node"


def write_manifest(folder: Path, layout: KVLayout) -> None:
    """Raises DiskFull, DiskFailed."""
    path, fresh = folder / MANIFEST, folder / f"{MANIFEST}.tmp"
    text = json.dumps(
        {"format": VERSION, "fingerprint": fingerprint(layout), "layout": msgspec.structs.asdict(layout)}, indent=1
    )
    with typed(path, "write"):
        fresh.write_text(text)
        fd = os.open(fresh, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)
        fresh.rename(path)
    sync_folder(folder)


def read_layout(folder: Path) -> KVLayout | None:
    """What the blocks in a folder are: by its manifest, else by the newest segment that says so."""
    try:
        said = json.loads((folder / MANIFEST).read_bytes())
        layout = msgspec.convert(said["layout"], KVLayout)
        if said["fingerprint"] == fingerprint(layout):
            return layout
        log.warning("%s does not fit its own fingerprint: ignored", folder / MANIFEST)
    except FileNotFoundError:
        pass
    except (OSError, ValueError, KeyError, TypeError, msgspec.ValidationError) as e:
        log.warning("%s can't be read, ignored: %s", folder / MANIFEST, e)
    for path in sorted(folder.glob(f"*{SUFFIX}"), reverse=True):
        try:
            with path.open("rb") as file:
                return parse_segment_header(file.read(MAX_SEGMENT_HEADER)).layout
        except (OSError, Foreign, Damaged):
            continue
    return None
