"""What `distserve doctor` does: look, print, and say by the exit status whether anything failed."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import time
from contextlib import AsyncExitStack
from urllib.parse import urlsplit

from distserve.config import Config
from distserve.console import Console
from distserve.doctor.examine import examine
from distserve.doctor.report import as_document, exit_status, print_table
from distserve.errors import ConfigError
from distserve.lifecycle import Shutdown, run_service
from distserve.telemetry import setup_logging


def run_doctor(config: Config, *, peer: str = "", as_json: bool = False) -> int:
    """Prints to stdout. Returns the exit status: 0 nothing failed, 1 something did."""
    setup_logging("", level="error" if config.telemetry.log_level == "info" else config.telemetry.log_level)
    host, bus = socket.gethostname(), _shown(config.bus.url)
    console = Console()
    if not as_json:
        server = bus or "not given (bus.url is empty)"
        console.say(f"distserve doctor on {host}: transport.kind {config.transport.kind}, NATS {server}")
    findings = asyncio.run(examine(config, peer))
    if as_json:
        document = as_document(
            findings, host=host, kind=config.transport.kind, bus=bus, peer=peer, unix_s=round(time.time(), 3)
        )
        console.say(json.dumps(document, indent=2))
    else:
        print_table(findings, console, shutil.get_terminal_size((80, 24)).columns)
    return exit_status(findings)


def run_serve(config: Config, bind: str = "") -> int:
    """Answers `doctor --peer` until it is asked to leave. Raises ConfigError, BusError."""
    if not config.bus.url:
        raise ConfigError(
            "bus.url is empty, but both hosts meet on one NATS server: --nats-url nats://HOST:4222",
            key="bus.url",
            value="",
            expected="nats://HOST:PORT",
        )
    address, port = parse_bind(bind)
    setup_logging("", level=config.telemetry.log_level, fmt=config.telemetry.log_format)
    try:
        from distserve.doctor.serve import serving
    except ModuleNotFoundError as e:
        raise ConfigError(f"doctor --serve needs {e.name}: pip install 'distserve[engine]'", value=e.name) from e
    from distserve.worker.service import connect

    console = Console()

    async def serve(shutdown: Shutdown) -> None:
        async with AsyncExitStack() as stack:
            bus = await stack.enter_async_context(await connect(config.bus, "doctor-serve"))
            service = await stack.enter_async_context(serving(bus, config, address, port))
            for line in service.banner():
                console.say(line)
            await shutdown.wait()

    run_service(serve, grace_s=5.0)
    return 0


def parse_bind(text: str) -> tuple[str, int]:
    """`ADDRESS`, `ADDRESS:PORT` or `[V6]:PORT` -> (address, port), 0 if it has none. Raises ConfigError."""
    try:
        parsed = urlsplit(f"//{text}" if text.count(":") < 2 or text.startswith("[") else f"//[{text}]")
        port = parsed.port or 0
        if port > 65534 or (text and not parsed.hostname) or parsed.path:
            raise ValueError
    except ValueError:
        raise ConfigError(
            f"--bind is {text!r}, must be ADDRESS or ADDRESS:PORT, the port at most 65534 (two are taken)",
            key="--bind",
            value=text,
            expected="ADDRESS or ADDRESS:PORT",
        ) from None
    return parsed.hostname or "", port


def _shown(url: str) -> str:
    """Without user and password."""
    return ",".join(
        f"{p.scheme}://{p.netloc.rpartition('@')[2]}"
        for part in filter(None, url.split(","))
        for p in [urlsplit(part if "//" in part else f"nats://{part}")]
    )
