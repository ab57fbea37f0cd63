"""Which parts of a picture a screen has room for, and how many lines each gets. Pure arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Want(NamedTuple):
    """Lines. 0 <= least <= most."""

    least: int  # below this it is not worth showing
    most: int  # all that it has to say
    rank: int  # the lower the more important


def fit(wants: Sequence[Want], height: int) -> list[int]:
    """Lines of each, in the order given; 0: not shown. The more important are placed first, each with its least; then
    what is left is given out, again the most important first. The sum is at most `height`."""
    lines = [0] * len(wants)
    order = sorted(range(len(wants)), key=lambda i: wants[i].rank)
    left = max(0, height)
    for i in order:
        if wants[i].least <= left:
            lines[i] = wants[i].least
            left -= lines[i]
    for i in order:
        if lines[i] or not wants[i].least:
            more = min(left, wants[i].most - lines[i])
            lines[i] += more
            left -= more
    return lines
