"""Where each conversation ran last, for its next turn: the KV of the turns so far lies there."""

from collections import OrderedDict

from distserve_gateway.costs import NOWHERE, Place

MAX_CONVERSATIONS = 10_000


class Affinity:
    """The latest MAX_CONVERSATIONS of them; of an older one the workers' own events (kv_index.py) tell as much.
    Names of different salts are different conversations: two tenants may use the same one."""

    def __init__(self, max_conversations: int = MAX_CONVERSATIONS) -> None:
        self._max = max_conversations
        self._places: OrderedDict[tuple[str, str], Place] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def last(self, cache_salt: str, conversation: str) -> Place:
        if not conversation:
            return NOWHERE
        return self._places.get((cache_salt, conversation), NOWHERE)

    def note(self, cache_salt: str, conversation: str, prefill_worker: str | None, decode_worker: str) -> None:
        """It runs, or ran, there. A decode worker that did both phases leaves the prefill worker as it was."""
        if not conversation:
            return
        key = cache_salt, conversation
        before = self._places.pop(key, NOWHERE)
        self._places[key] = Place(prefill_worker or before.prefill_worker, decode_worker)
        if len(self._places) > self._max:
            self._places.popitem(last=False)
