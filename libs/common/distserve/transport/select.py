"""Which transport carries a lease: a pure choice from what the receiver offers and what the sender can."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

from distserve.errors import TransportUnavailable
from distserve.messages import Endpoint

SAME_HOST = ("cuda_ipc", "shm")  # kinds that work only under one host key


@lru_cache(maxsize=1)
def host_key() -> str:
    """Equal on two processes if and only if they run under one kernel and in one network namespace, so that one can
    reach the other's abstract Unix sockets."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot_id}-{os.stat('/proc/self/ns/net').st_ino}"


def choose(offered: Sequence[Endpoint], kinds: Sequence[str], sender_host_key: str, forced: str = "auto") -> Endpoint:
    """The endpoint to write to.

    offered: the receiver's endpoints; kinds: what the sender can write by, preferred first. Kinds that need one host
    are taken only when the host keys are equal, and then before the others. `forced` names the only kind allowed.
    Raises TransportUnavailable naming both lists: another transport is never taken silently.
    """
    usable = [
        endpoint
        for kind in sorted(kinds, key=lambda kind: kind not in SAME_HOST)
        for endpoint in offered
        if endpoint.kind == kind
        and forced in ("auto", kind)
        and (kind not in SAME_HOST or endpoint.host == sender_host_key)
    ]
    if usable:
        return usable[0]
    offers = ", ".join(f"{e.kind} at {e.address}" for e in offered) or "nothing"
    can = ", ".join(kinds) or "nothing"
    same_host = any(e.kind in SAME_HOST and e.host == sender_host_key for e in offered)
    raise TransportUnavailable(
        f"no common transport: the receiver offers {offers}; the sender can {can}; "
        f"{'same host' if same_host else 'not known to be on one host'}"
        + ("" if forced == "auto" else f"; transport.kind allows only {forced}"),
        offered=offers,
        kinds=can,
        forced=forced,
    )
