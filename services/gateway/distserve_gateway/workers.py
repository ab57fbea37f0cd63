"""The workers as this gateway sees them: the registry's snapshot, signs of life, and what it has with each."""

import time
from collections import Counter
from collections.abc import Callable, Mapping

from distserve.bus.base import RegistryEvent, Watch
from distserve.messages import WorkerInfo
from distserve_gateway.costs import OwnLoad
from distserve_gateway.predicting import Heard, Need, Sent, Standing, sent_to


class Workers:
    """Belongs to the event loop. `in_flight[w]`: prompt tokens this gateway has sent to w that still load it;
    `prefilling[w]`: those that decode worker w computes itself and has not computed yet; `beats[w]`: when w's last beat
    came, and which prompts were sent there since."""

    def __init__(self, watch: Watch, model: str) -> None:
        self._watch = watch
        self.model = model
        self.in_flight: Counter[str] = Counter()
        self.prefilling: Counter[str] = Counter()
        self.beats: dict[str, Heard] = {}
        self.load = OwnLoad(self.in_flight, self.prefilling, self.beats)  # as routing takes them
        self.on_gone: Callable[[str], None] = lambda worker_id: None
        self._heard: dict[str, float] = {}
        self._last_beats: dict[str, tuple[int, int]] = {}  # (pid, number): a watch may tell the same one again
        for info in watch.snapshot.values():
            self._note_beat(info)
        watch.on_event(self._on_event)

    @property
    def snapshot(self) -> Mapping[str, WorkerInfo]:
        return self._watch.snapshot

    def _on_event(self, event: RegistryEvent) -> None:
        if event.info is not None:
            self.heard(event.worker_id)
            self._note_beat(event.info)
        else:
            for known in (self._heard, self._last_beats, self.beats):
                known.pop(event.worker_id, None)
            self.on_gone(event.worker_id)

    def _note_beat(self, info: WorkerInfo) -> None:
        beat = info.pid, info.beat
        if self._last_beats.get(info.worker_id) != beat:
            self._last_beats[info.worker_id] = beat
            self.beats[info.worker_id] = Heard(time.monotonic())

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

    def prompt_sent(self, worker_id: str, need: Need, standing: Standing) -> Sent | None:
        """None: the worker is not known any more."""
        info, heard = self.snapshot.get(worker_id), self.beats.get(worker_id)
        if info is None or heard is None:
            return None
        sent = sent_to(info.load, need, standing, time.monotonic())
        heard.add(sent)
        return sent

    def prompt_withdrawn(self, worker_id: str, sent: Sent) -> None:
        """The worker has not taken it, or was told to let go of it."""
        if (heard := self.beats.get(worker_id)) is not None:
            heard.withdraw(sent)

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
