"""What the kernel and devices say of packets, read and added up."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.metrics_core import Metric

from distserve.transport import packets as module
from distserve.transport.packets import PacketCounts, Packets, of_port, of_tcp_info
from distserve.worker.packet_metrics import families

Folders = Mapping[str, Mapping[str, object]]

RXE = {"sent_pkts": 900, "rcvd_pkts": 850, "completer_retry_err": 3, "rcvd_seq_err": 2, "retry_exceeded_err": 1}
MLX5 = {"packet_seq_err": 5, "implied_nak_seq_err": 1, "local_ack_timeout_err": 2, "out_of_sequence": 70}


def port(root: Path, device: str, folders: Folders, number: int = 1) -> Path:
    made = root / device / "ports" / str(number)
    for folder, counters in folders.items():
        (made / folder).mkdir(parents=True, exist_ok=True)
        for name, value in counters.items():
            (made / folder / name).write_text(f"{value}\n")
    made.mkdir(parents=True, exist_ok=True)
    return made


@pytest.mark.parametrize(
    ("folders", "packets"),
    [
        ({"hw_counters": RXE}, Packets(900, 3)),  # what follows from a retry is not counted twice
        ({"hw_counters": MLX5, "counters": {"port_xmit_packets": 4000}}, Packets(4000, 8)),
        ({"hw_counters": {"tx_pkts": 60, "retrans_pkts": 4}}, Packets(60, 4)),
        ({"hw_counters": {"tx_pkts": 60, "to_retransmits": 1, "seq_err_naks_rcvd": 2}}, Packets(60, 3)),
        ({"hw_counters": {"sent_pkts": 7, "rcvd_seq_err": 2}}, Packets(7, 2)),
        ({"counters": {"port_xmit_packets": 12}}, Packets(12, None)),
        ({"hw_counters": {"packet_seq_err": 1}, "counters": {"port_xmit_packets": "N/A (no PMA)"}}, Packets(None, 1)),
        ({"hw_counters": {"lifespan": 10}}, Packets()),
        ({}, Packets()),
    ],
    ids=["rxe", "mlx5", "efa", "bnxt_re", "old rxe", "no hw_counters", "no number", "others only", "nothing"],
)
def test_each_drivers_counters_are_found(folders: Folders, packets: Packets, tmp_path: Path) -> None:
    assert of_port(port(tmp_path, "dev0", folders)) == packets


def test_a_device_counts_from_when_it_was_opened_and_once_however_many_use_it(tmp_path: Path) -> None:
    port(tmp_path, "rxe0", {"hw_counters": {"sent_pkts": 1000, "completer_retry_err": 5}})
    port(tmp_path, "mlx5_0", {"hw_counters": {"packet_seq_err": 9}, "counters": {"port_xmit_packets": 50}}, 2)
    counts = PacketCounts(tmp_path)
    counts.use_ports(["rxe0:1"])
    port(tmp_path, "rxe0", {"hw_counters": {"sent_pkts": 1100, "completer_retry_err": 7}})
    counts.use_ports(["rxe0:1", "mlx5_0:2"])  # the receiver, after the sender
    assert counts.snapshot() == {"rdma": Packets(100, 2)}
    port(tmp_path, "mlx5_0", {"hw_counters": {"packet_seq_err": 10}, "counters": {"port_xmit_packets": 75}}, 2)
    assert counts.snapshot() == {"rdma": Packets(125, 3)}
    port(tmp_path, "rxe0", {"hw_counters": {"sent_pkts": 4, "completer_retry_err": 0}})  # its driver was loaded anew
    assert counts.snapshot() == {"rdma": Packets(4 + 25, 0 + 1)}


def test_a_device_that_counts_nothing_has_no_metric(tmp_path: Path) -> None:
    counts = PacketCounts(tmp_path)
    counts.use_ports(["soft0:1", "siw0"])
    assert counts.snapshot() == {}
    assert values(families(counts)) == {}


def values(found: tuple[Metric, ...]) -> dict[tuple[str, str], float]:
    return {(s.name, s.labels["transport"]): s.value for family in found for s in family.samples}


def info(**fields: int) -> bytes:
    """A struct tcp_info of 6.x, by the offsets that pahole tells of it."""
    data = bytearray(248)
    for name, value in fields.items():
        struct.pack_into(
            "=I", data, {"tcpi_total_retrans": 100, "tcpi_segs_out": 136, "tcpi_segs_in": 140}[name], value
        )
    return bytes(data)


def test_a_connections_segments_are_read_as_far_as_the_kernel_tells() -> None:
    rng = random.Random(1)
    for _ in range(200):
        sent, again = rng.randrange(1 << 32), rng.randrange(1 << 32)
        full = info(tcpi_total_retrans=again, tcpi_segs_out=sent, tcpi_segs_in=rng.randrange(1 << 32))
        cut = rng.randrange(len(full) + 1)
        expected = Packets(sent if cut >= 140 else None, again if cut >= 104 else None)
        assert of_tcp_info(full[:cut]) == expected


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname(), timeout=5)
        theirs, _ = listener.accept()
    with ours, theirs:
        yield ours, theirs


def test_a_real_connection_counts_while_it_lives_and_after(connection: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = connection
    counts = PacketCounts()
    assert counts.snapshot() == {}
    counts.opened(ours)
    before = counts.snapshot()["tcp"]
    for _ in range(20):  # an answer to each, so that no two share a segment
        ours.sendall(b"x" * 100)
        theirs.recv(100)
        theirs.sendall(b"y")
        ours.recv(1)
    during = counts.snapshot()["tcp"]
    assert (during.num_sent or 0) - (before.num_sent or 0) >= 20
    assert during.num_sent_again == 0
    counts.closing(ours)
    counts.closing(ours)  # once
    counts.closing(theirs)  # which is not counted
    ours.close()
    assert (counts.snapshot()["tcp"].num_sent or 0) >= (during.num_sent or 0)
    shown = values(families(counts))
    assert shown["distserve_transport_packets_total", "tcp"] >= (during.num_sent or 0)
    assert shown["distserve_transport_retransmitted_packets_total", "tcp"] == 0


def test_a_socket_that_is_closed_under_us_or_is_no_tcp_is_no_error() -> None:
    counts = PacketCounts()
    one, other = socket.socketpair()
    closed = socket.socket()
    closed.close()
    with one, other:
        counts.opened(one)
        counts.opened(closed)
        assert counts.snapshot() == {}


class Kernel:
    """What it tells of each connection, as a test says."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.told: dict[socket.socket, Packets] = {}
        monkeypatch.setattr(module, "_asked", lambda connection: self.told[connection])


