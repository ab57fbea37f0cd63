"""What tcpdump has captured, as far as the tests look: pcap, Ethernet, IPv4, UDP, TCP, RoCE v2.

Sources: pcap-savefile(5); RFC 791 and 2474 (IPv4, DSCP), 768 (UDP), 9293 (TCP); InfiniBand Architecture Specification,
volume 1: chapter 9.2 (base transport header, table of opcodes), 9.3 (extended headers), annex A17 (RoCE v2: UDP port
4791, the DSCP in place of a global route header's traffic class).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

ROCE_PORT = 4791
UDP, TCP = 17, 6
_ETHERNET = 1  # LINKTYPE_ETHERNET
_IPV4 = 0x0800
_ICRC_BYTES = 4


class Opcode(IntEnum):
    """Those of reliable connections that this project's packets have, and the congestion notification."""

    SEND_FIRST = 0x00
    SEND_MIDDLE = 0x01
    SEND_LAST = 0x02
    SEND_LAST_IMMEDIATE = 0x03
    SEND_ONLY = 0x04
    SEND_ONLY_IMMEDIATE = 0x05
    WRITE_FIRST = 0x06
    WRITE_MIDDLE = 0x07
    WRITE_LAST = 0x08
    WRITE_LAST_IMMEDIATE = 0x09
    WRITE_ONLY = 0x0A
    WRITE_ONLY_IMMEDIATE = 0x0B
    READ_REQUEST = 0x0C
    READ_RESPONSE_FIRST = 0x0D
    READ_RESPONSE_MIDDLE = 0x0E
    READ_RESPONSE_LAST = 0x0F
    READ_RESPONSE_ONLY = 0x10
    ACKNOWLEDGE = 0x11
    CONGESTION = 0x81


WRITES = frozenset(range(Opcode.WRITE_FIRST, Opcode.WRITE_ONLY_IMMEDIATE + 1))
READS = frozenset(range(Opcode.READ_REQUEST, Opcode.READ_RESPONSE_ONLY + 1))
_WITH_RETH = {Opcode.WRITE_FIRST, Opcode.WRITE_ONLY, Opcode.WRITE_ONLY_IMMEDIATE, Opcode.READ_REQUEST}
_WITH_IMMEDIATE = {
    Opcode.SEND_LAST_IMMEDIATE,
    Opcode.SEND_ONLY_IMMEDIATE,
    Opcode.WRITE_LAST_IMMEDIATE,
    Opcode.WRITE_ONLY_IMMEDIATE,
}
_WITH_AETH = {
    Opcode.READ_RESPONSE_FIRST,
    Opcode.READ_RESPONSE_LAST,
    Opcode.READ_RESPONSE_ONLY,
    Opcode.ACKNOWLEDGE,
}


@dataclass(frozen=True, slots=True)
class Roce:
    """One RoCE v2 packet's transport headers. data: what follows them, without padding and checksum."""

    opcode: int
    queue_pair: int  # of the receiver
    psn: int
    data: bytes
    remote_address: int | None = None  # of a write's or read's first packet
    rkey: int | None = None
    num_bytes: int | None = None  # of the whole message, in its first packet
    immediate: int | None = None

    @property
    def is_write(self) -> bool:
        return self.opcode in WRITES


@dataclass(frozen=True, slots=True)
class Packet:
    """One IPv4 packet. time_s: since the epoch. payload: what UDP or TCP carries; of other protocols, all of it. dscp
    0..63. roce: if it went to RoCE's port."""

    time_s: float
    source: str
    target: str
    dscp: int
    protocol: int
    source_port: int
    target_port: int
    payload: bytes
    roce: Roce | None = None


