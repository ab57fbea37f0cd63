"""The addresses of this host's network interfaces with their prefix lengths, from the kernel by rtnetlink
(RFC 3549; rtnetlink(7)): RTM_GETADDR needs no privilege and sees secondary addresses, which the SIOCGIFNETMASK of
netdevice(7) does not."""

from __future__ import annotations

import ipaddress
import socket
import struct
from collections.abc import Iterator

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

_NLMSG_ERROR, _NLMSG_DONE, _RTM_NEWADDR, _RTM_GETADDR = 2, 3, 20, 22
_NLM_F_REQUEST_DUMP = 0x1 | 0x300
_HEADER = struct.Struct("=IHHII")  # nlmsghdr: length, type, flags, sequence, port
_IFADDRMSG = struct.Struct("=BBBBI")  # family, prefix length, flags, scope, interface index
_IFA_ADDRESS, _IFA_LOCAL = 1, 2
_TIMEOUT_S = 5.0


def prefix_lengths() -> dict[tuple[str, Address], int]:
    """{(interface, address): prefix length}, empty if the kernel can't be asked (a sandbox without netlink): whoever
    wants them can do without. Raises nothing."""
    names = dict(socket.if_nameindex())
    found: dict[tuple[str, Address], int] = {}
    try:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
            netlink.settimeout(_TIMEOUT_S)
            request = _IFADDRMSG.pack(socket.AF_UNSPEC, 0, 0, 0, 0)
            netlink.send(_HEADER.pack(_HEADER.size + len(request), _RTM_GETADDR, _NLM_F_REQUEST_DUMP, 1, 0) + request)
            while True:
                for kind, body in _messages(netlink.recv(1 << 17)):
                    if kind in (_NLMSG_DONE, _NLMSG_ERROR):
                        return found
                    if kind == _RTM_NEWADDR:
                        index, address, length = _address(body)
                        if address is not None and index in names:
                            found[names[index], address] = length
    except OSError:
        return found


def _messages(data: bytes) -> Iterator[tuple[int, bytes]]:
    at = 0
    while at + _HEADER.size <= len(data):
        length, kind, *_ = _HEADER.unpack_from(data, at)
        if length < _HEADER.size:
            return
        yield kind, data[at + _HEADER.size : at + length]
        at += (length + 3) & ~3


def _address(body: bytes) -> tuple[int, Address | None, int]:
    """(interface index, address, prefix length) of an RTM_NEWADDR. IFA_LOCAL is the interface's own address where
    IFA_ADDRESS is the other end of a point-to-point link; IPv6 often has IFA_ADDRESS only."""
    _family, prefix_length, _flags, _scope, index = _IFADDRMSG.unpack_from(body)
    values: dict[int, bytes] = {}
    at = _IFADDRMSG.size
    while at + 4 <= len(body):
        length, kind = struct.unpack_from("=HH", body, at)
        if length < 4:
            break
        values[kind] = body[at + 4 : at + length]
        at += (length + 3) & ~3
    packed = values.get(_IFA_LOCAL, values.get(_IFA_ADDRESS))
    return index, ipaddress.ip_address(packed) if packed else None, prefix_length
