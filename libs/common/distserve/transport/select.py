"""Which transport carries a lease: a pure choice from what the receiver offers and what the sender can."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from distserve.errors import TransportUnavailable
from distserve.messages import Endpoint

NEED_ONE_HOST = ("cuda_ipc", "shm")  # kinds that work only under one host key
BY_HOST_KEY = (*NEED_ONE_HOST, "rdma")  # kinds whose endpoints name the receiver's host by its key
ON_ONE_HOST = ("cuda_ipc", "shm", "rdma", "tcp")
LARGE_ON_ONE_HOST = ("cuda_ipc", "rdma", "shm", "tcp")
ACROSS_HOSTS = ("rdma", "tcp")


@lru_cache(maxsize=1)
def host_key() -> str:
    """Equal on two processes if and only if they run under one kernel and in one network namespace, so that one can
    reach the other's abstract Unix sockets."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}-{os.stat('/proc/self/ns/net').st_ino}"


@dataclass(frozen=True, slots=True)
class Choice:
    """The endpoint to write to, and why this one: the same words for every lease that goes so."""

    endpoint: Endpoint
    reason: str


def choose(
    offered: Sequence[Endpoint],
    kinds: Sequence[str],
    sender_host_key: str,
    forced: str = "auto",
    *,
    num_bytes: int = 0,
    zero_copy_threshold_bytes: int = 0,
    may_fall_back: bool = False,
) -> Choice:
    """What carries a lease of num_bytes.

    offered: the receiver's endpoints; kinds: what the sender can write by. On one host (equal host keys): cuda_ipc,
    then shm, but rdma before shm for a lease above zero_copy_threshold_bytes (0: never). Across hosts: rdma, then tcp.
    `forced` names the only kind allowed; with may_fall_back the others come after it.
    Raises TransportUnavailable naming both lists: a kind that is not allowed is never taken silently.
    """
    same_host = any(e.kind in BY_HOST_KEY and e.host == sender_host_key for e in offered)
    large = same_host and 0 < zero_copy_threshold_bytes < num_bytes
    order = ACROSS_HOSTS if not same_host else LARGE_ON_ONE_HOST if large else ON_ONE_HOST
    common = [
        endpoint
        for kind in order
        for endpoint in offered
        if endpoint.kind == kind and kind in kinds and (kind not in NEED_ONE_HOST or endpoint.host == sender_host_key)
    ]
    allowed = [e for e in common if forced in ("auto", e.kind)]
    if allowed or (common and may_fall_back):
        endpoint = (allowed or common)[0]
        return Choice(endpoint, _reason(endpoint, common, forced, same_host, large))
    offers = ", ".join(f"{e.kind} at {e.address}" for e in offered) or "nothing"
    can = ", ".join(kinds) or "nothing"
    raise TransportUnavailable(
        f"no common transport: the receiver offers {offers}; the sender can {can}; "
        f"{'same host' if same_host else 'not known to be on one host'}"
        + ("" if forced == "auto" else f"; transport.kind allows only {forced}"),
        offered=offers,
        kinds=can,
        forced=forced,
    )


def _reason(endpoint: Endpoint, common: Sequence[Endpoint], forced: str, same_host: bool, large: bool) -> str:
    if endpoint.kind == forced:
        return f"transport.kind is {forced}"
    where = "same host" if same_host else "not known to be on one host"
    if forced != "auto":
        return f"{where}; transport.kind is {forced}, which the two do not share"
    if {e.kind for e in common} == {endpoint.kind}:
        return f"{where}; the only kind that both can use"
    if large and endpoint.kind == "rdma":
        return f"{where}; leases above transport.zero_copy_threshold_bytes"
    return f"{where}; preferred to {', '.join(dict.fromkeys(e.kind for e in common if e.kind != endpoint.kind))}"