def read(path: Path) -> Iterator[Packet]:
    """The IPv4 packets of a capture, in order. Raises ValueError if the file is no pcap of Ethernet or a packet is cut
    short."""
    data = path.read_bytes()
    order, per_second = _byte_order(data, path)
    link = struct.unpack_from(order + "I", data, 20)[0] & 0x0FFFFFFF
    if link != _ETHERNET:
        raise ValueError(f"{path} has link type {link}, must be {_ETHERNET} (Ethernet)")
    at = 24
    while at < len(data):
        if at + 16 > len(data):
            raise ValueError(f"{path} ends within a packet's header, at byte {at}")
        seconds, fraction, captured, length = struct.unpack_from(order + "IIII", data, at)
        if captured < length:
            raise ValueError(
                f"{path} holds {captured} of a packet's {length} bytes at byte {at}: capture whole packets"
            )
        frame = data[at + 16 : at + 16 + captured]
        if len(frame) < captured:
            raise ValueError(f"{path} ends within a packet, at byte {at}")
        packet = _ipv4(seconds + fraction / per_second, frame)
        if packet is not None:
            yield packet
        at += 16 + captured


def _byte_order(data: bytes, path: Path) -> tuple[str, int]:
    """How the file's integers are written, and parts of a second in its time stamps."""
    for order in "<>":
        magic = struct.unpack_from(order + "I", data, 0)[0] if len(data) >= 24 else 0
        if magic in (0xA1B2C3D4, 0xA1B23C4D):
            return order, 10**6 if magic == 0xA1B2C3D4 else 10**9
    raise ValueError(f"{path} is no pcap file: it begins with {data[:4].hex() or 'nothing'}")


def _ipv4(time_s: float, frame: bytes) -> Packet | None:
    if len(frame) < 34 or struct.unpack_from("!H", frame, 12)[0] != _IPV4:
        return None
    header_bytes = (frame[14] & 0x0F) * 4
    total_bytes = struct.unpack_from("!H", frame, 16)[0]
    ip = frame[14 : 14 + total_bytes]  # without what Ethernet pads short frames with
    protocol, source, target = ip[9], _dotted(ip[12:16]), _dotted(ip[16:20])
    body = ip[header_bytes:]
    source_port = target_port = 0
    payload, roce = body, None
    if protocol in (UDP, TCP) and len(body) >= 8:
        source_port, target_port = struct.unpack_from("!HH", body)
        payload = body[8:] if protocol == UDP else body[(body[12] >> 4) * 4 :]
        if protocol == UDP and target_port == ROCE_PORT:
            roce = parse_roce(payload)
    return Packet(time_s, source, target, ip[1] >> 2, protocol, source_port, target_port, payload, roce)


def parse_roce(payload: bytes) -> Roce:
    """A UDP payload as a RoCE v2 packet. Raises ValueError if it is too short for the headers that its opcode has."""
    if len(payload) < 12 + _ICRC_BYTES:
        raise ValueError(f"a RoCE packet has {len(payload)} bytes, fewer than its base header and checksum")
    opcode, flags = payload[0], payload[1]
    queue_pair, psn = (int.from_bytes(payload[i : i + 3], "big") for i in (5, 9))
    at = 12
    address = rkey = num_bytes = immediate = None
    extended = 16 * (opcode in _WITH_RETH) + 4 * (opcode in _WITH_IMMEDIATE) + 4 * (opcode in _WITH_AETH)
    padding = flags >> 4 & 3
    if len(payload) < at + extended + padding + _ICRC_BYTES:
        raise ValueError(f"a RoCE packet with opcode {opcode:#x} has {len(payload)} bytes, fewer than its headers")
    if opcode in _WITH_RETH:
        address, rkey, num_bytes = struct.unpack_from("!QII", payload, at)
        at += 16
    if opcode in _WITH_AETH:
        at += 4
    if opcode in _WITH_IMMEDIATE:
        immediate = struct.unpack_from("!I", payload, at)[0]
        at += 4
    data = payload[at : len(payload) - _ICRC_BYTES - padding]
    return Roce(opcode, queue_pair, psn, data, address, rkey, num_bytes, immediate)


def _dotted(address: bytes) -> str:
    return ".".join(map(str, address))
