"""What waits in this process on its way from NATS or to it, read from the client library's buffers."""

from collections.abc import Iterable
from typing import Any

from distserve.bus.base import Pending


def pending_of(client: Any, subscribed: Iterable[Any]) -> Pending:
    """`client`: nats.aio.client.Client; `subscribed`: its subscriptions, None for one that is not attached."""
    attached = [one for one in subscribed if one is not None]
    return Pending(
        sum(one.pending_msgs for one in attached) + len(client._pending),
        sum(one.pending_bytes for one in attached) + client.pending_data_size,
    )
