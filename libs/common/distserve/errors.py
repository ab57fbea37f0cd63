"""One exception tree, the code each error has on the wire, and the HTTP status it becomes.

    DistServeError
    ├── InvalidRequest              400  the caller's fault; names field, value and what would do
    │   ├── ContextLengthExceeded   400
    │   ├── UnsupportedFeature      400
    │   ├── ModelNotFound           404
    │   ├── RequestNotFound         404
    │   └── BodyTooLarge            413
    ├── Unauthorized                401  no API key, or one that nobody has
    ├── Forbidden                   403  the key may not do this
    ├── TooManyRequests             429  not now; carries retry_after_s
    │   ├── RateLimited             429  a key's limit is reached
    │   ├── SloUnattainable         429  its first token would come too late
    │   └── Shed                    429  the service is too slow just now for requests of this class
    ├── Unavailable                 503  try again later; carries retry_after_s
    │   ├── NoWorker                503  names the role
    │   ├── Overloaded              503  a queue is full
    │   └── Draining                503  the service is going away
    ├── DeadlineExceeded            504
    ├── Cancelled                   499
    ├── WorkerLost                  502  a worker died or stopped answering in mid-request
    ├── ConfigError                      a key, its value, what would do
    ├── ModelUnsupported                 refused at load, by name
    ├── FetchFailed                      a model could not be downloaded, checked or converted
    ├── BusError                    503
    │   ├── BusTimeout              504
    │   ├── NoResponders            503
    │   ├── PayloadTooLarge         413
    │   ├── VersionMismatch         500
    │   └── MalformedMessage        400
    ├── KVError                     500
    │   ├── PoolExhausted           503
    │   ├── LayoutMismatch          500  names the field that differs
    │   ├── BlocksMissing           404  found before, not here now
    │   ├── BlockDamaged            500  stored bytes that are not what they should be
    │   ├── DiskFull                503
    │   ├── DiskFailed              503  the disk refuses
    │   ├── ObjectStoreDown         503
    │   └── AlreadyAdopted          409  a hand-over that had worked before
    └── TransportError              502
        ├── PeerLost                502
        ├── StaleEpoch              502
        ├── LeaseRevoked            502
        ├── ChecksumMismatch        502
        └── TransportUnavailable    503

Errors carry fields, not only words: they cross NATS as `(code, message, fields)` and come out as the same class.
Foreign exceptions are translated where they enter (bus/nats.py, transport/, openai_api).
"""

from __future__ import annotations

from typing import Any, ClassVar

Field = str | int | float | bool | None


