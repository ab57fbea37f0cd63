"""Lists of all that a pool holds, each of one moment, kept while they are read page by page."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

KEEP_S = 10.0  # after its last page was read
MAX_KEPT = 4  # moments; those who read at one share its list


@dataclass(slots=True)
class _Kept:
    packed: bytes
    until: float


class Snapshots:
    """By serial: the number of the last message about changes before the moment."""

    def __init__(self, take: Callable[[], bytes]) -> None:
        """take(): the list as it is now."""
        self._take = take
        self._kept: OrderedDict[int, _Kept] = OrderedDict()  # the first was read longest ago

    def __len__(self) -> int:
        return len(self._kept)

    def of(self, serial: int | None, current: int, now: float) -> tuple[int, bytes]:
        """Serial and list of the moment `serial`; if that is None or kept no more, of `current`, which is now.

        What has changed since message `current` and isn't told yet may be in the list: it is told again by the next.
        """
        self.drop_old(now)
        found = current if serial is None or serial not in self._kept else serial
        if found not in self._kept:
            self._kept[found] = _Kept(self._take(), 0.0)
            while len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        kept = self._kept[found]
        kept.until = now + KEEP_S
        self._kept.move_to_end(found)
        return found, kept.packed

    def drop_old(self, now: float) -> None:
        while self._kept and next(iter(self._kept.values())).until < now:
            self._kept.popitem(last=False)
