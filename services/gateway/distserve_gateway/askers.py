"""Whether those who asked over NATS still listen.

Every message of an answer names a subject of ours for replies, to which nobody replies: only NATS itself, when nobody
is subscribed to where the message went, says so there, as it does of any request without a responder.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from distserve.bus import subjects
from distserve.bus.base import Bus, Delivery, Subscription
from distserve.bus.exchange import says_nobody_answers


class Askers:
    """Of one gateway."""

    def __init__(self, bus: Bus, gateway_id: str) -> None:
        self._bus = bus
        self._gateway_id = gateway_id
        self._numbers = itertools.count()
        self._on_gone: dict[str, Callable[[], object]] = {}  # by the subject of each

    async def open(self) -> Subscription:
        """Hears of those that are gone until the subscription is closed."""
        return await self._bus.subscribe(subjects.askers(self._gateway_id), self._on_word, inline=True)

    @contextmanager
    def followed(self, on_gone: Callable[[], object]) -> Iterator[str]:
        """Gives the subject to name in messages to one asker. `on_gone` is called once, after the first of them that
        nobody takes, while inside."""
        subject = subjects.askers(self._gateway_id, str(next(self._numbers)))
        self._on_gone[subject] = on_gone
        try:
            yield subject
        finally:
            self._on_gone.pop(subject, None)

    async def _on_word(self, delivery: Delivery) -> None:
        if says_nobody_answers(delivery) and (on_gone := self._on_gone.pop(delivery.subject, None)) is not None:
            on_gone()
