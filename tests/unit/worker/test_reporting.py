"""A report as a message of the bus: what does not fit is left out, and said."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from distserve.bus.memory import MemoryBus, MemoryHub
from distserve.messages import ReportReply, ReportRequest, TrafficClass, WorkerInfo, decode_as, encode
from distserve.transport.meter import Flow, Tally
from distserve.worker import reporting
from distserve.worker.report import Report
from distserve.worker.reporting import LEFT_OUT, fitted, shortened


def report(num_peers: int) -> Report:
    traffic_class: TrafficClass = "decode"
    flows = {Flow("sent", "tcp", traffic_class, f"decode-{i}"): Tally(1, i, 0.5) for i in range(num_peers)}
    in_use = {f"decode-{i}": {"tcp": "no faster one reaches it"} for i in range(num_peers)}
    return Report(
        info=WorkerInfo(worker_id="p0", role="prefill", model="tiny", status="ok"),
        bus_connected=True,
        flows=flows,
        in_use=in_use,
    )


def samples(exposition: bytes) -> dict[str, float]:
    families = text_string_to_metric_families(exposition.decode())
    return {f"{s.name}{s.labels}": s.value for family in families for s in family.samples}


def test_a_small_report_is_whole() -> None:
    reply = reporting.in_words(report(3), 1024 * 1024)
    assert LEFT_OUT not in reply.exposition.decode()
    assert sum("distserve_transfer_bytes_total" in name for name in samples(reply.exposition)) == 3
    assert msgspec.json.decode(reply.health)["status"] == "ok"


@pytest.mark.parametrize("max_payload_bytes", [16 * 1024, 64 * 1024, 256 * 1024])
def test_a_large_one_fits_and_says_what_is_missing(max_payload_bytes: int) -> None:
    reply = reporting.in_words(report(2000), max_payload_bytes)
    assert len(encode(reply)) <= max_payload_bytes
    found = samples(reply.exposition)
    assert found[f"{LEFT_OUT}{{}}"] > 0
    assert any(name.startswith("distserve_worker_free_blocks") for name in found)  # the small ones stay
    assert "# Left out, since a message of the bus holds no more" in reply.exposition.decode()
    assert "distserve_transfer" in reply.exposition.decode().split("# Left out", 1)[1]
    health = msgspec.json.decode(reply.health)
    assert (health["status"], health["role"]) == ("ok", "prefill")
    assert "did not fit" in health["reasons"][0]


@given(st.lists(st.integers(min_value=0, max_value=40), min_size=1, max_size=30), st.integers(3000, 9000))
def test_whatever_the_sizes_it_fits_and_whole_families_stay(sizes: list[int], most: int) -> None:
    text = b"".join(
        b"# TYPE f%d gauge\n" % i + b"".join(b'f%d{n="%d"} 1\n' % (i, n) for n in range(size))
        for i, size in enumerate(sizes)
    )
    short = shortened(text, most)
    assert len(short) <= most
    left = samples(short)
    missing = [i for i, size in enumerate(sizes) if sum(name.startswith(f"f{i}{{") for name in left) != size]
    assert all(not any(name.startswith(f"f{i}{{") for name in left) for i in missing)
    assert bool(missing) == (short != text)
    assert short == text or len(text) > most


def test_the_health_alone_may_be_too_large() -> None:
    reply = fitted(b"", msgspec.json.encode({"status": "ok", "reasons": ["x" * 9000]}), 16 * 1024)
    assert len(encode(reply)) < 5000
    assert msgspec.json.decode(reply.health)["status"] == "ok"


async def test_a_reply_fits_the_bus_that_carries_it() -> None:
    hub = MemoryHub(max_payload_bytes=32 * 1024)
    bus, asker = (MemoryBus(hub, name=name, registry_ttl_s=2.5) for name in ("p0", "gateway"))

    async def answer(delivery: object) -> bytes:
        return encode(await reporting.reply(lambda: report(2000), bus))

    async with bus, asker, await bus.serve("x", answer):
        data = await asker.request("x", encode(ReportRequest()), timeout_s=5.0)
    assert decode_as(ReportReply, data).exposition.startswith(b"# HELP")
