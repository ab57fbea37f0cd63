"""Which store nodes there are, as this worker sees it."""

from __future__ import annotations

from collections.abc import Sequence

from distserve.bus.base import RegistryEvent, Watch
from distserve.kv.placement import owners
from distserve.messages import KVLayout, WorkerInfo
from distserve.worker.store.found import Source


class Nodes:
    """Nodes and workers of one layout, from the registry. Who did not answer in time is left out until it beats again:
    it costs one lookup its deadline, not each."""

    def __init__(self, watch: Watch, layout: KVLayout, me: str) -> None:
        """me: our own id, which is never asked."""
        self._watch = watch
        self._layout = layout
        self._me = me
        self._live: list[str] | None = None  # made on demand
        self._silent: set[str] = set()
        watch.on_event(self._on_event)

    @property
    def live(self) -> Sequence[str]:
        """Store nodes that serve our layout and are not about to leave."""
        if self._live is None:
            self._live = sorted(
                worker_id
                for worker_id, info in self._watch.snapshot.items()
                if info.role == "kvstore" and self._serves(info) and worker_id not in self._silent
            )
        return self._live

    def owners(self, key: bytes, n: int = 1) -> list[str]:
        """The nodes for a segment, its owner first."""
        return owners(key, self.live, n)

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

    def was_silent(self, worker_id: str) -> None:
        self._silent.add(worker_id)
        self._live = None

    def _serves(self, info: WorkerInfo) -> bool:
        return info.layout == self._layout and info.status in ("ok", "degraded")

    def _on_event(self, event: RegistryEvent) -> None:
        if event.kind == "gone" or (event.info is not None and event.info.role in ("kvstore", "decode")):
            self._silent.discard(event.worker_id)
            self._live = None
