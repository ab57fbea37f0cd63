"""The reader of captures, on packets written here byte by byte from the headers' definitions."""

import struct
from pathlib import Path

import pytest

from tests.roce.capture import Opcode, Packet, parse_roce, read


def ipv4(payload: bytes, *, protocol: int, dscp: int = 0, options: bytes = b"") -> bytes:
    length = 20 + len(options) + len(payload)
    first = 0x40 | (5 + len(options) // 4)
    addresses = bytes([10, 77, 0, 1, 10, 77, 0, 2])
    return struct.pack("!BBHHHBBH", first, dscp << 2 | 2, length, 7, 0, 64, protocol, 0) + addresses + options + payload


def udp(payload: bytes, port: int = 4791) -> bytes:
    return struct.pack("!HHHH", 50000, port, 8 + len(payload), 0) + payload


def ethernet(payload: bytes, kind: int = 0x0800) -> bytes:
    frame = bytes(12) + struct.pack("!H", kind) + payload
    return frame + bytes(max(0, 60 - len(frame)))  # short frames are padded


def bth(opcode: int, queue_pair: int = 0x11, psn: int = 5, padding: int = 0) -> bytes:
    return (
        bytes([opcode, padding << 4, 0xFF, 0xFF, 0]) + queue_pair.to_bytes(3, "big") + b"\x80" + psn.to_bytes(3, "big")
    )


def pcap(path: Path, *frames: bytes, order: str = "<", magic: int = 0xA1B2C3D4, link: int = 1) -> Path:
    data = struct.pack(order + "IHHiIII", magic, 2, 4, 0, 0, 262144, link)
    for i, frame in enumerate(frames):
        data += struct.pack(order + "IIII", 100 + i, 500, len(frame), len(frame)) + frame
    path.write_bytes(data)
    return path


def only(path: Path) -> Packet:
    (packet,) = read(path)
    return packet


@pytest.mark.parametrize(("order", "magic", "seconds"), [("<", 0xA1B2C3D4, 100.0005), (">", 0xA1B23C4D, 100.0000005)])
def test_a_packet_has_its_addresses_ports_dscp_and_time(tmp_path: Path, order: str, magic: int, seconds: float) -> None:
    frame = ethernet(ipv4(udp(b"hello", port=9), protocol=17, dscp=34))
    packet = only(pcap(tmp_path / "x.pcap", frame, order=order, magic=magic))
    assert packet.time_s == pytest.approx(seconds, abs=1e-8)
    assert (packet.source, packet.target) == ("10.77.0.1", "10.77.0.2")
    assert (packet.source_port, packet.target_port, packet.dscp) == (50000, 9, 34), "the two ECN bits are no DSCP"
    assert packet.payload == b"hello", "without the padding of a short frame"
    assert packet.roce is None


def test_ip_options_are_passed_over(tmp_path: Path) -> None:
    frame = ethernet(ipv4(udp(b"x", port=9), protocol=17, options=bytes(8)))
    assert only(pcap(tmp_path / "x.pcap", frame)).payload == b"x"


def test_tcp_payload_comes_after_its_options(tmp_path: Path) -> None:
    header = struct.pack("!HHIIBBHHH", 40000, 4222, 1, 1, 8 << 4, 0x18, 100, 0, 0) + bytes(12)
    packet = only(pcap(tmp_path / "x.pcap", ethernet(ipv4(header + b"PING\r\n", protocol=6))))
    assert (packet.protocol, packet.target_port, packet.payload) == (6, 4222, b"PING\r\n")


def test_other_than_ipv4_is_left_out(tmp_path: Path) -> None:
    arp, ip = ethernet(bytes(28), kind=0x0806), ethernet(ipv4(udp(b"x", 9), protocol=17))
    assert len(list(read(pcap(tmp_path / "x.pcap", arp, ip, arp)))) == 1


def test_a_write_with_immediate_has_all_its_headers() -> None:
    reth = struct.pack("!QII", 0x7F00_0000_1000, 0xABCD, 6)
    packet = bth(Opcode.WRITE_ONLY_IMMEDIATE, 0x123456, 0xFFFFFE, padding=2) + reth + struct.pack("!I", 77)
    roce = parse_roce(packet + b"abcdef" + bytes(2) + b"crc!")
    assert (roce.queue_pair, roce.psn, roce.immediate) == (0x123456, 0xFFFFFE, 77)
    assert (roce.remote_address, roce.rkey, roce.num_bytes) == (0x7F00_0000_1000, 0xABCD, 6)
    assert roce.data == b"abcdef", "padding and checksum are no data"
    assert roce.is_write


@pytest.mark.parametrize(
    ("opcode", "header_bytes"),
    [
        (Opcode.SEND_ONLY, 0),
        (Opcode.WRITE_FIRST, 16),
        (Opcode.WRITE_MIDDLE, 0),
        (Opcode.WRITE_LAST, 0),
        (Opcode.WRITE_LAST_IMMEDIATE, 4),
        (Opcode.READ_REQUEST, 16),
        (Opcode.READ_RESPONSE_MIDDLE, 0),
        (Opcode.READ_RESPONSE_LAST, 4),
        (Opcode.ACKNOWLEDGE, 4),
    ],
)
def test_data_begins_after_the_headers_of_the_opcode(opcode: Opcode, header_bytes: int) -> None:
    roce = parse_roce(bth(opcode) + bytes(header_bytes) + b"data" + b"crc!")
    assert roce.data == b"data"
    assert roce.is_write == opcode.name.startswith("WRITE")
    with pytest.raises(ValueError, match="fewer than"):
        parse_roce(bth(opcode) + bytes(header_bytes) + b"crc")


def test_what_is_no_whole_capture_is_refused(tmp_path: Path) -> None:
    frame = ethernet(ipv4(udp(b"x", 9), protocol=17))
    whole = pcap(tmp_path / "x.pcap", frame, frame).read_bytes()
    for data, why in ((b"", "no pcap"), (whole[:-1], "within a packet"), (whole[: 24 + 16 + len(frame) + 3], "header")):
        (tmp_path / "bad.pcap").write_bytes(data)
        with pytest.raises(ValueError, match=why):
            list(read(tmp_path / "bad.pcap"))
    with pytest.raises(ValueError, match="link type 113"):
        list(read(pcap(tmp_path / "cooked.pcap", frame, link=113)))
    cut = bytearray(whole)
    cut[24 + 12] += 1  # the length on the wire
    (tmp_path / "cut.pcap").write_bytes(cut)
    with pytest.raises(ValueError, match="whole packets"):
        list(read(tmp_path / "cut.pcap"))
