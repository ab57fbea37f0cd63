"""RDMA devices through pyverbs: the protocols of device.py over a real port.

pyverbs holds the GIL in every call, so nothing here may block: the event descriptor is only read when it is readable.
"""

from __future__ import annotations

import errno
import os
import resource
import select
import socket
from collections import deque
from contextlib import ExitStack
from typing import Any

from distserve.transport.rdma import pyverbs_api
from distserve.transport.rdma.device import Completion, PairOptions, Verb
from distserve.transport.rdma.ports import Port
from distserve.transport.rdma.pyverbs_api import Api, Closed, Codes, os_error, tried
from distserve.transport.rdma.queue_pair import Pair, chains, keep_chains
from distserve.transport.rdma.registered import Region, Window

# ibv_wc_status (InfiniBand specification, volume 1, 11.6.2), by number.
# fmt: off
STATUS = (
    "success", "local length error", "local queue pair operation error", "local EE context operation error",
    "local protection error", "flushed", "memory window bind error", "bad response", "local access error",
    "remote invalid request", "remote access error", "remote operation error", "transport retries exceeded",
    "receiver-not-ready retries exceeded", "local RDD violation", "remote invalid read request", "remote aborted",
    "invalid EE context number", "invalid EE context state", "fatal error", "response timeout", "general error",
)
# fmt: on

# Completion queue entries at first; doubled whenever the pairs could fill more.
FIRST_CQ_ENTRIES = 4096


def available() -> str:
    """ "" if there is a device that can be opened; else why not, in one line."""
    try:
        api = pyverbs_api.load()
    except ImportError as error:
        return str(error)
    try:
        names = [
            str(found.name, "ascii") if isinstance(found.name, bytes) else found.name for found in api.get_device_list()
        ]
    except api.Error:
        names = []
    if not names:
        return "this host has no RDMA device"
    reasons: list[str] = []
    for name in names:
        try:
            api.context(name).close()
            return ""
        except api.Error as error:
            reasons.append(f"{name} can't be opened: {error}")
    return "; ".join(reasons)


def open_nic(port: Port) -> Nic:
    """Raises OSError, ImportError."""
    return Nic(pyverbs_api.load(), port)


