"""A reliable-connected queue pair over pyverbs: connecting it and posting on it.

A work request of pyverbs (all versions up to 59) and its list of memory are never freed but by close(), and building
one was measured at ten times the cost of filling it in. The device's library copies both when they are posted
(ibv_post_send(3)), so here a chain is built once and filled in again for every post.
"""

from __future__ import annotations

import ctypes
import errno
import secrets
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from distserve.transport.rdma import device
from distserve.transport.rdma.device import PairAddress, PairOptions, Write
from distserve.transport.rdma.ports import MTUS
from distserve.transport.rdma.pyverbs_api import Api, Closed, Codes, os_error, tried
from distserve.transport.rdma.registered import Region, Window

if TYPE_CHECKING:
    from distserve.transport.rdma.verbs import Nic


class Chain:
    """Linked work requests, each with its own memory list of one, that are filled in anew for every post: the last n
    of them make a chain of n. Grows to the longest that was asked for. It lives as long as the process, since its
    memory lists would be freed twice by a pyverbs that frees what it should."""

    def __init__(self, api: Api, opcode: int, num_sge: int) -> None:
        self._api = api
        self._opcode = opcode
        self._num_sge = num_sge
        self.requests: list[Any] = []  # the last of a chain first
        self.lists: list[Any] = []

    def grow(self, length: int) -> None:
        while len(self.requests) < length:
            sge = self._api.SGE(0, 0, 0)
            request = self._api.SendWR(
                opcode=self._opcode,
                num_sge=self._num_sge,
                sg=[sge] if self._num_sge else None,
                send_flags=0,
                next_wr=self.requests[-1] if self.requests else None,
            )
            if self._num_sge:
                request.sg_list = sge  # its own was a copy that can't be written to
            for kept in (sge, request):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))
            self.requests.append(request)
            self.lists.append(sge)


# Chains of devices that were closed, for the next one: they are never freed.
_unused_chains: list[tuple[Chain, Chain]] = []


def keep_chains(writes: Chain, bare: Chain) -> None:
    """Of a device that is closed."""
    _unused_chains.append((writes, bare))


def chains(api: Api, codes: Codes) -> tuple[Chain, Chain]:
    """For what has memory (writes, sends) and for what has none (binds, invalidations)."""
    try:
        return _unused_chains.pop()
    except IndexError:
        return Chain(api, codes.write, 1), Chain(api, codes.bind, 0)


