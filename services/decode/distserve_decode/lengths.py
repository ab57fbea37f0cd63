"""How long outputs get, learnt from those that have ended here."""

from bisect import bisect_left, bisect_right, insort
from collections import deque

WINDOW = 256  # the last that have ended
LEAST = 16  # with fewer, each is thought to become as long as it may, but for
AT_FIRST = 1024  # this: a chat that names no limit may fill the model's whole context, and hardly ever does


class Lengths:
    """Of outputs, in tokens. The same ends give the same answers."""

    def __init__(self) -> None:
        self._window: deque[int] = deque()
        self._sorted: list[int] = []

    @property
    def known(self) -> bool:
        return len(self._window) >= LEAST

    def note(self, num_tokens: int) -> None:
        """An output has ended with so many."""
        if len(self._window) == WINDOW:
            del self._sorted[bisect_left(self._sorted, self._window.popleft())]
        self._window.append(num_tokens)
        insort(self._sorted, num_tokens)

    def expected(self, num_so_far: int, most: int) -> int:
        """Tokens in all of an output that has num_so_far and may have `most`: the median of those that got longer.
        Longer than any: as much again."""
        if not self.known:
            return min(most, max(AT_FIRST, 2 * num_so_far))
        first = bisect_right(self._sorted, num_so_far)
        if first == len(self._sorted):
            return min(most, 2 * num_so_far)
        return min(most, self._sorted[(first + len(self._sorted)) // 2])
