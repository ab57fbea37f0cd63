"""Which transports to offer a decode worker, and what to do when one of them cannot reach it.

rdma may be usable on both hosts and yet not between them (a switch, a subnet, a partition), and shm not between two
users of one host. Such a peer is asked without it for a while, then one hand-over tries again: no peer loses a
transport for good.
"""

import logging
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass

from distserve.errors import DistServeError

log = logging.getLogger(__name__)

FIRST_S = 1.0
MOST_S = 60.0


@dataclass(slots=True)
class _Pause:
    delay_s: float
    until: float
    why: str
    on_trial: bool = False  # over, and a hand-over tries the transport again


class Fallbacks:
    """Belongs to the event loop. kinds: what this worker can write by; forced: "auto", or the only kind to offer,
    unless may_fall_back. A trial that says nothing for `trial_s` is followed by another."""

    def __init__(
        self,
        kinds: Sequence[str],
        forced: str = "auto",
        *,
        may_fall_back: bool = False,
        trial_s: float = 10.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._kinds = tuple(kinds)
        self._forced = forced
        # What others may stand in for.
        self._replaceable = {"cuda_ipc", "rdma", "shm"} if forced == "auto" else {forced} if may_fall_back else set()
        self._trial_s = trial_s
        self._clock = clock
        self._pauses: dict[tuple[str, str], _Pause] = {}
        self.counts: dict[tuple[str, str], int] = {}  # (peer, kind that failed) -> hand-overs that took another

    def kinds_for(self, peer: str) -> list[str]:
        """What to offer in the next hand-over to this peer. Its caller says afterwards what came of it: failed() or
        worked()."""
        paused = {kind for kind in self._kinds if not self._may_try(peer, kind)}
        if self._forced != "auto" and self._forced not in paused:
            return [self._forced]
        return [kind for kind in self._kinds if kind not in paused]

    def _may_try(self, peer: str, kind: str) -> bool:
        pause = self._pauses.get((peer, kind))
        if pause is None:
            return True
        if (now := self._clock()) < pause.until:
            return False
        pause.on_trial, pause.until = True, now + self._trial_s  # one tries, the others wait for what it finds
        return True

    def failing(self, peer: str) -> list[str]:
        """Kinds that did not reach the peer when they were last tried."""
        return [kind for kind in self._kinds if (peer, kind) in self._pauses]

    def failed(self, peer: str, kind: str, error: DistServeError) -> bool:
        """It could not reach the peer. True: ask the same peer again, without it."""
        if kind not in self._replaceable or not set(self._kinds) - {kind, *self.failing(peer)}:
            return False
        now = self._clock()
        pause = self._pauses.get((peer, kind))
        if pause is None:
            pause = self._pauses[peer, kind] = _Pause(FIRST_S, now + FIRST_S, error.message)
            log.warning("%s to %s failed, another transport is taken for now: %s", kind, peer, error)
        elif pause.on_trial:
            delay_s = min(MOST_S, 2 * pause.delay_s)
            pause.delay_s, pause.until, pause.why, pause.on_trial = delay_s, now + delay_s, error.message, False
        # else: it was under way when another hand-over failed
        self.counts[peer, kind] = self.counts.get((peer, kind), 0) + 1
        return True

    def worked(self, peer: str, kind: str) -> bool:
        """True: it does so again, after a failure."""
        if self._pauses.pop((peer, kind), None) is None:
            return False
        log.info("%s to %s works again", kind, peer)
        return True

    def forget(self, peer: str) -> None:
        """It has left the registry."""
        for known in [key for key in self._pauses if key[0] == peer]:
            del self._pauses[known]
        for counted in [key for key in self.counts if key[0] == peer]:
            del self.counts[counted]

    def reasons(self, present: Container[str]) -> list[str]:
        """Why this worker is degraded: transports that did not work and are left out now. One whose pause is over is no
        reason: a degraded worker may get no hand-over, and only a hand-over can find out whether it works again.

        present: the workers in the registry. A hand-over may fail after its peer has left."""
        now = self._clock()
        return [
            f"{kind} to {peer} failed: {pause.why}"
            for (peer, kind), pause in sorted(self._pauses.items(), key=lambda item: item[0])
            if now < pause.until and peer in present
        ]