def test_a_counter_of_32_bits_that_begins_anew_goes_on(
    connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, counts = Kernel(monkeypatch), PacketCounts()
    for one in connection:
        counts.opened(one)
    rng = random.Random(2)
    real = dict.fromkeys(connection, (0, 0))
    for _ in range(300):
        for one in connection:
            sent, again = real[one]
            real[one] = sent + rng.randrange(1 << 32), again + rng.randrange(1 << 20)
            kernel.told[one] = Packets(*(num & 0xFFFFFFFF for num in real[one]))
        if rng.random() < 0.1:  # it may say nothing for once: what comes next counts from before
            known, kernel.told = kernel.told, dict.fromkeys(connection, Packets())
            counts.snapshot()
            kernel.told = known
        total = Packets(sum(sent for sent, _ in real.values()), sum(again for _, again in real.values()))
        assert counts.snapshot() == {"tcp": total}
    ours, _ = connection
    sent, again = real[ours]
    kernel.told[ours] = Packets((sent + 7) & 0xFFFFFFFF, again & 0xFFFFFFFF)
    counts.closing(ours)
    assert counts.snapshot() == {"tcp": total + Packets(7, 0)}


def test_connections_come_and_go_while_a_device_takes_its_time_to_tell(
    connection: tuple[socket.socket, socket.socket], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = PacketCounts(tmp_path)
    counts.use_ports(["slow0:1"])
    asked, may_tell = threading.Event(), threading.Event()

    def slow(port: Path) -> Packets:
        asked.set()
        assert may_tell.wait(10)
        return Packets(5)

    monkeypatch.setattr(module, "of_port", slow)
    with ThreadPoolExecutor(2) as threads:
        found = threads.submit(counts.snapshot)
        try:
            assert asked.wait(10)
            threads.submit(counts.opened, connection[0]).result(5)
            threads.submit(counts.closing, connection[0]).result(5)
        finally:
            may_tell.set()
        assert found.result(10)["rdma"] == Packets(5)
