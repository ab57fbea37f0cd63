"""A bucket on NATS JetStream: a KV bucket as any NATS tool sees it, spoken to in JetStream's own API.

The calls are those of NATS' architecture decisions ADR-8 (KV), ADR-31 (direct batch get) and ADR-48 (limit markers).
Changes come by the stream's `republish`, not by a consumer: a plain subscription that the client renews by itself
after a reconnect, costs the server no state, carries each entry's revision, and goes on working when the bucket was
made anew. The server republishes the markers of expired entries too.
"""

import asyncio
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from distserve.bus import subjects
from distserve.bus.base import Delivery, Subscription
from distserve.bus.bucket import Bucket, Change, ChangeKind, Entry
from distserve.bus.exchange import says_nobody_answers, timed_out
from distserve.errors import BusError, NoResponders

if TYPE_CHECKING:
    from distserve.bus.nats import NatsBus

_BATCH = 256  # entries a listing asks for at once
_OTHER_CONFIGURATION = 10058  # JetStream's err_code for a stream that exists and differs
_NOT_SO_MANY_SERVERS = (10074, 10005)  # for more replicas than there are: no cluster at all, or too small a one
_REPLICAS = 3  # in a cluster: the registry goes on without a server of it, once the others have elected a leader
_CALL_TIMEOUT_S = 5.0


class JetStreamBucket(Bucket):
    """Memory storage: beats fill it again after a restart."""

    def __init__(self, bus: "NatsBus", name: str, ttl_s: float) -> None:
        self._bus = bus
        self._stream = f"KV_{name}"
        self._prefix = f"$KV.{name}."
        self._followed = f"{subjects.ROOT}.{name}."
        self._name = name
        self._is_open = False
        self.ttl_s = ttl_s
        self.stats = bus.stats

    @property
    def connected_since(self) -> float | None:
        return self._bus.connected_since

    async def open(self) -> None:
        """Idempotent. Raises BusError if JetStream is off, or the bucket exists with other settings."""
        ttl_ns = int(self.ttl_s * 1e9)
        config = {
            "name": self._stream,
            "description": "who is there: one entry a worker, renewed by its heartbeat",
            "subjects": [f"{self._prefix}>"],
            "storage": "memory",
            "max_age": ttl_ns,
            "subject_delete_marker_ttl": max(ttl_ns, 1_000_000_000),
            "allow_msg_ttl": True,
            "max_msgs_per_subject": 1,
            "discard": "new",
            "allow_direct": True,
            "allow_rollup_hdrs": True,
            "deny_delete": True,
            "duplicate_window": ttl_ns,
            "republish": {"src": f"{self._prefix}>", "dest": f"{self._followed}>"},
        }
        error = await self._create(config | {"num_replicas": _REPLICAS})
        if error is not None and error.get("err_code") in (*_NOT_SO_MANY_SERVERS, _OTHER_CONFIGURATION):
            error = await self._create(config | {"num_replicas": 1})
        if error is not None and error.get("err_code") == _OTHER_CONFIGURATION:
            raise BusError(
                f"the registry's bucket {self._name} on {self._bus.address} exists with other settings than a TTL of "
                f"{self.ttl_s:g} s: use one TTL for all services, and after a change remove the old bucket "
                f"(`nats kv del {self._name}`)",
                bucket=self._name,
                ttl_s=self.ttl_s,
            )
        self._raise(error, f"the registry's bucket {self._name} can't be made on {self._bus.address}")
        self._is_open = True

    async def _create(self, config: Mapping[str, Any]) -> Any:
        """JetStream's error; None: the stream is there, with this configuration."""
        subject = f"$JS.API.STREAM.CREATE.{self._stream}"
        try:
            raw = await self._bus.request(subject, json.dumps(config).encode(), timeout_s=_CALL_TIMEOUT_S)
        except NoResponders as e:
            raise BusError(
                f"JetStream is off on the NATS server at {self._bus.address}: start it with `nats-server -js`, "
                "or put `jetstream {}` in its config file",
                url=self._bus.address,
            ) from e
        return json.loads(raw).get("error")

    async def put(self, key: str, value: bytes) -> None:
        await self._write(key, value, None)

    async def delete(self, key: str) -> None:
        await self._write(key, b"", {"KV-Operation": "DEL"})

    async def _write(self, key: str, value: bytes, headers: Mapping[str, str] | None) -> None:
        if not self._is_open:
            await self.open()
        subject = self._prefix + key
        try:
            raw = await self._bus.request(subject, value, timeout_s=self.ttl_s, headers=headers)
        except NoResponders:  # the bucket is gone: the server lost its memory, or somebody removed it
            await self.open()
            raw = await self._bus.request(subject, value, timeout_s=self.ttl_s, headers=headers)
        self._raise(json.loads(raw).get("error"), f"the registry's bucket {self._name} refused {key}")

    @staticmethod
    def _raise(error: Any, what: str) -> None:
        if error is not None:
            raise BusError(f"{what}: {error.get('description')} (JetStream error {error.get('err_code')})")

    async def follow(self, callback: Callable[[Change], None]) -> Subscription:
        async def on_message(delivery: Delivery) -> None:
            headers = delivery.headers
            kind = _kind(headers)
            value = delivery.data if kind == "put" else None
            key = delivery.subject.removeprefix(self._followed)
            callback(Change(key, kind, Entry(int(headers.get("Nats-Sequence", 0)), value)))

        return await self._bus.subscribe(f"{self._followed}>", on_message, inline=True)

    async def entries(self, timeout_s: float) -> Mapping[str, Entry]:
        found: dict[str, Entry] = {}
        answers: asyncio.Queue[Delivery] = asyncio.Queue()
        inbox = self._bus.new_inbox()
        subject = f"$JS.API.DIRECT.GET.{self._stream}"
        try:
            async with asyncio.timeout(timeout_s), await self._bus.subscribe(inbox, answers.put, inline=True):
                sequence = 1
                while True:
                    query = {"seq": sequence, "batch": _BATCH, "next_by_subj": f"{self._prefix}>"}
                    await self._bus.publish(subject, json.dumps(query).encode(), reply=inbox)
                    while True:  # one batch: entries, then an empty message with a status
                        got = await answers.get()
                        if says_nobody_answers(got):
                            return {}  # no such bucket
                        if "Status" in got.headers:
                            break
                        sequence = int(got.headers["Nats-Sequence"]) + 1
                        self._collect(got, found)
                    if got.headers["Status"] != "204" or got.headers.get("Nats-Num-Pending", "0") == "0":
                        return found
        except TimeoutError:
            raise timed_out(subject, timeout_s) from None

    def _collect(self, got: Delivery, found: dict[str, Entry]) -> None:
        kind = _kind(got.headers)
        key = got.headers["Nats-Subject"].removeprefix(self._prefix)
        if kind == "expired":
            found.pop(key, None)
        else:
            found[key] = Entry(int(got.headers["Nats-Sequence"]), got.data if kind == "put" else None)


def _kind(headers: Mapping[str, str]) -> ChangeKind:
    """What a stored message says of its key: a value, deleted by its owner, or a marker that the server placed."""
    if "KV-Operation" in headers:
        return "left"
    return "expired" if "Nats-Marker-Reason" in headers else "put"
