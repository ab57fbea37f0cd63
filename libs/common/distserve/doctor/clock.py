"""How far the clocks of two hosts are apart, by the four timestamps of NTP (RFC 5905, section 8), over the bus.

offset = ((T2 - T1) + (T3 - T4)) / 2, and the truth is within half of the round trip, (T4 - T1) - (T3 - T2), of it. Of
several exchanges that with the shortest round trip is the best.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from distserve.bus import subjects
from distserve.bus.base import Bus
from distserve.doctor.finding import Finding, bad, ok, skip
from distserve.errors import BusError, DistServeError
from distserve.messages import ClockReply, ClockRequest, WorkerInfo, decode_as, encode

LIMIT_S = 1e-3
_NUM_EXCHANGES = 8
_TIMEOUT_S = 2.0


@dataclass(frozen=True, slots=True)
class Offset:
    """Their clock less ours is `offset_s`, give or take `uncertainty_s`."""

    offset_s: float
    uncertainty_s: float

    @classmethod
    def of(cls, t1: int, t2: int, t3: int, t4: int) -> Offset:
        """Sent here, received there, sent there, received here; nanoseconds, each by the clock of its host."""
        return cls(((t2 - t1) + (t3 - t4)) / 2e9, max(0, (t4 - t1) - (t3 - t2)) / 2e9)


async def measure(bus: Bus, subject: str) -> Offset:
    """The best of a few exchanges. Raises BusError kinds."""
    found = []
    request = encode(ClockRequest())
    for _ in range(_NUM_EXCHANGES):
        t1 = time.time_ns()
        answer = await bus.request(subject, request, timeout_s=_TIMEOUT_S)
        t4 = time.time_ns()
        reply = decode_as(ClockReply, answer)
        found.append(Offset.of(t1, reply.received_unix_ns, reply.sent_unix_ns, t4))
    return min(found, key=lambda offset: offset.uncertainty_s)


def judge(offset: Offset, subject: str) -> Finding:
    """Over LIMIT_S, and over what the measurement can tell, is a warning."""
    words = f"{offset.offset_s * 1e3:+.3f} ms, give or take {offset.uncertainty_s * 1e3:.3f}"
    figures = {"offset_s": round(offset.offset_s, 9), "uncertainty_s": round(offset.uncertainty_s, 9)}
    if abs(offset.offset_s) > max(LIMIT_S, offset.uncertainty_s):
        return bad(
            "clock.offset",
            "warn",
            f"{words}: times of one request on two hosts don't compare",
            "timedatectl set-ntp true && chronyc makestep  # on the host that is off",
            subject,
            **figures,
        )
    return ok("clock.offset", words, subject, **figures)


def one_a_host(workers: Iterable[WorkerInfo]) -> Mapping[str, WorkerInfo]:
    """boot id -> one worker under that kernel. One that does not say its host stands for itself."""
    found: dict[str, WorkerInfo] = {}
    for info in sorted(workers, key=lambda w: (w.role == "gateway", w.worker_id)):
        boot_id = info.host_key.rpartition("-")[0] or info.worker_id
        found.setdefault(boot_id, info)
    return found


async def check_clocks(bus: Bus, workers: Iterable[WorkerInfo]) -> list[Finding]:
    """One worker of each host is asked."""
    peers = one_a_host(workers)
    if not peers:
        return [skip("clock.offset", "no worker is registered: there is no clock to compare with")]
    found = []
    for info in peers.values():
        addresses = sorted({e.host for e in info.endpoints if e.kind == "tcp"})
        subject = info.worker_id + (f" ({addresses[0]})" if addresses else "")
        try:
            found.append(judge(await measure(bus, subjects.worker(info.role, info.worker_id)), subject))
        except BusError as e:
            found.append(skip("clock.offset", f"not told: {e.message}", subject))
        except DistServeError as e:
            found.append(skip("clock.offset", f"it does not tell its time ({e.message})", subject))
    return found
