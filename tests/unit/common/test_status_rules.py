"""What a cluster's figures say that somebody should look at."""

from typing import Any

import pytest

from distserve.status import ClassStatus, ClusterStatus, FlowStatus, GatewayStatus, ServiceStatus
from distserve.status_rules import warnings_of


def cluster(
    *services: ServiceStatus,
    flows: tuple[FlowStatus, ...] = (),
    breaker: str = "closed",
    classes: dict[str, ClassStatus] | None = None,
) -> ClusterStatus:
    gateway = GatewayStatus(id="gw", status="ok", breaker=breaker, classes=classes or {})
    return ClusterStatus(
        at_unix_s=0.0,
        interval_s=1.0,
        window_s=60.0,
        model="tiny",
        version="1",
        gateway=gateway,
        services=list(services),
        flows=list(flows),
    )


def decode(worker_id: str = "d0", **figures: Any) -> ServiceStatus:
    return ServiceStatus(**{"id": worker_id, "role": "decode", "status": "ok", **figures})


def prefill(worker_id: str = "p0", **figures: Any) -> ServiceStatus:
    return ServiceStatus(**{"id": worker_id, "role": "prefill", "status": "ok", **figures})


def flow(share: float | None, traffic_class: str = "decode") -> FlowStatus:
    return FlowStatus(transport="tcp", traffic_class=traffic_class, dscp=48, retransmitted_share=share)


def steps(step_s: float | None, mean_batch: float | None, prompt_pass_s: float | None) -> ClusterStatus:
    return cluster(decode(step_s=step_s, mean_batch=mean_batch, prompt_pass_s=prompt_pass_s))


def hits(*rates_and_tokens: tuple[float | None, int]) -> ClusterStatus:
    return cluster(*(prefill(f"p{i}", kv_hit_rate=r, num_prompt_tokens=n) for i, (r, n) in enumerate(rates_and_tokens)))


def kept(num_attained: int, num_promised: int) -> ClusterStatus:
    return cluster(classes={"vip": ClassStatus(num_requests=100, num_promised=num_promised, num_attained=num_attained)})


@pytest.mark.parametrize(
    ("status", "rules"),
    [
        (cluster(), []),
        (cluster(breaker="off"), []),
        (cluster(breaker="open"), ["breaker"]),
        (cluster(breaker="half_open"), ["breaker"]),
        (cluster(decode(status="warming"), prefill(status="draining")), []),
        (cluster(decode(status="degraded")), ["degraded"]),
        (cluster(decode(reached=False)), ["degraded"]),
        (cluster(decode(status="degraded"), prefill(reached=False)), ["degraded", "degraded"]),
        # A gateway says again what its workers say, and its breaker; alone it is heard.
        (cluster(ServiceStatus(id="gw", role="gateway", status="degraded")), ["degraded"]),
        (cluster(ServiceStatus(id="gw", role="gateway", status="degraded"), decode(status="degraded")), ["degraded"]),
        (cluster(ServiceStatus(id="gw", role="gateway", status="degraded"), breaker="open"), ["breaker"]),
        (steps(0.031, 4.0, 0.010), ["add_decode"]),
        (steps(0.030, 4.0, 0.010), []),  # 3 times is not over 3 times
        (steps(0.031, 1.9, 0.010), []),  # hardly a batch: another worker would take nothing from it
        (steps(0.031, 4.0, None), []),  # prefill's speed is not known
        (steps(None, 4.0, 0.010), []),
        (steps(0.031, None, 0.010), []),
        (cluster(prefill(step_s=1.0, mean_batch=4.0, prompt_pass_s=0.01)), []),
        (hits((0.59, 300)), ["hit_rate"]),
        (hits((0.60, 300)), []),
        (hits((0.0, 299)), []),  # too few to tell
        (hits((0.0, 200), (0.2, 200)), ["hit_rate"]),  # together
        (hits((0.0, 100), (0.9, 900)), []),
        (hits((None, 0)), []),
        (cluster(ServiceStatus(id="k0", role="kvstore", status="ok", kv_hit_rate=0.0, num_prompt_tokens=999)), []),
        (cluster(flows=(flow(0.0011),)), ["retransmissions"]),
        (cluster(flows=(flow(0.001),)), []),
        (cluster(flows=(flow(None),)), []),
        (cluster(flows=(flow(0.5), flow(0.5, "prefill"))), ["retransmissions"]),  # once a transport
        (kept(94, 100), ["slo"]),
        (kept(95, 100), []),
        (kept(0, 0), []),  # nothing was promised
        (kept(0, 1), ["slo"]),
    ],
)
def test_each_rule_fires_where_it_should_and_nowhere_else(status: ClusterStatus, rules: list[str]) -> None:
    assert [warning.rule for warning in warnings_of(status)] == rules


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (steps(0.040, 5.0, 0.010), ["d0 40.0 ms with 5.0 sequences", "4.0 times 10.0 ms", "Add decode workers"]),
        (hits((0.1, 1000)), ["10% of 1,000 prompt tokens in the last 60 s", "normal where prompts share no beginning"]),
        (cluster(flows=(flow(0.02),)), ["2.00% of what tcp sends", "QoS", "distserve doctor"]),
        (kept(9, 10), ["class vip 9 of 10 requests (90%)", "in the last 60 s"]),
        (cluster(decode(status="degraded", reasons=["a", "b"])), ["decode d0 is degraded: a; b."]),
        (cluster(decode(reached=False)), ["decode d0 is registered and did not answer"]),
        (cluster(breaker="half_open"), ["gateway gw is half-open"]),
    ],
)
def test_a_warning_names_who_the_figures_and_what_to_do(status: ClusterStatus, words: list[str]) -> None:
    (warning,) = warnings_of(status)
    for word in words:
        assert word in warning.message
