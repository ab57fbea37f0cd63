"""Keys of sequences that were cancelled, perhaps before they came: a cancel can overtake the hand-over it is for."""

from collections import OrderedDict

from distserve.messages import SequenceKey


class Tombstones:
    """The last `capacity` of them."""

    def __init__(self, capacity: int = 65_536) -> None:
        self._capacity = capacity
        self._keys: OrderedDict[SequenceKey, None] = OrderedDict()

    def add(self, key: SequenceKey) -> None:
        self._keys[key] = None
        self._keys.move_to_end(key)
        if len(self._keys) > self._capacity:
            self._keys.popitem(last=False)

    def __contains__(self, key: SequenceKey) -> bool:
        return key in self._keys
