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


def worker(role: str, worker_id: str) -> str:
    """Directed requests to one worker, `prefill.<worker>` or `decode.<worker>`: msgpack (messages/)."""
    return f"{ROOT}.{role}.{worker_id}"


def stream(gateway: str) -> str:
    """Tokens for one gateway's sequences (TokenBatch)."""
    return f"{ROOT}.stream.{gateway}"


def kv_events() -> str:
    return f"{ROOT}.events.kv"


def doctor(host: str) -> str:
    """`distserve doctor --serve` on a host, by any of its names and addresses, or by its id: msgpack (messages/)."""
    return f"{ROOT}.doctor.{slug(host)}"
