"""What a gateway measures, composed: its counts, their seconds, the audit file, and vLLM's names for them."""

from collections.abc import Callable
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from distserve.bus.base import Bus, Watch
from distserve.status import Second
from distserve.worker import bus_metrics
from distserve_gateway.audit import Audit
from distserve_gateway.metrics import Metrics
from distserve_gateway.vllm_metrics import Preemptions, VllmMetrics
from distserve_gateway.windows import Windows
from distserve_gateway.workers import Workers

if TYPE_CHECKING:
    from distserve_gateway.gateway import GatewayOptions


async def open_measures(
    stack: AsyncExitStack,
    options: "GatewayOptions",
    bus: Bus,
    watch: Watch,
    workers: Workers,
    *,
    num_live: Callable[[], int],
    each_second: Callable[[], None],
) -> tuple[Metrics, Windows]:
    """Seconds are counted once Windows.run() runs. Raises ConfigError if the audit file can't be opened."""
    metrics = Metrics(options.model, num_live)
    metrics.troubles.service = options.gateway_id
    watch.on_event(metrics.troubles.on_event)
    metrics.show(lambda: bus_metrics.families(bus, {"model": options.model}))
    if options.vllm_metric_names:
        preemptions = Preemptions(workers.of_role("decode"))
        watch.on_event(preemptions.on_event)
        named = VllmMetrics(metrics, lambda: workers.of_role("prefill") + workers.of_role("decode"), preemptions)
        metrics.show(named.families)
    audit: Audit | None = None
    if options.audit_file:
        audit = await stack.enter_async_context(Audit(options.audit_file, options.gateway_id))

    def on_second(second: Second) -> None:
        each_second()
        if audit is not None:
            audit.write(second)

    windows = Windows(metrics, on_second)
    metrics.show(windows.families)
    return metrics, windows
