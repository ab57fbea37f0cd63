"""A folder of segments as it is found: which records live, and what is set aside."""

from __future__ import annotations

import itertools
import logging
import shlex
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from distserve.errors import DiskFailed
from distserve.messages import KVLayout
from distserve_kvstore.disk.format import Damaged, Foreign, Shape
from distserve_kvstore.disk.journal import read_serials
from distserve_kvstore.disk.loading import Loaded, load, seal
from distserve_kvstore.disk.records import RecoveredRun
from distserve_kvstore.disk.segment import NOWHERE, SUFFIX, Segment
from distserve_kvstore.disk.segment_writer import MAX_WRITE_BYTES
from distserve_kvstore.disk.set_aside import DAMAGED, FOREIGN, set_aside

log = logging.getLogger(__name__)

_UNSEEN_SERIALS = 1 << 40  # more than were ever given to what lies in segments that can't be read


@dataclass(frozen=True, slots=True)
class Recovery:
    """Places are numbered from 0: place i is slot slots[i] of segment segment_numbers[i], its serial serials[i]."""

    segments: list[Segment]
    runs: list[RecoveredRun]
    segment_numbers: npt.NDArray[np.int32]
    slots: npt.NDArray[np.int32]
    serials: npt.NDArray[np.uint64]
    next_number: int
    next_serial: int
    left_alone: list[Path]  # segments that could not be read, and may be at the next opening
    dead_elsewhere: list[int]  # serials of the dead that may lie in those


def recover(folder: Path, layout: KVLayout, *, direct: bool, sync_bytes: int, repair: bool = True) -> Recovery:
    """sync_bytes: DiskOptions'. repair: set aside what is foreign or damaged, and give segments that were not sealed
    their index; else only look. What the disk can't read is left where it is. Raises DiskFailed, DiskFull."""
    shape = Shape.of(layout)
    tail_bytes = sync_bytes + MAX_WRITE_BYTES  # a crash of the machine may have torn so many
    left_alone: list[Path] = []
    found = list(_load_all(folder, layout, left_alone, direct=direct, tail_bytes=tail_bytes, repair=repair))
    if repair:
        found = [one if one.is_sealed or not len(one.entries) else seal(one, shape, direct=direct) for one in found]
    num_dropped = sum(one.num_dropped for one in found)
    if num_dropped:
        log.warning("%s: %d blocks that were being written when the node ended are dropped", folder, num_dropped)
    dead, num_wrong = read_serials(folder)
    if num_wrong:
        log.error(
            "%s: %d entries of the list of freed blocks are damaged: deleted blocks may have come back; while no node "
            "uses the folder, `distserve kv prune %s --keep-blocks 0` removes every block in it",
            folder,
            num_wrong,
            shlex.quote(str(folder)),
        )
    live = _live(found, dead)
    segments: list[Segment] = []
    runs: list[RecoveredRun] = []
    places = _Places()
    for one, alive in zip(found, live, strict=True):
        segment = _segment(one, alive, shape)
        slots = np.flatnonzero(alive).astype(np.int32)
        first = places.add(one, slots)
        segment.place_of[slots] = np.arange(first, first + len(slots), dtype=np.int32)
        segments.append(segment)
        runs += _runs(one, slots, first)
    serials = np.concatenate([np.zeros(1, np.uint64), *(one.entries["serial"] for one in found)])
    next_serial = 1 + max(int(serials.max()), max(dead, default=0))
    return Recovery(
        segments,
        runs,
        *places.columns(),
        next_number=1 + max((_number(p) for p in folder.glob(f"*{SUFFIX}*")), default=0),
        next_serial=next_serial + (_UNSEEN_SERIALS if left_alone else 0),
        left_alone=left_alone,
        dead_elsewhere=sorted(dead - set(serials.tolist())) if left_alone else [],
    )


