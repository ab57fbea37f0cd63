"""A service's /metrics and /health as one message of the bus, which carries only so much."""

import asyncio
from collections.abc import Callable

import msgspec

from distserve.bus.base import Bus
from distserve.messages import ReportReply
from distserve.worker import metrics
from distserve.worker.report import Report, health

LEFT_OUT = "distserve_report_left_out_bytes"
_BESIDE_BYTES = 4096  # of a message: names, lengths and headers, with room to spare
_MOST_NAMED = 20  # families, in the note
_COUNTED = f"""\
# HELP {LEFT_OUT} Bytes of families that did not fit a message of the bus.
# TYPE {LEFT_OUT} gauge
{LEFT_OUT} %d
""".encode()


async def reply(take: Callable[[], Report], bus: Bus) -> ReportReply:
    """`take` is called on this event loop; the picture is put into words on a thread."""
    return await asyncio.to_thread(in_words, take(), bus.max_payload_bytes)


def in_words(report: Report, max_payload_bytes: int) -> ReportReply:
    return fitted(metrics.exposition(report), msgspec.json.encode(health(report)), max_payload_bytes)


def fitted(exposition: bytes, health: bytes, max_payload_bytes: int) -> ReportReply:
    """What fits into one message. A /health of more than a quarter of it keeps its status alone."""
    room = max_payload_bytes - _BESIDE_BYTES
    if len(health) > room // 4:
        said = msgspec.json.decode(health)
        reason = f"{len(health)} bytes of /health did not fit a message of the bus: ask the service itself"
        kept = {key: said[key] for key in ("status", "ready", "role", "version") if key in said}
        health = msgspec.json.encode({**kept, "reasons": [reason]})
    return ReportReply(exposition=shortened(exposition, room - len(health)), health=health)


def shortened(exposition: bytes, most_bytes: int) -> bytes:
    """All of it, or without its largest families, so that most kinds of figures stay; a comment then names what is
    missing, and LEFT_OUT counts its bytes."""
    if len(exposition) <= most_bytes:
        return exposition
    families = _families(exposition)
    room = most_bytes - len(_note({name: len(exposition) for name in list(families)[:_MOST_NAMED]})) - 100
    left_out: dict[bytes, int] = {}
    size = len(exposition)
    for name in sorted(families, key=lambda name: len(families[name]), reverse=True):
        if size <= room:
            break
        left_out[name] = len(families[name])
        size -= left_out[name]
    return b"".join(text for name, text in families.items() if name not in left_out) + _note(left_out)


def _families(exposition: bytes) -> dict[bytes, bytes]:
    """The text of each family, by its name."""
    found: dict[bytes, list[bytes]] = {}
    name = b""
    for line in exposition.splitlines(keepends=True):
        words = line.split(maxsplit=3)
        if len(words) > 2 and words[0] == b"#" and words[1] in (b"HELP", b"TYPE"):
            name = words[2]
        found.setdefault(name, []).append(line)
    return {name: b"".join(lines) for name, lines in found.items()}


def _note(left_out: dict[bytes, int]) -> bytes:
    names = b", ".join(list(left_out)[:_MOST_NAMED])
    more = b", ..." if len(left_out) > _MOST_NAMED else b""
    said = b"# Left out, since a message of the bus holds no more (the service's own /metrics has all): "
    return said + names + more + b"\n" + _COUNTED % sum(left_out.values())
