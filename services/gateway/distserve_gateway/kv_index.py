"""Which blocks every worker seems to hold, in bounded memory. A wrong hint costs time, never an answer."""

import logging
from collections import OrderedDict
from collections.abc import Mapping

from distserve.messages import KVEvents, KVSnapshot
from distserve_gateway.held_blocks import HeldBlocks

log = logging.getLogger(__name__)

MAX_HINTS = 1_000_000  # of all workers together; about 80 to 90 bytes each
READMIT_SHARE = 0.75  # a worker left out comes back when all together would fill no more than this


class KVIndex:
    """Workers join() and leave() as the registry has them; events of others are ignored.

    When there are more than max_hints hints, those of the worker that has had no news for longest are dropped, and the
    worker is left out: what it says is not kept until there is room for it again.
    """

    def __init__(self, max_hints: int = MAX_HINTS) -> None:
        self._max_hints = max_hints
        self._workers: OrderedDict[str, HeldBlocks] = OrderedDict()  # the first has had no news for longest
        self._left_out: dict[str, int] = {}  # worker -> hints that it had, or was about to have
        self.num_hints = 0
        self.num_dropped = 0  # hints, for want of room

    def __contains__(self, worker_id: str) -> bool:
        return worker_id in self._workers

    @property
    def holders(self) -> Mapping[str, Mapping[int, None]]:
        """Of each worker that seems to hold anything: beginnings of hashes."""
        return {worker_id: held.blocks for worker_id, held in self._workers.items() if held.blocks}

    def join(self, worker_id: str) -> HeldBlocks:
        """A new life of a worker: whatever an earlier one held is forgotten."""
        self.leave(worker_id)
        held = self._workers[worker_id] = HeldBlocks()
        return held

    def leave(self, worker_id: str) -> None:
        held = self._workers.pop(worker_id, None)
        if held is not None:
            self.num_hints -= len(held)
        self._left_out.pop(worker_id, None)

    def note(self, events: KVEvents) -> None:
        """Raises MalformedMessage."""
        held = self._workers.get(events.worker)
        if held is None or events.worker in self._left_out:
            return
        before = len(held)
        held.note(events)
        self._changed(events.worker, len(held) - before)

    def restore(self, worker_id: str, held: HeldBlocks, pages: list[KVSnapshot]) -> bool:
        """A snapshot of that life has come. False if that life is over. Raises MalformedMessage."""
        if self._workers.get(worker_id) is not held or worker_id in self._left_out:
            return False
        before = len(held)
        held.restore(pages)
        self._changed(worker_id, len(held) - before)
        return True

    def fits(self, worker_id: str, num_hints: int) -> bool:
        """Whether so many hints of one worker could be kept at all; if not, it is left out."""
        if num_hints <= self._max_hints:
            return True
        self._leave_out(worker_id, num_hints)
        return False

    def lacks(self, worker_id: str) -> HeldBlocks | None:
        """What is known of a worker that must be asked for a snapshot; None if it need not be."""
        held = self._workers.get(worker_id)
        return held if held is not None and held.needs_snapshot and worker_id not in self._left_out else None

    def readmit(self) -> list[str]:
        """Workers that were left out and for which there is room now: they must be asked."""
        back = []
        for worker_id, num_hints in list(self._left_out.items()):
            if self.num_hints + num_hints <= READMIT_SHARE * self._max_hints:
                self.join(worker_id)
                back.append(worker_id)
        return back

    def check(self) -> None:
        """The invariants, for tests and when idle."""
        assert self.num_hints == sum(len(held) for held in self._workers.values()) <= self._max_hints
        assert all(not len(self._workers[worker_id]) for worker_id in self._left_out)

    def _changed(self, worker_id: str, difference: int) -> None:
        self.num_hints += difference
        self._workers.move_to_end(worker_id)
        while self.num_hints > self._max_hints:
            oldest = next(w for w, held in self._workers.items() if held.blocks)
            self._leave_out(oldest, len(self._workers[oldest]))

    def _leave_out(self, worker_id: str, num_hints: int) -> None:
        held = self._workers[worker_id]
        self.num_hints -= len(held)
        self.num_dropped += len(held)
        self._workers[worker_id] = HeldBlocks()
        self._left_out[worker_id] = num_hints
        log.warning(
            "what %s holds (%d blocks) is left out of routing: at most %d hints are kept",
            worker_id,
            num_hints,
            self._max_hints,
        )
