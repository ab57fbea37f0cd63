"""The KV data plane of a worker, from its configuration."""

import socket
from urllib.parse import urlsplit

from distserve.config import Config
from distserve.errors import ConfigError
from distserve.transport.base import PoolMemory, Receiver, Sender
from distserve.transport.factory import make_receiver, make_sender, usable_kinds
from distserve.transport.options import StreamOptions

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def kinds(config: Config, memory: PoolMemory) -> list[str]:
    """The transports to use, preferred first: the one that is forced, else all that the pool's memory allows."""
    usable = usable_kinds(memory)
    forced = config.transport.kind
    if forced == "auto":
        return usable
    if forced not in usable:
        raise ConfigError(
            f"transport.kind is {forced}, this worker's memory can be sent by {', '.join(usable)}",
            key="transport.kind",
            value=forced,
            expected=f"auto or {', '.join(usable)}",
        )
    return [forced]


def senders(config: Config, memory: PoolMemory, worker_id: str) -> dict[str, Sender]:
    options = stream_options(config)
    return {k: make_sender(k, memory, sender_id=worker_id, options=options) for k in kinds(config, memory)}


def receivers(config: Config, memory: PoolMemory) -> dict[str, Receiver]:
    options, host = stream_options(config), reachable_host(config)
    return {
        k: make_receiver(k, memory, host=host, port=config.transport.port, advertise=host, options=options)
        for k in kinds(config, memory)
    }


def stream_options(config: Config) -> StreamOptions:
    t = config.transport
    return StreamOptions(
        connect_timeout_s=t.connect_timeout_s,
        frame_bytes=t.span_bytes,
        dscp={"decode": t.dscp_decode, "prefill": t.dscp_prefill, "background": t.dscp_background},
    )


def reachable_host(config: Config) -> str:
    """The address that peers reach this host at: as configured, else that of the route to NATS, since every peer
    reaches NATS too."""
    if config.transport.host:
        return config.transport.host
    url = urlsplit(config.bus.url.split(",")[0])
    if not url.hostname or url.hostname in _LOOPBACK:
        return "127.0.0.1"
    try:
        family, kind, proto, _, address = socket.getaddrinfo(url.hostname, url.port or 4222, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as s:
            s.connect(address)  # of a datagram socket: picks a route, sends nothing
            return str(s.getsockname()[0])
    except OSError as e:
        raise ConfigError(
            f"no route to {url.hostname} of bus.url ({e}): set transport.host to the address that peers reach",
            key="transport.host",
            value="",
            expected="an address of this host",
        ) from e
