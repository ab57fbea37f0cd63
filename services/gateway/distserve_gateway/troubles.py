"""The last things that went wrong, for people."""

import time
from collections import deque
from collections.abc import Callable, Iterator

from distserve.bus.base import RegistryEvent
from distserve.errors import DistServeError
from distserve.status import Trouble
from distserve_gateway.request_trace import words_for_others

MOST = 20
MAX_SHOWN = 300  # characters of a message


class Troubles:
    """Iterated, the newest first. `service`: who is to blame where an error does not say."""

    def __init__(self, service: str = "", clock: Callable[[], float] = time.time) -> None:
        self.service = service
        self._clock = clock
        self._last: deque[Trouble] = deque(maxlen=MOST)

    def __iter__(self) -> Iterator[Trouble]:
        return reversed(self._last)

    def failed(self, request_id: str, error: DistServeError | None) -> None:
        """A request that had been let in. Everybody may read it, so no words that may repeat the prompt."""
        error = error or DistServeError("no reason given")
        worker = error.fields.get("worker")
        service = worker if isinstance(worker, str) else self.service
        self._note(service, error.code, f"{request_id}: {words_for_others(error)}")

    def on_event(self, event: RegistryEvent) -> None:
        """Of the registry: a service that left without a word."""
        if event.kind == "gone" and event.reason == "expired":
            self._note(event.worker_id, "worker_lost", "its heartbeats have stopped")

    def _note(self, service: str, code: str, message: str) -> None:
        self._last.append(Trouble(at_unix_s=self._clock(), service=service, code=code, message=message[:MAX_SHOWN]))