class Nic:
    """device.Nic.

    One completion queue for all pairs. It can't overflow: every pair reserves as many entries as its two queues hold,
    which is all that can ever complete on it at once, and the queue is resized before a pair is made that could fill
    more. A closed pair gives its reservation back when the queue has been emptied of it.
    """

    def __init__(self, api: Api, port: Port) -> None:
        self.api, self.port, self.name = api, port, port.name
        self.codes = Codes(api)
        self.pairs: dict[int, Pair] = {}
        self.regions: set[Region] = set()
        self.windows: set[Window] = set()
        self._backlog: deque[Completion] = deque()
        self._armed = False
        with tried(f"open {self.name}"), ExitStack() as undo:
            self._context = api.context(port.device)
            undo.callback(self._context.close)
            limits = self._context.query_device()
            self.has_windows = bool(limits.device_cap_flags & self.codes.cap_windows_2b)
            self.max_depth: int = limits.max_qp_wr
            self.mtu: int = 128 << int(self._context.query_port(port.port).active_mtu)
            self.pd = api.PD(self._context)
            self._channel, self.fd = api.channel(self._context)
            os.set_blocking(self.fd, False)
            self._max_entries: int = limits.max_cqe
            self._entries = min(FIRST_CQ_ENTRIES, self._max_entries)
            self.cq: Any = api.CQ(self._context, self._entries, None, self._channel, 0)
            self._close = undo.pop_all()
        self._readable = select.poll()
        self._readable.register(self.fd, select.POLLIN)
        self.writes, self.bare = chains(api, self.codes)

    def register(self, address: int, length: int, *, remote_write: bool) -> Region:
        self._check_open()
        access = self.codes.local_write
        access |= self.codes.remote_write if remote_write else 0
        access |= self.codes.mw_bind if self.has_windows else 0
        if address <= 0 or length <= 0:
            raise OSError(errno.EINVAL, f"address {address:#x} and length {length} are no memory to register")
        try:
            region = Region(self, self.api.MR(self.pd, length, access, address=address))
        except Exception as error:
            what = f"register {length} bytes at {address:#x} with {self.name}"
            if getattr(error, "error_code", 0) == errno.ENOMEM:
                what += _memlock()
            raise os_error(what, error) from None
        self.regions.add(region)
        return region

    def register_dmabuf(self, fd: int, offset: int, length: int, *, remote_write: bool) -> Region:
        """The region's addresses start at offset: pyverbs 44 registers with iova = offset (its binary was run, with a
        stand-in for ibv_reg_dmabuf_mr that showed the arguments). 59 is expected to do the same; its source was read
        in part, and it was not run. The kernel wants both at the same place in a page, and takes neither
        IBV_ACCESS_MW_BIND nor others with it (ibv_reg_dmabuf_mr(3))."""
        self._check_open()
        if self.api.DmaBufMR is None:
            raise OSError(errno.EOPNOTSUPP, "this pyverbs registers no dma-buf")
        if fd < 0 or offset < 0 or length <= 0:  # without a descriptor pyverbs would allocate a dma-buf of its own
            raise OSError(errno.EINVAL, f"descriptor {fd}, offset {offset} and length {length} are no dma-buf")
        access = self.codes.local_write | (self.codes.remote_write if remote_write else 0)
        with tried(f"register {length} bytes of a dma-buf with {self.name}"):
            region = Region(self, self.api.DmaBufMR(self.pd, length, access, dmabuf=fd, offset=offset))
        self.regions.add(region)
        return region

    def window(self) -> Window:
        self._check_open()
        with tried(f"make a memory window on {self.name}"):
            window = Window(self, self.api.MW(self.pd, self.codes.type_2))
        self.windows.add(window)
        return window

    def pair(self, options: PairOptions) -> Pair:
        self._check_open()
        pair = Pair(self, options)
        self.pairs[pair.qp_num] = pair
        return pair

    def reserve(self, entries: int) -> None:
        """Makes room for so many completions more than the open pairs can have. Raises OSError."""
        wanted = sum(pair.capacity for pair in self.pairs.values()) + entries
        if wanted <= self._entries:
            return
        if wanted > self._max_entries:
            what = f"{len(self.pairs)} pairs are open and {self.name} has completion queues of {self._max_entries}"
            raise OSError(errno.ENOSPC, f"{what}: no room for {entries} more; use a smaller depth")
        size = min(max(wanted, 2 * self._entries), self._max_entries)
        with tried(f"resize the completion queue of {self.name} to {size}"):
            self.cq.resize(size)
        self._entries = size

    def poll(self, most: int = 64) -> list[Completion]:
        if self._armed:
            self._take_events()
        if self._backlog:
            return [self._backlog.popleft() for _ in range(min(most, len(self._backlog)))]
        return self._take_completions(most)

    def _take_events(self) -> None:
        while self._readable.poll(0):
            try:
                self._channel.get_cq_event(self.cq)
            except Exception as error:
                raise os_error(f"read a completion event of {self.name}", error) from None
            self.cq.ack_events(1)  # at once: closing waits for the last acknowledgement
            self._armed = False

    def _take_completions(self, most: int) -> list[Completion]:
        try:
            _, completions = self.cq.poll(most)
        except Exception as error:
            raise os_error(f"poll the completion queue of {self.name}", error) from None
        return [self._completion(wc) for wc in completions]

    def _completion(self, wc: Any) -> Completion:
        """What only some verbs have, and devices leave as it was for others, is 0 for the others."""
        verb = self.codes.verbs.get(wc.opcode, Verb.WRITE)
        return Completion(
            qp_num=wc.qp_num,
            wr_id=wc.wr_id,
            status=wc.status,
            verb=verb,
            num_bytes=wc.byte_len if verb >= Verb.RECEIVE else 0,
            immediate=socket.ntohl(wc.imm_data) if verb is Verb.RECEIVE_IMMEDIATE else 0,
            reason=STATUS[wc.status] if wc.status < len(STATUS) else f"status {wc.status}",
        )

    def arm(self) -> None:
        with tried(f"arm the completion queue of {self.name}"):
            self.cq.req_notify()
        self._armed = True

    def forget(self, pair: Pair) -> None:
        """A pair that is destroyed: nothing more of it comes, and what has come is dropped. Called by Pair.close."""
        while completions := self._take_completions(256):
            self._backlog.extend(completions)
        for _ in range(len(self._backlog)):
            completion = self._backlog.popleft()
            if completion.qp_num != pair.qp_num:
                self._backlog.append(completion)
        del self.pairs[pair.qp_num]

    def _check_open(self) -> None:
        if self.fd < 0:
            raise OSError(errno.EBADF, f"{self.name} is closed")

    def counts(self) -> dict[str, int]:
        return {"pairs": len(self.pairs), "regions": len(self.regions), "windows": len(self.windows)}

    def close(self) -> None:
        """Everything of it, in the order in which one needs another. Idempotent. Raises OSError."""
        if self.fd < 0:
            return
        opened: list[Pair | Window | Region] = [*self.windows, *self.pairs.values(), *self.regions]
        for one in opened:
            one.close()
        with tried(f"close {self.name}"):
            self._take_events()
            self.cq.close()
            self._channel.close()
            self.pd.close()
            self._close.close()
        self.fd = -1
        self.cq = self._channel = self.pd = self._context = Closed(self.name)
        self._armed = False
        keep_chains(self.writes, self.bare)


def _memlock() -> str:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return "" if soft == resource.RLIM_INFINITY else f" (RLIMIT_MEMLOCK, `ulimit -l`: {soft} bytes may be locked)"
