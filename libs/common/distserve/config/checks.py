"""What single fields cannot say: values that are impossible together."""

import ipaddress
import re
from collections.abc import Iterator

from distserve.config.sections import Config
from distserve.errors import ConfigError

Problem = tuple[str, str]  # key at fault, what it must be

_BUS_URL = re.compile(r"(nats|tls|ws|wss)://[^\s/]+/?")
_HTTP_URL = re.compile(r"https?://[^\s/]+\S*")
_SERVER_URL = re.compile(r"https?://[^\s/?#]+[^\s?#]*")  # paths are put behind it
_OBJECT_URL = re.compile(r"(file:///|s3://|gs://|az://)\S+")
_SUBJECT_LETTER = re.compile(r"[a-z0-9_]")  # what subjects.slug() keeps of a name in lower case


def parse_cpus(text: str) -> tuple[int, ...]:
    """`"0-3,6"` -> (0, 1, 2, 3, 6); `""` -> (). Raises ConfigError."""
    cpus: set[int] = set()
    for part in filter(None, (p.strip() for p in text.split(","))):
        m = re.fullmatch(r"(\d{1,5})(?:-(\d{1,5}))?", part)
        if not m or int(m[2] or m[1]) < int(m[1]):
            raise ConfigError(
                f"the CPU list {text!r} has {part!r}, must be numbers and ranges such as 0-3,6",
                value=text,
                expected="numbers and ranges such as 0-3,6",
            )
        cpus.update(range(int(m[1]), int(m[2] or m[1]) + 1))
    return tuple(sorted(cpus))


def problems(c: Config) -> Iterator[Problem]:
    """Every key at fault, and what would do."""
    if not _SUBJECT_LETTER.search(c.model.served_name.lower()):
        default = "" if c.model.name else f" (model.path is {c.model.path!r}, which gives none)"
        yield "model.name", f"a name with at least one of a-z, 0-9 and _, for the NATS subjects{default}"
    t = c.transport
    if c.model.on_gpu and not c.decode.colocated and t.kind in ("shm", "tcp") and not t.allow_fallback:
        yield (
            "model.device",
            f"auto or cpu with transport.kind {t.kind}: only cuda_ipc and rdma hand KV over from a GPU; else "
            "transport.kind auto, cuda_ipc or rdma, or decode.colocated true (--colocated)",
        )
    if t.kind == "cuda_ipc" and not c.model.on_gpu and not t.allow_fallback:
        yield (
            "transport.kind",
            f"auto, shm, tcp or rdma: cuda_ipc is for pools on a GPU, and model.device is {c.model.device}",
        )
    size = c.kv.block_size
    if size & (size - 1):
        yield "kv.block_size", "a power of two: 8, 16, 32, 64, 128 or 256"
    if c.kv.num_blocks == 1:
        yield "kv.num_blocks", "0 (worked out) or at least 2: block 0 is never given to a sequence"
    room = (c.kv.num_blocks - 1) * size
    if c.kv.num_blocks > 1 and c.model.max_model_len > room:
        yield (
            "kv.num_blocks",
            f"at least {-(-c.model.max_model_len // size) + 1} for one sequence of model.max_model_len = "
            f"{c.model.max_model_len} tokens, or 0 (worked out)",
        )
    if c.bus.ttl_s <= 2 * c.bus.beat_s:
        yield "bus.ttl_s", f"over two beats (bus.beat_s is {c.bus.beat_s:g}): over {2 * c.bus.beat_s:g}"
    if c.prefill.chunk_tokens % size:
        yield "prefill.chunk_tokens", f"0 or a multiple of kv.block_size ({size}): chunks end on block edges"
    if 0 < c.prefill.max_batch_tokens < max(size, c.prefill.chunk_tokens):
        yield "prefill.max_batch_tokens", f"0 (worked out) or at least one chunk: {max(size, c.prefill.chunk_tokens)}"
    if c.decode.sample_first_token and not c.prefill.keep_hidden:
        yield "prefill.keep_hidden", "true, since decode.sample_first_token draws from the hidden state"
    if c.gateway.silence_s >= c.gateway.request_timeout_s:
        yield "gateway.silence_s", f"below gateway.request_timeout_s ({c.gateway.request_timeout_s:g})"
    if c.bus.url and not all(_BUS_URL.fullmatch(u.strip()) for u in c.bus.url.split(",")):
        yield "bus.url", "nats://HOST:PORT (or tls://, ws://, wss://), several with commas between"
    if c.telemetry.otlp_endpoint and not _HTTP_URL.fullmatch(c.telemetry.otlp_endpoint):
        yield "telemetry.otlp_endpoint", "http://HOST:PORT or https://…, or empty"
    if c.transport.rdma.subnet and not _is_subnet(c.transport.rdma.subnet):
        yield "transport.rdma.subnet", "an IP subnet such as 10.0.0.0/16 or fd00::/8, or empty"
    if c.breaker.fallback_url and not _SERVER_URL.fullmatch(c.breaker.fallback_url):
        yield "breaker.fallback_url", "http://HOST:PORT or https://…, without /v1, ? and #, or empty"
    if len(set(c.transport.rdma.devices)) < len(c.transport.rdma.devices):
        yield "transport.rdma.devices", "a list that names each device once"
    k = c.kvstore
    if k.low_watermark >= k.high_watermark:
        yield "kvstore.low_watermark", f"below kvstore.high_watermark ({k.high_watermark:g})"
    if 0 < k.disk_bytes < 2 * k.segment_bytes:
        yield "kvstore.disk_bytes", f"0 (no disk tier) or at least two segments: {2 * k.segment_bytes}"
    if k.object_url and not _OBJECT_URL.fullmatch(k.object_url):
        yield "kvstore.object_url", "file:///FOLDER, s3://BUCKET/PREFIX, gs://…, az://…, or empty"
    for role, worker in (("prefill", c.prefill), ("decode", c.decode)):
        if worker.mps_percentage and not c.model.on_gpu:
            yield f"{role}.mps_percentage", f"0: it is of a GPU, and model.device is {c.model.device}"
    for role, text in (
        ("prefill", c.prefill.cpus),
        ("decode", c.decode.cpus),
        ("gateway", c.gateway.cpus),
        ("kvstore", c.kvstore.cpus),
    ):
        try:
            parse_cpus(text)
        except ConfigError as e:
            yield f"{role}.cpus", str(e.fields["expected"])


def _is_subnet(text: str) -> bool:
    try:
        ipaddress.ip_network(text)
    except ValueError:
        return False
    return True