def _load_all(
    folder: Path, layout: KVLayout, left_alone: list[Path], *, direct: bool, tail_bytes: int, repair: bool
) -> Iterator[Loaded]:
    for path in sorted(folder.glob(f"*{SUFFIX}"), key=_number):
        try:
            yield load(path, layout, direct=direct, tail_bytes=tail_bytes)
        except Foreign as e:
            set_aside(path, FOREIGN, str(e), rename=repair)
        except Damaged as e:
            set_aside(path, DAMAGED, str(e), rename=repair)
        except DiskFailed as e:
            log.error("%s can't be read now, nothing is served from it until the next opening: %s", path, e)
            left_alone.append(path)


def _number(path: Path) -> int:
    name = path.name.partition(".")[0]
    return int(name) if name.isdecimal() else 0


def _live(found: Sequence[Loaded], dead: set[int]) -> list[npt.NDArray[np.bool_]]:
    """Of each segment, which records live: not freed, and of several of one hash the newest, the last copy of it."""
    lengths = [len(one.entries) for one in found]
    if not sum(lengths):
        return [np.zeros(n, np.bool_) for n in lengths]
    serials = np.concatenate([one.entries["serial"] for one in found])
    alive = (serials != 0) & ~np.isin(serials, np.fromiter(dead, np.uint64, len(dead)))
    words = np.concatenate([one.entries["hash"] for one in found]).view("<u8")  # [records, 4]
    order = np.flatnonzero(alive)
    # By hash, then serial; equal serials are copies, in order of their segments. The sort is stable.
    order = order[np.lexsort((serials[order], *words[order].T))]
    same_as_next = (words[order[:-1]] == words[order[1:]]).all(axis=1)
    alive[order[:-1][same_as_next]] = False
    return np.split(alive, np.cumsum(lengths)[:-1])


def _segment(one: Loaded, alive: npt.NDArray[np.bool_], shape: Shape) -> Segment:
    dead = one.entries["serial"][~alive]
    return Segment(
        one.header.number,
        one.header.salt,
        one.path,
        np.full(len(one.entries), NOWHERE, np.int32),
        num_records=len(one.entries),
        num_live=int(alive.sum()),
        file_bytes=one.file_bytes,
        dead=array("Q", dead[dead != 0].tolist()),
    )


class _Places:
    def __init__(self) -> None:
        self._parts: list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint64]]] = []
        self._num = 0

    def add(self, one: Loaded, slots: npt.NDArray[np.int32]) -> int:
        """The first one's place."""
        numbers = np.full(len(slots), one.header.number, np.int32)
        self._parts.append((numbers, slots, one.entries["serial"][slots]))
        first, self._num = self._num, self._num + len(slots)
        return first

    def columns(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], npt.NDArray[np.uint64]]:
        empty = (np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.uint64))
        numbers, slots, serials = zip(empty, *self._parts, strict=True)
        return np.concatenate(numbers), np.concatenate(slots), np.concatenate(serials)


def _runs(one: Loaded, slots: npt.NDArray[np.int32], first_place: int) -> Iterator[RecoveredRun]:
    """Neighbours in a chain, of one tenant and conversation, that lie one after the other."""
    if not len(slots):
        return
    e = one.entries[slots]
    linked = (
        (e["parent"][1:] == e["hash"][:-1]).all(axis=1)
        & (e["depth"][1:] == e["depth"][:-1] + 1)
        & (e["tenant"][1:] == e["tenant"][:-1])
        & (e["conversation"][1:] == e["conversation"][:-1])
    )
    starts = np.concatenate([[0], np.flatnonzero(~linked) + 1, [len(e)]]).tolist()
    hashes, parents = e["hash"].tobytes(), e["parent"].tobytes()
    width = e["hash"].shape[1]
    for a, b in itertools.pairwise(starts):
        yield RecoveredRun(
            hashes[a * width : b * width],
            parents[a * width : (a + 1) * width],
            int(e["depth"][a]),
            one.strings[e["tenant"][a]],
            one.strings[e["conversation"][a]],
            range(first_place + a, first_place + b),
        )
