"""Files of segments that are open at the moment: a folder may have more of them than a process may open."""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from distserve_kvstore.disk.files import BlockFile

MAX_OPEN = 256


class OpenFiles:
    """Safe from any thread. A file closes when it was dropped, or pushed out, and its last reader has finished."""

    def __init__(self, *, direct: bool) -> None:
        self.direct = direct
        self._lock = threading.Lock()
        self._files: OrderedDict[Path, BlockFile] = OrderedDict()

    def get(self, path: Path) -> BlockFile:
        """Raises DiskFailed if it can't be opened."""
        with self._lock:
            if (file := self._files.get(path)) is not None:
                self._files.move_to_end(path)
                return file
        return self.put(BlockFile(path, direct=self.direct))

    def put(self, file: BlockFile) -> BlockFile:
        """Take an open file in; if another thread was first, that one's."""
        with self._lock:
            known = self._files.setdefault(file.path, file)
            self._files.move_to_end(file.path)
            pushed_out = [self._files.popitem(last=False)[1] for _ in range(len(self._files) - MAX_OPEN)]
        del pushed_out  # closed here, not under the lock
        return known

    def drop(self, path: Path) -> None:
        with self._lock:
            dropped = self._files.pop(path, None)
        del dropped

    def clear(self) -> None:
        with self._lock:
            files, self._files = self._files, OrderedDict()
        files.clear()
