"""What this transport needs of an RDMA device: three small protocols. verbs.py has them over pyverbs; nothing else
here imports it, so that the protocol above is tested on a machine without RDMA.

One thread owns an opened Nic, its pairs and its windows, and makes every call. Nothing blocks: completions are polled,
and `Nic.fd` becomes readable when, after arm(), one has come.

Order on a reliable connection (InfiniBand specification, volume 1, 9.5 and 10.8.3): work requests of one send queue
start and complete in order; the peer's receive that a send or a write with immediate consumes completes after
everything before it on that pair has been placed. Nothing is ordered between pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol


class Verb(IntEnum):
    """What has completed."""

    WRITE = 1  # also one with immediate
    SEND = 2
    BIND = 3
    INVALIDATE = 4
    RECEIVE = 5  # a message came into the posted buffer
    RECEIVE_IMMEDIATE = 6  # a write with immediate came; its number is in `immediate`


@dataclass(frozen=True, slots=True)
class Completion:
    """status: the ibv_wc_status, 0 is success; its name in `reason` ("remote access error"). After the first one that
    is not 0 the pair is in error and everything else posted on it completes flushed (status 5). `verb` is only to be
    trusted if status is 0; wr_id always."""

    qp_num: int
    wr_id: int
    status: int
    verb: Verb
    num_bytes: int = 0
    immediate: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Write:
    """One RDMA write of `length` (1 .. 2**31) bytes. immediate: 32 bits that the peer gets with the completion."""

    wr_id: int
    address: int
    length: int  # 0 allowed only with immediate
    remote_address: int
    rkey: int
    signaled: bool = False
    immediate: int | None = None


@dataclass(frozen=True, slots=True)
class PairAddress:
    """What the other end needs to connect a pair to this one."""

    gid: str  # of the form 0000:0000:0000:0000:0000:ffff:0a4d:0001
    qp_num: int
    psn: int  # of this side's first packet
    mtu: int  # bytes: 256, 512, 1024, 2048 or 4096


@dataclass(frozen=True, slots=True)
class PairOptions:
    """depth: work requests each queue holds. ack_timeout: 4.096 us * 2**it until a packet is sent again (C9-139);
    retry: so many times (Soft-RoCE takes 7 as for ever). rnr_retry: while the peer has no receive posted; 7 is for
    ever."""

    depth: int = 256
    traffic_class: int = 0  # the octet: DSCP << 2
    service_level: int = 0
    ack_timeout: int = 14
    retry: int = 6
    rnr_retry: int = 7
    rnr_timer: int = 12  # 0.64 ms
    hop_limit: int = 64


class Region(Protocol):
    """Registered memory."""

    lkey: int
    rkey: int  # lets a peer write anywhere in it, if it was registered so

    def close(self) -> None: ...


class Window(Protocol):
    """A memory window of type 2B: after bind, its rkey lets the peer of one pair write one range of a region. Soft-RoCE
    checks the pair and that it is bound, but of ranges only the region's (check_rkey in its rxe_resp.c)."""

    rkey: int  # what the peer writes with, once the bind has completed

    def close(self) -> None:
        """Unbinds and deallocates it (ibv_dealloc_mw(3)): from then on no write with its key is placed. Idempotent.
        Raises OSError. Before its pair: a device may wait long for a window on a pair that it destroys."""


class Pair(Protocol):
    """A reliable-connected queue pair. close() closes the windows bound on it and destroys it: from then on no byte is
    read or placed for it, and nothing of it is polled."""

    qp_num: int
    psn: int

    def connect(self, gid_index: int, peer: PairAddress, *, mtu: int) -> None:
        """To ready-to-send. Receives must have been posted before. mtu: the smaller of both ends, bytes. Raises
        OSError."""

    def post_receive(self, wr_id: int, address: int, length: int, lkey: int) -> None: ...

    def post_writes(self, writes: Sequence[Write], lkey: int) -> None:
        """One chain, one doorbell. The caller keeps to the depth. Raises OSError if the queue is full."""

    def post_send(self, wr_id: int, address: int, length: int, lkey: int, *, signaled: bool = True) -> None: ...

    def post_binds(self, binds: Sequence[tuple[int, Window, int, int]], region: Region) -> None:
        """(wr_id, window, address, length) each, in one chain; only the last is signaled. The window's rkey is final
        when this returns, and usable by the peer when the last has completed. Remote write only."""

    def post_invalidates(self, windows: Sequence[tuple[int, Window]]) -> None:
        """(wr_id, window) each, in one chain; only the last is signaled. When it has completed, no write with their
        rkeys is placed any more."""

    def fail(self) -> None:
        """To the error state: whatever is posted flushes, whatever comes is refused. Idempotent, never raises."""

    def close(self) -> None: ...


class Nic(Protocol):
    """One opened port of a device."""

    name: str  # "mlx5_0:1"
    fd: int  # readable when, since arm(), a completion has come
    has_windows: bool
    max_depth: int  # work requests that a queue can hold

    def register(self, address: int, length: int, *, remote_write: bool) -> Region:
        """Pins and registers memory; windows can be bound on it if has_windows. remote_write: the region's own rkey
        lets peers write. Raises OSError (ENOMEM: RLIMIT_MEMLOCK)."""

    def register_dmabuf(self, fd: int, offset: int, length: int, *, remote_write: bool) -> Region:
        """Bytes offset .. offset + length of a dma-buf. Its addresses, in work requests and for peers, start at
        `offset` too. No windows can be bound on it. The region keeps the dma-buf: fd may be closed then. Raises
        OSError (EOPNOTSUPP: the device's driver can't)."""

    def window(self) -> Window:
        """A fresh, unbound one. Raises OSError."""

    def pair(self, options: PairOptions) -> Pair:
        """Raises OSError."""

    def poll(self, most: int = 64) -> list[Completion]:
        """What has completed on any of this Nic's pairs. Empties the event descriptor's backlog on the way."""

    def arm(self) -> None:
        """Ask for one event. Poll once more after it: what came before is not told."""

    def counts(self) -> dict[str, int]:
        """Open objects by kind ("pairs", "regions", "windows"): what a test of leaks compares."""

    def close(self) -> None: ...
