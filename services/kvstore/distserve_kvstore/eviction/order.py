"""Queues of the blocks of one tier, from the one that was put in longest ago to the newest, for many at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from distserve.errors import KVError
from distserve_kvstore.columns import NONE, Entries

NOWHERE = 0
_PARKED = 128  # added to a queue's number
_LEAST = 64


class _Log:
    """Entries in the order in which they were put in. Who was put in again, or taken out, leaves a record behind that
    counts no more; when there is no room, only those that count are copied. So putting in costs O(1) each, over time.
    """

    __slots__ = ("head", "num_parked", "num_queued", "records", "tail")

    def __init__(self) -> None:
        self.records: Entries = np.zeros(_LEAST, np.int32)
        self.head = self.tail = _LEAST // 2
        self.num_queued = self.num_parked = 0


class Order:
    """Every block of the tier is in one queue, numbered from 1. One that can't be evicted at the moment may be parked:
    it still counts as its queue's, but is passed over, until it is put in front again, or anywhere else.
    """

    def __init__(self, num_queues: int, capacity: int) -> None:
        self._logs = [_Log() for _ in range(num_queues)]
        self._state: NDArray[np.uint8] = np.zeros(0, np.uint8)  # NOWHERE, or the queue, and whether it is parked
        self._place: Entries = np.zeros(0, np.int32)
        self.reserve(capacity)

    def reserve(self, capacity: int) -> None:
        """Entry numbers up to here."""
        for name in ("_state", "_place"):
            old = getattr(self, name)
            new = np.zeros(capacity, old.dtype)
            new[: len(old)] = old
            setattr(self, name, new)

    @property
    def num_bytes(self) -> int:
        return self._state.nbytes + self._place.nbytes + sum(log.records.nbytes for log in self._logs)

    def count(self, queue: int) -> int:
        log = self._logs[queue - 1]
        return log.num_queued + log.num_parked

    def queues(self, entries: Entries) -> NDArray[np.uint8]:
        """Of each its queue, NOWHERE if it is not in the tier."""
        numbers: NDArray[np.uint8] = self._state[entries] & np.uint8(_PARKED - 1)
        return numbers

    def is_parked(self, entries: Entries) -> NDArray[np.bool_]:
        parked: NDArray[np.bool_] = self._state[entries] >= _PARKED
        return parked

    def append(self, entries: Entries, queue: int) -> None:
        """They are the newest of this queue now, the last of them most; wherever they were before."""
        self._leave(entries)
        log = self._room(queue, len(entries))
        places = np.arange(log.tail, log.tail + len(entries), dtype=np.int32)
        log.records[places] = entries
        log.tail += len(entries)
        self._enter(entries, queue, places)

    def unpark(self, entries: Entries) -> None:
        """Those that were parked are the oldest of their queues now."""
        numbers = self.queues(entries)
        for queue in np.unique(numbers).tolist():
            self.prepend(entries[numbers == queue], queue)

    def prepend(self, entries: Entries, queue: int) -> None:
        """They are the oldest of this queue now, the first of them most; wherever they were before."""
        self._leave(entries)
        log = self._room(queue, 0, len(entries))
        places = np.arange(log.head - len(entries), log.head, dtype=np.int32)
        log.records[places] = entries
        log.head -= len(entries)
        self._enter(entries, queue, places)

    def append_one(self, entry: int, queue: int) -> None:
        """append() of one, without arrays."""
        self._leave_one(entry)
        log = self._room(queue, 1)
        log.records[log.tail] = entry
        self._enter_one(entry, queue, log.tail)
        log.tail += 1

    def park_one(self, entry: int) -> None:
        queue = self._leave_one(entry)
        self._state[entry] = queue + _PARKED
        self._logs[queue - 1].num_parked += 1

    def unpark_one(self, entry: int) -> None:
        """Does nothing unless it is parked."""
        if self._state[entry] > _PARKED:
            queue = self._leave_one(entry)
            log = self._room(queue, 0, 1)
            log.head -= 1
            log.records[log.head] = entry
            self._enter_one(entry, queue, log.head)

    def discard(self, entries: Entries) -> None:
        self._leave(entries)

    def oldest(self, queue: int) -> int:
        """-1 if there is none. It stays where it is."""
        log = self._logs[queue - 1]
        if not log.num_queued:
            return -1
        self._skip(queue, log)
        return int(log.records[log.head])

    def take_oldest(self, queue: int, n: int) -> Entries:
        """Up to n, oldest first. They stay where they are until they are put elsewhere."""
        log = self._logs[queue - 1]
        n = min(n, log.num_queued)
        if n <= 0:
            return NONE
        self._skip(queue, log)
        width = n
        while len(valid := self._valid(queue, log, log.head + width)) < n:
            width *= 2
        return valid[:n]

    def num_elsewhere(self, entries: Entries) -> int:
        """How many are here that are not among `entries`."""
        return int(np.count_nonzero(self._state) - np.count_nonzero(self._state[entries]))

    def check(self) -> None:
        """Raises KVError if a queue has others than counted."""
        for queue, log in enumerate(self._logs, 1):
            records = len(self._valid(queue, log, log.tail))
            queued, parked = (int(np.count_nonzero(self._state == state)) for state in (queue, queue + _PARKED))
            if (records, queued, parked) != (log.num_queued, log.num_queued, log.num_parked):
                raise KVError(
                    f"queue {queue} has {records} records, {queued} entries in it and {parked} parked, counted are "
                    f"{log.num_queued} and {log.num_parked}",
                    queue=queue,
                )

    def _counts(self, queue: int, log: _Log, stop: int) -> NDArray[np.bool_]:
        """Which of the records from the head up to `stop` count."""
        records = log.records[log.head : min(stop, log.tail)]
        counts: NDArray[np.bool_] = (self._state[records] == queue) & (
            self._place[records] == np.arange(log.head, log.head + len(records))
        )
        return counts

    def _valid(self, queue: int, log: _Log, stop: int) -> Entries:
        counts = self._counts(queue, log, stop)
        return log.records[log.head : log.head + len(counts)][counts]

    def _skip(self, queue: int, log: _Log) -> None:
        """The head goes to the first record that counts; there is one."""
        for _ in range(4):
            entry = log.records[log.head]
            if self._state[entry] == queue and self._place[entry] == log.head:
                return
            log.head += 1
        width = 64
        while not (counts := self._counts(queue, log, log.head + width)).any():
            log.head += width
            width *= 2
        log.head += int(counts.argmax())

    def _leave(self, entries: Entries) -> None:
        counts = np.bincount(self._state[entries])
        for state in np.flatnonzero(counts).tolist():
            if state > _PARKED:
                self._logs[state - _PARKED - 1].num_parked -= int(counts[state])
            elif state:
                self._logs[state - 1].num_queued -= int(counts[state])
        self._state[entries] = NOWHERE

    def _enter(self, entries: Entries, queue: int, places: Entries) -> None:
        self._state[entries] = queue
        self._place[entries] = places
        self._logs[queue - 1].num_queued += len(entries)

    def _leave_one(self, entry: int) -> int:
        """Returns where it was."""
        state = int(self._state[entry])
        queue = state & (_PARKED - 1)
        if state > _PARKED:
            self._logs[queue - 1].num_parked -= 1
        elif state:
            self._logs[queue - 1].num_queued -= 1
        self._state[entry] = NOWHERE
        return queue

    def _enter_one(self, entry: int, queue: int, place: int) -> None:
        self._state[entry] = queue
        self._place[entry] = place
        self._logs[queue - 1].num_queued += 1

    def _room(self, queue: int, behind: int, before: int = 0) -> _Log:
        """The log, with room for so many records at its ends."""
        log = self._logs[queue - 1]
        if log.tail + behind <= len(log.records) and before <= log.head:
            return log
        valid = self._valid(queue, log, log.tail)
        spare = max(_LEAST, len(valid) + behind + before)
        log.records = np.zeros(2 * spare + spare // 4, np.int32)
        log.head = spare // 4 + before
        log.tail = log.head + len(valid)
        log.records[log.head : log.tail] = valid
        self._place[valid] = np.arange(log.head, log.tail, dtype=np.int32)
        return log
