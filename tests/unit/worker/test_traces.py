"""A service's part in traces, around its life."""

import pytest

from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.config import TelemetryConfig
from distserve.telemetry import begin, finish, holds_spans, is_tracing, is_undecided, setup_tracing
from distserve.worker.traces import following_kept_traces, traced
from tests.otlp import Receiver


@pytest.mark.parametrize(
    ("ratio", "failures", "undecided"), [(1.0, True, False), (0.0, True, True), (0.0, False, False)]
)
def test_a_service_is_traced_as_its_settings_say(ratio: float, failures: bool, undecided: bool) -> None:
    with Receiver() as receiver:
        config = TelemetryConfig(otlp_endpoint=receiver.url, trace_ratio=ratio, trace_failures=failures)
        with traced("kvstore", "kvstore-1", config):
            assert holds_spans() is failures
            span = begin("s", kind="server")
            assert is_undecided(span) is undecided
            finish(span)
        assert not is_tracing()
        assert len(receiver.spans()) == (1 if ratio else 0)
        assert {s.resource["service.name"] for s in receiver.spans()} <= {"distserve-kvstore"}


def test_off_it_sets_nothing_up() -> None:
    with traced("decode", "decode-1", TelemetryConfig()):
        assert not is_tracing()


async def test_it_listens_only_where_spans_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    async with MemoryBus(MemoryHub(), name="x", registry_ttl_s=2.5) as bus:
        asked: list[str] = []
        subscribe = bus.subscribe

        async def noting(subject: str, *args: object, **options: object) -> object:
            asked.append(subject)
            return await subscribe(subject, *args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(bus, "subscribe", noting)
        async with following_kept_traces(bus):
            assert asked == []
        end = setup_tracing("x", "http://127.0.0.1:9", ratio=0.0)
        try:
            async with following_kept_traces(bus):
                assert asked == ["distserve.v1.events.traces"]
        finally:
            end()
