"""A small model of a cache under W-TinyLFU, to see what another size of its window would bring."""

from __future__ import annotations

from collections import Counter, OrderedDict

PROTECTED_PART = 0.8  # at most, of what is not the window's


class Miniature:
    """The rules of lfu.py without chains, tiers and pins: one element at a time, by key."""

    def __init__(self, capacity: int, part: float, frequencies: Counter[int]) -> None:
        """part: the window's, of the capacity; 1: the cache is LRU. frequencies: how often each key was asked for
        lately."""
        self._window_size = max(1, round(part * capacity))
        self._main_size = capacity - self._window_size
        self._frequencies = frequencies
        self._window: OrderedDict[int, None] = OrderedDict()
        self._probation: OrderedDict[int, None] = OrderedDict()
        self._protected: OrderedDict[int, None] = OrderedDict()

    def ask(self, key: int) -> bool:
        """Whether it is there. It is from now on, or would have to contest."""
        if key in self._window:
            self._window.move_to_end(key)
        elif key in self._protected:
            self._protected.move_to_end(key)
        elif key in self._probation:
            del self._probation[key]
            self._protected[key] = None
            if len(self._protected) > PROTECTED_PART * self._main_size:
                self._probation[self._protected.popitem(last=False)[0]] = None
        else:
            self._window[key] = None
            if len(self._window) > self._window_size:
                self._admit(self._window.popitem(last=False)[0])
            return False
        return True

    def _admit(self, new: int) -> None:
        if len(self._probation) + len(self._protected) >= self._main_size:
            main = self._probation or self._protected
            if not main or self._frequencies[new] <= self._frequencies[next(iter(main))]:
                return
            main.popitem(last=False)
        self._probation[new] = None
