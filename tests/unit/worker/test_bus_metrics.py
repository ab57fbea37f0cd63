"""What every service shows of its bus."""

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric
from prometheus_client.parser import text_string_to_metric_families

import distserve
from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.worker import bus_metrics

LABELS = {"role": "decode", "model": "tiny"}


def values(families: tuple[Metric, ...]) -> dict[str, float]:
    class _Shown:
        def collect(self) -> tuple[Metric, ...]:
            return families

    registry = CollectorRegistry()
    registry.register(_Shown())
    found = {}
    for family in text_string_to_metric_families(generate_latest(registry).decode()):
        for sample in family.samples:
            assert sample.labels == LABELS, sample.name
            found[sample.name.removeprefix("distserve_bus_")] = sample.value
    return found


async def test_it_shows_what_went_wrong_and_what_waits() -> None:
    hub = MemoryHub()
    async with MemoryBus(hub) as bus:
        bus.stats.slow_consumer_drops, bus.stats.permission_denials = 3, 4
        bus.stats.callback_errors, bus.stats.errors = 5, 6
        hub.cut(bus)
        await bus.publish("a.b", bytes(70))
        assert values(bus_metrics.families(bus, LABELS)) == {
            "connected": 0,
            "pending_messages": 1,
            "pending_bytes": 70,
            "reconnects_total": 0,
            "dropped_messages_total": 3,
            "permission_denials_total": 4,
            "callback_errors_total": 5,
            "errors_total": 6,
        }
        hub.heal(bus)
        after = values(bus_metrics.families(bus, LABELS))
        assert (after["connected"], after["reconnects_total"], after["pending_bytes"]) == (1, 1, 0)


def test_the_version_is_told() -> None:
    (sample,) = bus_metrics.build_info("decode").samples
    assert sample.labels == {"version": distserve.__version__, "role": "decode"}
    assert (sample.name, sample.value) == ("distserve_build_info", 1)
