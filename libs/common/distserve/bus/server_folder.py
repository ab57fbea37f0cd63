"""The folder of one embedded nats-server, and those that killed parents left behind.

<temporary folder>/distserve-nats-XXXXXXXX/
    lock        held (flock) by the server's process for its whole life; the kernel lets go when it dies in any way
    log, store, nats-server_PID.ports
"""

import fcntl
import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "distserve-nats-"
_LOCK = "lock"


def make_folder() -> tuple[Path, int]:
    """A new folder and the open file that locks it.

    The server inherits the file and the caller closes its own: then the lock lives as long as the server.
    """
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX))
    unlocked = folder / f"{_LOCK}.new"
    fd = os.open(unlocked, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    unlocked.rename(folder / _LOCK)  # it appears locked, so that no sweep takes the folder for a dead server's
    return folder, fd


def sweep() -> list[Path]:
    """Remove the folders of this user's servers that are dead. Returns those that are gone now.

    A folder without a lock is left alone: it is being made.
    """
    gone = []
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        if _is_dead(folder):
            shutil.rmtree(folder, ignore_errors=True)
            if not folder.exists():
                gone.append(folder)
    return gone


def _is_dead(folder: Path) -> bool:
    try:
        if folder.is_symlink() or folder.stat().st_uid != os.getuid():
            return False
        fd = os.open(folder / _LOCK, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)
