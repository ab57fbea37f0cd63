"""What a cluster's figures say that somebody should look at, and what to do about it. Pure.

Each threshold stands once, here. A rule is quiet about what has seen too little to tell.
"""

from __future__ import annotations

from collections.abc import Iterator

from distserve.status import ClusterStatus, ServiceStatus, Warning

SLOW_STEP = 3.0  # times what prefill's fit gives for a pass of as many tokens
LEAST_BATCH = 2.0  # sequences in a step: another worker can take nothing from one that steps a single one
LOW_HIT_RATE = 0.6
LEAST_TOKENS = 300  # of prompts, looked up
MANY_RETRANSMITTED = 0.001
LOW_ATTAINMENT = 0.95


def warnings_of(status: ClusterStatus) -> list[Warning]:
    """Of `status.warnings` nothing is read. The gravest first."""
    return [
        *_breaker(status),
        *_degraded(status),
        *_attainment(status),
        *_add_decode(status),
        *_retransmissions(status),
        *_hit_rate(status),
    ]


def _breaker(status: ClusterStatus) -> Iterator[Warning]:
    breaker = status.gateway.breaker
    if breaker in ("open", "half_open"):
        word = breaker.replace("_", "-")
        yield Warning(
            rule="breaker",
            message=f"The breaker of gateway {status.gateway.id} is {word}: first tokens took too long. Requests go to "
            "the fallback server, or are refused where there is none. /health says why; it closes by itself.",
        )


def _degraded(status: ClusterStatus) -> Iterator[Warning]:
    """A gateway is degraded when its breaker is open or its workers are, too: that is said once."""
    told = [warning for service in status.services if service.role != "gateway" for warning in _unwell(service)]
    gateways = [warning for service in status.services if service.role == "gateway" for warning in _unwell(service)]
    yield from told or ([] if status.gateway.breaker in ("open", "half_open") else gateways)


def _unwell(service: ServiceStatus) -> Iterator[Warning]:
    who = f"{service.role} {service.id}"
    if not service.reached:
        yield Warning(
            rule="degraded",
            message=f"{who} is registered and did not answer: its figures are those of its last beat. See whether "
            "its process hangs or its host is overloaded.",
        )
    elif service.status in ("degraded", "unavailable"):
        why = "; ".join(service.reasons) or "it gives no reason"
        yield Warning(rule="degraded", message=f"{who} is {service.status}: {why}.")


def _attainment(status: ClusterStatus) -> Iterator[Warning]:
    for name, of in status.gateway.classes.items():
        if of.attainment is not None and of.attainment < LOW_ATTAINMENT:
            yield Warning(
                rule="slo",
                message=f"Of class {name} {of.num_attained} of {of.num_promised} requests ({of.attainment:.0%}) got "
                f"what they were promised in the last {status.gateway.window_s:g} s, less than {LOW_ATTAINMENT:.0%}. "
                "See where their time goes (queue, prefill, transfer, decode): add workers of that role, or promise "
                "less.",
            )


def _add_decode(status: ClusterStatus) -> Iterator[Warning]:
    slow = [service for service in status.services if _is_slow(service)]
    if not slow:
        return
    figures = ", ".join(
        f"{s.id} {1e3 * (s.step_s or 0):.1f} ms with {s.mean_batch or 0:.1f} sequences, "
        f"{(s.step_s or 0) / (s.prompt_pass_s or 1):.1f} times {1e3 * (s.prompt_pass_s or 0):.1f} ms"
        for s in slow
    )
    yield Warning(
        rule="add_decode",
        message=f"Decode steps take over {SLOW_STEP:g} times what prefill takes for a pass of as many tokens: "
        f"{figures}. Add decode workers, so that each steps fewer sequences, or give these more cores.",
    )


def _is_slow(service: ServiceStatus) -> bool:
    return (
        service.role == "decode"
        and service.step_s is not None
        and (service.mean_batch or 0.0) >= LEAST_BATCH
        and bool(service.prompt_pass_s)
        and service.step_s > SLOW_STEP * (service.prompt_pass_s or 0.0)
    )


def _retransmissions(status: ClusterStatus) -> Iterator[Warning]:
    shares = {f.transport: f.retransmitted_share for f in status.flows if f.retransmitted_share is not None}
    for transport, share in shares.items():
        if share > MANY_RETRANSMITTED:
            yield Warning(
                rule="retransmissions",
                message=f"{share:.2%} of what {transport} sends is sent again, more than {MANY_RETRANSMITTED:.1%}: "
                "packets are lost on the way. Check QoS: DSCP trust, the queue of each class, PFC and ECN "
                "(`distserve doctor --peer HOST` on the workers' hosts).",
            )


def _hit_rate(status: ClusterStatus) -> Iterator[Warning]:
    looked_up = [s for s in status.services if s.role in ("prefill", "decode") and s.kv_hit_rate is not None]
    num_tokens = sum(s.num_prompt_tokens for s in looked_up)
    num_hits = sum(s.num_prompt_tokens * (s.kv_hit_rate or 0.0) for s in looked_up)
    if num_tokens >= LEAST_TOKENS and num_hits < LOW_HIT_RATE * num_tokens:
        yield Warning(
            rule="hit_rate",
            message=f"KV was found for {num_hits / num_tokens:.0%} of {num_tokens:,} prompt tokens in the last "
            f"{status.window_s:.0f} s, less than {LOW_HIT_RATE:.0%}. That is normal where prompts share no beginning "
            "and no conversation goes on. Where they do, blocks are evicted before they are asked for again: see "
            "evictions by tier, make the pool (kv.num_blocks) or the store's tiers larger, or add a store node.",
        )
