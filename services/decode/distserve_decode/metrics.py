"""What a decode worker has done for promises and for room, for its /metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

from distserve_decode.offering import Offering
from distserve_decode.scheduler import Scheduler

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric


def families(scheduler: Scheduler, offering: Offering, model: str) -> tuple[Metric, ...]:
    from prometheus_client.core import CounterMetricFamily

    preempted = CounterMetricFamily(
        "distserve_preemptions",
        "Sequences that lost their blocks to others, by what became of those: given to the store, or left in the pool.",
        labels=("blocks",),
    )
    preempted.add_metric(("given",), offering.num_given)
    preempted.add_metric(("left",), scheduler.num_preemptions - offering.num_given)
    passed_over = CounterMetricFamily(
        "distserve_passed_over_steps", "Steps that sequences did not take for the sake of others' promised pace."
    )
    passed_over.add_metric((), scheduler.num_passed_over)
    by_how = CounterMetricFamily(
        "distserve_worker_preemptions",
        "Sequences that lost their blocks to others, by what was to bring those back.",
        labels=("role", "model", "how"),
    )
    by_how.add_metric(("decode", model, "offload"), offering.num_given)
    by_how.add_metric(("decode", model, "recompute"), scheduler.num_preemptions - offering.num_given)
    return preempted, passed_over, by_how
