"""What becomes of a block that is not what was written."""

from __future__ import annotations

import logging

from distserve.errors import BlockDamaged
from distserve_kvstore.disk.format import Damaged, RecordHeader
from distserve_kvstore.disk.journal import Journal
from distserve_kvstore.disk.ledger import Ledger, Location

log = logging.getLogger(__name__)


class Damage:
    """It is set aside: never served again, in this life or a later one, and its segment is emptied by compaction, which
    keeps the file for people to look at."""

    def __init__(self, ledger: Ledger, journal: Journal) -> None:
        self._ledger = ledger
        self._journal = journal
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
