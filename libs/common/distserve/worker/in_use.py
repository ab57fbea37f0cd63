"""Which transports a worker's KV goes by, to or from each peer, and why."""

import logging
from collections.abc import Callable

from distserve.bus.base import RegistryEvent, Watch

log = logging.getLogger(__name__)


class InUse:
    """Belongs to the event loop. Each (peer, kind) is logged when it is first used, not for every lease."""

    def __init__(self) -> None:
        self._by_peer: dict[str, dict[str, str]] = {}  # peer -> kind -> reason
        self._present: Callable[[str], bool] = lambda peer: True

    def follow(self, watch: Watch) -> None:
        """Of peers that are not in the registry nothing is kept from now on: a lease may end after its peer has left,
        and nobody would forget it again."""

        def on_event(event: RegistryEvent) -> None:
            if event.kind == "gone":
                self.forget(event.worker_id)

        self._present = lambda peer: peer in watch.snapshot
        watch.on_event(on_event)

    def note(self, peer: str, kind: str, reason: str) -> None:
        """A lease between us and `peer` goes by `kind`."""
        if not self._present(peer):
            return
        kinds = self._by_peer.setdefault(peer, {})
        if kind not in kinds:
            log.info("KV between here and %s goes by %s: %s", peer, kind, reason)
        kinds[kind] = reason

    def drop(self, peer: str, kind: str) -> None:
        """It does not go by `kind` any more."""
        kinds = self._by_peer.get(peer, {})
        kinds.pop(kind, None)
        if not kinds:
            self.forget(peer)

    def forget(self, peer: str) -> None:
        """Of this peer nothing is known any more."""
        self._by_peer.pop(peer, None)

    @property
    def kinds(self) -> list[str]:
        return sorted({kind for kinds in self._by_peer.values() for kind in kinds})

    def snapshot(self) -> dict[str, dict[str, str]]:
        """peer -> kind -> reason."""
        return {peer: dict(kinds) for peer, kinds in self._by_peer.items()}
