"""Sequences that wait while what others hold of them is brought into this worker's pool."""

import asyncio
import logging
from collections.abc import Callable, Collection

from distserve.engine.sequence import Sequence
from distserve.telemetry import NO_SPAN, Span
from distserve.worker.fetching import Fetching

log = logging.getLogger(__name__)


class Bringing:
    """Belongs to the event loop. They hold no blocks meanwhile."""

    def __init__(self, fetching: Fetching, *, on_ended: Callable[[], None]) -> None:
        """on_ended(): nothing is brought for one any more; what there was room for is free again, also where it was
        given up."""
        self._fetching = fetching
        self._on_ended = on_ended
        self._tasks: dict[Sequence, asyncio.Task[None]] = {}  # those given up stay until they have ended

    @property
    def sequences(self) -> Collection[Sequence]:
        return self._tasks.keys()

    def start(self, sequence: Sequence, holder: str, then: Callable[[Sequence], None], *, span: Span = NO_SPAN) -> bool:
        """Have what is missing of it brought, from the store or from `holder`, a decode worker, if there is any; `then`
        takes the sequence back, whatever has come. False: there is nothing to wait for. span: of its stay."""
        if not self._fetching.may_help(sequence, holder):
            return False
        self._tasks[sequence] = task = asyncio.create_task(
            self._bring(sequence, holder, then, span), name=f"fetch for {sequence.key}"
        )
        task.add_done_callback(lambda _: self._ended(sequence))
        return True

    def give_up(self, sequence: Sequence) -> None:
        """Nobody takes it back. Without effect if nothing is brought for it."""
        if (task := self._tasks.get(sequence)) is not None:
            task.cancel()

    def _ended(self, sequence: Sequence) -> None:
        del self._tasks[sequence]
        self._on_ended()

    async def _bring(self, sequence: Sequence, holder: str, then: Callable[[Sequence], None], span: Span) -> None:
        try:
            await self._fetching.bring(sequence, holder, span=span)
        except Exception:
            log.exception("nothing fetched for %s, it is computed", sequence.key)
        then(sequence)
