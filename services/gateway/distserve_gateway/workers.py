"""The workers as this gateway sees them: the registry's snapshot, signs of life, and what it has with each."""

import time
from collections import Counter
from collections.abc import Callable, Mapping

from distserve.bus.base import RegistryEvent, Watch
from distserve.messages import WorkerInfo
from distserve_gateway.costs import OwnLoad


class Workers:
    """Belongs to the event loop. `in_flight[w]`: prompt tokens this gateway has sent to w that still load it;
    `prefilling[w]`: those that decode worker w computes itself and has not computed yet."""

    def __init__(self, watch: Watch, model: str) -> None:
        self._watch = watch
        self.model = model
        self.in_flight: Counter[str] = Counter()
        self.prefilling: Counter[str] = Counter()
        self.load = OwnLoad(self.in_flight, self.prefilling)  # both, as routing takes them
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
        _take(self.in_flight, worker_id, num_tokens)

    def prefill_sent(self, worker_id: str, num_tokens: int) -> None:
        self.prefilling[worker_id] += num_tokens

    def prefill_done(self, worker_id: str, num_tokens: int) -> None:
        _take(self.prefilling, worker_id, num_tokens)

    def of_role(self, role: str) -> list[WorkerInfo]:
        return [w for w in self.snapshot.values() if w.role == role and w.model == self.model]


def _take(counts: Counter[str], worker_id: str, num_tokens: int) -> None:
    counts[worker_id] -= num_tokens
    if counts[worker_id] <= 0:
        del counts[worker_id]
