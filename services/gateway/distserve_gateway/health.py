"""Whether the gateway can serve, and why not."""

from collections import Counter
from typing import Any

from distserve.errors import NoWorker
from distserve_gateway.routing import choose
from distserve_gateway.workers import Workers


def report(
    workers: Workers, *, bus_connected: bool, draining: bool, breaker: str = "", fallback_serves: bool = False
) -> tuple[bool, dict[str, Any]]:
    """(ready, what /health says). Ready: not draining, and it serves: connected, with workers that could take a
    request, be it a decode worker alone, which makes it degraded; or by the fallback server, whatever is lacking here.
    `breaker`: why it is not closed, which makes it degraded too."""
    reasons: list[str] = []
    lacking: list[str] = []
    if draining:
        reasons.append("the gateway is draining")
    needed = lacking if fallback_serves else reasons
    if not bus_connected:
        needed.append("not connected to the bus")
    try:
        route = choose(workers.snapshot, workers.model, workers.load)
        if route.kind == "alone":
            lacking.append(route.reason)
    except NoWorker as e:
        needed.append(e.message)
    ready = not reasons
    reasons += lacking
    if breaker:
        reasons.append(breaker)
    counts: dict[str, dict[str, int]] = {}
    for role in ("prefill", "decode", "gateway"):
        counts[role] = dict(Counter(worker.status for worker in workers.of_role(role)))
    for role in ("prefill", "decode"):
        reasons += [
            f"{role} worker {worker.worker_id}: {reason}"
            for worker in workers.of_role(role)
            for reason in worker.reasons or (["degraded"] if worker.status == "degraded" else [])
        ]
    status = "draining" if draining else "unavailable" if not ready else "degraded" if reasons else "ok"
    details = {
        worker.worker_id: {
            "role": worker.role,
            "status": worker.status,
            "transports": {"usable": worker.transports, "in_use": worker.transports_in_use},
            "url": worker.http_url,
        }
        for role in ("prefill", "decode")
        for worker in workers.of_role(role)
    }
    return ready, {
        "status": status,
        "model": workers.model,
        "workers": counts,
        "reasons": reasons,
        "details": details,
    }
