"""One queue pair and what waits to be posted on it.

A lane's send queue never overflows and never starves what is urgent: bulk writes leave some slots free and are
limited in bytes under way, and sends, binds and invalidates go before them. Each chain of work requests is posted
with one doorbell and asks for one completion, of its last request, since a queue completes in order.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from distserve.errors import PeerLost
from distserve.transport.rdma.buffers import MESSAGE_BYTES, MessageBuffers
from distserve.transport.rdma.device import Completion, Nic, Pair, Region, Verb, Window, Write

log = logging.getLogger(__name__)

MAX_WRITE_BYTES = 1 << 20  # one work request
MAX_BULK_BYTES = 16 << 20  # posted and not completed: 1.3 ms of a 100 Gbit/s link, how long an urgent send may wait
_CHAIN = 64  # work requests of one doorbell
_RECEIVE = 1 << 31  # marks the wr_id of a receive
_uids = itertools.count(1)

Done = Callable[[], object]


@dataclass(slots=True)
class Counts:
    """What a sender or receiver has asked of its devices. Only grows."""

    writes: int = 0
    sends: int = 0
    binds: int = 0
    invalidates: int = 0
    doorbells: int = 0
    completions: int = 0


@dataclass(slots=True)
class Bulk:
    """One RDMA write that waits for its turn."""

    address: int
    length: int
    remote_address: int
    rkey: int
    immediate: int | None = None


@dataclass(slots=True, eq=False)
class _Work:
    """Requests of one kind that somebody wants to hear the end of. `at`: how many have been posted."""

    items: Sequence[Any]
    post: Callable[[int, Sequence[Any]], None]
    done: Done | None
    owner: object
    at: int = 0


@dataclass(slots=True, eq=False)
class _Chain:
    """Posted, under one doorbell. slot: of the message buffer that a send occupies."""

    wr_id: int
    num_requests: int
    num_bulk_bytes: int
    done: Done | None
    owner: object
    slot: int = -1


class Lane:
    """For the reactor's thread. `on_message(bytes)` and `on_ticket(immediate)` tell what came; `on_error` is called
    once, with the first completion that failed. Only a lane with message buffers sends and takes messages."""

    def __init__(
        self,
        nic: Nic,
        pair: Pair,
        *,
        depth: int,
        pool: Region,
        buffers: MessageBuffers | None,
        counts: Counts,
        on_message: Callable[[memoryview], None],
        on_ticket: Callable[[int], None],
        on_error: Callable[[Exception], None],
        on_life: Callable[[], None],
    ) -> None:
        self.uid = next(_uids)
        self.pair = pair
        self._nic = nic
        self._pool = pool
        self._buffers = buffers
        self._counts = counts
        self._on_message, self._on_ticket, self._on_error, self._on_life = on_message, on_ticket, on_error, on_life
        self._free = depth
        self._reserve = min(32, depth // 4)  # slots that bulk leaves to what is urgent
        self._num_receives = buffers.num_receives if buffers is not None else max(1, depth // 2)
        self._bulk_bytes = 0
        self._urgent: deque[_Work] = deque()
        self._bulk: deque[_Work] = deque()
        self._posted: deque[_Chain] = deque()
        self._under_way: dict[object, int] = {}  # chains by owner
        self._idle_calls: dict[object, list[Done]] = {}
        self._serial = 0
        self.failed = False

    def post_receives(self) -> None:
        """Once, before the pair is connected: a message or immediate that finds none posted has to be sent again."""
        for slot in range(self._num_receives):
            self._post_receive(slot)

    # -- what to do

    def write(self, writes: list[Bulk], owner: object, done: Done | None = None) -> None:
        """done: the last of them has completed; never called if they are dropped."""
        self._bulk.append(_Work(writes, self._post_writes, done, owner))
        self.pump()

    def mark(self, owner: object, ticket: int) -> None:
        """The owner's last write on this lane carries `ticket` to the peer: the one that waits, if one does, else an
        empty one of its own."""
        for work in reversed(self._bulk):
            if work.owner is owner:
                work.items[-1].immediate = ticket
                return
        self.write([Bulk(0, 0, 0, 0, ticket)], owner)

    def send(self, data: bytes, done: Done | None = None) -> None:
        """A frame, in as many messages as it takes. done: its last one has been acknowledged."""
        view = memoryview(data)
        pieces = [view[i : i + MESSAGE_BYTES] for i in range(0, len(view), MESSAGE_BYTES)]
        self._urgent.append(_Work(pieces, self._post_send, done, None))
        self.pump()

    def bind(self, windows: Sequence[tuple[Window, int, int]], done: Done) -> None:
        """(window, address, length) each. Their keys are to be read when `done` is called."""
        self._urgent.append(_Work(windows, self._post_binds, done, None))
        self.pump()

    def invalidate(self, windows: Sequence[Window], done: Done) -> None:
        self._urgent.append(_Work(windows, self._post_invalidates, done, None))
        self.pump()

    def drop(self, owner: object) -> None:
        """What waits for this owner is never posted."""
        self._bulk = deque(work for work in self._bulk if work.owner is not owner)

    def when_idle(self, owner: object, done: Done) -> None:
        """Calls it when nothing of this owner is under way: now, if that is so."""
        if owner in self._under_way:
            self._idle_calls.setdefault(owner, []).append(done)
        else:
            done()

    # -- posting

    def pump(self) -> None:
        """Post what the queue has room for."""
        if self.failed:
            return
        try:
            while self._urgent and self._free and self._post(self._urgent, self._free):
                pass
            while self._bulk and (room := self._free - self._reserve) > 0 and self._bulk_bytes < MAX_BULK_BYTES:
                self._post(self._bulk, room)
        except OSError as e:
            self._fail(PeerLost(f"cannot post on a queue pair of {self._nic.name}: {e}", device=self._nic.name))

    def _post(self, waiting: deque[_Work], room: int) -> bool:
        work = waiting[0]
        part = work.items[work.at : work.at + min(_CHAIN, room)]
        chain = _Chain(self._next_id(), len(part), 0, None, work.owner)
        if waiting is self._bulk:
            part = self._within_bytes(part)
            chain.num_requests, chain.num_bulk_bytes = len(part), sum(write.length for write in part)
        elif work.post == self._post_send:
            assert self._buffers is not None
            if not self._buffers.free:
                return False
            part = part[:1]
            chain.num_requests, chain.slot = 1, self._buffers.free[-1]
        work.post(chain.wr_id, part)
        if chain.slot >= 0 and self._buffers is not None:
            self._buffers.free.pop()
        self._counts.doorbells += 1
        work.at += len(part)
        if work.at == len(work.items):
            chain.done = work.done
            waiting.popleft()
        self._free -= chain.num_requests
        self._bulk_bytes += chain.num_bulk_bytes
        self._posted.append(chain)
        if work.owner is not None:
            self._under_way[work.owner] = self._under_way.get(work.owner, 0) + 1
        return True

    def _within_bytes(self, part: Sequence[Bulk]) -> Sequence[Bulk]:
        """The first of them that may be under way now: one at least."""
        left = MAX_BULK_BYTES - self._bulk_bytes
        for i, write in enumerate(part):
            left -= write.length
            if left < 0 and i:
                return part[:i]
        return part

    def _post_writes(self, wr_id: int, part: Sequence[Bulk]) -> None:
        last = len(part) - 1
        self._counts.writes += len(part)
        self.pair.post_writes(
            [
                Write(wr_id, w.address, w.length, w.remote_address, w.rkey, i == last, w.immediate)
                for i, w in enumerate(part)
            ],
            self._pool.lkey,
        )

    def _post_send(self, wr_id: int, part: Sequence[memoryview]) -> None:
        assert self._buffers is not None
        self._counts.sends += 1
        address = self._buffers.fill(self._buffers.free[-1], part[0])
        self.pair.post_send(wr_id, address, len(part[0]), self._buffers.lkey)

    def _post_binds(self, wr_id: int, part: Sequence[tuple[Window, int, int]]) -> None:
        self._counts.binds += len(part)
        self.pair.post_binds([(wr_id, *bind) for bind in part], self._pool)

    def _post_invalidates(self, wr_id: int, part: Sequence[Window]) -> None:
        self._counts.invalidates += len(part)
        self.pair.post_invalidates([(wr_id, window) for window in part])

    def _post_receive(self, slot: int) -> None:
        wr_id = self.uid << 32 | _RECEIVE | slot
        if self._buffers is None:
            self.pair.post_receive(wr_id, 0, 0, 0)
        else:
            self.pair.post_receive(wr_id, self._buffers.receive_address(slot), MESSAGE_BYTES, self._buffers.lkey)

    def _next_id(self) -> int:
        self._serial = (self._serial + 1) % _RECEIVE
        return self.uid << 32 | self._serial

    # -- what has completed

    def complete(self, completion: Completion) -> None:
        self._counts.completions += 1
        if self.failed:
            return
        if completion.status:
            self._fail(_error(completion, self._nic.name))
            return
        self._on_life()
        if completion.wr_id & _RECEIVE:
            self._received(completion)
        else:
            self._sent(completion.wr_id)

    def _received(self, completion: Completion) -> None:
        slot = completion.wr_id & (_RECEIVE - 1)
        try:
            if completion.verb is Verb.RECEIVE_IMMEDIATE:
                self._on_ticket(completion.immediate)
            elif self._buffers is not None:
                self._on_message(self._buffers.received(slot, completion.num_bytes))
        finally:
            if not self.failed:
                try:
                    self._post_receive(slot)
                except OSError as e:
                    self._fail(PeerLost(f"cannot post a receive on {self._nic.name}: {e}", device=self._nic.name))

    def _sent(self, wr_id: int) -> None:
        finished: list[_Chain] = []
        while self._posted:
            chain = self._posted.popleft()
            finished.append(chain)
            if chain.wr_id == wr_id:
                break
        for chain in finished:
            self._free += chain.num_requests
            self._bulk_bytes -= chain.num_bulk_bytes
            if chain.slot >= 0 and self._buffers is not None:
                self._buffers.free.append(chain.slot)
        self.pump()
        for chain in finished:
            if self.failed:
                return  # close() tells whoever waits
            if chain.done is not None:
                chain.done()
            if chain.owner is not None:
                self._settle(chain.owner)

    def _settle(self, owner: object) -> None:
        self._under_way[owner] -= 1
        if self._under_way[owner]:
            return
        del self._under_way[owner]
        for done in self._idle_calls.pop(owner, ()):
            done()

    # -- the end

    def _fail(self, error: Exception) -> None:
        if not self.failed:
            self.failed = True
            self._on_error(error)

    def close(self) -> None:
        """Destroys the pair: nothing is read or placed for it any more. What waited for an owner's end is told."""
        self.failed = True
        self.pair.fail()
        try:
            self.pair.close()
        except OSError as e:
            log.error("a queue pair in error was not given back: %s", e)
        calls = [done for dones in self._idle_calls.values() for done in dones]
        self._idle_calls.clear()
        self._under_way.clear()
        self._urgent.clear()
        self._bulk.clear()
        self._posted.clear()
        for done in calls:
            done()


def _error(completion: Completion, device: str) -> PeerLost:
    return PeerLost(
        f"a queue pair of {device} broke: {completion.reason or 'status'} ({completion.status})",
        device=device,
        status=completion.status,
    )
