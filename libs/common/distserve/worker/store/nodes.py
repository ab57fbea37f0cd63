"""Which store nodes there are, as this worker sees it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

from distserve.bus.base import RegistryEvent, Watch
from distserve.kv.placement import owners
from distserve.messages import KVLayout, WorkerInfo
from distserve.worker.store.found import Source
from distserve.worker.store.pauses import Pauses


class Nodes:
    """Nodes and workers of one layout, from the registry. Who did not answer in time is left out for a while, longer
    each time (pauses.py), whether it beats or not: it costs one lookup its deadline, not each. Then one lookup tries
    it."""

    def __init__(self, watch: Watch, layout: KVLayout, me: str, *, in_time_s: float) -> None:
        """me: our own id, which is never asked. in_time_s: who answers a lookup or an offer within that is well."""
        self._watch = watch
        self._layout = layout
        self._me = me
        self._in_time_s = in_time_s
        self._silent: Pauses[str] = Pauses(try_s=in_time_s)
        self._live: list[str] | None = None  # made on demand
        self._live_until = math.inf  # then the next pause ends
        watch.on_event(self._on_event)

    @property
    def live(self) -> Sequence[str]:
        """Store nodes that serve our layout, are not about to leave and have not been silent."""
        if self._live is None or time.monotonic() >= self._live_until:
            self._live = sorted(
                worker_id
                for worker_id, info in self._watch.snapshot.items()
                if info.role == "kvstore" and self._serves(info) and worker_id not in self._silent
            )
            self._live_until = self._silent.next_end
        return self._live

    @property
    def num_silent(self) -> int:
        """Nodes and workers that did not answer in time, and have not since."""
        return len(self._silent)

    def owners(self, key: bytes, n: int = 1) -> list[str]:
        """The nodes for a segment, its owner first."""
        return owners(key, self.live, n)

    def present(self, worker_id: str) -> bool:
        """It is in the registry. What comes late of one that has left is not to be kept: nothing would end it."""
        return worker_id in self._watch.snapshot

    def info(self, source: Source) -> WorkerInfo | None:
        """Its entry in the registry; None if it has none, or isn't what it is taken for."""
        info = self._watch.snapshot.get(source.worker_id)
        return info if info is not None and info.role == source.role else None

    def worker(self, worker_id: str) -> Source | None:
        """A decode worker to ask for blocks of its pool; None if that is no use."""
        source = Source("decode", worker_id)
        info = self.info(source)
        if info is None or worker_id in self._silent or worker_id == self._me or not self._serves(info):
            return None
        return source

    def asking(self, worker_id: str) -> None:
        """A lookup is about to wait for it. If it has been silent the next ones don't, until it is known."""
        if self._silent.trying(worker_id):
            self._live = None

    def answered(self, worker_id: str, after_s: float) -> None:
        """Late is no better than never."""
        if after_s <= self._in_time_s and self._silent.succeeded(worker_id):
            self._live = None

    def was_silent(self, worker_id: str) -> None:
        if self.present(worker_id):
            self._silent.failed(worker_id)
            self._live = None

    def _serves(self, info: WorkerInfo) -> bool:
        return info.layout == self._layout and info.status in ("ok", "degraded")

    def _on_event(self, event: RegistryEvent) -> None:
        if event.kind == "gone":
            self._silent.forget(lambda worker_id: worker_id == event.worker_id)
        if event.kind == "gone" or (event.info is not None and event.info.role in ("kvstore", "decode")):
            self._live = None