class DistServeError(Exception):
    """Root of the tree. `fields` are plain values that explain the error and survive the wire."""

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500

    def __init__(self, message: str, **fields: Field) -> None:
        super().__init__(message)
        self.message = message
        self.fields: dict[str, Field] = fields

    def __getattr__(self, name: str) -> Any:
        # Only reached when normal lookup fails: a field reads as an attribute, e.g. `error.retry_after_s`.
        try:
            return self.__dict__["fields"][name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no field {name!r}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return from_wire, (self.code, self.message, self.fields)


class InvalidRequest(DistServeError):
    """Bad input. Fields: `param` (the field's name), `value`, `expected`."""

    code = "invalid_request"
    http_status = 400


class ContextLengthExceeded(InvalidRequest):
    """Fields: `num_prompt_tokens`, `max_tokens`, `limit`."""

    code = "context_length_exceeded"


class UnsupportedFeature(InvalidRequest):
    code = "unsupported_feature"


class ModelNotFound(InvalidRequest):
    code = "model_not_found"
    http_status = 404


class RequestNotFound(InvalidRequest):
    """None of the caller's that runs has this name."""

    code = "request_not_found"
    http_status = 404


class BodyTooLarge(InvalidRequest):
    code = "body_too_large"
    http_status = 413


class Unauthorized(DistServeError):
    code = "invalid_api_key"
    http_status = 401


class Forbidden(DistServeError):
    """Fields: `param`, `value`, `expected`."""

    code = "forbidden"
    http_status = 403


class TooManyRequests(DistServeError):
    """Not now. Field: `retry_after_s`; absent: it would be the same later."""

    code = "too_many_requests"
    http_status = 429


class RateLimited(TooManyRequests):
    """Fields: `key` (its name), `limit`, `retry_after_s`."""

    code = "rate_limited"


class SloUnattainable(TooManyRequests):
    """Its first token, or that of one accepted before it, would come too late. Fields: `ttft_s` (predicted), `slo_s`,
    `retry_after_s` (from when on the same request would be in time, if nothing else came), `overdue` (not refused at
    once: its time went by; true: since workers were full or silent)."""

    code = "slo_unattainable"


class Shed(TooManyRequests):
    """Fields: `priority`, `retry_after_s`."""

    code = "shed"


class Unavailable(DistServeError):
    """Try again later. Field: `retry_after_s`."""

    code = "unavailable"
    http_status = 503


class NoWorker(Unavailable):
    """No live worker of a role. Fields: `role`, `model`, `retry_after_s`."""

    code = "no_worker"


class Overloaded(Unavailable):
    code = "overloaded"


class Draining(Unavailable):
    code = "draining"


class DeadlineExceeded(DistServeError):
    code = "deadline_exceeded"
    http_status = 504


class Cancelled(DistServeError):
    code = "cancelled"
    http_status = 499


class WorkerLost(DistServeError):
    """Fields: `worker`, `role`."""

    code = "worker_lost"
    http_status = 502


class ConfigError(DistServeError):
    """Fields: `key`, `value`, `expected`."""

    code = "config_error"


class ModelUnsupported(DistServeError):
    """A model that this engine can't serve correctly. Fields: `model`, `feature`."""

    code = "model_unsupported"


class FetchFailed(DistServeError):
    """Fields: `model`, `stage` ("download", "checksum", "disk" or "convert")."""

    code = "fetch_failed"


class BusError(DistServeError):
    code = "bus_error"
    http_status = 503


class BusTimeout(BusError):
    """Fields: `subject`, `timeout_s`."""

    code = "bus_timeout"
    http_status = 504


class NoResponders(BusError):
    """Fields: `subject`."""

    code = "no_responders"


class PayloadTooLarge(BusError):
    """Fields: `subject`, `size_bytes`, `limit_bytes`. Raised before anything is sent."""

    code = "payload_too_large"
    http_status = 413


class VersionMismatch(BusError):
    """Fields: `theirs`, `ours` (protocol majors)."""

    code = "version_mismatch"
    http_status = 500


class MalformedMessage(BusError):
    code = "malformed_message"
    http_status = 400


class KVError(DistServeError):
    code = "kv_error"


class PoolExhausted(KVError):
    """Fields: `wanted`, `free`, `total` (blocks)."""

    code = "pool_exhausted"
    http_status = 503


class LayoutMismatch(KVError):
    """Two sides whose KV blocks mean different things. Fields: `field`, `ours`, `theirs`."""

    code = "layout_mismatch"


class BlocksMissing(KVError):
    """Blocks that were found are not there, or not whole, when they are asked for: compute them instead. Fields:
    `num_present` (of those asked for, before the first that is missing), `tier`."""

    code = "blocks_missing"
    http_status = 404


class BlockDamaged(KVError):
    """A stored block, or what holds it, whose bytes are not what they should be: never served. Fields: `where` (file
    and number in it, or object), `reason`."""

    code = "block_damaged"


class DiskFull(KVError):
    """No room for more blocks on disk; what is there can be read. Fields: `folder`, `wanted_bytes`, `reason`
    ("capacity", "reserve" or "file system")."""

    code = "disk_full"
    http_status = 503


class DiskFailed(KVError):
    """The disk refuses. Fields: `path`, `operation`, `errno`."""

    code = "disk_failed"
    http_status = 503


class ObjectStoreDown(KVError):
    """An object store that doesn't answer, or refuses. Fields: `url`, `reason`, `retry_after_s`."""

    code = "object_store_down"
    http_status = 503


class AlreadyAdopted(KVError):
    """A decode worker has this sequence already: the answer to an earlier commit got lost. Field: `worker`."""

    code = "already_adopted"
    http_status = 409


class TransportError(DistServeError):
    """Fails one lease and nothing else. Field: `lease_id` where known."""

    code = "transport_error"
    http_status = 502


class PeerLost(TransportError):
    code = "peer_lost"


class StaleEpoch(TransportError):
    """Fields: `lease_id`, `epoch`, `current`."""

    code = "stale_epoch"


class LeaseRevoked(TransportError):
    code = "lease_revoked"


class ChecksumMismatch(TransportError):
    """Fields: `lease_id`, `block_index`."""

    code = "checksum_mismatch"


class TransportUnavailable(TransportError):
    code = "transport_unavailable"
    http_status = 503


def _tree(cls: type[DistServeError]) -> dict[str, type[DistServeError]]:
    found = {cls.code: cls}
    for sub in cls.__subclasses__():
        found |= _tree(sub)
    return found


_BY_CODE = _tree(DistServeError)


def from_wire(code: str, message: str, fields: dict[str, Field] | None = None) -> DistServeError:
    """The exception that (code, message, fields) stands for; an unknown code becomes a plain DistServeError."""
    return _BY_CODE.get(code, DistServeError)(message, **(fields or {}))


def to_wire(error: BaseException) -> tuple[str, str, dict[str, Field]]:
    """(code, message, fields) of any exception; a foreign one is an internal error that names its type."""
    if isinstance(error, DistServeError):
        return error.code, error.message, error.fields
    return DistServeError.code, f"{type(error).__name__}: {error}", {}
