"""The workers as this gateway sees them: the registry's snapshot, signs of life, and what it has with each."""

import time
from collections import Counter
from collections.abc import Callable, Mapping

from distserve.bus.base import RegistryEvent, Watch
from distserve.messages import WorkerInfo


class Workers:
    """Belongs to the event loop. `in_flight[w]`: prompt tokens this gateway has sent to w that still load it."""

    def __init__(self, watch: Watch, model: str) -> None:
        self._watch = watch
        self.model = model
        self.in_flight: Counter[str] = Counter()
        self.on_gone: Callable[[str], None] = lambda worker_id: None
        self._heard: dict[str, float] = {}
        watch.on_event(self._on_event)

    @property
    def snapshot(self) -> Mapping[str, WorkerInfo]:
        return self._watch.snapshot

    def _on_event(self, event: RegistryEvent) -> None:
        if event.kind == "put":
            self.heard(event.worker_id)
        else:
            self._heard.pop(event.worker_id, None)
            self.on_gone(event.worker_id)

    def heard(self, worker_id: str) -> None:
        """Note a sign of life."""
        self._heard[worker_id] = time.monotonic()

    def heard_since(self, worker_id: str, then: float) -> bool:
        return self._heard.get(worker_id, 0.0) >= then

    def present(self, worker_id: str) -> bool:
        return worker_id in self.snapshot

    def eos_token_ids(self, worker_id: str) -> list[int]:
        info = self.snapshot.get(worker_id)
        return info.eos_token_ids if info is not None else []

    def sent(self, worker_id: str, num_tokens: int) -> None:
        self.in_flight[worker_id] += num_tokens

    def relieved(self, worker_id: str, num_tokens: int) -> None:
        self.in_flight[worker_id] -= num_tokens
        if self.in_flight[worker_id] <= 0:
            del self.in_flight[worker_id]

    def of_role(self, role: str) -> list[WorkerInfo]:
        return [w for w in self.snapshot.values() if w.role == role and w.model == self.model]
