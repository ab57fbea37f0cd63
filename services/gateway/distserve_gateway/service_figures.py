"""One service's line of GET /status, from its registry entry and what it said of itself. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import urlsplit

import msgspec

from distserve.errors import MalformedMessage
from distserve.messages import PassSpeed, WorkerInfo
from distserve.status import ServiceStatus
from distserve.worker.reporting import LEFT_OUT
from distserve_gateway.samples import Samples, Since

WANTED = frozenset(
    {
        "distserve_cached_prompt_tokens_total",
        "distserve_gateway_live_sequences",
        "distserve_gateway_output_tokens_total",
        "distserve_kvstore_blocks",
        "distserve_kvstore_bytes",
        "distserve_kvstore_capacity_bytes",
        "distserve_kvstore_hit_blocks_total",
        "distserve_kvstore_looked_up_blocks_total",
        "distserve_kvstore_read_blocks_total",
        "distserve_kvstore_written_blocks_total",
        "distserve_preemptions_total",
        "distserve_prompt_tokens_total",
        "distserve_store_fetched_blocks_total",
        "distserve_store_fetched_bytes_total",
        "distserve_store_served_bytes_total",
        "distserve_transfer_bytes_total",
        "distserve_transfers_total",
        "distserve_transport_packets_total",
        "distserve_transport_retransmitted_packets_total",
        "distserve_worker_batch_sequences_count",
        "distserve_worker_batch_sequences_sum",
        "distserve_worker_batch_tokens_sum",
        "distserve_worker_blocks",
        "distserve_worker_free_blocks",
        "distserve_worker_gpu_utilization_ratio",
        "distserve_worker_pass_seconds_count",
        "distserve_worker_pass_seconds_sum",
        "distserve_worker_preemptions_total",
        "distserve_worker_running_sequences",
        "distserve_worker_total_blocks",
        "distserve_worker_waiting_sequences",
        "distserve_worker_waiting_tokens",
        LEFT_OUT,
    }
)
"""All that this file and cluster_figures.py look at."""


class Health(msgspec.Struct):
    """Of a /health, what is looked at; all else is passed over."""

    status: str = ""
    reasons: list[str] = []
    gpu_util: float | None = None


def health_of(body: bytes) -> Health:
    """Raises MalformedMessage."""
    try:
        return msgspec.json.decode(body, type=Health)
    except msgspec.MsgspecError as e:
        raise MalformedMessage(f"a service's /health can't be read: {e}") from e


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """A service now, and what has grown since the gathering before (`last`) and in the window (`window`).

    `health` None: it did not answer, for the reason `error`; the samples are empty then.
    """

    info: WorkerInfo
    health: Health | None
    now: Samples
    last: Since
    window: Since
    error: str = ""

    def figure(self, name: str, otherwise: int, **labels: str) -> int:
        """A gauge, or what the registry says."""
        told = self.now.total(name, **labels)
        return otherwise if told is None else int(told)

    def share(self, part: str, whole: str) -> float | None:
        """Of what two counters have grown by in the window."""
        grown = self.window.grown(whole)
        return min(1.0, self.window.grown(part) / grown) if grown else None


def service_status(of: Observed, prefill_speeds: Iterable[PassSpeed]) -> ServiceStatus:
    """`prefill_speeds`: of the model's prefill workers, those that are known."""
    info, load = of.info, of.info.load
    health = of.health or Health(status=info.status, reasons=[*info.reasons, f"it did not answer: {of.error}"])
    left_out = of.now.total(LEFT_OUT)
    cut = [] if left_out is None else [f"{left_out:.0f} bytes of its figures did not fit a message of the bus"]
    is_store = info.role == "kvstore"
    hits, looked_up = _HITS[is_store]
    step_s = _mean(of.window, "distserve_worker_pass_seconds", phase="decode") if info.role == "decode" else None
    batch = _batch(of)
    return ServiceStatus(
        id=info.worker_id,
        role=info.role,
        status=health.status or info.status,
        reasons=health.reasons + cut,
        reached=of.health is not None,
        model=info.model,
        version=info.version,
        host=host_of(info),
        transports_in_use=info.transports_in_use,
        num_running=of.figure(_RUNNING.get(info.role, ""), load.num_running),
        num_waiting=of.figure("distserve_worker_waiting_sequences", load.num_waiting) if not is_store else 0,
        num_waiting_tokens=of.figure("distserve_worker_waiting_tokens", load.num_waiting_tokens),
        total_blocks=of.figure("distserve_worker_total_blocks", load.total_blocks),
        free_blocks=of.figure("distserve_worker_free_blocks", load.free_blocks),
        cached_blocks=of.figure("distserve_worker_blocks", 0, state="cached"),
        tokens_per_s=of.last.rate(_TOKENS.get(info.role, "")),
        step_s=step_s,
        mean_batch=batch,
        prompt_pass_s=_prompt_pass_s(batch, prefill_speeds) if info.role == "decode" else None,
        kv_hit_rate=of.share(hits, looked_up),
        num_prompt_tokens=int(of.window.grown(looked_up)),
        preemptions_per_s=max(of.last.rate(name) for name in _PREEMPTIONS),  # the same ones, by two names
        gpu_util=health.gpu_util,
    )


_RUNNING = {
    "gateway": "distserve_gateway_live_sequences",
    "prefill": "distserve_worker_running_sequences",
    "decode": "distserve_worker_running_sequences",
}
_TOKENS = {
    "gateway": "distserve_gateway_output_tokens_total",
    "prefill": "distserve_worker_batch_tokens_sum",
    "decode": "distserve_worker_batch_tokens_sum",
}
_HITS = {
    False: ("distserve_cached_prompt_tokens_total", "distserve_prompt_tokens_total"),
    True: ("distserve_kvstore_hit_blocks_total", "distserve_kvstore_looked_up_blocks_total"),
}
_PREEMPTIONS = ("distserve_preemptions_total", "distserve_worker_preemptions_total")


def _mean(since: Since, name: str, **labels: str) -> float | None:
    """Of a histogram's observations in the window."""
    num = since.grown(f"{name}_count", **labels)
    return since.grown(f"{name}_sum", **labels) / num if num else None


def _batch(of: Observed) -> float | None:
    """Sequences in a pass of what the role is for; a decode worker's that has only computed prompts, of those."""
    name = "distserve_worker_batch_sequences"
    steps = _mean(of.window, name, phase="decode") if of.info.role == "decode" else None
    return _mean(of.window, name) if steps is None else steps


def _prompt_pass_s(num_tokens: float | None, speeds: Iterable[PassSpeed]) -> float | None:
    """What prefill takes for a pass of so many tokens, by the mean of its workers' fits."""
    if not num_tokens:
        return None
    known = [speed.seconds(num_tokens, num_tokens**2 / 2) for speed in speeds if speed.known]
    return sum(known) / len(known) if known else None


def host_of(info: WorkerInfo) -> str:
    """Where it runs, in the words that there are: an address that peers reach it at; else the beginning of its boot id,
    which services of one host share."""
    addresses = [_host(f"//{e.address}") for e in info.endpoints if e.kind == "tcp"]
    for address in (*addresses, _host(info.http_url)):
        if address and address not in ("localhost", "::1", "::", "0.0.0.0") and not address.startswith("127."):
            return address
    return info.host_key[:8]


def _host(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:  # it names none
        return None
