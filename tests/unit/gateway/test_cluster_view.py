"""GET /status and GET /metrics/cluster, over services that tell what the test wants."""

import asyncio
import time

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from distserve.messages import Endpoint, Load, PassSpeed
from distserve_gateway import cluster_view, gathering
from tests.unit.gateway.reporting_services import LAYOUT, Reporting, looking
from tests.waiting import until

BLOCK_BYTES = 2 * 2 * 16 * 8 * 4  # of LAYOUT


@pytest.fixture
def always_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each look gathers, without waiting for a second to pass."""
    monkeypatch.setattr(cluster_view, "FRESH_S", 0.0)


def worker(role: str = "decode", **figures: float) -> Reporting:
    made = Reporting("d0", "decode") if role == "decode" else Reporting("p0", "prefill")
    made.figures = {f"distserve_{name}": value for name, value in figures.items()}
    return made


async def test_everybody_of_the_registry_is_there_in_the_order_a_request_meets_them() -> None:
    async with looking(Reporting("k0", "kvstore"), Reporting("d0", "decode"), Reporting("p0", "prefill")) as look:
        status = await look.status()
    assert [(s.id, s.role, s.reached) for s in status.services] == [
        ("gw", "gateway", True),
        ("p0", "prefill", True),
        ("d0", "decode", True),
        ("k0", "kvstore", True),
    ]
    assert status.services[0].num_running == 2  # its own, asked for without the bus
    assert (status.interval_s, status.window_s) == (0.0, 0.0)  # the first look
    assert (status.model, status.gateway.id, len(status.history), status.troubles[0].code) == (
        "tiny",
        "gw",
        1,
        "worker_lost",
    )


async def test_many_viewers_cost_as_one_and_nobody_looking_costs_nothing() -> None:
    service = worker()
    async with looking(service) as look:
        await asyncio.sleep(0.05)
        assert service.num_asked == 0
        began = time.monotonic()
        answers = await asyncio.gather(*(look.view.status() for _ in range(50)), look.view.exposition())
        again = await look.view.status()
        if time.monotonic() - began < cluster_view.FRESH_S:
            assert service.num_asked == 1
            assert {*answers[:50]} == {again}
        await until(lambda: time.monotonic() - began > cluster_view.FRESH_S + 0.05)
        assert await look.view.status() != again
        assert service.num_asked == 2


async def test_a_viewer_that_goes_away_takes_nothing_from_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    service = worker()
    async with looking(service) as look:
        leaves, stays = asyncio.create_task(look.view.status()), asyncio.create_task(look.view.status())
        await asyncio.sleep(0)
        leaves.cancel()
        assert b'"d0"' in await stays
        assert leaves.cancelled() or (await asyncio.wait({leaves}))
        assert service.num_asked == 1


async def test_rates_are_differences_to_the_look_before_and_a_restart_begins_at_0(always_anew: None) -> None:
    service = worker(worker_batch_tokens_sum=1000.0, preemptions_total=0.0)
    async with looking(service) as look:
        assert (await look.service("d0")).tokens_per_s == 0.0
        for before, now, grown in ((1000.0, 1600.0, 600.0), (1600.0, 1600.0, 0.0), (1600.0, 50.0, 50.0)):
            assert service.figures["distserve_worker_batch_tokens_sum"] == before
            service.figures["distserve_worker_batch_tokens_sum"] = now
            await asyncio.sleep(0.02)
            status = await look.status()
            found = next(s for s in status.services if s.id == "d0")
            assert status.interval_s > 0.01
            # The service's answer comes some time after the gathering's beginning.
            assert found.tokens_per_s * status.interval_s == pytest.approx(grown, rel=0.5)


async def test_a_look_at_figures_that_were_looked_at_says_the_same_again() -> None:
    """When the event loop is late, figures are gathered some time after the look that they are for has begun. So they
    are still fresh when the next look begins."""
    service = worker(worker_batch_tokens_sum=1000.0)
    async with looking(service) as look:
        status, gathered = look.view._status, look.view._gathered
        await look.status()
        status._began -= cluster_view.FRESH_S
        gathered._began -= cluster_view.FRESH_S
        service.figures["distserve_worker_batch_tokens_sum"] = 1600.0
        first = await look.view.status()
        rate = (await look.service("d0")).tokens_per_s
        assert rate > 0
        status._began -= cluster_view.FRESH_S
        assert await look.view.status() == first
        assert (await look.service("d0")).tokens_per_s == rate
        assert service.num_asked == 2


@pytest.mark.parametrize(
    ("figure", "url"),
    [("nan", ""), ("+Inf", ""), ("1e308", ""), ("7", "http://[::1"), ("7", "http://::1]:80/"), ("7", "x")],
)
async def test_one_service_that_says_what_is_none_spoils_it_for_nobody(figure: str, url: str) -> None:
    odd, good = worker(worker_running_sequences=float(figure)), worker("prefill", worker_running_sequences=5.0)
    odd.figures |= {'distserve_worker_blocks{state="cached"}': float(figure), "distserve_worker_total_blocks": 1e300}
    async with looking(odd, good) as look:
        endpoint = Endpoint(kind="tcp", host="h", address=url.removeprefix("http://"))
        told = msgspec.structs.replace(odd.info(), http_url=url, endpoints=[endpoint], host_key="0123456789")
        await look.bus.registry().put(told)
        await asyncio.sleep(0)
        found = {s.id: s for s in (await look.status()).services}
    assert (found["p0"].num_running, found["d0"].reached) == (5, True)
    assert found["d0"].num_running == (7 if figure == "7" else 0)
    assert found["d0"].host in ("01234567", "x")


@pytest.mark.parametrize(("num_packets", "share"), [(9_999.0, None), (10_000.0, 0.003)])
async def test_too_few_packets_tell_nothing(always_anew: None, num_packets: float, share: float | None) -> None:
    prefill = worker("prefill")
    prefill.figures = {
        'distserve_transfer_bytes_total{direction="sent",transport="tcp",traffic_class="decode",peer="d0"}': 1.0,
        'distserve_transport_packets_total{transport="tcp"}': 0.0,
        'distserve_transport_retransmitted_packets_total{transport="tcp"}': 0.0,
    }
    async with looking(prefill) as look:
        await look.status()
        prefill.figures['distserve_transport_packets_total{transport="tcp"}'] = num_packets
        prefill.figures['distserve_transport_retransmitted_packets_total{transport="tcp"}'] = 30.0
        status = await look.status()
    assert status.flows[0].retransmitted_share == share
    assert [w.rule for w in status.warnings] == ([] if share is None else ["retransmissions"])


async def test_shares_and_means_are_of_the_whole_window(always_anew: None) -> None:
    service = worker(prompt_tokens_total=0.0, cached_prompt_tokens_total=0.0)
    phase = '{phase="decode"}'
    async with looking(service) as look:
        await look.status()
        for step in (1, 2, 3):
            service.figures |= {
                "distserve_prompt_tokens_total": 100.0 * step,
                "distserve_cached_prompt_tokens_total": 25.0 * step,
                f"distserve_worker_pass_seconds_sum{phase}": 0.2 * step,
                f"distserve_worker_pass_seconds_count{phase}": 10.0 * step,
                f"distserve_worker_batch_sequences_sum{phase}": 40.0 * step,
                f"distserve_worker_batch_sequences_count{phase}": 10.0 * step,
            }
            await asyncio.sleep(0.01)
            found = await look.service("d0")
            assert found.num_prompt_tokens == 100 * step
            assert found.kv_hit_rate == pytest.approx(0.25)
        assert found.step_s == pytest.approx(0.02)
        assert found.mean_batch == pytest.approx(4.0)


async def test_what_is_older_than_the_window_is_forgotten_but_for_the_last(
    always_anew: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster_view, "WINDOW_S", 0.05)
    service = worker(prompt_tokens_total=0.0)
    async with looking(service) as look:
        for step in (1, 2, 3):
            await look.status()
            await asyncio.sleep(0.06)
            service.figures["distserve_prompt_tokens_total"] = 100.0 * step
        status = await look.status()
    assert next(s for s in status.services if s.id == "d0").num_prompt_tokens == 100  # since the look before
    assert status.window_s == status.interval_s > 0.05


async def test_one_that_does_not_answer_shows_what_the_registry_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "ANSWER_S", 0.2)
    load = Load(num_running=3, num_waiting=2, num_waiting_tokens=70, free_blocks=40, total_blocks=100)
    slow, wrong = Reporting("d0", "decode", load=load, answers="never"), Reporting("d1", "decode", answers="wrongly")
    broken = Reporting("p0", "prefill", answers="unreadably")
    async with looking(slow, wrong, broken) as look:
        began = time.monotonic()
        status = await look.status()
        assert time.monotonic() - began < 1.0  # all were asked at once
    by_id = {s.id: s for s in status.services}
    assert {i: s.reached for i, s in by_id.items()} == {"gw": True, "d0": False, "d1": False, "p0": False}
    found = by_id["d0"]
    assert (found.num_running, found.num_waiting, found.num_waiting_tokens) == (3, 2, 70)
    assert (found.free_blocks, found.total_blocks, found.status) == (40, 100, "ok")
    assert "did not answer" in found.reasons[-1]
    assert "does not know this message" in by_id["d1"].reasons[-1]
    assert {w.rule for w in status.warnings} == {"degraded"}


async def test_a_gateway_that_is_cut_off_from_the_bus_still_shows_what_it_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "ANSWER_S", 0.2)
    async with looking(worker()) as look:
        look.bus.hub.cut(look.bus)
        status = await look.status()
        assert {s.id: s.reached for s in status.services} == {"gw": True, "d0": False}
        look.bus.hub.heal(look.bus)


async def test_what_it_says_itself_counts_more_than_its_last_beat() -> None:
    service = worker(
        worker_running_sequences=5.0, worker_free_blocks=10.0, worker_total_blocks=20.0, report_left_out_bytes=77.0
    )
    service.load = Load(num_running=1, free_blocks=19, total_blocks=20)
    service.figures['distserve_worker_blocks{state="cached"}'] = 4.0
    service.health = {"status": "degraded", "reasons": ["its disk is full"], "gpu_util": 0.5, "more": [1]}
    async with looking(service) as look:
        found = await look.service("d0")
    assert (found.num_running, found.free_blocks, found.cached_blocks, found.gpu_util) == (5, 10, 4, 0.5)
    assert (found.status, found.reasons[0]) == ("degraded", "its disk is full")
    assert "77 bytes of its figures did not fit" in found.reasons[1]


async def test_a_decode_step_is_told_beside_what_prefill_would_take_even_when_prefill_idles(always_anew: None) -> None:
    prefill = worker("prefill")
    prefill.load = Load(speed=PassSpeed(pass_s=0.01, token_s=0.001))
    decode = worker()
    phase = '{phase="decode"}'
    names = [f"distserve_worker_{name}{phase}" for name in ("pass_seconds_sum", "pass_seconds_count")]
    names += [f"distserve_worker_batch_sequences_{name}{phase}" for name in ("sum", "count")]
    async with looking(prefill, decode) as look:
        for step in (0, 1, 2):
            decode.figures = dict(zip(names, (0.6 * step, 10.0 * step, 50.0 * step, 10.0 * step), strict=True))
            status = await look.status()
            if step == 1:  # an idle worker's beat tells no speed
                await look.bus.registry().put(Reporting("p0", "prefill").info())
                await asyncio.sleep(0.05)
    found = next(s for s in status.services if s.id == "d0")
    assert found.step_s == pytest.approx(0.06)
    assert found.mean_batch == pytest.approx(5.0)
    assert found.prompt_pass_s == pytest.approx(0.015)
    assert [w.rule for w in status.warnings] == ["add_decode"]


async def test_tiers_and_flows_are_summed_over_services(always_anew: None) -> None:
    sent = 'distserve_transfer_bytes_total{direction="sent",transport="tcp",traffic_class="decode",peer="%s"}'
    prefill, decode = worker("prefill", worker_total_blocks=100.0, worker_free_blocks=90.0), worker()
    store = Reporting("k0", "kvstore")
    packets = {'distserve_transport_packets_total{transport="tcp"}': 0.0}
    packets |= {'distserve_transport_retransmitted_packets_total{transport="tcp"}': 0.0}
    prefill.figures |= {sent % "d0": 1000.0, sent % "d1": 500.0, 'distserve_worker_blocks{state="cached"}': 30.0}
    prefill.figures |= packets
    decode.figures = {(sent % "p0").replace("sent", "received"): 1500.0}  # the same bytes, told from the other side
    store.figures = {
        'distserve_kvstore_blocks{tier="disk"}': 7.0,
        'distserve_kvstore_bytes{tier="disk"}': 700.0,
        'distserve_kvstore_capacity_bytes{tier="disk"}': 9000.0,
        'distserve_kvstore_hit_blocks_total{tier="disk"}': 0.0,
        "distserve_kvstore_looked_up_blocks_total": 0.0,
    }
    async with looking(prefill, decode, store) as look:
        await look.status()
        prefill.figures[sent % "d0"] = 2000.0
        prefill.figures |= dict(zip(packets, (20_000.0, 60.0), strict=True))
        store.figures['distserve_kvstore_hit_blocks_total{tier="disk"}'] = 3.0
        store.figures["distserve_kvstore_looked_up_blocks_total"] = 12.0
        await asyncio.sleep(0.02)
        status = await look.status()
    pools, disk = status.tiers
    assert (pools.tier, pools.num_blocks, pools.num_bytes) == ("hbm", 40, 40 * BLOCK_BYTES)
    assert pools.capacity_bytes == 100 * BLOCK_BYTES
    assert (disk.tier, disk.num_blocks, disk.num_bytes, disk.capacity_bytes, disk.hit_share) == (
        "disk",
        7,
        700,
        9000,
        0.25,
    )
    (flow,) = status.flows
    assert (flow.transport, flow.traffic_class, flow.dscp, flow.num_bytes) == ("tcp", "decode", 48, 2500)
    assert flow.bytes_per_s * status.interval_s == pytest.approx(1000, rel=0.5)
    assert flow.retransmitted_share == pytest.approx(0.003)
    assert [w.rule for w in status.warnings] == ["retransmissions"]
    assert LAYOUT.block_size == 16


async def test_all_samples_in_one_exposition_and_who_could_not_be_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "ANSWER_S", 0.2)
    one, silent = worker("prefill", worker_free_blocks=3.0), Reporting("d0", "decode", answers="never")
    async with looking(one, silent) as look:
        text = (await look.view.exposition()).decode()
    found = {
        (s.name, s.labels["service"], s.labels["service_role"]): s.value
        for family in text_string_to_metric_families(text)
        for s in family.samples
    }
    assert found == {
        ("distserve_worker_free_blocks", "p0", "prefill"): 3.0,
        ("distserve_gateway_live_sequences", "gw", "gateway"): 2.0,
        ("distserve_service_reached", "gw", "gateway"): 1.0,
        ("distserve_service_reached", "p0", "prefill"): 1.0,
        ("distserve_service_reached", "d0", "decode"): 0.0,
    }


async def test_large_expositions_let_tokens_pass_between_their_slices() -> None:
    taken: list[str] = []
    turns = 0

    async def tokens() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(tokens())
    await gathering.in_slices(b"x 1\n" * 10_000, taken.extend)
    task.cancel()
    assert taken == ["x 1"] * 10_000 + [""]
    assert turns >= 10_000 / gathering.SLICE_LINES


async def test_a_failed_gathering_is_told_and_the_next_begins_anew() -> None:
    async with looking() as look:
        own = look.view._own
        look.view._own = None  # type: ignore[assignment]
        with pytest.raises(AttributeError):
            await look.view.status()
        look.view._own = own
        assert (await look.status()).gateway.id == "gw"
