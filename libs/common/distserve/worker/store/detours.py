"""Transports that did not reach a peer, left out with it for a while."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

LEFT_OUT_S = 10.0


class Detours:
    """Two hosts may both have a transport and still not reach each other by it. A kind that failed with a peer is left
    out for LEFT_OUT_S, where there is another one."""

    def __init__(self, present: Callable[[str], bool]) -> None:
        """present: whether a peer is in the registry; of others nothing is kept."""
        self._present = present
        self._until: dict[tuple[str, str], float] = {}  # by peer and kind

    def __len__(self) -> int:
        return len(self._until)

    def kinds(self, peer: str, kinds: Sequence[str]) -> list[str]:
        """Those of `kinds` to go by; all of them if each has failed."""
        now = time.monotonic()
        return [k for k in kinds if self._until.get((peer, k), 0.0) <= now] or list(kinds)

    def failed(self, peer: str, kind: str, kinds: Sequence[str]) -> bool:
        """It did not reach the peer. True if another of `kinds` is left to be tried."""
        if not self._present(peer):
            return False
        self._until[peer, kind] = time.monotonic() + LEFT_OUT_S
        return kind not in self.kinds(peer, kinds)

    def forget(self, peer: str) -> None:
        """It has left the registry."""
        for key in [key for key in self._until if key[0] == peer]:
            del self._until[key]
