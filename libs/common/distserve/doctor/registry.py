"""Who is registered on the bus, without leaving a trace: a look must not make the registry's bucket, whose TTL would
then be that of whoever looked first, not that of the services to come."""

from __future__ import annotations

import json
from collections import Counter
from typing import get_args

from distserve import __version__
from distserve.bus.base import Bus
from distserve.bus.subjects import REGISTRY_BUCKET
from distserve.doctor.finding import Finding, Measure, bad, ok
from distserve.errors import BusError
from distserve.messages import Role, WorkerInfo

_CHECK = "nats.registry"
_NO_SUCH_STREAM = 10059  # JetStream's err_code (nats-server, server/errors.json)
_ASK_S = 5.0


async def check_registry(bus: Bus) -> tuple[Finding, list[WorkerInfo]]:
    """What there is to say of it, and everybody in it."""
    try:
        if not await _exists(bus):
            return ok(_CHECK, "nobody has registered yet"), []
        async with bus.registry().watch() as watch:
            workers = list(watch.snapshot.values())
    except BusError as e:
        return bad(_CHECK, "fail", e.message, "# the same bus.ttl_s for all services, and the rows above ok"), []
    counts = Counter(w.role for w in workers)
    roles: dict[str, Measure] = {role: counts[role] for role in get_args(Role)}
    words = ", ".join(f"{count} {role}" for role, count in roles.items() if count) or "nobody is registered now"
    if unread := bus.stats.undecodable_entries:
        found = f"{words}; {unread} more speak another protocol than this {__version__}"
        return bad(_CHECK, "warn", found, "# install one release everywhere", **roles), workers
    if others := sorted({w.version for w in workers} - {__version__, ""}):
        found = f"{words}; of other releases than this {__version__}: {', '.join(others)}"
        return bad(_CHECK, "warn", found, "# install one release everywhere", **roles), workers
    return ok(_CHECK, words, **roles), workers


async def _exists(bus: Bus) -> bool:
    """By JetStream's own API (NATS architecture decisions 2 and 8: a KV bucket is the stream KV_<bucket>)."""
    answer = json.loads(await bus.request(f"$JS.API.STREAM.INFO.KV_{REGISTRY_BUCKET}", b"", timeout_s=_ASK_S))
    error = answer.get("error")
    if error is None:
        return True
    if error.get("err_code") == _NO_SUCH_STREAM:
        return False
    raise BusError(f"the registry's bucket can't be asked after: {error.get('description')}")
