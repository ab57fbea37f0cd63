"""What the monitor's picture is made of: words, room, names of figures, samples."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distserve.monitor.fitting import Want, fit
from distserve.monitor.leaves import leaves, near
from distserve.monitor.samples import samples, selector
from distserve.monitor.words import age, cells, clean, interval, rate, seconds, share, sparkline
from distserve.status import ClusterStatus, FlowStatus, GatewayStatus
from tests.status_server import METRICS, busy_status


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "-"),
        (math.nan, "-"),
        (0.0, "0.00 us"),
        (0.0000123, "12.3 us"),
        (0.00412, "4.12 ms"),
        (0.0999499, "99.9 ms"),
        (0.0999501, "100 ms"),
        (0.9994, "999 ms"),
        (0.9996, "1.00 s"),
        (12.34, "12.3 s"),
        (205.0, "205 s"),
    ],
)
def test_seconds_have_three_digits(value: float | None, text: str) -> None:
    assert seconds(value) == text


@pytest.mark.parametrize(
    ("words", "value", "text"),
    [
        (rate, 0.0, "0"),
        (rate, 0.042, "0.04"),
        (rate, 3.421, "3.42"),
        (rate, 99.96, "100"),
        (rate, 12345.6, "12,346"),
        (share, 0.0, "0.0 %"),
        (share, 0.0012, "0.12 %"),
        (share, 0.4217, "42.2 %"),
        (share, 0.9999, "100 %"),
        (share, 1.0, "100 %"),
        (age, 7.9, "7 s"),
        (age, 3599.0, "59 min"),
        (age, 8040.0, "2 h"),
        (age, -3.0, "0 s"),
    ],
)
def test_numbers_are_short(words: object, value: float, text: str) -> None:
    assert callable(words)
    assert words(value) == text


@pytest.mark.parametrize(("text", "value"), [("500ms", 0.5), ("1s", 1.0), ("2m", 120.0), (" 1.5S ", 1.5)])
def test_intervals_have_units(text: str, value: float) -> None:
    assert interval(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "1", "s", "1h", "-1s", "0s", "10ms", "2h", "nans", "infs", "one s"])
def test_other_intervals_are_refused_with_what_would_do(text: str) -> None:
    with pytest.raises(ValueError, match="500ms, 1s or 2m"):
        interval(text)


def test_a_sparkline_shows_the_last_values_from_nothing_to_the_most() -> None:
    assert sparkline([9, 0, 1, 4, None, 8], 5) == "▁▁▄ █"
    assert sparkline([2, 2], 4) == "  ██"
    assert sparkline([0.0, None], 2) == "▁ "
    assert sparkline([1.0], 0) == ""


@given(st.lists(st.none() | st.floats(0, 1e9) | st.just(math.nan)), st.integers(0, 50))
def test_a_sparkline_is_as_wide_as_it_should_be(values: list[float | None], width: int) -> None:
    assert len(sparkline(values, width)) == width


@given(st.integers(0, 40), st.lists(st.floats(0, 1), max_size=4))
def test_a_bar_never_outgrows_its_place_and_shows_what_is_not_nothing(width: int, shares: list[float]) -> None:
    counts = cells(width, *shares)
    assert sum(counts) <= width
    assert all(count >= 0 for count in counts)
    if sum(shares) <= 1 and width >= len(shares) and sum(counts) < width:
        assert all(count > 0 for count, part in zip(counts, shares, strict=True) if part > 0)


@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(0, 9)), max_size=9).map(
        lambda found: [Want(min(a, b), max(a, b), rank) for a, b, rank in found]
    ),
    st.integers(0, 60),
)
def test_panes_get_what_they_need_or_nothing_and_the_important_ones_first(wants: list[Want], height: int) -> None:
    lines = fit(wants, height)
    assert sum(lines) <= height
    order = sorted(range(len(wants)), key=lambda i: wants[i].rank)
    for place, i in enumerate(order):
        assert lines[i] == 0 or wants[i].least <= lines[i] <= wants[i].most
        if not lines[i] and wants[i].least:  # what is placed before it leaves no room
            before = sum(wants[k].least for k in order[:place] if lines[k])
            assert before + wants[i].least > height
    if sum(w.most for w in wants) <= height:
        assert lines == [w.most for w in wants]


def test_a_less_important_pane_gives_way() -> None:
    wants = [Want(2, 5, 1), Want(3, 9, 0), Want(2, 2, 2)]
    assert fit(wants, 4) == [0, 4, 0]
    assert fit(wants, 5) == [2, 3, 0]
    assert fit(wants, 7) == [2, 3, 2]
    assert fit(wants, 8) == [2, 4, 2]


def test_texts_of_others_cannot_command_the_terminal() -> None:
    assert clean("a\x1b[2Jb\tc\nd\x07\u202e") == "a?[2Jb c d??"


def test_every_figure_of_a_status_has_a_name() -> None:
    found = leaves(busy_status())
    assert found["gateway.ttft.p99"] == pytest.approx(0.0412 * 3.3)
    assert found["gateway.classes.normal.attainment"] == pytest.approx(178 / 180)
    assert found["gateway.classes.batch.attainment"] is None
    assert found["gateway.routes_per_s.pair"] == 3.1
    assert found["gateway.bus_connected"] == 1
    assert found["services.decode-1.num_running"] == 4
    assert found["services.prefill-0.transports_in_use"] == "shm"
    assert found["tiers.hbm.hit_share"] == 0.4
    assert found["flows.shm.prefill.bytes_per_s"] == 9e7
    assert found["history.num_tokens"] == 412
    assert (found["warnings"], found["troubles"]) == (1, 1)


def test_flows_that_differ_in_their_mark_alone_have_names_of_their_own() -> None:
    flows = [FlowStatus(transport="tcp", traffic_class="prefill", dscp=dscp, num_bytes=dscp) for dscp in (10, 12)]
    empty = ClusterStatus(
        at_unix_s=0.0, interval_s=1.0, model="m", version="1", gateway=GatewayStatus(id="g", status="ok"), flows=flows
    )
    found = leaves(empty)
    assert (found["flows.tcp.prefill.num_bytes"], found["flows.tcp.prefill.12.num_bytes"]) == (10, 12)
    assert found["history.ttft_p99_s"] is None


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("gateway.ttft.p95", "gateway.ttft.p99"),
        ("gatway.ttft.p99", "gateway.ttft.p99"),
        ("services.decode-9.num_running", "services.decode-1.num_running"),
        ("num_live", "gateway.num_live"),
    ],
)
def test_what_may_have_been_meant_is_found(asked: str, meant: str) -> None:
    assert meant in near(asked, leaves(busy_status()))


def test_samples_are_read_with_their_labels() -> None:
    found = list(samples(METRICS))
    assert len(found) == 5
    assert selector("distserve_gateway_live_sequences").of(found)[0].value == 7.0
    both = selector('distserve_worker_running_sequences{role="decode"}').of(found)
    assert [s.value for s in both] == [3.0, 4.0]
    [one] = selector('distserve_worker_running_sequences{worker="decode-1", model="tiny"}').of(found)
    assert one.value == 4.0
    [odd] = selector("distserve_odd").of(found)
    assert (odd.labels["text"], odd.value) == ('a "b" \\ {c}, d=\n', 1.5e6)
    assert math.isnan(selector("distserve_not_there").of(found)[0].value)


@pytest.mark.parametrize("text", ["", "9a", "a{", 'a{b="c"', "a{b=c}", 'a{b!="c"}', "a b"])
def test_what_is_no_selector_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="name with labels"):
        selector(text)
