"""Every subject, in one place. All are versioned: `distserve.v1.…`"""

import re

ROOT = "distserve.v1"
REGISTRY_BUCKET = "distserve_v1_registry"


def slug(name: str) -> str:
    """A model's or worker's name as one subject token: lower-case letters, digits, `-` and `_`."""
    cleaned = re.sub(r"[^a-z0-9_]+", "-", name.lower()).strip("-")
    if not cleaned:
        raise ValueError(f"the name {name!r} has no letter or digit that a NATS subject could carry")
    return cleaned


def requests(model: str) -> str:
    """The public front door: JSON in, a stream of JSON messages back, ended by an empty one."""
    return f"{ROOT}.requests.{slug(model)}"


def cancel(model: str) -> str:
    """The public way to end a request before its time: JSON in, JSON back if there is a reply subject."""
    return f"{ROOT}.cancel.{slug(model)}"


def askers(gateway: str, number: str = "*") -> str:
    """Where NATS tells a gateway that nobody listens any more to an answer, by the gateway's number for its asker."""
    return f"{ROOT}.askers.{gateway}.{number}"


def worker(role: str, worker_id: str) -> str:
    """Directed requests to one service, e.g. `prefill.<worker>` or `gateway.<gateway>`: msgpack (messages/)."""
    return f"{ROOT}.{role}.{worker_id}"


def stream(gateway: str) -> str:
    """Tokens for one gateway's sequences (TokenBatch)."""
    return f"{ROOT}.stream.{gateway}"


def kv_events() -> str:
    return f"{ROOT}.events.kv"


def traces() -> str:
    """Which traces outside the ratio are kept (TracesKept), for everybody who holds spans."""
    return f"{ROOT}.events.traces"


def doctor(host: str) -> str:
    """`distserve doctor --serve` on a host, by any of its names and addresses, or by its id: msgpack (messages/)."""
    return f"{ROOT}.doctor.{slug(host)}"
