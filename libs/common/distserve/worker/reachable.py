"""The address that other workers reach this host at."""

import socket
from urllib.parse import urlsplit

from distserve.config import Config
from distserve.errors import ConfigError

_LOOPBACK = ("localhost", "127.0.0.1", "::1")


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