class Pair:
    """device.Pair."""

    def __init__(self, nic: Nic, options: PairOptions) -> None:
        self._nic, self._options = nic, options
        self.windows: set[Window] = set()  # bound on it and not closed
        api, codes = nic.api, nic.codes
        if not 1 <= options.depth <= nic.max_depth:
            raise OSError(errno.EINVAL, f"depth is {options.depth}, {nic.name} has queues of 1 to {nic.max_depth}")
        nic.reserve(2 * options.depth)
        cap = api.QPCap(max_send_wr=options.depth, max_recv_wr=options.depth, max_send_sge=1, max_recv_sge=1)
        with tried(f"make a queue pair of depth {options.depth} on {nic.name}"), ExitStack() as undo:
            init = api.QPInitAttr(qp_type=codes.reliable, scq=nic.cq, rcq=nic.cq, cap=cap, sq_sig_all=0)
            self.qp: Any = api.QP(nic.pd, init)
            undo.callback(self.qp.close)
            caps = self.qp.query(codes.qp_caps)[1].cap
            # Devices round up, and every request may come back flushed.
            self.capacity: int = max(caps.max_send_wr, options.depth) + max(caps.max_recv_wr, options.depth)
            nic.reserve(self.capacity)
            attributes = api.QPAttr(port_num=nic.port.port)
            attributes.qp_access_flags = codes.remote_write
            attributes.pkey_index = 0
            self.qp.to_init(attributes)  # from here on receives can be posted
            undo.pop_all()
        self.qp_num: int = self.qp.qp_num
        self.psn = secrets.randbits(24)

    def connect(self, gid_index: int, peer: PairAddress, *, mtu: int) -> None:
        if mtu not in MTUS:
            raise OSError(errno.EINVAL, f"mtu is {mtu}, must be one of {', '.join(map(str, sorted(MTUS)))}")
        api, options, number = self._nic.api, self._options, self._nic.port.port
        with tried(f"connect queue pair {self.qp_num} of {self._nic.name} to {peer.qp_num} at {peer.gid}"):
            route = api.GlobalRoute(
                dgid=api.GID(peer.gid),
                sgid_index=gid_index,
                hop_limit=options.hop_limit,
                traffic_class=options.traffic_class,
            )
            to = api.QPAttr(port_num=number)
            to.qp_access_flags = self._nic.codes.remote_write
            to.path_mtu = mtu.bit_length() - 8  # ibv_mtu: 1 is 256, 5 is 4096
            to.dest_qp_num, to.rq_psn, to.sq_psn = peer.qp_num, peer.psn, self.psn
            to.max_rd_atomic = to.max_dest_rd_atomic = 1  # no reads here; some devices refuse 0
            to.min_rnr_timer, to.rnr_retry = options.rnr_timer, options.rnr_retry
            to.timeout, to.retry_cnt = options.ack_timeout, options.retry
            to.ah_attr = api.AHAttr(gr=route, is_global=1, port_num=number, sl=options.service_level)
            self.qp.to_rtr(to)
            self.qp.to_rts(to)

    def traffic_class(self) -> int:
        """What the device says it marks this connected pair's packets with (the octet). Raises OSError."""
        with tried(f"query queue pair {self.qp_num} of {self._nic.name}"):
            return int(self.qp.query(self._nic.codes.path)[0].ah_attr.traffic_class)

    def post_receive(self, wr_id: int, address: int, length: int, lkey: int) -> None:
        sge = self._nic.api.SGE(address, length, lkey)
        request = self._nic.api.RecvWR(wr_id=wr_id, num_sge=1, sg=[sge])
        try:
            self.qp.post_recv(request)
        except Exception as error:
            raise os_error(f"post a receive on queue pair {self.qp_num} of {self._nic.name}", error) from None
        finally:
            request.close()
            sge.close()

    def post_writes(self, writes: Sequence[Write], lkey: int) -> None:
        nic, codes, num = self._nic, self._nic.codes, len(writes)
        if not num:
            return
        plain, with_immediate, signaled = codes.write, codes.write_immediate, codes.signaled
        chain = nic.writes
        chain.grow(num)
        for write, request, sge in zip(reversed(writes), chain.requests, chain.lists, strict=False):
            sge.addr = write.address
            sge.length = write.length
            sge.lkey = lkey
            request.wr_id = write.wr_id
            request.set_wr_rdma(write.rkey, write.remote_address)
            request.send_flags = signaled if write.signaled else 0
            if write.immediate is None:
                request.opcode = plain
            else:
                request.opcode = with_immediate
                request.imm_data = socket.htonl(write.immediate)
        self._post(chain.requests[num - 1], num, "write")

    def post_send(self, wr_id: int, address: int, length: int, lkey: int, *, signaled: bool = True) -> None:
        chain = self._nic.writes
        chain.grow(1)
        request, sge = chain.requests[0], chain.lists[0]
        sge.addr, sge.length, sge.lkey = address, length, lkey
        request.wr_id = wr_id
        request.opcode = self._nic.codes.send
        request.send_flags = self._nic.codes.signaled if signaled else 0
        self._post(request, 1, "send")

    def post_binds(self, binds: Sequence[tuple[int, device.Window, int, int]], region: device.Region) -> None:
        if not isinstance(region, Region):
            raise TypeError(f"a region of {type(region).__name__} is not this device's")
        chain, codes = self._nic.bare, self._nic.codes
        chain.grow(len(binds))
        for request, (wr_id, window, address, length) in zip(chain.requests, reversed(binds), strict=False):
            if not isinstance(window, Window):
                raise TypeError(f"a window of {type(window).__name__} is not this device's")
            request.wr_id = wr_id
            request.opcode = codes.bind
            request.send_flags = 0
            request.imm_data = 0  # of an invalidation before; Soft-RoCE refuses to bind with one
            # The key that the window will have is made here.
            request.set_bind_wr(window.mw, self._nic.api.MWBindInfo(region.mr, address, length, codes.remote_write))
            window.rkey = request.rkey
            window.pair = self
            self.windows.add(window)
        self._post_bare(len(binds), "bind")

    def post_invalidates(self, windows: Sequence[tuple[int, device.Window]]) -> None:
        chain = self._nic.bare
        chain.grow(len(windows))
        for request, (wr_id, window) in zip(chain.requests, reversed(windows), strict=False):
            request.wr_id = wr_id
            request.opcode = self._nic.codes.invalidate
            request.send_flags = 0
            request.imm_data = window.rkey  # one union with invalidate_rkey, for which pyverbs has no name
        self._post_bare(len(windows), "invalidate")

    def _post_bare(self, num: int, what: str) -> None:
        if num:
            self._nic.bare.requests[0].send_flags = self._nic.codes.signaled
            self._post(self._nic.bare.requests[num - 1], num, what)

    def _post(self, first: Any, num: int, what: str) -> None:
        try:
            self.qp.post_send(first)
        except Exception as error:
            where = f"queue pair {self.qp_num} of {self._nic.name}, of depth {self._options.depth}"
            raise os_error(f"post {num} requests ({what}) on {where}", error) from None

    def fail(self) -> None:
        try:
            self.qp.modify(self._nic.api.QPAttr(qp_state=self._nic.codes.error_state), self._nic.codes.qp_state)
        except Exception:
            pass  # closed, or the device is gone: it says no more than that it has failed

    def close(self) -> None:
        """Idempotent. What of it has completed and was not polled is dropped: its number may soon be another's. Its
        windows go first: Soft-RoCE waits 50 s for one that is bound on a pair that it destroys. Raises OSError."""
        if self._nic.pairs.get(self.qp_num) is self:
            for window in list(self.windows):
                window.close()
            with tried(f"destroy queue pair {self.qp_num} of {self._nic.name}"):
                self.qp.close()
            self.qp = Closed(f"queue pair {self.qp_num} of {self._nic.name}")
            self._nic.forget(self)
