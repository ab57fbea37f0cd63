"""Whether the gateway can serve, and why not."""

from collections import Counter
from typing import Any

from distserve.errors import NoWorker
from distserve_gateway.routing import choose
from distserve_gateway.workers import Workers


def report(workers: Workers, *, bus_connected: bool, draining: bool, breaker: str = "") -> tuple[bool, dict[str, Any]]:
    """(ready, what /health says). Ready: connected, not draining, and workers that could take a request, be it a decode
    worker alone, which makes it degraded. `breaker`: why it is not closed, which does too."""
    reasons = []
    if draining:
        reasons.append("the gateway is draining")
    if not bus_connected:
        reasons.append("not connected to the bus")
    lacking = []
    try:
        route = choose(workers.snapshot, workers.model, workers.load)
        if route.kind == "alone":
            lacking.append(route.reason)
    except NoWorker as e:
        reasons.append(e.message)
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
