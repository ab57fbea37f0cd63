"""The reading side: blocks by their places, checked, any number of readers at once."""

from __future__ import annotations

from collections.abc import Sequence

from distserve.errors import BlockDamaged, BlocksMissing, DiskFailed, DistServeError, KVError
from distserve_kvstore.disk.damage import Damage
from distserve_kvstore.disk.format import Damaged, RecordHeader, Shape
from distserve_kvstore.disk.ledger import Ledger, Location
from distserve_kvstore.disk.open_files import OpenFiles
from distserve_kvstore.disk.records import Verified
from distserve_kvstore.disk.segment_reads import raw_records, read_run

_TRIES = 4  # compaction may move a block between the look at where it is and the read; not for ever


class Reader:
    def __init__(self, ledger: Ledger, files: OpenFiles, shape: Shape, damage: Damage) -> None:
        self._ledger = ledger
        self._files = files
        self._shape = shape
        self._damage = damage

    def read(
        self, places: Sequence[int], hashes: Sequence[bytes], into: Sequence[memoryview]
    ) -> list[DistServeError | None]:
        """As DiskTier.read()."""
        buffers = [_buffer(b, self._shape.block_bytes) for b in into]
        if not len(places) == len(hashes) == len(buffers):
            raise KVError(f"{len(places)} places, {len(hashes)} hashes and {len(buffers)} buffers: one each is needed")
        result: list[DistServeError | None] = [None] * len(places)
        left = list(range(len(places)))
        for _ in range(_TRIES):
            found = self._ledger.locate(places[i] for i in left)
            for i, at in zip(left, found, strict=True):
                result[i] = at if isinstance(at, KVError) else None
            there = [(i, at) for i, at in zip(left, found, strict=True) if isinstance(at, Location)]
            left = []
            for run in _runs(there):
                left += self._read_run(run, hashes, buffers, result)
            if not left:
                break
        for i in left:
            result[i] = BlocksMissing(f"place {places[i]} on disk keeps moving", num_present=0, tier="disk")
        return result

    def _read_run(
        self,
        run: Sequence[tuple[int, Location]],
        hashes: Sequence[bytes],
        buffers: Sequence[memoryview],
        result: list[DistServeError | None],
    ) -> list[int]:
        """Neighbours in one file. Those to be looked for again."""
        first = run[0][1]
        segment = first.segment
        try:
            file = self._files.get(segment.path)
            found = read_run(file, self._shape, segment.salt, first.slot, [buffers[i] for i, _ in run])
        except DiskFailed as e:
            if segment.removed:
                return [i for i, _ in run]
            if len(run) > 1:  # it may be one bad spot
                return [again for one in run for again in self._read_run([one], hashes, buffers, result)]
            i, at = run[0]
            result[i] = self._damage.unreadable(at, e)
            return [] if result[i] is not None else [i]
        again = []
        for (i, at), header in zip(run, found, strict=True):
            if not isinstance(header, Damaged) and header.serial == at.serial:
                result[i] = _expect(header, hashes[i])
            elif (error := self._damage.found(at, header)) is not None:
                result[i] = error
            else:
                again.append(i)
        return again

    def verify(self) -> Verified:
        """Of all that live."""
        counts = [Verified(0, 0, 0)]
        for segment in self._ledger.segments():
            runs = _runs(list(enumerate(self._ledger.living(segment))))
            counts += [self._verify_run([at for _, at in run]) for run in runs]
        return _sum(counts)

    def _verify_run(self, run: Sequence[Location]) -> Verified:
        segment = run[0].segment
        num_good = num_damaged = num_seen = 0
        try:
            file = self._files.get(segment.path)
            slots = range(run[0].slot, run[-1].slot + 1)
            for at, record in zip(run, raw_records(file, self._shape, segment.salt, slots), strict=True):
                num_seen += 1
                header = record if isinstance(record, Damaged) else record[0]
                if not isinstance(header, Damaged) and header.serial == at.serial:
                    num_good += 1
                elif self._damage.found(at, header) is not None:
                    num_damaged += 1
        except DiskFailed as e:
            seen = Verified(num_good, num_damaged, 0)
            if segment.removed:
                return seen
            if len(run) > 1:  # it may be one bad spot
                return _sum([seen, *(self._verify_run([at]) for at in run[num_seen:])])
            error = self._damage.unreadable(run[0], e)
            return Verified(0, isinstance(error, BlockDamaged), isinstance(error, DiskFailed))
        return Verified(num_good, num_damaged, 0)


def _sum(counts: Sequence[Verified]) -> Verified:
    return Verified(*(sum(column) for column in zip(*counts, strict=True)))


def _runs(there: Sequence[tuple[int, Location]]) -> list[list[tuple[int, Location]]]:
    """In order of where they lie, cut where they are not neighbours."""
    runs: list[list[tuple[int, Location]]] = []
    for one in sorted(there, key=lambda pair: (pair[1].segment.number, pair[1].slot)):
        last = runs[-1][-1][1] if runs else None
        if last is not None and last.segment is one[1].segment and last.slot + 1 == one[1].slot:
            runs[-1].append(one)
        else:
            runs.append([one])
    return runs


def _expect(header: RecordHeader, hash_: bytes) -> DistServeError | None:
    if header.hash == hash_:
        return None
    return BlocksMissing("another block has that place on disk now", num_present=0, tier="disk")


def _buffer(into: memoryview, block_bytes: int) -> memoryview:
    buffer = memoryview(into).cast("B")
    if len(buffer) != block_bytes or buffer.readonly:
        raise KVError(f"a buffer of {len(buffer)} bytes, must be writable and have {block_bytes}", size_bytes=len(into))
    return buffer
