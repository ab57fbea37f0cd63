"""What one worker seems to hold, kept up to date by its events. Plain arithmetic: kv_follower.py does the asking."""

from array import array

from distserve.errors import MalformedMessage
from distserve.messages import EVENT_HASH_BYTES, KVEvents, KVSnapshot

MAX_EARLY_BYTES = 1024 * 1024  # of events that wait for one that is missing


def words(packed: bytes) -> "array[int]":
    """Packed beginnings of hashes as numbers (this machine's byte order: they never leave the process)."""
    if len(packed) % EVENT_HASH_BYTES:
        raise MalformedMessage(
            f"block events have {len(packed)} bytes of hashes, must be a multiple of {EVENT_HASH_BYTES}",
            size_bytes=len(packed),
        )
    numbers = array("Q")
    numbers.frombytes(packed)
    return numbers


class HeldBlocks:
    """One worker, for one life of it.

        events     … 41 42 43 | 44    46 47
                           serial ^    _early: they wait for 45, or for a snapshot that covers it

    `blocks` has the first 8 bytes of each hash as key, None as value: the garbage collector never walks through a
    dict of numbers, and walks through a set of them for milliseconds.
    """

    __slots__ = ("_early", "_num_early_bytes", "blocks", "serial")

    def __init__(self) -> None:
        self.blocks: dict[int, None] = {}
        self.serial: int | None = None  # of the last event in `blocks`; None: there was no snapshot yet
        self._early: dict[int, KVEvents] = {}
        self._num_early_bytes = 0

    def __len__(self) -> int:
        return len(self.blocks)

    @property
    def needs_snapshot(self) -> bool:
        """Something is missing. What is there still serves as a hint."""
        return self.serial is None or bool(self._early)

    @property
    def early(self) -> frozenset[int]:
        """Serials of events that wait."""
        return frozenset(self._early)

    def forget_unreached(self, before: frozenset[int], serial: int) -> None:
        """A snapshot of `serial` was taken after the events `before` had come: those that it does not reach are of
        another life, or of another process with this one's id, and nothing will ever fill the gap before them."""
        for number in [n for n in self._early if n in before and n > serial]:
            self._forget_early(number)

    def note(self, events: KVEvents) -> None:
        """Events in any order, doubled or not. Raises MalformedMessage, and nothing has changed."""
        words(events.stored), words(events.removed)
        if (self.serial is not None and events.serial <= self.serial) or events.serial in self._early:
            return
        self._early[events.serial] = events
        self._num_early_bytes += _size(events)
        self._catch_up()
        while self._num_early_bytes > MAX_EARLY_BYTES and self._early:
            self._forget_early(min(self._early))  # a snapshot must cover it now

    def restore(self, pages: "list[KVSnapshot]") -> None:
        """Start from a snapshot, all of whose pages are of one serial; one of before what is known already, since a
        missing event came after all while it was read, changes nothing. Raises MalformedMessage, and nothing has
        changed."""
        blocks, serial = dict.fromkeys(words(b"".join(page.stored for page in pages))), pages[0].serial
        if self.serial is not None and serial < self.serial:
            return
        self.blocks, self.serial = blocks, serial
        for number in [n for n in self._early if n <= serial]:
            self._forget_early(number)
        self._catch_up()

    def _catch_up(self) -> None:
        while self.serial is not None and (events := self._early.get(self.serial + 1)) is not None:
            _apply(self.blocks, events)
            self.serial += 1
            self._forget_early(self.serial)

    def _forget_early(self, serial: int) -> None:
        self._num_early_bytes -= _size(self._early.pop(serial))


def _size(events: KVEvents) -> int:
    return len(events.stored) + len(events.removed) + EVENT_HASH_BYTES


def _apply(blocks: dict[int, None], events: KVEvents) -> None:
    for number in words(events.removed):
        blocks.pop(number, None)
    blocks.update(dict.fromkeys(words(events.stored)))
