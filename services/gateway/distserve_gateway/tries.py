"""The tries of one submission: who was asked and what was said, how long it may go on, and what is told in the end."""

import math
from collections.abc import Sequence

from distserve.errors import (
    BusError,
    BusTimeout,
    DistServeError,
    Draining,
    NoResponders,
    NoWorker,
    Overloaded,
    SloUnattainable,
)
from distserve_gateway.calls import Terms
from distserve_gateway.promises import overdue, soonest
from distserve_gateway.route import Route
from distserve_gateway.routing import RETRY_AFTER_S

PAUSE_S = 0.1  # after every worker has refused
SILENT_S = 0.1  # a worker that is well has answered by then; it is not to blame for a shorter promise


class Tries:
    """Times are time.monotonic(). `excluded` workers have refused; `absent` ones are not there, whatever the registry
    still says. `due`: when the promised first token is, inf: none is."""

    def __init__(self, model: str, terms: Terms, *, due: float = math.inf, give_up: float) -> None:
        self.excluded: set[str] = set()
        self.absent: set[str] = set()
        self._model = model
        self._terms = terms
        self._due = due
        self._give_up = give_up
        self._refusal: DistServeError | None = None  # the last one that says nothing of a promise
        self._late: list[SloUnattainable] = []
        self._has_paused = False  # so all were full

    @property
    def was_refused(self) -> bool:
        """A worker has said that it would be late."""
        return bool(self._late)

    def check(self, now: float) -> None:
        """Raises what is to be told if it is over."""
        if now >= self._due:
            raise self._overdue("no worker had taken it")
        if now >= self._give_up:
            raise self._final(self._refusal or BusTimeout("no worker answered in time"))

    def left_s(self, now: float) -> float:
        """A promised request waits for nobody beyond its promise."""
        return min(self._give_up, self._due) - now

    def refused(self, route: Route, error: DistServeError) -> None:
        """By the worker that was asked: another may take it."""
        if isinstance(error, SloUnattainable):
            self._late.append(error)
        else:
            self._refusal = error
        (self.absent if isinstance(error, NoResponders) else self.excluded).add(route.first_worker)

    def declined(self, route: Route, error: DistServeError) -> None:
        """By a decode worker that was asked for a favour: it may serve as prefill's partner all the same, unless it
        is gone or leaving."""
        if isinstance(error, SloUnattainable):
            self._late.append(error)
        elif isinstance(error, BusError | Draining):
            self.refused(route, error)

    def again(self, error: NoWorker, now: float) -> None:
        """Nobody is left to ask: all may be asked again after a pause of PAUSE_S. Raises what is to be told if that is
        of no use."""
        if self._late:
            raise self._soonest(self._late)
        if self._refusal is None or not (self.excluded or self.absent):
            raise error
        if now + PAUSE_S > self._give_up:
            raise self._final(self._refusal) from self._refusal
        if now + PAUSE_S > self._due:
            raise self._overdue(f"every worker has refused: {self._refusal.message}")
        self._has_paused = True
        self.excluded.clear()
        self.absent.clear()

    def soonest(self, predicted: SloUnattainable) -> SloUnattainable:
        """The others are late by what is predicted."""
        return self._soonest([*self._late, predicted])

    def _soonest(self, late: Sequence[SloUnattainable]) -> SloUnattainable:
        """Late from the start, unless it has become so while all were full."""
        return _marked(soonest(late), True) if self._has_paused else soonest(late)

    def _overdue(self, cause: str) -> SloUnattainable:
        ttft_s, was_silent = self._terms.ttft_s or 0.0, isinstance(self._refusal, BusTimeout)
        is_ours = self._refusal is not None and (not was_silent or ttft_s >= SILENT_S)
        if self._late:
            return _marked(soonest(self._late), is_ours)
        after_s = None if self._refusal is None else self._refusal.fields.get("retry_after_s")
        retry_after_s = float(after_s) if isinstance(after_s, int | float) else RETRY_AFTER_S
        return _marked(overdue(ttft_s, cause, retry_after_s), is_ours)

    def _final(self, refusal: DistServeError) -> DistServeError:
        if isinstance(refusal, Overloaded | Draining):
            return Overloaded(
                f"every worker of model {self._model!r} is busy: {refusal.message}",
                retry_after_s=refusal.fields.get("retry_after_s") or RETRY_AFTER_S,
            )
        return NoWorker(
            f"no worker of model {self._model!r} answers: {refusal.message}",
            model=self._model,
            retry_after_s=RETRY_AFTER_S,
        )


def _marked(error: SloUnattainable, is_ours: bool) -> SloUnattainable:
    """Of a promise whose time went by. `is_ours`: since workers were full or silent (see SloUnattainable)."""
    return SloUnattainable(error.message, **(error.fields | {"overdue": is_ours}))
