"""The disk tier as the node sees it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from distserve.errors import DiskFailed, DiskFull, DistServeError, KVError
from distserve.kv.layout import fingerprint
from distserve.messages import KVLayout
from distserve_kvstore.disk.appender import Appender
from distserve_kvstore.disk.compaction import Compaction
from distserve_kvstore.disk.damage import Damage
from distserve_kvstore.disk.files import can_direct
from distserve_kvstore.disk.folder import FolderLock, read_layout, write_manifest
from distserve_kvstore.disk.format import Shape
from distserve_kvstore.disk.journal import Journal
from distserve_kvstore.disk.ledger import Ledger
from distserve_kvstore.disk.open_files import OpenFiles
from distserve_kvstore.disk.reader import Reader
from distserve_kvstore.disk.records import CompactReport, DiskOptions, DiskStats, Record, RecoveredRun, Verified
from distserve_kvstore.disk.recovery import Recovery, recover
from distserve_kvstore.disk.set_aside import DAMAGED, SetAside
from distserve_kvstore.disk.space import Space

log = logging.getLogger(__name__)


class DiskTier:
    """Blocking calls, safe from any thread. A *place* is a number that stays a block's own until it is freed, wherever
    compaction moves the bytes; it fits an int32.

    One call writes at a time; reads go on beside it and beside each other. No lock is held over I/O but the writers'
    own (and those of the list of the dead, which free() and forget() append to), so a slow disk holds up only those
    who write, or who read what hangs. stats() never waits for it.

    Durability: Appender. What is freed or forgotten: Journal. What a folder is made of: format.
    """

    @staticmethod
    def layout_of(folder: Path) -> KVLayout | None:
        """What the blocks in a folder are, without opening it: from its manifest, else from a segment. None: nothing
        there says."""
        return read_layout(folder)

    @classmethod
    def open(
        cls, folder: Path, layout: KVLayout, options: DiskOptions = DiskOptions()
    ) -> tuple[DiskTier, list[RecoveredRun]]:
        """Takes the folder (made if need be) and finds what is in it. What is foreign or damaged is set aside.

        Raises ConfigError if another node has it (named) or the capacity is too small, DiskFailed, DiskFull.
        """
        with ExitStack() as stack:
            lock = FolderLock(folder, options.node)
            stack.callback(lock.close)
            for leftover in folder.glob("*.tmp"):
                with suppress(OSError):
                    leftover.unlink()
            _write_manifest(folder, layout)
            direct = options.direct_io == "auto" and can_direct(folder)
            found = recover(folder, layout, direct=direct, sync_bytes=options.sync_bytes)
            tier = cls(folder, layout, options, lock, found, direct=direct)
            stack.pop_all()
        return tier, found.runs

    def __init__(
        self, folder: Path, layout: KVLayout, options: DiskOptions, lock: FolderLock, found: Recovery, *, direct: bool
    ) -> None:
        """By open()."""
        self.folder = folder
        self._lock = lock
        self._shape = Shape.of(layout)
        self._files = OpenFiles(direct=direct)
        self._ledger = Ledger(found)
        aside = SetAside(folder, left_alone=found.left_alone)
        self._space = Space(folder, self._shape, options, self._ledger.file_bytes + aside.num_bytes)
        self._journal = Journal(folder, self._ledger.dead_serials)
        self._damage = Damage(self._ledger, self._journal, self._files)
        self._reader = Reader(self._ledger, self._files, self._shape, self._damage)
        self._appender = Appender(
            folder,
            layout,
            options,
            self._space,
            self._ledger,
            self._files,
            self._journal,
            aside,
            next_number=found.next_number,
            next_serial=found.next_serial,
        )
        self._compaction = Compaction(
            self._appender,
            self._ledger,
            self._files,
            self._space,
            self._shape,
            self._damage,
            options.compact_below,
        )
        self._forgetting = threading.Lock()
        self._unforgotten: list[int] = []  # buried; their places are given to nobody yet
        self._is_closed = False
        self._appender.drop_dead()

    def append(self, records: Sequence[Record]) -> list[int]:
        """Writes them with as few writes as possible; their places, in order. All or none.

        Raises DiskFull (the capacity or the file system: free() and compact() make room; reading goes on), DiskFailed,
        KVError (a payload of another length).
        """
        with self._appender.lock:
            self._require_open()
            return self._appender.append(records)

    def read(
        self, places: Sequence[int], hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[DistServeError | None]:
        """Each block into its buffer (uint8 [block_bytes], writable), checked against its checksum and its hash; None
        where that went well, else what is wrong and a buffer of whatever.

        BlocksMissing: freed meanwhile, or another block's place. BlockDamaged: it is set aside, for good, and its place
        must still be freed. DiskFailed: might work again. Raises KVError for buffers of another length, and no other.
        """
        return self._reader.read(places, hashes, into)

    def free(self, places: Sequence[int]) -> None:
        """Blocks no longer wanted; those places may be given to others from now on. After a crash of the machine, not
        of the process, some may be found again at the next opening. KVError, and nothing changes, if one is not in
        use."""
        serials = self._ledger.bury(places, forgotten=False)
        self._journal.note(serials)
        self._ledger.release(places)

    def forget(self, places: Sequence[int]) -> None:
        """As free(), and found by nobody any more, whatever happens, when it returns, with all that was freed before;
        damaged files that were set aside go too. The bytes go with their files, which compaction empties first, as long
        as this tier is open; after another opening, when it gets to them.

        Raises DiskFull, DiskFailed: the rest is for finish_forgetting(). These places, which must not be named again,
        are nobody else's until that has worked."""
        with self._forgetting:
            serials = self._ledger.bury(places, forgotten=True)
            self._unforgotten += places
            self._journal.note(serials)
            self._finish()

    def finish_forgetting(self) -> None:
        """What forget() could not do, once more. Raises DiskFull, DiskFailed: call it again."""
        with self._forgetting:
            if self._unforgotten:
                self._finish()

    @property
    def num_unforgotten(self) -> int:
        """Places that forget() was called for and has not finished with."""
        return len(self._unforgotten)

    def _finish(self) -> None:
        try:
            self._journal.sync()
        except DiskFull:
            with self._appender.lock:
                self._appender.drop_dead()
            self._journal.sync()
        with self._appender.lock:
            self._appender.aside.remove(DAMAGED)
        self._ledger.release(self._unforgotten)
        self._unforgotten = []

    def look(self) -> None:
        """Finds out what the file system has room for by now: stats(). Raises DiskFailed."""
        with self._appender.lock:
            self._appender.look()

    def compact(self, budget_bytes: int) -> CompactReport:
        """One slice: moves live blocks out of the segments with fewest of them, about budget_bytes at most, and gives
        emptied files back. Every block is verified on the way. Raises DiskFull, DiskFailed."""
        self._require_open()
        report = self._compaction.slice(budget_bytes)
        if len(self._journal) > _MANY + 2 * self._ledger.num_dead:
            self._journal.rewrite(self._ledger.dead_serials)
        return report

    def flush(self) -> None:
        """What was appended and freed is on the disk when it returns (fdatasync). Raises DiskFull, DiskFailed."""
        with self._appender.lock:
            self._require_open()
            self._appender.sync()
        self._journal.sync()

    def verify(self) -> Verified:
        """Reads every live block. The damaged ones are set aside, as by read()."""
        return self._reader.verify()

    def stats(self) -> DiskStats:
        """Of now, but for what the file system has free: that is as of the last segment that was begun."""
        segments = self._ledger.segments()
        return DiskStats(
            num_blocks=sum(s.num_live for s in segments),
            file_bytes=sum(s.file_bytes for s in segments),
            capacity_bytes=self._space.capacity_bytes,
            usable_blocks=self._space.usable_blocks,
            num_segments=len(segments),
            num_set_aside=len(self._appender.aside),
            num_damaged=self._damage.num_found,
            direct_io=self._files.direct,
        )

    def check(self) -> None:
        """Raises KVError if what it knows contradicts itself. For tests, and when idle."""
        self._ledger.check()

    def close(self) -> None:
        """Seal, flush, leave the folder. Idempotent. Raises DiskFull, DiskFailed, after it has left the folder all the
        same."""
        with self._appender.lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                self._appender.retire()
                self._appender.drop_dead()
                self._journal.sync()
            finally:
                self._journal.close()
                self._files.clear()
                self._lock.close()

    def _require_open(self) -> None:
        if self._is_closed:
            raise KVError(f"the disk tier of {self.folder} is closed")


_MANY = 4096  # entries of the journal that are not worth writing it anew


def _write_manifest(folder: Path, layout: KVLayout) -> None:
    before = read_layout(folder)
    if before == layout:
        return
    if before is not None:
        log.error(
            "%s held blocks of layout %s (weights %s), from now on %s (weights %s)",
            folder,
            fingerprint(before)[:16],
            before.weights,
            fingerprint(layout)[:16],
            layout.weights,
        )
    try:
        write_manifest(folder, layout)
    except (DiskFull, DiskFailed) as e:
        log.warning("the manifest of %s could not be written, segments say the same: %s", folder, e)
