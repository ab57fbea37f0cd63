"""What a server and a client library complain of outside of any call: counted, logged, and remembered as a reason."""

import logging
import time

from distserve.bus.base import BusStats

_SLOW_LOG_EVERY_S = 1.0  # drops come by the thousand

_log = logging.getLogger(__name__)


def words(e: BaseException | None) -> str:
    return f"{type(e).__name__}: {e}" if e is not None else "no reason given"


class Complaints:
    """`where` is what the connection leads to. Counts go into `stats`."""

    def __init__(self, where: str, stats: BusStats) -> None:
        self._where = where
        self._stats = stats
        self._slow_logged_at = float("-inf")
        self.last: BaseException | None = None  # the one that explains most since forget()

    def forget(self) -> None:
        """A new attempt begins: earlier reasons are not its own."""
        self.last = None

    def dropped(self, e: Exception, subject: str) -> None:
        """A message was dropped because its subscription had too many waiting."""
        self._remember(e)
        self._stats.slow_consumer_drops += 1
        now = time.monotonic()
        if now - self._slow_logged_at > _SLOW_LOG_EVERY_S:
            self._slow_logged_at = now
            _log.error(
                "messages to %s are dropped (%d so far on this bus): its callback is too slow",
                subject,
                self._stats.slow_consumer_drops,
            )

    def reported(self, e: Exception, *, connecting: bool) -> None:
        """Anything else. `connecting`: it belongs to a connection that broke or is being made, which is no fault."""
        self._remember(e)
        if "permissions violation" in str(e).lower():
            self._stats.permission_denials += 1
            _log.error("%s refused: %s", self._where, words(e))
        elif connecting:
            _log.debug("connecting to %s: %s", self._where, words(e))
        else:
            self._stats.errors += 1
            _log.error("client error at %s: %s", self._where, words(e))

    def _remember(self, e: Exception) -> None:
        # A refusal explains more than the broken connections that follow it.
        if self.last is None or "authorization" not in str(self.last).lower():
            self.last = e
