"""What a bus is. `nats.py` is the real one, `memory.py` serves one process; one contract suite runs over both.

A bus delivers at most once. Callbacks run as tasks of the event loop, so that a slow one never holds up the
subscription it came from; messages of one subscription start in their order of arrival.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Literal, Self

from distserve.messages import WorkerInfo

Headers = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Delivery:
    """One message as it came. `reply` is where an answer goes, or None if nobody waits for one."""

    subject: str
    data: bytes
    reply: str | None = None
    headers: Headers = field(default_factory=dict)


Callback = Callable[[Delivery], Awaitable[None]]
Responder = Callable[[Delivery], Awaitable[bytes]]


@dataclass(slots=True)
class BusStats:
    """What went wrong on a bus since it was made. Counts only grow."""

    reconnects: int = 0
    slow_consumer_drops: int = 0  # messages dropped because a subscription had too many waiting
    permission_denials: int = 0  # the server refused a publish or subscribe of this side
    callback_errors: int = 0  # callbacks that raised
    undecodable_entries: int = 0  # registry entries of another protocol, left out of the snapshot
    errors: int = 0  # anything else that the server or the client library reported


@dataclass(frozen=True, slots=True)
class Pending:
    """What waits in this process: messages that have come and whose callback has not been started, and unsent ones."""

    messages: int = 0
    num_bytes: int = 0


class Subscription(ABC):
    """`async with` it, or close() it: what the server has sent here by then still starts, so that no request is lost
    that other members of the group could have answered; afterwards no further callback starts. An inline one stops at
    once: it may wait for a reader who has gone."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


class Bus(ABC):
    """Raises only BusError and its kinds; every wait has a deadline."""

    @property
    @abstractmethod
    def max_payload_bytes(self) -> int:
        """The largest message that the server takes."""

    @abstractmethod
    async def publish(
        self, subject: str, data: bytes, *, reply: str | None = None, headers: Headers | None = None
    ) -> None:
        """Send and do not wait. Raises PayloadTooLarge (with both sizes) before anything is sent."""

    @abstractmethod
    async def request(self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None) -> bytes:
        """Send and wait for one answer. Raises BusTimeout, NoResponders (at once), PayloadTooLarge.

        An answer that is an ErrorReply is returned as bytes like any other: decode_as() raises it.
        """

    @abstractmethod
    async def stream(
        self, subject: str, data: bytes, *, timeout_s: float, headers: Headers | None = None
    ) -> AsyncIterator[bytes]:
        """Send and yield every answer until an empty one. `timeout_s` bounds each gap. Used by clients of
        `requests.<model>`."""
        yield b""

    @abstractmethod
    async def subscribe(
        self, subject: str, callback: Callback, *, queue: str | None = None, inline: bool = False
    ) -> Subscription:
        """Deliver to `callback` from when this returns. With `queue`, one member of the group gets each message.

        `inline` makes no task: the callback is awaited before the next message is looked at. Cheaper, strictly in
        order, for callbacks that never wait (the token stream); one that waits holds up its own subscription, and
        past the pending limit messages are dropped and counted in `stats.slow_consumer_drops`. It must not close
        its own subscription.
        """

    @abstractmethod
    async def serve(self, subject: str, responder: Responder, *, queue: str | None = None) -> Subscription:
        """Answer requests: the responder's bytes go to the asker; an exception goes as an ErrorReply."""

    @abstractmethod
    async def flush(self, timeout_s: float = 5.0) -> None:
        """Returns when the server has taken all that was published."""

    @abstractmethod
    def registry(self) -> "Registry": ...

    @abstractmethod
    async def close(self) -> None: ...

    @property
    @abstractmethod
    def connected(self) -> bool: ...

    @property
    @abstractmethod
    def stats(self) -> BusStats: ...

    @property
    @abstractmethod
    def pending(self) -> Pending: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        await self.close()


@dataclass(frozen=True, slots=True)
class RegistryEvent:
    """`put`: an entry is new or renewed. `gone`: it was deleted (left on purpose) or expired (died)."""

    kind: Literal["put", "gone"]
    worker_id: str
    info: WorkerInfo | None  # None when gone
    reason: Literal["beat", "left", "expired"] = "beat"


class Registry(ABC):
    """Who is there. An entry lives for `ttl_s` after its last put."""

    ttl_s: float

    @abstractmethod
    async def put(self, info: WorkerInfo) -> None:
        """Create or renew the entry `<role>.<worker_id>`. Recreates a bucket that is gone."""

    @abstractmethod
    async def delete(self, info: WorkerInfo) -> None:
        """Leave on purpose: watchers see `gone` with reason "left" at once."""

    @abstractmethod
    def watch(self) -> "Watch":
        """`async with registry.watch() as w`: the live snapshot, and events as they come."""


class Watch(ABC):
    """A live copy of the registry. It is complete (every entry that exists) once `async with` has entered.

    While the bus is cut off the snapshot stays as it was; expiries are believed only a full TTL after it is back.
    """

    @property
    @abstractmethod
    def snapshot(self) -> Mapping[str, WorkerInfo]:
        """worker_id -> its latest info."""

    @abstractmethod
    def on_event(self, callback: Callable[[RegistryEvent], None]) -> None:
        """Call it (on the event loop, must not block) for every event from now on, after the snapshot changed."""

    @abstractmethod
    async def wait_for(self, condition: Callable[[Mapping[str, WorkerInfo]], bool], timeout_s: float) -> None:
        """Returns when the snapshot satisfies the condition; raises BusTimeout."""

    @abstractmethod
    async def __aenter__(self) -> Self: ...

    @abstractmethod
    async def __aexit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None: ...
