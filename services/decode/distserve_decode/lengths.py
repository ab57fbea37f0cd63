"""How long outputs get, learnt from those that have ended here."""

from bisect import bisect_left, bisect_right, insort
from collections import deque

WINDOW = 256  # the last that have ended
LEAST = 16  # with fewer, each is thought to become as long as it may, but for
AT_FIRST = 1024  # this: a chat that names no limit may fill the model's whole context, and hardly ever does
_PART = 8  # of a pool: no more of it is kept for what nobody knows, or one that never ends shuts out all others


def guess_tokens(num_blocks: int, block_size: int) -> int:
    """Tokens that an output in a pool of so many blocks is thought to go on for, at most, where nothing is learnt."""
    return min(AT_FIRST, max(1, num_blocks // _PART) * block_size)


class Lengths:
    """Of outputs, in tokens. The same ends give the same answers."""

    def __init__(self, guess: int = AT_FIRST) -> None:
        """guess: tokens that one is thought to go on for, at most, where nothing is learnt of any like it."""
        self._guess = guess
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
        Longer than any: as much again, but the guess at most."""
        as_much_again = num_so_far + min(num_so_far, self._guess)
        if not self.known:
            return min(most, max(self._guess, as_much_again))
        first = bisect_right(self._sorted, num_so_far)
        if first == len(self._sorted):
            return min(most, as_much_again)
        return min(most, self._sorted[(first + len(self._sorted)) // 2])
