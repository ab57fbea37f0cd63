"""Who is told of what becomes of a lease, where leases of several owners are open at the same receivers: a decode
worker's hand-overs and its fetches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from distserve.errors import DistServeError, LeaseRevoked, TransportError
from distserve.messages import FetchedState, decode_as
from distserve.transport.base import Commit, Lease, OnLost


class Arrivals:
    """Give on_commit and on_lost to every receiver that leases of one LeaseTable are granted at. What is not expected
    here goes on to the others."""

    def __init__(self, on_commit: Callable[[Commit], None] | None = None, on_lost: OnLost | None = None) -> None:
        """The others'; a worker whose receivers take nothing but fetches has none."""
        self._others_commit = on_commit or _nobodys
        self._others_lost = on_lost or (lambda lease_id, epoch, error: None)
        self._expected: dict[tuple[int, int], asyncio.Future[int]] = {}  # by lease id and epoch

    def __len__(self) -> int:
        return len(self._expected)

    def expect(self, lease: Lease) -> asyncio.Future[int]:
        """The bytes that have come once the lease is committed, or a DistServeError: its sender has died, was cut off
        or its bytes were wrong, and it is fenced. forget() it in the end."""
        arrival: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        arrival.add_done_callback(_seen)
        self._expected[lease.lease_id, lease.epoch] = arrival
        return arrival

    def forget(self, lease: Lease) -> None:
        self._expected.pop((lease.lease_id, lease.epoch), None)

    def on_commit(self, commit: Commit) -> None:
        """Raises what the sender is to know, and the lease is lost."""
        arrival = self._expected.get((commit.lease_id, commit.epoch))
        if arrival is None:
            self._others_commit(commit)
            return
        decode_as(FetchedState, commit.state)
        if not arrival.done():
            arrival.set_result(commit.num_bytes)

    def on_lost(self, lease_id: int, epoch: int, error: Exception) -> None:
        arrival = self._expected.get((lease_id, epoch))
        if arrival is None:
            self._others_lost(lease_id, epoch, error)
        elif not arrival.done():
            known = isinstance(error, DistServeError)
            arrival.set_exception(error if known else TransportError(f"lease {lease_id} was lost: {error}"))


def _nobodys(commit: Commit) -> None:
    raise LeaseRevoked(f"lease {commit.lease_id} is not held any more", lease_id=commit.lease_id, epoch=commit.epoch)


def _seen(arrival: asyncio.Future[int]) -> None:
    """Its failure may come when nobody waits any more."""
    if not arrival.cancelled():
        arrival.exception()
