"""Whether the gateway can serve, and why not."""

from collections import Counter
from typing import Any

import distserve
from distserve.errors import NoWorker
from distserve.messages import WorkerStatus
from distserve_gateway.routing import choose
from distserve_gateway.workers import Workers


def report(
    workers: Workers,
    *,
    bus_connected: bool,
    draining: bool,
    breaker: str = "",
    fallback_serves: bool = False,
    was_ready: bool = False,
    kv_cache_hit_rate: float | None = None,
) -> tuple[bool, dict[str, Any]]:
    """(ready, what /health says). Ready: not draining, and it serves: connected, with workers that could take a
    request, be it a decode worker alone, which makes it degraded; or by the fallback server, whatever is lacking here.
    `breaker`: why it is not closed, which makes it degraded too. `was_ready`: ever; until then what is lacking is still
    to come, and it is warming. kv_cache_hit_rate: of the prompts' tokens, those that were not computed."""
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
    status: WorkerStatus = "draining" if draining else "degraded" if reasons else "ok"
    if status == "degraded" and not (ready or was_ready):
        status = "warming"
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
        "ready": ready,
        "reasons": reasons,
        "role": "gateway",
        "model": workers.model,
        "version": distserve.__version__,
        "gpu_util": None,
        "kv_cache_hit_rate": kv_cache_hit_rate,
        "transport": _transports(workers),
        "workers": counts,
        "details": details,
    }


def _transports(workers: Workers) -> list[str]:
    """The kinds by which its workers send each other KV, or could before any has."""
    infos = [*workers.of_role("prefill"), *workers.of_role("decode")]
    in_use = {kind for info in infos for kind in info.transports_in_use}
    return sorted(in_use or {kind for info in infos for kind in info.transports})
