"""What becomes of a block that is not what was written."""

from __future__ import annotations

import logging

from distserve.errors import BlockDamaged, DiskFailed
from distserve_kvstore.disk.files import Scratch
from distserve_kvstore.disk.format import ALIGN, Damaged, RecordHeader
from distserve_kvstore.disk.journal import Journal
from distserve_kvstore.disk.ledger import Ledger, Location
from distserve_kvstore.disk.open_files import OpenFiles

log = logging.getLogger(__name__)

MAX_FAILURES = 3  # of reads of one block, on a disk that reads others
_MAX_FAILING = 4096  # blocks whose failures are remembered
_PROBES = 8  # files that are tried before a disk counts as failed

_scratch = Scratch()


class Damage:
    """It is set aside: never served again, in this life or a later one, and its segment is emptied by compaction, which
    keeps the file for people to look at."""

    def __init__(self, ledger: Ledger, journal: Journal, files: OpenFiles) -> None:
        self._ledger = ledger
        self._journal = journal
        self._files = files
        self._failures: dict[int, int] = {}  # serial -> reads that failed
        self.num_found = 0

    def found(self, at: Location, what: Damaged | RecordHeader) -> BlockDamaged | None:
        """what: its fault, or the header of another record that lies in its place. None: it isn't there any more, look
        again."""
        reason = str(what) if isinstance(what, Damaged) else f"record {what.serial} lies there, not {at.serial}"
        where = f"{at.segment.path.name}, record {at.slot}"
        if not self._ledger.set_aside(at, f"record {at.slot}: {reason}"):
            return None
        self.num_found += 1
        self._journal.note([at.serial])
        log.error("a block on disk is damaged and set aside (%s in %s): %s", where, at.segment.path.parent, reason)
        return BlockDamaged(f"a block on disk is damaged ({where}): {reason}", where=where, reason=reason)

    def unreadable(self, at: Location, error: DiskFailed) -> BlockDamaged | DiskFailed | None:
        """A read of this block alone failed. It is damaged after MAX_FAILURES of them, if it is a bad spot on a disk
        that works otherwise; else the error: it may work again. None as found()."""
        if not self._disk_reads():
            return error
        if len(self._failures) >= _MAX_FAILING:
            self._failures.clear()
        num = self._failures[at.serial] = self._failures.get(at.serial, 0) + 1
        if num < MAX_FAILURES:
            return error
        self._failures.pop(at.serial, None)
        return self.found(at, Damaged(f"it could not be read {num} times: {error}"))

    def _disk_reads(self) -> bool:
        """Whether the beginning of some segment can be read."""
        for segment in self._ledger.segments()[-_PROBES:]:
            try:
                if self._files.get(segment.path).read([_scratch.take(ALIGN)], 0):
                    return True
            except DiskFailed:
                continue
        return False
