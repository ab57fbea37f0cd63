"""A bounded memory: the latest few thousand of something."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")

NUM_REMEMBERED = 4096


def remember(book: OrderedDict[K, V], key: K, value: V) -> None:
    """The oldest is forgotten where there are too many."""
    book[key] = value
    book.move_to_end(key)
    if len(book) > NUM_REMEMBERED:
        book.popitem(last=False)
